//! The outcomes as a table and as JSON.

use std::time::Duration;

use serde_json::{Value, json};

use super::mutation::Mutation;
use super::trial::Verdict;
use crate::step::seconds;
use crate::table;

/// One mutation and what became of it.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) mutation: &'static Mutation,
    pub(crate) verdict: Verdict,
    /// Build and run.
    pub(crate) elapsed: Duration,
}

/// The table, how many were noticed, and each fault that was not.
pub(crate) fn text(outcomes: &[Outcome]) -> String {
    let row = |Outcome { mutation, verdict, elapsed }: &Outcome| {
        [mutation.name.to_owned(), mutation.kind.to_owned(), mutation.tests.to_string(), seconds(*elapsed), {
            verdict.to_string()
        }]
    };
    let rows: Vec<[String; 5]> = outcomes.iter().map(row).collect();
    let mut text = table::layout(["mutation", "kind", "tests", "time", "result"], &rows);
    let num_noticed = outcomes.iter().filter(|outcome| outcome.verdict.is_noticed()).count();
    text.push_str(&format!("\n\n{num_noticed} of {} mutations were noticed", outcomes.len()));
    for Outcome { mutation, verdict, .. } in outcomes.iter().filter(|outcome| !outcome.verdict.is_noticed()) {
        let Mutation { name, file, breaks, .. } = mutation;
        text.push_str(&format!("\n{name}, in {file} ({breaks}): {verdict}"));
    }
    text
}

/// One object a mutation.
pub(crate) fn json(outcomes: &[Outcome]) -> Value {
    let object = |Outcome { mutation, verdict, elapsed }: &Outcome| {
        let (result, noticed_by) = match verdict {
            Verdict::Noticed(by) => ("noticed", by.as_slice()),
            Verdict::Hung => ("hung", &[][..]),
            Verdict::Survived => ("survived", &[][..]),
            Verdict::DoesNotCompile(_) => ("does not compile", &[][..]),
        };
        json!({
            "name": mutation.name,
            "kind": mutation.kind,
            "file": mutation.file,
            "breaks": mutation.breaks,
            "tests": mutation.tests.to_string(),
            "result": result,
            "noticed_by": noticed_by,
            "seconds": (elapsed.as_secs_f64() * 10.0).round() / 10.0,
        })
    };
    outcomes.iter().map(object).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mutate::mutation;

    fn outcomes() -> Vec<Outcome> {
        let verdicts = [Verdict::Noticed(vec!["oracle".to_owned(), "poison".to_owned()]), Verdict::Survived];
        let outcome = |(mutation, verdict)| Outcome { mutation, verdict, elapsed: Duration::from_millis(2340) };
        mutation::all().zip(verdicts).map(outcome).collect()
    }

    #[test]
    fn the_table_counts_and_names_what_was_missed() {
        let outcomes = outcomes();
        let text = text(&outcomes);
        assert!(text.contains("1 of 2 mutations were noticed"), "{text}");
        assert!(text.contains("noticed by oracle and 1 more"), "{text}");
        let missed = outcomes[1].mutation;
        assert!(text.ends_with(&format!("({}): no test failed", missed.breaks)), "{text}");
    }

    #[test]
    fn json_has_every_check_that_noticed() {
        let json = json(&outcomes());
        assert_eq!(json[0]["noticed_by"], json!(["oracle", "poison"]));
        assert_eq!((&json[0]["seconds"], &json[1]["result"]), (&json!(2.3), &json!("survived")));
    }
}

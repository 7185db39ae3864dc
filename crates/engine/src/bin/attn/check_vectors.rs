//! `attn check-vectors`: backends against published numbers.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use attn_sparse::vectors::CaseOutcome;
use engine::report::error_chain;
use engine::vectors::{Checked, check_vectors};
use serde_json::json;

use super::{Failure, Outcome, output};

/// Options of `check-vectors`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The vectors: a JSON file of block-sparse attention, selection, union and configuration cases
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Attention backend; default: every one that computes what the vectors are of
    #[arg(long, value_name = "NAME")]
    attention_backend: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command. Exit 1 where a case fails.
pub fn run(args: &Args) -> Result<Outcome> {
    let named = || args.file.display().to_string();
    let text = fs::read_to_string(&args.file).map_err(Failure::input).with_context(named)?;
    let checked =
        check_vectors(&text, args.attention_backend.as_deref()).map_err(Failure::input).with_context(named)?;
    if args.json {
        output::write_json(&checked.iter().map(to_json).collect::<Vec<_>>())?;
    } else {
        output::write(&checked.iter().map(to_text).collect::<String>())?;
    }
    let has_failed = checked.iter().flat_map(|c| &c.cases).any(|c| matches!(c.outcome, CaseOutcome::Failed(_)));
    Ok(if has_failed { Outcome::CheckFailed } else { Outcome::Success })
}

/// A line for each backend, and one for each case that did not pass.
fn to_text(checked: &Checked) -> String {
    let mut lines = String::new();
    let mut counts = [0usize; 3];
    for case in &checked.cases {
        let (place, what) = match &case.outcome {
            CaseOutcome::Passed => (0, None),
            CaseOutcome::Refused(why) => (1, Some(format!("refused: {why}"))),
            CaseOutcome::Failed(failure) => (2, Some(format!("FAILED: {}", error_chain(failure)))),
        };
        counts[place] += 1;
        if let Some(what) = what {
            lines.push_str(&format!("  {}: {what}\n", case.name));
        }
    }
    let [passed, refused, failed] = counts;
    format!("{}: {passed} passed, {refused} refused, {failed} failed\n{lines}", checked.name)
}

fn to_json(checked: &Checked) -> serde_json::Value {
    let case = |case: &attn_sparse::vectors::CaseReport| match &case.outcome {
        CaseOutcome::Passed => json!({ "case": case.name, "outcome": "passed" }),
        CaseOutcome::Refused(why) => json!({ "case": case.name, "outcome": "refused", "why": why }),
        CaseOutcome::Failed(failure) => {
            json!({ "case": case.name, "outcome": "failed", "why": error_chain(failure) })
        }
    };
    json!({ "backend": checked.name, "cases": checked.cases.iter().map(case).collect::<Vec<_>>() })
}

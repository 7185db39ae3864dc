//! `cargo xtask mutate`: plants faults in a copy of the workspace, one at a time, and demands that tests notice each.
//!
//! The faults are data (`mutation`, `kernel_faults`, `waist_faults`, `family_faults`); the copy lies under `target/mutants`
//! (`tree`) and has a target folder of its own, so that builds are incremental from fault to fault (`trial`).
//! Before the first fault the tests must pass without one: a test that always fails would notice everything.

mod family_faults;
mod kernel_faults;
mod mutation;
mod report;
mod tree;
mod trial;
mod waist_faults;

use std::io::{self, IsTerminal};
use std::time::Duration;

use anyhow::{Result, bail};

use crate::step::{seconds, spinner};
use crate::workspace::Workspace;
use mutation::{Mutation, Tests};
use report::Outcome;
use tree::Tree;
use trial::{Bench, Verdict};

/// Options of `mutate`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only the mutations whose name contains this; may be given several times
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Go on after a mutation that survived
    #[arg(long)]
    keep_going: bool,
    /// Run the suite to its end for each mutation, to list every check that notices it
    #[arg(long)]
    every_check: bool,
    /// The outcomes as JSON in place of the table
    #[arg(long)]
    json: bool,
    /// Seconds that one run of the tests may take; a hang counts as noticed
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    timeout: u64,
}

/// Runs the mutations; true where the tests noticed each.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<bool> {
    let mutations = chosen(&args.only)?;
    let tree = Tree::copy(workspace, args.every_check)?;
    let bench = Bench::new(workspace, &tree, Duration::from_secs(args.timeout));
    require_sound(&bench, &mutations)?;
    let mut outcomes = Vec::new();
    for (idx, mutation) in mutations.iter().enumerate() {
        let position = format!("[{}/{}] {}", idx + 1, mutations.len(), mutation.name);
        let (verdict, elapsed) = with_progress(&position, || {
            let _planted = tree.plant(mutation)?;
            bench.run(mutation.tests)
        })?;
        outcomes.push(Outcome { mutation, verdict, elapsed });
        if !args.keep_going && outcomes.last().is_some_and(|outcome| !outcome.verdict.is_noticed()) {
            break;
        }
    }
    if args.json {
        println!("{:#}", report::json(&outcomes));
    } else {
        println!("\n{}", report::text(&outcomes));
    }
    Ok(outcomes.len() == mutations.len() && outcomes.iter().all(|outcome| outcome.verdict.is_noticed()))
}

/// The mutations whose name contains one of `parts`; all where there is none.
fn chosen(parts: &[String]) -> Result<Vec<&'static Mutation>> {
    if let Some(unknown) = parts.iter().find(|part| !mutation::all().any(|m| m.name.contains(*part))) {
        bail!("no mutation has {unknown:?} in its name");
    }
    let is_chosen = |m: &&Mutation| parts.is_empty() || parts.iter().any(|part| m.name.contains(part));
    Ok(mutation::all().filter(is_chosen).collect())
}

/// Runs what the mutations need once without a fault.
fn require_sound(bench: &Bench<'_>, mutations: &[&Mutation]) -> Result<()> {
    for tests in Tests::ALL.iter().copied().filter(|tests| mutations.iter().any(|m| m.tests == *tests)) {
        let (verdict, _) = with_progress(&format!("without a fault: {tests}"), || bench.run(tests))?;
        if verdict != Verdict::Survived {
            bail!("{tests} must pass without a fault, and did not: {verdict}\nthe output is in {}", bench.shown_log());
        }
    }
    Ok(())
}

/// Shows that `work` runs: a moving line on a terminal, one line at its end anywhere.
fn with_progress(what: &str, work: impl FnOnce() -> Result<(Verdict, Duration)>) -> Result<(Verdict, Duration)> {
    let bar = io::stderr().is_terminal().then(|| spinner(what));
    let result = work();
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    if let Ok((verdict, elapsed)) = &result {
        eprintln!("== {what}: {verdict} ({})", seconds(*elapsed));
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mutations_are_chosen_by_a_part_of_their_name() {
        let choose = |parts: &[&str]| chosen(&parts.iter().map(|part| (*part).to_owned()).collect::<Vec<_>>());
        assert_eq!(choose(&[]).expect("all").len(), mutation::all().count());
        let some = choose(&["window", "lease-leaks"]).expect("some");
        assert!(some.len() > 2 && some.iter().all(|m| m.name.contains("window") || m.name == "lease-leaks"));
        assert!(choose(&["window", "no such mutation"]).is_err());
    }
}

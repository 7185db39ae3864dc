//! `cargo xtask check`: what a change must pass before it is merged.
//!
//! All steps share one profile and one feature set, so that no dependency is built twice. The kernels are
//! compiled while the other steps run and waited for last.

use std::time::Duration;

use anyhow::Result;

use crate::step::{Background, Outcome, Step, seconds};
use crate::table;
use crate::workspace::Workspace;

/// The step that runs beside the others.
const KERNELS: [&str; 3] = ["xtask", "kernels", "--check"];

/// Options of `check`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only formatting, lints, and the layering and hygiene tests
    #[arg(long)]
    quick: bool,
    /// Run the later steps, and the later test binaries, after a failure
    #[arg(long)]
    keep_going: bool,
}

/// Runs the steps and prints the table; true where all passed.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<bool> {
    let steps = steps(args);
    let mut kernels = (!args.quick).then(|| Background::start(workspace, &KERNELS)).transpose()?;
    let mut results = Vec::new();
    for (step_idx, step) in steps.iter().enumerate() {
        let has_failed = results.iter().any(|(_, outcome, _)| *outcome == Outcome::Failed);
        let position = format!("[{}/{}]", step_idx + 1, steps.len());
        let (outcome, elapsed) = match kernels.take_if(|_| step.args == KERNELS) {
            _ if has_failed && !args.keep_going => (Outcome::NotRun, Duration::ZERO),
            Some(running) => running.finish(step, &position)?,
            None => step.run(workspace, &position)?,
        };
        results.push((step, outcome, elapsed));
    }
    println!("\n{}", report(&results));
    Ok(results.iter().all(|(_, outcome, _)| *outcome == Outcome::Passed))
}

fn steps(args: &Args) -> Vec<Step> {
    let step = |name, args: &[&'static str]| Step { name, env: &[], args: args.to_vec() };
    let mut steps = vec![
        step("fmt", &["fmt", "--all", "--", "--check"]),
        step("clippy", &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]),
    ];
    if args.quick {
        // The whole workspace is selected for its features, the targets for what is built: no engine, no model.
        steps.push(step("structure", &["test", "--workspace", "--test", "layering", "--test", "hygiene"]));
    } else {
        let docs = step("docs", &["doc", "--workspace", "--no-deps"]);
        steps.push(Step { env: &[("RUSTDOCFLAGS", "-D warnings")], ..docs });
        steps.push(step("tests", &["test", "--workspace"]));
        steps.push(step("kernels", &KERNELS));
    }
    if args.keep_going {
        steps.iter_mut().filter(|step| step.args[0] == "test").for_each(|step| step.args.push("--no-fail-fast"));
    }
    steps
}

/// The table, and under it the command to repeat each step that failed.
fn report(results: &[(&Step, Outcome, Duration)]) -> String {
    let row = |(step, outcome, elapsed): &(&Step, Outcome, Duration)| {
        let time = if *outcome == Outcome::NotRun { "-".to_owned() } else { seconds(*elapsed) };
        [step.name.to_owned(), time, outcome.to_string()]
    };
    let rows: Vec<[String; 3]> = results.iter().map(row).collect();
    let mut text = table::layout(["step", "time", "result"], &rows);
    for (step, outcome, _) in results {
        if *outcome == Outcome::Failed {
            text.push_str(&format!("\nto repeat {}: {step}", step.name));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(quick: bool) -> Vec<&'static str> {
        steps(&Args { quick, keep_going: false }).iter().map(|step| step.name).collect()
    }

    #[test]
    fn the_gate_has_five_steps_and_the_quick_one_builds_no_engine() {
        assert_eq!(names(false), ["fmt", "clippy", "docs", "tests", "kernels"]);
        assert_eq!(names(true), ["fmt", "clippy", "structure"]);
        // All kernels, and none compared by the hash of its sources alone.
        assert_eq!(KERNELS, ["xtask", "kernels", "--check"]);
    }

    #[test]
    fn keep_going_reaches_every_test_binary() {
        let steps = steps(&Args { quick: false, keep_going: true });
        assert_eq!(steps[3].to_string(), "cargo test --workspace --no-fail-fast");
    }

    #[test]
    fn the_report_says_how_to_repeat_what_failed() {
        let steps = steps(&Args { quick: false, keep_going: false });
        let results = [
            (&steps[0], Outcome::Passed, Duration::from_millis(1200)),
            (&steps[1], Outcome::Failed, Duration::from_secs(70)),
            (&steps[3], Outcome::NotRun, Duration::ZERO),
        ];
        let expected = "step    time    result\n\
                        fmt     1.2 s   ok\n\
                        clippy  70.0 s  FAILED\n\
                        tests   -       not run\n\
                        to repeat clippy: cargo clippy --workspace --all-targets -- -D warnings";
        assert_eq!(report(&results), expected);
    }
}

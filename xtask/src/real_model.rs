//! `cargo xtask real-model`: real models' greedy text against recorded text, over everything that must not change it.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use indicatif::ProgressBar;

use crate::model::{GEMMA3, Model, SMOLLM2};
use crate::step::{seconds, spinner};
use crate::workspace::Workspace;
use crate::{attn, model, table};

/// What to run.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// More of it: both models under every serving condition, and 20 orders of arrival (takes a while)
    #[arg(long)]
    full: bool,
}

const PAGE_SIZES: [&str; 3] = ["1", "16", "64"];
const PREFILL_CHUNKS: [&[&str]; 2] = [&[], &["--prefill-chunk", "5"]];
/// The second is a pair: one backend for prefill and another for decode, over the same KV cache.
const BACKENDS: [&str; 2] = ["cpu", "cpu,oracle"];

/// Serving conditions of SmolLM2: its longest case takes 4 pages of 16 tokens, all six together 21.
const SMOLLM2_SERVING: [&[&str]; 6] = [
    &["--repeat", "3"],
    &["--repeat", "3", "--no-prefix-cache"],
    &["--repeat", "3", "--num-pages", "9"],
    &["--repeat", "3", "--num-pages", "9", "--no-prefix-cache"],
    &["--repeat", "2", "--cancel-every", "2"],
    &["--arrival-seed", "1", "--verify", "every=16"],
];

/// Serving conditions of Gemma 3: two of its cases are longer than its window of 512 tokens.
const GEMMA3_SERVING: [&[&str]; 3] =
    [&["--repeat", "3", "--num-pages", "64"], &["--repeat", "2", "--cancel-every", "2"], &["--no-prefix-cache"]];

/// One way to run a model's cases.
struct Configuration {
    model: &'static Model,
    args: Vec<String>,
}

impl Configuration {
    fn new(model: &'static Model, args: &[&[&str]]) -> Self {
        Self { model, args: args.concat().into_iter().map(str::to_owned).collect() }
    }

    /// What every change is checked with: SmolLM2 in every way, Gemma 3 in a few.
    fn standard() -> Vec<Self> {
        let mut all = Vec::new();
        for backend in BACKENDS {
            for chunk in PREFILL_CHUNKS {
                let grid =
                    |page| Self::new(&SMOLLM2, &[&["--page-size", page], chunk, &["--attention-backend", backend]]);
                all.extend(PAGE_SIZES.map(grid));
            }
        }
        all.extend(SMOLLM2_SERVING.map(|args| Self::new(&SMOLLM2, &[args])));
        all.push(Self::new(&GEMMA3, &[&["--page-size", "16"]]));
        all.push(Self::new(&GEMMA3, &[&["--page-size", "1", "--prefill-chunk", "100"]]));
        all
    }

    /// The rest: both models in every way.
    fn rest() -> Vec<Self> {
        let mut all = Vec::new();
        for chunk in PREFILL_CHUNKS {
            all.extend(PAGE_SIZES.map(|page| Self::new(&GEMMA3, &[&["--page-size", page], chunk])));
        }
        all.extend(GEMMA3_SERVING.map(|args| Self::new(&GEMMA3, &[args])));
        for seed in 1..=20 {
            let seed = seed.to_string();
            all.extend([&SMOLLM2, &GEMMA3].map(|model| Self::new(model, &[&["--arrival-seed", &seed]])));
        }
        all
    }

    fn label(&self) -> String {
        format!("{} {}", self.model.name, self.args.join(" "))
    }
}

/// Runs every configuration and prints the table; true where all agreed with the recorded text.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<bool> {
    let mut configurations = Configuration::standard();
    if args.full {
        configurations.extend(Configuration::rest());
    }
    let attn = attn::build(workspace)?;
    let mut results = Vec::new();
    for (config_idx, configuration) in configurations.iter().enumerate() {
        let model = model::ensure(workspace, configuration.model)?.to_string_lossy().into_owned();
        let cases = configuration.model.cases;
        ensure!(workspace.path(cases).is_file(), "{cases} is missing");
        let mut args = vec!["generate", "--model", &model, "--cases", cases];
        args.extend(configuration.args.iter().map(String::as_str));
        let bar = spinner(&format!("[{}/{}] {}", config_idx + 1, configurations.len(), configuration.label()));
        let started = Instant::now();
        let output = attn::command(workspace, &attn, &args).output().context("cannot start attn")?;
        let elapsed = started.elapsed();
        bar.finish_and_clear();
        let has_passed = output.status.success();
        announce(&bar, configuration, has_passed, elapsed);
        if !has_passed {
            println!("attn {} ({})", args.join(" "), output.status);
            println!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        }
        results.push((configuration.label(), has_passed, elapsed));
    }
    println!("\n{}", report(&results));
    Ok(results.iter().all(|(_, has_passed, _)| *has_passed))
}

/// One line for a pipe's reader, as each configuration ends; on a terminal the bar says it.
fn announce(bar: &ProgressBar, configuration: &Configuration, has_passed: bool, elapsed: Duration) {
    if bar.is_hidden() {
        eprintln!("{}: {} ({})", configuration.label(), word(has_passed), seconds(elapsed));
    }
}

fn word(has_passed: bool) -> &'static str {
    if has_passed { "ok" } else { "FAILED" }
}

/// The table and the closing line.
fn report(results: &[(String, bool, Duration)]) -> String {
    let rows: Vec<[String; 3]> = results
        .iter()
        .map(|(label, has_passed, elapsed)| {
            [label.clone(), word(*has_passed).to_owned(), format!("{:.1}", elapsed.as_secs_f64())]
        })
        .collect();
    let num_passed = results.iter().filter(|(_, has_passed, _)| *has_passed).count();
    let table = table::layout(["configuration", "result", "seconds"], &rows);
    format!("{table}\n\n{num_passed} passed, {} failed", results.len() - num_passed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_combination_is_run_once() {
        let configurations = Configuration::standard().into_iter().chain(Configuration::rest());
        let mut labels: Vec<String> = configurations.map(|configuration| configuration.label()).collect();
        let num_all = labels.len();
        labels.sort();
        labels.dedup();
        assert!(num_all - labels.len() <= 1, "Gemma's plainest run stands in both lists, nothing else does");
        let pair = "smollm2 --page-size 16 --prefill-chunk 5 --attention-backend cpu,oracle".to_owned();
        assert!(labels.contains(&pair), "{labels:?}");
        assert_eq!(labels.iter().filter(|label| label.contains("--arrival-seed")).count(), 41);
    }

    #[test]
    fn the_report_closes_with_the_counts_alone_on_a_line() {
        let results = [("a".to_owned(), true, Duration::from_secs(2)), ("b".to_owned(), false, Duration::from_secs(3))];
        let report = report(&results);
        assert!(report.contains("b              FAILED  3.0"), "{report}");
        assert_eq!(report.lines().last(), Some("1 passed, 1 failed"));
    }
}

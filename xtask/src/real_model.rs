//! `cargo xtask real-model`: the model's greedy text against recorded text, over everything that must not change it.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use indicatif::ProgressBar;

use crate::step::{seconds, spinner};
use crate::workspace::Workspace;
use crate::{attn, model, table};

const CASES: &str = "tests/vectors/smollm2_greedy.json";
const PAGE_SIZES: [&str; 3] = ["1", "16", "64"];
const PREFILL_CHUNKS: [Option<&str>; 2] = [None, Some("5")];
/// The second is a hybrid: one backend for prefill and one for decode, with the same KV cache.
const BACKENDS: [&str; 2] = ["cpu", "cpu,cpu"];

/// One way to run the same cases.
#[derive(Debug, Clone, Copy)]
struct Configuration {
    page_size: &'static str,
    prefill_chunk: Option<&'static str>,
    backend: &'static str,
}

impl Configuration {
    fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for backend in BACKENDS {
            for prefill_chunk in PREFILL_CHUNKS {
                all.extend(PAGE_SIZES.map(|page_size| Self { page_size, prefill_chunk, backend }));
            }
        }
        all
    }

    fn args(self) -> Vec<&'static str> {
        let mut args = vec!["--page-size", self.page_size];
        args.extend(self.prefill_chunk.into_iter().flat_map(|chunk| ["--prefill-chunk", chunk]));
        args.extend(["--attention-backend", self.backend]);
        args
    }
}

/// Runs every configuration and prints the table; true where all agreed with the recorded text.
pub(crate) fn run(workspace: &Workspace) -> Result<bool> {
    let cases = workspace.path(CASES);
    ensure!(cases.is_file(), "{CASES} is missing");
    let attn = attn::build(workspace)?;
    let model = model::ensure(workspace)?.to_string_lossy().into_owned();
    let mut results = Vec::new();
    let configurations = Configuration::all();
    for (config_idx, configuration) in configurations.iter().enumerate() {
        let mut args = vec!["generate", "--model", &model, "--cases", CASES];
        args.extend(configuration.args());
        let bar = spinner(&format!("[{}/{}] {}", config_idx + 1, configurations.len(), configuration.args().join(" ")));
        let started = Instant::now();
        let output = attn::command(workspace, &attn, &args).output().context("cannot start attn")?;
        let elapsed = started.elapsed();
        bar.finish_and_clear();
        let has_passed = output.status.success();
        announce(&bar, *configuration, has_passed, elapsed);
        if !has_passed {
            println!("attn {} ({})", args.join(" "), output.status);
            println!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        }
        results.push((*configuration, has_passed, elapsed));
    }
    println!("\n{}", report(&results));
    Ok(results.iter().all(|(_, has_passed, _)| *has_passed))
}

/// One line for a pipe's reader, as each configuration ends; on a terminal the bar says it.
fn announce(bar: &ProgressBar, configuration: Configuration, has_passed: bool, elapsed: Duration) {
    if bar.is_hidden() {
        eprintln!("{}: {} ({})", configuration.args().join(" "), word(has_passed), seconds(elapsed));
    }
}

fn word(has_passed: bool) -> &'static str {
    if has_passed { "ok" } else { "FAILED" }
}

/// The table and the closing line.
fn report(results: &[(Configuration, bool, Duration)]) -> String {
    let rows: Vec<[String; 3]> = results
        .iter()
        .map(|(configuration, has_passed, elapsed)| {
            [configuration.args().join(" "), word(*has_passed).to_owned(), format!("{:.1}", elapsed.as_secs_f64())]
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
        let mut lines: Vec<String> = Configuration::all().iter().map(|c| c.args().join(" ")).collect();
        lines.sort();
        lines.dedup();
        assert_eq!(lines.len(), 12);
        assert!(
            lines.contains(&"--page-size 16 --prefill-chunk 5 --attention-backend cpu,cpu".to_owned()),
            "{lines:?}"
        );
    }

    #[test]
    fn the_report_closes_with_the_counts_alone_on_a_line() {
        let [first, second] = [Configuration::all()[0], Configuration::all()[7]];
        let report = report(&[(first, true, Duration::from_secs(2)), (second, false, Duration::from_secs(3))]);
        assert!(report.contains("--page-size 16 --attention-backend cpu,cpu  FAILED  3.0"), "{report}");
        assert_eq!(report.lines().last(), Some("1 passed, 1 failed"));
    }
}

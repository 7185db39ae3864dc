//! `cargo xtask real-model`: real models' greedy text against recorded text, over everything that must not change it.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use indicatif::ProgressBar;
use serde_json::Value;

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

/// Something that a run counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Count {
    Hits,
    EvictedPages,
    Preemptions,
    Cancellations,
}

impl Count {
    const ALL: [Self; 4] = [Self::Hits, Self::EvictedPages, Self::Preemptions, Self::Cancellations];

    const fn name(self) -> &'static str {
        match self {
            Self::Hits => "prefix hits",
            Self::EvictedPages => "evicted pages",
            Self::Preemptions => "preemptions",
            Self::Cancellations => "cancellations",
        }
    }

    /// Where it stands in what `attn generate --stats` prints.
    const fn pointer(self) -> &'static str {
        match self {
            Self::Hits => "/prefix/hits",
            Self::EvictedPages => "/prefix/evicted_pages",
            Self::Preemptions => "/stats/num_preemptions",
            Self::Cancellations => "/stats/num_cancelled",
        }
    }
}

/// A way to serve: arguments, and what must have happened at least so often, so that the run shows what it is meant to.
type Condition = (&'static [&'static str], &'static [(Count, u64)]);

/// Serving conditions of SmolLM2. Its longest case takes 4 pages of 16 tokens, all six together 21; two of its prompts
/// have a whole page.
const SMOLLM2_SERVING: [Condition; 6] = [
    (&["--repeat", "3"], &[(Count::Hits, 4)]),
    (&["--repeat", "3", "--no-prefix-cache"], &[]),
    (&["--repeat", "3", "--num-pages", "9"], &[(Count::Hits, 4), (Count::EvictedPages, 1), (Count::Preemptions, 1)]),
    (&["--repeat", "3", "--num-pages", "9", "--no-prefix-cache"], &[(Count::Preemptions, 1)]),
    (&["--repeat", "2", "--cancel-every", "2"], &[(Count::Cancellations, 6)]),
    (&["--arrival-seed", "1", "--verify", "every=16"], &[]),
];

/// Serving conditions of Gemma 3. Two of its three cases are longer than its window of 512 tokens; they take 49 and 61
/// pages of 16 tokens, so that in a pool of 61 the one is evicted for the other.
const GEMMA3_SERVING: [Condition; 5] = [
    (&["--repeat", "3"], &[(Count::Hits, 4)]),
    (&["--repeat", "3", "--no-prefix-cache"], &[]),
    (&["--repeat", "3", "--num-pages", "61"], &[(Count::Hits, 1), (Count::EvictedPages, 1), (Count::Preemptions, 1)]),
    (&["--repeat", "3", "--num-pages", "61", "--no-prefix-cache"], &[(Count::Preemptions, 1)]),
    (&["--repeat", "2", "--cancel-every", "2"], &[(Count::Cancellations, 3)]),
];

/// One way to run a model's cases.
struct Configuration {
    model: &'static Model,
    args: Vec<String>,
    at_least: &'static [(Count, u64)],
}

impl Configuration {
    fn new(model: &'static Model, args: &[&[&str]]) -> Self {
        Self { model, args: args.concat().into_iter().map(str::to_owned).collect(), at_least: &[] }
    }

    fn serving(model: &'static Model, (args, at_least): Condition) -> Self {
        Self { at_least, ..Self::new(model, &[args]) }
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
        all.extend(SMOLLM2_SERVING.map(|condition| Self::serving(&SMOLLM2, condition)));
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
        all.extend(GEMMA3_SERVING.map(|condition| Self::serving(&GEMMA3, condition)));
        for seed in 1..=20 {
            let seed = seed.to_string();
            let args: &[&str] = &["--repeat", "2", "--arrival-seed", &seed];
            all.extend([&SMOLLM2, &GEMMA3].map(|model| Self::new(model, &[args])));
        }
        all
    }

    fn label(&self) -> String {
        format!("{} {}", self.model.name, self.args.join(" "))
    }
}

/// What became of a configuration.
struct Finding {
    label: String,
    has_passed: bool,
    elapsed: Duration,
    /// As in [`Count::ALL`]; `None` where the run does not count it.
    counts: [Option<u64>; 4],
}

/// Runs every configuration and prints the table; true where all agreed with the recorded text.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<bool> {
    let mut configurations = Configuration::standard();
    if args.full {
        configurations.extend(Configuration::rest());
    }
    let attn = attn::build(workspace)?;
    let mut findings = Vec::new();
    for (config_idx, configuration) in configurations.iter().enumerate() {
        let bar = spinner(&format!("[{}/{}] {}", config_idx + 1, configurations.len(), configuration.label()));
        let finding = try_out(workspace, &attn, configuration);
        bar.finish_and_clear();
        let finding = finding?;
        announce(&bar, &finding);
        findings.push(finding);
    }
    println!("\n{}", report(&findings));
    Ok(findings.iter().all(|finding| finding.has_passed))
}

/// Runs one configuration; where it fails, says why.
fn try_out(workspace: &Workspace, attn: &Path, configuration: &Configuration) -> Result<Finding> {
    let model = model::ensure(workspace, configuration.model)?.to_string_lossy().into_owned();
    let cases = configuration.model.cases;
    ensure!(workspace.path(cases).is_file(), "{cases} is missing");
    let mut args = vec!["generate", "--model", &model, "--cases", cases, "--stats"];
    args.extend(configuration.args.iter().map(String::as_str));
    let started = Instant::now();
    let output = attn::command(workspace, attn, &args).output().context("cannot start attn")?;
    let elapsed = started.elapsed();
    let stdout = String::from_utf8_lossy(&output.stdout);
    let counts = counts(&stdout);
    let missing = missing(configuration.at_least, &counts);
    let has_passed = output.status.success() && missing.is_empty();
    if !has_passed {
        println!("attn {} ({})", args.join(" "), output.status);
        println!("{stdout}{}", String::from_utf8_lossy(&output.stderr));
        missing.iter().for_each(|line| println!("{line}"));
    }
    Ok(Finding { label: configuration.label(), has_passed, elapsed, counts })
}

/// The counts of the line of JSON among a run's output.
fn counts(stdout: &str) -> [Option<u64>; 4] {
    let mut lines = stdout.lines().filter(|line| line.starts_with('{'));
    let metrics: Option<Value> = lines.find_map(|line| serde_json::from_str(line).ok());
    let count = |count: Count| metrics.as_ref()?.pointer(count.pointer())?.as_u64();
    Count::ALL.map(count)
}

/// One line for each count that is too small for the run to show what it is meant to.
fn missing(at_least: &[(Count, u64)], counts: &[Option<u64>; 4]) -> Vec<String> {
    let count_of = |count| Count::ALL.iter().zip(counts).find(|(other, _)| **other == count).and_then(|(_, n)| *n);
    let too_few = |(count, least): &(Count, u64)| {
        let got = count_of(*count);
        let got_text = got.map_or_else(|| "no count".to_owned(), |got| got.to_string());
        (got < Some(*least)).then(|| format!("{}: {got_text}, at least {least} expected", count.name()))
    };
    at_least.iter().filter_map(too_few).collect()
}

/// One line for a pipe's reader, as each configuration ends; on a terminal the bar says it.
fn announce(bar: &ProgressBar, finding: &Finding) {
    if bar.is_hidden() {
        eprintln!("{}: {} ({})", finding.label, word(finding.has_passed), seconds(finding.elapsed));
    }
}

fn word(has_passed: bool) -> &'static str {
    if has_passed { "ok" } else { "FAILED" }
}

/// The table and the closing line.
fn report(findings: &[Finding]) -> String {
    let row = |finding: &Finding| {
        let [hits, evicted, preempted, cancelled] =
            finding.counts.map(|count| count.map_or_else(|| "-".to_owned(), |count| count.to_string()));
        let time = format!("{:.1}", finding.elapsed.as_secs_f64());
        [finding.label.clone(), word(finding.has_passed).to_owned(), time, hits, evicted, preempted, cancelled]
    };
    let rows: Vec<[String; 7]> = findings.iter().map(row).collect();
    let num_passed = findings.iter().filter(|finding| finding.has_passed).count();
    let [hits, evicted, preempted, cancelled] = Count::ALL.map(Count::name);
    let table = table::layout(["configuration", "result", "seconds", hits, evicted, preempted, cancelled], &rows);
    format!("{table}\n\n{num_passed} passed, {} failed", findings.len() - num_passed)
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
    fn both_models_are_served_in_every_way() {
        let all: Vec<_> = Configuration::standard().into_iter().chain(Configuration::rest()).collect();
        for model in [&SMOLLM2, &GEMMA3] {
            let of_model = || all.iter().filter(|configuration| configuration.model.name == model.name);
            for count in Count::ALL {
                let demands =
                    |c: &&Configuration| c.at_least.iter().any(|(demanded, least)| *demanded == count && *least > 0);
                assert!(of_model().any(|c| demands(&c)), "{}: nothing demands {}", model.name, count.name());
            }
            let repeats = |c: &&Configuration| c.args.starts_with(&["--repeat".to_owned(), "3".to_owned()]);
            let has_no_cache = |c: &&Configuration| c.args.contains(&"--no-prefix-cache".to_owned());
            assert_eq!(of_model().filter(repeats).filter(has_no_cache).count(), 2, "{}", model.name);
            assert_eq!(of_model().filter(repeats).count(), 4, "{}", model.name);
        }
    }

    #[test]
    fn counts_come_from_the_line_of_json_and_too_few_are_named() {
        let stdout =
            "ok\n{\"prefix\":{\"hits\":4,\"evicted_pages\":0},\"stats\":{\"num_preemptions\":2}}\n1 of 1 match\n";
        let found = counts(stdout);
        assert_eq!(found, [Some(4), Some(0), Some(2), None]);
        let at_least = [(Count::Hits, 4), (Count::EvictedPages, 1), (Count::Preemptions, 3), (Count::Cancellations, 1)];
        let lines = [
            "evicted pages: 0, at least 1 expected",
            "preemptions: 2, at least 3 expected",
            "cancellations: no count, at least 1 expected",
        ];
        assert_eq!(missing(&at_least, &found), lines);
        assert_eq!(counts("a panic\n"), [None; 4]);
    }

    #[test]
    fn the_report_closes_with_the_counts_alone_on_a_line() {
        let finding = |label: &str, has_passed, seconds| Finding {
            label: label.to_owned(),
            has_passed,
            elapsed: Duration::from_secs(seconds),
            counts: [Some(12), Some(0), None, None],
        };
        let report = report(&[finding("a", true, 2), finding("b", false, 3)]);
        assert!(report.contains("b              FAILED  3.0      12           0              -"), "{report}");
        assert_eq!(report.lines().last(), Some("1 passed, 1 failed"));
    }
}

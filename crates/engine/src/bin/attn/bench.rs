//! `attn bench`: measuring, and drawing what was measured.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use attn_metadata::HostDevice;
use attn_reference::cpu::Isa;
use engine::bench::{
    BenchError, Ceilings, CpuOptions, Environment, Reps, Results, Workload, add_peers, compare, cpu_workloads,
    measure_planner, measure_steps, parse_workloads, plot, problem_of, workloads_named,
};
use engine::doctor;
use engine::replay::{Call, record};

use super::bench_tables::shown;
use super::{Failure, Outcome, output};

/// Requests of the batches that the planner is timed with.
const PLANNED_REQUESTS: [usize; 2] = [64, 1024];
/// Plans timed.
const PLAN_REPS: usize = 201;
/// Requests that run in timed steps.
const STEP_REQUESTS: usize = 1024;
/// Steps timed.
const STEP_REPS: usize = 1000;
/// Errors above this mean a wrong result, whatever the dtype.
const MAX_REL_ERR: f64 = 0.06;

/// Options of `bench`.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("what").required(true).args(["cpu", "workloads", "steps", "plot"]))]
pub struct Args {
    /// Measure the CPU backend's four workloads, the machine's ceilings and the planner
    #[arg(long)]
    cpu: bool,
    /// Measure the workloads of this JSON file; give it several times for several files
    #[arg(long, value_name = "FILE")]
    workloads: Vec<PathBuf>,
    /// Measure what a step costs the host outside the model and attention, at 1,024 running requests
    #[arg(long, conflicts_with_all = ["filter", "record", "rounds", "no_ceilings"])]
    steps: bool,
    /// Draw the results of this JSON file; needs --out
    #[arg(long, value_name = "RESULTS", requires = "out")]
    plot: Option<PathBuf>,
    /// Where the chart goes (SVG)
    #[arg(long, value_name = "FILE", requires = "plot")]
    out: Option<PathBuf>,
    /// Write the results here too
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Attention backend: a name, names "a+b" of which each layer takes the first that can run it, a pair
    /// "prefill,decode" of these, or "auto"
    #[arg(long, value_name = "NAME", default_value = "cpu")]
    attention_backend: String,
    /// Worker threads; default: 2
    #[arg(long, value_name = "N", value_parser = threads)]
    threads: Option<usize>,
    /// Only workloads whose name contains this
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Rounds; medians are over the rounds' medians; default: 3
    #[arg(long, value_name = "N", value_parser = rounds)]
    rounds: Option<usize>,
    /// Leave the machine's ceilings out; measuring them takes a few seconds and 1 GiB
    #[arg(long)]
    no_ceilings: bool,
    /// Write each workload as a replay file into this directory instead of measuring it
    #[arg(long, value_name = "DIR", conflicts_with_all = ["json", "peer_cmd"])]
    record: Option<PathBuf>,
    /// Results of peers from the same machine and minutes (JSON): their rows and the ratios to the best of them are added
    #[arg(long, value_name = "FILE", requires = "workloads")]
    peer_json: Option<PathBuf>,
    /// A result file whose "ceilings" are taken, where attention runs on a GPU: reads of memory, matrix products
    #[arg(long, value_name = "FILE", requires = "workloads")]
    ceilings: Option<PathBuf>,
    /// On a GPU: each workload again on cuda-free (requests cut by what else is in the batch) and on cuda-strict (bits of
    /// a row that do not depend on how its prompt was cut); the ratio is that time over ours
    #[arg(long, requires = "workloads")]
    schedules: bool,
    /// A peer to alternate rounds with: a command that takes the path of its JSON results as the last argument, as
    /// "python3 bench/cpu_peer.py --threads 2 --json"
    #[arg(long, value_name = "CMD", requires = "cpu")]
    peer_cmd: Option<String>,
}

impl Args {
    fn threads(&self) -> usize {
        self.threads.unwrap_or(2)
    }

    fn rounds(&self) -> usize {
        self.rounds.unwrap_or(3)
    }
}

/// A number of threads, for clap.
pub fn threads(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number @ 1..=1024) => Ok(number),
        _ => Err("expected a number from 1 to 1024".to_owned()),
    }
}

/// A number of rounds, for clap.
fn rounds(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number @ 1..=1000) => Ok(number),
        _ => Err("expected a number from 1 to 1000".to_owned()),
    }
}

/// Runs the command.
pub fn run(args: &Args) -> Result<Outcome> {
    if let (Some(results), Some(out)) = (&args.plot, &args.out) {
        return draw(results, out);
    }
    if args.steps {
        return steps(args);
    }
    let workloads = workloads_named(workloads(args)?, args.filter.as_deref());
    if workloads.is_empty() {
        return Err(Failure::usage("--filter matches no workload").into());
    }
    if let Some(dir) = &args.record {
        return record_all(&workloads, dir);
    }
    let peers = args.peer_json.as_deref().map(read_results).transpose()?;
    let mut results = measure(args, &workloads)?;
    if let Some(peers) = &peers {
        add_peers(&mut results, peers);
    }
    output::write(&shown(&results))?;
    if let Some(path) = &args.json {
        write_json(path, &results)?;
    }
    let is_wrong = |error: f64| error.is_nan() || error > MAX_REL_ERR;
    // Peers whose results are wrong were left out when they were added.
    match results.results.iter().find(|row| row.rel_err.is_some_and(is_wrong)) {
        Some(row) => {
            Err(Failure::check(format!("{} gives a wrong result for workload {}", row.system, row.workload)).into())
        }
        None => Ok(Outcome::Success),
    }
}

fn steps(args: &Args) -> Result<Outcome> {
    let mut results = Results::default();
    let load_before = doctor::load_average();
    let spinner = output::spinner();
    let device = HostDevice::with_threads(args.threads());
    for has_turnover in [false, true] {
        spinner.set_message(if has_turnover { "timing steps, requests come and go" } else { "timing steps" });
        let row = measure_steps(&args.attention_backend, device, STEP_REQUESTS, STEP_REPS, has_turnover);
        results.steps.push(row.map_err(Failure::input)?);
    }
    spinner.finish_and_clear();
    results.environment = Some(environment(args, load_before));
    output::write(&shown(&results))?;
    if let Some(path) = &args.json {
        write_json(path, &results)?;
    }
    Ok(Outcome::Success)
}

fn workloads(args: &Args) -> Result<Vec<Workload>> {
    if args.workloads.is_empty() {
        return Ok(cpu_workloads()?);
    }
    let mut workloads = Vec::new();
    for file in &args.workloads {
        let path = || file.display().to_string();
        let text = fs::read_to_string(file).map_err(Failure::input).with_context(path)?;
        workloads.extend(parse_workloads(&text).map_err(Failure::input).with_context(path)?);
    }
    Ok(workloads)
}

fn record_all(workloads: &[Workload], dir: &Path) -> Result<Outcome> {
    let name = || format!("cannot write to {}", dir.display());
    fs::create_dir_all(dir).map_err(Failure::input).with_context(name)?;
    if !workloads.iter().any(Workload::is_attention) {
        return Err(Failure::usage("none of these workloads attends, so there is nothing to record").into());
    }
    for workload in workloads {
        if !workload.is_attention() {
            output::note(&format!("left out: workload {} of kind {} does not attend", workload.name, workload.kind));
            continue;
        }
        let workload_name = || format!("workload {}", workload.name);
        let problem = problem_of(workload, 0, doctor::available_memory_bytes());
        let problem = problem.map_err(Failure::input).with_context(workload_name)?;
        let bytes = record(&Call::from(&problem)).with_context(workload_name)?;
        let path = dir.join(format!("{}.safetensors", workload.name));
        fs::write(&path, bytes).map_err(Failure::input).with_context(name)?;
        output::write(&format!("{}\n", path.display()))?;
    }
    Ok(Outcome::Success)
}

/// Measures on the GPU, where its backend was asked for.
#[cfg(feature = "cuda")]
fn on_gpu(args: &Args, workloads: &[Workload]) -> Option<Result<Results>> {
    let backend = engine::bench::GpuBackend::of_name(&args.attention_backend)?;
    Some(measure_gpu(args, workloads, backend))
}

#[cfg(feature = "cuda")]
fn measure_gpu(args: &Args, workloads: &[Workload], backend: engine::bench::GpuBackend) -> Result<Results> {
    let of_host = [
        ("--threads", args.threads.is_some()),
        ("--rounds", args.rounds.is_some()),
        ("--no-ceilings", args.no_ceilings),
    ];
    if let Some((option, _)) = of_host.iter().find(|(_, is_given)| *is_given) {
        return Err(Failure::usage(format!("{option} is for backends that run on the host")).into());
    }
    let ceilings = args.ceilings.as_deref().map(read_results).transpose()?;
    let command = command();
    let ceilings = ceilings.and_then(|c| c.ceilings);
    let options = engine::bench::GpuOptions { backend, with_schedules: args.schedules, ceilings, command };
    let spinner = output::spinner();
    let measured = engine::bench::measure_on_gpu(workloads, &options, &mut |what| spinner.set_message(what.to_owned()));
    spinner.finish_and_clear();
    measured.map_err(|error| Failure::input(error).into())
}

#[cfg(not(feature = "cuda"))]
const fn on_gpu(_: &Args, _: &[Workload]) -> Option<Result<Results>> {
    None
}

fn measure(args: &Args, workloads: &[Workload]) -> Result<Results> {
    if let Some(results) = on_gpu(args, workloads) {
        return results;
    }
    if args.schedules {
        return Err(Failure::usage("--schedules is for --attention-backend cuda; others have one").into());
    }
    if args.ceilings.is_some() {
        return Err(Failure::usage("--ceilings is for --attention-backend cuda; others measure their own").into());
    }
    let load_before = doctor::load_average();
    let spinner = output::spinner();
    spinner.set_message("measuring the machine's ceilings");
    let options = CpuOptions {
        choice: args.attention_backend.clone(),
        threads: args.threads(),
        rounds: args.rounds(),
        reps: Reps { min: 5, max: 15, budget: Duration::from_secs(1) },
        peer: args.peer_cmd.clone(),
        ceilings: (!args.no_ceilings).then(|| Ceilings::measure(args.threads())),
    };
    let results = compare(workloads, &options, &mut |what| spinner.set_message(what.to_owned()));
    let mut results = results.map_err(|error| match error {
        BenchError::Peer(error) => Failure::input(error).into(),
        error => anyhow::Error::from(error),
    })?;
    if args.cpu {
        spinner.set_message("timing the planner");
        let device = HostDevice::with_threads(args.threads());
        for num_requests in PLANNED_REQUESTS {
            let row = measure_planner(&args.attention_backend, device, num_requests, PLAN_REPS);
            results.planner.push(row.map_err(Failure::input)?);
        }
    }
    spinner.finish_and_clear();
    results.environment = Some(environment(args, load_before));
    Ok(results)
}

fn environment(args: &Args, load_before: Option<f64>) -> Environment {
    Environment {
        cpu: doctor::cpu_model(),
        isa: Isa::detect().name().to_owned(),
        threads: args.threads(),
        build: doctor::build_profile().to_owned(),
        rounds: args.rounds(),
        load_before,
        commit: doctor::commit().map(str::to_owned),
        command: command(),
    }
}

/// What was typed.
fn command() -> String {
    std::env::args().collect::<Vec<_>>().join(" ")
}

fn write_json(path: &Path, results: &Results) -> Result<()> {
    let text = serde_json::to_string_pretty(results).context("cannot write JSON")?;
    fs::write(path, text + "\n").map_err(Failure::input).with_context(|| format!("cannot write {}", path.display()))
}

fn read_results(file: &Path) -> Result<Results> {
    let path = || file.display().to_string();
    let text = fs::read_to_string(file).map_err(Failure::input).with_context(path)?;
    serde_json::from_str(&text).map_err(Failure::input).with_context(path)
}

fn draw(results: &Path, out: &Path) -> Result<Outcome> {
    let path = || results.display().to_string();
    let svg = plot(&read_results(results)?).map_err(Failure::input).with_context(path)?;
    fs::write(out, svg).map_err(Failure::input).with_context(|| format!("cannot write {}", out.display()))?;
    Ok(Outcome::Success)
}

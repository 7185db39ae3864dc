//! Measures workloads on a host backend, alone or in turns with a peer.
//!
//! With a peer, rounds alternate: ours, theirs, ours, theirs. So both see the same machine in the same minutes, and a
//! ratio does not compare two moments.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::process;

use attn_metadata::HostDevice;
use thiserror::Error;

use super::ceilings::Ceilings;
use super::measure::{Reps, Subject, median};
use super::peer::{PeerError, run_peer};
use super::problem::problem_of;
use super::results::{Ratio, ResultRow, Results};
use super::workload::{Workload, WorkloadError, parse_workloads};
use crate::doctor;
use crate::report::error_chain;

/// How workloads are measured.
#[derive(Clone, Debug)]
pub struct CpuOptions {
    /// A backend's name, a pair or `"auto"`.
    pub choice: String,
    /// Worker threads.
    pub threads: usize,
    /// Rounds; the median is over the medians of the rounds.
    pub rounds: usize,
    /// Calls in a round.
    pub reps: Reps,
    /// The peer's command.
    pub peer: Option<String>,
    /// What the machine can do.
    pub ceilings: Option<Ceilings>,
}

/// A measurement that cannot be finished.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BenchError {
    /// The peer gave no results.
    #[error(transparent)]
    Peer(#[from] PeerError),
    /// A call failed that had worked before.
    #[error("workload {workload} failed")]
    Run {
        /// The workload.
        workload: String,
        /// Why.
        source: attn_metadata::RunError,
    },
}

/// The four workloads that this machine's backend is compared on.
///
/// # Errors
/// [`WorkloadError`], which would be a fault of this build.
pub fn cpu_workloads() -> Result<Vec<Workload>, WorkloadError> {
    parse_workloads(include_str!("../../../../bench/cpu-workloads.json"))
}

/// The workloads whose name contains a text.
#[must_use]
pub fn workloads_named(workloads: Vec<Workload>, filter: Option<&str>) -> Vec<Workload> {
    workloads.into_iter().filter(|w| filter.is_none_or(|text| w.name.contains(text))).collect()
}

/// Measures workloads one after the other, or with a peer in turns. `progress` is told what is being done.
///
/// # Errors
/// [`BenchError`]; a workload that cannot be run is a row that says why.
pub fn compare(
    workloads: &[Workload],
    options: &CpuOptions,
    progress: &mut dyn FnMut(&str),
) -> Result<Results, BenchError> {
    let mut results = Results { ceilings: options.ceilings, ..Results::default() };
    match &options.peer {
        None => {
            for workload in workloads {
                progress(&workload.name);
                results.results.push(alone(workload, options)?);
            }
        }
        Some(command) => in_turns(workloads, options, command, &mut results, progress)?,
    }
    Ok(results)
}

fn subject(workload: &Workload, options: &CpuOptions) -> Result<Subject, Box<ResultRow>> {
    let skip = |why: String| Box::new(ResultRow::skipped(&workload.name, &options.choice, why));
    if !workload.is_attention() {
        return Err(skip(format!("kind {}: measured with --attention-backend cuda", workload.kind)));
    }
    let problem =
        problem_of(workload, 0, doctor::available_memory_bytes()).map_err(|error| skip(error_chain(&error)))?;
    let device = HostDevice::with_threads(options.threads);
    Subject::new(problem, &options.choice, device).map_err(|error| skip(error_chain(&error)))
}

fn alone(workload: &Workload, options: &CpuOptions) -> Result<ResultRow, BenchError> {
    let mut subject = match subject(workload, options) {
        Ok(subject) => subject,
        Err(skipped) => return Ok(*skipped),
    };
    let mut medians = Vec::new();
    for _ in 0..options.rounds.max(1) {
        medians.push(round(&mut subject, workload, options)?);
    }
    Ok(row(&subject, workload, options, median(&mut medians)))
}

fn round(subject: &mut Subject, workload: &Workload, options: &CpuOptions) -> Result<f64, BenchError> {
    let times = subject.round(options.reps);
    let mut times = times.map_err(|source| BenchError::Run { workload: workload.name.clone(), source })?;
    Ok(median(&mut times))
}

fn row(subject: &Subject, workload: &Workload, options: &CpuOptions, ms: f64) -> ResultRow {
    let figures = subject.measured(ms);
    ResultRow::measured(&workload.name, subject.backend(), &figures, options.ceilings.as_ref())
}

/// Rows of a peer by workload, one for each round.
type PeerRows = BTreeMap<String, Vec<ResultRow>>;

fn in_turns(
    workloads: &[Workload],
    options: &CpuOptions,
    command: &str,
    results: &mut Results,
    progress: &mut dyn FnMut(&str),
) -> Result<(), BenchError> {
    let mut subjects = Vec::new();
    for workload in workloads {
        progress(&format!("preparing {}", workload.name));
        match subject(workload, options) {
            Ok(subject) => subjects.push((workload, subject, Vec::new())),
            Err(skipped) => results.results.push(*skipped),
        }
    }
    let output = env::temp_dir().join(format!("attn-peer-{}.json", process::id()));
    let mut theirs = PeerRows::new();
    for index in 1..=options.rounds.max(1) {
        progress(&format!("round {index}: ours"));
        for (workload, subject, medians) in &mut subjects {
            // The caches are those of whoever ran before: one call is not timed.
            subject
                .round(Reps { min: 1, max: 1, ..options.reps })
                .map_err(|source| BenchError::Run { workload: workload.name.clone(), source })?;
            medians.push(round(subject, workload, options)?);
        }
        progress(&format!("round {index}: the peer"));
        let rows = run_peer(command, &output);
        // Only its contents matter, and those were read.
        let _ = fs::remove_file(&output);
        for row in rows? {
            theirs.entry(row.workload.clone()).or_default().push(row);
        }
    }
    for (workload, subject, medians) in subjects {
        add_pair(results, options, &subject, workload, &medians, theirs.get(&workload.name));
    }
    Ok(())
}

/// Adds our row, the peer's row and the ratio of one workload.
fn add_pair(
    results: &mut Results,
    options: &CpuOptions,
    subject: &Subject,
    workload: &Workload,
    medians: &[f64],
    theirs: Option<&Vec<ResultRow>>,
) {
    let ms = median(&mut medians.to_vec());
    let ours = row(subject, workload, options, ms);
    results.results.push(ours);
    let Some(first) = theirs.and_then(|rows| rows.first()) else { return };
    let mut times: Vec<f64> = theirs.into_iter().flatten().filter_map(|row| row.ms).collect();
    if times.is_empty() {
        return;
    }
    let rounds: Vec<f64> = times.iter().zip(medians).map(|(theirs, ours)| theirs / ours).collect();
    let theirs_ms = median(&mut times);
    let work = subject.measured(ms).work;
    let row = ResultRow::timed(&workload.name, &first.system, theirs_ms, work, options.ceilings.as_ref());
    results.results.push(ResultRow { rel_err: first.rel_err, ..row });
    let ratio = Ratio { workload: workload.name.clone(), peer: first.system.clone(), ratio: theirs_ms / ms, rounds };
    results.ratios.push(ratio);
}

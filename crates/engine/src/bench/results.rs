//! Results as JSON: what `attn bench` writes and what charts are made from.

use serde::{Deserialize, Serialize};

use super::ceilings::Ceilings;
use super::measure::Measured;
use super::planner::PlannerRow;
use super::steps::StepRow;
use super::work::Work;

/// A run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// Where it ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub environment: Option<Environment>,
    /// The GPU, where one was measured.
    #[cfg(feature = "cuda")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<super::gpu::GpuEnvironment>,
    /// What the machine can do at best.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ceilings: Option<Ceilings>,
    /// One row for each workload and system.
    pub results: Vec<ResultRow>,
    /// Times ÷ ours, where a peer ran beside us.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ratios: Vec<Ratio>,
    /// Geometric mean of the ratios to the best peer of each workload.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub geometric_mean: Option<f64>,
    /// Planning times.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub planner: Vec<PlannerRow>,
    /// Host times of whole steps.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<StepRow>,
}

/// Where a run took place.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Environment {
    /// The processor.
    pub cpu: String,
    /// Its instruction set, as the CPU backend uses it.
    pub isa: String,
    /// Worker threads.
    pub threads: usize,
    /// `release` or `debug`.
    pub build: String,
    /// Rounds that the medians are over.
    pub rounds: usize,
    /// Processes that wanted to run in the minute before, ours not among them; absent where the system does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_before: Option<f64>,
    /// The commit of the build, where it was told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// The command.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub command: String,
}

/// One workload on one system.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ResultRow {
    /// The workload.
    pub workload: String,
    /// A backend of ours, or a peer; `peer` in files.
    #[serde(rename = "peer")]
    pub system: String,
    /// Median time of a call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ms: Option<f64>,
    /// Median time of planning.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan_us: Option<f64>,
    /// The kernel families that ran, of a backend of ours.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernels: Option<String>,
    /// The time that the plan predicts, before it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted_ms: Option<f64>,
    /// Rate over visible pairs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tflops: Option<f64>,
    /// Rate over q, out and visible KV.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gbs: Option<f64>,
    /// Share of the matrix ceiling, 1 is all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of_matmul: Option<f64>,
    /// Share of the read ceiling, 1 is all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of_read: Option<f64>,
    /// Share of a copy's rate on the same GPU: for what stores or merges, of a copy of 64 MB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of_copy: Option<f64>,
    /// A peer's time over ours; in our row the best peer's. Above 1 we are faster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
    /// Relative error against float64 on one head.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rel_err: Option<f64>,
    /// Why it was not run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped: Option<String>,
}

/// A peer's time over ours for one workload; above 1 we are faster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    /// The workload.
    pub workload: String,
    /// The peer.
    pub peer: String,
    /// Its median time ÷ our median time.
    pub ratio: f64,
    /// The ratio in each round.
    #[serde(default)]
    pub rounds: Vec<f64>,
}

impl ResultRow {
    /// A row of figures.
    #[must_use]
    pub fn measured(workload: &str, system: &str, figures: &Measured, ceilings: Option<&Ceilings>) -> Self {
        let row = Self::timed(workload, system, figures.ms, figures.work, ceilings);
        let Measured { plan_us, predicted_ms, rel_err, .. } = *figures;
        Self { plan_us: Some(plan_us), predicted_ms, rel_err: Some(rel_err), ..row }
    }

    /// A row of a time for known work.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "rates for people")]
    pub fn timed(workload: &str, system: &str, ms: f64, work: Work, ceilings: Option<&Ceilings>) -> Self {
        let tflops = work.flops as f64 / ms / 1e9;
        let gbs = work.bytes as f64 / ms / 1e6;
        Self {
            workload: workload.to_owned(),
            system: system.to_owned(),
            ms: Some(ms),
            tflops: Some(tflops),
            gbs: Some(gbs),
            ..Self::default()
        }
        .with_shares(ceilings)
    }

    fn with_shares(mut self, ceilings: Option<&Ceilings>) -> Self {
        ceilings.iter().for_each(|ceilings| self.set_shares(ceilings));
        self
    }

    /// Sets its shares of the ceilings that are known, but for rows that have theirs of a copy of another size.
    pub(super) fn set_shares(&mut self, ceilings: &Ceilings) {
        let share = |rate: Option<f64>, roof: Option<f64>| Some(rate? / roof?);
        if self.tflops.is_some() {
            self.of_matmul = share(self.tflops, ceilings.matmul_tflops);
            self.of_read = share(self.gbs, ceilings.read_gbs);
            self.of_copy = share(self.gbs, ceilings.copy_gbs);
        }
    }

    /// A row of what moves data and computes next to nothing, beside the rate of a copy of the same size.
    #[must_use]
    pub fn moved(workload: &str, system: &str, figures: &Measured, copy_gbs: f64) -> Self {
        let row = Self::measured(workload, system, figures, None);
        let of_copy = row.gbs.map(|gbs| gbs / copy_gbs);
        // Planning is no part of it.
        Self { of_copy, tflops: None, plan_us: None, ..row }
    }

    /// A row without figures.
    #[must_use]
    pub fn skipped(workload: &str, system: &str, why: String) -> Self {
        Self { workload: workload.to_owned(), system: system.to_owned(), skipped: Some(why), ..Self::default() }
    }
}

//! Owns what a backend keeps of a batch: [`Numbered`]. Each is one plan; captured ones own theirs and keep its memory.

use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};

use attn_metadata::plan::{Plan, PlanConfig, PlanReport};
use attn_metadata::{Batch, KeptBatch, ModelSpec, PlanGroup, PoolShape};
use thiserror::Error;

/// A prepared batch.
#[derive(Debug)]
pub(super) struct Numbered {
    kept: KeptBatch,
    /// Distinct for every batch that was ever kept: what was selected for one is not used for another.
    pub(super) serial: u64,
}

impl Deref for Numbered {
    type Target = KeptBatch;

    fn deref(&self) -> &KeptBatch {
        &self.kept
    }
}

impl Numbered {
    /// No request over a pool.
    pub(super) fn empty(pool: PoolShape, num_rows: u32) -> Self {
        Self { kept: KeptBatch::empty(pool, num_rows), serial: next_serial() }
    }

    /// Keeps another batch, for calls of `num_rows` rows. Reuses memory.
    pub(super) fn keep(&mut self, batch: &Batch, num_rows: u32) {
        self.kept.keep(batch, num_rows);
        self.serial = next_serial();
    }

    /// The plan as a report: one tile a query, nothing split. Bytes and FLOPs are those of dense attention.
    pub(super) fn report(&self, backend: &'static str, model: &ModelSpec) -> PlanReport {
        let plan = |group: &PlanGroup| {
            let mut plan = Plan::new(PlanConfig::UNCUT, *group);
            plan.update(self.batch());
            plan
        };
        let plans: Vec<_> = model.groups().iter().map(plan).collect();
        PlanReport::new(backend, model, self.batch(), &plans, None)
    }
}

fn next_serial() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// A shared selection that is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("layer {layer} shares the selection of layer {source_layer}, which has not run in this step")]
pub(super) struct NotSelected {
    pub(super) layer: usize,
    pub(super) source_layer: usize,
}

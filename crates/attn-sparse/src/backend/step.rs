//! Owns what a backend keeps of a batch: [`KeptBatch`]. Each is one plan; captured ones own theirs and keep its memory.

use std::sync::atomic::{AtomicU64, Ordering};

use attn_metadata::plan::{Plan, PlanConfig, PlanReport};
use attn_metadata::{Batch, ModelSpec, PlanGroup, PoolShape, SubBatch};
use kvpool::Slot;

/// A prepared batch.
#[derive(Debug)]
pub(super) struct KeptBatch {
    pub(super) batch: Batch,
    /// The batch's slots, padded to the rows of the step.
    pub(super) slots: Vec<Slot>,
    pub(super) num_rows: usize,
    /// Distinct for every batch that was ever kept: what was selected for one is not used for another.
    pub(super) serial: u64,
}

impl KeptBatch {
    /// No request over a pool.
    pub(super) fn empty(pool: PoolShape, num_rows: u32) -> Self {
        let slots = vec![Slot::PADDING; num_rows as usize];
        Self { batch: Batch::empty(pool), slots, num_rows: num_rows as usize, serial: next_serial() }
    }

    /// Keeps another batch, for calls of `num_rows` rows. Reuses memory.
    pub(super) fn keep(&mut self, batch: &Batch, num_rows: u32) {
        batch.select_into(&mut self.batch, SubBatch::First, |_| true);
        self.slots.clear();
        self.slots.extend_from_slice(batch.slot_mapping().unwrap_or_default());
        self.slots.resize(num_rows as usize, Slot::PADDING);
        self.num_rows = num_rows as usize;
        self.serial = next_serial();
    }

    /// The plan as a report: one tile a query, nothing split. Bytes and FLOPs are those of dense attention.
    pub(super) fn report(&self, backend: &'static str, model: &ModelSpec) -> PlanReport {
        let plan = |group: &PlanGroup| {
            let mut plan = Plan::new(PlanConfig::UNCUT, *group);
            plan.update(&self.batch);
            plan
        };
        let plans: Vec<_> = model.groups().iter().map(plan).collect();
        PlanReport::new(backend, model, &self.batch, &plans, None)
    }
}

fn next_serial() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

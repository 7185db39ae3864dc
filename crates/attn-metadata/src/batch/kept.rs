//! Owns [`KeptBatch`]: what a backend keeps of a batch from planning to the calls.

use kvpool::Slot;

use super::{Batch, PoolShape, SubBatch};

/// A batch as a backend keeps it for its calls: all requests, and a slot for each row of a call.
///
/// A call of a captured step has the rows of its bucket, so slots are padded up to those.
#[derive(Clone, Debug)]
pub struct KeptBatch {
    batch: Batch,
    slots: Vec<Slot>,
}

impl KeptBatch {
    /// No request, in calls of `num_rows` rows.
    #[must_use]
    pub fn empty(pool: PoolShape, num_rows: u32) -> Self {
        Self { batch: Batch::empty(pool), slots: vec![Slot::PADDING; num_rows as usize] }
    }

    /// Keeps another batch, for calls of `num_rows` rows: the batch's, or its bucket's. Reuses memory, and shares the
    /// page table.
    pub fn keep(&mut self, batch: &Batch, num_rows: u32) {
        batch.select_into(&mut self.batch, SubBatch::First, |_| true);
        self.slots.clear();
        self.slots.extend_from_slice(batch.slot_mapping().unwrap_or_default());
        self.slots.resize(num_rows as usize, Slot::PADDING);
    }

    /// The batch.
    #[must_use]
    pub const fn batch(&self) -> &Batch {
        &self.batch
    }

    /// Where new KV goes, `[num_rows]`: padding where a row appends nothing.
    #[must_use]
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Rows of a call.
    #[must_use]
    pub fn num_rows(&self) -> usize {
        self.slots.len()
    }
}

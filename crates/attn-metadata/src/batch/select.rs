//! Sub-batches: some requests of a batch, run over the same rows of q and out.
//!
//! Hybrids cut a batch by phase. The rows of the requests left out belong to somebody else and stay untouched.
//! So that every new token's KV is in place before anybody attends, the first sub-batch appends for all rows.

use super::{Batch, Request, refill};

/// What a sub-batch does besides attending for its requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SubBatch {
    /// Runs first: appends the new KV of *all* rows and writes the padding rows.
    First,
    /// Runs later: only attends.
    Later,
}

impl Batch {
    /// Fills `into` with the requests for which `keep` holds. Reuses memory; the page table and the mask are shared,
    /// not copied.
    pub fn select_into(&self, into: &mut Self, role: SubBatch, keep: impl Fn(&Request) -> bool) {
        let first = role == SubBatch::First;
        into.pool = self.pool;
        into.num_rows = self.num_rows;
        into.num_used_rows = self.num_used_rows;
        into.writes_padding = self.writes_padding && first;
        into.requests.clear();
        into.requests.extend(self.requests.iter().filter(|r| keep(r)));
        into.kv_indices.share(&self.kv_indices);
        into.appends = self.appends && first;
        refill(&mut into.slots, if into.appends { &self.slots } else { &[] });
        into.has_mask = self.has_mask;
        into.mask.share(&self.mask);
    }
}

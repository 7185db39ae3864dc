//! Counts what replaying a problem takes besides its tensors, so that a file that asks for more than there is is refused
//! before anything is taken: a system may give memory that it does not have, and stop the process when it is used.

use attn_metadata::Lse;

use super::error::ReplayError;
use super::problem::Problem;
use super::run::ReplayOptions;
use crate::doctor;

/// What is free is left to others to one part in so many, and to what is too small to be counted.
const ROOM: u64 = 16;

/// Bytes for each row: a tile of the plan at most, in a table that doubles as it grows, and its request in the copies
/// that a backend keeps of a batch.
const ROW_BYTES: u64 = 256;

/// What may be taken, and what of it is spoken for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Memory {
    available: u64,
    /// For the result, in all its copies, and the plan's tiles.
    needed: u64,
}

impl Memory {
    /// # Errors
    /// [`ReplayError::Memory`] where the result alone needs more than there is.
    pub(super) fn of(problem: &Problem, options: &ReplayOptions) -> Result<Self, ReplayError> {
        let most_of_free = || {
            let free = doctor::available_memory_bytes();
            free - free / ROOM
        };
        let available = options.memory_bytes.unwrap_or_else(most_of_free);
        let memory = Self { available, needed: needed(problem, options.cache_out) };
        memory.check(0).map(|()| memory)
    }

    /// Bytes that are left for a backend.
    pub(super) const fn left(&self) -> u64 {
        self.available.saturating_sub(self.needed)
    }

    /// Whether a backend may take so many bytes: two backends of a pair know nothing of each other.
    pub(super) fn check(&self, of_backends: u64) -> Result<(), ReplayError> {
        if of_backends <= self.left() && self.needed <= self.available {
            return Ok(());
        }
        let needed = self.needed.saturating_add(of_backends);
        Err(ReplayError::Memory { needed_mib: needed.div_ceil(1 << 20), available_mib: self.available >> 20 })
    }
}

/// Bytes that a problem takes whichever backend runs it.
fn needed(problem: &Problem, cache_out: bool) -> u64 {
    let [rows, num_qo_heads, _] = problem.q.shape().map(|n| n as u64);
    let vector_bytes = u64::from(problem.layer.heads().head_dim_vo) * problem.q.dtype().size_bytes() as u64;
    let states = rows.saturating_mul(num_qo_heads);
    let result = states.saturating_mul(vector_bytes.saturating_add(size_of::<Lse>() as u64));
    let cache = if cache_out { problem.cache.buffer().as_slice().as_bytes().len() as u64 } else { 0 };
    // A tensor of the result is in memory three times: as it is computed, on its way into the file, and in the file. The
    // cache is counted as one of the problem's tensors.
    let parts = [result.saturating_mul(3), cache.saturating_mul(2), rows.saturating_mul(ROW_BYTES)];
    parts.into_iter().fold(0, u64::saturating_add)
}

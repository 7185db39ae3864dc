//! Owns the asking for what will be packed next, line by line, while there is work to do.
//!
//! Lines are asked for in the pace of the multiply-adds: memory delivers all the time, and never more at once than it can
//! have under way. No result depends on it.

use std::cell::Cell;

use kvpool::KvPlane;

use super::isa::Simd;
use super::pack::{KV_TILE, PagedRows, Run};

/// Bytes of a cache line.
const LINE: usize = 64;

/// The vectors that will be packed next.
pub(crate) struct Ahead<'a> {
    bytes: &'a [u8],
    /// Byte where each vector begins.
    starts: [usize; KV_TILE],
    len: usize,
    num_lines: usize,
    /// Lines to a multiply-add, times 2^32.
    pace: u64,
    /// Lines due, times 2^32.
    due: Cell<u64>,
    /// The vector and its line that come next.
    next: Cell<(usize, usize)>,
}

impl<'a> Ahead<'a> {
    /// The vectors of a run, at most a tile, to be asked for during this many multiply-adds of vectors.
    pub(crate) fn new(run: Run<'a>, num_fmas: usize) -> Ahead<'a> {
        let PagedRows { plane: KvPlane { data, layout }, .. } = run.rows;
        let size = data.dtype().element_bytes();
        let mut starts = [0; KV_TILE];
        for (start, position) in starts.iter_mut().zip(run.start..run.start + run.len) {
            *start = run.rows.element(position) * size;
        }
        let num_lines = (layout.vector_len() * size).div_ceil(LINE);
        let pace = ((run.len * num_lines) as u64).checked_shl(32).unwrap_or(0) / (num_fmas.max(1) as u64);
        let (due, next) = (Cell::new(0), Cell::new((0, 0)));
        Ahead { bytes: data.as_bytes(), starts, len: run.len, num_lines, pace, due, next }
    }

    /// Asks for what is due after this many more multiply-adds.
    #[inline(always)]
    pub(crate) fn work<S: Simd>(&self, simd: S, num_fmas: usize) {
        let due = self.due.get() + self.pace * num_fmas as u64;
        self.due.set(due & 0xFFFF_FFFF);
        for _ in 0..due >> 32 {
            let (key, line) = self.next.get();
            if key == self.len {
                return;
            }
            if let Some(byte) = self.bytes.get(self.starts[key] + line * LINE) {
                simd.prefetch_far(byte);
            }
            self.next.set(if line + 1 == self.num_lines { (key + 1, 0) } else { (key, line + 1) });
        }
    }
}

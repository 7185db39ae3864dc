//! Owns the scores: `S = Q Kᵀ` for a few rows and the panels of a key tile.
//! Invariant: each score is one chain of multiply-adds over the dimensions in ascending order, starting at 0, whatever
//! the size of the register block. So a score's bits depend on its query and its key alone.

use std::ops::Range;

use super::isa::{Isa, Kernel, Simd};
use super::pack::{KV_TILE, block_rows};

/// How far ahead of their use the rows of a key tile are asked for, in vectors.
const AHEAD: usize = 32;

/// Scores of rows against the columns of one key tile.
pub(crate) type ScoreRow = [f32; KV_TILE];

/// Computes the scores of `scores.len()` rows in the given panels of the tile.
pub(crate) struct Scores<'a> {
    pub(crate) isa: Isa,
    /// Query blocks of the rows, `[dim_padded, rows of the block]` each.
    pub(crate) queries: &'a [f32],
    /// The key tile from the first of the panels on.
    pub(crate) keys: &'a [f32],
    /// Elements of a query and of a key.
    pub(crate) dim: usize,
    pub(crate) dim_padded: usize,
    /// Panels (of two vectors) to compute; other columns of `scores` stay as they are.
    pub(crate) panels: Range<usize>,
    pub(crate) scores: &'a mut [ScoreRow],
}

impl Kernel for Scores<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let keys: &[[S::Row; 2]] = bytemuck::cast_slice(self.keys);
        for (i, panel) in self.panels.clone().enumerate() {
            let keys = &keys[i * self.dim_padded..][..self.dim];
            let mut row = 0;
            while row < self.scores.len() {
                let rows = block_rows(self.isa, self.scores.len() - row);
                let queries = &self.queries[row * self.dim_padded..][..rows * self.dim];
                let scores = &mut self.scores[row..row + rows];
                match rows {
                    12 => micro::<S, 12>(simd, queries, keys, scores, panel),
                    8 => micro::<S, 8>(simd, queries, keys, scores, panel),
                    6 => micro::<S, 6>(simd, queries, keys, scores, panel),
                    4 => micro::<S, 4>(simd, queries, keys, scores, panel),
                    2 => micro::<S, 2>(simd, queries, keys, scores, panel),
                    _ => micro::<S, 1>(simd, queries, keys, scores, panel),
                }
                row += rows;
            }
        }
    }
}

/// `R` rows by one panel, in `2 R` registers.
#[inline(always)]
fn micro<S: Simd, const R: usize>(
    simd: S,
    queries: &[f32],
    keys: &[[S::Row; 2]],
    scores: &mut [ScoreRow],
    panel: usize,
) {
    let mut acc = [[simd.splat(0.0); 2]; R];
    for (q, k) in queries.as_chunks::<R>().0.iter().zip(keys) {
        simd.prefetch(&k[0], AHEAD);
        simd.prefetch(&k[1], AHEAD);
        let k = [simd.load(&k[0]), simd.load(&k[1])];
        for (acc, &q) in acc.iter_mut().zip(q) {
            let x = simd.splat(q);
            acc[0] = simd.fma(x, k[0], acc[0]);
            acc[1] = simd.fma(x, k[1], acc[1]);
        }
    }
    for (acc, row) in acc.into_iter().zip(scores) {
        let row: &mut [[S::Row; 2]] = bytemuck::cast_slice_mut(row.as_mut_slice());
        simd.store(acc[0], &mut row[panel][0]);
        simd.store(acc[1], &mut row[panel][1]);
    }
}

//! Owns the scores of keys that are packed as rows: dimensions in the lanes of a vector, sums of lanes at the end.
//!
//! Where the values are columns of the keys (a latent cache), one tile of rows serves both products, and nothing is
//! transposed: neither queries nor keys. A block of keys is small enough to stay in the first-level cache while the
//! queries pass by.
//!
//! Invariant: each score is, lane by lane, one chain of multiply-adds over the dimensions in ascending order, starting
//! at 0, and then one tree of sums. So its bits depend on its query and its key alone, not on the block.

use std::ops::Range;

use super::ahead::Ahead;
use super::isa::{Kernel, Simd};
use super::pack::MAX_LANES;
use super::qk::ScoreRow;

/// Most keys of a call: with the queries of a register block, they fit the first-level cache.
pub(crate) const KEY_BLOCK: usize = 12;

/// Most rows of a register block.
const ROW_BLOCK: usize = 4;

/// Steps of a register block between two times of asking for memory.
const ASK_STEPS: usize = 18;

/// Floats to work in.
pub(crate) const STAGE_LEN: usize = (ROW_BLOCK * KEY_BLOCK).next_multiple_of(MAX_LANES) * MAX_LANES;

/// Computes the scores of `scores.len()` rows for some keys of a tile.
pub(crate) struct DotScores<'a> {
    /// `[rows, dim_padded]`, zeros beyond the vectors.
    pub(crate) queries: &'a [f32],
    pub(crate) dim_padded: usize,
    /// `[keys, stride]`, zeros beyond the vectors.
    pub(crate) tile: &'a [f32],
    pub(crate) stride: usize,
    /// Keys to compute, at most [`KEY_BLOCK`]; other columns of `scores` stay as they are.
    pub(crate) keys: Range<usize>,
    pub(crate) ahead: &'a Ahead<'a>,
    /// [`STAGE_LEN`].
    pub(crate) stage: &'a mut [f32],
    pub(crate) scores: &'a mut [ScoreRow],
}

impl Kernel for DotScores<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (dim, stride, num_keys) = (self.dim_padded / S::LANES, self.stride / S::LANES, self.keys.len());
        let queries: &[S::Row] = bytemuck::cast_slice(self.queries);
        let tile: &[S::Row] = bytemuck::cast_slice(self.tile);
        let stage: &mut [S::Row] = bytemuck::cast_slice_mut(self.stage);
        let mut row = 0;
        while row < self.scores.len() {
            let num_rows = row_block(self.scores.len() - row);
            let queries = &queries[row * dim..][..num_rows * dim];
            let mut done = 0;
            while done < num_keys {
                let count = key_block(S::DOT_KEYS, num_keys - done);
                let block = Block {
                    queries,
                    keys: &tile[(self.keys.start + done) * stride..],
                    dim,
                    stride,
                    to: Place { first: done, num_keys },
                    ahead: self.ahead,
                };
                block.run(simd, (num_rows, count), stage);
                done += count;
            }
            sum_lanes(simd, stage, &mut self.scores[row..row + num_rows], self.keys.clone());
            row += num_rows;
        }
    }
}

/// Rows of the next register block.
const fn row_block(remaining: usize) -> usize {
    match remaining {
        4.. => 4,
        2.. => 2,
        _ => 1,
    }
}

/// Keys of the next register block, at most `max`: as many as fit, but two equal halves of 8.
const fn key_block(max: usize, remaining: usize) -> usize {
    match remaining {
        8 if max >= 4 => 4,
        6.. if max >= 6 => 6,
        4.. if max >= 4 => 4,
        2.. => 2,
        _ => 1,
    }
}

/// Where the sums of a register block go: column `first` of `[rows, num_keys]` vectors.
#[derive(Clone, Copy)]
struct Place {
    first: usize,
    num_keys: usize,
}

/// What a register block reads.
struct Block<'a, R> {
    /// `[rows, dim]`.
    queries: &'a [R],
    /// `[keys, stride]`.
    keys: &'a [R],
    dim: usize,
    stride: usize,
    to: Place,
    ahead: &'a Ahead<'a>,
}

impl<R> Block<'_, R> {
    #[inline(always)]
    fn run<S: Simd<Row = R>>(&self, simd: S, (num_rows, num_keys): (usize, usize), stage: &mut [R]) {
        match (num_rows, num_keys) {
            (4, 6) => self.micro::<S, 4, 6>(simd, stage),
            (4, 4) => self.micro::<S, 4, 4>(simd, stage),
            (4, 2) => self.micro::<S, 4, 2>(simd, stage),
            (4, _) => self.micro::<S, 4, 1>(simd, stage),
            (2, 6) => self.micro::<S, 2, 6>(simd, stage),
            (2, 4) => self.micro::<S, 2, 4>(simd, stage),
            (2, 2) => self.micro::<S, 2, 2>(simd, stage),
            (2, _) => self.micro::<S, 2, 1>(simd, stage),
            (_, 6) => self.micro::<S, 1, 6>(simd, stage),
            (_, 4) => self.micro::<S, 1, 4>(simd, stage),
            (_, 2) => self.micro::<S, 1, 2>(simd, stage),
            _ => self.micro::<S, 1, 1>(simd, stage),
        }
    }

    /// `M` rows by `K` keys, in `M K` registers.
    #[inline(always)]
    fn micro<S: Simd<Row = R>, const M: usize, const K: usize>(&self, simd: S, stage: &mut [R]) {
        let dim = self.dim;
        // Plain loops: closures over arrays would not be inlined, and vectors would go through memory.
        let (mut queries, mut keys) = ([self.queries; M], [self.keys; K]);
        for (m, query) in queries.iter_mut().enumerate() {
            *query = &self.queries[m * dim..][..dim];
        }
        for (k, key) in keys.iter_mut().enumerate() {
            *key = &self.keys[k * self.stride..][..dim];
        }
        let mut acc = [[simd.splat(0.0); K]; M];
        // What is asked for on the way would take registers from the inner loop.
        for first in (0..dim).step_by(ASK_STEPS) {
            let steps = first..dim.min(first + ASK_STEPS);
            for d in steps.clone() {
                let mut q = [simd.splat(0.0); M];
                for m in 0..M {
                    q[m] = simd.load(&queries[m][d]);
                }
                for k in 0..K {
                    let x = simd.load(&keys[k][d]);
                    for m in 0..M {
                        acc[m][k] = simd.fma(q[m], x, acc[m][k]);
                    }
                }
            }
            self.ahead.work(simd, M * K * steps.len());
        }
        for m in 0..M {
            for k in 0..K {
                simd.store(acc[m][k], &mut stage[m * self.to.num_keys + self.to.first + k]);
            }
        }
    }
}

/// The sums of `[rows, keys]` vectors become the scores.
#[inline(always)]
fn sum_lanes<S: Simd>(simd: S, stage: &[S::Row], scores: &mut [ScoreRow], keys: Range<usize>) {
    let count = scores.len() * keys.len();
    let mut sums = [0.0; STAGE_LEN / MAX_LANES];
    for (sums, vectors) in
        sums.chunks_exact_mut(S::LANES).zip(stage.chunks_exact(S::LANES)).take(count.div_ceil(S::LANES))
    {
        simd.store(simd.sums(vectors), &mut bytemuck::cast_slice_mut(sums)[0]);
    }
    for (row, sums) in scores.iter_mut().zip(sums.chunks_exact(keys.len())) {
        let row = &mut row[keys.clone()];
        // A copy of unknown length is a call.
        match (row.first_chunk_mut::<KEY_BLOCK>(), sums.first_chunk::<KEY_BLOCK>()) {
            (Some(row), Some(sums)) => *row = *sums,
            _ => row.iter_mut().zip(sums).for_each(|(score, sum)| *score = *sum),
        }
    }
}

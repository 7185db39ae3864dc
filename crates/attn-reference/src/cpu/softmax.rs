//! Owns the online softmax: scores to weights, and each row's running maximum and sum.
//! Invariants: a masked score (-inf) has weight 0 exactly, a row that has seen no key keeps maximum -inf and sum 0, and
//! no (-inf) - (-inf) is formed. A tile in which a row sees nothing leaves the row's state as it was, bit for bit.

use std::ops::Range;

use super::isa::{Kernel, Simd};
use super::math::{exp, tanh};
use super::pack::KV_TILE;
use super::qk::ScoreRow;
use super::unit::MAX_SCORE_ROWS;

/// Most rows of a call: a multiple of every vector's lanes.
const MAX_ROWS: usize = MAX_SCORE_ROWS.next_multiple_of(16);

/// Turns scores into weights relative to the new maximum and updates the states of the rows.
pub(crate) struct OnlineSoftmax<'a> {
    /// Scores in, weights out.
    pub(crate) scores: &'a mut [ScoreRow],
    /// Columns to read and write, whole vectors. All others count as masked.
    pub(crate) columns: Range<usize>,
    /// Running maximum of each row.
    pub(crate) max: &'a mut [f32],
    /// Running sum of each row, relative to its maximum.
    pub(crate) sum: &'a mut [f32],
    /// Out: what the sum and the output of each row had to be multiplied by.
    pub(crate) factors: &'a mut [f32],
}

impl Kernel for OnlineSoftmax<'_> {
    /// Whether a factor differs from 1.
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> bool {
        let columns = self.columns.start / S::LANES..self.columns.end.div_ceil(S::LANES);
        let num_rows = self.scores.len();
        // One pass a step over all rows: chains of one row are long, rows are independent.
        let (mut shifts, mut deltas) = ([0.0; MAX_ROWS], [0.0; MAX_ROWS]);
        let mut any = false;
        for i in 0..num_rows {
            let row: &[S::Row] = bytemuck::cast_slice(&self.scores[i]);
            let old = self.max[i];
            let new = row_max(simd, &row[columns.clone()], old);
            shifts[i] = if new == f32::NEG_INFINITY { 0.0 } else { new };
            deltas[i] = if new == old { 0.0 } else { old - new };
            any |= new != old;
            self.max[i] = new;
        }
        if any {
            for x in bytemuck::cast_slice_mut::<f32, S::Row>(&mut deltas) {
                let factor = exp(simd, simd.load(x));
                simd.store(factor, x);
            }
        } else {
            deltas = [1.0; MAX_ROWS];
        }
        self.factors.copy_from_slice(&deltas[..num_rows]);
        for i in 0..num_rows {
            let row: &mut [S::Row] = bytemuck::cast_slice_mut(self.scores[i].as_mut_slice());
            let sum = weigh(simd, &mut row[columns.clone()], shifts[i]);
            self.sum[i] = self.sum[i].mul_add(deltas[i], sum);
        }
        any
    }
}

#[inline(always)]
fn row_max<S: Simd>(simd: S, row: &[S::Row], start: f32) -> f32 {
    let mut max = [simd.splat(start); 4];
    let (blocks, rest) = row.as_chunks::<4>();
    for x in blocks {
        for (max, x) in max.iter_mut().zip(x) {
            *max = simd.max(simd.load(x), *max);
        }
    }
    for x in rest {
        max[0] = simd.max(simd.load(x), max[0]);
    }
    simd.reduce_max(simd.max(simd.max(max[0], max[1]), simd.max(max[2], max[3])))
}

/// Replaces scores by `exp(score - shift)` and returns their sum.
///
/// The sum has one order: vectors in ascending order, then the lanes. Columns that are left out would add zeros.
#[inline(always)]
fn weigh<S: Simd>(simd: S, row: &mut [S::Row], shift: f32) -> f32 {
    let shift = simd.splat(shift);
    let mut sum = simd.splat(0.0);
    for x in row {
        let p = exp(simd, simd.sub(simd.load(x), shift));
        simd.store(p, x);
        sum = simd.add(sum, p);
    }
    simd.reduce_add(sum)
}

/// Replaces scores `s` by `cap * tanh(s / cap)`.
pub(crate) struct Softcap<'a> {
    pub(crate) scores: &'a mut [ScoreRow],
    pub(crate) columns: Range<usize>,
    pub(crate) cap: f32,
}

impl Kernel for Softcap<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (cap, inverse) = (simd.splat(self.cap), simd.splat(1.0 / self.cap));
        for scores in self.scores.iter_mut() {
            let row: &mut [S::Row] = bytemuck::cast_slice_mut(scores.as_mut_slice());
            for x in &mut row[self.columns.start / S::LANES..self.columns.end.div_ceil(S::LANES)] {
                let capped = simd.mul(cap, tanh(simd, simd.mul(simd.load(x), inverse)));
                simd.store(capped, x);
            }
        }
    }
}

/// Adds `slope * (distance + column)` to the scores of a row.
pub(crate) struct Alibi<'a> {
    pub(crate) slope: f32,
    /// Position of the tile's first key, counted from the query's.
    pub(crate) distance: f32,
    pub(crate) columns: Range<usize>,
    pub(crate) scores: &'a mut ScoreRow,
}

impl Kernel for Alibi<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (slope, distance) = (simd.splat(self.slope), simd.splat(self.distance));
        let row: &mut [S::Row] = bytemuck::cast_slice_mut(self.scores.as_mut_slice());
        let offsets: &[S::Row] = bytemuck::cast_slice(COLUMNS.as_slice());
        for i in self.columns.start / S::LANES..self.columns.end.div_ceil(S::LANES) {
            let distance = simd.add(distance, simd.load(&offsets[i]));
            let score = simd.fma(slope, distance, simd.load(&row[i]));
            simd.store(score, &mut row[i]);
        }
    }
}

/// The columns of a tile as floats.
static COLUMNS: ScoreRow = {
    let mut columns = [0.0; KV_TILE];
    let mut i = 1;
    while i < KV_TILE {
        columns[i] = columns[i - 1] + 1.0;
        i += 1;
    }
    columns
};

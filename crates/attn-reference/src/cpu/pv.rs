//! Owns the outputs: `O += P V` for a few rows and a range of the columns of a tile, and the scaling of `O`.
//! Invariant: each output is one chain of multiply-adds over the keys in ascending order, continued from what `O` holds,
//! whatever the size of the register block or the number of calls. Only the given columns of `P` and `V` are read.

use std::ops::Range;

use super::isa::{Isa, Kernel, Simd};
use super::lanes::Ahead;
use super::pack::{KV_TILE, block_rows};
use super::qk::ScoreRow;

/// How far ahead of their use the rows of a value tile are asked for, in vectors.
const AHEAD: usize = 32;

/// Packed values of some columns of a tile.
#[derive(Clone, Copy)]
pub(crate) struct Values<'a> {
    pub(crate) tile: &'a [f32],
    /// Keys that the tile has room for.
    pub(crate) room: usize,
    /// Column of its first key.
    pub(crate) first: usize,
}

/// Adds the weighted values of the given columns to `probs.len()` rows of output.
pub(crate) struct Accumulate<'a> {
    pub(crate) isa: Isa,
    pub(crate) probs: &'a [ScoreRow],
    pub(crate) values: Values<'a>,
    /// Columns that `values` holds.
    pub(crate) columns: Range<usize>,
    /// `[rows, dim_padded]`.
    pub(crate) out: &'a mut [f32],
    /// Asked for on the way.
    pub(crate) ahead: Option<&'a Ahead<'a>>,
}

impl Kernel for Accumulate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let num_rows = self.probs.len();
        let values: &[[S::Row; 2]] = bytemuck::cast_slice(self.values.tile);
        let out: &mut [[S::Row; 2]] = bytemuck::cast_slice_mut(self.out);
        let num_panels = out.len() / num_rows;
        for panel in 0..num_panels {
            let first = panel * self.values.room + self.columns.start - self.values.first;
            let values = &values[first..][..self.columns.len()];
            let mut row = 0;
            while row < num_rows {
                let rows = sum_rows(self.isa, num_rows - row);
                let ahead = self.ahead.filter(|_| row == 0).map(|ahead| (ahead, ahead.output_lines(panel, num_panels)));
                let probs = &self.probs[row..row + rows];
                let out = &mut out[row * num_panels + panel..];
                let columns = self.columns.clone();
                match rows {
                    12 => micro::<S, 12>(simd, probs, values, columns, out, num_panels, ahead.as_ref()),
                    8 => micro::<S, 8>(simd, probs, values, columns, out, num_panels, ahead.as_ref()),
                    6 => micro::<S, 6>(simd, probs, values, columns, out, num_panels, ahead.as_ref()),
                    4 => micro::<S, 4>(simd, probs, values, columns, out, num_panels, ahead.as_ref()),
                    2 => micro::<S, 2>(simd, probs, values, columns, out, num_panels, ahead.as_ref()),
                    _ => micro::<S, 1>(simd, probs, values, columns, out, num_panels, ahead.as_ref()),
                }
                row += rows;
            }
        }
    }
}

/// Rows of the next register block: as for the scores, but two equal halves of 16, which keep more sums in flight.
const fn sum_rows(isa: Isa, remaining: usize) -> usize {
    if remaining == 16 && isa.max_rows() >= 8 { 8 } else { block_rows(isa, remaining) }
}

/// `R` rows by one panel, in `2 R` registers.
#[inline(always)]
fn micro<S: Simd, const R: usize>(
    simd: S,
    probs: &[ScoreRow],
    values: &[[S::Row; 2]],
    columns: Range<usize>,
    out: &mut [[S::Row; 2]],
    stride: usize,
    ahead: Option<&(&Ahead<'_>, Range<usize>)>,
) {
    let Some(probs) = probs.first_chunk::<R>() else { return };
    assert!(columns.end <= KV_TILE, "columns {columns:?} of a tile");
    let mut acc = [[simd.splat(0.0); 2]; R];
    for r in 0..R {
        let row = &out[r * stride];
        acc[r] = [simd.load(&row[0]), simd.load(&row[1])];
    }
    for (n, v) in columns.zip(values) {
        if let Some((ahead, lines)) = ahead {
            ahead.ask(simd, n, lines.clone());
        }
        simd.prefetch(&v[0], AHEAD);
        simd.prefetch(&v[1], AHEAD);
        let v = [simd.load(&v[0]), simd.load(&v[1])];
        for r in 0..R {
            let x = simd.splat(probs[r][n]);
            acc[r][0] = simd.fma(x, v[0], acc[r][0]);
            acc[r][1] = simd.fma(x, v[1], acc[r][1]);
        }
    }
    for r in 0..R {
        let row = &mut out[r * stride];
        simd.store(acc[r][0], &mut row[0]);
        simd.store(acc[r][1], &mut row[1]);
    }
}

/// Multiplies each row of output by its factor; rows with factor 1 are not touched.
pub(crate) struct Rescale<'a> {
    pub(crate) factors: &'a [f32],
    /// `[factors.len(), dim_padded]`.
    pub(crate) out: &'a mut [f32],
}

impl Kernel for Rescale<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let out: &mut [S::Row] = bytemuck::cast_slice_mut(self.out);
        let width = out.len() / self.factors.len();
        for (&factor, row) in self.factors.iter().zip(out.chunks_exact_mut(width)) {
            if factor != 1.0 {
                let factor = simd.splat(factor);
                for x in row {
                    let scaled = simd.mul(simd.load(x), factor);
                    simd.store(scaled, x);
                }
            }
        }
    }
}

//! Owns the outputs: `O += P V` for a few rows and a range of the columns of a tile, and the scaling of `O`.
//! Invariant: each output is one chain of multiply-adds over the keys in ascending order, continued from what `O` holds,
//! whatever the size of the register block or the number of calls. Only the given columns of `P` and `V` are read.

use std::ops::Range;

use super::ahead::Ahead;
use super::isa::{Isa, Kernel, Simd};
use super::pack::{KV_TILE, block_rows};
use super::qk::ScoreRow;

/// How far ahead of their use the rows of a value tile are asked for, in keys.
const AHEAD: usize = 16;

/// Keys between two times of asking for memory.
const ASK_KEYS: usize = 64;

/// Packed values of some columns of a tile.
#[derive(Clone, Copy)]
pub(crate) struct Values<'a> {
    pub(crate) tile: &'a [f32],
    pub(crate) strides: Strides,
    /// Column of its first key.
    pub(crate) first: usize,
}

/// Where the panels of a tile are, in panels of two vectors.
#[derive(Clone, Copy)]
pub(crate) struct Strides {
    /// From a key to the next, in one panel.
    pub(crate) key: usize,
    /// From a panel of a key to its next panel.
    pub(crate) panel: usize,
}

impl Strides {
    /// Of a tile `[panels, room]`.
    pub(crate) const fn of_panels(room: usize) -> Strides {
        Strides { key: 1, panel: room }
    }

    /// Of a tile `[keys, stride]`, in floats.
    pub(crate) const fn of_rows(isa: Isa, stride: usize) -> Strides {
        Strides { key: stride / isa.panel(), panel: 1 }
    }
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
            let Strides { key, panel: panel_stride } = self.values.strides;
            let values = &values[panel * panel_stride + (self.columns.start - self.values.first) * key..];
            let mut row = 0;
            while row < num_rows {
                let rows = sum_rows(self.isa, num_rows - row);
                let block = Block {
                    probs: &self.probs[row..row + rows],
                    values,
                    stride: key,
                    columns: self.columns.clone(),
                    num_panels,
                    is_first: row == 0,
                    ahead: self.ahead,
                };
                let out = &mut out[row * num_panels + panel..];
                match rows {
                    12 => block.micro::<S, 12>(simd, out),
                    8 => block.micro::<S, 8>(simd, out),
                    6 => block.micro::<S, 6>(simd, out),
                    4 => block.micro::<S, 4>(simd, out),
                    2 => block.micro::<S, 2>(simd, out),
                    _ => block.micro::<S, 1>(simd, out),
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

/// What a register block reads.
struct Block<'a, R> {
    probs: &'a [ScoreRow],
    /// One panel of the keys from the first column on.
    values: &'a [[R; 2]],
    /// From a key to the next.
    stride: usize,
    columns: Range<usize>,
    num_panels: usize,
    /// Whether it is the first that reads the panel.
    is_first: bool,
    ahead: Option<&'a Ahead<'a>>,
}

impl<R> Block<'_, R> {
    /// `M` rows by one panel, in `2 M` registers.
    #[inline(always)]
    fn micro<S: Simd<Row = R>, const M: usize>(&self, simd: S, out: &mut [[R; 2]]) {
        let Some(probs) = self.probs.first_chunk::<M>() else { return };
        let columns = self.columns.clone();
        assert!(columns.end <= KV_TILE, "columns {columns:?} of a tile");
        let mut acc = [[simd.splat(0.0); 2]; M];
        for m in 0..M {
            let row = &out[m * self.num_panels];
            acc[m] = [simd.load(&row[0]), simd.load(&row[1])];
        }
        // What is asked for on the way would take registers from the inner loop.
        let mut first = columns.start;
        while first < columns.end {
            let some = first..columns.end.min(first + ASK_KEYS);
            let mut at = (first - columns.start) * self.stride;
            for n in some.clone() {
                let v = &self.values[at];
                at += self.stride;
                if self.is_first {
                    simd.prefetch(v, AHEAD * self.stride);
                    simd.prefetch(&v[1], 2 * AHEAD * self.stride);
                }
                let v = [simd.load(&v[0]), simd.load(&v[1])];
                for m in 0..M {
                    let x = simd.splat(probs[m][n]);
                    acc[m][0] = simd.fma(x, v[0], acc[m][0]);
                    acc[m][1] = simd.fma(x, v[1], acc[m][1]);
                }
            }
            if let Some(ahead) = self.ahead {
                ahead.work(simd, 2 * M * some.len());
            }
            first = some.end;
        }
        for m in 0..M {
            let row = &mut out[m * self.num_panels];
            simd.store(acc[m][0], &mut row[0]);
            simd.store(acc[m][1], &mut row[1]);
        }
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

//! Owns products of rows with a matrix that is used again and again: [`PackedWeights`] and [`PackedRows`], for
//! backends that project around attention.
//! Invariant: each element of a product is one chain of multiply-adds over the inputs in ascending order, starting at 0
//! (the kernel is that of the scores). So it depends on its row and its weights alone, not on the other rows.

use std::fmt;

use kvpool::HostTensor;

use super::isa::Isa;
use super::pack::KV_TILE;
use super::qk::Scores;
use super::queries::{PackQueries, QueryVectors};
use super::scratch::AlignedFloats;
use super::unit::{SUPER_ROWS, blocks};

/// A matrix `[num_out, num_in]`, packed for products with rows of `num_in` elements.
pub struct PackedWeights {
    isa: Isa,
    num_out: usize,
    num_in: usize,
    /// `[num_out / panel, num_in padded, panel]`, zeros beyond `num_out`.
    panels: AlignedFloats,
}

impl fmt::Debug for PackedWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PackedWeights")
            .field("isa", &self.isa)
            .field("num_out", &self.num_out)
            .field("num_in", &self.num_in)
            .finish_non_exhaustive()
    }
}

impl PackedWeights {
    /// Packs a matrix whose element in row `out` and column `in` is `at(out, in)`.
    pub fn new(isa: Isa, num_out: usize, num_in: usize, at: impl Fn(usize, usize) -> f32) -> PackedWeights {
        let (panel, in_padded) = (isa.panel(), padded(isa, num_in));
        let mut panels = AlignedFloats::default();
        panels.grow(num_out.next_multiple_of(panel) * in_padded);
        let data = panels.all_mut();
        for out in 0..num_out {
            for input in 0..num_in {
                data[(out / panel * in_padded + input) * panel + out % panel] = at(out, input);
            }
        }
        PackedWeights { isa, num_out, num_in, panels }
    }

    /// Rows of the matrix: elements of a row of the product.
    #[must_use]
    pub const fn num_out(&self) -> usize {
        self.num_out
    }

    /// Columns of the matrix: elements of a row that is multiplied.
    #[must_use]
    pub const fn num_in(&self) -> usize {
        self.num_in
    }

    /// Writes the product with row `i` to `out[i * stride..][..num_out]`.
    ///
    /// # Panics
    /// Where the rows do not have `num_in` elements, or `out` ends before the last row does.
    pub fn multiply(&self, rows: &PackedRows, out: &mut [f32], stride: usize) {
        assert_eq!(rows.dim, self.num_in, "elements of a row and columns of the matrix");
        let (panel, in_padded) = (self.isa.panel(), padded(self.isa, self.num_in));
        let num_panels = self.num_out.div_ceil(panel);
        let panels = self.panels.get(num_panels * panel * in_padded);
        let queries = rows.blocks.get(rows.num_rows * in_padded);
        let mut scores = [[0.0; KV_TILE]; SUPER_ROWS];
        for first_out in (0..self.num_out).step_by(KV_TILE) {
            let len = KV_TILE.min(self.num_out - first_out);
            for first in (0..rows.num_rows).step_by(SUPER_ROWS) {
                let scores = &mut scores[..SUPER_ROWS.min(rows.num_rows - first)];
                self.isa.run(Scores {
                    isa: self.isa,
                    queries: &queries[first * in_padded..],
                    keys: &panels[first_out * in_padded..],
                    dim: self.num_in,
                    dim_padded: in_padded,
                    panels: 0..len.div_ceil(panel),
                    scores: &mut *scores,
                });
                for (row, scores) in scores.iter().enumerate() {
                    let start = (first + row) * stride + first_out;
                    out[start..start + len].copy_from_slice(&scores[..len]);
                }
            }
        }
    }
}

/// Rows to multiply, packed for any number of matrices.
pub struct PackedRows {
    isa: Isa,
    num_rows: usize,
    dim: usize,
    blocks: AlignedFloats,
    stage: AlignedFloats,
}

impl fmt::Debug for PackedRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PackedRows")
            .field("isa", &self.isa)
            .field("num_rows", &self.num_rows)
            .field("dim", &self.dim)
            .finish_non_exhaustive()
    }
}

impl PackedRows {
    /// No rows yet.
    #[must_use]
    pub fn new(isa: Isa) -> PackedRows {
        let (blocks, stage) = (AlignedFloats::default(), AlignedFloats::default());
        PackedRows { isa, num_rows: 0, dim: 0, blocks, stage }
    }

    /// Packs the vectors of one head of all rows of `x`, widened, in place of what was there. Reuses memory.
    ///
    /// # Panics
    /// Where `x` has no such head.
    pub fn pack(&mut self, x: HostTensor<'_>, head: usize) {
        let (isa, dim_padded) = (self.isa, padded(self.isa, x.dim()));
        (self.num_rows, self.dim) = (x.rows(), x.dim());
        self.blocks.grow(self.num_rows * dim_padded);
        let stage_len = isa.panel() / 2 * dim_padded;
        self.stage.grow(stage_len);
        for block in blocks(isa, self.num_rows) {
            let vectors = QueryVectors {
                q: x,
                first: (block.start, head),
                heads: head..head + 1,
                scale: 1.0,
                num_rows: block.len(),
                num_ahead: 0,
            };
            isa.run(PackQueries {
                vectors,
                stage: self.stage.get_mut(stage_len),
                block: &mut self.blocks.all_mut()[block.start * dim_padded..block.end * dim_padded],
            });
        }
    }
}

/// Elements of a packed row: whole vectors.
fn padded(isa: Isa, dim: usize) -> usize {
    dim.next_multiple_of(isa.panel() / 2)
}

//! Owns the way of queries into the blocks that the matrix kernels read: widened to `f32`, scaled, and transposed or as
//! they are; and the asking for memory of outputs.

use std::ops::Range;

use bytemuck::Zeroable;
use kvpool::{HostSlice, HostTensor};

use super::isa::{Kernel, Simd};
use super::pack::{Element, MAX_LANES, prefetch};

/// Query vectors: those of `heads` of a token, then of the next token.
pub(crate) struct QueryVectors<'a> {
    pub(crate) q: HostTensor<'a>,
    /// Token and head of the first vector.
    pub(crate) first: (usize, usize),
    pub(crate) heads: Range<usize>,
    /// What they are multiplied by.
    pub(crate) scale: f32,
    /// Vectors to pack.
    pub(crate) num_rows: usize,
    /// Vectors that will be packed next are asked for.
    pub(crate) num_ahead: usize,
}

/// Packs query vectors into a block: widened, scaled, transposed.
pub(crate) struct PackQueries<'a> {
    /// At most the rows of the block.
    pub(crate) vectors: QueryVectors<'a>,
    /// `[L, dim_padded]`, to work in.
    pub(crate) stage: &'a mut [f32],
    /// `[dim_padded, rows of the block]`; rows beyond `num_rows` hold anything afterwards.
    pub(crate) block: &'a mut [f32],
}

impl Kernel for PackQueries<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let dim_padded = self.stage.len() / S::LANES;
        let stage = &mut *self.stage;
        widen_queries(simd, &self.vectors, dim_padded, stage);
        transpose_queries(simd, stage, dim_padded, self.block);
    }
}

/// Packs query vectors one after the other: widened and scaled.
pub(crate) struct PackQueryRows<'a> {
    pub(crate) vectors: QueryVectors<'a>,
    /// Floats from a row to the next; zeros beyond the vector.
    pub(crate) dim_padded: usize,
    /// `[num_rows, dim_padded]`.
    pub(crate) rows: &'a mut [f32],
}

impl Kernel for PackQueryRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let dim = self.vectors.q.dim();
        for row in self.rows.chunks_exact_mut(self.dim_padded).take(self.vectors.num_rows) {
            row[dim..].fill(0.0);
        }
        widen_queries(simd, &self.vectors, self.dim_padded, self.rows);
    }
}

#[inline(always)]
fn widen_queries<S: Simd>(simd: S, vectors: &QueryVectors<'_>, dim_padded: usize, rows: &mut [f32]) {
    match vectors.q.data() {
        HostSlice::F32(data) => widen(simd, vectors, data, dim_padded, rows),
        HostSlice::F16(data) => widen(simd, vectors, data, dim_padded, rows),
        HostSlice::Bf16(data) => widen(simd, vectors, data, dim_padded, rows),
    }
}

#[inline(always)]
fn widen<S: Simd, E: Element>(simd: S, vectors: &QueryVectors<'_>, data: &[E], dim_padded: usize, rows: &mut [f32]) {
    let dim = vectors.q.dim();
    let (mut token, mut head) = vectors.first;
    let scale = simd.splat(vectors.scale);
    for row in 0..vectors.num_rows + vectors.num_ahead {
        let start = vectors.q.offset(token, head);
        let vector = &data[start..start + dim];
        if row < vectors.num_rows {
            let to = &mut rows[row * dim_padded..(row + 1) * dim_padded];
            E::widen(simd, vector, to);
            for x in bytemuck::cast_slice_mut::<f32, S::Row>(to) {
                let scaled = simd.mul(simd.load(x), scale);
                simd.store(scaled, x);
            }
        } else {
            prefetch(simd, vector);
        }
        head += 1;
        if head == vectors.heads.end {
            (token, head) = (token + 1, vectors.heads.start);
        }
    }
}

#[inline(always)]
fn transpose_queries<S: Simd>(simd: S, stage: &[f32], dim_padded: usize, block: &mut [f32]) {
    let (dim_rows, rows) = (dim_padded / S::LANES, block.len() / dim_padded);
    let stage: &[S::Row] = bytemuck::cast_slice(stage);
    for i in 0..dim_rows {
        // Column d of the block is a vector, of which the first `rows` lanes count: the next one overwrites the rest.
        let mut wide = [S::Row::zeroed(); MAX_LANES];
        simd.transpose(&stage[i..], dim_rows, &mut wide, 1);
        for (j, from) in wide.iter().take(S::LANES).enumerate() {
            let to = &mut block[(i * S::LANES + j) * rows..];
            if to.len() >= S::LANES {
                simd.store(simd.load(from), &mut bytemuck::cast_slice_mut(&mut to[..S::LANES])[0]);
            } else {
                to[..rows].copy_from_slice(&from.as_ref()[..rows]);
            }
        }
    }
}

/// Asks for head vectors of the output, soon to be written.
pub(crate) struct PrefetchVectors<'a> {
    pub(crate) tensor: HostTensor<'a>,
    pub(crate) token: usize,
    pub(crate) heads: Range<usize>,
}

impl Kernel for PrefetchVectors<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let dim = self.tensor.dim();
        for head in self.heads {
            let start = self.tensor.offset(self.token, head);
            match self.tensor.data() {
                HostSlice::F32(data) => prefetch(simd, &data[start..start + dim]),
                HostSlice::F16(data) => prefetch(simd, &data[start..start + dim]),
                HostSlice::Bf16(data) => prefetch(simd, &data[start..start + dim]),
            }
        }
    }
}

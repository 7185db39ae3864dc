//! Owns the way of keys and values into the tiles that the matrix kernels read: widened to `f32`, keys transposed, values
//! in panels of two vectors; where the values are in the keys, rows one after the other, as they are stored.
//!
//! Invariants: exactly the given positions of the KV cache are read, columns of a key tile beyond them are zeros, and
//! lanes beyond `head_dim` are zeros or never read. So nothing foreign enters any arithmetic.
//!
//! Layouts, with `L` lanes: a key tile is `[keys / 2L, dim_padded, 2, L]`, a value tile `[dim_padded / 2L, room, 2, L]`, a
//! tile of rows `[keys, stride]`.

use std::marker::PhantomData;
use std::ops::Range;

use half::{bf16, f16};
use kvpool::{KvPlane, KvSlice, LATENT_BLOCK, LatentRow, PageId};

use super::isa::{Isa, Kernel, Simd};

/// Keys in a tile. Tiles begin at multiples of it, whatever the request, so a row's arithmetic depends on its own keys.
pub(crate) const KV_TILE: usize = 128;

/// Lanes of the widest vector.
pub(crate) const MAX_LANES: usize = 16;

/// An element that widens to `f32`.
pub(crate) trait Element: Copy {
    /// Widens `from` to the first elements of `to`.
    fn widen<S: Simd>(simd: S, from: &[Self], to: &mut [f32]);
}

impl Element for f32 {
    #[inline(always)]
    fn widen<S: Simd>(simd: S, from: &[f32], to: &mut [f32]) {
        simd.copy(from, to);
    }
}

impl Element for f16 {
    #[inline(always)]
    fn widen<S: Simd>(simd: S, from: &[f16], to: &mut [f32]) {
        simd.widen_f16(from, to);
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn widen<S: Simd>(simd: S, from: &[bf16], to: &mut [f32]) {
        simd.widen_bf16(from, to);
    }
}

/// FP8 E4M3 codes.
impl Element for u8 {
    #[inline(always)]
    fn widen<S: Simd>(simd: S, from: &[u8], to: &mut [f32]) {
        simd.widen_fp8(from, to);
    }
}

/// How a head vector is stored: an element a value, or as a row.
trait Vectors: Copy {
    type Element;

    /// Widens the values `columns` of a vector to the first elements of `to`.
    fn widen<S: Simd>(self, simd: S, vector: &[Self::Element], columns: Range<usize>, to: &mut [f32]);
}

/// An element is a value.
struct Elementwise<E>(PhantomData<E>);

impl<E> Clone for Elementwise<E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E> Copy for Elementwise<E> {}

impl<E: Element> Vectors for Elementwise<E> {
    type Element = E;

    #[inline(always)]
    fn widen<S: Simd>(self, simd: S, vector: &[E], columns: Range<usize>, to: &mut [f32]) {
        E::widen(simd, &vector[columns], to);
    }
}

/// Columns begin at multiples of a panel, or are all.
impl Vectors for LatentRow {
    type Element = u8;

    #[inline(always)]
    fn widen<S: Simd>(self, simd: S, row: &[u8], columns: Range<usize>, to: &mut [f32]) {
        let codes = self.codes(row);
        let mut column = columns.start;
        while column < columns.end.min(codes.len()) {
            let block = column / LATENT_BLOCK;
            let end = ((block + 1) * LATENT_BLOCK).min(columns.end);
            let to = &mut to[column - columns.start..][..end - column];
            simd.widen_fp8(&codes[column..end], to);
            scale(simd, to, self.scale(row, block));
            column = end;
        }
        if column < columns.end {
            let first = column - codes.len();
            let bytes = &self.rope_bytes(row)[first..columns.end - codes.len()];
            for (bytes, to) in bytes.chunks(MAX_LANES).zip(to[column - columns.start..].chunks_mut(MAX_LANES)) {
                let mut values = [bf16::ZERO; MAX_LANES];
                values.iter_mut().zip(bytes).for_each(|(value, bytes)| *value = bf16::from_ne_bytes(*bytes));
                simd.widen_bf16(&values[..bytes.len()], to);
            }
        }
    }
}

/// Multiplies values by a factor.
#[inline(always)]
fn scale<S: Simd>(simd: S, values: &mut [f32], factor: f32) {
    let by = simd.splat(factor);
    let whole = values.len() / S::LANES * S::LANES;
    let (whole, rest) = values.split_at_mut(whole);
    for x in bytemuck::cast_slice_mut::<f32, S::Row>(whole) {
        let scaled = simd.mul(simd.load(x), by);
        simd.store(scaled, x);
    }
    rest.iter_mut().for_each(|x| *x *= factor);
}

/// The vectors of one KV head of one request in one plane, by KV position.
#[derive(Clone, Copy)]
pub(crate) struct PagedRows<'a> {
    /// The plane, K or V.
    pub(crate) plane: KvPlane<'a>,
    /// Page ids of the request.
    pub(crate) pages: &'a [i32],
    /// Tokens in a page.
    pub(crate) page_size: u32,
    /// The KV head.
    pub(crate) head: u32,
}

impl PagedRows<'_> {
    /// Element of the plane's data where the vector of a position begins.
    pub(crate) fn element(&self, position: usize) -> usize {
        let page_size = self.page_size as usize;
        let page = PageId::from_i32(self.pages[position / page_size]).expect("page ids were validated");
        #[expect(clippy::cast_possible_truncation, reason = "a remainder of a u32")]
        let token = (position % page_size) as u32;
        self.plane.layout.element(page, token, self.head)
    }

    /// What the vectors of a plane of rows are.
    fn latent_row(&self) -> LatentRow {
        self.plane.layout.row.expect("a plane of rows has them")
    }
}

/// Walks the vectors of consecutive positions; one division at the start, none a step.
struct Walk<'a, E> {
    rows: PagedRows<'a>,
    data: &'a [E],
    page_idx: usize,
    token: u32,
}

impl<'a, E> Walk<'a, E> {
    #[inline(always)]
    fn new(Run { rows, start: position, .. }: Run<'a>, data: &'a [E]) -> Self {
        let page_size = rows.page_size as usize;
        #[expect(clippy::cast_possible_truncation, reason = "a remainder of a u32")]
        let token = (position % page_size) as u32;
        Self { rows, data, page_idx: position / page_size, token }
    }

    /// The vector at the position, which moves on.
    #[inline(always)]
    fn next(&mut self) -> &'a [E] {
        let page = PageId::from_i32(self.rows.pages[self.page_idx]).expect("page ids were validated");
        let layout = &self.rows.plane.layout;
        let start = layout.element(page, self.token, self.rows.head);
        self.token += 1;
        if self.token == self.rows.page_size {
            self.token = 0;
            self.page_idx += 1;
        }
        &self.data[start..start + layout.vector_len()]
    }
}

/// Asks for all cache lines of a vector.
#[inline(always)]
pub(super) fn prefetch<S: Simd, E>(simd: S, row: &[E]) {
    for x in row.iter().step_by(64 / size_of::<E>()) {
        simd.prefetch_far(x);
    }
}

/// Consecutive positions of one KV head.
#[derive(Clone, Copy)]
pub(crate) struct Run<'a> {
    pub(crate) rows: PagedRows<'a>,
    pub(crate) start: usize,
    pub(crate) len: usize,
}

impl Run<'_> {
    /// The positions of the run that are in a range, counted from its start.
    pub(crate) fn part(self, range: Range<usize>) -> Self {
        let (start, end) = (range.start.min(self.len), range.end.min(self.len));
        Run { start: self.start + start, len: end - start, ..self }
    }
}

/// Packs up to [`KV_TILE`] keys into a key tile.
pub(crate) struct PackKeys<'a> {
    pub(crate) run: Run<'a>,
    /// Asked for on the way: what is packed next.
    pub(crate) ahead: Run<'a>,
    /// `[L, dim_padded]`, zeros beyond `head_dim`.
    pub(crate) stage: &'a mut [f32],
    pub(crate) tile: &'a mut [f32],
}

/// As [`PackKeys`], for values.
pub(crate) struct PackValues<'a> {
    pub(crate) run: Run<'a>,
    /// Asked for on the way: what is packed next.
    pub(crate) ahead: Run<'a>,
    /// Keys that the tile has room for.
    pub(crate) room: usize,
    pub(crate) tile: &'a mut [f32],
}

/// Packs keys that hold their values, one after the other.
pub(crate) struct PackRows<'a> {
    pub(crate) run: Run<'a>,
    /// Floats from a row to the next; zeros beyond `head_dim`.
    pub(crate) stride: usize,
    /// `[run.len, stride]`.
    pub(crate) rows: &'a mut [f32],
}

/// Asks for the vectors of a run, soon to be packed.
pub(crate) struct Prefetch<'a>(pub(crate) Run<'a>);

impl Kernel for PackKeys<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        match self.run.rows.plane.data {
            KvSlice::F32(data) => pack_keys(simd, &mut self, data, Elementwise(PhantomData)),
            KvSlice::F16(data) => pack_keys(simd, &mut self, data, Elementwise(PhantomData)),
            KvSlice::Bf16(data) => pack_keys(simd, &mut self, data, Elementwise(PhantomData)),
            KvSlice::Fp8E4m3(data) => pack_keys(simd, &mut self, data, Elementwise(PhantomData)),
            KvSlice::Fp8Latent(data) => {
                let row = self.run.rows.latent_row();
                pack_keys(simd, &mut self, data, row);
            }
        }
    }
}

impl Kernel for PackValues<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        match self.run.rows.plane.data {
            KvSlice::F32(data) => pack_values(simd, &mut self, data, Elementwise(PhantomData)),
            KvSlice::F16(data) => pack_values(simd, &mut self, data, Elementwise(PhantomData)),
            KvSlice::Bf16(data) => pack_values(simd, &mut self, data, Elementwise(PhantomData)),
            KvSlice::Fp8E4m3(data) => pack_values(simd, &mut self, data, Elementwise(PhantomData)),
            KvSlice::Fp8Latent(data) => {
                let row = self.run.rows.latent_row();
                pack_values(simd, &mut self, data, row);
            }
        }
    }
}

impl Kernel for PackRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        match self.run.rows.plane.data {
            KvSlice::F32(data) => pack_rows(simd, &mut self, data, Elementwise(PhantomData)),
            KvSlice::F16(data) => pack_rows(simd, &mut self, data, Elementwise(PhantomData)),
            KvSlice::Bf16(data) => pack_rows(simd, &mut self, data, Elementwise(PhantomData)),
            KvSlice::Fp8E4m3(data) => pack_rows(simd, &mut self, data, Elementwise(PhantomData)),
            KvSlice::Fp8Latent(data) => {
                let row = self.run.rows.latent_row();
                pack_rows(simd, &mut self, data, row);
            }
        }
    }
}

impl Kernel for Prefetch<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        match self.0.rows.plane.data {
            KvSlice::F32(data) => prefetch_run(simd, self.0, data),
            KvSlice::F16(data) => prefetch_run(simd, self.0, data),
            KvSlice::Bf16(data) => prefetch_run(simd, self.0, data),
            KvSlice::Fp8E4m3(data) | KvSlice::Fp8Latent(data) => prefetch_run(simd, self.0, data),
        }
    }
}

#[inline(always)]
fn prefetch_run<S: Simd, E>(simd: S, run: Run<'_>, data: &[E]) {
    let mut walk = Walk::new(run, data);
    for _ in 0..run.len {
        prefetch(simd, walk.next());
    }
}

#[inline(always)]
fn pack_keys<S: Simd, V: Vectors>(simd: S, job: &mut PackKeys<'_>, data: &[V::Element], vectors: V) {
    let dim_padded = job.stage.len() / S::LANES;
    let dim_rows = dim_padded / S::LANES;
    let tile: &mut [S::Row] = bytemuck::cast_slice_mut(job.tile);
    let (len, dim, num_ahead) = (job.run.len, job.run.rows.plane.layout.head_dim, job.ahead.len);
    let (mut walk, mut ahead) = (Walk::new(job.run, data), Walk::new(job.ahead, data));
    for group in 0..len.div_ceil(S::LANES) {
        let first = group * S::LANES;
        let filled = S::LANES.min(len - first);
        for key in 0..filled {
            let to = &mut job.stage[key * dim_padded..(key + 1) * dim_padded];
            vectors.widen(simd, walk.next(), 0..dim, to);
            if first + key < num_ahead {
                prefetch(simd, ahead.next());
            }
        }
        job.stage[filled * dim_padded..].fill(0.0);
        let stage: &[S::Row] = bytemuck::cast_slice(job.stage);
        let panel = &mut tile[group / 2 * dim_padded * 2 + group % 2..];
        for block in 0..dim_rows {
            simd.transpose(&stage[block..], dim_rows, &mut panel[block * S::LANES * 2..], 2);
        }
    }
    if len.div_ceil(S::LANES) % 2 == 1 {
        let panel = &mut tile[len / (2 * S::LANES) * dim_padded * 2..][..dim_padded * 2];
        let zero = simd.splat(0.0);
        for row in panel.iter_mut().skip(1).step_by(2) {
            simd.store(zero, row);
        }
    }
}

#[inline(always)]
fn pack_values<S: Simd, V: Vectors>(simd: S, job: &mut PackValues<'_>, data: &[V::Element], vectors: V) {
    let width = 2 * S::LANES;
    let (len, dim, num_ahead) = (job.run.len, job.run.rows.plane.layout.head_dim, job.ahead.len);
    let (mut walk, mut ahead) = (Walk::new(job.run, data), Walk::new(job.ahead, data));
    for key in 0..len {
        let row = walk.next();
        for (panel, first) in (0..dim).step_by(width).enumerate() {
            let to = &mut job.tile[(panel * job.room + key) * width..][..width];
            let columns = first..dim.min(first + width);
            let filled = columns.len();
            vectors.widen(simd, row, columns, to);
            if filled < width {
                to[filled..].fill(0.0);
            }
        }
        if key < num_ahead {
            prefetch(simd, ahead.next());
        }
    }
}

#[inline(always)]
fn pack_rows<S: Simd, V: Vectors>(simd: S, job: &mut PackRows<'_>, data: &[V::Element], vectors: V) {
    let dim = job.run.rows.plane.layout.head_dim;
    let mut walk = Walk::new(job.run, data);
    for row in job.rows.chunks_exact_mut(job.stride).take(job.run.len) {
        vectors.widen(simd, walk.next(), 0..dim, row);
        row[dim..].fill(0.0);
    }
}

/// Rows of the next register block where `remaining` rows are left: the largest kernel that fits.
pub(crate) const fn block_rows(isa: Isa, remaining: usize) -> usize {
    let remaining = if remaining < isa.max_rows() { remaining } else { isa.max_rows() };
    match remaining {
        12.. => 12,
        8.. => 8,
        6.. => 6,
        4.. => 4,
        2.. => 2,
        _ => 1,
    }
}

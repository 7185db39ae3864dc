//! Owns the host KV storage of one layer: [`HostKv`], one buffer with a K plane and a V plane in it.
//! Invariants: every element of both planes lies in the buffer, no two slots share an element, and K and V share some
//! only where that was asked for ([`HostKv::with_shared_planes`]). Padding slots write nothing.
//! Does not know who owns a page: leases do. Does not allocate after construction.

use crate::error::{KvPart, OverlapDetail, ShapeError};
use crate::format::{KvDtype, KvFormat};
use crate::ids::{PageId, PageSize, Slot};
use crate::layout::{KvLayout, KvPlaneLayout, KvShape};
use crate::spec::{KvSpec, Values};
use crate::storage::{KvBuffer, KvPlane, KvSliceMut};
use crate::tensor::HostTensor;

/// An append that was refused; nothing was written.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AppendError {
    /// The tensor's shape does not fit the slots and the cache.
    #[error("{part} is {got:?} rows x heads x dim, expected {expected:?}")]
    Shape {
        /// The tensor.
        part: KvPart,
        /// Its shape.
        got: [usize; 3],
        /// Number of slots, heads and head_dim of the cache.
        expected: [usize; 3],
    },
    /// A slot is neither the padding slot nor a slot of the pool.
    #[error("slot {slot} of row {row} is outside the pool of {num_slots} slots and is not the padding slot")]
    SlotOutOfRange {
        /// Row of the slot.
        row: usize,
        /// The slot.
        slot: i32,
        /// Slots of the pool.
        num_slots: u64,
    },
    /// V was given to a cache that has no values of their own.
    #[error("v was given to a cache without values of their own: append k alone")]
    UnwantedValues,
    /// V was not given to a cache that has values of their own.
    #[error("k alone was given to a cache with values of their own: append k and v")]
    MissingValues,
}

/// A copy of a page that was refused; nothing was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CopyPageError {
    /// The page is not of this pool.
    #[error("page {page} is outside the pool of {num_pages} pages")]
    PageOutOfRange {
        /// The page.
        page: PageId,
        /// Pages of the pool.
        num_pages: u32,
    },
    /// The slot is not of this pool.
    #[error("slot {slot} is outside the pool of {num_slots} slots")]
    SlotOutOfRange {
        /// The slot.
        slot: i32,
        /// Slots of the pool.
        num_slots: u64,
    },
    /// A page of one cache is not a page of the other: formats or page shapes differ, or which of them shares planes.
    #[error("the pages of the two caches hold different things")]
    OtherPages,
    /// There are other layers on one side than on the other.
    #[error("{from} layers cannot be copied to {to} layers")]
    NumLayers {
        /// Layers that are read.
        from: usize,
        /// Layers that are written.
        to: usize,
    },
}

/// The KV cache of one layer in host memory: one buffer, two planes.
#[derive(Debug, Clone)]
pub struct HostKv {
    shape: KvShape,
    format: KvFormat,
    buffer: KvBuffer,
    k: KvPlaneLayout,
    v: KvPlaneLayout,
    is_shared: bool,
}

impl HostKv {
    /// A zeroed cache with all of K before all of V.
    ///
    /// # Errors
    /// As [`KvShape::validate`], and [`ShapeError::OutOfMemory`].
    pub fn new(shape: KvShape, layout: KvLayout, format: KvFormat) -> Result<HostKv, ShapeError> {
        let planes = shape.packed_planes(layout)?;
        HostKv::zeroed(shape, format, planes)
    }

    /// A zeroed cache of `num_pages` pages for what a layer keeps of a token.
    ///
    /// # Errors
    /// As [`HostKv::new`], and [`KvShape::key_plane`] and [`HostKv::with_shared_planes`] where values are in the keys.
    pub fn for_spec(
        spec: KvSpec,
        num_pages: u32,
        page_size: PageSize,
        layout: KvLayout,
        format: KvFormat,
    ) -> Result<HostKv, ShapeError> {
        let shape = spec.shape(num_pages, page_size);
        if !matches!(spec.values, Values::InKeys(_)) {
            return HostKv::new(shape, layout, format);
        }
        let k = shape.key_plane(layout, format.dtype())?;
        let len = k.extent(&shape).ok_or(ShapeError::Overflow { what: "kv cache" })?;
        HostKv::with_shared_planes(shape, format, KvBuffer::try_zeroed(format.dtype(), len)?, k, 0)
    }

    /// A zeroed cache with K and V of a page next to each other.
    ///
    /// # Errors
    /// As [`KvShape::validate`], and [`ShapeError::OutOfMemory`].
    pub fn interleaved(shape: KvShape, layout: KvLayout, format: KvFormat) -> Result<HostKv, ShapeError> {
        let planes = shape.interleaved_planes(layout)?;
        HostKv::zeroed(shape, format, planes)
    }

    /// A cache over a given buffer with any strides (padded, interleaved, either order of the axes).
    ///
    /// Takes time and scratch memory in proportion to the buffer (one bit per element), to prove that no element has
    /// two positions.
    ///
    /// # Errors
    /// [`ShapeError::BufferDtype`], [`ShapeError::HeadDim`], [`ShapeError::RowFormat`], [`ShapeError::RowsHoldValues`],
    /// [`ShapeError::OutOfBounds`], [`ShapeError::Overlap`], [`ShapeError::Overflow`], and as [`KvShape::validate`].
    pub fn from_parts(
        shape: KvShape,
        format: KvFormat,
        buffer: KvBuffer,
        k: KvPlaneLayout,
        v: KvPlaneLayout,
    ) -> Result<HostKv, ShapeError> {
        require_own_values(format)?;
        require_parts(&shape, format, &buffer, [(KvPart::K, k), (KvPart::V, v)])?;
        require_disjoint(&shape, buffer.len(), &[("k", k), ("v", v)])?;
        Ok(HostKv { shape, format, buffer, k, v, is_shared: false })
    }

    /// A cache whose V is the columns `v_column..v_column + head_dim_v` of K, as a latent cache has it.
    ///
    /// It is written by appending K alone.
    ///
    /// # Errors
    /// As [`HostKv::from_parts`], and [`ShapeError::SharedColumns`] where K has no such columns,
    /// [`ShapeError::SharedScales`] where the two scales differ.
    pub fn with_shared_planes(
        shape: KvShape,
        format: KvFormat,
        buffer: KvBuffer,
        k: KvPlaneLayout,
        v_column: usize,
    ) -> Result<HostKv, ShapeError> {
        let head_dim = shape.head_dim_v as usize;
        let end = v_column.checked_add(head_dim).ok_or(ShapeError::Overflow { what: "v" })?;
        if end > k.head_dim {
            return Err(ShapeError::SharedColumns { v_column, end, head_dim_k: k.head_dim });
        }
        if k.row.is_some() && v_column != 0 {
            return Err(ShapeError::RowsHoldValues { dtype: format.dtype() });
        }
        let (k_scale, v_scale) = (format.k_scale(), format.v_scale());
        if k_scale.to_bits() != v_scale.to_bits() {
            return Err(ShapeError::SharedScales { k_scale, v_scale });
        }
        require_parts(&shape, format, &buffer, [(KvPart::K, k)])?;
        require_disjoint(&shape, buffer.len(), &[("k", k)])?;
        let v = KvPlaneLayout { offset: k.offset + v_column, head_dim, ..k };
        Ok(HostKv { shape, format, buffer, k, v, is_shared: true })
    }

    fn zeroed(shape: KvShape, format: KvFormat, planes: [KvPlaneLayout; 2]) -> Result<HostKv, ShapeError> {
        require_own_values(format)?;
        let overflow = ShapeError::Overflow { what: "kv cache" };
        let extents = planes.map(|plane| plane.extent(&shape));
        let len = extents.into_iter().flatten().max().ok_or(overflow)?;
        let [k, v] = planes;
        Ok(HostKv { shape, format, buffer: KvBuffer::try_zeroed(format.dtype(), len)?, k, v, is_shared: false })
    }

    /// The shape.
    #[must_use]
    pub const fn shape(&self) -> KvShape {
        self.shape
    }

    /// Dtype and scales.
    #[must_use]
    pub const fn format(&self) -> KvFormat {
        self.format
    }

    /// What it holds of a token. Columns of K are said to start at 0, see [`HostKv::v`] for where they do.
    #[must_use]
    pub const fn spec(&self) -> KvSpec {
        let KvShape { num_kv_heads, head_dim_k, head_dim_v, .. } = self.shape;
        let values = match (self.is_shared, head_dim_v) {
            (true, _) => Values::InKeys(head_dim_v),
            (false, 0) => Values::None,
            (false, _) => Values::Own(head_dim_v),
        };
        KvSpec { num_kv_heads, head_dim_k, values }
    }

    /// The keys, as stored.
    #[must_use]
    pub fn k(&self) -> KvPlane<'_> {
        KvPlane { data: self.buffer.as_slice(), layout: self.k }
    }

    /// The values, as stored.
    #[must_use]
    pub fn v(&self) -> KvPlane<'_> {
        KvPlane { data: self.buffer.as_slice(), layout: self.v }
    }

    /// The buffer with both planes.
    #[must_use]
    pub const fn buffer(&self) -> &KvBuffer {
        &self.buffer
    }

    /// The elements of the buffer, to load a file or to poison it in a test. Its dtype and length cannot change.
    pub fn buffer_mut(&mut self) -> KvSliceMut<'_> {
        self.buffer.as_slice_mut()
    }

    /// Writes row `i` of `k` and `v` to `slots[i]`: rounds to nearest even; FP8 divides by its scale (latent rows: by
    /// that of the block's largest value) and saturates at ±448; NaN stays NaN; `f16` and `bf16` overflow to infinity as IEEE rounding does.
    ///
    /// `k` is `[n, num_kv_heads, head_dim_k]`, `v` is `[n, num_kv_heads, head_dim_v]`, `n` the number of slots; `v` is
    /// `None` where the cache has no values of their own (in its keys, or none at all). Rows of padding slots are
    /// skipped. Of two rows with the same slot the later stays; refusing them is the planner's task. Allocates nothing.
    ///
    /// # Errors
    /// [`AppendError`]; nothing was written.
    pub fn append(
        &mut self,
        slots: &[Slot],
        k: &HostTensor<'_>,
        v: Option<&HostTensor<'_>>,
    ) -> Result<(), AppendError> {
        self.check_append(slots, k, v)?;
        let (k_scale, v_scale) = (self.format.k_scale(), self.format.v_scale());
        self.write_rows(slots, self.k, k, k_scale);
        if let Some(v) = v {
            self.write_rows(slots, self.v, v, v_scale);
        }
        Ok(())
    }

    /// Whether [`append`](Self::append) would write these rows: for who writes several caches, all or none.
    ///
    /// # Errors
    /// As [`append`](Self::append).
    pub fn check_append(
        &self,
        slots: &[Slot],
        k: &HostTensor<'_>,
        v: Option<&HostTensor<'_>>,
    ) -> Result<(), AppendError> {
        match (v, self.spec().values) {
            (None, Values::Own(_)) => return Err(AppendError::MissingValues),
            (Some(_), Values::InKeys(_) | Values::None) => return Err(AppendError::UnwantedValues),
            _ => {}
        }
        self.require_shape(slots, KvPart::K, k)?;
        if let Some(v) = v {
            self.require_shape(slots, KvPart::V, v)?;
        }
        self.require_slots(slots)
    }

    /// Reads the K vector of a slot and head as real values: widened and scaled.
    ///
    /// # Panics
    /// Where the slot or head is out of range, or `out` does not hold `head_dim_k` elements.
    pub fn read_k(&self, slot: Slot, head: u32, out: &mut [f32]) {
        self.read(slot, head, self.k(), self.format.k_scale(), out);
    }

    /// Reads the V vector of a slot and head as real values: widened and scaled.
    ///
    /// # Panics
    /// Where the slot or head is out of range, or `out` does not hold `head_dim_v` elements.
    pub fn read_v(&self, slot: Slot, head: u32, out: &mut [f32]) {
        self.read(slot, head, self.v(), self.format.v_scale(), out);
    }

    /// Copies all tokens of page `from` over page `to`, K and V, bit for bit. Same page: nothing happens.
    ///
    /// # Errors
    /// [`CopyPageError::PageOutOfRange`]; nothing was written.
    pub fn copy_page(&mut self, from: PageId, to: PageId) -> Result<(), CopyPageError> {
        self.require_page(from)?;
        self.require_page(to)?;
        for plane in self.own_planes() {
            for (token, head) in tokens_and_heads(self.shape) {
                let (source, target) = (plane.element(from, token, head), plane.element(to, token, head));
                self.buffer.copy_within(source..source + plane.vector_len(), target);
            }
        }
        Ok(())
    }

    /// Copies all tokens of page `from` of another cache over page `to` of this one, bit for bit. The two may have
    /// different strides and different numbers of pages.
    ///
    /// # Errors
    /// [`CopyPageError::PageOutOfRange`], [`CopyPageError::OtherPages`]; nothing was written.
    pub fn copy_page_from(&mut self, source: &HostKv, from: PageId, to: PageId) -> Result<(), CopyPageError> {
        let pages_of = |kv: &HostKv| (kv.shape.page_shape(), kv.format, kv.v_column());
        if pages_of(self) != pages_of(source) {
            return Err(CopyPageError::OtherPages);
        }
        source.require_page(from)?;
        self.require_page(to)?;
        for (read, written) in source.own_planes().zip(self.own_planes()) {
            for (token, head) in tokens_and_heads(self.shape) {
                let (start, target) = (read.element(from, token, head), written.element(to, token, head));
                self.buffer.copy_from(target, &source.buffer, start..start + read.vector_len());
            }
        }
        Ok(())
    }

    /// Copies the token at slot `from` of another cache over slot `to` of this one, bit for bit. The two may have different
    /// strides, page sizes and numbers of pages.
    ///
    /// # Errors
    /// [`CopyPageError::SlotOutOfRange`], [`CopyPageError::OtherPages`]; nothing was written.
    pub fn copy_token_from(&mut self, source: &HostKv, from: Slot, to: Slot) -> Result<(), CopyPageError> {
        if (self.spec(), self.format, self.v_column()) != (source.spec(), source.format, source.v_column()) {
            return Err(CopyPageError::OtherPages);
        }
        let (from, to) = (source.require_slot(from)?, self.require_slot(to)?);
        for (read, written) in source.own_planes().zip(self.own_planes()) {
            for head in 0..self.shape.num_kv_heads {
                let (start, target) = (read.element(from.0, from.1, head), written.element(to.0, to.1, head));
                self.buffer.copy_from(target, &source.buffer, start..start + read.vector_len());
            }
        }
        Ok(())
    }

    /// First column of V in K, where it is there.
    fn v_column(&self) -> Option<usize> {
        self.is_shared.then(|| self.v.offset - self.k.offset)
    }

    fn require_slot(&self, slot: Slot) -> Result<(PageId, u32), CopyPageError> {
        let num_slots = self.shape.num_slots();
        let position = self.position(slot).filter(|(page, _)| page.raw() < self.shape.num_pages);
        position.ok_or(CopyPageError::SlotOutOfRange { slot: slot.raw(), num_slots })
    }

    /// The planes with elements of their own.
    fn own_planes(&self) -> impl Iterator<Item = KvPlaneLayout> + use<> {
        [Some(self.k), (!self.is_shared).then_some(self.v)].into_iter().flatten()
    }

    fn require_page(&self, page: PageId) -> Result<(), CopyPageError> {
        let num_pages = self.shape.num_pages;
        if page.raw() < num_pages { Ok(()) } else { Err(CopyPageError::PageOutOfRange { page, num_pages }) }
    }

    fn require_shape(&self, slots: &[Slot], part: KvPart, tensor: &HostTensor<'_>) -> Result<(), AppendError> {
        let plane = if part == KvPart::K { self.k } else { self.v };
        let expected = [slots.len(), self.shape.num_kv_heads as usize, plane.head_dim];
        let got = tensor.shape();
        if got == expected { Ok(()) } else { Err(AppendError::Shape { part, got, expected }) }
    }

    fn require_slots(&self, slots: &[Slot]) -> Result<(), AppendError> {
        let num_slots = self.shape.num_slots();
        let is_legal = |slot: &Slot| slot.is_padding() || slot.index().is_some_and(|index| (index as u64) < num_slots);
        match slots.iter().position(|slot| !is_legal(slot)) {
            Some(row) => Err(AppendError::SlotOutOfRange { row, slot: slots[row].raw(), num_slots }),
            None => Ok(()),
        }
    }

    /// Everything was checked before.
    fn write_rows(&mut self, slots: &[Slot], plane: KvPlaneLayout, tensor: &HostTensor<'_>, scale: f32) {
        for (row, slot) in slots.iter().enumerate() {
            let Some((page, token)) = self.position(*slot) else { continue };
            for head in 0..self.shape.num_kv_heads {
                let source = tensor.offset(row, head as usize);
                self.buffer.write(plane.element(page, token, head), tensor.data(), source, &plane, scale);
            }
        }
    }

    fn read(&self, slot: Slot, head: u32, plane: KvPlane<'_>, scale: f32, out: &mut [f32]) {
        let (num_slots, num_kv_heads) = (self.shape.num_slots(), self.shape.num_kv_heads);
        let is_inside = slot.index().is_some_and(|index| (index as u64) < num_slots) && head < num_kv_heads;
        assert!(is_inside, "slot {slot}, head {head} of a cache of {num_slots} slots, {num_kv_heads} heads");
        let (page, token) = self.position(slot).expect("a slot in range has a page");
        plane.read(page, token, head, out);
        if scale.to_bits() != 1.0f32.to_bits() {
            out.iter_mut().for_each(|value| *value *= scale);
        }
    }

    fn position(&self, slot: Slot) -> Option<(PageId, u32)> {
        Some((slot.page(self.shape.page_size)?, slot.offset(self.shape.page_size)?))
    }
}

/// Every (token of a page, head).
fn tokens_and_heads(shape: KvShape) -> impl Iterator<Item = (u32, u32)> {
    (0..shape.page_size.get()).flat_map(move |token| (0..shape.num_kv_heads).map(move |head| (token, head)))
}

fn require_own_values(format: KvFormat) -> Result<(), ShapeError> {
    match format.dtype() {
        dtype @ KvDtype::Fp8Latent => Err(ShapeError::RowsHoldValues { dtype }),
        _ => Ok(()),
    }
}

fn require_parts<const N: usize>(
    shape: &KvShape,
    format: KvFormat,
    buffer: &KvBuffer,
    planes: [(KvPart, KvPlaneLayout); N],
) -> Result<(), ShapeError> {
    shape.validate()?;
    if buffer.dtype() != format.dtype() {
        return Err(ShapeError::BufferDtype { got: buffer.dtype(), expected: format.dtype() });
    }
    for (part, plane) in planes {
        let (what, head_dim) = match part {
            KvPart::K => ("k", shape.head_dim_k),
            KvPart::V => ("v", shape.head_dim_v),
        };
        if plane.head_dim != head_dim as usize {
            return Err(ShapeError::HeadDim { part, got: plane.head_dim, expected: head_dim as usize });
        }
        if plane.row != shape.row(format.dtype())? {
            return Err(ShapeError::RowFormat { part, dtype: format.dtype(), has_row: plane.row.is_some() });
        }
        let needed = plane.extent(shape).ok_or(ShapeError::Overflow { what })?;
        if needed > buffer.len() {
            return Err(ShapeError::OutOfBounds { what, len: buffer.len(), needed });
        }
    }
    Ok(())
}

/// Marks every element of every plane and refuses the first that is met twice. The planes are in bounds.
fn require_disjoint(shape: &KvShape, len: usize, planes: &[(&'static str, KvPlaneLayout)]) -> Result<(), ShapeError> {
    let mut is_taken = vec![0u64; len.div_ceil(64)];
    for (what, plane) in planes {
        for page in (0..shape.num_pages).filter_map(PageId::new) {
            for token in 0..shape.page_size.get() {
                for head in 0..shape.num_kv_heads {
                    let start = plane.element(page, token, head);
                    if let Some(element) = take(&mut is_taken, start, start + plane.vector_len()) {
                        return Err(ShapeError::Overlap { what, detail: OverlapDetail::Element { element } });
                    }
                }
            }
        }
    }
    Ok(())
}

/// Sets the bits `start..end`, a word at a time; the first that was set already is returned.
fn take(bits: &mut [u64], start: usize, end: usize) -> Option<usize> {
    let mut at = start;
    while at < end {
        let (word, first) = (at / 64, at % 64);
        let count = (64 - first).min(end - at);
        let mask = (u64::MAX >> (64 - count)) << first;
        let met = bits[word] & mask;
        if met != 0 {
            return Some(word * 64 + met.trailing_zeros() as usize);
        }
        bits[word] |= mask;
        at += count;
    }
    None
}

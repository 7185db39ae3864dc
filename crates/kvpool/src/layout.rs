//! Owns the arithmetic of one layer's KV cache: [`KvShape`] (how much), [`KvPlaneLayout`] (where), and the sizing of a
//! pool from a memory budget.
//! Invariants: a valid shape has at most `i32::MAX` slots; offsets are widened to `usize` before the first
//! multiplication, in [`KvPlaneLayout::element`] and nowhere else. Strides are the truth, shapes are not.
//! Does not own bytes.

use crate::error::ShapeError;
use crate::format::KvDtype;
use crate::ids::{PageId, PageSize};
use crate::latent::LatentRow;

/// The largest number of slots of a pool, inclusive.
const MAX_SLOTS: u64 = i32::MAX.unsigned_abs() as u64;

/// The order of the two inner axes of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvLayout {
    /// `[num_pages, page_size, num_kv_heads, head_dim]`.
    Nhd,
    /// `[num_pages, num_kv_heads, page_size, head_dim]`.
    Hnd,
}

/// What one page of one layer holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvPageShape {
    /// Tokens per page.
    pub page_size: PageSize,
    /// KV heads, at least 1.
    pub num_kv_heads: u32,
    /// Elements of a K vector of one head, at least 1.
    pub head_dim_k: u32,
    /// Elements of a V vector of one head; 0 where only keys are kept.
    pub head_dim_v: u32,
}

impl KvPageShape {
    /// Bytes of one page, K and V together; `u64::MAX` where it would be more.
    #[must_use]
    pub fn bytes_per_page(&self, dtype: KvDtype) -> u64 {
        let vectors = u128::from(self.page_size.get()) * u128::from(self.num_kv_heads);
        let token_bytes = u128::from(dtype.token_bytes(self.head_dim_k, self.head_dim_v));
        vectors.checked_mul(token_bytes).and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(u64::MAX)
    }

    /// The shape of a layer of `num_pages` such pages.
    ///
    /// # Errors
    /// As [`KvShape::validate`].
    pub fn with_pages(self, num_pages: u32) -> Result<KvShape, ShapeError> {
        let KvPageShape { page_size, num_kv_heads, head_dim_k, head_dim_v } = self;
        let shape = KvShape { num_pages, page_size, num_kv_heads, head_dim_k, head_dim_v };
        shape.validate().map(|()| shape)
    }

    fn require_positive(&self) -> Result<(), ShapeError> {
        let counts = [("num_kv_heads", self.num_kv_heads), ("head_dim_k", self.head_dim_k)];
        match counts.into_iter().find(|(_, count)| *count == 0) {
            Some((what, _)) => Err(ShapeError::Zero { what }),
            None => Ok(()),
        }
    }
}

/// The KV cache of one layer: K `[num_pages, page_size, num_kv_heads, head_dim_k]`, V likewise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvShape {
    /// Pages, at least 1.
    pub num_pages: u32,
    /// Tokens per page.
    pub page_size: PageSize,
    /// KV heads, at least 1.
    pub num_kv_heads: u32,
    /// Elements of a K vector of one head, at least 1.
    pub head_dim_k: u32,
    /// Elements of a V vector of one head; 0 where only keys are kept.
    pub head_dim_v: u32,
}

impl KvShape {
    /// Checks the fields against each other.
    ///
    /// # Errors
    /// [`ShapeError::Zero`] for a count of 0, [`ShapeError::TooManySlots`] beyond `i32::MAX` slots,
    /// [`ShapeError::Overflow`] where the widest dtype's bytes do not fit the address space.
    pub fn validate(&self) -> Result<(), ShapeError> {
        if self.num_pages == 0 {
            return Err(ShapeError::Zero { what: "num_pages" });
        }
        self.page_shape().require_positive()?;
        if self.num_slots() > MAX_SLOTS {
            let (num_pages, page_size) = (self.num_pages.into(), self.page_size.get());
            return Err(ShapeError::TooManySlots { num_pages, page_size, max: MAX_SLOTS });
        }
        if isize::try_from(self.bytes(KvDtype::F32)).is_err() {
            return Err(ShapeError::Overflow { what: "kv cache" });
        }
        Ok(())
    }

    /// What one page holds.
    #[must_use]
    pub fn page_shape(&self) -> KvPageShape {
        let KvShape { num_pages: _, page_size, num_kv_heads, head_dim_k, head_dim_v } = *self;
        KvPageShape { page_size, num_kv_heads, head_dim_k, head_dim_v }
    }

    /// Token slots, `num_pages * page_size`; at most `i32::MAX` in a valid shape.
    #[must_use]
    pub fn num_slots(&self) -> u64 {
        u64::from(self.num_pages) * u64::from(self.page_size.get())
    }

    /// Bytes of one page of this layer, K and V together; `u64::MAX` where it would be more.
    #[must_use]
    pub fn bytes_per_page(&self, dtype: KvDtype) -> u64 {
        self.page_shape().bytes_per_page(dtype)
    }

    /// Bytes of this layer, K and V together; `u64::MAX` where it would be more.
    #[must_use]
    pub fn bytes(&self, dtype: KvDtype) -> u64 {
        self.bytes_per_page(dtype).saturating_mul(self.num_pages.into())
    }

    /// K and V as two packed planes of one buffer, V behind K.
    ///
    /// # Errors
    /// As [`KvShape::validate`].
    pub fn packed_planes(&self, layout: KvLayout) -> Result<[KvPlaneLayout; 2], ShapeError> {
        self.validate()?;
        let [k_page, v_page] = self.plane_page_elements();
        let k_elements = k_page * self.num_pages as usize;
        Ok([self.plane(layout, 0, k_page, self.head_dim_k), self.plane(layout, k_elements, v_page, self.head_dim_v)])
    }

    /// The plane of K alone, packed: for caches whose values are in their keys. With a dtype of rows its vectors are rows.
    ///
    /// # Errors
    /// As [`KvShape::validate`], and as [`LatentRow::of_widths`] where the dtype is of rows.
    pub fn key_plane(&self, layout: KvLayout, dtype: KvDtype) -> Result<KvPlaneLayout, ShapeError> {
        self.validate()?;
        let row = self.row(dtype)?;
        let vector = row.map_or(self.head_dim_k as usize, LatentRow::bytes);
        let page = self.page_size.get() as usize * self.num_kv_heads as usize * vector;
        let strides = self.strides(layout, page, vector);
        Ok(KvPlaneLayout { offset: 0, strides, head_dim: self.head_dim_k as usize, row })
    }

    /// The row of this shape's keys, where the dtype is of rows.
    pub(crate) fn row(&self, dtype: KvDtype) -> Result<Option<LatentRow>, ShapeError> {
        let has_row = dtype == KvDtype::Fp8Latent;
        has_row.then(|| LatentRow::of_widths(self.head_dim_k, self.head_dim_v)).transpose()
    }

    /// K and V of a page next to each other: `[num_pages, 2, ..page..]` where their widths are equal.
    ///
    /// # Errors
    /// As [`KvShape::validate`].
    pub fn interleaved_planes(&self, layout: KvLayout) -> Result<[KvPlaneLayout; 2], ShapeError> {
        self.validate()?;
        let [k_page, v_page] = self.plane_page_elements();
        let page = k_page + v_page;
        Ok([self.plane(layout, 0, page, self.head_dim_k), self.plane(layout, k_page, page, self.head_dim_v)])
    }

    /// Elements of a page of K and of V; the shape was validated.
    fn plane_page_elements(&self) -> [usize; 2] {
        let vectors = self.page_size.get() as usize * self.num_kv_heads as usize;
        [vectors * self.head_dim_k as usize, vectors * self.head_dim_v as usize]
    }

    fn plane(&self, layout: KvLayout, offset: usize, page: usize, head_dim: u32) -> KvPlaneLayout {
        let head_dim = head_dim as usize;
        KvPlaneLayout::new(offset, self.strides(layout, page, head_dim), head_dim)
    }

    /// Strides of packed vectors of `vector` elements.
    fn strides(&self, layout: KvLayout, page: usize, vector: usize) -> KvStrides {
        match layout {
            KvLayout::Nhd => KvStrides { page, token: self.num_kv_heads as usize * vector, head: vector },
            KvLayout::Hnd => KvStrides { page, token: vector, head: self.page_size.get() as usize * vector },
        }
    }
}

/// Strides of a plane, in elements; the stride inside a head vector is 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvStrides {
    /// From a page to the next.
    pub page: usize,
    /// From a token of a page to the next.
    pub token: usize,
    /// From a head to the next.
    pub head: usize,
}

/// Where K (or V) lives in the one buffer of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvPlaneLayout {
    /// Element of the buffer where page 0, token 0, head 0 begins.
    pub offset: usize,
    /// Strides in elements.
    pub strides: KvStrides,
    /// Width of one head vector, in values.
    pub head_dim: usize,
    /// What the vectors are, where they are rows. Otherwise a value is an element.
    pub row: Option<LatentRow>,
}

impl KvPlaneLayout {
    /// A plane of vectors of `head_dim` elements, one a value.
    #[must_use]
    pub const fn new(offset: usize, strides: KvStrides, head_dim: usize) -> KvPlaneLayout {
        KvPlaneLayout { offset, strides, head_dim, row: None }
    }

    /// Elements of the buffer that one head vector takes: its width, or the bytes of its row.
    #[must_use]
    #[inline]
    pub const fn vector_len(&self) -> usize {
        match self.row {
            None => self.head_dim,
            Some(row) => row.bytes(),
        }
    }

    /// Element of the buffer where the vector of (`page`, `token` in the page, `head`) begins.
    ///
    /// Nothing is checked against a shape; for a plane that a [`crate::HostKv`] accepted and ids in range, it is in
    /// bounds. The only place where offsets are formed.
    #[must_use]
    #[inline]
    pub const fn element(&self, page: PageId, token: u32, head: u32) -> usize {
        let KvStrides { page: page_stride, token: token_stride, head: head_stride } = self.strides;
        self.offset + page.index() * page_stride + token as usize * token_stride + head as usize * head_stride
    }

    /// One past the last element of the plane over `shape`, `None` where it overflows or the shape is empty.
    #[must_use]
    pub fn extent(&self, shape: &KvShape) -> Option<usize> {
        let last = |count: u32, stride: usize| (count as usize).checked_sub(1)?.checked_mul(stride);
        self.offset
            .checked_add(last(shape.num_pages, self.strides.page)?)?
            .checked_add(last(shape.page_size.get(), self.strides.token)?)?
            .checked_add(last(shape.num_kv_heads, self.strides.head)?)?
            .checked_add(self.vector_len())
    }
}

/// What a memory budget buys, see [`pages_in_budget`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageBudget {
    /// Pages of the pool, at least 1; the same page id names a page of every layer.
    pub num_pages: u32,
    /// Bytes that one page costs over all layers, K and V together.
    pub bytes_per_page: u64,
    /// Bytes of the whole pool, at most the budget.
    pub bytes: u64,
}

/// A budget that buys no pool.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BudgetError {
    /// Not even one page fits.
    #[error(
        "the budget of {budget_bytes} bytes is less than one page of {bytes_per_page} bytes over {num_layers} layers"
    )]
    NoPageFits {
        /// The budget.
        budget_bytes: u64,
        /// Bytes of one page over all layers.
        bytes_per_page: u64,
        /// Layers of the pool.
        num_layers: u32,
    },
    /// The page itself is not legal.
    #[error(transparent)]
    Shape(#[from] ShapeError),
}

/// How many pages of `num_layers` equal layers fit `budget_bytes`, capped so that slots fit an `i32`.
///
/// # Errors
/// [`BudgetError::NoPageFits`] where the budget is below one page, [`BudgetError::Shape`] for a count of 0 or a page
/// whose bytes do not fit 64 bits.
pub fn pages_in_budget(
    budget_bytes: u64,
    num_layers: u32,
    page: &KvPageShape,
    dtype: KvDtype,
) -> Result<PageBudget, BudgetError> {
    page.require_positive()?;
    if num_layers == 0 {
        return Err(ShapeError::Zero { what: "num_layers" }.into());
    }
    let bytes_per_page = page
        .bytes_per_page(dtype)
        .checked_mul(num_layers.into())
        .filter(|bytes| *bytes < u64::MAX)
        .ok_or(ShapeError::Overflow { what: "one page over all layers" })?;
    if budget_bytes < bytes_per_page {
        return Err(BudgetError::NoPageFits { budget_bytes, bytes_per_page, num_layers });
    }
    let num_pages = (budget_bytes / bytes_per_page).min(MAX_SLOTS / u64::from(page.page_size.get()));
    let bytes = num_pages * bytes_per_page;
    let num_pages = u32::try_from(num_pages).expect("at most i32::MAX slots, so at most i32::MAX pages");
    Ok(PageBudget { num_pages, bytes_per_page, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(page_size: u32) -> KvPageShape {
        KvPageShape { page_size: PageSize::new(page_size).unwrap(), num_kv_heads: 8, head_dim_k: 128, head_dim_v: 64 }
    }

    #[test]
    fn packed_and_interleaved_planes_partition_their_buffer() {
        let shape = page(3).with_pages(4).unwrap();
        let total = 4 * 3 * 8 * (128 + 64);
        for layout in [KvLayout::Nhd, KvLayout::Hnd] {
            for planes in [shape.packed_planes(layout).unwrap(), shape.interleaved_planes(layout).unwrap()] {
                let mut seen = vec![0u8; total];
                for plane in planes {
                    for (page, token, head) in positions(4, 3, 8) {
                        let start = plane.element(PageId::new(page).unwrap(), token, head);
                        seen[start..start + plane.head_dim].iter_mut().for_each(|count| *count += 1);
                    }
                }
                assert!(seen.iter().all(|&count| count == 1), "{layout:?} {planes:?}");
                assert_eq!(planes.iter().filter_map(|plane| plane.extent(&shape)).max(), Some(total));
            }
        }
    }

    fn positions(pages: u32, tokens: u32, heads: u32) -> impl Iterator<Item = (u32, u32, u32)> {
        (0..pages).flat_map(move |p| (0..tokens).flat_map(move |t| (0..heads).map(move |h| (p, t, h))))
    }

    #[test]
    fn offsets_of_a_big_pool_do_not_wrap_at_32_bits() {
        let plane = page(16).with_pages(1 << 20).unwrap().packed_planes(KvLayout::Nhd).unwrap()[0];
        let last = plane.element(PageId::new((1 << 20) - 1).unwrap(), 15, 7);
        assert_eq!(last as u64, (1u64 << 20) * 16 * 8 * 128 - 128); // over 2^34
        let wide = KvPlaneLayout { strides: KvStrides { page: 1 << 21, ..plane.strides }, ..plane };
        assert_eq!(wide.element(PageId::new(2048).unwrap(), 0, 0) as u64, 1u64 << 32);
    }

    #[test]
    fn slots_end_at_i32_max() {
        assert!(page(16).with_pages((1 << 27) - 1).is_ok());
        let error = page(16).with_pages(1 << 27).unwrap_err();
        assert_eq!(error, ShapeError::TooManySlots { num_pages: 1 << 27, page_size: 16, max: MAX_SLOTS });
        assert_eq!(page(1).with_pages(0).unwrap_err(), ShapeError::Zero { what: "num_pages" });
        let wide = KvPageShape { num_kv_heads: u32::MAX, head_dim_k: u32::MAX, ..page(16) };
        assert_eq!(wide.with_pages(1 << 20).unwrap_err(), ShapeError::Overflow { what: "kv cache" });
        assert_eq!(wide.bytes_per_page(KvDtype::F32), u64::MAX);
    }

    #[test]
    fn a_budget_buys_whole_pages_over_all_layers() {
        let one = 16 * 8 * (128 + 64) * 2 * 28;
        let budget = |bytes| pages_in_budget(bytes, 28, &page(16), KvDtype::Bf16);
        let PageBudget { num_pages, bytes_per_page, bytes } = budget(3 * one + one - 1).unwrap();
        assert_eq!((num_pages, bytes_per_page, bytes), (3, one, 3 * one));
        assert_eq!(budget(one).unwrap().num_pages, 1);
        let error = budget(one - 1).unwrap_err();
        assert_eq!(error, BudgetError::NoPageFits { budget_bytes: one - 1, bytes_per_page: one, num_layers: 28 });
        assert_eq!(budget(u64::MAX).unwrap().num_pages, (1 << 27) - 1);
    }
}

//! Where tensors live, as a type: a backend, its tensors and its caches agree on one [`Space`].
//!
//! A trait object of `AttentionBackend<S>` is possible within a space; spaces do not mix. [`Host`](crate::Host) is in
//! this crate; GPU spaces come with their backends.

use std::fmt::Debug;

use kvpool::{Dtype, KvDtype, PageSize};

use crate::layer::HeadShape;

/// A place where attention runs, with its tensor and cache types.
pub trait Space: Sized + 'static {
    /// What a backend needs to reach the device.
    type Device: Clone + Debug;
    /// A read-only activation view `[rows, heads, dim]`.
    type Tensor<'a>: Copy;
    /// A writable activation view `[rows, heads, dim]`.
    type TensorMut<'a>;
    /// A writable LSE view `[rows, num_qo_heads]`.
    type LseMut<'a>;
    /// One layer's KV pages, read-only.
    type Cache<'a>: Copy;
    /// One layer's KV pages, writable.
    type CacheMut<'a>;

    /// A shorter borrow of a read-only tensor.
    fn shorten<'b>(tensor: &'b Self::Tensor<'_>) -> Self::Tensor<'b>;
    /// A shorter borrow of a read-only cache.
    fn shorten_cache<'b>(cache: &'b Self::Cache<'_>) -> Self::Cache<'b>;
    /// A shorter borrow of a writable tensor.
    fn reborrow<'b>(tensor: &'b mut Self::TensorMut<'_>) -> Self::TensorMut<'b>;
    /// A shorter borrow of a writable LSE.
    fn reborrow_lse<'b>(lse: &'b mut Self::LseMut<'_>) -> Self::LseMut<'b>;
    /// A shorter borrow of a writable cache.
    fn reborrow_cache<'b>(cache: &'b mut Self::CacheMut<'_>) -> Self::CacheMut<'b>;
    /// A read-only view of a writable cache.
    fn share_cache<'b>(cache: &'b Self::CacheMut<'_>) -> Self::Cache<'b>;

    /// What a read-only tensor is.
    fn tensor_facts(tensor: &Self::Tensor<'_>) -> TensorFacts;
    /// What a writable tensor is.
    fn tensor_mut_facts(tensor: &Self::TensorMut<'_>) -> TensorFacts;
    /// Elements of an LSE view.
    fn lse_len(lse: &Self::LseMut<'_>) -> usize;
    /// What a cache is.
    fn cache_facts(cache: &Self::Cache<'_>) -> CacheFacts;
}

/// Shape and dtype of an activation tensor, for checks that do not depend on the space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorFacts {
    /// `[rows, heads, dim]`.
    pub shape: [usize; 3],
    /// Element type.
    pub dtype: Dtype,
}

/// Shape and format of a cache, for checks that do not depend on the space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheFacts {
    /// Pages.
    pub num_pages: u32,
    /// Tokens in a page.
    pub page_size: PageSize,
    /// KV heads.
    pub num_kv_heads: u32,
    /// Width of a key.
    pub head_dim_k: u32,
    /// Width of a value.
    pub head_dim_v: u32,
    /// Stored dtype.
    pub dtype: KvDtype,
}

impl CacheFacts {
    /// What a layer needs of its cache, with this many pages at least.
    #[must_use]
    pub const fn needed(heads: HeadShape, num_pages: u32, page_size: PageSize, dtype: KvDtype) -> Self {
        Self {
            num_pages,
            page_size,
            num_kv_heads: heads.num_kv_heads,
            head_dim_k: heads.head_dim_qk,
            head_dim_v: heads.head_dim_vo,
            dtype,
        }
    }
}

/// The KV of a call: attend to what is there, or append first and then attend.
#[allow(missing_debug_implementations, reason = "views of a space need not be printable")]
pub enum Kv<'a, S: Space> {
    /// Attend to the pages as they are. For batches without a slot mapping.
    Attend {
        /// The layer's pages.
        cache: S::Cache<'a>,
    },
    /// Write `k` and `v` to the batch's slots, then attend. For batches with a slot mapping.
    Append {
        /// The layer's pages.
        cache: S::CacheMut<'a>,
        /// New keys `[num_rows, num_kv_heads, head_dim_qk]`; rows with a padding slot are not read.
        k: S::Tensor<'a>,
        /// New values `[num_rows, num_kv_heads, head_dim_vo]`, likewise.
        v: S::Tensor<'a>,
    },
}

/// The tensors of one call of [`forward`](crate::AttentionBackend::forward).
#[allow(missing_debug_implementations, reason = "views of a space need not be printable")]
pub struct Io<'a, S: Space> {
    /// Queries `[num_rows, num_qo_heads, head_dim_qk]`; padding rows are not read.
    pub q: S::Tensor<'a>,
    /// The layer's KV.
    pub kv: Kv<'a, S>,
    /// Output `[num_rows, num_qo_heads, head_dim_vo]`, of q's dtype; every row of the batch is written.
    pub out: S::TensorMut<'a>,
    /// LSE `[num_rows, num_qo_heads]`, packed; every row of the batch is written.
    pub lse: Option<S::LseMut<'a>>,
}

impl<S: Space> Io<'_, S> {
    /// The same tensors for a shorter time, so that a wrapper can call a backend and go on.
    pub fn reborrow(&mut self) -> Io<'_, S> {
        Io {
            q: S::shorten(&self.q),
            kv: self.kv.reborrow(),
            out: S::reborrow(&mut self.out),
            lse: self.lse.as_mut().map(S::reborrow_lse),
        }
    }
}

impl<S: Space> Kv<'_, S> {
    /// The same KV for a shorter time.
    pub fn reborrow(&mut self) -> Kv<'_, S> {
        match self {
            Self::Attend { cache } => Kv::Attend { cache: S::shorten_cache(cache) },
            Self::Append { cache, k, v } => {
                Kv::Append { cache: S::reborrow_cache(cache), k: S::shorten(k), v: S::shorten(v) }
            }
        }
    }

    /// The pages, read-only.
    pub fn cache(&self) -> S::Cache<'_> {
        match self {
            Self::Attend { cache } => S::shorten_cache(cache),
            Self::Append { cache, .. } => S::share_cache(cache),
        }
    }
}

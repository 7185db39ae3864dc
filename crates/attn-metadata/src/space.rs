//! Where tensors live, as a type: a backend, its tensors and its caches agree on one [`Space`].
//!
//! A trait object of `AttentionBackend<S>` is possible within a space; spaces do not mix. [`Host`](crate::Host) is in
//! this crate; GPU spaces come with their backends.

use std::fmt::Debug;

use kvpool::{Dtype, KvDtype, KvSpec, PageSize};

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
    /// What is kept of a token.
    pub spec: KvSpec,
    /// Stored dtype.
    pub dtype: KvDtype,
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
        /// New keys `[num_rows, num_kv_heads, head_dim_k]` of the layer's [`KvSpec`]; rows with a padding slot are not
        /// read.
        k: S::Tensor<'a>,
        /// New values `[num_rows, num_kv_heads, head_dim_v]`, likewise; `None` where the layer keeps no values of their
        /// own.
        v: Option<S::Tensor<'a>>,
    },
}

/// The side branch of a call, see [`SideSpec`](crate::SideSpec).
#[allow(missing_debug_implementations, reason = "views of a space need not be printable")]
pub struct Side<'a, S: Space> {
    /// Queries `[num_rows, num_heads, head_dim]`; padding rows are not read.
    pub q: S::Tensor<'a>,
    /// Its KV: appended exactly where the layer's is.
    pub kv: Kv<'a, S>,
    /// Output `[num_rows, num_heads, out_dim]`, of q's dtype, exactly where the branch has one; every row is written.
    pub out: Option<S::TensorMut<'a>>,
}

/// The tensors of one call of [`forward`](crate::AttentionBackend::forward).
#[allow(missing_debug_implementations, reason = "views of a space need not be printable")]
pub struct Io<'a, S: Space> {
    /// Queries `[num_rows, num_qo_heads, head_dim_qk]`; padding rows are not read.
    pub q: S::Tensor<'a>,
    /// The layer's KV.
    pub kv: Kv<'a, S>,
    /// The side branch, exactly where the layer has one.
    pub side: Option<Side<'a, S>>,
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
            side: self.side.as_mut().map(Side::reborrow),
            out: S::reborrow(&mut self.out),
            lse: self.lse.as_mut().map(S::reborrow_lse),
        }
    }

    /// The same tensors, with KV that is attended to as it is: for the second of two backends that share a call.
    pub fn attending(&mut self) -> Io<'_, S> {
        let Self { q, kv, side, out, lse } = self;
        Io {
            q: S::shorten(q),
            kv: Kv::Attend { cache: kv.cache() },
            side: side.as_mut().map(|Side { q, kv, out }| Side {
                q: S::shorten(q),
                kv: Kv::Attend { cache: kv.cache() },
                out: out.as_mut().map(S::reborrow),
            }),
            out: S::reborrow(out),
            lse: lse.as_mut().map(S::reborrow_lse),
        }
    }
}

impl<S: Space> Side<'_, S> {
    /// The same branch for a shorter time.
    pub fn reborrow(&mut self) -> Side<'_, S> {
        Side { q: S::shorten(&self.q), kv: self.kv.reborrow(), out: self.out.as_mut().map(S::reborrow) }
    }
}

impl<S: Space> Kv<'_, S> {
    /// The same KV for a shorter time.
    pub fn reborrow(&mut self) -> Kv<'_, S> {
        match self {
            Self::Attend { cache } => Kv::Attend { cache: S::shorten_cache(cache) },
            Self::Append { cache, k, v } => {
                Kv::Append { cache: S::reborrow_cache(cache), k: S::shorten(k), v: v.as_ref().map(S::shorten) }
            }
        }
    }

    /// Whether new rows are written.
    pub const fn appends(&self) -> bool {
        matches!(self, Self::Append { .. })
    }

    /// The pages, read-only.
    pub fn cache(&self) -> S::Cache<'_> {
        match self {
            Self::Attend { cache } => S::shorten_cache(cache),
            Self::Append { cache, .. } => S::share_cache(cache),
        }
    }
}

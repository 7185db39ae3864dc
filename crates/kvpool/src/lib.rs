//! Pages for the KV cache of an LLM inference engine.
//!
//! The crate answers six questions and nothing else:
//!
//! * *Who may use a page?* [`PagePool`] leases, [`Lease`] returns when dropped, [`Fence`] delays that.
//! * *Who computed this before?* [`PrefixCache`] matches a request's tokens with pages that hold their KV already,
//!   takes in the pages of sequences, and evicts; [`TieredCache`] keeps what was evicted in host memory.
//! * *Which page, which slot?* [`PageId`], [`PageSize`], [`Slot`].
//! * *What do the bytes look like?* [`KvFormat`] (dtype and scales together), [`KvShape`],
//!   [`KvPlaneLayout`] (strides are the truth), [`LatentRow`] (a quantised latent row), the FP8 conversions, the views
//!   [`HostTensor`] and [`HostTensorMut`].
//! * *Where are the bytes?* On the host in a [`HostKv`], one per layer. Device storage belongs to the
//!   crate of the device; it takes its offsets from the same layout types.
//!
//! A [`Lease`] is not `Clone`; sharing counts holders, and a page that others hold is copied before it is written
//! ([`Lease::make_private`]). Exhaustion is an error with the needed number of pages in it and leaves all as it was.
//! [`PagePool::audit`] recomputes the accounting from the structure; [`FailurePlan`] makes the Nth lease fail.
//!
//! In the prefix cache a lease is the lock: a page that anybody but the cache holds is not evicted, and
//! `free + evictable + locked + fenced` are all pages. Keys are compared token by token; hashes only find candidates.
//!
//! It knows nothing of requests, scheduling, attention or devices.
//!
//! Conventions: `slot = page * page_size + offset`; K and V of a layer are
//! `[num_pages, page_size, num_kv_heads, head_dim]` (or any strides); stored value x scale = real
//! value; ids and slots fit an `i32`; offsets are formed in `usize` by [`KvPlaneLayout::element`] only.

#![forbid(unsafe_code)]

mod audit;
mod elements;
mod error;
mod failure;
mod fence;
mod format;
mod fp8;
mod host;
mod idle;
mod ids;
mod latent;
mod layout;
mod lease;
mod pool;
mod prefix;
mod slice;
mod spec;
mod state;
mod storage;
mod tensor;

pub use audit::{AuditError, PoolAudit};
pub use elements::Elements;
pub use error::{KvPart, OverlapDetail, ShapeError};
pub use failure::FailurePlan;
pub use fence::{Fence, ManualFence};
pub use format::{FormatError, KvDtype, KvFormat, KvScales};
pub use fp8::{FP8_E4M3_TO_F32, f32_to_fp8_e4m3, fp8_e4m3_to_f32};
pub use host::{AppendError, CopyPageError, HostKv};
pub use ids::{PageId, PageSize, Slot};
pub use latent::{LATENT_BLOCK, LatentRow};
pub use layout::{BudgetError, KvLayout, KvPageShape, KvPlaneLayout, KvShape, KvStrides, PageBudget, pages_in_budget};
pub use lease::{CopyOnWrite, Lease};
pub use pool::{PagePool, PoolCounts, PoolError};
pub use prefix::{
    EventBatch, EvictionPolicy, ExtraKey, HostLayers, HostTier, Inserted, PageCopy, PageHash, PageHashFn, PrefixAudit,
    PrefixAuditError, PrefixCache, PrefixConfig, PrefixCounters, PrefixError, PrefixEvent, PrefixKey, PrefixMatch,
    PrefixPreview, SizeInfo, TierCounters, TieredCache, hash_page,
};
pub use slice::{Dtype, HostSlice, HostSliceMut, UnknownName};
pub use spec::{KvSpec, Values};
pub use storage::{KvBuffer, KvPlane, KvSlice, KvSliceMut};
pub use tensor::{HostTensor, HostTensorMut};

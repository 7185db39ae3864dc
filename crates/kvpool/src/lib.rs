//! Pages for the KV cache of an LLM inference engine.
//!
//! The crate answers four questions and nothing else:
//!
//! * *Which page, which slot?* [`PageId`], [`PageSize`], [`Slot`].
//! * *What do the bytes look like?* [`KvFormat`] (dtype and scales together), [`KvShape`],
//!   [`KvPlaneLayout`] (strides are the truth), the FP8 conversions, the views [`HostTensor`] and
//!   [`HostTensorMut`].
//! * *Where are the bytes?* On the host in a [`HostKv`], one per layer. Device storage belongs to the
//!   crate of the device; it takes its offsets from the same layout types.
//!
//! It knows nothing of requests, scheduling, attention or devices.
//!
//! Conventions: `slot = page * page_size + offset`; K and V of a layer are
//! `[num_pages, page_size, num_kv_heads, head_dim]` (or any strides); stored value x scale = real
//! value; ids and slots fit an `i32`; offsets are formed in `usize` by [`KvPlaneLayout::element`] only.

#![forbid(unsafe_code)]

mod error;
mod format;
mod fp8;
mod host;
mod ids;
mod layout;
mod slice;
mod storage;
mod tensor;

pub use error::{KvPart, OverlapDetail, ShapeError};
pub use format::{FormatError, KvDtype, KvFormat, KvScales};
pub use fp8::{FP8_E4M3_TO_F32, f32_to_fp8_e4m3, fp8_e4m3_to_f32};
pub use host::{AppendError, CopyPageError, HostKv};
pub use ids::{PageId, PageSize, Slot};
pub use layout::{BudgetError, KvLayout, KvPageShape, KvPlaneLayout, KvShape, KvStrides, PageBudget, pages_in_budget};
pub use slice::{Dtype, HostSlice, HostSliceMut, UnknownName};
pub use storage::{KvBuffer, KvPlane, KvSlice, KvSliceMut};
pub use tensor::{HostTensor, HostTensorMut};

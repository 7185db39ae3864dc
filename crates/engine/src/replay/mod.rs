//! One attention problem as a file: reading it, running it, writing the result, and recording one.
//!
//! The file is a safetensors file. Tensors: `q` `[T, Hq, Dqk]`; `k_cache` and `v_cache` `[pages, page_size, Hkv, D]`;
//! optional new `k`, `v` `[T, Hkv, D]` with `slot_mapping` i32 `[T]` (−1 skips a row); `qo_indptr`, `kv_indptr`,
//! `kv_indices`, `kv_last_page_len` i32; optional `custom_mask` u8 (packed bits), `sinks` and `alibi_slopes` f32 `[Hq]`.
//! The metadata key `attn` holds JSON, see [`Params`]. A result file holds `out` `[T, Hq, Dvo]` in q's dtype and `lse`
//! f32 `[T, Hq]`. What the numbers mean: [`conventions`](attn_metadata::conventions).

mod activation;
mod error;
mod file;
mod memory;
mod params;
mod problem;
mod record;
mod result;
mod run;

pub use activation::{Activation, Elements};
pub use error::{FileError, ReplayError};
pub use file::{ReplayFile, read};
pub use params::{ATTN_KEY, Kind, Params};
pub use problem::{NewKv, Outcome, Problem};
pub use record::{Call, RecordError, record};
pub use result::result_bytes;
pub use run::{ReplayOptions, Replayed, claim_names, replay};

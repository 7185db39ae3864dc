//! Multi-head latent attention, as of DeepSeek-V2 and V3: a cache of one latent row a token for all heads.
//!
//! A token's row is `latent` values (512, say) and `rope` more (64) that carry its position; keys and values of every
//! head are linear in the first part. With `kv_b_proj` `[num_heads * (nope + value), latent]` cut by heads into `Uk`
//! `[nope, latent]` and `Uv` `[value, latent]`, head h attends with
//!
//! ```text
//! score(t) = scale * (q_nope · Uk c(t) + q_rope · r(t))        expanded: keys and values are made from the rows
//!          = scale * ((Ukᵀ q_nope) · c(t) + q_rope · r(t))     absorbed: the query is projected instead
//! out      = Σ p(t) Uv c(t)  =  Uv Σ p(t) c(t)
//! ```
//!
//! so both forms give the same result. Absorbed attention reads the rows as they are, once for all heads, at a width of
//! `latent + rope`; expanded attention multiplies every row by `kv_b_proj` first and then works at `nope + rope`. Few
//! queries are cheaper absorbed, many expanded: [`CostModel`] decides for each request by its lengths.
//!
//! Outside a layer everything has the unabsorbed widths: queries `[rows, num_heads, nope + rope]` and outputs
//! `[rows, num_heads, value]`, both after RoPE; the new KV is the latent row `[rows, 1, latent + rope]`.
//! The scale comes from the unabsorbed width, and only from there: see [`Scale`].
#![forbid(unsafe_code)]

mod absorbed;
mod backend;
mod cost;
mod error;
mod expanded;
mod family;
mod indices;
pub mod oracle;
mod project;
mod rows;
mod scale;
mod sparse;
mod step;
mod weights;
mod widths;

pub use backend::{MlaBackend, entry};
pub use cost::{Cost, CostModel, Form};
pub use error::{IndexError, MlaError};
pub use family::{FAMILY, MlaFamily, absorbed_params};
pub use indices::IndexList;
pub use scale::Scale;
pub use sparse::{SparseAttention, SparseError};
pub use weights::MlaWeights;
pub use widths::MlaWidths;

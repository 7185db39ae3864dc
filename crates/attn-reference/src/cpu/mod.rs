//! The fast CPU backend: blocked attention with an online softmax, written once over a small SIMD trait.
//!
//! Reading order: `isa` (what a vector can do), then the primitives `pack`, `qk`, `softmax`, `pv`, `merge`, `mask`,
//! then `unit` (one tile loop for prefill and decode alike), `layer` (a call over all units), `backend` (the trait).
//! [`tiles`] is the tile loop as a building block for backends of other crates.
//!
//! Unsafe code is confined to `isa`: intrinsics behind detection tokens and the dispatch calls.

mod ahead;
mod backend;
mod dots;
mod isa;
mod layer;
mod mask;
mod math;
mod matmul;
mod merge;
mod output;
mod pack;
mod pv;
mod qk;
mod queries;
mod schedule;
mod scratch;
mod softmax;
mod threads;
pub mod tiles;
mod unit;

#[cfg(test)]
mod tests;

pub use backend::{CpuBackend, entry};
pub use isa::Isa;
pub use matmul::{PackedRows, PackedWeights};
pub use output::Output;
pub use threads::start_threads;

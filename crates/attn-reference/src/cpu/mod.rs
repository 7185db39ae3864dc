//! The fast CPU backend: blocked attention with an online softmax, written once over a small SIMD trait.
//!
//! Reading order: `isa` (what a vector can do), then the primitives `pack`, `qk`, `softmax`, `pv`, `merge`, `mask`,
//! then `unit` (one tile loop for prefill and decode alike), `layer` (a call over all units), `backend` (the trait).
//!
//! Unsafe code is confined to `isa`: intrinsics behind detection tokens and the dispatch calls.

mod backend;
mod isa;
mod layer;
mod mask;
mod math;
mod merge;
mod output;
mod pack;
mod pv;
mod qk;
mod schedule;
mod scratch;
mod softmax;
mod unit;

#[cfg(test)]
mod tests;

pub use backend::{CpuBackend, entry};
pub use isa::Isa;

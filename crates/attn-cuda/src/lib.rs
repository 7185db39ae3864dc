//! Paged attention on NVIDIA GPUs: prebuilt kernels, and the driver without a toolkit.
//!
//! The crate builds and links anywhere; the driver's library is opened when it is first asked for. Where there is none,
//! [`device::probe`] says what is missing and what to do.
//!
//! [`device`] is the driver: context, stream, memory, modules, launches, graphs. [`Cuda`] is the space that backends of
//! this and of other crates run in; tensors and pages may be ours or another library's on the same stream.
#![deny(unsafe_code)]

#[allow(unsafe_code, reason = "calls of the driver")]
pub mod device;

#[allow(unsafe_code, reason = "the promise that structs have the kernels' layout")]
mod params;
mod space;

pub use cudarc;

pub use space::{Cuda, CudaDevice};

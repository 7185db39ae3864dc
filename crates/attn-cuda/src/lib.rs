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

#[allow(unsafe_code, reason = "kernel launches")]
mod launches;
#[allow(unsafe_code, reason = "the promise that structs have the kernels' layout")]
mod params;

mod at_once;
mod backend;
mod entry;
mod images;
mod kernel_set;
mod maps;
mod merge_states;
mod mirror;
mod on_host;
mod policy;
mod rates;
mod reports;
mod room;
mod space;
mod spans;
mod step;
mod tables;
mod windows;

pub use cudarc;

pub use backend::{CudaBackend, entry, free_entry, plain_entry, portable_entry, strict_entry};
pub use entry::{Families, image_choices};
pub use merge_states::{MergeError, StateMerge, States, StatesMut};
pub use on_host::{CudaOnHost, host_entry, host_free_entry, host_plain_entry, host_portable_entry, host_strict_entry};
pub use space::{Cuda, CudaDevice};

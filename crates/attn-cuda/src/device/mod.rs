//! The driver, without a toolkit: probe, context, stream, memory, modules, launches, graphs.
//!
//! Reading order: `probe` (is there a driver), `context` ([`Device`]: context, stream, what the GPU is), `buffer` and
//! `staging` (memory; `locked`: that of others), `view` and `kv` (tensors and KV pages in it, ours or another library's),
//! `module` and `launch` (kernels), `side_stream` (two kernels at once), `graph`.
//!
//! All unsafe code of the crate that is not a kernel launch is here. Two rules make it sound. *One stream*: all work
//! that one [`Device`] is given goes to its one stream, in order, so memory that is freed after a launch is freed after
//! the kernel, and is refused where it would be used on another stream; a [`SideStream`] is joined with it before anything
//! else is given to it. *Owners wait*: pinned memory and graphs know the event or stream that uses them and wait when
//! dropped. What neither covers is memory that a graph was recorded with and not given to keep: see [`Graph::record`].

mod buffer;
mod context;
mod error;
mod graph;
mod kv;
mod launch;
mod locked;
mod module;
mod probe;
mod ptx;
mod side_stream;
mod staging;
mod tensor_map;
mod trap;
mod view;

pub use buffer::DeviceBuffer;
pub use context::{Device, DeviceProperties, Timer, devices};
pub use error::{DeviceError, DriverCode, LoadFailure};
pub use graph::{Captured, Graph};
pub use kv::{CudaKv, CudaKvError};
pub use launch::{Kernel, KernelParams, LaunchShape};
pub use module::{Image, ImageKind, ModuleSource, candidates};
pub use probe::{Driver, LIBRARY_NAMES, MIN_CUDA_VERSION, MIN_DRIVER_BRANCH, probe, probe_libraries};
pub use side_stream::SideStream;
#[cfg(test)]
pub(crate) use staging::runs;
pub use staging::{Pinned, Staging, Tail};
pub use tensor_map::{TensorMap, TensorMapSpec};
pub use trap::{TrapRecord, TrapReport};
pub use view::{CudaLse, CudaLseMut, CudaTensor, CudaTensorMut};

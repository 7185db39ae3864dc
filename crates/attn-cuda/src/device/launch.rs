//! Owns launches: entry points with the type of their parameters, grids, clusters, programmatic dependent launch.
//!
//! Every kernel takes one struct by value. The parameter's type is part of the kernel's type, so a kernel cannot be
//! launched with another kernel's parameters.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::sys;

use super::context::Device;
use super::error::{DeviceError, DriverCode, check};
use super::module::{Module, ModuleSource};
use super::side_stream::SideStream;

/// The one struct that a kernel takes by value.
///
/// # Safety
/// The type has the layout of the kernel's parameter, byte for byte, and every byte is initialised.
pub unsafe trait KernelParams: Copy {}

/// How a kernel is launched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaunchShape {
    /// Thread blocks.
    pub grid: u32,
    /// Threads of a block.
    pub block: u32,
    /// Thread blocks of a cluster; 0 or 1: no clusters.
    pub cluster: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// Whether it may start before the kernel launched before it has ended (it then waits inside).
    pub is_programmatic: bool,
}

impl fmt::Display for LaunchShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} blocks of {} threads with {} bytes shared", self.grid, self.block, self.shared_bytes)?;
        if self.cluster > 1 {
            write!(f, " in clusters of {}", self.cluster)?;
        }
        Ok(())
    }
}

/// Shared memory that a kernel has without asking for more.
const DEFAULT_SHARED_BYTES: u32 = 48 << 10;

/// An entry point on a device, with the type of its parameters. Cheap to clone.
#[derive(Clone)]
pub struct Kernel<P> {
    device: Device,
    module: Arc<Module>,
    function: sys::CUfunction,
    name: Arc<str>,
    params: PhantomData<fn(P)>,
}

// SAFETY: a function handle may be used from any thread that has its context current; the module is kept alive.
unsafe impl<P> Send for Kernel<P> {}
// SAFETY: as above.
unsafe impl<P> Sync for Kernel<P> {}

impl<P> fmt::Debug for Kernel<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kernel({} of {})", self.name, self.module.image().name)
    }
}

impl<P: KernelParams> Kernel<P> {
    /// Finds an entry point; loads its module where this is its first use. `shared_bytes` is the most dynamic shared
    /// memory that a launch will ask for.
    ///
    /// # Errors
    /// [`DeviceError::NoImage`], [`DeviceError::Load`], [`DeviceError::NoKernel`], [`DeviceError::Driver`].
    pub fn find(device: &Device, source: &ModuleSource, name: &str, shared_bytes: u32) -> Result<Self, DeviceError> {
        let module = device.module(source, name)?;
        device.bind()?;
        let function = module.function(name)?;
        if shared_bytes > DEFAULT_SHARED_BYTES {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let bytes = i32::try_from(shared_bytes).unwrap_or(i32::MAX);
            // SAFETY: the function is of a loaded module.
            let result = unsafe { sys::cuFuncSetAttribute(function, attribute, bytes) };
            check("asking for more shared memory", result)?;
        }
        Ok(Self { device: device.clone(), module, function, name: name.into(), params: PhantomData })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Name of the image that it comes from.
    #[must_use]
    pub fn image(&self) -> &'static str {
        self.module.image().name
    }

    /// Compute capability that the image was made for: 10 · major + minor.
    #[must_use]
    pub fn image_arch(&self) -> u32 {
        self.module.image().arch
    }

    /// Launches it, in stream order. Nothing is done for a grid of 0.
    ///
    /// # Errors
    /// [`DeviceError::Launch`], [`DeviceError::Lost`].
    ///
    /// # Safety
    /// The parameters hold to the kernel's contract: every address is valid for what the kernel reads and writes there
    /// until it has ended, and nothing else writes there meanwhile.
    pub unsafe fn launch(&self, shape: &LaunchShape, params: &P) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise; the stream lives as long as the device's handle.
        unsafe { self.launch_on(self.device.cu_stream(), shape, params) }
    }

    /// As [`launch`](Self::launch), on a side stream of the device.
    ///
    /// # Errors
    /// As [`launch`](Self::launch).
    ///
    /// # Safety
    /// As [`launch`](Self::launch), where kernels that the device's stream was given meanwhile run at the same time.
    pub unsafe fn launch_beside(&self, side: &SideStream, shape: &LaunchShape, params: &P) -> Result<(), DeviceError> {
        // SAFETY: as above.
        unsafe { self.launch_on(side.cu_stream(), shape, params) }
    }

    /// # Safety
    /// As [`launch`](Self::launch); the stream is one of the device's context and alive.
    unsafe fn launch_on(&self, stream: sys::CUstream, shape: &LaunchShape, params: &P) -> Result<(), DeviceError> {
        if shape.grid == 0 {
            return Ok(());
        }
        self.device.bind()?;
        let mut attributes = attributes(shape);
        let config = sys::CUlaunchConfig {
            gridDimX: shape.grid,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: shape.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shape.shared_bytes,
            hStream: stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: num_attributes(shape),
        };
        let mut arguments: [*mut std::ffi::c_void; 1] = [(&raw const *params).cast_mut().cast()];
        let extra = std::ptr::null_mut();
        // SAFETY: configuration, attributes and arguments live for the call, which copies them; the parameter has the
        // kernel's layout by the bound on `P`; what it points to is the caller's promise.
        let result = unsafe { sys::cuLaunchKernelEx(&raw const config, self.function, arguments.as_mut_ptr(), extra) };
        DriverCode::check(result).map_err(|code| {
            if code.is_sticky() {
                DeviceError::Lost { during: "launching a kernel", code }
            } else {
                DeviceError::Launch { kernel: self.name.to_string(), shape: *shape, code }
            }
        })
    }

    /// Thread blocks of this shape that one multiprocessor holds at once.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub fn blocks_per_sm(&self, shape: &LaunchShape) -> Result<u32, DeviceError> {
        self.device.bind()?;
        let mut blocks = 0;
        let threads = i32::try_from(shape.block).unwrap_or(i32::MAX);
        // SAFETY: the function is of a loaded module, the result is written to a local.
        let result = unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &raw mut blocks,
                self.function,
                threads,
                shape.shared_bytes as usize,
            )
        };
        check("asking for occupancy", result).map(|()| u32::try_from(blocks).unwrap_or(0))
    }
}

/// A launch's attributes: those that count come first.
fn attributes(shape: &LaunchShape) -> [sys::CUlaunchAttribute; 2] {
    let (cluster, programmatic) = (cluster_attribute(shape.cluster.max(1)), programmatic_attribute());
    if shape.cluster > 1 { [cluster, programmatic] } else { [programmatic, cluster] }
}

/// How many of them count.
fn num_attributes(shape: &LaunchShape) -> u32 {
    u32::from(shape.cluster > 1) + u32::from(shape.is_programmatic)
}

fn cluster_attribute(size: u32) -> sys::CUlaunchAttribute {
    let dims = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: size, y: 1, z: 1 };
    sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue { clusterDim: dims },
    }
}

fn programmatic_attribute() -> sys::CUlaunchAttribute {
    sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launch_has_the_attributes_of_its_shape() {
        use sys::CUlaunchAttributeID::{
            CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION as CLUSTER,
            CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION as PROGRAMMATIC,
        };
        for (cluster, is_programmatic, expected) in [
            (0, false, vec![]),
            (1, true, vec![PROGRAMMATIC]),
            (2, false, vec![CLUSTER]),
            (4, true, vec![CLUSTER, PROGRAMMATIC]),
        ] {
            let shape = LaunchShape { cluster, is_programmatic, ..LaunchShape::default() };
            let (all, count) = (attributes(&shape), num_attributes(&shape) as usize);
            let ids: Vec<_> = all[..count].iter().map(|attribute| attribute.id).collect();
            assert_eq!(ids, expected, "{shape:?}");
        }
    }

    #[test]
    fn a_shape_prints_what_an_error_needs() {
        let shape = LaunchShape { grid: 264, block: 128, cluster: 2, shared_bytes: 65_536, is_programmatic: true };
        assert_eq!(shape.to_string(), "264 blocks of 128 threads with 65536 bytes shared in clusters of 2");
    }
}

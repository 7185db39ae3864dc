//! Owns the choice of an image for a GPU, and loaded modules. Machine code is loaded when its first kernel is asked for, text
//! kernel by kernel.

use std::ffi::{CString, c_void};

use cudarc::driver::sys;

use super::context::Device;
use super::error::{DeviceError, DriverCode, LoadFailure, check};
use super::ptx::only_kernel;

/// What an image holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageKind {
    /// Machine code for one compute capability, and newer minor ones where it is not specific.
    Cubin,
    /// Text that the driver compiles when it loads it.
    Ptx,
}

/// One image of a module.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Image {
    /// Its file's name.
    pub name: &'static str,
    /// What it holds.
    pub kind: ImageKind,
    /// Compute capability that it was made for: 10 · major + minor.
    pub arch: u32,
    /// Whether it runs on that capability alone (`sm_90a`).
    pub is_specific: bool,
    /// The bytes, compressed with brotli.
    pub packed: &'static [u8],
}

impl Image {
    /// The bytes.
    ///
    /// # Errors
    /// What is wrong with the compressed ones.
    pub fn unpack(&self) -> std::io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        brotli_decompressor::BrotliDecompress(&mut &*self.packed, &mut bytes)?;
        Ok(bytes)
    }
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({} bytes compressed)", self.name, self.packed.len())
    }
}

/// Kernels that are loaded together.
#[derive(Clone, Copy, Debug)]
pub struct ModuleSource {
    /// The name of the module; modules of one name are loaded once a device.
    pub name: &'static str,
    /// Its images.
    pub images: &'static [Image],
}

/// The images that run on a compute capability, best first: machine code before text, newer before older, specific
/// before general.
#[must_use]
pub fn candidates(images: &'static [Image], capability: (i32, i32)) -> Vec<&'static Image> {
    let [major, minor] = [capability.0, capability.1].map(|n| u32::try_from(n).unwrap_or(0));
    let device = 10 * major + minor;
    let runs = |image: &&Image| match (image.is_specific, image.kind) {
        (true, _) => image.arch == device,
        (false, ImageKind::Cubin) => image.arch / 10 == major && image.arch <= device,
        (false, ImageKind::Ptx) => image.arch <= device,
    };
    let mut found: Vec<&Image> = images.iter().filter(runs).collect();
    found.sort_by_key(|image| std::cmp::Reverse((image.kind == ImageKind::Cubin, image.arch, image.is_specific)));
    found
}

/// A module on a device.
#[derive(Debug)]
pub(super) struct Module {
    handle: sys::CUmodule,
    name: &'static str,
    image: &'static Image,
    device_context: std::sync::Arc<cudarc::driver::CudaContext>,
}

// SAFETY: a module handle may be used from any thread that has its context current.
unsafe impl Send for Module {}
// SAFETY: as above; the driver locks where it must.
unsafe impl Sync for Module {}

impl Module {
    /// Loads the best image that the driver accepts; of text, `kernel` alone.
    pub(super) fn load(device: &Device, source: &ModuleSource, kernel: &str) -> Result<Self, DeviceError> {
        let capability = device.properties().capability;
        let images = candidates(source.images, capability);
        if images.is_empty() {
            let images = source.images.iter().map(|image| image.name.to_owned()).collect();
            return Err(DeviceError::NoImage { module: source.name, capability, images });
        }
        device.bind()?;
        let mut failures = Vec::new();
        for image in images {
            match load_image(image, kernel) {
                Ok(handle) => {
                    let device_context = std::sync::Arc::clone(device.context());
                    return Ok(Self { handle, name: source.name, image, device_context });
                }
                Err(failure) => failures.push(failure),
            }
        }
        Err(DeviceError::Load { module: source.name, failures })
    }

    /// The image that was loaded.
    pub(super) const fn image(&self) -> &'static Image {
        self.image
    }

    /// An entry point.
    pub(super) fn function(&self, name: &str) -> Result<sys::CUfunction, DeviceError> {
        let missing = || DeviceError::NoKernel { module: self.name, kernel: name.to_owned() };
        let c_name = CString::new(name).map_err(|_| missing())?;
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded, the name ends in 0.
        let result = unsafe { sys::cuModuleGetFunction(&raw mut function, self.handle, c_name.as_ptr()) };
        match result {
            sys::CUresult::CUDA_ERROR_NOT_FOUND => Err(missing()),
            result => check("finding an entry point", result).map(|()| function),
        }
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.device_context.bind_to_thread().is_ok() {
            // SAFETY: kernels hold their module, so none of its functions can be launched any more.
            let _ = unsafe { sys::cuModuleUnload(self.handle) };
        }
    }
}

const LOG_BYTES: usize = 16 << 10;

/// The bytes to load.
fn bytes_of(image: &Image, kernel: &str) -> Result<Vec<u8>, LoadFailure> {
    let damaged = |log| LoadFailure { image: image.name.to_owned(), code: DriverCode::INVALID_IMAGE, log };
    let bytes = image.unpack().map_err(|error| damaged(format!("the image cannot be unpacked: {error}")))?;
    match image.kind {
        ImageKind::Cubin => Ok(bytes),
        ImageKind::Ptx => {
            let text = std::str::from_utf8(&bytes).map_err(|error| damaged(format!("the text is damaged: {error}")))?;
            let text = only_kernel(text, kernel).ok_or_else(|| damaged(format!("the text has no kernel {kernel}")))?;
            Ok(text.into_bytes())
        }
    }
}

fn load_image(image: &Image, kernel: &str) -> Result<sys::CUmodule, LoadFailure> {
    let mut bytes = bytes_of(image, kernel)?;
    // The driver reads text up to a 0.
    bytes.push(0);
    let mut log = vec![0u8; LOG_BYTES];
    let mut options =
        [sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER, sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), std::ptr::without_provenance_mut(LOG_BYTES)];
    let mut handle = std::ptr::null_mut();
    // SAFETY: the image is whole, the log has the length that is given, and the context is current.
    let result = unsafe {
        sys::cuModuleLoadDataEx(&raw mut handle, bytes.as_ptr().cast(), 2, options.as_mut_ptr(), values.as_mut_ptr())
    };
    DriverCode::check(result).map(|()| handle).map_err(|code| {
        let len = log.iter().position(|&byte| byte == 0).unwrap_or(log.len());
        let log = String::from_utf8_lossy(&log[..len]).into_owned();
        LoadFailure { image: image.name.to_owned(), code, log }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn image(name: &'static str, kind: ImageKind, arch: u32, is_specific: bool) -> Image {
        Image { name, kind, arch, is_specific, packed: &[] }
    }

    const IMAGES: &[Image] = &[
        image("ptx80", ImageKind::Ptx, 80, false),
        image("cubin80", ImageKind::Cubin, 80, false),
        image("cubin90a", ImageKind::Cubin, 90, true),
        image("ptx90a", ImageKind::Ptx, 90, true),
    ];

    fn names(capability: (i32, i32)) -> Vec<&'static str> {
        candidates(IMAGES, capability).iter().map(|image| image.name).collect()
    }

    #[test]
    fn the_best_image_comes_first() {
        assert_eq!(names((9, 0)), ["cubin90a", "ptx90a", "ptx80"]);
        assert_eq!(names((8, 0)), ["cubin80", "ptx80"]);
        assert_eq!(names((8, 9)), ["cubin80", "ptx80"]);
    }

    #[test]
    fn a_specific_image_runs_on_its_own_capability_alone() {
        assert_eq!(names((10, 0)), ["ptx80"]);
        assert_eq!(names((9, 1)), ["ptx80"]);
        assert_eq!(names((7, 5)), Vec::<&str>::new());
        assert_eq!(names((-1, 0)), Vec::<&str>::new());
    }
}

//! Finds the driver without a panic. Everything else of this crate runs after it.
//!
//! The driver's library is opened by name and asked for its version and its devices. The bindings that the rest of the
//! crate uses end the process where the library or a function of it is missing, so every function that they will call
//! is looked up here first.

use std::ffi::{c_int, c_uint};
use std::sync::OnceLock;

use cudarc::driver::sys;
use libloading::Library;

use super::error::{DeviceError, DriverCode};

/// The oldest CUDA version of a driver: cluster launches and tensor maps are little older, and the text of Hopper's kernels
/// is for drivers as new.
pub const MIN_CUDA_VERSION: i32 = 12_010;
/// The driver branch that brought it.
pub const MIN_DRIVER_BRANCH: &str = "530";

/// Names of the driver's library, in the order in which they are tried.
pub const LIBRARY_NAMES: &[&str] = if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so.1", "libcuda.so"] };

/// Functions that this crate calls, directly or through its bindings, and that not every driver has.
const NEEDED: &[&str] = &[
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGet",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDeviceTotalMem_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
    "cuStreamIsCapturing",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuEventQuery",
    "cuEventElapsedTime",
    "cuEventDestroy_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemAllocAsync",
    "cuMemFreeAsync",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemHostGetDevicePointer_v2",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemGetInfo_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemsetD8Async",
    "cuModuleLoadDataEx",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuFuncSetAttribute",
    "cuFuncGetAttribute",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
    "cuLaunchKernelEx",
    "cuTensorMapEncodeTiled",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuGraphUpload",
    "cuGraphExecDestroy",
    "cuGraphDestroy",
];

/// What the driver says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Driver {
    /// The name by which its library was opened.
    pub library: String,
    /// CUDA version that it is for: 1000 · major + 10 · minor.
    pub cuda_version: i32,
    /// GPUs that it shows, ≥ 1.
    pub num_devices: usize,
}

/// The driver of this machine, looked for once.
///
/// # Errors
/// [`DeviceError::NoDriver`], [`DeviceError::DriverTooOld`], [`DeviceError::NoDevice`]; never a panic.
pub fn probe() -> Result<Driver, DeviceError> {
    static FOUND: OnceLock<Result<Driver, DeviceError>> = OnceLock::new();
    FOUND.get_or_init(|| probe_libraries(LIBRARY_NAMES)).clone()
}

/// Looks for the driver under other names: for tests, and for machines where it has another one.
///
/// # Errors
/// As [`probe`].
pub fn probe_libraries(names: &[&str]) -> Result<Driver, DeviceError> {
    let mut why = "no name was given".to_owned();
    for name in names {
        // SAFETY: opening the library runs its initialisers, which the driver's vendor means to be run this way.
        match unsafe { Library::new(*name) } {
            Ok(library) => {
                // The driver stays for the life of the process: nothing that it started may outlive it.
                let library: &'static Library = Box::leak(Box::new(library));
                return ask(name, library);
            }
            Err(error) => why = error.to_string(),
        }
    }
    Err(DeviceError::NoDriver { searched: names.iter().map(|&name| name.to_owned()).collect(), why })
}

type Init = unsafe extern "C" fn(c_uint) -> sys::CUresult;
type GetNumber = unsafe extern "C" fn(*mut c_int) -> sys::CUresult;

fn ask(name: &str, library: &Library) -> Result<Driver, DeviceError> {
    let missing = NEEDED.iter().copied().find(|needed| !has_symbol(library, needed));
    let version = get_number(library, "cuDriverGetVersion").unwrap_or(0);
    judge_version(version, missing)?;
    // SAFETY: the type is that of `cuInit` in the driver's header.
    let init = unsafe { library.get::<Init>(b"cuInit") }.ok();
    // SAFETY: flags must be 0, and are.
    let started = init.map(|init| unsafe { init(0) });
    let count = match started.map(DriverCode::check) {
        Some(Ok(())) => get_number(library, "cuDeviceGetCount"),
        Some(Err(code)) => Err(code.to_string()),
        None => Err("cuInit is missing".to_owned()),
    };
    judge_devices(name, version, count)
}

fn judge_version(version: i32, missing: Option<&'static str>) -> Result<(), DeviceError> {
    if version < MIN_CUDA_VERSION || missing.is_some() {
        return Err(DeviceError::DriverTooOld { found: version, missing });
    }
    Ok(())
}

fn judge_devices(name: &str, cuda_version: i32, count: Result<i32, String>) -> Result<Driver, DeviceError> {
    match count.map(usize::try_from) {
        Ok(Ok(num_devices @ 1..)) => Ok(Driver { library: name.to_owned(), cuda_version, num_devices }),
        Ok(_) => Err(DeviceError::NoDevice { why: "it shows 0 devices".to_owned() }),
        Err(why) => Err(DeviceError::NoDevice { why }),
    }
}

fn has_symbol(library: &Library, name: &str) -> bool {
    // SAFETY: the address is not used, only whether there is one.
    unsafe { library.get::<*const ()>(name.as_bytes()) }.is_ok()
}

fn get_number(library: &Library, name: &str) -> Result<i32, String> {
    // SAFETY: both functions that are asked for here take a pointer to an int, by the driver's header.
    let get = unsafe { library.get::<GetNumber>(name.as_bytes()) }.map_err(|error| error.to_string())?;
    let mut number = 0;
    // SAFETY: the pointer is to an int that lives for the call.
    let result = unsafe { get(&raw mut number) };
    DriverCode::check(result).map(|()| number).map_err(|code| code.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error_that_says_what_to_do() {
        let error = probe_libraries(&["libno-such-driver.so.1", "libno-such-driver.so"]).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, DeviceError::NoDriver { .. }), "{text}");
        assert!(text.contains("libno-such-driver.so.1, libno-such-driver.so") && text.contains("install driver 530"));
        assert!(matches!(probe_libraries(&[]), Err(DeviceError::NoDriver { .. })));
    }

    #[test]
    fn a_library_that_is_no_driver_is_too_old() {
        // Every process of these platforms has its C library.
        let error = probe_libraries(&["libc.so.6"]).unwrap_err();
        assert!(matches!(error, DeviceError::DriverTooOld { found: 0, missing: Some("cuInit") }), "{error}");
    }

    #[test]
    fn an_old_driver_is_told_by_version_and_by_what_it_lacks() {
        let error = judge_version(11_040, None).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the NVIDIA driver is for CUDA 11.4, at least CUDA 12.1 is needed; install driver 530 or newer"
        );
        let error = judge_version(12_010, Some("cuLaunchKernelEx")).unwrap_err();
        assert!(error.to_string().contains("it lacks cuLaunchKernelEx"), "{error}");
        assert!(judge_version(12_080, None).is_ok());
        assert!(judge_version(MIN_CUDA_VERSION, None).is_ok() && judge_version(12_000, None).is_err());
    }

    #[test]
    fn every_driver_that_is_let_through_compiles_every_shipped_text() {
        let manifest: serde_json::Value = serde_json::from_str(include_str!("../../images/manifest.json")).unwrap();
        // Versions of text 8.x came with CUDA 12.x, earlier ones before.
        let is_known = |version: &str| match version.strip_prefix("8.") {
            Some(minor) => minor.parse::<i32>().unwrap() * 10 + 12_000 <= MIN_CUDA_VERSION,
            None => version.starts_with("7."),
        };
        let images = manifest["images"].as_array().unwrap();
        let versions: Vec<&str> = images.iter().filter_map(|image| image["ptx_version"].as_str()).collect();
        assert!(!versions.is_empty() && versions.iter().all(|version| is_known(version)), "{versions:?}");
    }

    #[test]
    fn a_driver_without_a_gpu_is_not_a_driver_with_one() {
        assert!(matches!(judge_devices("x", 12_080, Ok(0)), Err(DeviceError::NoDevice { .. })));
        assert!(matches!(judge_devices("x", 12_080, Ok(-1)), Err(DeviceError::NoDevice { .. })));
        let error = judge_devices("x", 12_080, Err("CUDA_ERROR_NO_DEVICE (100)".to_owned())).unwrap_err();
        assert!(error.to_string().contains("CUDA_ERROR_NO_DEVICE (100)"), "{error}");
        assert_eq!(judge_devices("x", 12_080, Ok(2)).unwrap().num_devices, 2);
    }

    #[test]
    fn probing_this_machine_never_panics() {
        match probe() {
            Ok(driver) => assert!(driver.num_devices >= 1 && driver.cuda_version >= MIN_CUDA_VERSION),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
}

//! Owns [`DeviceError`]: everything that can go wrong between this process and a GPU, with what to do about it.
//!
//! Driver results are kept as numbers with their names: asking the driver for a text is what fails where there is none.

use std::fmt;

use cudarc::driver::{DriverError, sys};

use super::launch::LaunchShape;
use super::trap::TrapReport;

/// A result code of the driver that is not success.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct DriverCode(sys::CUresult);

impl DriverCode {
    /// The code of memory that cannot be had.
    pub(crate) const OUT_OF_MEMORY: Self = Self(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY);

    /// The code of an image that is none.
    pub(crate) const INVALID_IMAGE: Self = Self(sys::CUresult::CUDA_ERROR_INVALID_IMAGE);

    /// The number, as in `cuda.h`.
    #[must_use]
    pub const fn number(self) -> u32 {
        self.0 as u32
    }

    /// Success, or the code.
    pub(crate) const fn check(result: sys::CUresult) -> Result<(), Self> {
        match result {
            sys::CUresult::CUDA_SUCCESS => Ok(()),
            code => Err(Self(code)),
        }
    }

    /// Whether the context is lost: every later call on it fails too.
    pub(crate) const fn is_sticky(self) -> bool {
        use sys::CUresult as C;
        matches!(
            self.0,
            C::CUDA_ERROR_ILLEGAL_ADDRESS
                | C::CUDA_ERROR_LAUNCH_FAILED
                | C::CUDA_ERROR_ILLEGAL_INSTRUCTION
                | C::CUDA_ERROR_MISALIGNED_ADDRESS
                | C::CUDA_ERROR_INVALID_ADDRESS_SPACE
                | C::CUDA_ERROR_INVALID_PC
                | C::CUDA_ERROR_HARDWARE_STACK_ERROR
                | C::CUDA_ERROR_ASSERT
                | C::CUDA_ERROR_LAUNCH_TIMEOUT
        )
    }
}

impl fmt::Display for DriverCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} ({})", self.0, self.number())
    }
}

impl fmt::Debug for DriverCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<DriverError> for DriverCode {
    fn from(error: DriverError) -> Self {
        Self(error.0)
    }
}

/// An image of a module that could not be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadFailure {
    /// Its name, with what it is for: `decode.sm_90a.cubin`.
    pub image: String,
    /// The driver's answer.
    pub code: DriverCode,
    /// What the driver's compiler or linker said; may be empty.
    pub log: String,
}

impl fmt::Display for LoadFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.image, self.code)?;
        if self.log.is_empty() { Ok(()) } else { write!(f, ": {}", self.log.trim_end()) }
    }
}

/// What can go wrong with a device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The driver's library cannot be opened.
    #[error(
        "no NVIDIA driver: none of {} can be opened ({why}); install driver {} or newer, or choose a host backend",
        searched.join(", "), super::probe::MIN_DRIVER_BRANCH
    )]
    NoDriver {
        /// The names that were tried.
        searched: Vec<String>,
        /// What the loader said to the last of them.
        why: String,
    },
    /// The driver is there and finds no GPU.
    #[error("the NVIDIA driver finds no GPU ({why}); check that one is installed and visible (CUDA_VISIBLE_DEVICES)")]
    NoDevice {
        /// What it answered.
        why: String,
    },
    /// The driver lacks what this crate calls.
    #[error(
        "the NVIDIA driver is for CUDA {}, at least CUDA {} is needed{}; install driver {} or newer",
        version_text(*found), version_text(super::probe::MIN_CUDA_VERSION),
        missing.map(|name| format!(" (it lacks {name})")).unwrap_or_default(), super::probe::MIN_DRIVER_BRANCH
    )]
    DriverTooOld {
        /// CUDA version of the driver, as the driver counts: 1000 · major + 10 · minor.
        found: i32,
        /// A function that it lacks, where that is how it was noticed.
        missing: Option<&'static str>,
    },
    /// There is no GPU of this number.
    #[error("there is no GPU {ordinal}, the driver shows {count}")]
    NoSuchDevice {
        /// The number asked for, from 0.
        ordinal: usize,
        /// GPUs that there are.
        count: usize,
    },
    /// No image of the kernels runs on the GPU.
    #[error("no image of the kernels {module} runs on compute capability {}.{}; there are: {}", capability.0, capability.1, images.join(", "))]
    NoImage {
        /// The module.
        module: &'static str,
        /// The GPU's compute capability.
        capability: (i32, i32),
        /// The images there are.
        images: Vec<String>,
    },
    /// Every image that should run was refused by the driver.
    #[error("the kernels {module} cannot be loaded: {}", failures.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Load {
        /// The module.
        module: &'static str,
        /// Each image, in the order in which they were tried.
        failures: Vec<LoadFailure>,
    },
    /// The module has no such entry point.
    #[error("the kernels {module} have no entry point {kernel}")]
    NoKernel {
        /// The module.
        module: &'static str,
        /// The entry point.
        kernel: String,
    },
    /// A launch was refused.
    #[error("launching {kernel} as {shape} failed: {code}")]
    Launch {
        /// The entry point.
        kernel: String,
        /// Its launch shape.
        shape: LaunchShape,
        /// The driver's answer.
        code: DriverCode,
    },
    /// Device or pinned memory cannot be had.
    #[error("{bytes} bytes for {what} cannot be had ({code})")]
    OutOfMemory {
        /// What it is for.
        what: &'static str,
        /// Bytes asked for.
        bytes: usize,
        /// The driver's answer.
        code: DriverCode,
    },
    /// A range that does not lie in its buffer.
    #[error("{what}: bytes {begin} to {end} of a buffer of {len} bytes")]
    OutOfBounds {
        /// What was to be done.
        what: &'static str,
        /// First byte.
        begin: usize,
        /// One past the last byte.
        end: usize,
        /// Bytes of the buffer.
        len: usize,
    },
    /// An address that a kernel cannot read in vectors.
    #[error("{what} begins at or steps by {got} bytes, a multiple of {needed} is needed")]
    Alignment {
        /// What is not aligned.
        what: &'static str,
        /// Address or stride in bytes, the part that is not aligned.
        got: u64,
        /// The alignment in bytes.
        needed: u64,
    },
    /// Memory that is freed in the order of another stream than the one that would use it.
    #[error(
        "{what} is memory of another device or stream than its user's; allocate it with the same device handle or a clone of it"
    )]
    OtherStream {
        /// What is of another stream.
        what: &'static str,
    },
    /// A stride that kernels cannot step by.
    #[error("{what} steps by {got} elements, kernels by at most {max}")]
    Stride {
        /// What steps.
        what: &'static str,
        /// Elements.
        got: usize,
        /// The most.
        max: usize,
    },
    /// A checked kernel found a broken rule.
    #[error("{report}")]
    Trapped {
        /// What it found.
        report: TrapReport,
    },
    /// Work on the device failed earlier: the context is lost.
    #[error("work on the device failed while {during}: {code}; the device's context is lost, make a new one")]
    Lost {
        /// What was done when it was noticed.
        during: &'static str,
        /// The driver's answer.
        code: DriverCode,
    },
    /// Another call of the driver failed.
    #[error("{what} failed: {code}")]
    Driver {
        /// The call.
        what: &'static str,
        /// The driver's answer.
        code: DriverCode,
    },
    /// A graph that cannot be recorded.
    #[error("recording a graph failed: {why}")]
    Capture {
        /// Why.
        why: String,
    },
}

/// `12.8` for 12080.
pub(crate) fn version_text(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// Success, or what was done and the driver's answer.
pub(crate) fn check(what: &'static str, result: sys::CUresult) -> Result<(), DeviceError> {
    DriverCode::check(result).map_err(|code| failed(what, code))
}

/// The error of a failed call.
pub(crate) fn failed(what: &'static str, code: impl Into<DriverCode>) -> DeviceError {
    let code = code.into();
    if code.is_sticky() { DeviceError::Lost { during: what, code } } else { DeviceError::Driver { what, code } }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_have_their_names_without_asking_the_driver() {
        let code = DriverCode::check(sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS).unwrap_err();
        assert_eq!(code.to_string(), "CUDA_ERROR_ILLEGAL_ADDRESS (700)");
        assert!(DriverCode::check(sys::CUresult::CUDA_SUCCESS).is_ok());
    }

    #[test]
    fn a_lost_context_is_told_from_a_refused_call() {
        let refused = check("cuMemsetD8Async", sys::CUresult::CUDA_ERROR_INVALID_VALUE).unwrap_err();
        assert!(matches!(refused, DeviceError::Driver { what: "cuMemsetD8Async", .. }), "{refused}");
        let lost = check("waiting", sys::CUresult::CUDA_ERROR_LAUNCH_FAILED).unwrap_err();
        assert!(lost.to_string().contains("context is lost"), "{lost}");
    }
}

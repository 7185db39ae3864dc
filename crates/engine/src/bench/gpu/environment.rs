//! Where a run took place: the card, its driver, the build, the command.

use attn_cuda::device::{Device, DeviceError, probe};
use serde::{Deserialize, Serialize};

use crate::doctor;

/// The GPU of a run, and what it can do.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuEnvironment {
    /// Its name.
    pub name: String,
    /// Compute capability.
    pub capability: String,
    /// Multiprocessors.
    pub num_sms: u32,
    /// The driver's version, where the system says it, and the CUDA version that it is for.
    pub driver: String,
    /// Bytes read and written by a copy of 1 GiB on the device, in GB/s, the best of several.
    pub copy_gbs: f64,
    /// The same where 64 MB are moved, in a graph over a cold cache as everything else: what storing and merging are
    /// compared with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy_64mb_gbs: Option<f64>,
    /// The commit of the build, where it was told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// `release` or `debug`.
    #[serde(default)]
    pub build: String,
    /// The command.
    #[serde(default)]
    pub command: String,
}

impl GpuEnvironment {
    /// What can be asked without measuring.
    pub(super) fn of(device: &Device, command: &str) -> Result<Self, DeviceError> {
        let version = probe()?.cuda_version;
        let cuda = format!("CUDA {}.{}", version / 1000, version % 1000 / 10);
        let properties = device.properties();
        let (major, minor) = properties.capability;
        Ok(Self {
            name: properties.name.clone(),
            capability: format!("{major}.{minor}"),
            num_sms: properties.num_sms,
            driver: driver_version().map_or(cuda.clone(), |version| format!("{version} ({cuda})")),
            commit: doctor::commit().map(str::to_owned),
            build: doctor::build_profile().to_owned(),
            command: command.to_owned(),
            ..Self::default()
        })
    }
}

/// The version that the kernel module says.
fn driver_version() -> Option<String> {
    version_in(&std::fs::read_to_string("/proc/driver/nvidia/version").ok()?)
}

/// The first word of the first line that is numbers with dots between.
fn version_in(text: &str) -> Option<String> {
    let is_version = |word: &&str| {
        let mut parts = word.split('.');
        word.contains('.') && parts.all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()))
    };
    text.lines().next()?.split_whitespace().find(is_version).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_found_in_what_the_kernel_module_says() {
        let text =
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: 12.3\n";
        assert_eq!(version_in(text).as_deref(), Some("580.159.04"));
        assert_eq!(version_in("NVRM version: x86_64 . 5.\n1.2"), None);
    }
}

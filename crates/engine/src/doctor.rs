//! What this machine offers: system, processor, memory, driver, and which backends can be used.
//!
//! No context is opened and nothing is allocated: the NVIDIA driver is asked what it is and which GPUs it shows.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;

use attn_metadata::HostDevice;
use attn_reference::cpu::Isa;
use serde::Serialize;

use crate::backends::host_registry;
use crate::report::{Table, capability_rows};

/// The library through which programs reach the NVIDIA driver.
const DRIVER: &str = "libcuda.so.1";
/// Where the loader looks without being told.
const LOADER_DIRS: [&str; 8] = [
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/wsl/lib",
    "/usr/local/nvidia/lib64",
];

/// What was found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Findings {
    /// Version of this program.
    pub version: &'static str,
    /// The commit that the build was told of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub commit: Option<&'static str>,
    /// `release` or `debug`.
    pub build: &'static str,
    /// The system.
    pub os: String,
    /// The processor.
    pub cpu: String,
    /// The instruction set that the CPU backend uses.
    pub isa: &'static str,
    /// Threads that this process may use.
    pub threads: usize,
    /// Memory of the machine; 0: unknown.
    pub memory_bytes: u64,
    /// Memory that is free now.
    pub available_memory_bytes: u64,
    /// Where the NVIDIA driver's library lies.
    pub nvidia_driver: Option<PathBuf>,
    /// What the driver says, or what is missing and what to do.
    pub nvidia: String,
    /// GPUs that the driver shows.
    pub gpus: Vec<GpuFinding>,
    /// Each backend.
    pub backends: Vec<BackendFinding>,
}

/// A GPU and the kernels that it would run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GpuFinding {
    /// Its name.
    pub name: String,
    /// Compute capability, `9.0`.
    pub capability: String,
    /// Memory.
    pub memory_bytes: u64,
    /// Streaming multiprocessors.
    pub num_sms: u32,
    /// For each module of kernels: the image that it would load, or why none.
    pub kernels: Vec<String>,
}

/// A backend and whether it can be used here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BackendFinding {
    /// Its name.
    pub name: &'static str,
    /// Whether it can be used.
    pub usable: bool,
    /// One line about it, or why it cannot be used.
    pub note: String,
}

impl Findings {
    /// Looks at this machine.
    #[must_use]
    pub fn of_this_machine() -> Self {
        let nvidia_driver = find_library(DRIVER, &loader_dirs());
        let (nvidia, gpus) = nvidia();
        let threads = thread::available_parallelism().map_or(1, usize::from);
        let rows = capability_rows(&host_registry(), &HostDevice::default());
        let backends = rows.into_iter().map(|row| BackendFinding {
            name: row.name,
            usable: row.unavailable.is_none(),
            note: row.unavailable.unwrap_or_else(|| row.summary.to_owned()),
        });
        Self {
            version: env!("CARGO_PKG_VERSION"),
            commit: commit(),
            build: build_profile(),
            os: os_name(),
            cpu: cpu_model(),
            isa: Isa::detect().name(),
            threads,
            memory_bytes: memory_field("MemTotal").unwrap_or(0),
            available_memory_bytes: available_memory_bytes(),
            nvidia_driver,
            nvidia,
            gpus,
            backends: backends.collect(),
        }
    }

    /// The findings for people.
    #[must_use]
    pub fn to_table(&self) -> Table {
        let mut table = Table::new(&["what", "found"]);
        let gib = |bytes: u64| match bytes {
            0 | u64::MAX => "unknown".to_owned(),
            bytes => format!("{:.1} GiB", f64::from(u32::try_from(bytes >> 20).unwrap_or(u32::MAX)) / 1024.0),
        };
        let mut push = |what: &str, found: String| table.push(vec![what.to_owned(), found]);
        let commit = self.commit.map_or(String::new(), |commit| format!(", commit {commit}"));
        push("attn", format!("{} ({} build{commit})", self.version, self.build));
        push("system", self.os.clone());
        push("processor", self.cpu.clone());
        push("instruction set", self.isa.to_owned());
        push("threads", self.threads.to_string());
        push("memory", format!("{}, {} free", gib(self.memory_bytes), gib(self.available_memory_bytes)));
        push("NVIDIA", self.nvidia.clone());
        for (index, gpu) in self.gpus.iter().enumerate() {
            let GpuFinding { name, capability, memory_bytes, num_sms, kernels } = gpu;
            let memory = gib(*memory_bytes);
            push(&format!("GPU {index}"), format!("{name}, capability {capability}, {memory}, {num_sms} SMs"));
            kernels.iter().for_each(|kernel| push(&format!("GPU {index} kernels"), kernel.clone()));
        }
        for BackendFinding { name, usable, note } in &self.backends {
            let note = if *note == self.nvidia { "see NVIDIA above" } else { note };
            push(&format!("backend {name}"), format!("{}: {note}", if *usable { "usable" } else { "not usable" }));
        }
        table
    }
}

/// What the driver says, and its GPUs.
#[cfg(feature = "cuda")]
fn nvidia() -> (String, Vec<GpuFinding>) {
    use attn_cuda::device::{DeviceProperties, devices, probe};

    let gpu = |gpu: DeviceProperties| {
        let (major, minor) = gpu.capability;
        let choice = |(module, image): (&str, Option<&str>)| match image {
            Some(image) => format!("{module}: {image}"),
            None => format!("{module}: no image runs on capability {major}.{minor}"),
        };
        GpuFinding {
            name: gpu.name,
            capability: format!("{major}.{minor}"),
            memory_bytes: gpu.memory_bytes,
            num_sms: gpu.num_sms,
            kernels: attn_cuda::image_choices(gpu.capability).into_iter().map(choice).collect(),
        }
    };
    let found = probe().and_then(|driver| Ok((driver, devices()?)));
    match found {
        Ok((driver, gpus)) => {
            let (major, minor) = (driver.cuda_version / 1000, driver.cuda_version % 1000 / 10);
            let text = format!("driver for CUDA {major}.{minor}, {} GPU(s)", driver.num_devices);
            (text, gpus.into_iter().map(gpu).collect())
        }
        Err(error) => (error.to_string(), Vec::new()),
    }
}

#[cfg(not(feature = "cuda"))]
fn nvidia() -> (String, Vec<GpuFinding>) {
    ("this build has no CUDA backend (feature cuda)".to_owned(), Vec::new())
}

/// `release` or `debug`.
#[must_use]
pub const fn build_profile() -> &'static str {
    if cfg!(debug_assertions) { "debug" } else { "release" }
}

/// The commit that the build was told of, as `cargo xtask gpu-bundle` does.
#[must_use]
pub const fn commit() -> Option<&'static str> {
    option_env!("ATTN_COMMIT")
}

/// Memory that is free now, on the machine and within the limit of the process's container; without a limit where the
/// system does not say.
#[must_use]
pub fn available_memory_bytes() -> u64 {
    let of_machine = memory_field("MemAvailable").unwrap_or(u64::MAX);
    of_machine.min(container_memory_bytes(Path::new("/sys/fs/cgroup")).unwrap_or(u64::MAX))
}

/// What a container's limit leaves beside what its processes hold (cached files give way): control groups of version 2,
/// or of version 1.
fn container_memory_bytes(groups: &Path) -> Option<u64> {
    let read = |file: &str| fs::read_to_string(groups.join(file)).ok();
    let held = |stat: &str, field: &str| {
        let text = read(stat)?;
        let line = text.lines().find(|line| line.strip_prefix(field).is_some_and(|rest| rest.starts_with(' ')))?;
        line.split_whitespace().nth(1)?.parse().ok()
    };
    let left = |limit: &str, stat: &str, field: &str| {
        let limit: u64 = read(limit)?.trim().parse().ok()?;
        Some(limit.saturating_sub(held(stat, field).unwrap_or(0)))
    };
    left("memory.max", "memory.stat", "anon")
        .or_else(|| left("memory/memory.limit_in_bytes", "memory/memory.stat", "total_rss"))
}

/// Processes that wanted to run in the last minute, on average; `None` where the system does not say.
#[must_use]
pub fn load_average() -> Option<f64> {
    fs::read_to_string("/proc/loadavg").ok()?.split_whitespace().next()?.parse().ok()
}

/// The processor's name.
#[must_use]
pub fn cpu_model() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = info.lines().find(|line| line.starts_with(name))?;
        line.split_once(':').map(|(_, value)| value.trim().to_owned())
    };
    field("model name").or_else(|| field("Model")).unwrap_or_else(|| env::consts::ARCH.to_owned())
}

fn os_name() -> String {
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let pretty = release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let parts = [pretty.unwrap_or(env::consts::OS).trim_matches('"'), kernel.trim(), env::consts::ARCH];
    parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(", ")
}

/// A line of `/proc/meminfo`, in bytes.
fn memory_field(name: &str) -> Option<u64> {
    let info = fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(':')))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    kib.checked_mul(1024)
}

/// The directories that the loader searches: told by the environment, by its configuration, and those it knows.
fn loader_dirs() -> Vec<PathBuf> {
    let told = env::var_os("LD_LIBRARY_PATH").map(|paths| env::split_paths(&paths).collect()).unwrap_or_default();
    let mut dirs: Vec<PathBuf> = told;
    let mut seen = BTreeSet::new();
    read_loader_config(Path::new("/etc/ld.so.conf"), &mut dirs, &mut seen);
    let parts = fs::read_dir("/etc/ld.so.conf.d").into_iter().flatten().flatten().map(|entry| entry.path());
    parts.for_each(|path| read_loader_config(&path, &mut dirs, &mut seen));
    dirs.extend(LOADER_DIRS.iter().map(PathBuf::from));
    dirs
}

/// Adds the directories that a file of the loader's configuration lists, one a line.
fn read_loader_config(path: &Path, dirs: &mut Vec<PathBuf>, seen: &mut BTreeSet<PathBuf>) {
    if !seen.insert(path.to_owned()) {
        return;
    }
    let text = fs::read_to_string(path).unwrap_or_default();
    dirs.extend(text.lines().map(str::trim).filter(|line| line.starts_with('/')).map(PathBuf::from));
}

/// The first directory's file of this name.
fn find_library(name: &str, dirs: &[PathBuf]) -> Option<PathBuf> {
    dirs.iter().map(|dir| dir.join(name)).find(|path| path.exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_is_found_where_it_is_and_nowhere_else() {
        let dirs = [PathBuf::from("/no/such/directory"), PathBuf::from(env!("CARGO_MANIFEST_DIR"))];
        assert_eq!(find_library("Cargo.toml", &dirs), Some(dirs[1].join("Cargo.toml")));
        assert_eq!(find_library("libcuda.so.0", &dirs), None);
    }

    #[test]
    fn a_containers_limit_is_read_in_both_versions() {
        let groups = env::temp_dir().join(format!("attn-doctor-{}", std::process::id()));
        // A run that failed may have left one behind, and its process id comes again.
        let _ = fs::remove_dir_all(&groups);
        fs::create_dir_all(groups.join("memory")).unwrap();
        let write = |file: &str, text: &str| fs::write(groups.join(file), text).unwrap();
        assert_eq!(container_memory_bytes(&groups), None);
        write("memory/memory.limit_in_bytes", "1000\n");
        assert_eq!(container_memory_bytes(&groups), Some(1000));
        write("memory/memory.stat", "cache 500\ntotal_rss 300\n");
        assert_eq!(container_memory_bytes(&groups), Some(700));
        write("memory.max", "max\n");
        assert_eq!(container_memory_bytes(&groups), Some(700), "no limit in version 2");
        write("memory.max", "2000\n");
        write("memory.stat", "anon_thp 7\nanon 2500\nfile 100\n");
        assert_eq!(container_memory_bytes(&groups), Some(0), "more is held than the limit allows");
        fs::remove_dir_all(&groups).unwrap();
    }

    #[test]
    fn every_backend_of_the_registry_is_listed() {
        let findings = Findings::of_this_machine();
        assert_eq!(findings.backends.len(), host_registry().entries().len());
        assert!(findings.threads >= 1 && !findings.cpu.is_empty());
        assert!(findings.to_table().to_text(false).contains("backend cpu"));
    }
}

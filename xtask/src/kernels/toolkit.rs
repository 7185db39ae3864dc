//! Finds the compiler: the pinned version on the search path, under `CUDA_HOME`, or installed by package name with pip
//! into an ignored folder.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::step::spinner;
use crate::workspace::Workspace;

/// The version that images are built with. Newer ones write text that the drivers of today do not read.
pub(super) const VERSION: &str = "V13.0.88";

/// The packages that hold it.
const PACKAGES: [&str; 5] = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
];

/// Where pip installs them.
const FOLDER: &str = ".cache/cuda-13.0.88";

const PYTHON: &str = "python3";

/// A compiler of the pinned version.
#[derive(Debug)]
pub(super) struct Toolkit {
    bin: PathBuf,
}

impl Toolkit {
    /// Finds it, or installs it.
    pub(super) fn find(workspace: &Workspace) -> Result<Self> {
        require_host_compiler()?;
        let installed = workspace.path(FOLDER).join("nvidia/cu13/bin");
        let told = env::var_os("CUDA_HOME").map(|home| PathBuf::from(home).join("bin"));
        let on_path = env::var_os("PATH").map(|paths| env::split_paths(&paths).collect::<Vec<_>>());
        let folders = told.into_iter().chain(on_path.into_iter().flatten()).chain([installed.clone()]);
        if let Some(bin) = folders.into_iter().find(|bin| is_pinned(bin)) {
            return Ok(Self { bin });
        }
        install(workspace)?;
        ensure!(is_pinned(&installed), "pip installed no {VERSION} of nvcc under {}", workspace.path(FOLDER).display());
        Ok(Self { bin: installed })
    }

    /// For people.
    pub(super) fn describe(&self, workspace: &Workspace) -> String {
        format!("nvcc {VERSION} in {}", workspace.shown(&self.bin))
    }

    /// A tool of it.
    pub(super) fn command(&self, tool: &str) -> Command {
        let mut command = Command::new(self.bin.join(tool));
        command.stdin(Stdio::null());
        command
    }
}

/// nvcc leaves preprocessing to the host's C++ compiler.
fn require_host_compiler() -> Result<()> {
    let run = Command::new("g++").arg("--version").stdin(Stdio::null()).output();
    match run {
        Ok(output) if output.status.success() => Ok(()),
        _ => bail!("nvcc needs a C++ compiler (g++) to preprocess with, and there is none"),
    }
}

fn is_pinned(bin: &Path) -> bool {
    let nvcc = bin.join("nvcc");
    if !nvcc.is_file() {
        return false;
    }
    let output = Command::new(nvcc).arg("--version").stdin(Stdio::null()).output();
    output.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains(VERSION))
}

fn install(workspace: &Workspace) -> Result<()> {
    let folder = workspace.path(FOLDER);
    // What an interrupted installation left behind is not trusted.
    let _ = fs::remove_dir_all(&folder);
    let target = folder.to_string_lossy();
    let mut args = vec![
        "-m",
        "pip",
        "install",
        "--quiet",
        "--retries",
        "2",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--target",
        &target,
    ];
    args.extend(PACKAGES);
    eprintln!("installing nvcc 13.0.88 with pip, into {}", workspace.shown(&folder));
    let bar = spinner("pip install");
    let output = Command::new(PYTHON).args(&args).stdin(Stdio::null()).output();
    bar.finish_and_clear();
    let output = output.with_context(|| format!("cannot run `{PYTHON}`, which fetches the compiler"))?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "`{PYTHON} {}` failed:\n{}", args.join(" "), text.trim());
    Ok(())
}

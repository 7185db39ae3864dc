//! The tracked files, and what a rule says about one of them.

use std::fmt;
use std::fs;
use std::path::Path;
use std::process::Command;

/// One tracked file.
#[derive(Debug, Clone)]
pub(crate) struct File {
    /// Relative to the root, with forward slashes.
    pub(crate) path: String,
    /// Empty for a binary file.
    pub(crate) text: String,
    /// Whether the bytes are not UTF-8, or hold a zero.
    pub(crate) is_binary: bool,
    /// Size on disk.
    pub(crate) num_bytes: usize,
}

impl File {
    /// A file from its bytes.
    pub(crate) fn new(path: &str, bytes: Vec<u8>) -> Self {
        let num_bytes = bytes.len();
        let text = if bytes.contains(&0) { None } else { String::from_utf8(bytes).ok() };
        Self { path: path.to_owned(), is_binary: text.is_none(), text: text.unwrap_or_default(), num_bytes }
    }

    /// Whether the path ends in one of `extensions` (each with its dot).
    pub(crate) fn is_one_of(&self, extensions: &[&str]) -> bool {
        extensions.iter().any(|extension| self.path.ends_with(extension))
    }

    /// A finding at a line, counted from 0.
    pub(crate) fn finding(&self, line_idx: usize, what: impl Into<String>) -> Finding {
        Finding { path: self.path.clone(), line: line_idx + 1, what: what.into() }
    }
}

/// One breach of a rule.
#[derive(Debug)]
pub(crate) struct Finding {
    path: String,
    /// Counted from 1.
    pub(crate) line: usize,
    what: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.what)
    }
}

/// Reads every tracked file; where git is absent, every file outside the ignored folders.
pub(crate) fn load() -> Vec<File> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the package lies in the workspace");
    let paths = tracked(root).unwrap_or_else(|| {
        let mut paths = Vec::new();
        walk(root, "", &mut paths);
        paths
    });
    // A tracked file that is deleted and not yet committed so is nobody's breach.
    paths.iter().filter_map(|path| Some(File::new(path, fs::read(root.join(path)).ok()?))).collect()
}

fn tracked(root: &Path) -> Option<Vec<String>> {
    let output = Command::new("git").arg("-C").arg(root).args(["ls-files", "-z"]).output().ok()?;
    let list = String::from_utf8(output.stdout).ok()?;
    let paths: Vec<String> = list.split_terminator('\0').map(str::to_owned).collect();
    (output.status.success() && !paths.is_empty()).then_some(paths)
}

fn walk(root: &Path, folder: &str, paths: &mut Vec<String>) {
    const IGNORED: [&str; 4] = [".git", "target", ".cache", "gpu-bundle"];
    for entry in fs::read_dir(root.join(folder)).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = if folder.is_empty() { name.clone() } else { format!("{folder}/{name}") };
        if !entry.path().is_dir() {
            paths.push(path);
        } else if !IGNORED.contains(&name.as_str()) {
            walk(root, &path, paths);
        }
    }
}

#[test]
fn walking_finds_what_git_lists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the package lies in the workspace");
    let mut walked = Vec::new();
    walk(root, "", &mut walked);
    for path in ["Cargo.toml", "tests/tests/hygiene/tree.rs"] {
        assert!(walked.iter().any(|walked| walked == path), "{path}");
    }
    assert!(!walked.iter().any(|path| path.starts_with("target/") || path.starts_with(".git/")));
}

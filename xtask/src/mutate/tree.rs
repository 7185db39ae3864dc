//! The copy of the workspace in which faults are planted: tracked files only, under the ignored target folder.
//!
//! Files that did not change are not written again, so builds stay incremental from one run to the next. A fault that
//! an aborted run left behind is a file that differs, so the next copy mends it.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::mutation::Mutation;
use crate::workspace::Workspace;

/// Where the suite is run on the CPU backend.
const SUITE_FILE: &str = "tests/tests/conformance_cpu.rs";

/// A copy of the workspace's tracked files.
#[derive(Debug)]
pub(crate) struct Tree {
    root: PathBuf,
}

impl Tree {
    /// Brings the copy up to date with the workspace. There the suite stops at its first failure, unless `every_check`
    /// shall run.
    pub(crate) fn copy(workspace: &Workspace, every_check: bool) -> Result<Self> {
        let root = workspace.path("target/mutants/tree");
        let mut copied = HashSet::new();
        for path in tracked(workspace)? {
            // A tracked file that is deleted and not yet committed so is none.
            if let Ok(mut bytes) = fs::read(workspace.path(&path)) {
                if path == SUITE_FILE && !every_check {
                    bytes = stop_at_first_failure(&String::from_utf8(bytes)?)?.into_bytes();
                }
                let to = root.join(path);
                write_changed(&to, &bytes)?;
                copied.insert(to);
            }
        }
        remove_others(&root, &copied)?;
        Ok(Self { root })
    }

    /// Where it lies.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Edits the mutation's file; dropping what is returned puts the file back.
    pub(crate) fn plant(&self, mutation: &Mutation) -> Result<Planted> {
        let path = self.root.join(mutation.file);
        let sound = fs::read_to_string(&path).with_context(|| format!("cannot read {}", mutation.file))?;
        let faulty = mutation
            .apply(&sound)
            .with_context(|| format!("{}: the text is not exactly once in {}", mutation.name, mutation.file))?;
        let planted = Planted { path, sound };
        fs::write(&planted.path, faulty).with_context(|| format!("cannot write {}", planted.path.display()))?;
        Ok(planted)
    }
}

/// A file with a fault in it, sound again when this is dropped.
#[derive(Debug)]
#[must_use = "dropping it mends the file"]
pub(crate) struct Planted {
    path: PathBuf,
    sound: String,
}

impl Drop for Planted {
    fn drop(&mut self) {
        // Where this fails the next copy mends the file.
        let _ = fs::write(&self.path, &self.sound);
    }
}

fn tracked(workspace: &Workspace) -> Result<Vec<String>> {
    let output = Command::new("git").current_dir(workspace.path("")).args(["ls-files", "-z"]).output();
    let output = output.context("cannot start git, which lists the files to copy")?;
    ensure!(output.status.success(), "git ls-files: {}", String::from_utf8_lossy(&output.stderr).trim());
    let list = String::from_utf8(output.stdout).context("a tracked path is not UTF-8")?;
    Ok(list.split_terminator('\0').map(str::to_owned).collect())
}

/// The test of the suite, such that it stops at the first failure.
fn stop_at_first_failure(text: &str) -> Result<String> {
    let suite = "Suite::standard()";
    ensure!(text.matches(suite).count() == 1, "{SUITE_FILE} does not run {suite} once");
    Ok(text.replace(suite, "Suite::standard().fail_fast()"))
}

/// Writes a file unless it holds these bytes: its time of change is what cargo looks at.
fn write_changed(path: &Path, bytes: &[u8]) -> Result<()> {
    if fs::read(path).is_ok_and(|old| old == bytes) {
        return Ok(());
    }
    let folder = path.parent().context("a file lies in a folder")?;
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
}

/// Removes the files below `folder` that are not `wanted`: cargo would build them.
fn remove_others(folder: &Path, wanted: &HashSet<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            remove_others(&path, wanted)?;
        } else if !wanted.contains(&path) {
            fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mutate::mutation;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("xtask-mutate-{}-{name}", std::process::id()));
        // A run that failed may have left one behind, and its process id comes again.
        let _ = fs::remove_dir_all(&folder);
        folder
    }

    #[test]
    fn only_what_changed_is_written_and_what_is_gone_is_removed() {
        let root = folder("copy");
        let (kept, gone) = (root.join("a/kept"), root.join("b/gone"));
        write_changed(&kept, b"1").expect("writes");
        write_changed(&gone, b"2").expect("writes");
        let time = |path: &Path| fs::metadata(path).and_then(|data| data.modified()).expect("the file is there");
        let before = time(&kept);
        write_changed(&kept, b"1").expect("does nothing");
        assert_eq!(time(&kept), before);
        remove_others(&root, &HashSet::from([kept.clone()])).expect("removes");
        assert!(kept.exists() && !gone.exists());
        fs::remove_dir_all(root).expect("cleans up");
    }

    #[test]
    fn the_suite_of_this_tree_can_stop_at_its_first_failure() {
        let text = include_str!("../../../tests/tests/conformance_cpu.rs");
        assert!(stop_at_first_failure(text).expect("it runs the suite").contains("fail_fast"));
        assert!(stop_at_first_failure("fn main() {}").is_err());
    }

    #[test]
    fn a_planted_fault_is_mended_when_it_goes() {
        let tree = Tree { root: folder("plant") };
        let mutation = mutation::all().next().expect("there are mutations");
        let path = tree.root.join(mutation.file);
        let sound = format!("before {} after", mutation.find);
        write_changed(&path, sound.as_bytes()).expect("writes");
        let planted = tree.plant(mutation).expect("applies");
        let text = || fs::read_to_string(&path).expect("the file is there");
        assert_eq!(text(), format!("before {} after", mutation.replace));
        assert!(tree.plant(mutation).is_err(), "the text is gone");
        drop(planted);
        assert_eq!(text(), sound);
        fs::remove_dir_all(&tree.root).expect("cleans up");
    }
}

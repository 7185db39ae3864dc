//! Which images a check builds again where there is not the time for all: what the last commit and the tree changed, and
//! one image more, another one with every tree.

use std::process::{Command, Stdio};

use super::image::Target;
use super::{IMAGES, SOURCES};
use crate::workspace::Workspace;

/// Where a change may change every image.
const BUILDER: &str = "xtask/src/kernels";

/// The images to build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Sample {
    All,
    Some {
        /// Paths that differ from the commit before the last, the tree's own changes included.
        changed: Vec<String>,
        /// Packed name of the image whose turn it is.
        turn: String,
    },
}

impl Sample {
    /// Asks git; where it does not know, everything is built.
    pub(super) fn of(workspace: &Workspace, targets: &[Target]) -> Self {
        let Some(tree) = git(workspace, &["rev-parse", "HEAD^{tree}"]) else { return Self::All };
        let Some(changed) = git(workspace, &["diff", "--name-only", "HEAD~1", "--", SOURCES, IMAGES, BUILDER]) else {
            return Self::All;
        };
        Self::choose(changed.lines().map(str::to_owned).collect(), tree.trim(), targets)
    }

    fn choose(changed: Vec<String>, tree: &str, targets: &[Target]) -> Self {
        let number = tree.get(..8).and_then(|digits| usize::from_str_radix(digits, 16).ok());
        let (Some(number), false) = (number, targets.is_empty()) else { return Self::All };
        let is_header = |path: &String| path.ends_with(".h") || path.ends_with(".cuh");
        if changed.iter().any(|path| is_header(path) || path.starts_with(BUILDER)) {
            return Self::All;
        }
        let mut names: Vec<String> = targets.iter().map(Target::packed_name).collect();
        names.sort_unstable();
        Self::Some { changed, turn: names.swap_remove(number % names.len()) }
    }

    /// Whether an image is to be built.
    pub(super) fn includes(&self, target: &Target) -> bool {
        let Self::Some { changed, turn } = self else { return true };
        let name = target.packed_name();
        let image = format!("{IMAGES}/{name}");
        let sources = [".cu", ".inst"].map(|extension| format!("{SOURCES}/{}{extension}", target.stem));
        *turn == name || changed.iter().any(|path| *path == image || sources.contains(path))
    }
}

fn git(workspace: &Workspace, args: &[&str]) -> Option<String> {
    let output = Command::new("git").current_dir(workspace.path("")).args(args).stdin(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::super::image::Kind;
    use super::*;

    fn targets() -> Vec<Target> {
        let target = |stem: &str, is_checked| Target {
            stem: stem.to_owned(),
            kind: Kind::Ptx,
            arch: 80,
            is_specific: false,
            is_checked,
        };
        vec![target("a", false), target("a", true), target("b", false), target("b", true)]
    }

    fn built(changed: &[&str], tree: &str) -> Vec<String> {
        let targets = targets();
        let sample = Sample::choose(changed.iter().map(|path| (*path).to_owned()).collect(), tree, &targets);
        targets.iter().filter(|target| sample.includes(target)).map(Target::file_name).collect()
    }

    #[test]
    fn what_changed_is_built_and_one_more_in_turn() {
        // In order of names: a.checked, a, b.checked, b.
        assert_eq!(built(&[], "00000000ff"), ["a.checked.sm_80.ptx"]);
        assert_eq!(built(&[], "00000007ff"), ["b.sm_80.ptx"]);
        let of_b = ["a.checked.sm_80.ptx", "b.sm_80.ptx", "b.checked.sm_80.ptx"];
        assert_eq!(built(&["kernels/b.cu"], "00000000"), of_b);
        assert_eq!(built(&["kernels/b.inst"], "00000000"), of_b);
        let image = "crates/attn-cuda/images/b.sm_80.ptx.br";
        assert_eq!(built(&[image], "00000000"), ["a.checked.sm_80.ptx", "b.sm_80.ptx"]);
    }

    #[test]
    fn everything_is_built_where_everything_may_have_changed() {
        for changed in ["kernels/params.h", "kernels/primitives/mma.cuh", "xtask/src/kernels/compile.rs"] {
            assert_eq!(built(&[changed], "00000000").len(), 4, "{changed}");
        }
        assert_eq!(built(&[], "no tree").len(), 4);
    }
}

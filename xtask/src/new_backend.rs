//! `cargo xtask new-backend NAME`: a crate with a backend that already passes the suite, and its row in the registry.
//!
//! Everything is made in memory first, so that a refusal leaves the workspace as it was.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use thiserror::Error;

use crate::backend_name::{BackendName, NameError};
use crate::workspace::Workspace;

/// Files of the new crate: path in it, template.
const TEMPLATES: [(&str, &str); 5] = [
    ("Cargo.toml", include_str!("../templates/new-backend/Cargo.toml.in")),
    ("README.md", include_str!("../templates/new-backend/README.md")),
    ("src/lib.rs", include_str!("../templates/new-backend/lib.rs")),
    ("src/backend.rs", include_str!("../templates/new-backend/backend.rs")),
    ("tests/conformance.rs", include_str!("../templates/new-backend/conformance.rs")),
];

/// Files of the root that each crate has a copy of.
const COPIES: [&str; 2] = ["LICENSE-APACHE", "LICENSE-MIT"];

/// The manifest that names the workspace's crates; the manifest and the file that hold the registry.
const EDITED: [&str; 3] = ["Cargo.toml", "crates/engine/Cargo.toml", "crates/engine/src/backends.rs"];

/// The line in the registry's file that new rows go above.
const ROW_MARKER: &str = "// new backends: one row each, above this line";

/// Options of `new-backend`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The backend's name in the registry, such as `tree-decode`; its crate is `attn-NAME`
    name: String,
}

/// Why no crate was written.
#[derive(Debug, Error)]
pub(crate) enum ScaffoldError {
    #[error(transparent)]
    Name(#[from] NameError),
    #[error("{path} exists already: choose another name, or delete it and its lines in {}", EDITED.join(", "))]
    Exists { path: String },
    #[error("{file} has no {anchor}, where the new backend's line belongs")]
    NoAnchor { file: &'static str, anchor: &'static str },
}

/// Writes the crate and its lines elsewhere, and says what to do next.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<bool> {
    let name = BackendName::parse(&args.name).map_err(ScaffoldError::Name)?;
    let folder = format!("crates/{}", name.package());
    if workspace.path(&folder).exists() {
        return Err(ScaffoldError::Exists { path: folder }.into());
    }
    let mut files = new_files(&name);
    for copy in COPIES {
        files.push((format!("{folder}/{copy}"), read(workspace, copy)?));
    }
    let [workspace_manifest, manifest, registry] = EDITED;
    files.push((workspace_manifest.into(), with_member(&read(workspace, workspace_manifest)?, &name)?));
    files.push((manifest.into(), with_dependency(&read(workspace, manifest)?, &name)?));
    files.push((registry.into(), with_row(&read(workspace, registry)?, &name)?));
    for (path, text) in &files {
        write(&workspace.path(path), text)?;
        println!("{} {path}", if EDITED.contains(&path.as_str()) { "one line more in" } else { "new:" });
    }
    let package = name.package();
    println!(
        "\nnext: cargo test --package {package}\nthen make {folder}/src/backend.rs do its own work (docs/CONTRIBUTING.md)"
    );
    Ok(true)
}

/// The files of the crate that come from templates, with their paths from the root.
fn new_files(name: &BackendName) -> Vec<(String, String)> {
    let path = |file: &str| format!("crates/{}/{file}", name.package());
    TEMPLATES.iter().map(|(file, template)| (path(file), render(template, name))).collect()
}

/// Templates are valid for a backend named `template`; this gives them another name.
fn render(template: &str, name: &BackendName) -> String {
    template
        .replace("attn_template", &name.library())
        .replace("Template", &name.type_prefix())
        .replace("template", name.registered())
}

/// The workspace's manifest with the crate among its own, after the last `attn-` crate.
fn with_member(manifest: &str, name: &BackendName) -> Result<String, ScaffoldError> {
    let mut lines: Vec<&str> = manifest.lines().collect();
    let is_ours = |line: &&str| line.starts_with("attn-") && line.contains("path = \"crates/");
    let no_anchor = ScaffoldError::NoAnchor { file: EDITED[0], anchor: "crate attn-* among its dependencies" };
    let last = lines.iter().rposition(is_ours).ok_or(no_anchor)?;
    let package = name.package();
    let version = lines[last].split_once("version = ").map_or("\"0.1.0\" }", |(_, version)| version);
    let line = format!("{package} = {{ path = \"crates/{package}\", version = {version}");
    lines.insert(last + 1, &line);
    Ok(joined(&lines))
}

/// The engine's manifest with the crate among its dependencies, in their order.
fn with_dependency(manifest: &str, name: &BackendName) -> Result<String, ScaffoldError> {
    let mut lines: Vec<&str> = manifest.lines().collect();
    let no_anchor = ScaffoldError::NoAnchor { file: EDITED[1], anchor: "section [dependencies]" };
    let first = lines.iter().position(|line| *line == "[dependencies]").ok_or(no_anchor)? + 1;
    let line = format!("{}.workspace = true", name.package());
    let num_before = lines[first..].iter().take_while(|other| !other.is_empty() && **other < line.as_str()).count();
    lines.insert(first + num_before, &line);
    Ok(joined(&lines))
}

/// The registry with a row more.
fn with_row(registry: &str, name: &BackendName) -> Result<String, ScaffoldError> {
    let mut lines: Vec<&str> = registry.lines().collect();
    let no_anchor = ScaffoldError::NoAnchor { file: EDITED[2], anchor: "comment that new rows go above" };
    let marker = lines.iter().position(|line| line.trim() == ROW_MARKER).ok_or(no_anchor)?;
    let indent = &lines[marker][..lines[marker].len() - ROW_MARKER.len()];
    let row = format!("{indent}{}::entry,", name.library());
    lines.insert(marker, &row);
    Ok(joined(&lines))
}

fn joined(lines: &[&str]) -> String {
    lines.join("\n") + "\n"
}

fn read(workspace: &Workspace, path: &str) -> Result<String> {
    fs::read_to_string(workspace.path(path)).with_context(|| format!("cannot read {path}"))
}

fn write(path: &Path, text: &str) -> Result<()> {
    let folder = path.parent().context("a file lies in a folder")?;
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name() -> BackendName {
        BackendName::parse("tree-decode").unwrap()
    }

    #[test]
    fn no_placeholder_stays_and_no_text_mentions_templates_otherwise() {
        for (path, text) in new_files(&name()) {
            assert!(path.starts_with("crates/attn-tree-decode/"), "{path}");
            assert!(!text.to_lowercase().contains("template"), "{path}:\n{text}");
            assert!(
                text.contains("tree-decode") || text.contains("attn_tree_decode") || text.contains("TreeDecode"),
                "{path}"
            );
        }
    }

    #[test]
    fn each_edited_file_gets_one_line() {
        let member = with_member(
            "[workspace.dependencies]\nattn-b = { path = \"crates/attn-b\", version = \"0.2.0\" }\nc = \"1\"\n",
            &name(),
        );
        let expected = "attn-tree-decode = { path = \"crates/attn-tree-decode\", version = \"0.2.0\" }\nc = \"1\"\n";
        assert!(member.unwrap().ends_with(expected));
        let dependency =
            with_dependency("[dependencies]\nattn-b.workspace = true\nclap.workspace = true\n\n[features]\n", &name());
        let expected =
            "attn-b.workspace = true\nattn-tree-decode.workspace = true\nclap.workspace = true\n\n[features]\n";
        assert_eq!(dependency.unwrap(), format!("[dependencies]\n{expected}"));
        let row = with_row(&format!("const ROWS: &[Row] = &[\n    b::entry,\n    {ROW_MARKER}\n];\n"), &name());
        let expected =
            format!("const ROWS: &[Row] = &[\n    b::entry,\n    attn_tree_decode::entry,\n    {ROW_MARKER}\n];\n");
        assert_eq!(row.unwrap(), expected);
    }

    #[test]
    fn a_file_without_its_anchor_is_refused() {
        let edits = [with_member, with_dependency, with_row];
        for (edit, file) in edits.into_iter().zip(EDITED) {
            let error = edit("[package]\n", &name()).unwrap_err();
            assert!(error.to_string().starts_with(&format!("{file} has no ")), "{error}");
        }
    }

    #[test]
    fn the_workspace_has_every_anchor() {
        let workspace = Workspace::locate().unwrap();
        for (edit, file) in [with_member, with_dependency, with_row].into_iter().zip(EDITED) {
            let before = read(&workspace, file).unwrap();
            let after = edit(&before, &name()).unwrap();
            assert_eq!(after.lines().count(), before.lines().count() + 1, "{file}");
        }
    }

    #[test]
    fn a_crate_is_written_once() {
        let root = std::env::temp_dir().join(format!("xtask-new-backend-{}", std::process::id()));
        // A run that failed may have left one behind, and its process id comes again.
        let _ = fs::remove_dir_all(&root);
        let (here, copy) = (Workspace::locate().unwrap(), Workspace::at(root.clone()));
        for file in EDITED.into_iter().chain(COPIES) {
            write(&copy.path(file), &read(&here, file).unwrap()).unwrap();
        }
        let args = Args { name: "tree-decode".to_owned() };
        assert!(run(&copy, &args).unwrap());
        for file in TEMPLATES.map(|(file, _)| file).into_iter().chain(COPIES) {
            assert!(copy.path("crates/attn-tree-decode").join(file).is_file(), "{file}");
        }
        let registry = read(&copy, EDITED[2]).unwrap();
        let error = run(&copy, &args).unwrap_err();
        assert!(matches!(error.downcast_ref(), Some(ScaffoldError::Exists { .. })), "{error}");
        assert_eq!(read(&copy, EDITED[2]).unwrap(), registry, "a refusal leaves the workspace as it was");
        fs::remove_dir_all(root).unwrap();
    }
}

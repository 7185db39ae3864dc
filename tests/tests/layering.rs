//! Dependencies between the workspace's crates point down only, and every crate is set up alike.
//!
//! The table below is the architecture's table of layers: a new edge is a reviewed line here.
//! The checks are functions over plain data, so that doctored data shows that they can fail.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, Package};

const KVPOOL: &str = "kvpool";
const PAGE_TABLE: &str = "page-table";
const ATTN_METADATA: &str = "attn-metadata";
const ATTN_REFERENCE: &str = "attn-reference";
const ATTN_CUDA: &str = "attn-cuda";
const CONFORMANCE: &str = "attn-conformance";
const ENGINE: &str = "engine";
const XTASK: &str = "xtask";

/// A crate, and the workspace crates that it may depend on; the second list adds those of its tests alone.
/// Every crate may test itself with the conformance suite.
const LAYERS: &[(&str, &[&str], &[&str])] = &[
    (KVPOOL, &[], &[]),
    (PAGE_TABLE, &[KVPOOL], &[]),
    (ATTN_METADATA, &[PAGE_TABLE, KVPOOL], &[]),
    (ATTN_REFERENCE, &[ATTN_METADATA, KVPOOL], &[PAGE_TABLE]),
    (ATTN_CUDA, &[ATTN_METADATA, KVPOOL], &[PAGE_TABLE, ATTN_REFERENCE]),
    (CONFORMANCE, BELOW_ENGINE, &[]),
    (XTASK, &[], &[]),
];

/// What a backend's crate may use: a crate `attn-*` without a line of its own is one.
/// `attn-cuda` is one, and others that run on the same devices may use its `device`.
const BELOW_BACKEND: &[&str] = &[ATTN_METADATA, KVPOOL, PAGE_TABLE, ATTN_REFERENCE, ATTN_CUDA];
const BELOW_ENGINE: &[&str] = &[KVPOOL, PAGE_TABLE, ATTN_METADATA, ATTN_REFERENCE];

/// Crates that build and run where there is neither a GPU driver nor a model.
const WITHOUT_DEVICE: &[&[&str]] = &[
    &["--package", KVPOOL],
    &["--package", PAGE_TABLE],
    &["--package", ATTN_METADATA],
    &["--package", ATTN_REFERENCE],
    &["--package", ENGINE, "--no-default-features"],
];
const DEVICE_CRATES: &[&str] = &["cudarc", "candle-core"];

/// A dependency of one workspace crate on another.
#[derive(Debug, Clone)]
struct Edge {
    from: String,
    to: String,
    is_dev: bool,
}

fn edge(from: &str, to: &str, is_dev: bool) -> Edge {
    Edge { from: from.to_owned(), to: to.to_owned(), is_dev }
}

/// One complaint for each crate without a place and each edge that does not point down.
fn upward_edges(members: &[String], edges: &[Edge]) -> Vec<String> {
    let unplaced = members.iter().filter(|member| !is_placed(member)).map(|member| {
        format!(
            "{member} has no place: give it a line in LAYERS (tests/tests/layering.rs) and in the architecture's table"
        )
    });
    let placed_edges = edges.iter().filter(|edge| is_placed(&edge.from) && !is_allowed(edge));
    let upward = placed_edges.map(|Edge { from, to, is_dev }| {
        let kind = if *is_dev { "dev-depends" } else { "depends" };
        format!("{from} {kind} on {to}: turn the dependency round, or argue for it in LAYERS")
    });
    unplaced.chain(upward).collect()
}

fn is_backend(name: &str) -> bool {
    name.starts_with("attn-") && !LAYERS.iter().any(|(placed, ..)| *placed == name)
}

fn is_placed(name: &str) -> bool {
    name == ENGINE || is_backend(name) || LAYERS.iter().any(|(placed, ..)| *placed == name)
}

fn is_allowed(Edge { from, to, is_dev }: &Edge) -> bool {
    let to = to.as_str();
    if *is_dev && to == CONFORMANCE {
        return true;
    }
    match LAYERS.iter().find(|(placed, ..)| placed == from) {
        Some((_, always, in_tests)) => always.contains(&to) || (*is_dev && in_tests.contains(&to)),
        None if from == ENGINE => BELOW_ENGINE.contains(&to) || to == ATTN_CUDA || is_backend(to),
        None => BELOW_BACKEND.contains(&to),
    }
}

/// What a member's manifest and folder must have, from the manifest's text and a test for files beside it.
fn setup_faults(name: &str, manifest: &str, has_file: impl Fn(&str) -> bool) -> Vec<String> {
    let lines: Vec<&str> = manifest.lines().map(str::trim).collect();
    let mut faults = Vec::new();
    for key in ["version", "edition", "rust-version", "license", "publish"] {
        if !lines.contains(&format!("{key}.workspace = true").as_str()) {
            faults.push(format!("{name}: {key} is not the workspace's (`{key}.workspace = true`)"));
        }
    }
    if !lines.windows(2).any(|pair| pair == ["[lints]", "workspace = true"]) {
        faults.push(format!("{name}: the lints are not the workspace's (`[lints]`, then `workspace = true`)"));
    }
    if !lines.iter().any(|line| line.starts_with("description = ")) {
        faults.push(format!("{name}: no description"));
    }
    let needed = ["README.md", "LICENSE-MIT", "LICENSE-APACHE"];
    let missing = needed.into_iter().filter(|file| name != XTASK && !has_file(file));
    faults.extend(missing.map(|file| format!("{name}: no {file} beside its Cargo.toml")));
    faults
}

/// The crates of `tree`, one a line, that need a device or a model.
fn device_crates(tree: &str) -> Vec<&str> {
    let names = tree.lines().filter_map(|line| line.split_whitespace().next());
    names.filter(|name| DEVICE_CRATES.contains(name)).collect()
}

fn metadata() -> Metadata {
    MetadataCommand::new().no_deps().exec().expect("cargo describes the workspace")
}

fn edges(metadata: &Metadata) -> Vec<Edge> {
    let is_member = |name: &str| metadata.packages.iter().any(|package| package.name == name);
    let of_package = |package: &Package| -> Vec<Edge> {
        let ours = package.dependencies.iter().filter(|dependency| is_member(&dependency.name));
        ours.map(|to| edge(&package.name, &to.name, to.kind == DependencyKind::Development)).collect()
    };
    metadata.packages.iter().flat_map(of_package).collect()
}

#[test]
fn dependencies_point_down() {
    let metadata = metadata();
    let members: Vec<String> = metadata.packages.iter().map(|package| package.name.to_string()).collect();
    let edges = edges(&metadata);
    assert!(edges.len() > 5, "hardly any dependency seen: {edges:?}");
    let complaints = upward_edges(&members, &edges);
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

#[test]
fn every_line_of_the_table_is_a_crate() {
    let metadata = metadata();
    for (name, ..) in LAYERS {
        assert!(metadata.packages.iter().any(|package| package.name == *name), "{name} is gone: remove its line");
    }
}

#[test]
fn every_crate_is_set_up_alike() {
    let mut faults = Vec::new();
    for package in &metadata().packages {
        let folder = package.manifest_path.parent().expect("a manifest lies in a folder");
        let manifest = fs::read_to_string(&package.manifest_path).expect("cargo has read it too");
        faults.extend(setup_faults(&package.name, &manifest, |file| folder.join(file).is_file()));
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn licence_files_are_copies_of_one_another() {
    let mut texts: BTreeMap<&str, Vec<(String, String)>> = BTreeMap::new();
    for package in &metadata().packages {
        let folder = package.manifest_path.parent().expect("a manifest lies in a folder");
        for name in ["LICENSE-MIT", "LICENSE-APACHE"] {
            if let Ok(text) = fs::read_to_string(folder.join(name)) {
                texts.entry(name).or_default().push((folder.join(name).to_string(), text));
            }
        }
    }
    for (path, text) in texts.values().flatten() {
        let name = path.rsplit('/').next().unwrap_or(path);
        assert!(*text == texts[name][0].1, "{path} differs from {}", texts[name][0].0);
    }
}

#[test]
fn the_lower_crates_need_neither_device_nor_model() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the package lies in the workspace");
    for selection in WITHOUT_DEVICE {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.current_dir(root).args(["tree", "--offline", "--edges", "normal,build", "--prefix", "none"]);
        let output = cargo.args(*selection).output().expect("cargo starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let tree = String::from_utf8_lossy(&output.stdout);
        assert!(tree.starts_with(selection[1]), "the tree does not start with its package: {tree}");
        assert_eq!(device_crates(&tree), Vec::<&str>::new(), "in the tree of {}", selection.join(" "));
    }
}

#[test]
fn an_upward_edge_and_a_crate_without_a_place_are_found() {
    let names = |names: &[&str]| -> Vec<String> { names.iter().map(|&name| name.to_owned()).collect() };
    let wrong = [
        edge(KVPOOL, PAGE_TABLE, false),
        edge(ATTN_REFERENCE, PAGE_TABLE, false),
        edge(ATTN_METADATA, ATTN_REFERENCE, true),
        edge("attn-new", ENGINE, false),
        edge("attn-new", CONFORMANCE, false),
        edge("attn-new", "attn-other", false),
        edge(ENGINE, CONFORMANCE, false),
        edge(XTASK, KVPOOL, false),
    ];
    for edge in wrong {
        assert_eq!(upward_edges(&[], std::slice::from_ref(&edge)).len(), 1, "{edge:?}");
    }
    assert!(upward_edges(&names(&["stray"]), &[])[0].starts_with("stray has no place"));
    let right = [
        edge(ATTN_REFERENCE, PAGE_TABLE, true),
        edge("attn-new", ATTN_METADATA, false),
        edge("attn-new", CONFORMANCE, true),
        edge(ENGINE, "attn-new", false),
    ];
    assert_eq!(upward_edges(&names(&[KVPOOL, "attn-new", ENGINE]), &right), Vec::<String>::new());
}

#[test]
fn a_crate_set_up_otherwise_is_found() {
    let good = "description = \"a\"\nversion.workspace = true\nedition.workspace = true\nrust-version.workspace = true\n\
                license.workspace = true\npublish.workspace = true\n\n[lints]\nworkspace = true\n";
    assert_eq!(setup_faults("a", good, |_| true), Vec::<String>::new());
    assert_eq!(setup_faults("a", good, |file| file != "README.md"), ["a: no README.md beside its Cargo.toml"]);
    assert_eq!(setup_faults(XTASK, good, |_| false), Vec::<String>::new());
    let own_edition = good.replace("edition.workspace = true", "edition = \"2021\"");
    assert_eq!(setup_faults("a", &own_edition, |_| true).len(), 1);
    assert_eq!(setup_faults("a", &good.replace("[lints]", "[lint]"), |_| true).len(), 1);
}

#[test]
fn a_device_crate_in_a_tree_is_found() {
    let tree = "engine v0.1.0 (path)\nserde v1.0.0\ncandle-core v0.11.1\ncudarc v0.19.10\n";
    assert_eq!(device_crates(tree), ["candle-core", "cudarc"]);
    assert!(device_crates("engine v0.1.0\ncandle-core-like v0.1.0\n").is_empty());
}

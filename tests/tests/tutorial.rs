//! The tutorial holds: its backend passes the suite, its text quotes that backend, its failing cases are real cases.
#![allow(unreachable_pub, reason = "the backend is the module of a library")]

#[path = "../../docs/tutorial/naive.rs"]
mod naive;

use attn_conformance::{Suite, host};

const TEXT: &str = include_str!("../../docs/tutorial/README.md");
const CODE: &str = include_str!("../../docs/tutorial/naive.rs");
const MANIFEST: &str = include_str!("../../xtask/templates/new-backend/Cargo.toml.in");

/// Fewest blocks of a kind below which the text was not read rightly.
const MIN_BLOCKS: usize = 5;

/// Contents of the fenced blocks whose fence says `kind`, each with its line feeds.
fn blocks<'a>(text: &'a str, kind: &str) -> Vec<&'a str> {
    let parts = text.split("\n```").skip(1).step_by(2);
    parts.filter_map(|block| block.split_once('\n')).filter(|(fence, _)| *fence == kind).map(|(_, body)| body).collect()
}

/// Excerpts that the code does not contain, as whole lines.
fn drifted<'a>(text: &'a str, code: &str) -> Vec<&'a str> {
    let is_there = |excerpt: &str| format!("\n{code}\n").contains(&format!("\n{excerpt}\n"));
    blocks(text, "rust excerpt").into_iter().filter(|excerpt| !is_there(excerpt)).collect()
}

/// The manifest after the edit that the text tells the reader to make: one line goes.
fn edited(text: &str, manifest: &str) -> Option<String> {
    let (_, told) = text.split_once("`Cargo.toml`, remove the line `")?;
    let (gone, _) = told.split_once('`')?;
    let kept: Vec<&str> = manifest.lines().filter(|line| *line != gone).collect();
    (kept.len() + 1 == manifest.lines().count()).then(|| kept.join("\n"))
}

/// Crates of a manifest's section, in order.
fn dependencies<'a>(manifest: &'a str, section: &str) -> Vec<&'a str> {
    let lines = manifest.lines().skip_while(|line| *line != section).skip(1);
    lines
        .take_while(|line| !line.starts_with('['))
        .filter_map(|line| line.split_once('.'))
        .map(|(key, _)| key)
        .collect()
}

#[test]
fn the_manifest_of_the_tutorial_has_each_crate_that_the_backend_uses_once() {
    let manifest = edited(TEXT, MANIFEST).expect("the text names one line of the template");
    let mut uses: Vec<String> = CODE.lines().filter_map(|line| line.strip_prefix("use ")).map(crate_of).collect();
    uses.sort();
    uses.dedup();
    assert_eq!(dependencies(&manifest, "[dependencies]"), uses);
    assert_eq!(dependencies(&manifest, "[dev-dependencies]"), ["attn-conformance"]);
}

/// The package that a path begins with, as manifests spell it.
fn crate_of(path: &str) -> String {
    path.split("::").next().unwrap_or_default().replace('_', "-")
}

#[test]
fn an_edit_that_leaves_a_key_twice_or_changes_nothing_is_found() {
    let text = "In the crate's `Cargo.toml`, remove the line `a.workspace = true`: so.";
    assert_eq!(edited(text, "[dependencies]\nb.workspace = true\n"), None);
    let twice = edited(text, "[dependencies]\na.workspace = true\nb.workspace = true\nb.workspace = true\n").unwrap();
    assert_eq!(dependencies(&twice, "[dependencies]"), ["b", "b"]);
}

#[test]
fn the_backend_of_the_tutorial_passes() {
    let report = host::run(&Suite::standard(), naive::entry().create);
    println!("{report}");
    report.assert_passed();
}

#[test]
fn the_backend_has_fewer_than_200_lines() {
    assert!(CODE.lines().count() < 200, "{} lines", CODE.lines().count());
}

#[test]
fn every_excerpt_stands_in_the_code() {
    assert!(blocks(TEXT, "rust excerpt").len() >= MIN_BLOCKS);
    let drifted = drifted(TEXT, CODE);
    assert!(drifted.is_empty(), "not in the code:\n{}", drifted.join("\n---\n"));
}

#[test]
fn the_failing_cases_of_the_text_pass_on_its_backend() {
    let cases = blocks(TEXT, "text case");
    assert!(cases.len() >= MIN_BLOCKS);
    for case in cases {
        let (message, line) = case.split_once('\n').expect("a message and a case");
        let (check, _) = message.split_once(": ").expect("a check and what was wrong");
        let result = host::run_case(check, line, &naive::entry().create);
        assert!(result.is_ok(), "{check}: {result:?}\n{line}");
    }
}

#[test]
fn excerpts_that_drifted_are_found() {
    let text = "a\n```rust excerpt\n    b();\n    c();\n```\n```text\nd\n```\n```rust excerpt\nc()\n```\n";
    assert_eq!(blocks(text, "rust excerpt"), ["    b();\n    c();", "c()"]);
    assert_eq!(blocks(text, "text"), ["d"]);
    assert_eq!(drifted(text, "fn a() {\n    b();\n    c();\n}\n"), ["c()"]);
    assert!(drifted(text, "    b();\n    c();\nc()\n").is_empty());
}

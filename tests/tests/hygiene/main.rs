//! Hygiene of the tracked files: sizes, leftovers, machine paths, unsafe code, whitespace, the architecture's claims.
//!
//! A rule is one small function from a file to its findings, and stands beside a positive and a negative control.
//! What is forbidden is written in halves here, so that the rules do not find themselves.

mod code;
mod code_rules;
mod invariants;
mod text_rules;
mod tree;

use tree::{File, Finding};

type Rule = fn(&File) -> Vec<Finding>;

const RULES: &[Rule] = &[
    text_rules::no_large_binary,
    text_rules::no_long_file,
    text_rules::no_leftover_note,
    text_rules::no_machine_path,
    text_rules::no_registry_host,
    text_rules::clean_whitespace,
    code_rules::no_leftover_code,
    code_rules::unsafe_only_where_allowed,
    code_rules::unsafe_says_why,
    code_rules::no_long_function,
    code_rules::lib_has_no_function,
];

#[test]
fn every_tracked_file_keeps_every_rule() {
    let files = tree::load();
    assert!(files.iter().any(|file| file.path == "Cargo.toml"), "the workspace's own manifest is not among the files");
    let findings: Vec<String> =
        files.iter().flat_map(|file| RULES.iter().flat_map(|rule| rule(file))).map(|f| f.to_string()).collect();
    assert!(findings.is_empty(), "{} findings:\n{}", findings.len(), findings.join("\n"));
}

#[test]
fn every_invariant_of_the_architecture_names_a_test_that_exists() {
    let files = tree::load();
    let text_of = |path: &str| files.iter().find(|file| file.path == path).map(|file| file.text.clone());
    // Without the document there is no claim to check.
    let Some(document) = text_of(invariants::DOCUMENT) else { return };
    let findings = invariants::check(&document, text_of);
    assert!(findings.is_empty(), "{} findings:\n{}", findings.len(), findings.join("\n"));
}

#[test]
fn every_waiver_is_still_needed() {
    let files = tree::load();
    for (path, reason) in text_rules::LONG_FILES {
        assert!(!reason.is_empty(), "the waiver of {path} has no reason");
        let file = files.iter().find(|file| file.path == *path).unwrap_or_else(|| panic!("{path} is waived and gone"));
        assert!(text_rules::is_long(file), "{path} is short enough now: remove its waiver");
    }
    for (path, name, reason) in code_rules::LONG_FUNCTIONS {
        assert!(!reason.is_empty(), "the waiver of {path}, {name} has no reason");
        let file = files.iter().find(|file| file.path == *path).unwrap_or_else(|| panic!("{path} is waived and gone"));
        let is_long = code_rules::long_functions(file).any(|function| function.name == *name);
        assert!(is_long, "{name} in {path} is short enough now: remove its waiver");
    }
}

//! What a mutation is, and the list of all of them.

use std::fmt;

use super::{family_faults, kernel_faults, waist_faults};

/// One planted fault: a small edit of one file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mutation {
    /// A name for the command line and the table.
    pub(crate) name: &'static str,
    /// The kind of bug, as numbered in `docs/TESTING.md`.
    pub(crate) kind: &'static str,
    /// The file, relative to the root.
    pub(crate) file: &'static str,
    /// Text that occurs exactly once in the file.
    pub(crate) find: &'static str,
    /// What takes its place.
    pub(crate) replace: &'static str,
    /// What is then wrong.
    pub(crate) breaks: &'static str,
    /// The tests that must notice.
    pub(crate) tests: Tests,
}

impl Mutation {
    /// `text` with the fault in it; `None` where the text to find does not occur exactly once.
    pub(crate) fn apply(&self, text: &str) -> Option<String> {
        let (before, after) = text.split_once(self.find)?;
        // Shifted by one character, so that an occurrence that overlaps the first one counts too.
        let mut rest = self.find.chars();
        rest.next()?;
        let again = format!("{}{after}", rest.as_str()).contains(self.find);
        (!again).then(|| format!("{before}{}{after}", self.replace))
    }
}

/// Every mutation, in the order of the table.
pub(crate) fn all() -> impl Iterator<Item = &'static Mutation> {
    kernel_faults::FAULTS.iter().chain(waist_faults::FAULTS).chain(family_faults::FAULTS)
}

/// Tests that are built and run together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tests {
    /// The conformance suite over the CPU backend.
    Suite,
    /// The CPU backend's own tests.
    Cpu,
    /// The tests of `attn-metadata`.
    Waist,
    /// The tests of `kvpool`.
    Pool,
    /// The tests of `page-table`.
    PageTable,
    /// The tests of `attn-mla`.
    Mla,
    /// The tests of `attn-sparse`.
    Sparse,
}

impl Tests {
    /// All of them.
    pub(crate) const ALL: [Self; 7] =
        [Self::Suite, Self::Cpu, Self::Waist, Self::Pool, Self::PageTable, Self::Mla, Self::Sparse];

    /// What `cargo test` is told to build.
    pub(crate) const fn targets(self) -> &'static [&'static str] {
        match self {
            Self::Suite => &["--package", "attn-conformance", "--test", "conformance_cpu"],
            Self::Cpu => &["--package", "attn-reference", "--lib"],
            Self::Waist => &["--package", "attn-metadata", "--lib", "--tests"],
            Self::Pool => &["--package", "kvpool", "--lib", "--tests"],
            Self::PageTable => &["--package", "page-table", "--lib", "--tests"],
            Self::Mla => &["--package", "attn-mla", "--lib", "--tests"],
            Self::Sparse => &["--package", "attn-sparse", "--lib", "--tests"],
        }
    }

    /// What the test binaries are told.
    pub(crate) const fn filter(self) -> &'static [&'static str] {
        match self {
            Self::Cpu => &["cpu::"],
            _ => &[],
        }
    }
}

impl fmt::Display for Tests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Suite => "conformance",
            Self::Cpu => "attn-reference",
            Self::Waist => "attn-metadata",
            Self::Pool => "kvpool",
            Self::PageTable => "page-table",
            Self::Mla => "attn-mla",
            Self::Sparse => "attn-sparse",
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn each_mutation_applies_to_exactly_one_place_of_this_tree() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace");
        for mutation in all() {
            let text = fs::read_to_string(root.join(mutation.file)).expect(mutation.file);
            let count = text.matches(mutation.find).count();
            assert_eq!(count, 1, "{}: occurrences of {:?} in {}", mutation.name, mutation.find, mutation.file);
            let changed = mutation.apply(&text).unwrap_or_else(|| panic!("{} does not apply", mutation.name));
            assert_ne!(changed, text, "{} changes nothing", mutation.name);
        }
    }

    #[test]
    fn names_are_unique_and_every_kind_that_can_be_planted_here_is() {
        let names: HashSet<_> = all().map(|m| m.name).collect();
        assert_eq!(names.len(), all().count());
        let kinds: HashSet<_> = all().map(|m| m.kind).collect();
        // K6 is about launches on a device, K18 and K19 about device code: no such code is here yet.
        let missing: Vec<_> = (1..=17).chain([20]).map(|n| format!("K{n}")).filter(|k| !kinds.contains(&**k)).collect();
        assert_eq!(missing, ["K6"]);
    }

    #[test]
    fn the_document_has_a_row_for_each_mutation_and_no_other() {
        let document = include_str!("../../../docs/TESTING.md");
        let (_, table) = document.split_once("| mutation |").expect("the document has a table of mutations");
        let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
        let cells = rows.map(|row| row.split('|').map(str::trim).collect::<Vec<_>>());
        let listed: HashSet<_> = cells.map(|cells| (cells[1].trim_matches('`'), cells[2], cells[4])).collect();
        let tests: Vec<_> = all().map(|m| m.tests.to_string()).collect();
        let planted: HashSet<_> = all().zip(&tests).map(|(m, tests)| (m.name, m.kind, tests.as_str())).collect();
        assert_eq!(listed, planted);
    }

    #[test]
    fn text_that_occurs_twice_or_never_is_refused() {
        let mutation = Mutation { find: "a-a", replace: "b", ..*all().next().expect("there are mutations") };
        assert_eq!(mutation.apply("x a-a y").as_deref(), Some("x b y"));
        assert_eq!(mutation.apply("x a-a-a y"), None);
        assert_eq!(mutation.apply("a-a a-a"), None);
        assert_eq!(mutation.apply("x"), None);
    }
}

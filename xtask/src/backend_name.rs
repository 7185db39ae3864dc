//! The name of a new backend, and what is called after it.

use thiserror::Error;

const MAX_LEN: usize = 32;

/// A checked name: lower case words of letters and digits, joined by single hyphens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BackendName(String);

/// Why a name is refused.
#[derive(Debug, Error, PartialEq, Eq)]
pub(crate) enum NameError {
    #[error("the name is empty")]
    Empty,
    #[error("the name has {got} characters (at most {MAX_LEN})")]
    TooLong { got: usize },
    #[error("{name:?} contains {character:?}: use lower case letters, digits and hyphens")]
    Character { name: String, character: char },
    #[error("{name:?} does not start with a letter")]
    Start { name: String },
    #[error("{name:?} has a hyphen at its end, or two in a row")]
    Hyphen { name: String },
    #[error("the crate gets the prefix attn- by itself: use {without:?}")]
    Prefix { without: String },
    #[error("the name {name:?} is taken by a backend, a crate or a choice of this workspace")]
    Taken { name: String },
}

/// Names that mean something else: what `--attention-backend` takes (names of other systems among them), and crates
/// `attn-*` outside `crates/`. Backends with a crate of their name need not be here: its folder is there. The engine's
/// test `names_of_backends_and_aliases_are_taken` compares this with the registry.
const TAKEN: [&str; 23] = [
    "aiter",
    "ascend",
    "auto",
    "conformance",
    "cpu",
    "cuda-free",
    "cuda-plain",
    "cuda-portable",
    "cuda-strict",
    "dsa",
    "fa3",
    "fa4",
    "flashinfer",
    "flashmla",
    "metadata",
    "mla-oracle",
    "nsa",
    "oracle",
    "reference",
    "sparse-oracle",
    "sparse-pages",
    "triton",
    "wave",
];

impl BackendName {
    /// Checks `name`.
    pub(crate) fn parse(name: &str) -> Result<Self, NameError> {
        let owned = || name.to_owned();
        let is_allowed =
            |character: char| character.is_ascii_lowercase() || character.is_ascii_digit() || character == '-';
        if name.is_empty() {
            return Err(NameError::Empty);
        }
        if let Some(character) = name.chars().find(|&character| !is_allowed(character)) {
            return Err(NameError::Character { name: owned(), character });
        }
        if name.len() > MAX_LEN {
            return Err(NameError::TooLong { got: name.len() });
        }
        if !name.starts_with(|first: char| first.is_ascii_lowercase()) {
            return Err(NameError::Start { name: owned() });
        }
        if name.ends_with('-') || name.contains("--") {
            return Err(NameError::Hyphen { name: owned() });
        }
        if let Some(without) = name.strip_prefix("attn-") {
            return Err(NameError::Prefix { without: without.to_owned() });
        }
        if TAKEN.contains(&name) {
            return Err(NameError::Taken { name: owned() });
        }
        Ok(Self(owned()))
    }

    /// As in the registry: `tree-decode`.
    pub(crate) fn registered(&self) -> &str {
        &self.0
    }

    /// The package and its folder: `attn-tree-decode`.
    pub(crate) fn package(&self) -> String {
        format!("attn-{}", self.0)
    }

    /// The library: `attn_tree_decode`.
    pub(crate) fn library(&self) -> String {
        self.package().replace('-', "_")
    }

    /// The start of type names: `TreeDecode`.
    pub(crate) fn type_prefix(&self) -> String {
        let capitalised = |word: &str| word[..1].to_ascii_uppercase() + &word[1..];
        self.0.split('-').map(capitalised).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_gives_its_crate_library_and_types() {
        let name = BackendName::parse("tree-decode2").unwrap();
        assert_eq!((name.registered(), name.package().as_str()), ("tree-decode2", "attn-tree-decode2"));
        assert_eq!((name.library().as_str(), name.type_prefix().as_str()), ("attn_tree_decode2", "TreeDecode2"));
    }

    #[test]
    fn other_names_are_refused_with_their_reason() {
        let name = |name: &str| name.to_owned();
        let cases = [
            ("", NameError::Empty),
            ("Tree", NameError::Character { name: name("Tree"), character: 'T' }),
            ("a_b", NameError::Character { name: name("a_b"), character: '_' }),
            ("../a", NameError::Character { name: name("../a"), character: '.' }),
            ("é", NameError::Character { name: name("é"), character: 'é' }),
            ("2d", NameError::Start { name: name("2d") }),
            ("-a", NameError::Start { name: name("-a") }),
            ("a-", NameError::Hyphen { name: name("a-") }),
            ("a--b", NameError::Hyphen { name: name("a--b") }),
            ("attn-a", NameError::Prefix { without: name("a") }),
            ("auto", NameError::Taken { name: name("auto") }),
            ("cuda-free", NameError::Taken { name: name("cuda-free") }),
            ("fa3", NameError::Taken { name: name("fa3") }),
        ];
        for (text, expected) in cases {
            assert_eq!(BackendName::parse(text), Err(expected), "{text:?}");
        }
        assert_eq!(BackendName::parse(&"a".repeat(33)), Err(NameError::TooLong { got: 33 }));
        assert!(BackendName::parse(&"a".repeat(32)).is_ok());
    }
}

//! Tokens that are matched in text as they stand, before anything is merged.

use std::collections::HashMap;
use std::ops::Range;

use super::{Kind, SpecialTokens};

/// User-defined and control tokens, by text.
#[derive(Debug, Clone)]
pub(super) struct Literals {
    tokens: HashMap<String, (u32, Kind)>,
    /// For each byte, the lengths in bytes of the entries that begin with it, longest first.
    lengths: Vec<Vec<usize>>,
}

impl Literals {
    /// Takes texts (none empty) with their ids and kinds.
    pub(super) fn new(entries: impl Iterator<Item = (String, u32, Kind)>) -> Self {
        let tokens: HashMap<_, _> = entries.map(|(text, token, kind)| (text, (token, kind))).collect();
        let mut lengths = vec![Vec::new(); 256];
        for text in tokens.keys() {
            lengths[usize::from(text.as_bytes()[0])].push(text.len());
        }
        for lengths in &mut lengths {
            lengths.sort_unstable_by(|a, b| b.cmp(a));
            lengths.dedup();
        }
        Self { tokens, lengths }
    }

    /// The first place in `text` where an entry begins; of the entries there, the longest.
    pub(super) fn find(&self, text: &str, special: SpecialTokens) -> Option<(Range<usize>, u32)> {
        let at = |start: usize| {
            let lengths = &self.lengths[usize::from(text.as_bytes()[start])];
            lengths.iter().find_map(|len| {
                let (token, kind) = self.tokens.get(text.get(start..start + len)?)?;
                let is_wanted = *kind != Kind::Control || special == SpecialTokens::Parse;
                is_wanted.then_some((start..start + len, *token))
            })
        };
        text.char_indices().find_map(|(start, _)| at(start))
    }
}

//! BPE by scores, SentencePiece's way: no merge list and no pre-tokenizer.
//!
//! Of all neighbouring symbols that join into a token, those go first whose token has the highest
//! score, the leftmost of equals first. A space is spelled U+2581, and a character that is no token
//! becomes the tokens of its bytes. `tokenizers` orders its merges by pair, which is not the same
//! where a token has two ways to come about; hence this implementation.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use super::{Kind, TokenizerError};

/// How the vocabulary spells a space.
const SPACE: char = '\u{2581}';

/// An ordinary token.
#[derive(Debug, Clone, Copy)]
struct Piece {
    token: u32,
    /// Number of tokens with a lower score.
    rank: usize,
}

/// A vocabulary with scores.
#[derive(Debug, Clone)]
pub(super) struct Scored {
    pieces: HashMap<String, Piece>,
    /// The token of each byte.
    bytes: Vec<u32>,
}

/// Two neighbouring symbols, `start..middle` and `middle..end`, that join into a token. The greatest is joined first.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Join {
    rank: usize,
    start: Reverse<usize>,
    middle: usize,
    end: usize,
}

/// The symbols that a text is made of at a time, by byte offset.
struct Symbols<'a> {
    text: &'a str,
    /// End of the symbol that starts here; 0 where none does.
    ends: Vec<usize>,
    /// Start of the symbol that ends here; meaningless where none does.
    starts: Vec<usize>,
}

impl Scored {
    /// Takes one text, kind and score for each token.
    pub(super) fn new(tokens: &[String], kinds: &[Kind], scores: &[f64]) -> Result<Self, TokenizerError> {
        if scores.len() != tokens.len() {
            return Err(TokenizerError::Scores { expected: tokens.len(), got: scores.len() });
        }
        let mut ascending = scores.to_vec();
        ascending.sort_unstable_by(f64::total_cmp);
        let mut pieces = HashMap::new();
        let mut bytes = vec![None; 256];
        for ((token, text), (kind, &score)) in (0u32..).zip(tokens).zip(kinds.iter().zip(scores)) {
            match kind {
                Kind::Ordinary if score.is_nan() => return Err(TokenizerError::Score { token }),
                Kind::Ordinary => {
                    let rank = ascending.partition_point(|&other| other < score);
                    pieces.insert(text.clone(), Piece { token, rank });
                }
                Kind::Byte(byte) => bytes[usize::from(*byte)] = Some(token),
                Kind::UserDefined | Kind::Control => {}
            }
        }
        let numbered = (0..=u8::MAX).zip(bytes);
        let bytes = numbered
            .map(|(byte, token)| token.ok_or(TokenizerError::NoByteToken { byte }))
            .collect::<Result<_, _>>()?;
        Ok(Self { pieces, bytes })
    }

    /// Spaces as the vocabulary spells them.
    pub(super) fn spell(text: &str) -> Cow<'_, str> {
        if text.contains(' ') { text.replace(' ', SPACE.encode_utf8(&mut [0; 4])).into() } else { text.into() }
    }

    /// Appends the tokens of a text in the vocabulary's spelling.
    pub(super) fn encode(&self, text: &str, tokens: &mut Vec<u32>) {
        let mut symbols = Symbols::characters(text);
        let starts = text.char_indices().map(|(start, _)| start);
        let mut joins: BinaryHeap<Join> = starts.filter_map(|start| symbols.join_at(start, self)).collect();
        while let Some(join) = joins.pop() {
            if symbols.has(&join) {
                symbols.join(&join);
                joins.extend(symbols.before(join.start.0).and_then(|previous| symbols.join_at(previous, self)));
                joins.extend(symbols.join_at(join.start.0, self));
            }
        }
        for symbol in symbols.iter() {
            match self.pieces.get(symbol) {
                Some(piece) => tokens.push(piece.token),
                None => tokens.extend(symbol.bytes().map(|byte| self.bytes[usize::from(byte)])),
            }
        }
    }

    /// Appends the bytes of a token.
    pub(super) fn decode(token: &str, out: &mut Vec<u8>) {
        let mut parts = token.split(SPACE);
        out.extend(parts.next().unwrap_or_default().bytes());
        parts.for_each(|part| {
            out.push(b' ');
            out.extend_from_slice(part.as_bytes());
        });
    }
}

impl<'a> Symbols<'a> {
    /// Each character is a symbol.
    fn characters(text: &'a str) -> Self {
        let (mut ends, mut starts) = (vec![0; text.len() + 1], vec![0; text.len() + 1]);
        for (start, character) in text.char_indices() {
            let end = start + character.len_utf8();
            (ends[start], starts[end]) = (end, start);
        }
        Self { text, ends, starts }
    }

    /// Start of the symbol before the one that starts at `start`.
    fn before(&self, start: usize) -> Option<usize> {
        (start > 0).then(|| self.starts[start])
    }

    /// The join of the symbol at `start` and the next, where they make a token.
    fn join_at(&self, start: usize, vocabulary: &Scored) -> Option<Join> {
        let middle = self.ends[start];
        let end = self.ends[middle];
        if end <= middle {
            return None; // nothing follows
        }
        let piece = vocabulary.pieces.get(&self.text[start..end])?;
        Some(Join { rank: piece.rank, start: Reverse(start), middle, end })
    }

    /// Whether both symbols of the join are still there.
    fn has(&self, join: &Join) -> bool {
        self.ends[join.start.0] == join.middle && self.ends[join.middle] == join.end
    }

    fn join(&mut self, join: &Join) {
        let Join { start: Reverse(start), middle, end, .. } = *join;
        self.ends[start] = end;
        self.ends[middle] = 0;
        self.starts[end] = start;
    }

    fn iter(&self) -> impl Iterator<Item = &'a str> {
        let mut start = 0;
        std::iter::from_fn(move || {
            let end = self.ends[start];
            let symbol = self.text.get(start..end).filter(|symbol| !symbol.is_empty());
            start = end;
            symbol
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A vocabulary of the byte tokens 0 to 255 and then of `pieces`.
    fn scored(pieces: &[(&str, f64)]) -> Scored {
        let tokens: Vec<String> = (0..=255u8).map(|byte| format!("<0x{byte:02X}>")).collect();
        let tokens = [tokens, pieces.iter().map(|(text, _)| (*text).to_owned()).collect()].concat();
        let kinds: Vec<Kind> = (0..=255).map(Kind::Byte).collect();
        let kinds = [kinds, vec![Kind::Ordinary; pieces.len()]].concat();
        let scores: Vec<f64> = pieces.iter().map(|(_, score)| *score).collect();
        Scored::new(&tokens, &kinds, &[vec![0.0; 256], scores].concat()).unwrap()
    }

    fn check(pieces: &[(&str, f64)], text: &str, expected: &[&str]) {
        let mut tokens = Vec::new();
        scored(pieces).encode(text, &mut tokens);
        let text_of = |&token: &u32| match (token as usize).checked_sub(256) {
            Some(place) => pieces[place].0.to_owned(),
            None => format!("{token:02x}"),
        };
        assert_eq!(tokens.iter().map(text_of).collect::<Vec<_>>(), expected, "{text:?} with {pieces:?}");
    }

    #[test]
    fn the_highest_score_goes_first_and_the_leftmost_of_equals() {
        check(&[("a", -9.0), ("b", -9.0), ("ab", -1.0), ("ba", -2.0)], "aba", &["ab", "a"]);
        check(&[("a", -9.0), ("b", -9.0), ("ab", -2.0), ("ba", -1.0)], "aba", &["a", "ba"]);
        check(&[("a", -9.0), ("b", -9.0), ("ab", 0.0), ("ba", -0.0)], "babab", &["ba", "ba", "b"]);
        check(&[("a", -9.0), ("aa", -1.0)], "aaaaa", &["aa", "aa", "a"]);
        // What a join makes joins again, though its score is the lower.
        check(&[("a", -9.0), ("b", -9.0), ("ab", -1.0), ("aab", -3.0), ("aa", -2.0)], "aab", &["aab"]);
        // A token that no pair of tokens makes is not found.
        check(&[("a", -9.0), ("b", -9.0), ("c", -9.0), ("abc", -1.0)], "abc", &["a", "b", "c"]);
    }

    #[test]
    fn characters_without_a_token_become_bytes() {
        check(&[("a", -1.0)], "aé😀", &["a", "c3", "a9", "f0", "9f", "98", "80"]);
        // A byte's token is not reached by its name.
        check(&[], "<0x41>", &["3c", "30", "78", "34", "31", "3e"]);
        check(&[("", -1.0)], "a", &["61"]);
    }

    /// The definition, a join at a time.
    fn naive(pieces: &[(&str, f64)], text: &str) -> Vec<String> {
        let mut symbols: Vec<String> = text.chars().map(String::from).collect();
        let score = |text: &str| pieces.iter().find(|(piece, _)| *piece == text).map(|(_, score)| *score);
        loop {
            let pairs = symbols.windows(2).enumerate();
            let joins = pairs.filter_map(|(place, pair)| Some((place, score(&pair.concat())?)));
            let best = joins.fold(None, |best: Option<(usize, f64)>, join| match best {
                Some(best) if best.1 >= join.1 => Some(best),
                _ => Some(join),
            });
            let Some((place, _)) = best else { return symbols };
            let right = symbols.remove(place + 1);
            symbols[place] += &right;
        }
    }

    #[test]
    fn tokens_are_those_of_a_search_through_all_pairs() {
        let mut state = 3u32;
        let mut next = |limit: u32| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 16) % limit
        };
        for _ in 0..200 {
            let mut texts: Vec<String> = ["a", "b", "é"].map(str::to_owned).into();
            for _ in 0..12 {
                let mut pick = || texts[next(u32::try_from(texts.len()).unwrap()) as usize].clone();
                let text = pick() + &pick();
                if !texts.contains(&text) {
                    texts.push(text);
                }
            }
            let pieces: Vec<(&str, f64)> = texts.iter().map(|text| (text.as_str(), f64::from(next(6)))).collect();
            let text: String = (0..next(30)).map(|_| ['a', 'b', 'é'][next(3) as usize]).collect();
            let expected = naive(&pieces, &text);
            check(&pieces, &text, &expected.iter().map(String::as_str).collect::<Vec<_>>());
        }
    }

    #[test]
    fn spaces_are_spelled_and_read_back() {
        assert_eq!(Scored::spell(" a  b"), "▁a▁▁b");
        let mut out = Vec::new();
        for token in ["▁a", "▁▁", "b", "", "é▁"] {
            Scored::decode(token, &mut out);
        }
        assert_eq!(out, " a  bé ".as_bytes());
    }
}

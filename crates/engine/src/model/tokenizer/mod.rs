//! Text to tokens and back, from the vocabulary inside a GGUF file.
//!
//! The BPE itself is the `tokenizers` crate's. This module owns what the file format leaves open:
//! which tokens are matched in the text as they stand (user-defined ones always, control tokens
//! only when the caller allows it), whether a BOS token comes first, and exact bytes for decoding.

mod build;
mod byte_alphabet;
mod error;
mod pre;
mod stream;
#[cfg(test)]
mod tests;

use tokenizers::Tokenizer as Bpe;

use super::gguf::Metadata;
use byte_alphabet::ByteAlphabet;
pub use error::TokenizerError;
pub use pre::SUPPORTED_PRE_TOKENIZERS;
pub use stream::StreamDecoder;

/// What to do with control tokens (such as `<|im_end|>`) spelled out in the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpecialTokens {
    /// They become the control token. For text that a chat template has rendered.
    Parse,
    /// They are ordinary text. For text from strangers.
    AsText,
}

/// How a token is matched and printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Reached through BPE; spelled in the byte-level alphabet.
    Ordinary,
    /// Matched in the text as it stands, always.
    UserDefined,
    /// Matched in the text as it stands where the caller allows; can be left out of decoded text.
    Control,
}

/// Tokens that are matched in text as they stand, before BPE.
#[derive(Debug, Clone)]
struct Literals {
    /// Text, id and kind, longest text first.
    entries: Vec<(String, u32, Kind)>,
    /// Whether some entry begins with the byte.
    begins: [bool; 256],
}

impl Literals {
    /// The first place in `text` where an entry begins, and the longest entry there.
    fn find(&self, text: &str, special: SpecialTokens) -> Option<(usize, &str, u32)> {
        let matches_at = |start: usize| {
            let wanted = |kind| kind != Kind::Control || special == SpecialTokens::Parse;
            let here = |(literal, _, kind): &&(String, u32, Kind)| wanted(*kind) && text[start..].starts_with(literal);
            self.entries.iter().find(here).map(|(literal, token, _)| (start, literal.as_str(), *token))
        };
        let starts = text.char_indices().map(|(start, _)| start);
        starts.filter(|&start| self.begins[usize::from(text.as_bytes()[start])]).find_map(matches_at)
    }
}

/// A byte-level BPE tokenizer.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    bpe: Bpe,
    tokens: Vec<String>,
    /// By id.
    kinds: Vec<Kind>,
    literals: Literals,
    alphabet: ByteAlphabet,
    bos: Option<u32>,
    /// The end-of-text token first, then other tokens that end a turn.
    ends: Vec<u32>,
    adds_bos: bool,
}

impl Tokenizer {
    /// Builds the tokenizer that a file's metadata describe.
    ///
    /// # Errors
    /// When the tokenizer or pre-tokenizer is of a kind that is not supported, or its lists are
    /// inconsistent.
    pub fn from_metadata(metadata: &Metadata) -> Result<Self, TokenizerError> {
        build::tokenizer(metadata)
    }

    /// The tokens of `text`, a BOS token before them where the model wants one. Bytes for which the
    /// vocabulary has no token (rare controls, in some models) are left out.
    ///
    /// # Errors
    /// When the tokenizer library fails.
    pub fn encode(&self, text: &str, special: SpecialTokens) -> Result<Vec<u32>, TokenizerError> {
        let mut tokens: Vec<u32> = self.bos.filter(|_| self.adds_bos).into_iter().collect();
        let mut rest = text;
        while let Some((start, literal, token)) = self.literals.find(rest, special) {
            self.encode_plain(&rest[..start], &mut tokens)?;
            tokens.push(token);
            rest = &rest[start + literal.len()..];
        }
        self.encode_plain(rest, &mut tokens)?;
        Ok(tokens)
    }

    /// The text of `tokens`; bytes that are no UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// When a token is outside the vocabulary.
    pub fn decode(&self, tokens: &[u32], skip_special: bool) -> Result<String, TokenizerError> {
        let mut bytes = Vec::new();
        for &token in tokens {
            if self.token_text(token).is_none() {
                return Err(TokenizerError::UnknownToken { token, num_tokens: self.tokens.len() });
            }
            self.append_bytes(token, skip_special, &mut bytes);
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// A decoder for a sequence that is still growing.
    #[must_use]
    pub fn stream(&self, skip_special: bool) -> StreamDecoder<'_> {
        StreamDecoder::new(self, skip_special)
    }

    /// Number of token ids.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.tokens.len()
    }

    /// A token as the vocabulary spells it (a space is `Ġ`).
    #[must_use]
    pub fn token_text(&self, token: u32) -> Option<&str> {
        self.tokens.get(index(token)).map(String::as_str)
    }

    /// The beginning-of-text token.
    #[must_use]
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The end-of-text token (`tokenizer.ggml.eos_token_id`).
    #[must_use]
    pub fn eos(&self) -> Option<u32> {
        self.ends.first().copied()
    }

    /// The tokens after which generation stops: the end-of-text token, then others that end a turn.
    #[must_use]
    pub fn ends(&self) -> &[u32] {
        &self.ends
    }

    /// Whether generation stops after this token.
    #[must_use]
    pub fn is_end(&self, token: u32) -> bool {
        self.ends.contains(&token)
    }

    fn encode_plain(&self, text: &str, tokens: &mut Vec<u32>) -> Result<(), TokenizerError> {
        if !text.is_empty() {
            let encoding = self.bpe.encode_fast(text, false).map_err(TokenizerError::library("a text"))?;
            tokens.extend_from_slice(encoding.get_ids());
        }
        Ok(())
    }

    /// Appends the bytes that a token stands for; none for an id outside the vocabulary.
    fn append_bytes(&self, token: u32, skip_special: bool, out: &mut Vec<u8>) {
        let Some(text) = self.token_text(token) else { return };
        match self.kinds[index(token)] {
            Kind::Ordinary => self.alphabet.decode(text, out),
            Kind::Control if skip_special => {}
            Kind::UserDefined | Kind::Control => out.extend_from_slice(text.as_bytes()),
        }
    }
}

fn index(token: u32) -> usize {
    usize::try_from(token).unwrap_or(usize::MAX)
}

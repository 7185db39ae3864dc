//! Text to tokens and back, from the vocabulary inside a GGUF file.
//!
//! How text becomes ordinary tokens is the business of two files, `byte_level.rs` and `scored.rs`.
//! This one owns what the file format leaves open beside it: which tokens are matched in the text as they stand (user-defined ones always, control tokens
//! only when the caller allows it), whether a BOS token comes first, and exact bytes for decoding.

mod build;
mod byte_alphabet;
mod byte_level;
mod error;
mod literals;
mod pre;
mod scored;
mod stream;
#[cfg(test)]
mod tests;

use std::borrow::Cow;

use super::gguf::Metadata;
use byte_level::ByteLevel;
pub use error::TokenizerError;
use literals::Literals;
pub use pre::SUPPORTED_PRE_TOKENIZERS;
use scored::Scored;
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
    /// Reached through BPE, in the vocabulary's spelling.
    Ordinary,
    /// Stands for a byte of a character that is no token.
    Byte(u8),
    /// Matched in the text as it stands, always.
    UserDefined,
    /// Matched in the text as it stands where the caller allows; can be left out of decoded text.
    Control,
}

/// How text becomes ordinary tokens, and back.
#[derive(Debug, Clone)]
enum Algorithm {
    ByteLevel(Box<ByteLevel>),
    Scored(Scored),
}

impl Algorithm {
    /// A text in the spelling that it is matched and encoded in.
    fn spell<'a>(&self, text: &'a str) -> Cow<'a, str> {
        match self {
            Self::ByteLevel(_) => text.into(),
            Self::Scored(_) => Scored::spell(text),
        }
    }

    fn encode(&self, text: &str, tokens: &mut Vec<u32>) -> Result<(), TokenizerError> {
        match self {
            Self::ByteLevel(byte_level) => byte_level.encode(text, tokens)?,
            Self::Scored(scored) => scored.encode(text, tokens),
        }
        Ok(())
    }

    /// Appends the bytes of an ordinary token.
    fn decode(&self, token: &str, out: &mut Vec<u8>) {
        match self {
            Self::ByteLevel(byte_level) => byte_level.decode(token, out),
            Self::Scored(_) => Scored::decode(token, out),
        }
    }

    /// Appends the bytes of a token that is matched as it stands.
    fn decode_literal(&self, token: &str, out: &mut Vec<u8>) {
        match self {
            Self::ByteLevel(_) => out.extend_from_slice(token.as_bytes()),
            Self::Scored(_) => Scored::decode(token, out),
        }
    }
}

/// A BPE tokenizer, byte-level or with scores.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    algorithm: Algorithm,
    tokens: Vec<String>,
    /// By id.
    kinds: Vec<Kind>,
    literals: Literals,
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

    /// The tokens of `text`, a BOS token before them where the model wants one and the text does not
    /// bring it. Bytes for which the vocabulary has no token (rare controls, in some models) are left out.
    ///
    /// # Errors
    /// When the tokenizer library fails.
    pub fn encode(&self, text: &str, special: SpecialTokens) -> Result<Vec<u32>, TokenizerError> {
        let text = self.algorithm.spell(text);
        let (mut tokens, mut rest) = (Vec::new(), &*text);
        while let Some((place, token)) = self.literals.find(rest, special) {
            self.encode_plain(&rest[..place.start], &mut tokens)?;
            tokens.push(token);
            rest = &rest[place.end..];
        }
        self.encode_plain(rest, &mut tokens)?;
        if let Some(bos) = self.bos.filter(|bos| self.adds_bos && tokens.first() != Some(bos)) {
            tokens.insert(0, bos);
        }
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

    /// A token as the vocabulary spells it (a space is `Ġ` or `▁`, by the kind of vocabulary).
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
        if text.is_empty() { Ok(()) } else { self.algorithm.encode(text, tokens) }
    }

    /// Appends the bytes that a token stands for; none for an id outside the vocabulary.
    fn append_bytes(&self, token: u32, skip_special: bool, out: &mut Vec<u8>) {
        let Some(text) = self.token_text(token) else { return };
        match self.kinds[index(token)] {
            Kind::Ordinary => self.algorithm.decode(text, out),
            Kind::Byte(byte) => out.push(byte),
            Kind::Control if skip_special => {}
            Kind::UserDefined | Kind::Control => self.algorithm.decode_literal(text, out),
        }
    }
}

fn index(token: u32) -> usize {
    usize::try_from(token).unwrap_or(usize::MAX)
}

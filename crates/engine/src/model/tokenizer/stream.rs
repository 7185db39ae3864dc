//! Text from tokens as they come.
//!
//! A token can end inside a character. The decoder keeps such a tail back until the character is
//! whole, so that what it has given out, joined, is the text of all tokens.

use super::Tokenizer;

/// Decodes one sequence token by token. Make one for each sequence.
#[derive(Debug, Clone)]
pub struct StreamDecoder<'a> {
    tokenizer: &'a Tokenizer,
    skip_special: bool,
    /// Bytes of an unfinished character; at most 3 between calls.
    pending: Vec<u8>,
}

impl<'a> StreamDecoder<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer, skip_special: bool) -> Self {
        Self { tokenizer, skip_special, pending: Vec::new() }
    }

    /// Takes a token and returns the text that is certain now; empty when a character is
    /// unfinished. Bytes that can never become a character turn into U+FFFD. An id outside the
    /// vocabulary adds nothing.
    pub fn push(&mut self, token: u32) -> String {
        self.tokenizer.append_bytes(token, self.skip_special, &mut self.pending);
        let mut text = String::new();
        let mut unfinished = Vec::new();
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            let is_last = chunk.invalid().as_ptr_range().end == self.pending.as_ptr_range().end;
            if is_last && could_continue(chunk.invalid()) {
                unfinished = chunk.invalid().to_vec();
            } else if !chunk.invalid().is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
            }
        }
        self.pending = unfinished;
        text
    }

    /// Ends the sequence: an unfinished character becomes U+FFFD.
    #[must_use]
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}

/// Whether these bytes are a proper beginning of a longer character.
fn could_continue(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

//! The byte-level alphabet: how a byte-level BPE vocabulary writes bytes as characters.
//!
//! Bytes that print in Latin-1 stand for themselves; the other 68 (controls, space, soft hyphen)
//! take the characters from U+0100 on, in order. A space is thus `Ġ` and a newline `Ċ`.

/// Bytes that stand for themselves.
fn prints(byte: u8) -> bool {
    matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff)
}

/// The bytes whose characters begin at U+0100, in order.
fn shifted_bytes() -> impl Iterator<Item = u8> {
    (0..=255u8).filter(|&byte| !prints(byte))
}

/// The byte that a character of the alphabet stands for.
fn byte_of(character: char) -> Option<u8> {
    let code = u32::from(character);
    match u8::try_from(code) {
        Ok(byte) => prints(byte).then_some(byte),
        Err(_) => shifted_bytes().nth(usize::try_from(code - 0x100).ok()?),
    }
}

/// Turns tokens into bytes; built once, since the mapping is looked up for every character.
#[derive(Debug, Clone)]
pub(super) struct ByteAlphabet {
    /// The byte for each character below U+0144; all others are outside the alphabet.
    bytes: Vec<Option<u8>>,
}

impl ByteAlphabet {
    pub(super) fn new() -> Self {
        Self { bytes: ('\0'..'\u{144}').map(byte_of).collect() }
    }

    /// Appends the token's bytes. A token with a character outside the alphabet is plain text.
    pub(super) fn decode(&self, token: &str, out: &mut Vec<u8>) {
        let start = out.len();
        for character in token.chars() {
            match self.bytes.get(character as usize).copied().flatten() {
                Some(byte) => out.push(byte),
                None => {
                    out.truncate(start);
                    out.extend_from_slice(token.as_bytes());
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(token: &str) -> Vec<u8> {
        let mut out = Vec::new();
        ByteAlphabet::new().decode(token, &mut out);
        out
    }

    #[test]
    fn spaces_newlines_and_letters_decode() {
        assert_eq!(decode("Ġa"), b" a");
        assert_eq!(decode("Ċ"), b"\n");
        assert_eq!(decode("Ã©"), "é".as_bytes());
        assert_eq!(decode("Ń"), [0xad]);
    }

    #[test]
    fn every_byte_has_one_character() {
        let alphabet = ByteAlphabet::new();
        let mut seen: Vec<u8> = alphabet.bytes.iter().flatten().copied().collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..=255).collect::<Vec<u8>>());
    }

    #[test]
    fn text_outside_the_alphabet_stays_text() {
        assert_eq!(decode("a b"), b"a b");
        assert_eq!(decode("Ġ▁"), "Ġ▁".as_bytes());
    }
}

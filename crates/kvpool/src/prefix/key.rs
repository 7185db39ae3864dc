//! Owns what a prefix is looked up by ([`PrefixKey`], [`ExtraKey`]) and the chained hashes of its pages ([`PageHash`]).
//! Invariants: two keys are equal where all their fields are, field by field and token by token; a hash only finds
//! candidates. Does not know pages.

/// The hash of a run of whole pages from the first token on: of this page and, through its parent, of all before it.
///
/// A hint for routers and for finding candidates. Two different runs may have the same hash; the cache compares tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageHash(pub u64);

/// What changes the KV of a token besides the tokens before it. Compared field by field, so that an adapter can never
/// be taken for a salt.
///
/// It holds for the whole request. Content at places inside a prompt (an image, say) stands there as placeholder tokens:
/// put its digest in `modality`, and no request with other content shares pages with this one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct ExtraKey {
    /// The adapter (LoRA) that computes the KV; `None` for the base model.
    pub adapter: Option<u64>,
    /// Whose pages these are: requests of different salts never share any.
    pub salt: Option<[u8; 32]>,
    /// Digest of all content that is not text.
    pub modality: Option<[u8; 32]>,
}

impl ExtraKey {
    /// All fields as words, each behind a word that says whether it is there.
    fn words(&self) -> [u32; 21] {
        let mut words = [0; 21];
        if let Some(adapter) = self.adapter {
            words[0] = 1;
            put_words(&mut words[1..3], &adapter.to_le_bytes());
        }
        for (at, digest) in [(3, &self.salt), (12, &self.modality)] {
            if let Some(digest) = digest {
                words[at] = 1;
                put_words(&mut words[at + 1..at + 9], digest);
            }
        }
        words
    }

    /// The parent of the first page.
    pub(crate) fn root_hash(&self, seed: u64, hash_page: fn(PageHash, &[u32]) -> PageHash) -> PageHash {
        if *self == ExtraKey::default() { PageHash(seed) } else { hash_page(PageHash(seed), &self.words()) }
    }
}

fn put_words(words: &mut [u32], bytes: &[u8]) {
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(4)) {
        *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }
}

/// What a request is looked up by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefixKey<'a> {
    /// The tokens from the first one on.
    pub tokens: &'a [u32],
    /// What else changes their KV.
    pub extra: ExtraKey,
}

impl<'a> PrefixKey<'a> {
    /// Tokens of the base model, without salt and content.
    #[must_use]
    pub fn new(tokens: &'a [u32]) -> PrefixKey<'a> {
        PrefixKey { tokens, extra: ExtraKey::default() }
    }
}

/// The hash of a page of tokens behind the run that `parent` stands for: multiplies and shifts, then a finaliser.
#[must_use]
pub fn hash_page(parent: PageHash, tokens: &[u32]) -> PageHash {
    const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut state = parent.0 ^ MULTIPLIER;
    for pair in tokens.chunks(2) {
        let word = u64::from(pair[0]) | pair.get(1).map_or(1 << 63, |second| u64::from(*second) << 32);
        state = (state ^ word).wrapping_mul(MULTIPLIER);
        state ^= state >> 29;
    }
    state = (state ^ (state >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    PageHash(state ^ (state >> 32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_depends_on_every_token_and_on_the_parent() {
        let tokens = [1, 2, 3, 4, 5];
        let hash = hash_page(PageHash(7), &tokens);
        assert_eq!(hash, hash_page(PageHash(7), &tokens));
        assert_ne!(hash, hash_page(PageHash(8), &tokens));
        for at in 0..tokens.len() {
            let mut other = tokens;
            other[at] ^= 1;
            assert_ne!(hash, hash_page(PageHash(7), &other));
        }
        assert_ne!(hash, hash_page(PageHash(7), &[2, 1, 3, 4, 5]));
    }

    #[test]
    fn no_field_of_an_extra_key_stands_for_another() {
        let digest = [3; 32];
        let keys = [
            ExtraKey::default(),
            ExtraKey { adapter: Some(0), ..ExtraKey::default() },
            ExtraKey { salt: Some([0; 32]), ..ExtraKey::default() },
            ExtraKey { salt: Some(digest), ..ExtraKey::default() },
            ExtraKey { modality: Some(digest), ..ExtraKey::default() },
            ExtraKey { modality: Some([0; 32]), ..ExtraKey::default() },
        ];
        for (i, a) in keys.iter().enumerate() {
            for b in &keys[i + 1..] {
                assert_ne!(a, b);
                assert_ne!(a.root_hash(0, hash_page), b.root_hash(0, hash_page));
            }
        }
    }
}

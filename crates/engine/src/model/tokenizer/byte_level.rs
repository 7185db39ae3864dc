//! Byte-level BPE with a merge list; the BPE itself is the `tokenizers` crate's.

use tokenizers::Tokenizer as Bpe;
use tokenizers::models::bpe::{BPE, Merges, Vocab};

use super::super::gguf::Metadata;
use super::byte_alphabet::ByteAlphabet;
use super::{TokenizerError, pre};

/// A vocabulary of tokens in the byte-level alphabet, and its merges.
#[derive(Debug, Clone)]
pub(super) struct ByteLevel {
    bpe: Bpe,
    alphabet: ByteAlphabet,
}

impl ByteLevel {
    /// Takes the vocabulary; merges and pre-tokenizer are the metadata's.
    pub(super) fn new(metadata: &Metadata, vocab: Vocab) -> Result<Self, TokenizerError> {
        let merges = merges(metadata.strings("tokenizer.ggml.merges")?, &vocab)?;
        let pipeline = pre::pipeline(metadata.opt_string("tokenizer.ggml.pre")?.unwrap_or("default"))?;
        let model = BPE::builder()
            .vocab_and_merges(vocab, merges)
            .ignore_merges(pipeline.whole_pieces_first)
            .build()
            .map_err(TokenizerError::library("the vocabulary"))?;
        let mut bpe = Bpe::new(model);
        bpe.with_normalizer(pipeline.normalizer).map_err(TokenizerError::library("the normalizer"))?;
        bpe.with_pre_tokenizer(Some(pipeline.pre_tokenizer));
        Ok(Self { bpe, alphabet: ByteAlphabet::new() })
    }

    /// Appends the tokens of a text.
    pub(super) fn encode(&self, text: &str, tokens: &mut Vec<u32>) -> Result<(), TokenizerError> {
        let encoding = self.bpe.encode_fast(text, false).map_err(TokenizerError::library("a text"))?;
        tokens.extend_from_slice(encoding.get_ids());
        Ok(())
    }

    /// Appends the bytes of a token.
    pub(super) fn decode(&self, token: &str, out: &mut Vec<u8>) {
        self.alphabet.decode(token, out);
    }
}

fn merges(entries: &[String], vocab: &Vocab) -> Result<Merges, TokenizerError> {
    let parse = |(index, entry): (usize, &String)| {
        let known = |(left, right): &(&str, &str)| {
            vocab.contains_key(*left) && vocab.contains_key(*right) && vocab.contains_key(&format!("{left}{right}"))
        };
        let pair = entry.split_once(' ').filter(known);
        let (left, right) = pair.ok_or_else(|| TokenizerError::Merge { index, merge: entry.clone() })?;
        Ok((left.to_owned(), right.to_owned()))
    };
    entries.iter().enumerate().map(parse).collect()
}

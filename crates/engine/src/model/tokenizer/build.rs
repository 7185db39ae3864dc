//! Builds a [`Tokenizer`] from metadata, checking what the tokenizer library takes on trust.

use tokenizers::Tokenizer as Bpe;
use tokenizers::models::bpe::{BPE, Merges, Vocab};

use super::super::gguf::Metadata;
use super::byte_alphabet::ByteAlphabet;
use super::{Kind, Literals, Tokenizer, TokenizerError, index, pre};

pub(super) fn tokenizer(metadata: &Metadata) -> Result<Tokenizer, TokenizerError> {
    let model = metadata.string("tokenizer.ggml.model")?;
    if model != "gpt2" {
        return Err(TokenizerError::Model { model: model.to_owned() });
    }
    let tokens = metadata.strings("tokenizer.ggml.tokens")?.to_vec();
    let vocab = vocabulary(&tokens)?;
    let merges = merges(metadata.strings("tokenizer.ggml.merges")?, &vocab)?;
    let kinds = kinds(metadata, &tokens)?;
    let literals = literals(&tokens, &kinds);
    let bos = special(metadata, "tokenizer.ggml.bos_token_id", tokens.len())?;
    let adds_bos = metadata.opt_bool("tokenizer.ggml.add_bos_token")?.unwrap_or(false);
    if adds_bos && bos.is_none() {
        return Err(TokenizerError::NoBosToken);
    }
    Ok(Tokenizer {
        ends: ends(metadata, tokens.len())?,
        bpe: bpe(metadata, vocab, merges)?,
        alphabet: ByteAlphabet::new(),
        tokens,
        kinds,
        literals,
        bos,
        adds_bos,
    })
}

fn bpe(metadata: &Metadata, vocab: Vocab, merges: Merges) -> Result<Bpe, TokenizerError> {
    let pipeline = pre::pipeline(metadata.opt_string("tokenizer.ggml.pre")?.unwrap_or("default"))?;
    let model = BPE::builder()
        .vocab_and_merges(vocab, merges)
        .ignore_merges(pipeline.whole_pieces_first)
        .build()
        .map_err(TokenizerError::library("the vocabulary"))?;
    let mut bpe = Bpe::new(model);
    bpe.with_normalizer(pipeline.normalizer).map_err(TokenizerError::library("the normalizer"))?;
    bpe.with_pre_tokenizer(Some(pipeline.pre_tokenizer));
    Ok(bpe)
}

fn vocabulary(tokens: &[String]) -> Result<Vocab, TokenizerError> {
    let mut vocab = Vocab::with_capacity(tokens.len());
    for (position, token) in tokens.iter().enumerate() {
        let id = u32::try_from(position).map_err(|_| TokenizerError::TooManyTokens { num_tokens: tokens.len() })?;
        if let Some(first) = vocab.insert(token.clone(), id) {
            return Err(TokenizerError::DuplicateToken { token: token.clone(), first, second: id });
        }
    }
    Ok(vocab)
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

/// One kind for each token; all ordinary when the file does not say.
fn kinds(metadata: &Metadata, tokens: &[String]) -> Result<Vec<Kind>, TokenizerError> {
    let Some(types) = metadata.opt_ints("tokenizer.ggml.token_type")? else {
        return Ok(vec![Kind::Ordinary; tokens.len()]);
    };
    if types.len() != tokens.len() {
        return Err(TokenizerError::TokenTypes { expected: tokens.len(), got: types.len() });
    }
    let kind = |(number, text): (&i64, &String)| match number {
        3 if !text.is_empty() => Kind::Control,
        4 if !text.is_empty() => Kind::UserDefined,
        _ => Kind::Ordinary,
    };
    Ok(types.iter().zip(tokens).map(kind).collect())
}

fn literals(tokens: &[String], kinds: &[Kind]) -> Literals {
    let numbered = (0u32..).zip(tokens.iter().zip(kinds));
    let mut entries: Vec<(String, u32, Kind)> = numbered
        .filter(|(_, (_, kind))| **kind != Kind::Ordinary)
        .map(|(token, (text, kind))| (text.clone(), token, *kind))
        .collect();
    entries.sort_by_key(|(text, ..)| std::cmp::Reverse(text.len()));
    let mut begins = [false; 256];
    for (text, ..) in &entries {
        begins[usize::from(text.as_bytes()[0])] = true;
    }
    Literals { entries, begins }
}

fn special(metadata: &Metadata, key: &'static str, num_tokens: usize) -> Result<Option<u32>, TokenizerError> {
    match metadata.opt_token(key)? {
        Some(token) if index(token) >= num_tokens => Err(TokenizerError::SpecialToken { key, token, num_tokens }),
        token => Ok(token),
    }
}

/// Tokens after which generation stops.
fn ends(metadata: &Metadata, num_tokens: usize) -> Result<Vec<u32>, TokenizerError> {
    let mut ends = Vec::new();
    for key in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
        ends.extend(special(metadata, key, num_tokens)?.filter(|token| !ends.contains(token)));
    }
    Ok(ends)
}

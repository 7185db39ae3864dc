//! Builds a [`Tokenizer`] from metadata, checking what the tokenizer library takes on trust.

use tokenizers::models::bpe::Vocab;

use super::super::gguf::Metadata;
use super::byte_level::ByteLevel;
use super::literals::Literals;
use super::scored::Scored;
use super::{Algorithm, Kind, Tokenizer, TokenizerError, index};

pub(super) fn tokenizer(metadata: &Metadata) -> Result<Tokenizer, TokenizerError> {
    let tokens = metadata.strings("tokenizer.ggml.tokens")?.to_vec();
    let vocab = vocabulary(&tokens)?;
    let (algorithm, kinds) = match metadata.string("tokenizer.ggml.model")? {
        "gpt2" => {
            let kinds = kinds(metadata, &tokens, byte_level_kind)?;
            (Algorithm::ByteLevel(ByteLevel::new(metadata, vocab)?.into()), kinds)
        }
        "llama" => {
            refuse_text_changes(metadata)?;
            let kinds = kinds(metadata, &tokens, scored_kind)?;
            let scores = metadata.floats("tokenizer.ggml.scores")?;
            (Algorithm::Scored(Scored::new(&tokens, &kinds, scores)?), kinds)
        }
        model => return Err(TokenizerError::Model { model: model.to_owned() }),
    };
    let literals = literals(&tokens, &kinds, &algorithm);
    let bos = special(metadata, "tokenizer.ggml.bos_token_id", tokens.len())?;
    let adds_bos = metadata.opt_bool("tokenizer.ggml.add_bos_token")?.unwrap_or(false);
    if adds_bos && bos.is_none() {
        return Err(TokenizerError::NoBosToken);
    }
    Ok(Tokenizer { ends: ends(metadata, tokens.len())?, algorithm, tokens, kinds, literals, bos, adds_bos })
}

/// What some vocabularies with scores want done to the text first.
fn refuse_text_changes(metadata: &Metadata) -> Result<(), TokenizerError> {
    // Those that are silent on it want this one.
    if metadata.opt_bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true) {
        return Err(TokenizerError::Feature { feature: "a space before the text" });
    }
    if metadata.opt_bool("tokenizer.ggml.remove_extra_whitespaces")?.unwrap_or(false) {
        return Err(TokenizerError::Feature { feature: "removal of repeated spaces" });
    }
    if metadata.get("tokenizer.ggml.precompiled_charsmap").is_some() {
        return Err(TokenizerError::Feature { feature: "a map of characters" });
    }
    Ok(())
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

/// One kind for each token; all ordinary when the file does not say.
fn kinds(
    metadata: &Metadata,
    tokens: &[String],
    kind: impl Fn((u32, &String), i64) -> Result<Kind, TokenizerError>,
) -> Result<Vec<Kind>, TokenizerError> {
    let Some(types) = metadata.opt_ints("tokenizer.ggml.token_type")? else {
        return Ok(vec![Kind::Ordinary; tokens.len()]);
    };
    if types.len() != tokens.len() {
        return Err(TokenizerError::TokenTypes { expected: tokens.len(), got: types.len() });
    }
    (0u32..).zip(tokens).zip(types).map(|(token, &number)| kind(token, number)).collect()
}

fn byte_level_kind((_, text): (u32, &String), number: i64) -> Result<Kind, TokenizerError> {
    Ok(match number {
        3 if !text.is_empty() => Kind::Control,
        4 if !text.is_empty() => Kind::UserDefined,
        _ => Kind::Ordinary,
    })
}

fn scored_kind((token, text): (u32, &String), number: i64) -> Result<Kind, TokenizerError> {
    match number {
        1 => Ok(Kind::Ordinary),
        // The unknown token too: bytes without a character have tokens of their own.
        2 | 3 if !text.is_empty() => Ok(Kind::Control),
        4 if !text.is_empty() => Ok(Kind::UserDefined),
        6 => byte(text).map(Kind::Byte).ok_or_else(|| TokenizerError::ByteToken { token, text: text.clone() }),
        _ => Err(TokenizerError::TokenType { token, text: text.clone(), number }),
    }
}

/// The byte of a token that is spelled `<0x00>` to `<0xFF>`.
fn byte(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    u8::from_str_radix(digits, 16).ok().filter(|byte| *digits == format!("{byte:02X}"))
}

fn literals(tokens: &[String], kinds: &[Kind], algorithm: &Algorithm) -> Literals {
    let numbered = (0u32..).zip(tokens.iter().zip(kinds));
    let is_literal = |kind: Kind| matches!(kind, Kind::UserDefined | Kind::Control);
    Literals::new(
        numbered
            .filter(|(_, (_, kind))| is_literal(**kind))
            .map(|(token, (text, kind))| (algorithm.spell(text).into_owned(), token, *kind)),
    )
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

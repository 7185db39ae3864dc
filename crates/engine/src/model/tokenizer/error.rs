//! What can be wrong with a tokenizer or its input.

use super::super::gguf::GgufError;
use super::SUPPORTED_PRE_TOKENIZERS;

/// Why a tokenizer cannot be built or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A key is missing or has the wrong type or range.
    #[error(transparent)]
    Metadata(#[from] GgufError),
    /// Another kind of vocabulary.
    #[error(
        "tokenizer model {model:?} is not supported; supported: \"gpt2\" (byte-level BPE), \"llama\" (BPE by scores)"
    )]
    Model {
        /// `tokenizer.ggml.model` of the file.
        model: String,
    },
    /// The text would be cut by rules that are not known.
    #[error("pre-tokenizer {name:?} is not supported; supported: {}", SUPPORTED_PRE_TOKENIZERS.join(", "))]
    PreTokenizer {
        /// `tokenizer.ggml.pre` of the file.
        name: String,
    },
    /// A token occurs twice, so that its id is not defined.
    #[error("tokens {first} and {second} are both {token:?}")]
    DuplicateToken {
        /// The token.
        token: String,
        /// Its smaller id.
        first: u32,
        /// Its larger id.
        second: u32,
    },
    /// More tokens than token ids.
    #[error("the vocabulary has {num_tokens} tokens, more than 2^32")]
    TooManyTokens {
        /// Number of tokens in the file.
        num_tokens: usize,
    },
    /// The list of token types has another length than the list of tokens.
    #[error("tokenizer.ggml.token_type has {got} entries, expected one for each of the {expected} tokens")]
    TokenTypes {
        /// Number of tokens.
        expected: usize,
        /// Number of types.
        got: usize,
    },
    /// A token's type has no meaning here.
    #[error("token {token} ({text:?}) has type {number}, expected 1 to 4, or 6 for a byte, and a text")]
    TokenType {
        /// Its id.
        token: u32,
        /// Its text.
        text: String,
        /// Its entry in `tokenizer.ggml.token_type`.
        number: i64,
    },
    /// A token is said to be a byte and not spelled like one.
    #[error("token {token} is {text:?}, expected a byte, \"<0x00>\" to \"<0xFF>\"")]
    ByteToken {
        /// Its id.
        token: u32,
        /// Its text.
        text: String,
    },
    /// A byte that no token stands for.
    #[error("no token stands for byte 0x{byte:02X}, which BPE by scores needs")]
    NoByteToken {
        /// The first such byte.
        byte: u8,
    },
    /// The list of scores has another length than the list of tokens.
    #[error("tokenizer.ggml.scores has {got} entries, expected one for each of the {expected} tokens")]
    Scores {
        /// Number of tokens.
        expected: usize,
        /// Number of scores.
        got: usize,
    },
    /// A score that cannot be compared.
    #[error("the score of token {token} is not a number")]
    Score {
        /// The token.
        token: u32,
    },
    /// The vocabulary is of a known kind and wants something that is not supported.
    #[error("the tokenizer wants {feature}, which is not supported")]
    Feature {
        /// What it wants.
        feature: &'static str,
    },
    /// A merge is not two tokens whose union is a token.
    #[error("merge {index} is {merge:?}, expected two tokens, a space between, which join into a token")]
    Merge {
        /// Place in `tokenizer.ggml.merges`.
        index: usize,
        /// The entry.
        merge: String,
    },
    /// A special token's id is outside the vocabulary.
    #[error("{key} is {token}, outside the {num_tokens} tokens of the vocabulary")]
    SpecialToken {
        /// The metadata key.
        key: &'static str,
        /// The id found.
        token: u32,
        /// Number of tokens.
        num_tokens: usize,
    },
    /// A BOS token is to be added and none is named.
    #[error("tokenizer.ggml.add_bos_token is set, and tokenizer.ggml.bos_token_id is missing")]
    NoBosToken,
    /// A token id that is not in the vocabulary.
    #[error("token {token} is outside the {num_tokens} tokens of the vocabulary")]
    UnknownToken {
        /// The id.
        token: u32,
        /// Number of tokens.
        num_tokens: usize,
    },
    /// The tokenizer library failed.
    #[error("the tokenizer library refused {what}")]
    Library {
        /// What it was given.
        what: &'static str,
        /// Its reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl TokenizerError {
    /// Wraps an error of the tokenizer library.
    pub(super) fn library(what: &'static str) -> impl FnOnce(Box<dyn std::error::Error + Send + Sync>) -> Self {
        move |source| Self::Library { what, source }
    }
}

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
    /// Not a byte-level BPE vocabulary.
    #[error("tokenizer model {model:?} is not supported; supported: \"gpt2\" (byte-level BPE)")]
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

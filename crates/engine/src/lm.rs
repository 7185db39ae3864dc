//! A language model as the step loop sees it, and attention as a language model sees it.
//!
//! The two meet here and know nothing else of each other: a model knows no page, a backend no token.

use attn_metadata::{Layer, RunError};

/// The tokens of a step, packed. Tokens of any number of sequences may lie side by side, in any order.
#[derive(Clone, Copy, Debug)]
pub struct ModelInput<'a> {
    /// Token ids, `[num_tokens]`.
    pub tokens: &'a [u32],
    /// Position of each token in its sequence, `[num_tokens]`.
    pub positions: &'a [u32],
    /// Rows whose logits are wanted; any order, repeats allowed.
    pub logit_rows: &'a [usize],
}

/// New rows of one branch of a layer, packed, positions already applied.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// Queries `[num_tokens, heads, width]`.
    pub q: &'a [f32],
    /// Keys `[num_tokens, num_kv_heads, head_dim_k]` of the branch's `KvSpec`.
    pub k: &'a [f32],
    /// Values `[num_tokens, num_kv_heads, head_dim_v]`; `None` where the branch keeps no values of their own.
    pub v: Option<&'a [f32]>,
}

/// What a layer gives to attention for the tokens of a step.
#[derive(Clone, Copy, Debug)]
pub struct AttentionInput<'a> {
    /// The layer's rows; q is `[num_tokens, num_qo_heads, head_dim_qk]`.
    pub rows: Rows<'a>,
    /// Those of its side branch, exactly where it has one.
    pub side: Option<Rows<'a>>,
}

impl<'a> AttentionInput<'a> {
    /// What a plain layer gives.
    #[must_use]
    pub const fn plain(q: &'a [f32], k: &'a [f32], v: &'a [f32]) -> Self {
        Self { rows: Rows { q, k, v: Some(v) }, side: None }
    }
}

/// Where attention writes, every element.
#[derive(Debug)]
pub struct AttentionOutput<'a> {
    /// `[num_tokens, num_qo_heads, head_dim_vo]`.
    pub out: &'a mut [f32],
    /// `[num_tokens, heads, out_dim]` of the side branch, exactly where it has an output.
    pub side: Option<&'a mut [f32]>,
}

impl<'a> AttentionOutput<'a> {
    /// Where a layer without an output of a side branch writes.
    #[must_use]
    pub const fn plain(out: &'a mut [f32]) -> Self {
        Self { out, side: None }
    }
}

/// Attention of one layer over the tokens of a step, whatever holds the KV.
pub trait LayerAttention {
    /// Appends the new keys and values and attends.
    ///
    /// # Errors
    /// What the backend refuses.
    fn attend(&mut self, layer: usize, input: &AttentionInput<'_>, output: AttentionOutput<'_>)
    -> Result<(), RunError>;
}

/// Why a forward pass failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ForwardError {
    /// Not one position for each token.
    #[error("the batch has {num_tokens} tokens and {num_positions} positions")]
    Positions {
        /// Tokens given.
        num_tokens: usize,
        /// Positions given.
        num_positions: usize,
    },
    /// A token id that the vocabulary does not have.
    #[error("token {token} at row {row} is outside the {vocab_size} tokens of the vocabulary")]
    Token {
        /// Row in the batch.
        row: usize,
        /// The id.
        token: u32,
        /// Number of token ids.
        vocab_size: usize,
    },
    /// A position beyond what the model was trained for.
    #[error("position {position} at row {row} is outside the model's context of {context_length} tokens")]
    Position {
        /// Row in the batch.
        row: usize,
        /// The position.
        position: u32,
        /// Longest sequence of the model.
        context_length: usize,
    },
    /// Logits asked for a row that the batch does not have.
    #[error("logits were asked for row {row} of a batch of {num_tokens} tokens")]
    LogitRow {
        /// The row.
        row: usize,
        /// Tokens in the batch.
        num_tokens: usize,
    },
    /// Attention failed.
    #[error("attention failed in layer {layer}")]
    Attention {
        /// The layer.
        layer: usize,
        /// Why.
        source: RunError,
    },
    /// A matrix product failed.
    #[error("a matrix product failed")]
    Product(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// Logits of the rows that were asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Logits {
    data: Vec<f32>,
    vocab_size: usize,
}

impl Logits {
    /// From `[num_rows, vocab_size]`.
    ///
    /// # Panics
    /// If `data` does not divide into rows.
    #[must_use]
    pub fn new(data: Vec<f32>, vocab_size: usize) -> Self {
        assert!(data.len().is_multiple_of(vocab_size), "{} logits for {vocab_size} tokens", data.len());
        Self { data, vocab_size }
    }

    /// Number of rows.
    #[must_use]
    pub fn num_rows(&self) -> usize {
        self.data.len() / self.vocab_size
    }

    /// The logits `[vocab_size]` of the `index`-th row asked for, or `None` past the last.
    #[must_use]
    pub fn row(&self, index: usize) -> Option<&[f32]> {
        self.data.chunks_exact(self.vocab_size).nth(index)
    }

    /// The rows in the order in which they were asked for.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = &[f32]> + Clone {
        self.data.chunks_exact(self.vocab_size)
    }
}

/// A decoder-only language model in f32, without KV of its own.
pub trait LanguageModel {
    /// Its attention layers, in order.
    fn layers(&self) -> &[Layer];

    /// Number of token ids.
    fn vocab_size(&self) -> usize;

    /// Longest sequence that it was trained for, in tokens.
    fn max_len(&self) -> usize;

    /// Runs all layers over the tokens of a step and returns logits for the rows asked, in that order.
    ///
    /// # Errors
    /// [`ForwardError`]. Mistakes in the input are found before anything is computed; where attention fails, the KV
    /// of this step's tokens may have been written in part.
    fn forward(&mut self, input: ModelInput<'_>, attention: &mut dyn LayerAttention) -> Result<Logits, ForwardError>;
}

//! A Llama-family decoder: everything but attention.
//!
//! [`Llama::forward`] runs a packed batch of tokens through all layers and hands Q, K and V of each
//! layer to the caller's [`LayerAttention`]. The model knows nothing of requests, pages or caches;
//! tokens of any number of requests may lie side by side, in any order, as long as the positions
//! say where each one is.
//!
//! All arithmetic is f32 with weights dequantised once; a token's row is computed without regard to
//! the rows beside it (see `linear.rs` for how far that holds to the bit).

mod linear;
mod ops;
#[cfg(test)]
mod tests;
mod weights;

use std::io::{Read, Seek};

use super::ModelError;
use super::config::ModelConfig;
use super::gguf::GgufFile;
use linear::Linear;
use ops::{RopeTable, add, rms_norm, silu_mul};
use weights::{Layer, Weights};

/// Attention as the model sees it: one call for each layer, in order.
pub trait LayerAttention {
    /// Why attention failed.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Attends over what the caller keeps of earlier tokens and this batch's own K and V.
    ///
    /// `q` `[T, num_qo_heads, head_dim]` and `k` `[T, num_kv_heads, head_dim]` are rotated, `v`
    /// `[T, num_kv_heads, head_dim]` is as projected; all packed f32, in the order of the batch's
    /// tokens. Writes all of `out` `[T, num_qo_heads, head_dim]`.
    ///
    /// # Errors
    /// Any; the forward pass stops and returns it with the layer's number.
    fn attend(&mut self, layer: usize, q: &[f32], k: &[f32], v: &[f32], out: &mut [f32]) -> Result<(), Self::Error>;
}

/// Why a forward pass failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ForwardError<E: std::error::Error + Send + Sync + 'static> {
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
    /// The caller's attention failed.
    #[error("attention failed in layer {layer}")]
    Attention {
        /// The layer.
        layer: usize,
        /// The caller's error.
        source: E,
    },
    /// A matrix product failed.
    #[error("a matrix product failed")]
    Product {
        /// The tensor library's reason.
        source: candle_core::Error,
    },
}

impl<E: std::error::Error + Send + Sync + 'static> From<candle_core::Error> for ForwardError<E> {
    fn from(source: candle_core::Error) -> Self {
        Self::Product { source }
    }
}

/// Logits of the rows that were asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct Logits {
    data: Vec<f32>,
    vocab_size: usize,
}

impl Logits {
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
    pub fn rows(&self) -> impl ExactSizeIterator<Item = &[f32]> {
        self.data.chunks_exact(self.vocab_size)
    }
}

/// Buffers that a forward pass reuses. Shapes are those of the last batch.
#[derive(Debug, Default)]
struct Scratch {
    /// `[T, hidden]`: the residual stream.
    hidden: Vec<f32>,
    /// `[T, hidden]`: its norm.
    normed: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    /// `[T, num_qo_heads, head_dim]`.
    attended: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    /// `[T, hidden]`: what a block adds to the stream.
    delta: Vec<f32>,
    rope: RopeTable,
}

/// A model with its weights in memory.
#[derive(Debug)]
pub struct Llama {
    config: ModelConfig,
    weights: Weights,
    scratch: Scratch,
}

impl Llama {
    /// Reads the weights and dequantises them to f32. `progress` hears (tensors done, tensors in
    /// the file) after each.
    ///
    /// # Errors
    /// When a tensor is missing, has a shape that the configuration contradicts, or a type that
    /// cannot be dequantised.
    pub fn load<R: Read + Seek>(
        file: &mut GgufFile<R>,
        config: ModelConfig,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self, ModelError> {
        let weights = Weights::load(file, &config, progress)?;
        Ok(Self { config, weights, scratch: Scratch::default() })
    }

    /// The configuration that it was loaded with.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Runs a packed batch: `tokens[i]` at `positions[i]` of its sequence. Returns logits for the
    /// rows in `logit_rows` (indices into the batch, any order, repeats allowed), in that order.
    ///
    /// # Errors
    /// When the arrays contradict each other or the model, checked before anything is computed; or
    /// when attention fails.
    pub fn forward<A: LayerAttention>(
        &mut self,
        tokens: &[u32],
        positions: &[u32],
        logit_rows: &[usize],
        attention: &mut A,
    ) -> Result<Logits, ForwardError<A::Error>> {
        let rows = self.check(tokens, positions, logit_rows)?;
        let Self { config, weights, scratch } = self;
        scratch.embed(&rows, &weights.embedding, config)?;
        scratch.rope.fill(positions, &weights.frequencies);
        for (idx, layer) in weights.layers.iter().enumerate() {
            scratch.attention_inputs(layer, config)?;
            scratch.attended.resize(scratch.q.len(), 0.0);
            attention
                .attend(idx, &scratch.q, &scratch.k, &scratch.v, &mut scratch.attended)
                .map_err(|source| ForwardError::Attention { layer: idx, source })?;
            layer.o.forward(&scratch.attended, &mut scratch.delta)?;
            add(&mut scratch.hidden, &scratch.delta);
            scratch.mlp(layer, config)?;
        }
        let head = weights.head.as_ref().unwrap_or(&weights.embedding);
        let data = scratch.logits(logit_rows, &weights.norm, head, config)?;
        Ok(Logits { data, vocab_size: config.vocab_size })
    }

    /// Checks the arrays against each other and the model; returns the tokens as row numbers of the
    /// embedding.
    fn check<E: std::error::Error + Send + Sync + 'static>(
        &self,
        tokens: &[u32],
        positions: &[u32],
        logit_rows: &[usize],
    ) -> Result<Vec<usize>, ForwardError<E>> {
        let (num_tokens, num_positions) = (tokens.len(), positions.len());
        if num_tokens != num_positions {
            return Err(ForwardError::Positions { num_tokens, num_positions });
        }
        let ModelConfig { vocab_size, context_length, .. } = self.config;
        for (row, &position) in positions.iter().enumerate() {
            if !within(position, context_length) {
                return Err(ForwardError::Position { row, position, context_length });
            }
        }
        if let Some(&row) = logit_rows.iter().find(|&&row| row >= num_tokens) {
            return Err(ForwardError::LogitRow { row, num_tokens });
        }
        let checked = |(row, &token)| {
            let embedding_row = usize::try_from(token).ok().filter(|_| within(token, vocab_size));
            embedding_row.ok_or(ForwardError::Token { row, token, vocab_size })
        };
        tokens.iter().enumerate().map(checked).collect()
    }
}

fn within(value: u32, limit: usize) -> bool {
    usize::try_from(value).is_ok_and(|value| value < limit)
}

impl Scratch {
    fn embed(&mut self, rows: &[usize], embedding: &Linear, config: &ModelConfig) -> candle_core::Result<()> {
        let len = rows.len() * config.hidden_size;
        self.hidden.resize(len, 0.0);
        self.normed.resize(len, 0.0);
        for (out, &row) in self.hidden.chunks_exact_mut(config.hidden_size).zip(rows) {
            embedding.copy_row(row, out)?;
        }
        Ok(())
    }

    /// Norm, projections and RoPE: fills `q`, `k` and `v`.
    fn attention_inputs(&mut self, layer: &Layer, config: &ModelConfig) -> candle_core::Result<()> {
        rms_norm(&self.hidden, &layer.attn_norm, config.rms_epsilon, &mut self.normed);
        layer.q.forward(&self.normed, &mut self.q)?;
        layer.k.forward(&self.normed, &mut self.k)?;
        layer.v.forward(&self.normed, &mut self.v)?;
        let num_dims = config.rope.num_dims;
        self.rope.rotate(&mut self.q, config.num_qo_heads, config.head_dim, num_dims);
        self.rope.rotate(&mut self.k, config.num_kv_heads, config.head_dim, num_dims);
        Ok(())
    }

    /// The gated MLP, added to the residual stream.
    fn mlp(&mut self, layer: &Layer, config: &ModelConfig) -> candle_core::Result<()> {
        rms_norm(&self.hidden, &layer.mlp_norm, config.rms_epsilon, &mut self.normed);
        layer.gate.forward(&self.normed, &mut self.gate)?;
        layer.up.forward(&self.normed, &mut self.up)?;
        silu_mul(&mut self.gate, &self.up);
        layer.down.forward(&self.gate, &mut self.delta)?;
        add(&mut self.hidden, &self.delta);
        Ok(())
    }

    /// Final norm and head, for the rows asked.
    fn logits(
        &mut self,
        logit_rows: &[usize],
        norm: &[f32],
        head: &Linear,
        config: &ModelConfig,
    ) -> candle_core::Result<Vec<f32>> {
        let row = |&row: &usize| &self.hidden[row * config.hidden_size..][..config.hidden_size];
        let picked: Vec<f32> = logit_rows.iter().flat_map(row).copied().collect();
        self.normed.resize(picked.len(), 0.0);
        rms_norm(&picked, norm, config.rms_epsilon, &mut self.normed);
        let mut logits = Vec::new();
        head.forward(&self.normed, &mut logits)?;
        Ok(logits)
    }
}

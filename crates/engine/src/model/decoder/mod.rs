//! A decoder-only transformer: everything but attention.
//!
//! One forward pass serves all architectures; what sets them apart is data, in [`ModelConfig`].
//! [`Decoder`]'s forward pass runs a packed batch of tokens through all layers and hands Q, K and V of each
//! layer to the caller's [`LayerAttention`]. The model knows nothing of requests, pages or caches;
//! tokens of any number of requests may lie side by side, in any order, as long as the positions
//! say where each one is.
//!
//! All arithmetic is f32 with weights dequantised once; a token's row is computed without regard to
//! the rows beside it (see `linear.rs` for how far that holds to the bit).

mod linear;
#[cfg(test)]
mod naive;
mod ops;
#[cfg(test)]
mod tests;
mod weights;

use std::io::{Read, Seek};

use attn_metadata::{HeadShape, LayerError, LayerParams};

use super::ModelError;
use super::config::{ModelConfig, WindowConfig};
use super::gguf::GgufFile;
use crate::lm::{AttentionInput, AttentionOutput, ForwardError, LanguageModel, LayerAttention, Logits, ModelInput};
use linear::Linear;
use ops::{RopeTable, activate_mul, add, rms_norm, rms_norm_in_place, scale, softcap};
use weights::{Layer, Weights};

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
    /// Angles of the layers without a window.
    rope: RopeTable,
    /// Angles of the layers with a window.
    window_rope: RopeTable,
}

/// A model with its weights in memory.
#[derive(Debug)]
pub struct Decoder {
    config: ModelConfig,
    /// What each layer's attention computes.
    attention: Vec<attn_metadata::Layer>,
    weights: Weights,
    scratch: Scratch,
}

impl Decoder {
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
        // Only now is the number of layers known to be that of the file's tensors.
        let attention = (0..weights.layers.len()).map(|idx| attention_layer(&config, idx)).collect::<Result<_, _>>()?;
        Ok(Self { config, attention, weights, scratch: Scratch::default() })
    }

    /// The configuration that it was loaded with.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn run(
        &mut self,
        rows: &[usize],
        input: &ModelInput<'_>,
        attention: &mut dyn LayerAttention,
    ) -> Result<Vec<f32>, ForwardError> {
        let product = |source: candle_core::Error| ForwardError::Product(Box::new(source));
        let Self { config, weights, scratch, .. } = self;
        scratch.embed(rows, &weights.embedding, config).map_err(product)?;
        scratch.rope.fill(input.positions, &weights.frequencies);
        scratch.window_rope.fill(input.positions, &weights.window_frequencies);
        for (idx, layer) in weights.layers.iter().enumerate() {
            scratch.attention_inputs(layer, config, config.window_of(idx)).map_err(product)?;
            scratch.attended.resize(scratch.q.len(), 0.0);
            let input = AttentionInput::plain(&scratch.q, &scratch.k, &scratch.v);
            attention
                .attend(idx, &input, AttentionOutput::plain(&mut scratch.attended))
                .map_err(|source| ForwardError::Attention { layer: idx, source })?;
            layer.o.forward(&scratch.attended, &mut scratch.delta).map_err(product)?;
            scratch.add_delta(layer.post_attn_norm.as_deref(), config);
            scratch.mlp(layer, config).map_err(product)?;
        }
        let head = weights.head.as_ref().unwrap_or(&weights.embedding);
        scratch.logits(input.logit_rows, &weights.norm, head, config).map_err(product)
    }

    /// Checks the arrays against each other and the model; returns the tokens as row numbers of the
    /// embedding.
    fn check(&self, input: &ModelInput<'_>) -> Result<Vec<usize>, ForwardError> {
        let ModelInput { tokens, positions, logit_rows } = *input;
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

impl LanguageModel for Decoder {
    fn layers(&self) -> &[attn_metadata::Layer] {
        &self.attention
    }

    fn vocab_size(&self) -> usize {
        self.config.vocab_size
    }

    fn max_len(&self) -> usize {
        self.config.context_length
    }

    fn forward(&mut self, input: ModelInput<'_>, attention: &mut dyn LayerAttention) -> Result<Logits, ForwardError> {
        let rows = self.check(&input)?;
        let data = self.run(&rows, &input, attention)?;
        Ok(Logits::new(data, self.config.vocab_size))
    }
}

/// The attention of one layer.
fn attention_layer(config: &ModelConfig, idx: usize) -> Result<attn_metadata::Layer, LayerError> {
    // Sizes that no table could hold saturate, and are refused where tables are made.
    let narrow = |size: usize| u32::try_from(size).unwrap_or(u32::MAX);
    let heads = HeadShape::new(narrow(config.num_qo_heads), narrow(config.num_kv_heads), narrow(config.head_dim));
    attn_metadata::Layer::new(LayerParams {
        sm_scale: config.sm_scale,
        window_left: config.window_of(idx).map(|window| narrow(window.num_tokens - 1)),
        softcap: config.softcap,
        ..LayerParams::causal(heads)
    })
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
        scale(&mut self.hidden, config.embedding_scale);
        Ok(())
    }

    /// Norms, projections and RoPE: fills `q`, `k` and `v`.
    fn attention_inputs(
        &mut self,
        layer: &Layer,
        config: &ModelConfig,
        window: Option<&WindowConfig>,
    ) -> candle_core::Result<()> {
        rms_norm(&self.hidden, &layer.attn_norm, config.rms_epsilon, &mut self.normed);
        layer.q.forward(&self.normed, &mut self.q)?;
        layer.k.forward(&self.normed, &mut self.k)?;
        layer.v.forward(&self.normed, &mut self.v)?;
        if let Some(norm) = &layer.q_norm {
            rms_norm_in_place(&mut self.q, norm, config.rms_epsilon);
        }
        if let Some(norm) = &layer.k_norm {
            rms_norm_in_place(&mut self.k, norm, config.rms_epsilon);
        }
        let (table, rope) = match window {
            Some(window) => (&self.window_rope, &window.rope),
            None => (&self.rope, &config.rope),
        };
        table.rotate(&mut self.q, config.num_qo_heads, config.head_dim, rope);
        table.rotate(&mut self.k, config.num_kv_heads, config.head_dim, rope);
        Ok(())
    }

    /// The gated MLP, added to the residual stream.
    fn mlp(&mut self, layer: &Layer, config: &ModelConfig) -> candle_core::Result<()> {
        rms_norm(&self.hidden, &layer.mlp_norm, config.rms_epsilon, &mut self.normed);
        layer.gate.forward(&self.normed, &mut self.gate)?;
        layer.up.forward(&self.normed, &mut self.up)?;
        activate_mul(config.activation, &mut self.gate, &self.up);
        layer.down.forward(&self.gate, &mut self.delta)?;
        self.add_delta(layer.post_mlp_norm.as_deref(), config);
        Ok(())
    }

    /// Adds what a block gave to the residual stream, normed where there is a norm for it.
    fn add_delta(&mut self, norm: Option<&[f32]>, config: &ModelConfig) {
        if let Some(norm) = norm {
            rms_norm_in_place(&mut self.delta, norm, config.rms_epsilon);
        }
        add(&mut self.hidden, &self.delta);
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
        if let Some(cap) = config.logit_softcap {
            softcap(&mut logits, cap);
        }
        Ok(logits)
    }
}

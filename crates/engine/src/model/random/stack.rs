//! What random models have in common: embedded tokens, layers that each add to a stream, a head over the vocabulary.

use std::fmt;

use attn_metadata::{Layer, RunError};

use super::VOCAB_SIZE;
use super::matrix::{Matrix, Mlp, Noise, add, check, rms_norm};
use crate::lm::{ForwardError, LanguageModel, LayerAttention, Logits, ModelInput};

/// Elements of a token in the stream.
pub(super) const HIDDEN: usize = 64;
/// Elements inside an MLP.
pub(super) const MLP: usize = 96;
const MAX_LEN: usize = 1 << 20;

/// The weights of a layer.
pub(super) trait Block: fmt::Debug {
    /// What attention adds to the stream: `[tokens, HIDDEN]`, as `hidden` is.
    fn attend(
        &self,
        layer: usize,
        hidden: &[f32],
        positions: &[u32],
        attention: &mut dyn LayerAttention,
    ) -> Result<Vec<f32>, RunError>;

    /// What comes behind attention.
    fn mlp(&self) -> &Mlp;
}

/// A model of such layers.
#[derive(Debug)]
pub(super) struct Stack<B> {
    layers: Vec<Layer>,
    embedding: Matrix,
    blocks: Vec<B>,
    norm: Vec<f32>,
    head: Matrix,
}

impl<B> Stack<B> {
    /// The model of a layer and a block each; the head is drawn last.
    pub(super) fn new(noise: &mut Noise, embedding: Matrix, layers: Vec<Layer>, blocks: Vec<B>) -> Self {
        let head = noise.matrix(VOCAB_SIZE, HIDDEN);
        Self { layers, embedding, blocks, norm: noise.norm(HIDDEN), head }
    }
}

impl<B: Block> LanguageModel for Stack<B> {
    fn layers(&self) -> &[Layer] {
        &self.layers
    }

    fn vocab_size(&self) -> usize {
        VOCAB_SIZE
    }

    fn max_len(&self) -> usize {
        MAX_LEN
    }

    fn forward(&mut self, input: ModelInput<'_>, attention: &mut dyn LayerAttention) -> Result<Logits, ForwardError> {
        check(&input, VOCAB_SIZE, MAX_LEN)?;
        let mut hidden: Vec<f32> =
            input.tokens.iter().flat_map(|&token| self.embedding.row(token as usize).to_vec()).collect();
        for (layer, block) in self.blocks.iter().enumerate() {
            let attended = block.attend(layer, &hidden, input.positions, attention);
            add(&mut hidden, &attended.map_err(|source| ForwardError::Attention { layer, source })?);
            let delta = block.mlp().delta(&hidden);
            add(&mut hidden, &delta);
        }
        let row = |&row: &usize| hidden[row * HIDDEN..(row + 1) * HIDDEN].to_vec();
        let picked: Vec<f32> = input.logit_rows.iter().flat_map(row).collect();
        Ok(Logits::new(self.head.product(&rms_norm(&picked, &self.norm)), VOCAB_SIZE))
    }
}

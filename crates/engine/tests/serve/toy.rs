//! A small random-weight model with real attention: two layers, positions in the embedding, logits that spread.

#![allow(clippy::unwrap_used, clippy::cast_precision_loss)]

use attn_metadata::{HeadShape, Layer, LayerParams};
use engine::lm::{AttentionInput, AttentionOutput, ForwardError, LanguageModel, LayerAttention, Logits, ModelInput};

const HIDDEN: usize = 32;
const HEADS: HeadShape = HeadShape::new(4, 2, 8);
pub(crate) const VOCAB: usize = 61;
pub(crate) const MAX_LEN: usize = 2048;

pub(crate) struct Toy {
    layers: Vec<Layer>,
    embedding: Vec<f32>,
    /// q, k, v and o of each layer, `[out, HIDDEN]`.
    weights: Vec<[Vec<f32>; 4]>,
    /// Calls of `forward` before one fails, if any does.
    pub(crate) fail_in: Option<usize>,
}

/// Uniform in -1..1, from a counter.
fn noise(seed: &mut u64) -> f32 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    let bits = u16::try_from(*seed >> 48).unwrap();
    f32::from(bits) / 32768.0 - 1.0
}

impl Toy {
    pub(crate) fn new(window_left: Option<u32>) -> Self {
        let mut seed = 7;
        let mut matrix = |rows: usize| (0..rows * HIDDEN).map(|_| noise(&mut seed) * 0.5).collect::<Vec<_>>();
        let layer = |window_left| Layer::new(LayerParams { window_left, ..LayerParams::causal(HEADS) }).unwrap();
        Self {
            layers: vec![layer(None), layer(window_left)],
            embedding: matrix(VOCAB),
            weights: (0..2).map(|_| [matrix(32), matrix(16), matrix(16), matrix(HIDDEN)]).collect(),
            fail_in: None,
        }
    }
}

fn product(x: &[f32], weight: &[f32]) -> Vec<f32> {
    let row = |x: &[f32]| weight.chunks(HIDDEN).map(|w| w.iter().zip(x).map(|(a, b)| a * b).sum::<f32>()).collect();
    x.chunks(HIDDEN).flat_map(|x| -> Vec<f32> { row(x) }).collect()
}

impl LanguageModel for Toy {
    fn layers(&self) -> &[Layer] {
        &self.layers
    }

    fn vocab_size(&self) -> usize {
        VOCAB
    }

    fn max_len(&self) -> usize {
        MAX_LEN
    }

    fn forward(&mut self, input: ModelInput<'_>, attention: &mut dyn LayerAttention) -> Result<Logits, ForwardError> {
        if let Some(left) = &mut self.fail_in {
            match left.checked_sub(1) {
                Some(fewer) => *left = fewer,
                None => return Err(ForwardError::Product("told to fail".into())),
            }
        }
        let mut hidden = Vec::new();
        for (&token, &position) in input.tokens.iter().zip(input.positions) {
            let row = &self.embedding[token as usize * HIDDEN..][..HIDDEN];
            let angle = |i: usize| f32::from(u16::try_from(position).unwrap()) * (0.3 + 0.17 * i as f32);
            hidden.extend(row.iter().enumerate().map(|(i, x)| x + 0.4 * angle(i).sin()));
        }
        for (layer, [q, k, v, o]) in self.weights.iter().enumerate() {
            let (q, k, v) = (product(&hidden, q), product(&hidden, k), product(&hidden, v));
            let mut out = vec![f32::NAN; q.len()];
            let attended =
                attention.attend(layer, &AttentionInput::plain(&q, &k, &v), AttentionOutput::plain(&mut out));
            attended.map_err(|source| ForwardError::Attention { layer, source })?;
            hidden.iter_mut().zip(product(&out, o)).for_each(|(h, d)| *h += d);
        }
        let picked: Vec<f32> =
            input.logit_rows.iter().flat_map(|&row| hidden[row * HIDDEN..][..HIDDEN].to_vec()).collect();
        Ok(Logits::new(product(&picked, &self.embedding), VOCAB))
    }
}

//! A small model of DeepSeek's shape: a dense layer, then five latent ones, random weights.
//!
//! Queries of latent layers go through a narrow, normed vector; a token's row is a normed latent part and a part that
//! positions turn, once for all heads.

use std::ops::Range;

use attn_metadata::{HeadShape, Layer, LayerParams, RunError};
use attn_mla::{MlaFamily, MlaWeights, MlaWidths, Scale};

use super::matrix::{Matrix, Mlp, Noise, rms_norm, rotate};
use super::stack::{self, HIDDEN, MLP, Stack};
use super::{RandomModelError, VOCAB_SIZE};
use crate::lm::{AttentionInput, AttentionOutput, LayerAttention, Rows};

const NUM_HEADS: u32 = 8;
/// KV heads and width of the dense layer.
const NUM_KV_HEADS: u32 = 2;
const HEAD_DIM: u32 = 16;
const NUM_LATENT_LAYERS: usize = 5;
/// Width of the vector that queries are made from.
const QUERY_RANK: usize = 24;
const LATENT: u32 = 32;
const ROPE: u32 = 8;
const NOPE: u32 = 16;
const VALUE: u32 = 12;

/// The weights of a layer.
#[derive(Debug)]
pub(super) struct Block {
    norm: Vec<f32>,
    attention: Attention,
    out: Matrix,
    mlp: Mlp,
}

/// What makes queries, keys and values.
#[derive(Debug)]
enum Attention {
    Dense { q: Matrix, k: Matrix, v: Matrix },
    Latent(Latent),
}

/// The projections before latent attention; the one behind the rows is the layer's own.
#[derive(Debug)]
struct Latent {
    q_down: Matrix,
    q_norm: Vec<f32>,
    q_up: Matrix,
    kv_down: Matrix,
    kv_norm: Vec<f32>,
}

/// A model with the weights of a seed.
///
/// # Errors
/// [`RandomModelError`] where its layers are refused.
pub(super) fn model(seed: u64) -> Result<Stack<Block>, RandomModelError> {
    let widths = MlaWidths::new(LATENT, ROPE, NOPE, VALUE)?;
    let mut noise = Noise::new(seed);
    let embedding = noise.matrix(VOCAB_SIZE, HIDDEN);
    let heads = HeadShape::new(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM);
    let mut layers = vec![Layer::new(LayerParams::causal(heads))?];
    let mut blocks = vec![Block::dense(&mut noise)];
    for _ in 0..NUM_LATENT_LAYERS {
        let kv_up = noise.matrix((NUM_HEADS * widths.up()) as usize, LATENT as usize);
        let family = MlaFamily::new(MlaWeights::new(widths, NUM_HEADS, kv_up.elements())?);
        layers.push(Layer::new(family.layer_params(Scale::of(widths)))?);
        blocks.push(Block::latent(&mut noise, widths));
    }
    Ok(Stack::new(&mut noise, embedding, layers, blocks))
}

impl Block {
    fn new(noise: &mut Noise, attention: Attention, out_width: u32) -> Self {
        Self {
            norm: noise.norm(HIDDEN),
            attention,
            out: noise.matrix(HIDDEN, out_width as usize),
            mlp: Mlp::new(noise, HIDDEN, MLP),
        }
    }

    fn dense(noise: &mut Noise) -> Self {
        let mut heads = |count: u32| noise.matrix((count * HEAD_DIM) as usize, HIDDEN);
        let attention = Attention::Dense { q: heads(NUM_HEADS), k: heads(NUM_KV_HEADS), v: heads(NUM_KV_HEADS) };
        Self::new(noise, attention, NUM_HEADS * HEAD_DIM)
    }

    fn latent(noise: &mut Noise, widths: MlaWidths) -> Self {
        let latent = Latent {
            q_down: noise.matrix(QUERY_RANK, HIDDEN),
            q_norm: noise.norm(QUERY_RANK),
            q_up: noise.matrix((NUM_HEADS * widths.query()) as usize, QUERY_RANK),
            kv_down: noise.matrix(widths.row() as usize, HIDDEN),
            kv_norm: noise.norm(LATENT as usize),
        };
        Self::new(noise, Attention::Latent(latent), NUM_HEADS * widths.value())
    }

    /// Elements of a token's attention output.
    const fn out_width(&self) -> usize {
        let dim = match self.attention {
            Attention::Dense { .. } => HEAD_DIM,
            Attention::Latent(_) => VALUE,
        };
        (NUM_HEADS * dim) as usize
    }
}

impl stack::Block for Block {
    fn attend(
        &self,
        layer: usize,
        hidden: &[f32],
        positions: &[u32],
        attention: &mut dyn LayerAttention,
    ) -> Result<Vec<f32>, RunError> {
        let x = rms_norm(hidden, &self.norm);
        let (q, k, v) = self.attention.project(&x, positions);
        let mut out = vec![0.0; positions.len() * self.out_width()];
        let rows = Rows { q: &q, k: &k, v: v.as_deref() };
        attention.attend(layer, &AttentionInput { rows, side: None }, AttentionOutput::plain(&mut out))?;
        Ok(self.out.product(&out))
    }

    fn mlp(&self) -> &Mlp {
        &self.mlp
    }
}

impl Attention {
    /// Queries, keys and, of the dense layer, values.
    fn project(&self, x: &[f32], positions: &[u32]) -> (Vec<f32>, Vec<f32>, Option<Vec<f32>>) {
        match self {
            Self::Dense { q, k, v } => {
                let dim = HEAD_DIM as usize;
                (
                    turned(q.product(x), positions, dim, 0..dim),
                    turned(k.product(x), positions, dim, 0..dim),
                    Some(v.product(x)),
                )
            }
            Self::Latent(latent) => {
                let (q, rows) = latent.project(x, positions);
                (q, rows, None)
            }
        }
    }
}

impl Latent {
    /// Queries `[tokens, heads, nope + rope]` and rows `[tokens, latent + rope]`.
    fn project(&self, x: &[f32], positions: &[u32]) -> (Vec<f32>, Vec<f32>) {
        let (latent, row, query) = (LATENT as usize, (LATENT + ROPE) as usize, (NOPE + ROPE) as usize);
        let q = self.q_up.product(&rms_norm(&self.q_down.product(x), &self.q_norm));
        let mut rows = self.kv_down.product(x);
        for row in rows.chunks_exact_mut(row) {
            let normed = rms_norm(&row[..latent], &self.kv_norm);
            row[..latent].copy_from_slice(&normed);
        }
        (turned(q, positions, query, NOPE as usize..query), turned(rows, positions, row, latent..row))
    }
}

/// Heads of which some columns are turned by their positions.
fn turned(mut heads: Vec<f32>, positions: &[u32], dim: usize, columns: Range<usize>) -> Vec<f32> {
    rotate(&mut heads, positions, dim, &columns);
    heads
}

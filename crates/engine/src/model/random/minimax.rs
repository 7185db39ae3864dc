//! A small model of MiniMax M3's shape: three dense layers, then five block-sparse ones, random weights.
//!
//! The sparse layers differ: one has index values, so that the index branch has an output that is added; the others have
//! not. Queries and keys, those of the index too, are normed a head at a time and partly rotated.

use attn_metadata::{HeadShape, Layer, LayerParams, RunError};
use attn_sparse::{LayerKind, SparseConfig, SparseFamily, SparseParams};
use serde_json::json;

use super::matrix::{Matrix, Mlp, Noise, add, rms_norm, rotate};
use super::stack::{self, HIDDEN, MLP, Stack};
use super::{RandomModelError, VOCAB_SIZE};
use crate::lm::{AttentionInput, AttentionOutput, LayerAttention, Rows};

const NUM_QO_HEADS: u32 = 8;
const NUM_KV_HEADS: u32 = 2;
const HEAD_DIM: u32 = 16;
/// Elements of a head that positions turn.
const ROTATED: usize = 8;

/// The weights of a layer.
#[derive(Debug)]
pub(super) struct Block {
    attention_norm: Vec<f32>,
    q: Branch,
    k: Branch,
    v: Matrix,
    out: Matrix,
    index: Option<IndexBlock>,
    mlp: Mlp,
}

/// The weights of an index branch.
#[derive(Debug)]
struct IndexBlock {
    q: Branch,
    k: Branch,
    /// Values and the projection of the output, where there are index values.
    value: Option<(Matrix, Matrix)>,
}

/// A projection to heads that are normed and rotated.
#[derive(Debug)]
struct Branch {
    weight: Matrix,
    norm: Vec<f32>,
}

impl Branch {
    fn new(noise: &mut Noise, heads: u32, dim: u32) -> Self {
        let dim = dim as usize;
        Self { weight: noise.matrix(heads as usize * dim, HIDDEN), norm: noise.norm(dim) }
    }

    fn project(&self, hidden: &[f32], positions: &[u32]) -> Vec<f32> {
        let mut heads = rms_norm(&self.weight.product(hidden), &self.norm);
        rotate(&mut heads, positions, self.norm.len(), &(0..ROTATED));
        heads
    }
}

/// The attention settings, as a configuration file has them.
fn config() -> Result<SparseConfig, attn_sparse::ConfigError> {
    SparseConfig::from_json(&json!({ "sparse_attention_config": {
        "sparse_attention_freq": [0, 0, 0, 1, 1, 1, 1, 1],
        "sparse_disable_index_value": [0, 0, 0, 1, 0, 1, 1, 1],
        "sparse_index_dim": 16,
        "sparse_num_index_heads": 4,
        "sparse_block_size": 64,
        "sparse_topk_blocks": 3,
        "sparse_init_block": 0,
        "sparse_local_block": 1,
    }}))
}

/// A model with the weights of a seed.
///
/// # Errors
/// [`RandomModelError`] where its layers are refused.
pub(super) fn model(seed: u64) -> Result<Stack<Block>, RandomModelError> {
    let config = config()?;
    let heads = HeadShape::new(NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM);
    let mut noise = Noise::new(seed);
    let embedding = noise.matrix(VOCAB_SIZE, HIDDEN);
    let (mut layers, mut blocks) = (Vec::new(), Vec::new());
    for kind in &config.layers {
        layers.push(match kind {
            LayerKind::Dense => Layer::new(LayerParams::causal(heads))?,
            LayerKind::Sparse { has_index_value } => {
                let params = SparseParams {
                    score: config.score,
                    has_index_value: *has_index_value,
                    ..SparseParams::new(config.blocks, config.num_index_heads, config.index_dim)
                };
                SparseFamily::new(params, &heads)?.layer(heads)?
            }
        });
        blocks.push(Block::new(&mut noise, &config, *kind));
    }
    Ok(Stack::new(&mut noise, embedding, layers, blocks))
}

impl Block {
    fn new(noise: &mut Noise, config: &SparseConfig, kind: LayerKind) -> Self {
        let width = (NUM_QO_HEADS * HEAD_DIM) as usize;
        let index_dim = config.index_dim as usize;
        let index = match kind {
            LayerKind::Dense => None,
            LayerKind::Sparse { has_index_value } => Some(IndexBlock {
                q: Branch::new(noise, config.num_index_heads, config.index_dim),
                k: Branch::new(noise, 1, config.index_dim),
                value: has_index_value.then(|| {
                    let out_width = config.num_index_heads as usize * index_dim;
                    (noise.matrix(index_dim, HIDDEN), noise.matrix(HIDDEN, out_width))
                }),
            }),
        };
        Self {
            attention_norm: noise.norm(HIDDEN),
            q: Branch::new(noise, NUM_QO_HEADS, HEAD_DIM),
            k: Branch::new(noise, NUM_KV_HEADS, HEAD_DIM),
            v: noise.matrix((NUM_KV_HEADS * HEAD_DIM) as usize, HIDDEN),
            out: noise.matrix(HIDDEN, width),
            index,
            mlp: Mlp::new(noise, HIDDEN, MLP),
        }
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
        let x = rms_norm(hidden, &self.attention_norm);
        let (q, k, v) = (self.q.project(&x, positions), self.k.project(&x, positions), self.v.product(&x));
        let mut out = vec![0.0; q.len()];
        let rows = Rows { q: &q, k: &k, v: Some(&v) };
        let Some(index) = &self.index else {
            attention.attend(layer, &AttentionInput { rows, side: None }, AttentionOutput::plain(&mut out))?;
            return Ok(self.out.product(&out));
        };
        let (index_q, index_k) = (index.q.project(&x, positions), index.k.project(&x, positions));
        let index_v = index.value.as_ref().map(|(v, _)| v.product(&x));
        let mut index_out = index_v.as_ref().map(|_| vec![0.0; index_q.len()]);
        let side = Some(Rows { q: &index_q, k: &index_k, v: index_v.as_deref() });
        let output = AttentionOutput { out: &mut out, side: index_out.as_deref_mut() };
        attention.attend(layer, &AttentionInput { rows, side }, output)?;
        let mut delta = self.out.product(&out);
        if let (Some((_, projection)), Some(index_out)) = (&index.value, &index_out) {
            add(&mut delta, &projection.product(index_out));
        }
        Ok(delta)
    }

    fn mlp(&self) -> &Mlp {
        &self.mlp
    }
}

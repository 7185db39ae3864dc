//! What the step loop asks of a model, and what it gives it: attention as a callback.

use attn_metadata::{Layer, RunError};

/// The tokens of a step, packed.
#[derive(Clone, Copy, Debug)]
pub struct ModelInput<'a> {
    /// Token ids, `[num_tokens]`.
    pub tokens: &'a [u32],
    /// Position of each token in its sequence, `[num_tokens]`.
    pub positions: &'a [u32],
    /// Rows whose logits are wanted, ascending.
    pub logit_rows: &'a [usize],
}

/// Attention of one layer over the tokens of a step, whatever holds the KV.
pub trait LayerAttention {
    /// Appends `k` and `v` and attends.
    ///
    /// `q`: `[num_tokens, num_qo_heads, head_dim_qk]`, `k`: `[num_tokens, num_kv_heads, head_dim_qk]`, `v`:
    /// `[num_tokens, num_kv_heads, head_dim_vo]`, `out`: `[num_tokens, num_qo_heads, head_dim_vo]`; packed, positions
    /// already applied to q and k.
    ///
    /// # Errors
    /// What the backend refuses.
    fn attend(&mut self, layer: usize, q: &[f32], k: &[f32], v: &[f32], out: &mut [f32]) -> Result<(), RunError>;
}

/// A forward pass that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// Attention failed.
    #[error(transparent)]
    Attention(#[from] RunError),
    /// The model's own computation failed.
    #[error("the model's forward pass failed")]
    Forward(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// A decoder-only language model in f32, without KV of its own.
pub trait LanguageModel {
    /// Its attention layers, in order.
    fn layers(&self) -> &[Layer];

    /// Number of token ids.
    fn vocab_size(&self) -> usize;

    /// Longest sequence that it was trained for, in tokens.
    fn max_len(&self) -> usize;

    /// Runs all layers over the tokens of a step; writes `logits` `[logit_rows.len(), vocab_size]`.
    ///
    /// # Errors
    /// [`ModelError`]; the KV of this step's tokens may have been written, `logits` are of no use.
    fn forward(
        &mut self,
        input: ModelInput<'_>,
        attention: &mut dyn LayerAttention,
        logits: &mut Vec<f32>,
    ) -> Result<(), ModelError>;
}

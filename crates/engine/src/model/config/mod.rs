//! A model's dimensions and constants, read from GGUF metadata and checked.
//!
//! Everything that the runner computes with comes from here; it looks at metadata nowhere else.
//! What a file asks for and the runner does not do (experts, unknown RoPE scaling) is an error
//! here, so that it cannot become wrong logits later.

mod architecture;
mod keys;
#[cfg(test)]
mod tests;

use super::gguf::{GgufError, Metadata};
use architecture::Architecture;
pub use architecture::SUPPORTED_ARCHITECTURES;
use keys::Keys;

/// Why a model's metadata do not describe a model that can be run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A key is missing or has the wrong type or range.
    #[error(transparent)]
    Metadata(#[from] GgufError),
    /// Another architecture.
    #[error("architecture {architecture:?} is not supported; supported: {}", SUPPORTED_ARCHITECTURES.join(", "))]
    Architecture {
        /// The architecture that the file names.
        architecture: String,
    },
    /// The architecture is known, a feature of this model is not.
    #[error("the model uses {feature}, which is not supported")]
    Feature {
        /// The feature in words, with its value.
        feature: String,
    },
    /// Two values contradict each other, or one is impossible.
    #[error("{key} is {value}, expected {expected}")]
    Value {
        /// The metadata key.
        key: String,
        /// The value found.
        value: String,
        /// The rule that is broken.
        expected: String,
    },
}

/// Which elements of a head are turned together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopePairs {
    /// `2i` and `2i + 1`.
    Neighbours,
    /// `i` and `i + num_dims / 2`.
    Halves,
}

/// Rotary position embedding.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub freq_base: f32,
    /// How many of each head's leading elements are rotated; even, at most `head_dim`.
    pub num_dims: usize,
    /// Positions are divided by this (1 without linear scaling).
    pub linear_factor: f32,
    /// Which elements are turned together.
    pub pairs: RopePairs,
}

/// Layers that see only the latest tokens, among layers that see all.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct WindowConfig {
    /// Tokens that a query sees, itself included; at least 1.
    pub num_tokens: usize,
    /// Each `period`-th layer has no window; at least 1.
    pub period: usize,
    /// Rotary position embedding of the layers with the window.
    pub rope: RopeConfig,
}

/// What the MLP's gate goes through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// GELU in its tanh form.
    GeluTanh,
}

/// Dimensions and constants of a model. Sizes are in elements.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ModelConfig {
    /// `general.architecture`.
    pub architecture: String,
    /// `general.name`, for people.
    pub name: Option<String>,
    /// Number of layers.
    pub num_layers: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP's inner layer.
    pub intermediate_size: usize,
    /// Query heads.
    pub num_qo_heads: usize,
    /// Key/value heads; divides `num_qo_heads`.
    pub num_kv_heads: usize,
    /// Width of a head of Q, K and V; not always `hidden_size / num_qo_heads`.
    pub head_dim: usize,
    /// Number of token ids.
    pub vocab_size: usize,
    /// Longest sequence that the model was trained for, in tokens.
    pub context_length: usize,
    /// Added to the mean square in RMS norms.
    pub rms_epsilon: f32,
    /// Multiplier of embeddings.
    pub embedding_scale: f32,
    /// Multiplier of q·k.
    pub sm_scale: f32,
    /// `c` in `c·tanh(s/c)` on attention's scores; `None`: off.
    pub softcap: Option<f32>,
    /// The same on the logits.
    pub logit_softcap: Option<f32>,
    /// Rotary position embedding of the layers without a window.
    pub rope: RopeConfig,
    /// Layers with a window; `None`: all layers see everything.
    pub window: Option<WindowConfig>,
    /// What the MLP's gate goes through.
    pub activation: Activation,
    /// Whether each head of Q and K is normed before it is rotated.
    pub has_qk_norms: bool,
    /// Whether what attention and the MLP give is normed before it is added to the residual stream.
    pub has_post_norms: bool,
}

impl ModelConfig {
    /// Reads the configuration out of a file's metadata.
    ///
    /// # Errors
    /// When the architecture or a feature is not supported, or a value is missing or impossible.
    pub fn from_metadata(metadata: &Metadata) -> Result<Self, ConfigError> {
        let architecture = Architecture::named(metadata.string("general.architecture")?)?;
        let keys = Keys { metadata, architecture };
        keys.refuse_unsupported()?;
        let num_layers = keys.positive("block_count")?;
        let num_qo_heads = keys.positive("attention.head_count")?;
        let hidden_size = keys.positive("embedding_length")?;
        let head_dim = keys.head_dim(hidden_size, num_qo_heads)?;
        let rope = keys.rope(head_dim)?;
        let is_scaled_by_stream = architecture.num_layers_scaled_by_stream == Some(num_layers);
        let scaled_width = if is_scaled_by_stream { hidden_size / num_qo_heads } else { head_dim };
        let root = |width: usize| (width as f32).sqrt();
        Ok(Self {
            architecture: architecture.name.to_owned(),
            name: metadata.opt_string("general.name")?.map(str::to_owned),
            num_layers,
            hidden_size,
            intermediate_size: keys.positive("feed_forward_length")?,
            num_qo_heads,
            num_kv_heads: keys.num_kv_heads(num_qo_heads)?,
            head_dim,
            vocab_size: keys.vocab_size()?,
            context_length: keys.positive("context_length")?,
            rms_epsilon: keys.positive_float("attention.layer_norm_rms_epsilon")?,
            embedding_scale: if architecture.scales_embeddings { root(hidden_size) } else { 1.0 },
            sm_scale: keys.opt_positive_float("attention.scale")?.unwrap_or(root(scaled_width).recip()),
            softcap: keys.opt_positive_float("attn_logit_softcapping")?,
            logit_softcap: keys.opt_positive_float("final_logit_softcapping")?,
            rope,
            window: keys.window(rope)?,
            activation: architecture.activation,
            has_qk_norms: architecture.has_qk_norms,
            has_post_norms: architecture.has_post_norms,
        })
    }

    /// The window of a layer, where it has one.
    #[must_use]
    pub fn window_of(&self, layer: usize) -> Option<&WindowConfig> {
        self.window.as_ref().filter(|window| layer % window.period + 1 < window.period)
    }

    /// Width of the query projection of all heads.
    #[must_use]
    pub fn q_width(&self) -> usize {
        self.num_qo_heads * self.head_dim
    }

    /// Width of the key (and of the value) projection of all heads.
    #[must_use]
    pub fn kv_width(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }
}

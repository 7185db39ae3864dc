//! A model's dimensions and constants, read from GGUF metadata and checked.
//!
//! Everything that the runner computes with comes from here; it looks at metadata nowhere else.
//! What a file asks for and the runner does not do (experts, unknown RoPE scaling) is an error
//! here, so that it cannot become wrong logits later.

use super::gguf::{GgufError, Metadata};

/// The architectures that the runner knows, as named in `general.architecture`.
pub const SUPPORTED_ARCHITECTURES: &[&str] = &["llama"];

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
    /// Rotary position embedding.
    pub rope: RopeConfig,
}

impl ModelConfig {
    /// Reads the configuration out of a file's metadata.
    ///
    /// # Errors
    /// When the architecture or a feature is not supported, or a value is missing or impossible.
    pub fn from_metadata(metadata: &Metadata) -> Result<Self, ConfigError> {
        let architecture = metadata.string("general.architecture")?.to_owned();
        if !SUPPORTED_ARCHITECTURES.contains(&architecture.as_str()) {
            return Err(ConfigError::Architecture { architecture });
        }
        let keys = Keys { metadata, architecture: &architecture };
        keys.refuse_unsupported()?;
        let num_qo_heads = keys.positive("attention.head_count")?;
        let hidden_size = keys.positive("embedding_length")?;
        let head_dim = keys.head_dim(hidden_size, num_qo_heads)?;
        let config = Self {
            name: metadata.opt_string("general.name")?.map(str::to_owned),
            num_layers: keys.positive("block_count")?,
            hidden_size,
            intermediate_size: keys.positive("feed_forward_length")?,
            num_qo_heads,
            num_kv_heads: keys.num_kv_heads(num_qo_heads)?,
            head_dim,
            vocab_size: keys.vocab_size()?,
            context_length: keys.positive("context_length")?,
            rms_epsilon: keys.positive_float("attention.layer_norm_rms_epsilon", None)?,
            rope: keys.rope(head_dim)?,
            architecture,
        };
        Ok(config)
    }

    /// The multiplier on q·k: `1 / sqrt(head_dim)`.
    #[must_use]
    pub fn sm_scale(&self) -> f32 {
        (self.head_dim as f32).sqrt().recip()
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

/// Metadata keys under the architecture's prefix.
struct Keys<'a> {
    metadata: &'a Metadata,
    architecture: &'a str,
}

impl Keys<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    fn bad(&self, name: &str, value: &impl ToString, expected: impl Into<String>) -> ConfigError {
        ConfigError::Value { key: self.key(name), value: value.to_string(), expected: expected.into() }
    }

    fn positive(&self, name: &str) -> Result<usize, ConfigError> {
        match self.metadata.usize(&self.key(name))? {
            0 => Err(self.bad(name, &0, "at least 1")),
            value => Ok(value),
        }
    }

    fn positive_float(&self, name: &str, default: Option<f32>) -> Result<f32, ConfigError> {
        let value = match (self.metadata.opt_f32(&self.key(name))?, default) {
            (Some(value), _) | (None, Some(value)) => value,
            (None, None) => self.metadata.f32(&self.key(name))?,
        };
        if value > 0.0 { Ok(value) } else { Err(self.bad(name, &value, "more than 0")) }
    }

    fn refuse_unsupported(&self) -> Result<(), ConfigError> {
        let num_experts = self.metadata.opt_usize(&self.key("expert_count"))?.unwrap_or(0);
        if num_experts > 0 {
            return Err(ConfigError::Feature { feature: format!("a mixture of {num_experts} experts") });
        }
        let window = self.metadata.opt_usize(&self.key("attention.sliding_window"))?.unwrap_or(0);
        if window > 0 {
            return Err(ConfigError::Feature { feature: format!("a sliding window of {window} tokens") });
        }
        Ok(())
    }

    fn num_kv_heads(&self, num_qo_heads: usize) -> Result<usize, ConfigError> {
        let name = "attention.head_count_kv";
        let num_kv_heads = self.metadata.opt_usize(&self.key(name))?.unwrap_or(num_qo_heads);
        if num_kv_heads == 0 || !num_qo_heads.is_multiple_of(num_kv_heads) {
            return Err(self.bad(name, &num_kv_heads, format!("a divisor of the {num_qo_heads} query heads")));
        }
        Ok(num_kv_heads)
    }

    fn head_dim(&self, hidden_size: usize, num_qo_heads: usize) -> Result<usize, ConfigError> {
        let key_name = "attention.key_length";
        let key_length = self.metadata.opt_usize(&self.key(key_name))?;
        let value_length = self.metadata.opt_usize(&self.key("attention.value_length"))?;
        let Some(head_dim) = key_length else {
            if !hidden_size.is_multiple_of(num_qo_heads) {
                let expected = format!("a multiple of the {num_qo_heads} heads, or {key_name} beside it");
                return Err(self.bad("embedding_length", &hidden_size, expected));
            }
            return Ok(hidden_size / num_qo_heads);
        };
        if head_dim == 0 {
            return Err(self.bad(key_name, &0, "at least 1"));
        }
        match value_length {
            Some(value) if value != head_dim => {
                Err(ConfigError::Feature { feature: format!("heads of {head_dim} for K and {value} for V") })
            }
            _ => Ok(head_dim),
        }
    }

    /// The token list is the truth; `vocab_size` only has to agree with it.
    fn vocab_size(&self) -> Result<usize, ConfigError> {
        let num_tokens = self.metadata.strings("tokenizer.ggml.tokens")?.len();
        let stated = self.metadata.opt_usize(&self.key("vocab_size"))?.unwrap_or(num_tokens);
        if stated != num_tokens || num_tokens == 0 {
            return Err(self.bad("vocab_size", &stated, format!("the {num_tokens} entries of tokenizer.ggml.tokens")));
        }
        Ok(num_tokens)
    }

    fn rope(&self, head_dim: usize) -> Result<RopeConfig, ConfigError> {
        let name = "rope.dimension_count";
        let num_dims = self.metadata.opt_usize(&self.key(name))?.unwrap_or(head_dim);
        if num_dims == 0 || !num_dims.is_multiple_of(2) || num_dims > head_dim {
            return Err(self.bad(name, &num_dims, format!("an even number from 2 to the head size {head_dim}")));
        }
        let linear_factor = match self.metadata.opt_string(&self.key("rope.scaling.type"))? {
            None | Some("none") => 1.0,
            Some("linear") => self.positive_float("rope.scaling.factor", None)?,
            Some(other) => return Err(ConfigError::Feature { feature: format!("RoPE scaling of type {other:?}") }),
        };
        let freq_base = self.positive_float("rope.freq_base", Some(10_000.0))?;
        Ok(RopeConfig { freq_base, num_dims, linear_factor })
    }
}

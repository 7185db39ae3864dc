//! Metadata keys under an architecture's prefix, each read with the rule that its value must keep.

use super::super::gguf::Metadata;
use super::architecture::{Architecture, WindowDefaults};
use super::{ConfigError, RopeConfig, WindowConfig};

pub(super) struct Keys<'a> {
    pub(super) metadata: &'a Metadata,
    pub(super) architecture: &'static Architecture,
}

impl Keys<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture.name)
    }

    fn bad(&self, name: &str, value: &impl ToString, expected: impl Into<String>) -> ConfigError {
        ConfigError::Value { key: self.key(name), value: value.to_string(), expected: expected.into() }
    }

    pub(super) fn positive(&self, name: &str) -> Result<usize, ConfigError> {
        match self.metadata.usize(&self.key(name))? {
            0 => Err(self.bad(name, &0, "at least 1")),
            value => Ok(value),
        }
    }

    pub(super) fn positive_float(&self, name: &str) -> Result<f32, ConfigError> {
        let value = self.metadata.f32(&self.key(name))?;
        if value > 0.0 { Ok(value) } else { Err(self.bad(name, &value, "more than 0")) }
    }

    pub(super) fn opt_positive_float(&self, name: &str) -> Result<Option<f32>, ConfigError> {
        let is_there = self.metadata.get(&self.key(name)).is_some();
        is_there.then(|| self.positive_float(name)).transpose()
    }

    pub(super) fn refuse_unsupported(&self) -> Result<(), ConfigError> {
        let num_experts = self.metadata.opt_usize(&self.key("expert_count"))?.unwrap_or(0);
        if num_experts > 0 {
            return Err(ConfigError::Feature { feature: format!("a mixture of {num_experts} experts") });
        }
        let window = self.metadata.opt_usize(&self.key("attention.sliding_window"))?.unwrap_or(0);
        if window > 0 && self.architecture.window.is_none() {
            return Err(ConfigError::Feature { feature: format!("a sliding window of {window} tokens") });
        }
        Ok(())
    }

    pub(super) fn num_kv_heads(&self, num_qo_heads: usize) -> Result<usize, ConfigError> {
        let name = "attention.head_count_kv";
        let num_kv_heads = self.metadata.opt_usize(&self.key(name))?.unwrap_or(num_qo_heads);
        if num_kv_heads == 0 || !num_qo_heads.is_multiple_of(num_kv_heads) {
            return Err(self.bad(name, &num_kv_heads, format!("a divisor of the {num_qo_heads} query heads")));
        }
        Ok(num_kv_heads)
    }

    pub(super) fn head_dim(&self, hidden_size: usize, num_qo_heads: usize) -> Result<usize, ConfigError> {
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
    pub(super) fn vocab_size(&self) -> Result<usize, ConfigError> {
        let num_tokens = self.metadata.strings("tokenizer.ggml.tokens")?.len();
        let stated = self.metadata.opt_usize(&self.key("vocab_size"))?.unwrap_or(num_tokens);
        if stated != num_tokens || num_tokens == 0 {
            return Err(self.bad("vocab_size", &stated, format!("the {num_tokens} entries of tokenizer.ggml.tokens")));
        }
        Ok(num_tokens)
    }

    /// Of the layers that see everything.
    pub(super) fn rope(&self, head_dim: usize) -> Result<RopeConfig, ConfigError> {
        let name = "rope.dimension_count";
        let num_dims = self.metadata.opt_usize(&self.key(name))?.unwrap_or(head_dim);
        if num_dims == 0 || !num_dims.is_multiple_of(2) || num_dims > head_dim {
            return Err(self.bad(name, &num_dims, format!("an even number from 2 to the head size {head_dim}")));
        }
        let linear_factor = match self.metadata.opt_string(&self.key("rope.scaling.type"))? {
            None | Some("none") => 1.0,
            Some("linear") => self.positive_float("rope.scaling.factor")?,
            Some(other) => return Err(ConfigError::Feature { feature: format!("RoPE scaling of type {other:?}") }),
        };
        let freq_base = self.opt_positive_float("rope.freq_base")?.unwrap_or(10_000.0);
        Ok(RopeConfig { freq_base, num_dims, linear_factor, pairs: self.architecture.rope_pairs })
    }

    /// The layers with a window; their positions are never stretched, whatever `rope` says of the others'.
    pub(super) fn window(&self, rope: RopeConfig) -> Result<Option<WindowConfig>, ConfigError> {
        let Some(WindowDefaults { period, freq_base }) = self.architecture.window else { return Ok(None) };
        let pattern = "attention.sliding_window_pattern";
        let has_pattern = self.metadata.get(&self.key(pattern)).is_some();
        let freq_base = self.opt_positive_float("rope.freq_base_swa")?.unwrap_or(freq_base);
        Ok(Some(WindowConfig {
            num_tokens: self.positive("attention.sliding_window")?,
            period: if has_pattern { self.positive(pattern)? } else { period },
            rope: RopeConfig { freq_base, linear_factor: 1.0, ..rope },
        }))
    }
}

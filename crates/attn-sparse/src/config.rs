//! Reads a model's sparse-attention settings from its configuration file, in either of the two sets of keys.
//!
//! The first set is an object `sparse_attention_config` with keys `sparse_*`; the second has keys `index_*` beside the
//! model's other settings, and names each layer's kind in `layer_types`. Either may be inside `text_config`.
//! Derived values: a number of forced tokens becomes blocks by rounding up, and local blocks gain one, for the block
//! that the row itself is in. Does not check that the numbers go together: [`SparseParams::check`] does.
//!
//! [`SparseParams::check`]: crate::SparseParams::check

use serde_json::{Map, Value};
use thiserror::Error;

use crate::params::{BlockParams, ScoreType};

/// What one layer of a model does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerKind {
    /// Ordinary attention over every visible key.
    Dense,
    /// Block-sparse attention.
    Sparse {
        /// Whether the index branch has values of its own, and so an output.
        has_index_value: bool,
    },
}

/// A model's sparse-attention settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SparseConfig {
    /// Block size, top-k, forced blocks.
    pub blocks: BlockParams,
    /// How a block's scores become one.
    pub score: ScoreType,
    /// Index heads of the whole model's layer, before it is cut over devices.
    pub num_index_heads: u32,
    /// Elements of an index query and of an index key.
    pub index_dim: u32,
    /// Each layer's kind, in order.
    pub layers: Vec<LayerKind>,
}

/// A configuration that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// Neither set of keys is there.
    #[error("no sparse attention settings: neither an object sparse_attention_config nor keys index_* are there")]
    NoSettings,
    /// A key is missing that has no default.
    #[error("{key} is missing")]
    Missing {
        /// The key, or the two of which one is needed.
        key: &'static str,
    },
    /// A value is not what the key needs.
    #[error("{key} is {got}, {needed} is needed")]
    Value {
        /// The key.
        key: &'static str,
        /// The value, as JSON.
        got: String,
        /// What is accepted.
        needed: &'static str,
    },
    /// Two per-layer lists have different lengths.
    #[error("{key} has {got} entries, {expected} layers are described")]
    LayerCount {
        /// The list.
        key: &'static str,
        /// Layers.
        expected: usize,
        /// Its entries.
        got: usize,
    },
}

impl SparseConfig {
    /// Reads the settings out of a model's configuration.
    ///
    /// # Errors
    /// [`ConfigError`] for the first key that is missing or wrong.
    pub fn from_json(config: &Value) -> Result<Self, ConfigError> {
        let objects = [config.get("text_config"), Some(config)];
        let objects = || objects.iter().flatten().filter_map(|value| value.as_object());
        if let Some(nested) = objects().find_map(|object| object.get("sparse_attention_config")?.as_object()) {
            return from_nested(nested);
        }
        let flat = objects().find(|object| object.keys().any(|key| key.starts_with("index_")));
        flat.map_or(Err(ConfigError::NoSettings), from_flat)
    }
}

impl BlockParams {
    /// Reads block size, top-k and forced blocks out of an object with keys `sparse_*`. `…_block` wins over
    /// `…_tokens`; one of the two is needed.
    ///
    /// # Errors
    /// [`ConfigError`] for the first key that is missing or wrong.
    pub fn from_json(object: &Map<String, Value>) -> Result<Self, ConfigError> {
        let block_size = number(object, "sparse_block_size")?;
        if block_size == 0 {
            return Err(wrong("sparse_block_size", &Value::from(0), "a number of tokens from 1 on"));
        }
        let forced = |blocks, tokens, missing, extra| match (number(object, blocks), number(object, tokens)) {
            (Ok(blocks), _) => Ok(blocks),
            (Err(ConfigError::Missing { .. }), Ok(tokens)) => Ok(tokens.div_ceil(block_size) + extra),
            (Err(ConfigError::Missing { .. }), Err(ConfigError::Missing { .. })) => {
                Err(ConfigError::Missing { key: missing })
            }
            (Err(ConfigError::Missing { .. }), Err(error)) | (Err(error), _) => Err(error),
        };
        Ok(Self {
            block_size,
            topk: number(object, "sparse_topk_blocks")?,
            init_blocks: forced(
                "sparse_init_block",
                "sparse_init_tokens",
                "sparse_init_block or sparse_init_tokens",
                0,
            )?,
            local_blocks: forced(
                "sparse_local_block",
                "sparse_local_tokens",
                "sparse_local_block or sparse_local_tokens",
                1,
            )?,
        })
    }
}

fn from_nested(object: &Map<String, Value>) -> Result<SparseConfig, ConfigError> {
    let is_sparse = flags(object, "sparse_attention_freq")?;
    let without_value = match flags(object, "sparse_disable_index_value") {
        Err(ConfigError::Missing { .. }) => vec![false; is_sparse.len()],
        other => other?,
    };
    if without_value.len() != is_sparse.len() {
        let (expected, got) = (is_sparse.len(), without_value.len());
        return Err(ConfigError::LayerCount { key: "sparse_disable_index_value", expected, got });
    }
    let kind = |(is_sparse, without_value): (bool, bool)| match is_sparse {
        true => LayerKind::Sparse { has_index_value: !without_value },
        false => LayerKind::Dense,
    };
    Ok(SparseConfig {
        blocks: BlockParams::from_json(object)?,
        score: score_type(object, "sparse_score_type")?,
        num_index_heads: number(object, "sparse_num_index_heads")?,
        index_dim: number(object, "sparse_index_dim")?,
        layers: is_sparse.into_iter().zip(without_value).map(kind).collect(),
    })
}

fn from_flat(object: &Map<String, Value>) -> Result<SparseConfig, ConfigError> {
    let optional = |key, default| match number(object, key) {
        Err(ConfigError::Missing { .. }) => Ok(default),
        other => other,
    };
    let key = "layer_types";
    let needed = "a list of \"minimax_m3_sparse\" and \"full_attention\"";
    let types = object.get(key).ok_or(ConfigError::Missing { key })?;
    let kind = |name: &Value| match name.as_str() {
        Some("minimax_m3_sparse") => Ok(LayerKind::Sparse { has_index_value: false }),
        Some("full_attention") => Ok(LayerKind::Dense),
        _ => Err(wrong(key, name, needed)),
    };
    let layers = types.as_array().ok_or_else(|| wrong(key, types, needed))?.iter().map(kind);
    Ok(SparseConfig {
        blocks: BlockParams {
            block_size: number(object, "index_block_size")?,
            topk: number(object, "index_topk_blocks")?,
            init_blocks: optional("index_init_blocks", 0)?,
            local_blocks: optional("index_local_blocks", 1)?,
        },
        score: score_type(object, "index_score_type")?,
        num_index_heads: number(object, "index_n_heads")?,
        index_dim: number(object, "index_head_dim")?,
        layers: layers.collect::<Result<_, _>>()?,
    })
}

fn wrong(key: &'static str, got: &Value, needed: &'static str) -> ConfigError {
    ConfigError::Value { key, got: got.to_string(), needed }
}

fn number(object: &Map<String, Value>, key: &'static str) -> Result<u32, ConfigError> {
    let value = object.get(key).filter(|value| !value.is_null()).ok_or(ConfigError::Missing { key })?;
    let number = value.as_u64().and_then(|number| u32::try_from(number).ok());
    number.ok_or_else(|| wrong(key, value, "a whole number from 0 to 4294967295"))
}

fn flags(object: &Map<String, Value>, key: &'static str) -> Result<Vec<bool>, ConfigError> {
    let value = object.get(key).filter(|value| !value.is_null()).ok_or(ConfigError::Missing { key })?;
    let needed = "a list of numbers, one for each layer";
    let flag = |entry: &Value| entry.as_i64().map(|number| number != 0).ok_or_else(|| wrong(key, entry, needed));
    value.as_array().ok_or_else(|| wrong(key, value, needed))?.iter().map(flag).collect()
}

fn score_type(object: &Map<String, Value>, key: &'static str) -> Result<ScoreType, ConfigError> {
    match object.get(key) {
        None | Some(Value::Null) => Ok(ScoreType::Max),
        Some(value) => {
            value.as_str().and_then(|name| name.parse().ok()).ok_or_else(|| wrong(key, value, "\"max\" or \"lse\""))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn nested() -> Value {
        json!({"text_config": {"sparse_attention_config": {
            "sparse_attention_freq": [0, 1, 1], "sparse_disable_index_value": [0, 1, 0],
            "sparse_index_dim": 128, "sparse_num_index_heads": 4, "sparse_block_size": 128,
            "sparse_topk_blocks": 16, "sparse_init_block": 0, "sparse_local_block": 1,
            "use_sparse_attention": true
        }}})
    }

    fn with(edit: impl FnOnce(&mut Map<String, Value>)) -> Result<SparseConfig, ConfigError> {
        let mut config = nested();
        edit(config["text_config"]["sparse_attention_config"].as_object_mut().expect("an object"));
        SparseConfig::from_json(&config)
    }

    #[test]
    fn both_sets_of_keys_are_read() {
        let blocks = BlockParams { block_size: 128, topk: 16, init_blocks: 0, local_blocks: 1 };
        let sparse = |has_index_value| LayerKind::Sparse { has_index_value };
        let mut expected = SparseConfig {
            blocks,
            score: ScoreType::Max,
            num_index_heads: 4,
            index_dim: 128,
            layers: vec![LayerKind::Dense, sparse(false), sparse(true)],
        };
        assert_eq!(SparseConfig::from_json(&nested()), Ok(expected.clone()));
        let inner = nested()["text_config"].take();
        assert_eq!(SparseConfig::from_json(&inner), Ok(expected.clone()), "at the top level");

        expected.layers[2] = sparse(false);
        let flat = json!({"index_head_dim": 128, "index_n_heads": 4, "index_block_size": 128, "index_topk_blocks": 16,
            "index_local_blocks": 1, "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]});
        assert_eq!(SparseConfig::from_json(&flat), Ok(expected.clone()));
        assert_eq!(SparseConfig::from_json(&json!({ "text_config": flat })), Ok(expected));
    }

    #[test]
    fn defaults_are_filled_in() {
        let config = with(|o| {
            o.remove("sparse_disable_index_value");
            o.insert("sparse_score_type".into(), "lse".into());
        });
        let config = config.expect("valid");
        assert_eq!(config.layers[1], LayerKind::Sparse { has_index_value: true });
        assert_eq!(config.score, ScoreType::Lse);
    }

    #[test]
    fn each_mistake_is_named() {
        let text = |result: Result<SparseConfig, ConfigError>| result.unwrap_err().to_string();
        assert_eq!(SparseConfig::from_json(&json!({})), Err(ConfigError::NoSettings));
        for key in ["sparse_attention_freq", "sparse_index_dim", "sparse_num_index_heads", "sparse_block_size"] {
            assert_eq!(text(with(|o| drop(o.remove(key)))), format!("{key} is missing"));
        }
        let missing = |key| text(with(|o| drop(o.remove(key))));
        assert_eq!(missing("sparse_topk_blocks"), "sparse_topk_blocks is missing");
        assert_eq!(missing("sparse_init_block"), "sparse_init_block or sparse_init_tokens is missing");
        assert_eq!(missing("sparse_local_block"), "sparse_local_block or sparse_local_tokens is missing");
        let put = |key: &str, value: Value| text(with(|o| drop(o.insert(key.into(), value))));
        assert_eq!(
            put("sparse_score_type", "mean".into()),
            "sparse_score_type is \"mean\", \"max\" or \"lse\" is needed"
        );
        let needed = "a whole number from 0 to 4294967295 is needed";
        assert_eq!(put("sparse_topk_blocks", (-1).into()), format!("sparse_topk_blocks is -1, {needed}"));
        assert_eq!(put("sparse_init_block", "a".into()), format!("sparse_init_block is \"a\", {needed}"));
        assert_eq!(
            put("sparse_block_size", 0.into()),
            "sparse_block_size is 0, a number of tokens from 1 on is needed"
        );
        assert_eq!(
            put("sparse_disable_index_value", json!([0])),
            "sparse_disable_index_value has 1 entries, 3 layers are described"
        );
        assert_eq!(
            put("sparse_attention_freq", json!(["x"])),
            "sparse_attention_freq is \"x\", a list of numbers, one for each layer is needed"
        );
    }
}

//! The parameters of a replay file: the JSON under its metadata key `attn`.

use serde_json::{Map, Value, json};

use super::error::FileError;

/// The metadata key that holds the parameters.
pub const ATTN_KEY: &str = "attn";

/// The kinds of attention that can be replayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Keys and values, `k_cache` and `v_cache`.
    Mha,
    /// A latent cache, `k_cache` alone; queries are absorbed already. Values are the first `head_dim_vo` columns.
    Mla,
}

impl Kind {
    const ALL: [Self; 2] = [Self::Mha, Self::Mla];
    const EXPECTED: &str = "\"mha\" or \"mla\"";

    /// Its name in the JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mha => "mha",
            Self::Mla => "mla",
        }
    }
}

/// The parameters of one attention problem: `{kind, sm_scale, causal, window_left, softcap, k_scale, v_scale,
/// head_dim_vo}`. All but the first three may be null or missing (with kind `mla` the last one too is needed); unknown
/// keys are ignored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Params {
    /// What the caches hold.
    pub kind: Kind,
    /// Multiplier of q·k.
    pub sm_scale: f32,
    /// Whether the causal mask applies.
    pub causal: bool,
    /// Earlier tokens that a query sees besides itself; null: all.
    pub window_left: Option<u32>,
    /// Softcap of the scores; null or 0: none.
    pub softcap: Option<f32>,
    /// Scale of stored keys, for FP8 caches.
    pub k_scale: Option<f32>,
    /// Scale of stored values, for FP8 caches.
    pub v_scale: Option<f32>,
    /// Width of values and outputs; null: as `v_cache` has it.
    pub head_dim_vo: Option<u32>,
}

impl Params {
    /// Reads the JSON.
    ///
    /// # Errors
    /// [`FileError`] naming the key.
    pub fn parse(text: &str) -> Result<Self, FileError> {
        let value: Value = serde_json::from_str(text).map_err(FileError::ParamsJson)?;
        let Value::Object(keys) = value else { return Err(FileError::ParamsNotObject) };
        Ok(Self {
            kind: kind(&keys)?,
            sm_scale: number(&keys, "sm_scale")?.ok_or(FileError::MissingKey {
                key: "sm_scale",
                expected: "the multiplier of q·k, a number above 0",
            })?,
            causal: causal(&keys)?,
            window_left: count(&keys, "window_left", "null or a number of tokens from 0 to 4294967295")?,
            softcap: number(&keys, "softcap")?.filter(|&cap| cap != 0.0),
            k_scale: number(&keys, "k_scale")?,
            v_scale: number(&keys, "v_scale")?,
            head_dim_vo: count(&keys, "head_dim_vo", "null or the width of v_cache")?,
        })
    }

    /// The JSON.
    #[must_use]
    pub fn to_json(&self) -> String {
        let Self { kind, sm_scale, causal, window_left, softcap, k_scale, v_scale, head_dim_vo } = *self;
        let params = json!({
            "kind": kind.name(), "sm_scale": sm_scale, "causal": causal, "window_left": window_left, "softcap": softcap,
            "k_scale": k_scale, "v_scale": v_scale, "head_dim_vo": head_dim_vo,
        });
        params.to_string()
    }
}

fn kind(keys: &Map<String, Value>) -> Result<Kind, FileError> {
    match keys.get("kind") {
        None => Err(FileError::MissingKey { key: "kind", expected: Kind::EXPECTED }),
        Some(Value::String(name)) => {
            let found = Kind::ALL.into_iter().find(|kind| kind.name() == name);
            found.ok_or_else(|| FileError::Kind { got: name.clone() })
        }
        Some(other) => Err(FileError::KeyValue { key: "kind", got: shown(other), expected: Kind::EXPECTED }),
    }
}

fn causal(keys: &Map<String, Value>) -> Result<bool, FileError> {
    match keys.get("causal") {
        Some(Value::Bool(causal)) => Ok(*causal),
        None => Err(FileError::MissingKey { key: "causal", expected: "true or false" }),
        Some(other) => Err(FileError::KeyValue { key: "causal", got: shown(other), expected: "true or false" }),
    }
}

/// A number, or nothing where the key is null or missing.
#[expect(clippy::cast_possible_truncation, reason = "scales are f32; what overflows to infinity is refused later")]
fn number(keys: &Map<String, Value>, key: &'static str) -> Result<Option<f32>, FileError> {
    match keys.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_f64() {
            Some(number) => Ok(Some(number as f32)),
            None => Err(FileError::KeyValue { key, got: shown(value), expected: "a number" }),
        },
    }
}

/// A count, or nothing where the key is null or missing.
fn count(keys: &Map<String, Value>, key: &'static str, expected: &'static str) -> Result<Option<u32>, FileError> {
    match keys.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_u64().and_then(|n| u32::try_from(n).ok()) {
            Some(count) => Ok(Some(count)),
            None => Err(FileError::KeyValue { key, got: shown(value), expected }),
        },
    }
}

/// A value for a message, cut where it is long.
fn shown(value: &Value) -> String {
    const MAX_CHARS: usize = 40;
    let text = value.to_string();
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        Params::parse(text).unwrap_err().to_string()
    }

    #[test]
    fn parameters_survive_their_json() {
        let params = Params {
            kind: Kind::Mla,
            sm_scale: 0.088_388_35,
            causal: true,
            window_left: Some(7),
            softcap: Some(30.0),
            k_scale: Some(0.5),
            v_scale: Some(2.0),
            head_dim_vo: Some(64),
        };
        assert_eq!(Params::parse(&params.to_json()).unwrap(), params);
    }

    #[test]
    fn null_zero_and_absent_are_off() {
        let params =
            Params::parse(r#"{"kind": "mha", "sm_scale": 1, "causal": false, "window_left": null, "softcap": 0}"#)
                .unwrap();
        assert_eq!((params.window_left, params.softcap, params.k_scale), (None, None, None));
    }

    #[test]
    fn each_broken_rule_names_its_key() {
        assert!(error("{").contains("not a JSON object"));
        assert!(error("[]").contains("not a JSON object"));
        assert!(error(r#"{"kind": "nsa"}"#).contains("kind \"nsa\" cannot be replayed"));
        assert!(error(r#"{"sm_scale": 1}"#).contains("lacks `kind`"));
        assert!(error(r#"{"kind": "mha", "causal": true}"#).contains("lacks `sm_scale`"));
        assert!(error(r#"{"kind": "mha", "sm_scale": 1}"#).contains("lacks `causal`"));
        assert!(error(r#"{"kind": "mha", "sm_scale": "1", "causal": true}"#).contains("`sm_scale` is \"1\""));
        assert!(error(r#"{"kind": "mha", "sm_scale": 1, "causal": 1}"#).contains("`causal` is 1"));
        let window = r#"{"kind": "mha", "sm_scale": 1, "causal": true, "window_left": -1}"#;
        assert!(error(window).contains("`window_left` is -1, expected null or"));
    }
}

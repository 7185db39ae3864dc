//! Typed access to GGUF metadata.
//!
//! Values keep the file's kind (integer, float, text, ...) and drop its width: converters write the
//! same key as `u32` in one file and `u64` in the next. A getter either returns what was asked for
//! or names the key, the kind found and the kind wanted.

use std::collections::HashMap;

use super::GgufError;

/// One metadata value. Integers of every width become `i64`, floats `f64`.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Value {
    /// A signed or unsigned integer.
    Int(i64),
    /// A 32-bit or 64-bit float.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// A text.
    String(String),
    /// An array of integers.
    Ints(Vec<i64>),
    /// An array of floats.
    Floats(Vec<f64>),
    /// An array of truth values.
    Bools(Vec<bool>),
    /// An array of texts.
    Strings(Vec<String>),
}

impl Value {
    /// The kind in words, for messages.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Value::Int(_) => "an integer",
            Value::Float(_) => "a float",
            Value::Bool(_) => "a bool",
            Value::String(_) => "a string",
            Value::Ints(_) => "an array of integers",
            Value::Floats(_) => "an array of floats",
            Value::Bools(_) => "an array of bools",
            Value::Strings(_) => "an array of strings",
        }
    }
}

/// All metadata of a file, by key. `opt_*` getters return `None` for an absent key; the others
/// make that an error. Both refuse a value of another kind.
#[derive(Debug, Clone, Default)]
pub struct Metadata {
    values: HashMap<String, Value>,
}

impl Metadata {
    /// Adds a value; `false` (and no change) when the key is already there.
    pub(super) fn insert(&mut self, key: String, value: Value) -> bool {
        match self.values.entry(key) {
            std::collections::hash_map::Entry::Occupied(_) => false,
            std::collections::hash_map::Entry::Vacant(slot) => {
                slot.insert(value);
                true
            }
        }
    }

    /// The value under `key` whatever its kind.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    /// A text.
    pub fn string(&self, key: &str) -> Result<&str, GgufError> {
        required(key, self.opt_string(key)?)
    }

    /// A text, or `None` when the key is absent.
    pub fn opt_string(&self, key: &str) -> Result<Option<&str>, GgufError> {
        self.typed(key, "a string", |value| match value {
            Value::String(text) => Some(text.as_str()),
            _ => None,
        })
    }

    /// An array of texts.
    pub fn strings(&self, key: &str) -> Result<&[String], GgufError> {
        let found = self.typed(key, "an array of strings", |value| match value {
            Value::Strings(texts) => Some(texts.as_slice()),
            // A writer that has no element to tell the type by may pick any.
            Value::Ints(none) if none.is_empty() => Some(&[][..]),
            _ => None,
        })?;
        required(key, found)
    }

    /// An array of integers, or `None` when the key is absent.
    pub fn opt_ints(&self, key: &str) -> Result<Option<&[i64]>, GgufError> {
        self.typed(key, "an array of integers", |value| match value {
            Value::Ints(ints) => Some(ints.as_slice()),
            _ => None,
        })
    }

    /// An array of floats, which need not be finite.
    pub fn floats(&self, key: &str) -> Result<&[f64], GgufError> {
        let found = self.typed(key, "an array of floats", |value| match value {
            Value::Floats(floats) => Some(floats.as_slice()),
            _ => None,
        })?;
        required(key, found)
    }

    /// A count or size, 0 or more.
    pub fn usize(&self, key: &str) -> Result<usize, GgufError> {
        required(key, self.opt_usize(key)?)
    }

    /// A count or size, 0 or more, or `None` when the key is absent.
    pub fn opt_usize(&self, key: &str) -> Result<Option<usize>, GgufError> {
        let Some(int) = self.opt_int(key)? else {
            return Ok(None);
        };
        let size = u32::try_from(int).ok().and_then(|v| usize::try_from(v).ok());
        size.map(Some).ok_or_else(|| range(key, &int, "0 to 4294967295"))
    }

    /// A token id, or `None` when the key is absent.
    pub fn opt_token(&self, key: &str) -> Result<Option<u32>, GgufError> {
        let Some(int) = self.opt_int(key)? else {
            return Ok(None);
        };
        let token = u32::try_from(int).map_err(|_| range(key, &int, "a token id"))?;
        Ok(Some(token))
    }

    /// A finite float.
    pub fn f32(&self, key: &str) -> Result<f32, GgufError> {
        required(key, self.opt_f32(key)?)
    }

    /// A finite float, or `None` when the key is absent.
    pub fn opt_f32(&self, key: &str) -> Result<Option<f32>, GgufError> {
        let found = self.typed(key, "a float", |value| match value {
            Value::Float(float) => Some(*float),
            _ => None,
        })?;
        let Some(float) = found else { return Ok(None) };
        // Rounding to f32 is meant: the runner computes in f32 and files store f32.
        #[allow(clippy::cast_possible_truncation)]
        let narrow = float as f32;
        if narrow.is_finite() { Ok(Some(narrow)) } else { Err(range(key, &float, "a finite 32-bit float")) }
    }

    /// A truth value, or `None` when the key is absent.
    pub fn opt_bool(&self, key: &str) -> Result<Option<bool>, GgufError> {
        self.typed(key, "a bool", |value| match value {
            Value::Bool(flag) => Some(*flag),
            _ => None,
        })
    }

    fn opt_int(&self, key: &str) -> Result<Option<i64>, GgufError> {
        self.typed(key, "an integer", |value| match value {
            Value::Int(int) => Some(*int),
            _ => None,
        })
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        convert: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, GgufError> {
        let Some(value) = self.values.get(key) else {
            return Ok(None);
        };
        let wrong_kind = || GgufError::KeyType { key: key.to_owned(), expected, got: value.kind() };
        convert(value).map(Some).ok_or_else(wrong_kind)
    }
}

fn required<T>(key: &str, found: Option<T>) -> Result<T, GgufError> {
    found.ok_or_else(|| GgufError::MissingKey { key: key.to_owned() })
}

fn range(key: &str, value: &impl ToString, expected: &'static str) -> GgufError {
    GgufError::KeyRange { key: key.to_owned(), value: value.to_string(), expected }
}

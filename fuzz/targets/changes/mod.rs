//! Changes of a tiny model's file, so that inputs reach what lies behind a whole header.

use arbitrary::{Arbitrary, Unstructured};
use candle_core::quantized::GgmlDType;

use crate::testing::{TinyGguf, Value};

/// Keys that the reader looks at; those with a dot in front come after the architecture's name.
const KEYS: [&str; 40] = [
    "general.architecture",
    "general.alignment",
    "general.name",
    ".block_count",
    ".context_length",
    ".embedding_length",
    ".feed_forward_length",
    ".expert_count",
    ".vocab_size",
    ".attention.head_count",
    ".attention.head_count_kv",
    ".attention.key_length",
    ".attention.value_length",
    ".attention.scale",
    ".attention.sliding_window",
    ".attention.sliding_window_pattern",
    ".attention.layer_norm_rms_epsilon",
    ".attn_logit_softcapping",
    ".final_logit_softcapping",
    ".rope.dimension_count",
    ".rope.freq_base",
    ".rope.freq_base_swa",
    ".rope.scaling.type",
    ".rope.scaling.factor",
    "tokenizer.ggml.model",
    "tokenizer.ggml.pre",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.scores",
    "tokenizer.ggml.merges",
    "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
    "tokenizer.ggml.add_bos_token",
    "tokenizer.ggml.add_space_prefix",
    "tokenizer.ggml.remove_extra_whitespaces",
    "tokenizer.ggml.precompiled_charsmap",
    "tokenizer.chat_template",
    "other",
];
const TEXTS: [&str; 24] = [
    "",
    "a",
    "b",
    "ab",
    "abc",
    " ",
    "a b",
    "ab c",
    "\u{120}",
    "\u{120}a",
    "\u{2581}",
    "\u{2581}a",
    "<0x41>",
    "<0xff>",
    "llama",
    "gemma3",
    "gpt2",
    "default",
    "llama-bpe",
    "qwen2",
    "linear",
    "none",
    "{{ bos_token }}",
    "{% if x %}",
];
const TENSORS: [&str; 8] = [
    "token_embd.weight",
    "output_norm.weight",
    "output.weight",
    "output.bias",
    "rope_freqs.weight",
    "blk.0.attn_q.weight",
    "blk.1.ffn_down.weight",
    "blk.0.attn_q_norm.weight",
];
const DTYPES: [GgmlDType; 6] =
    [GgmlDType::F32, GgmlDType::F16, GgmlDType::BF16, GgmlDType::Q8_0, GgmlDType::Q4_0, GgmlDType::Q4K];

#[derive(Debug, Clone)]
enum Scalar {
    Int(i64),
    Float(f64),
    Text(String),
    Bool(bool),
}

impl<'a> Arbitrary<'a> for Scalar {
    fn arbitrary(u: &mut Unstructured<'a>) -> arbitrary::Result<Self> {
        Ok(match u8::arbitrary(u)? % 8 {
            0 | 1 => Self::Int((u8::arbitrary(u)? % 70).into()),
            2 => Self::Int(i64::arbitrary(u)?),
            3 => Self::Float(f32::from_bits(u32::arbitrary(u)?).into()),
            4 => Self::Float(f64::from(i8::arbitrary(u)?) / 8.0),
            5 => Self::Text((*u.choose(&TEXTS)?).to_owned()),
            6 => Self::Text(String::arbitrary(u)?),
            _ => Self::Bool(bool::arbitrary(u)?),
        })
    }
}

impl Scalar {
    fn value(self, width: u8) -> Value {
        match (self, width % 6) {
            (Self::Int(int), 0) => Value::I64(int),
            (Self::Int(int), 1) => Value::U64(int.cast_unsigned()),
            (Self::Int(int), 2) => Value::I8(int as i8),
            (Self::Int(int), 3) => Value::U16(int as u16),
            (Self::Int(int), 4) => Value::I32(int as i32),
            (Self::Int(int), _) => Value::U32(int as u32),
            (Self::Float(float), 0) => Value::F64(float),
            (Self::Float(float), _) => Value::F32(float as f32),
            (Self::Text(text), _) => Value::String(text),
            (Self::Bool(flag), _) => Value::Bool(flag),
        }
    }
}

#[derive(Arbitrary, Debug)]
enum Change {
    Set {
        key: u8,
        width: u8,
        scalar: Scalar,
    },
    /// An array of one type.
    SetArray {
        key: u8,
        width: u8,
        scalars: Vec<Scalar>,
    },
    Remove {
        key: u8,
    },
    /// An element of an array that is there.
    SetElement {
        key: u8,
        at: u16,
        scalar: Scalar,
    },
    RemoveElement {
        key: u8,
        at: u16,
    },
    /// An element at the end, of an array and of all that have one entry a token.
    Push {
        text: String,
        token_type: u8,
        score: i8,
    },
    SetTensor {
        name: u8,
        dims: Vec<u8>,
        dtype: u8,
    },
    RemoveTensor {
        name: u8,
    },
    /// Bytes of the file that was written.
    Overwrite {
        at: u16,
        byte: u8,
    },
    Cut {
        at: u16,
    },
}

/// A tiny model and what is changed in it.
#[derive(Arbitrary, Debug)]
pub(crate) struct Changes {
    is_gemma: bool,
    changes: Vec<Change>,
}

fn key(index: u8, architecture: &str) -> String {
    let key = KEYS[usize::from(index) % KEYS.len()];
    if key.starts_with('.') { format!("{architecture}{key}") } else { key.to_owned() }
}

fn array<'a>(file: &'a mut TinyGguf, key: &str) -> Option<&'a mut Vec<Value>> {
    file.metadata.iter_mut().find_map(|(name, value)| match value {
        Value::Array(values) if name == key => Some(values),
        _ => None,
    })
}

impl Changes {
    /// The file's bytes; `None` where the writer cannot write it.
    pub(crate) fn file(self) -> Option<Vec<u8>> {
        let mut file = if self.is_gemma { TinyGguf::gemma() } else { TinyGguf::model() };
        let architecture = if self.is_gemma { "gemma3" } else { "llama" };
        let mut overwritten = Vec::new();
        let mut end = usize::MAX;
        for change in self.changes.into_iter().take(24) {
            match change {
                Change::Overwrite { at, byte } => overwritten.push((usize::from(at), byte)),
                Change::Cut { at } => end = usize::from(at),
                change => change.apply(&mut file, architecture),
            }
        }
        // The writer takes the type of an array from its first element, and ends on others.
        let is_uniform = |values: &[Value]| values.windows(2).all(|pair| same_type(&pair[0], &pair[1]));
        let is_writable = |value: &Value| !matches!(value, Value::Array(values) if !is_uniform(values));
        if !file.metadata.iter().all(|(_, value)| is_writable(value)) {
            return None;
        }
        let mut bytes = file.bytes();
        for (at, byte) in overwritten {
            bytes.iter_mut().skip(at).take(1).for_each(|old| *old = byte);
        }
        bytes.truncate(end);
        Some(bytes)
    }
}

fn same_type(a: &Value, b: &Value) -> bool {
    std::mem::discriminant(a) == std::mem::discriminant(b)
}

impl Change {
    fn apply(self, file: &mut TinyGguf, architecture: &str) {
        match self {
            Self::Set { key: at, width, scalar } => file.set(&key(at, architecture), scalar.value(width)),
            Self::SetArray { key: at, width, scalars } => {
                let values = scalars.into_iter().map(|scalar| scalar.value(width)).collect();
                file.set(&key(at, architecture), Value::Array(values));
            }
            Self::Remove { key: at } => file.remove(&key(at, architecture)),
            Self::SetElement { key: of, at, scalar } => {
                if let Some(values) = array(file, &key(of, architecture))
                    && !values.is_empty()
                {
                    let at = usize::from(at) % values.len();
                    let mut widths = (4..6).map(|width| scalar.clone().value(width));
                    if let Some(value) = widths.find(|value| same_type(value, &values[at])) {
                        values[at] = value;
                    }
                }
            }
            Self::RemoveElement { key: of, at } => {
                if let Some(values) = array(file, &key(of, architecture))
                    && !values.is_empty()
                {
                    values.swap_remove(usize::from(at) % values.len());
                }
            }
            Self::Push { text, token_type, score } => {
                let new = [
                    ("tokens", Value::String(text)),
                    ("token_type", Value::I32((token_type % 8).into())),
                    ("scores", Value::F32(score.into())),
                ];
                for (name, value) in new {
                    if let Some(values) = array(file, &format!("tokenizer.ggml.{name}")) {
                        values.push(value);
                    }
                }
            }
            Self::SetTensor { name, dims, dtype } => set_tensor(file, name, &dims, dtype),
            Self::RemoveTensor { name } => file.remove_tensor(TENSORS[usize::from(name) % TENSORS.len()]),
            Self::Overwrite { .. } | Self::Cut { .. } => {}
        }
    }
}

/// Noise in up to three small dimensions; a row of the quantised types is a number of blocks.
fn set_tensor(file: &mut TinyGguf, name: u8, dims: &[u8], dtype: u8) {
    let name = TENSORS[usize::from(name) % TENSORS.len()];
    let dtype = DTYPES[usize::from(dtype) % DTYPES.len()];
    let mut dims: Vec<usize> = dims.iter().take(3).map(|&dim| usize::from(dim % 70)).collect();
    let Some(row) = dims.last_mut() else { return };
    *row = row.next_multiple_of(dtype.block_size());
    let len = dims.iter().product();
    if len > 0 && len <= 1 << 14 {
        file.set_tensor(name, &dims, vec![0.25; len], dtype);
    }
}

//! A safetensors file as its parts, to change one and pack it again.

use std::borrow::Cow;
use std::collections::HashMap;

use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, View};
use serde_json::{Value, json};

/// Larger tensors make slow inputs and nothing else.
const MAX_TENSOR_BYTES: usize = 1 << 14;
const DTYPES: [Dtype; 9] =
    [Dtype::F32, Dtype::F16, Dtype::BF16, Dtype::F8_E4M3, Dtype::U8, Dtype::I32, Dtype::I64, Dtype::BOOL, Dtype::F64];
const NAMES: [&str; 12] = [
    "q",
    "k_cache",
    "v_cache",
    "k",
    "v",
    "slot_mapping",
    "qo_indptr",
    "kv_indptr",
    "kv_indices",
    "kv_last_page_len",
    "custom_mask",
    "sinks",
];
const KEYS: [&str; 8] = ["kind", "sm_scale", "causal", "window_left", "softcap", "k_scale", "v_scale", "head_dim_vo"];
const NUMBERS: [i32; 12] = [0, 1, 2, 3, 5, 9, 17, -1, -2, i32::MAX, i32::MIN, 64];

#[derive(Debug, Clone)]
struct Tensor {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    data: Vec<u8>,
}

impl View for &Tensor {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.data)
    }

    fn data_len(&self) -> usize {
        self.data.len()
    }
}

/// The parts of a file.
#[derive(Debug)]
pub(crate) struct Container {
    tensors: Vec<Tensor>,
    metadata: HashMap<String, String>,
}

/// Numbers that follow from a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit.max(1)
    }
}

impl Container {
    /// `None` where the bytes are no whole file with tensors.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let (_, header) = SafeTensors::read_metadata(bytes).ok()?;
        let metadata = header.metadata().clone().unwrap_or_default();
        let tensors = SafeTensors::deserialize(bytes).ok()?;
        let tensors: Vec<Tensor> = tensors
            .iter()
            .map(|(name, view)| Tensor {
                name: name.to_owned(),
                dtype: view.dtype(),
                shape: view.shape().to_vec(),
                data: view.data().to_vec(),
            })
            .collect();
        (!tensors.is_empty()).then_some(Self { tensors, metadata })
    }

    pub(crate) fn pack(mut self) -> Vec<u8> {
        self.tensors.sort_by(|a, b| a.name.cmp(&b.name));
        self.tensors.dedup_by(|a, b| a.name == b.name);
        let named = self.tensors.iter().map(|tensor| (tensor.name.as_str(), tensor));
        safetensors::serialize(named, Some(self.metadata)).unwrap_or_default()
    }

    /// Changes one thing, or a few. `mutate_bytes` changes bytes in place: a buffer, bytes in it, and its size.
    pub(crate) fn mutate(&mut self, seed: u32, mutate_bytes: impl Fn(&mut [u8], usize, usize) -> usize) {
        let mut random = Random(u64::from(seed));
        for _ in 0..1 + random.below(3) {
            let at = random.below(self.tensors.len());
            match random.below(8) {
                0 => self.mutate_param(&mut random),
                1 => self.tensors[at].name = NAMES[random.below(NAMES.len())].to_owned(),
                2 => self.add_or_remove(at, &mut random),
                3 => self.tensors[at].mutate_dtype(&mut random),
                4 => self.tensors[at].mutate_shape(&mut random),
                5 | 6 => self.tensors[at].mutate_number(&mut random),
                _ => {
                    let data = &mut self.tensors[at].data;
                    let len = data.len();
                    if len > 0 {
                        mutate_bytes(data, len, len);
                    }
                }
            }
        }
    }

    fn add_or_remove(&mut self, at: usize, random: &mut Random) {
        if random.below(2) == 0 && self.tensors.len() > 1 {
            self.tensors.swap_remove(at);
            return;
        }
        let name = ["sinks", "alibi_slopes", "custom_mask", "slot_mapping", "k", "v"][random.below(6)].to_owned();
        let source = if matches!(&*name, "k" | "v") { "q" } else { "qo_indptr" };
        let copied = self.tensors.iter().find(|tensor| tensor.name == source).unwrap_or(&self.tensors[at]);
        self.tensors.push(Tensor { name, ..copied.clone() });
    }

    fn mutate_param(&mut self, random: &mut Random) {
        let text = self.metadata.get("attn").map_or("{}", String::as_str);
        let mut params: Value = serde_json::from_str(text).unwrap_or_else(|_| json!({}));
        let key = KEYS[random.below(KEYS.len())];
        let number = NUMBERS[random.below(NUMBERS.len())];
        let value = match random.below(7) {
            0 => Value::Null,
            1 => json!(random.below(2) == 0),
            2 => json!(number),
            3 => json!(f64::from(number) / 16.0),
            4 => json!([1e-40, 1e38, 1e39, 1e300, -0.0, 0.5, 448.0][random.below(7)]),
            5 => json!("mha"),
            _ => json!(u64::MAX - random.below(2) as u64),
        };
        if let Value::Object(keys) = &mut params {
            keys.insert(key.to_owned(), value);
        }
        self.metadata.insert("attn".to_owned(), params.to_string());
    }
}

impl Tensor {
    fn mutate_dtype(&mut self, random: &mut Random) {
        self.dtype = DTYPES[random.below(DTYPES.len())];
        self.resize();
    }

    fn mutate_shape(&mut self, random: &mut Random) {
        let at = random.below(self.shape.len());
        match random.below(6) {
            0 => self.shape.push(1),
            1 => drop(self.shape.pop()),
            2 => self.shape.iter_mut().skip(at).take(1).for_each(|dim| *dim = random.below(70)),
            3 => self.shape.iter_mut().skip(at).take(1).for_each(|dim| *dim = dim.saturating_sub(1)),
            4 => self.shape.iter_mut().skip(at).take(1).for_each(|dim| *dim += 1),
            _ => {
                // No byte, and yet sizes that cannot be.
                let huge = [u32::MAX as usize, 1 << 33, usize::MAX >> 1, 1 << 31][random.below(4)];
                self.shape.iter_mut().for_each(|dim| *dim = if random.below(2) == 0 { huge } else { 0 });
            }
        }
        self.resize();
    }

    fn mutate_number(&mut self, random: &mut Random) {
        let at = random.below(self.data.len() / 4) * 4;
        if let Some(bytes) = self.data.get_mut(at..at + 4) {
            let old = i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            let new = match random.below(4) {
                0 => old.wrapping_add(1),
                1 => old.wrapping_sub(1),
                2 if self.dtype == Dtype::F32 => {
                    let floats = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, f32::MAX, f32::MIN_POSITIVE / 2.0];
                    floats[random.below(floats.len())].to_bits().cast_signed()
                }
                _ => NUMBERS[random.below(NUMBERS.len())],
            };
            bytes.copy_from_slice(&new.to_le_bytes());
        }
    }

    /// Gives the data as many bytes as the shape asks for, unless that is too many.
    fn resize(&mut self) {
        let bits = self.shape.iter().try_fold(self.dtype.bitsize(), |bits, &dim| bits.checked_mul(dim));
        if let Some(bytes) = bits.map(|bits| bits / 8).filter(|&bytes| bytes <= MAX_TENSOR_BYTES) {
            self.data.resize(bytes, 0);
        }
    }
}

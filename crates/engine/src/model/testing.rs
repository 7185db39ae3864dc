//! Tiny GGUF files in memory, for tests. Written with candle's writer, so that the reader here is
//! tested against another implementation of the format.

use std::io::Cursor;

use candle_core::quantized::{GgmlDType, QTensor, gguf_file};
use candle_core::{Device, Tensor};

pub(super) use gguf_file::Value;

use super::gguf::{GgufFile, Metadata};

/// Contents of a file to be written.
pub(super) struct TinyGguf {
    pub(super) metadata: Vec<(String, Value)>,
    pub(super) tensors: Vec<(String, QTensor)>,
}

impl TinyGguf {
    pub(super) fn empty() -> Self {
        Self { metadata: Vec::new(), tensors: Vec::new() }
    }

    /// A two-layer model in which no two sizes are equal, 8 wide with 4 query heads on 2 KV heads
    /// of 6, with biases on Q, K and V and tied embeddings.
    pub(super) fn model() -> Self {
        let mut file = Self::empty();
        file.set_tokenizer();
        file.set("general.architecture", Value::String("llama".into()));
        for (key, value) in [
            ("block_count", 2),
            ("context_length", 32),
            ("embedding_length", 8),
            ("feed_forward_length", 10),
            ("attention.head_count", 4),
            ("attention.head_count_kv", 2),
            ("attention.key_length", 6),
            ("rope.dimension_count", 4),
        ] {
            file.set(&format!("llama.{key}"), Value::U32(value));
        }
        file.set("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5));
        file.set("llama.rope.freq_base", Value::F32(100.0));
        file.set_weights();
        file
    }

    /// A four-layer model of the other kind, 8 wide with 4 query heads of 6 on one KV head; each
    /// third layer sees everything, the others three tokens. Norms, windows and caps all matter.
    pub(super) fn gemma() -> Self {
        let mut file = Self::empty();
        file.set_scored_tokenizer();
        file.set("general.architecture", Value::String("gemma3".into()));
        for (key, value) in [
            ("block_count", 4),
            ("context_length", 32),
            ("embedding_length", 8),
            ("feed_forward_length", 10),
            ("attention.head_count", 4),
            ("attention.head_count_kv", 1),
            ("attention.key_length", 6),
            ("attention.value_length", 6),
            ("attention.sliding_window", 3),
            ("attention.sliding_window_pattern", 3),
        ] {
            file.set(&format!("gemma3.{key}"), Value::U32(value));
        }
        for (key, value) in [
            ("attention.layer_norm_rms_epsilon", 1e-5),
            ("attn_logit_softcapping", 2.0),
            ("final_logit_softcapping", 3.0),
            ("rope.freq_base", 1000.0),
            ("rope.freq_base_swa", 100.0),
            ("rope.scaling.factor", 2.0),
        ] {
            file.set(&format!("gemma3.{key}"), Value::F32(value));
        }
        file.set("gemma3.rope.scaling.type", Value::String("linear".into()));
        file.set_gemma_weights();
        file
    }

    fn set_scored_tokenizer(&mut self) {
        let (tokens, types) = scored_vocabulary();
        let scores = (0u16..).take(tokens.len()).map(|place| Value::F32(-f32::from(place))).collect();
        self.set("tokenizer.ggml.model", Value::String("llama".into()));
        self.set("tokenizer.ggml.tokens", Value::Array(tokens.into_iter().map(Value::String).collect()));
        self.set("tokenizer.ggml.token_type", Value::Array(types.into_iter().map(Value::I32).collect()));
        self.set("tokenizer.ggml.scores", Value::Array(scores));
        self.set("tokenizer.ggml.bos_token_id", Value::U32(2));
        self.set("tokenizer.ggml.eos_token_id", Value::U32(1));
        self.set("tokenizer.ggml.add_bos_token", Value::Bool(true));
        self.set("tokenizer.ggml.add_space_prefix", Value::Bool(false));
    }

    fn set_gemma_weights(&mut self) {
        let num_tokens = scored_vocabulary().0.len();
        self.set_noise("token_embd.weight", &[num_tokens, 8]);
        self.set_noise("output_norm.weight", &[8]);
        for layer in 0..4 {
            for (part, dims) in [
                ("attn_norm", &[8][..]),
                ("attn_q", &[24, 8]),
                ("attn_k", &[6, 8]),
                ("attn_v", &[6, 8]),
                ("attn_q_norm", &[6]),
                ("attn_k_norm", &[6]),
                ("attn_output", &[8, 24]),
                ("post_attention_norm", &[8]),
                ("ffn_norm", &[8]),
                ("ffn_gate", &[10, 8]),
                ("ffn_up", &[10, 8]),
                ("ffn_down", &[8, 10]),
                ("post_ffw_norm", &[8]),
            ] {
                self.set_noise(&format!("blk.{layer}.{part}.weight"), dims);
            }
        }
    }

    fn set_tokenizer(&mut self) {
        let (tokens, types) = vocabulary();
        let texts = |texts: &[&str]| Value::Array(texts.iter().map(|&t| Value::String(t.into())).collect());
        self.set("tokenizer.ggml.model", Value::String("gpt2".into()));
        self.set("tokenizer.ggml.pre", Value::String("smollm".into()));
        self.set("tokenizer.ggml.tokens", Value::Array(tokens.into_iter().map(Value::String).collect()));
        self.set("tokenizer.ggml.token_type", Value::Array(types.into_iter().map(Value::I32).collect()));
        self.set("tokenizer.ggml.merges", texts(&["a b", "Ġ a", "Ġ ab", "ð Ł"]));
        self.set("tokenizer.ggml.bos_token_id", Value::U32(0));
        self.set("tokenizer.ggml.eos_token_id", Value::U32(1));
        self.set("tokenizer.chat_template", Value::String("{{ bos_token }}{{ messages[0].content }}<|e|>".into()));
    }

    fn set_weights(&mut self) {
        let num_tokens = vocabulary().0.len();
        self.set_noise("token_embd.weight", &[num_tokens, 8]);
        self.set_noise("output_norm.weight", &[8]);
        for layer in 0..2 {
            for (part, dims) in [
                ("attn_norm.weight", &[8][..]),
                ("attn_q.weight", &[24, 8]),
                ("attn_q.bias", &[24]),
                ("attn_k.weight", &[12, 8]),
                ("attn_k.bias", &[12]),
                ("attn_v.weight", &[12, 8]),
                ("attn_v.bias", &[12]),
                ("attn_output.weight", &[8, 24]),
                ("ffn_norm.weight", &[8]),
                ("ffn_gate.weight", &[10, 8]),
                ("ffn_up.weight", &[10, 8]),
                ("ffn_down.weight", &[8, 10]),
            ] {
                self.set_noise(&format!("blk.{layer}.{part}"), dims);
            }
        }
    }

    pub(super) fn set(&mut self, key: &str, value: Value) {
        self.remove(key);
        self.metadata.push((key.into(), value));
    }

    pub(super) fn remove(&mut self, key: &str) {
        self.metadata.retain(|(other, _)| other != key);
    }

    /// A tensor of values that look random, seeded by its name.
    pub(super) fn set_noise(&mut self, name: &str, dims: &[usize]) {
        let mut state = name.bytes().fold(17u32, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into()));
        let step = |_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 8_388_608.0 - 1.0
        };
        let values = (0..dims.iter().product()).map(step).collect();
        self.set_tensor(name, dims, values, GgmlDType::F32);
    }

    pub(super) fn set_tensor(&mut self, name: &str, dims: &[usize], values: Vec<f32>, dtype: GgmlDType) {
        let tensor = Tensor::from_vec(values, dims, &Device::Cpu).unwrap();
        self.remove_tensor(name);
        self.tensors.push((name.into(), QTensor::quantize(&tensor, dtype).unwrap()));
    }

    pub(super) fn remove_tensor(&mut self, name: &str) {
        self.tensors.retain(|(other, _)| other != name);
    }

    pub(super) fn values(&self, name: &str) -> Vec<f32> {
        let (_, tensor) = self.tensors.iter().find(|(other, _)| other == name).unwrap();
        tensor.dequantize(&Device::Cpu).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        let metadata: Vec<(&str, &Value)> = self.metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
        let tensors: Vec<(&str, &QTensor)> = self.tensors.iter().map(|(name, t)| (name.as_str(), t)).collect();
        let mut out = Cursor::new(Vec::new());
        gguf_file::write(&mut out, &metadata, &tensors).unwrap();
        out.into_inner()
    }

    pub(super) fn open(&self) -> GgufFile<Cursor<Vec<u8>>> {
        GgufFile::from_reader(Cursor::new(self.bytes())).unwrap()
    }

    pub(super) fn parsed_metadata(&self) -> Metadata {
        self.open().metadata().clone()
    }
}

/// Tokens and their types: `<|b|>` 0, `<|e|>` 1 and `<|e|>!` 2 are control tokens, `<keep>` 3 is
/// user-defined; then the letters from 4 on, and what a few tests need.
fn vocabulary() -> (Vec<String>, Vec<i32>) {
    let mut tokens: Vec<String> = ["<|b|>", "<|e|>", "<|e|>!", "<keep>"].map(str::to_owned).into();
    tokens.extend(('a'..='z').chain('0'..='9').map(String::from));
    tokens.extend("Ġ Ċ ' . < > | ! Ã © ð Ł ĺ Ģ ab Ġa Ġab ðŁ".split(' ').map(str::to_owned));
    let types = (0..tokens.len())
        .map(|id| {
            if id < 3 {
                3
            } else if id == 3 {
                4
            } else {
                1
            }
        })
        .collect();
    (tokens, types)
}

/// Tokens and their types: control tokens `<pad>` 0, `<eos>` 1, `<bos>` 2, the unknown token `<unk>` 3;
/// user-defined from 4 on two spaces, one and two line ends, and `<td>`; the bytes from 8 on; the rest.
fn scored_vocabulary() -> (Vec<String>, Vec<i32>) {
    let literals = ["<pad>", "<eos>", "<bos>", "<unk>", "  ", "\n", "\n\n", "<td>"].map(str::to_owned);
    let bytes = (0..=255u8).map(|byte| format!("<0x{byte:02X}>"));
    let pieces = "▁ab ▁a ab cab ▁ a b c d < > e o s t é 日 ▁日".split(' ').map(str::to_owned);
    let tokens: Vec<String> = literals.into_iter().chain(bytes).chain(pieces).collect();
    let type_of = |id| match id {
        0..3 => 3,
        3 => 2,
        4..8 => 4,
        8..264 => 6,
        _ => 1,
    };
    let types = (0..tokens.len()).map(type_of).collect();
    (tokens, types)
}

//! Tests of the forward pass against a second, naive one in f64.
#![allow(clippy::cast_possible_truncation)] // results are rounded to f32 on purpose

use super::super::testing::{TinyGguf, Value};
use super::super::{ConfigError, GgufError, Model};
use attn_metadata::RunError;

use super::*;

/// Dense causal attention over sequences that are kept whole, one value at a time.
struct Dense {
    /// For each layer and sequence the keys and values `[len, num_kv_heads * head_dim]`.
    cache: Vec<[(Vec<f32>, Vec<f32>); 2]>,
    /// The sequence of each row of the next batch.
    rows: Vec<usize>,
}

const HEADS: (usize, usize, usize) = (4, 2, 6);

impl Dense {
    fn new() -> Self {
        Self { cache: vec![Default::default(); 2], rows: Vec::new() }
    }
}

impl LayerAttention for Dense {
    fn attend(&mut self, layer: usize, q: &[f32], k: &[f32], v: &[f32], out: &mut [f32]) -> Result<(), RunError> {
        let (num_qo_heads, num_kv_heads, head_dim) = HEADS;
        let kv_width = num_kv_heads * head_dim;
        for (row, &sequence) in self.rows.iter().enumerate() {
            let (keys, values) = &mut self.cache[layer][sequence];
            keys.extend_from_slice(&k[row * kv_width..][..kv_width]);
            values.extend_from_slice(&v[row * kv_width..][..kv_width]);
            for head in 0..num_qo_heads {
                let place = (row * num_qo_heads + head) * head_dim;
                let shared = head * num_kv_heads / num_qo_heads * head_dim;
                let query = &q[place..][..head_dim];
                let score = |key: &[f32]| dot(query, &key[shared..][..head_dim]) / (head_dim as f64).sqrt();
                let weights: Vec<f64> = keys.chunks(kv_width).map(|key| score(key).exp()).collect();
                let total: f64 = weights.iter().sum();
                for d in 0..head_dim {
                    let column = values.chunks(kv_width).map(|value| f64::from(value[shared + d]));
                    out[place + d] = (column.zip(&weights).map(|(v, w)| v * w).sum::<f64>() / total) as f32;
                }
            }
        }
        Ok(())
    }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

/// `weight x + bias` in f64, rounded.
fn linear(file: &TinyGguf, name: &str, x: &[f32]) -> Vec<f32> {
    let weight = file.values(&format!("{name}.weight"));
    let bias_name = format!("{name}.bias");
    let has_bias = file.tensors.iter().any(|(other, _)| *other == bias_name);
    let bias = if has_bias { file.values(&bias_name) } else { vec![0.0; weight.len() / x.len()] };
    weight.chunks(x.len()).zip(bias).map(|(row, bias)| (dot(row, x) + f64::from(bias)) as f32).collect()
}

fn norm(file: &TinyGguf, name: &str, x: &[f32]) -> Vec<f32> {
    let rms = (dot(x, x) / x.len() as f64 + 1e-5).sqrt();
    x.iter().zip(file.values(name)).map(|(&x, w)| (f64::from(x) / rms * f64::from(w)) as f32).collect()
}

/// Rotates the first 4 of every 6 elements, base 100.
fn rotate(mut x: Vec<f32>, position: usize) -> Vec<f32> {
    for head in x.chunks_mut(6) {
        for pair in 0..2 {
            let (sin, cos) = (position as f64 * [1.0, 0.1][pair]).sin_cos();
            let (a, b) = (f64::from(head[2 * pair]), f64::from(head[2 * pair + 1]));
            head[2 * pair] = (a * cos - b * sin) as f32;
            head[2 * pair + 1] = (a * sin + b * cos) as f32;
        }
    }
    x
}

/// Logits after each token of a sequence, by the formulas, token by token.
fn reference(file: &TinyGguf, tokens: &[u32], head: &str) -> Vec<Vec<f32>> {
    let mut attention = Dense::new();
    attention.rows = vec![0];
    let step = |(position, &token): (usize, &u32)| {
        let mut x = file.values("token_embd.weight")[token as usize * 8..][..8].to_vec();
        for layer in 0..2 {
            let name = |part: &str| format!("blk.{layer}.{part}");
            let n = norm(file, &name("attn_norm.weight"), &x);
            let q = rotate(linear(file, &name("attn_q"), &n), position);
            let k = rotate(linear(file, &name("attn_k"), &n), position);
            let v = linear(file, &name("attn_v"), &n);
            let mut attended = vec![0.0; 24];
            attention.attend(layer, &q, &k, &v, &mut attended).unwrap();
            let delta = linear(file, &name("attn_output"), &attended);
            x.iter_mut().zip(delta).for_each(|(x, d)| *x += d);
            let n = norm(file, &name("ffn_norm.weight"), &x);
            let (gate, up) = (linear(file, &name("ffn_gate"), &n), linear(file, &name("ffn_up"), &n));
            let inner: Vec<f32> = gate.iter().zip(up).map(|(&g, u)| g / (1.0 + (-g).exp()) * u).collect();
            let delta = linear(file, &name("ffn_down"), &inner);
            x.iter_mut().zip(delta).for_each(|(x, d)| *x += d);
        }
        linear(file, head, &norm(file, "output_norm.weight", &x))
    };
    tokens.iter().enumerate().map(step).collect()
}

fn input<'a>(tokens: &'a [u32], positions: &'a [u32], logit_rows: &'a [usize]) -> ModelInput<'a> {
    ModelInput { tokens, positions, logit_rows }
}

fn load(file: &TinyGguf) -> Result<Decoder, super::super::ModelError> {
    Model::from_gguf(&mut file.open(), &mut |_, _| ()).map(|model| model.decoder)
}

fn assert_close(got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len());
    for (g, e) in got.iter().zip(expected) {
        assert!((g - e).abs() < 1e-4, "{g} is not {e}");
    }
}

#[test]
fn a_packed_batch_of_two_sequences_matches_the_naive_model() {
    let file = TinyGguf::model();
    let mut decoder = load(&file).unwrap();
    let (a, b) = ([5, 9, 4, 30, 7], [8, 3, 11]);
    let (expected_a, expected_b) = (reference(&file, &a, "token_embd"), reference(&file, &b, "token_embd"));
    let mut attention = Dense::new();
    // Four tokens of a and two of b, interleaved; then the last of each.
    attention.rows = vec![0, 1, 0, 0, 1, 0];
    let logits = decoder.forward(input(&[5, 8, 9, 4, 3, 30], &[0, 0, 1, 2, 1, 3], &[5, 4, 0]), &mut attention).unwrap();
    assert_eq!(logits.num_rows(), 3);
    assert_close(logits.row(0).unwrap(), &expected_a[3]);
    assert_close(logits.row(1).unwrap(), &expected_b[1]);
    assert_close(logits.row(2).unwrap(), &expected_a[0]);
    attention.rows = vec![1, 0];
    let logits = decoder.forward(input(&[11, 7], &[2, 4], &[0, 1]), &mut attention).unwrap();
    let rows: Vec<&[f32]> = logits.rows().collect();
    assert_close(rows[0], &expected_b[2]);
    assert_close(rows[1], &expected_a[4]);
    assert_eq!(logits.row(2), None);
}

#[test]
fn a_head_of_its_own_is_used_where_the_file_has_one() {
    let mut file = TinyGguf::model();
    let vocab_size = load(&file).unwrap().config().vocab_size;
    file.set_noise("output.weight", &[vocab_size, 8]);
    let mut attention = Dense::new();
    attention.rows = vec![0];
    let logits = load(&file).unwrap().forward(input(&[6], &[0], &[0]), &mut attention).unwrap();
    assert_close(logits.row(0).unwrap(), &reference(&file, &[6], "output")[0]);
}

#[test]
fn an_empty_batch_and_no_logits_are_fine() {
    let mut decoder = load(&TinyGguf::model()).unwrap();
    let mut attention = Dense::new();
    assert_eq!(decoder.forward(input(&[], &[], &[]), &mut attention).unwrap().num_rows(), 0);
    attention.rows = vec![0];
    assert_eq!(decoder.forward(input(&[6], &[0], &[]), &mut attention).unwrap().num_rows(), 0);
}

#[test]
fn mistakes_are_named_before_attention_is_called() {
    let mut decoder = load(&TinyGguf::model()).unwrap();
    let mut check = |tokens: &[u32], positions: &[u32], rows: &[usize], expected: &str| {
        let mut attention = Dense::new();
        let error = decoder.forward(input(tokens, positions, rows), &mut attention).unwrap_err().to_string();
        assert!(error.contains(expected), "{error:?} lacks {expected:?}");
        assert!(attention.cache[0][0].0.is_empty());
    };
    check(&[1, 2], &[0], &[], "2 tokens and 1 positions");
    check(&[1, 4000], &[0, 1], &[], "token 4000 at row 1");
    check(&[1], &[32], &[], "context of 32");
    check(&[1], &[0], &[1], "row 1 of a batch of 1");
}

struct Failing;

impl LayerAttention for Failing {
    fn attend(&mut self, layer: usize, _: &[f32], _: &[f32], _: &[f32], _: &mut [f32]) -> Result<(), RunError> {
        if layer == 1 { Err(RunError::NoLse { backend: "none" }) } else { Ok(()) }
    }
}

#[test]
fn an_error_of_attention_comes_back_with_its_layer() {
    let error = load(&TinyGguf::model()).unwrap().forward(input(&[1], &[0], &[0]), &mut Failing).unwrap_err();
    assert!(matches!(&error, ForwardError::Attention { layer: 1, source: RunError::NoLse { .. } }));
}

#[test]
fn progress_counts_to_the_number_of_tensors() {
    let mut heard = Vec::new();
    let file = TinyGguf::model();
    Model::from_gguf(&mut file.open(), &mut |done, total| heard.push((done, total))).unwrap();
    let total = file.tensors.len();
    assert_eq!(heard, (1..=total).map(|done| (done, total)).collect::<Vec<_>>());
}

#[test]
fn missing_and_misshapen_tensors_are_named() {
    let names: Vec<String> = TinyGguf::model().tensors.into_iter().map(|(name, _)| name).collect();
    for name in names {
        let mut file = TinyGguf::model();
        file.remove_tensor(&name);
        match load(&file) {
            Ok(_) => assert!(name.ends_with("bias"), "{name} was not missed"),
            Err(error) => assert!(error.to_string().contains(&name), "{name}: {error}"),
        }
        file.set_noise(&name, &[3, 5]);
        let error = load(&file).unwrap_err();
        let is_shape = matches!(&error, super::super::ModelError::Gguf(GgufError::TensorShape { .. }));
        assert!(is_shape && error.to_string().contains(&name), "{name}: {error}");
    }
}

#[test]
fn impossible_configurations_are_refused() {
    let cases: [(&str, Value, &str); 11] = [
        ("general.architecture", Value::String("mamba".into()), "supported: llama"),
        ("llama.block_count", Value::U32(0), "at least 1"),
        ("llama.block_count", Value::String("2".into()), "holds a string"),
        ("llama.attention.head_count_kv", Value::U32(3), "a divisor of the 4"),
        ("llama.attention.key_length", Value::U32(0), "at least 1"),
        ("llama.attention.value_length", Value::U32(7), "6 for K and 7 for V"),
        ("llama.rope.dimension_count", Value::U32(8), "2 to the head size 6"),
        ("llama.rope.dimension_count", Value::U32(0), "from 2"),
        ("llama.rope.scaling.type", Value::String("yarn".into()), "RoPE scaling"),
        ("llama.expert_count", Value::U32(8), "8 experts"),
        ("llama.vocab_size", Value::U32(7), "entries of tokenizer.ggml.tokens"),
    ];
    for (key, value, expected) in cases {
        let mut file = TinyGguf::model();
        file.set(key, value);
        let error = load(&file).unwrap_err().to_string();
        assert!(error.contains(expected), "{error:?} lacks {expected:?}");
    }
}

#[test]
fn missing_keys_are_named_and_optional_ones_have_defaults() {
    for key in ["block_count", "context_length", "feed_forward_length", "attention.layer_norm_rms_epsilon"] {
        let mut file = TinyGguf::model();
        let key = format!("llama.{key}");
        file.remove(&key);
        let error = ModelConfig::from_metadata(&file.parsed_metadata()).unwrap_err();
        assert!(matches!(&error, ConfigError::Metadata(GgufError::MissingKey { key: k }) if *k == key), "{error}");
    }
    let mut file = TinyGguf::model();
    for key in ["head_count_kv", "key_length"] {
        file.remove(&format!("llama.attention.{key}"));
    }
    file.remove("llama.rope.dimension_count");
    file.remove("llama.rope.freq_base");
    let config = ModelConfig::from_metadata(&file.parsed_metadata()).unwrap();
    assert_eq!((config.num_kv_heads, config.head_dim, config.rope.num_dims), (4, 2, 2));
    assert_eq!((config.rope.freq_base, config.sm_scale()), (10_000.0, 0.5f32.sqrt()));
}

//! A second forward pass for the tests, by the formulas, one value at a time in f64.
#![allow(clippy::cast_possible_truncation)] // results are rounded to f32 on purpose

use attn_metadata::RunError;

use super::super::testing::TinyGguf;
use crate::lm::{AttentionInput, AttentionOutput, LayerAttention, Rows};

/// Dense causal attention over sequences that are kept whole, one value at a time.
pub(super) struct Dense {
    num_qo_heads: usize,
    num_kv_heads: usize,
    softcap: Option<f64>,
    /// For each layer the tokens that a query sees, itself included.
    windows: Vec<usize>,
    /// For each layer and sequence the keys and values `[len, num_kv_heads * HEAD_DIM]`.
    pub(super) cache: Vec<[(Vec<f32>, Vec<f32>); 2]>,
    /// The sequence of each row of the next batch.
    pub(super) rows: Vec<usize>,
}

const HEAD_DIM: usize = 6;
const ALL: usize = usize::MAX;

impl Dense {
    pub(super) fn llama(rows: Vec<usize>) -> Self {
        let (windows, cache) = (vec![ALL; 2], vec![Default::default(); 2]);
        Self { num_qo_heads: 4, num_kv_heads: 2, softcap: None, windows, cache, rows }
    }

    pub(super) fn gemma(rows: Vec<usize>) -> Self {
        let (windows, cache) = (vec![3, 3, ALL, 3], vec![Default::default(); 4]);
        Self { num_qo_heads: 4, num_kv_heads: 1, softcap: Some(2.0), windows, cache, rows }
    }

    fn score(&self, query: &[f32], key: &[f32]) -> f64 {
        let score = dot(query, key) / (HEAD_DIM as f64).sqrt();
        self.softcap.map_or(score, |cap| cap * (score / cap).tanh())
    }
}

impl LayerAttention for Dense {
    fn attend(
        &mut self,
        layer: usize,
        input: &AttentionInput<'_>,
        output: AttentionOutput<'_>,
    ) -> Result<(), RunError> {
        let (Rows { q, k, v }, out) = (input.rows, output.out);
        let v = v.expect("these layers keep values of their own");
        let kv_width = self.num_kv_heads * HEAD_DIM;
        for (row, sequence) in self.rows.clone().into_iter().enumerate() {
            let (keys, values) = &mut self.cache[layer][sequence];
            keys.extend_from_slice(&k[row * kv_width..][..kv_width]);
            values.extend_from_slice(&v[row * kv_width..][..kv_width]);
            let (keys, values) = &self.cache[layer][sequence];
            let hidden = (keys.len() / kv_width).saturating_sub(self.windows[layer]);
            for head in 0..self.num_qo_heads {
                let place = (row * self.num_qo_heads + head) * HEAD_DIM;
                let shared = head * self.num_kv_heads / self.num_qo_heads * HEAD_DIM;
                let score = |key: &[f32]| self.score(&q[place..][..HEAD_DIM], &key[shared..][..HEAD_DIM]);
                let weights: Vec<f64> = keys.chunks(kv_width).skip(hidden).map(|key| score(key).exp()).collect();
                let total: f64 = weights.iter().sum();
                for d in 0..HEAD_DIM {
                    let column = values.chunks(kv_width).skip(hidden).map(|value| f64::from(value[shared + d]));
                    out[place + d] = (column.zip(&weights).map(|(v, w)| v * w).sum::<f64>() / total) as f32;
                }
            }
        }
        Ok(())
    }
}

/// Logits after each token of a sequence of [`TinyGguf::model`].
pub(super) fn llama(file: &TinyGguf, tokens: &[u32], head: &str) -> Vec<Vec<f32>> {
    let mut attention = Dense::llama(vec![0]);
    let step = |(position, &token): (usize, &u32)| {
        let mut x = file.values("token_embd.weight")[token as usize * 8..][..8].to_vec();
        for layer in 0..2 {
            let name = |part: &str| format!("blk.{layer}.{part}");
            let rotate = |x| rotate(x, position, &[(0, 1, 1.0), (2, 3, 0.1)]);
            let n = norm(file, &name("attn_norm"), &x);
            let q = rotate(linear(file, &name("attn_q"), &n));
            let k = rotate(linear(file, &name("attn_k"), &n));
            let v = linear(file, &name("attn_v"), &n);
            let mut attended = vec![0.0; 24];
            attention.attend(layer, &AttentionInput::plain(&q, &k, &v), AttentionOutput::plain(&mut attended)).unwrap();
            add(&mut x, &linear(file, &name("attn_output"), &attended));
            let n = norm(file, &name("ffn_norm"), &x);
            let (gate, up) = (linear(file, &name("ffn_gate"), &n), linear(file, &name("ffn_up"), &n));
            let inner: Vec<f32> = gate.iter().zip(up).map(|(&g, u)| g / (1.0 + (-g).exp()) * u).collect();
            add(&mut x, &linear(file, &name("ffn_down"), &inner));
        }
        linear(file, head, &norm(file, "output_norm", &x))
    };
    tokens.iter().enumerate().map(step).collect()
}

/// Logits after each token of a sequence of [`TinyGguf::gemma`].
pub(super) fn gemma(file: &TinyGguf, tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut attention = Dense::gemma(vec![0]);
    let step = |(position, &token): (usize, &u32)| {
        let embedding = file.values("token_embd.weight")[token as usize * 8..][..8].to_vec();
        let mut x: Vec<f32> = embedding.iter().map(|&e| (f64::from(e) * 8f64.sqrt()) as f32).collect();
        for layer in 0..4 {
            let name = |part: &str| format!("blk.{layer}.{part}");
            let frequency = |pair: f64| match layer {
                2 => 1000f64.powf(-pair / 3.0) / 2.0,
                _ => 100f64.powf(-pair / 3.0),
            };
            let pairs = [(0, 3, frequency(0.0)), (1, 4, frequency(1.0)), (2, 5, frequency(2.0))];
            let rotate = |x| rotate(x, position, &pairs);
            let n = norm(file, &name("attn_norm"), &x);
            let q = rotate(norm(file, &name("attn_q_norm"), &linear(file, &name("attn_q"), &n)));
            let k = rotate(norm(file, &name("attn_k_norm"), &linear(file, &name("attn_k"), &n)));
            let v = linear(file, &name("attn_v"), &n);
            let mut attended = vec![0.0; 24];
            attention.attend(layer, &AttentionInput::plain(&q, &k, &v), AttentionOutput::plain(&mut attended)).unwrap();
            let delta = linear(file, &name("attn_output"), &attended);
            add(&mut x, &norm(file, &name("post_attention_norm"), &delta));
            let n = norm(file, &name("ffn_norm"), &x);
            let (gate, up) = (linear(file, &name("ffn_gate"), &n), linear(file, &name("ffn_up"), &n));
            let inner: Vec<f32> =
                gate.iter().zip(up).map(|(&g, u)| (gelu(f64::from(g)) * f64::from(u)) as f32).collect();
            add(&mut x, &norm(file, &name("post_ffw_norm"), &linear(file, &name("ffn_down"), &inner)));
        }
        let logits = linear(file, "token_embd", &norm(file, "output_norm", &x));
        logits.iter().map(|&logit| 3.0 * (logit / 3.0).tanh()).collect()
    };
    tokens.iter().enumerate().map(step).collect()
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

fn add(x: &mut [f32], delta: &[f32]) {
    x.iter_mut().zip(delta).for_each(|(x, d)| *x += d);
}

fn gelu(x: f64) -> f64 {
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
    0.5 * x * (1.0 + inner.tanh())
}

/// `weight x + bias`, rounded.
fn linear(file: &TinyGguf, name: &str, x: &[f32]) -> Vec<f32> {
    let weight = file.values(&format!("{name}.weight"));
    let bias_name = format!("{name}.bias");
    let has_bias = file.tensors.iter().any(|(other, _)| *other == bias_name);
    let bias = if has_bias { file.values(&bias_name) } else { vec![0.0; weight.len() / x.len()] };
    weight.chunks(x.len()).zip(bias).map(|(row, bias)| (dot(row, x) + f64::from(bias)) as f32).collect()
}

/// The norm of each row as wide as the weight.
fn norm(file: &TinyGguf, name: &str, x: &[f32]) -> Vec<f32> {
    let weight = file.values(&format!("{name}.weight"));
    let row = |x: &[f32]| {
        let rms = (dot(x, x) / x.len() as f64 + 1e-5).sqrt();
        x.iter().zip(&weight).map(|(&x, &w)| (f64::from(x) / rms * f64::from(w)) as f32).collect::<Vec<_>>()
    };
    x.chunks(weight.len()).flat_map(row).collect()
}

/// Turns pairs of each head, given as places of both elements and the frequency.
fn rotate(mut x: Vec<f32>, position: usize, pairs: &[(usize, usize, f64)]) -> Vec<f32> {
    for head in x.chunks_mut(HEAD_DIM) {
        for &(left, right, frequency) in pairs {
            let (sin, cos) = (position as f64 * frequency).sin_cos();
            let (a, b) = (f64::from(head[left]), f64::from(head[right]));
            head[left] = (a * cos - b * sin) as f32;
            head[right] = (a * sin + b * cos) as f32;
        }
    }
    x
}

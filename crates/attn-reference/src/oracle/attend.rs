//! Owns [`attend`]: the formulas of `attn_metadata::conventions`, one loop for each sum in them.
//! Every value is read from storage as it is, widened to f64 and scaled there; nothing is rounded afterwards.
//! Does not append and does not write any backend's buffer.

use attn_metadata::{Batch, Layer, Request};
use kvpool::{HostKv, HostTensor};

/// Outputs of all rows, in f64, with what a comparison needs to know about their conditioning.
///
/// Every array but `out` is `[num_rows, num_qo_heads]`. Rows of nobody (padding, or of a sub-batch's other
/// requests) have O = 0 and LSE = −inf.
#[derive(Clone, Debug, PartialEq)]
pub struct OracleOutput {
    /// Rows, padding included.
    pub num_rows: usize,
    /// Query heads.
    pub num_qo_heads: usize,
    /// Width of an output row.
    pub head_dim_vo: usize,
    /// `[num_rows, num_qo_heads, head_dim_vo]`.
    pub out: Vec<f64>,
    /// Natural-log LSE, −inf for an empty row.
    pub lse: Vec<f64>,
    /// Keys that the row sees.
    pub num_visible: Vec<u32>,
    /// Largest `sm_scale · Σ|qᵢkᵢ| + |bias|` of a visible key: a score's rounding error is in proportion to it.
    pub score_bound: Vec<f64>,
    /// Largest |v| of a visible key.
    pub value_bound: Vec<f64>,
    /// Largest `√Σ(pⱼvⱼ)²` over the columns: the size of a sum of the row's terms if their signs were random.
    pub spread: Vec<f64>,
}

/// Attention of one layer for every request of the batch, over the cache as it is (so append first).
///
/// `q`: `[rows, num_qo_heads, head_dim_qk]` with at least the batch's rows; further rows are padding.
///
/// # Panics
/// Where the tensors do not fit the batch and the layer.
#[must_use]
pub fn attend(batch: &Batch, layer: &Layer, q: &HostTensor<'_>, kv: &HostKv) -> OracleOutput {
    let heads = layer.heads();
    attend_over(batch, layer, q, heads.group_size(), |request, kv_head| read_kv(batch, request, kv, kv_head))
}

/// As [`attend`], over keys and values from elsewhere: for attention whose cache holds something that they are made of.
///
/// `read` gives the keys and values `[kv_len][dim]` of a request that `group_size` consecutive query heads share, by the
/// number of the group.
///
/// # Panics
/// Where the tensors do not fit the batch and the layer, or `group_size` is 0.
#[must_use]
pub fn attend_over(
    batch: &Batch,
    layer: &Layer,
    q: &HostTensor<'_>,
    group_size: u32,
    mut read: impl FnMut(&Request, u32) -> (Vec<Vec<f64>>, Vec<Vec<f64>>),
) -> OracleOutput {
    let heads = layer.heads();
    let (num_rows, num_qo_heads, head_dim_vo) = (q.rows(), q.heads(), heads.head_dim_vo as usize);
    let states = num_rows * num_qo_heads;
    let mut output = OracleOutput {
        num_rows,
        num_qo_heads,
        head_dim_vo,
        out: vec![0.0; states * head_dim_vo],
        lse: vec![f64::NEG_INFINITY; states],
        num_visible: vec![0; states],
        score_bound: vec![0.0; states],
        value_bound: vec![0.0; states],
        spread: vec![0.0; states],
    };
    for request in batch.requests() {
        for group in 0..heads.num_qo_heads.div_ceil(group_size) {
            let (keys, values) = read(request, group);
            for head in group * group_size..((group + 1) * group_size).min(heads.num_qo_heads) {
                for row in 0..request.q_len {
                    let row = Row { batch, layer, request, row, head, keys: &keys, values: &values };
                    row.attend(q, &mut output);
                }
            }
        }
    }
    output
}

/// Whether query `row` of a request of `q_len` queries and `kv_len` keys sees `key`, by causality and window alone.
///
/// The query sits at position `p = kv_len − q_len + row`. Causal: keys up to p. Window w: keys from p − w on.
#[must_use]
pub fn sees(layer: &Layer, q_len: u32, kv_len: u32, row: u32, key: u32) -> bool {
    let position = i64::from(kv_len) - i64::from(q_len) + i64::from(row);
    let key = i64::from(key);
    if layer.is_causal() && key > position {
        return false;
    }
    match layer.window_left() {
        Some(window) => key >= position - i64::from(window),
        None => true,
    }
}

/// Keys and values of one KV head, `[kv_len][dim]`, as real values.
fn read_kv(batch: &Batch, request: &Request, kv: &HostKv, head: u32) -> (Vec<Vec<f64>>, Vec<Vec<f64>>) {
    let (k_scale, v_scale) = (f64::from(kv.format().k_scale()), f64::from(kv.format().v_scale()));
    let page_size = batch.page_size().get();
    let mut keys = Vec::new();
    let mut values = Vec::new();
    for position in 0..request.kv_len {
        let page = batch.page_of(request, position);
        let mut key = vec![0.0f32; kv.shape().head_dim_k as usize];
        kv.k().read(page, position % page_size, head, &mut key);
        keys.push(key.iter().map(|&x| f64::from(x) * k_scale).collect());
        let mut value = vec![0.0f32; kv.shape().head_dim_v as usize];
        kv.v().read(page, position % page_size, head, &mut value);
        values.push(value.iter().map(|&x| f64::from(x) * v_scale).collect());
    }
    (keys, values)
}

/// One query of one head, and what it attends to.
struct Row<'a> {
    batch: &'a Batch,
    layer: &'a Layer,
    request: &'a Request,
    row: u32,
    head: u32,
    keys: &'a [Vec<f64>],
    values: &'a [Vec<f64>],
}

impl Row<'_> {
    fn attend(&self, q: &HostTensor<'_>, output: &mut OracleOutput) {
        let batch_row = (self.request.q_start + self.row) as usize;
        let mut query = vec![0.0f32; q.dim()];
        q.read(batch_row, self.head as usize, &mut query);
        let query: Vec<f64> = query.into_iter().map(f64::from).collect();

        let visible: Vec<u32> = (0..self.request.kv_len).filter(|&key| self.is_visible(key)).collect();
        let scores: Vec<f64> = visible.iter().map(|&key| self.score(&query, key)).collect();
        let sink = self.layer.sinks().map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[self.head as usize]));

        let state = batch_row * output.num_qo_heads + self.head as usize;
        if scores.iter().any(|score| score.is_nan()) {
            // A NaN that the row sees is its result, and never looks like a row that sees nothing.
            output.lse[state] = f64::NAN;
            output.num_visible[state] = u32::try_from(visible.len()).expect("keys have 32-bit positions");
            output.out[state * output.head_dim_vo..][..output.head_dim_vo].fill(f64::NAN);
            return;
        }
        let max = scores.iter().copied().fold(sink, f64::max);
        if max == f64::NEG_INFINITY {
            return; // nothing is visible and there is no sink: O = 0, LSE = −inf
        }
        let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
        let denominator = weights.iter().sum::<f64>() + (sink - max).exp();
        output.lse[state] = max + denominator.ln();
        output.num_visible[state] = u32::try_from(visible.len()).expect("keys have 32-bit positions");

        let out = &mut output.out[state * output.head_dim_vo..][..output.head_dim_vo];
        let mut squares = vec![0.0; out.len()];
        for (&key, weight) in visible.iter().zip(&weights) {
            let probability = weight / denominator;
            for ((out, square), v) in out.iter_mut().zip(&mut squares).zip(&self.values[key as usize]) {
                *out += probability * v;
                *square += (probability * v) * (probability * v);
                output.value_bound[state] = output.value_bound[state].max(v.abs());
            }
            output.score_bound[state] = output.score_bound[state].max(self.score_bound(&query, key));
        }
        output.spread[state] = squares.iter().copied().fold(0.0, f64::max).sqrt();
    }

    fn is_visible(&self, key: u32) -> bool {
        let Request { q_len, kv_len, mask_start, .. } = *self.request;
        if !sees(self.layer, q_len, kv_len, self.row, key) {
            return false;
        }
        let Some(mask) = self.batch.custom_mask() else { return true };
        let bit = mask_start + u64::from(self.row) * u64::from(kv_len) + u64::from(key);
        let byte = mask.bytes()[usize::try_from(bit / 8).expect("the mask is in memory")];
        (byte >> (bit % 8)) % 2 == 1
    }

    fn score(&self, query: &[f64], key: u32) -> f64 {
        let mut dot = 0.0;
        for (q, k) in query.iter().zip(&self.keys[key as usize]) {
            dot += q * k;
        }
        let mut score = dot * f64::from(self.layer.sm_scale());
        if let Some(cap) = self.layer.softcap() {
            let cap = f64::from(cap);
            score = cap * (score / cap).tanh();
        }
        score + self.bias(key)
    }

    /// The ALiBi term: slope × (key position − query position).
    fn bias(&self, key: u32) -> f64 {
        let Some(slopes) = self.layer.alibi_slopes() else { return 0.0 };
        let position = f64::from(self.request.kv_len) - f64::from(self.request.q_len) + f64::from(self.row);
        f64::from(slopes[self.head as usize]) * (f64::from(key) - position)
    }

    fn score_bound(&self, query: &[f64], key: u32) -> f64 {
        let mut sum = 0.0;
        for (q, k) in query.iter().zip(&self.keys[key as usize]) {
            sum += (q * k).abs();
        }
        sum * f64::from(self.layer.sm_scale()) + self.bias(key).abs()
    }
}

//! Owns the yardstick of tolerances: the formulas evaluated in the rounding of an activation dtype, as plain framework
//! code would. Scores and probabilities are rounded to the dtype, sums run in f32 in ascending order.
//! A backend may be off by a small multiple of this error and no more. Accuracy is not its aim; neither is speed.

use attn_metadata::{Batch, Layer, Request};
use half::{bf16, f16};
use kvpool::{Dtype, HostKv, HostTensor};

use super::sees;

/// Rounds to the dtype, to nearest even.
#[must_use]
pub fn round(dtype: Dtype, x: f32) -> f32 {
    match dtype {
        Dtype::F32 => x,
        Dtype::F16 => f16::from_f32(x).to_f32(),
        Dtype::Bf16 => bf16::from_f32(x).to_f32(),
    }
}

/// The outputs `[rows, num_qo_heads, head_dim_vo]` of a naive evaluation in the dtype of `q`.
///
/// # Panics
/// Where the tensors do not fit the batch and the layer.
#[must_use]
pub fn attend(batch: &Batch, layer: &Layer, q: &HostTensor<'_>, kv: &HostKv) -> Vec<f32> {
    let heads = layer.heads();
    let dim = heads.head_dim_vo as usize;
    let mut out = vec![0.0; q.rows() * q.heads() * dim];
    for request in batch.requests() {
        for head in 0..heads.num_qo_heads {
            let (keys, values) = read_kv(batch, request, kv, head / heads.group_size(), q.dtype());
            for row in 0..request.q_len {
                let state = (request.q_start + row) as usize * q.heads() + head as usize;
                let row_out = &mut out[state * dim..][..dim];
                attend_row(&Query { batch, layer, request, row, head }, q, &keys, &values, row_out);
            }
        }
    }
    out
}

struct Query<'a> {
    batch: &'a Batch,
    layer: &'a Layer,
    request: &'a Request,
    row: u32,
    head: u32,
}

fn read_kv(batch: &Batch, request: &Request, kv: &HostKv, head: u32, dtype: Dtype) -> (Vec<Vec<f32>>, Vec<Vec<f32>>) {
    let page_size = batch.page_size().get();
    let read = |plane: kvpool::KvPlane<'_>, scale: f32, position: u32| {
        let mut vector = vec![0.0; plane.layout.head_dim];
        plane.read(batch.page_of(request, position), position % page_size, head, &mut vector);
        vector.iter().map(|x| round(dtype, x * scale)).collect()
    };
    let format = kv.format();
    let keys = (0..request.kv_len).map(|position| read(kv.k(), format.k_scale(), position)).collect();
    let values = (0..request.kv_len).map(|position| read(kv.v(), format.v_scale(), position)).collect();
    (keys, values)
}

fn attend_row(query: &Query<'_>, q: &HostTensor<'_>, keys: &[Vec<f32>], values: &[Vec<f32>], out: &mut [f32]) {
    let Query { batch, layer, request, row, head } = *query;
    let dtype = q.dtype();
    let mut vector = vec![0.0; q.dim()];
    q.read((request.q_start + row) as usize, head as usize, &mut vector);
    let mask = batch.custom_mask();
    let is_visible = |key: u32| {
        sees(layer, request.q_len, request.kv_len, row, key)
            && mask.is_none_or(|mask| mask.is_visible(request, row, key))
    };
    let visible: Vec<u32> = (0..request.kv_len).filter(|&key| is_visible(key)).collect();
    let scores: Vec<f32> = visible.iter().map(|&key| score(query, &vector, &keys[key as usize], key, dtype)).collect();
    let sink = layer.sinks().map_or(f32::NEG_INFINITY, |sinks| sinks[head as usize]);
    let max = scores.iter().copied().fold(sink, f32::max);
    if max == f32::NEG_INFINITY {
        return;
    }
    let weights: Vec<f32> = scores.iter().map(|score| (score - max).exp()).collect();
    let denominator = weights.iter().sum::<f32>() + (sink - max).exp();
    for (&key, weight) in visible.iter().zip(&weights) {
        let probability = round(dtype, weight / denominator);
        for (out, v) in out.iter_mut().zip(&values[key as usize]) {
            *out += probability * v;
        }
    }
    out.iter_mut().for_each(|x| *x = round(dtype, *x));
}

#[expect(clippy::cast_precision_loss, reason = "positions of a test are far below 2^24")]
fn score(query: &Query<'_>, q: &[f32], k: &[f32], key: u32, dtype: Dtype) -> f32 {
    let dot: f32 = q.iter().zip(k).map(|(q, k)| q * k).sum();
    let mut score = round(dtype, round(dtype, dot) * query.layer.sm_scale());
    if let Some(cap) = query.layer.softcap() {
        score = round(dtype, cap * (score / cap).tanh());
    }
    if let Some(slopes) = query.layer.alibi_slopes() {
        let distance = i64::from(key) - query.request.position(query.row);
        score = round(dtype, score + slopes[query.head as usize] * distance as f32);
    }
    score
}

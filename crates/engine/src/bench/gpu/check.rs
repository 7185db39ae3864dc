//! Checks what a measured call wrote: float64 attention on one request, all its heads, its last rows.
//!
//! Keys and values are those that the random elements say, not what the device holds: so a wrong upload shows too.

use attn_metadata::Request;
use kvpool::{Dtype, KvPlaneLayout, f32_to_fp8_e4m3, fp8_e4m3_to_f32};
use rayon::prelude::*;

use super::super::truth::{Vectors, attend};
use super::AnyError;
use super::call::{Call, NEW_K_FIRST, NEW_V_FIRST, Q_FIRST};
use super::noise::Noise;
use crate::replay::{Activation, Elements};

/// Rows that are checked.
const CHECKED_ROWS: u32 = 16;

/// ‖out − truth‖ ÷ ‖truth‖ on the request with the fewest scores. `like`: as the call's tensors were made from.
pub(super) fn relative_error(call: &Call, like: [&Noise; 2]) -> Result<f64, AnyError> {
    let requests = call.batch.requests().iter().filter(|request| request.q_len > 0 && request.kv_len > 0);
    let least = requests.min_by_key(|r| u64::from(r.q_len) * u64::from(r.kv_len));
    let request = least.ok_or("no request has queries and keys")?;
    let heads = call.layer.heads();
    let first_row = request.q_len.saturating_sub(CHECKED_ROWS);
    let got = Rows::download(call, (request.q_start + first_row) as usize, (request.q_len - first_row) as usize)?;
    let of_head = |kv_head: u32| {
        let keys = vectors(call, request, kv_head, like, true);
        let values = vectors(call, request, kv_head, like, false);
        let group = heads.group_size();
        let pairs = (first_row..request.q_len).flat_map(|row| (0..group).map(move |g| (row, kv_head * group + g)));
        let pairs: Vec<(u32, u32)> = pairs.collect();
        let parts = pairs.par_iter().map(|&(row, head)| {
            let truth =
                attend(&call.layer, request.position(row), &query(call, request, row, head, like[0]), &keys, &values);
            let error: f64 = got.get(row - first_row, head).iter().zip(&truth).map(|(x, y)| (x - y).powi(2)).sum();
            (error, truth.iter().map(|y| y.powi(2)).sum::<f64>())
        });
        parts.reduce(|| (0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1))
    };
    let (error, norm) = (0..heads.num_kv_heads).map(of_head).fold((0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1));
    let relative = (error / norm).sqrt();
    // A NaN must not pass for a small error.
    Ok(if relative.is_nan() { f64::INFINITY } else { relative })
}

/// Rows of out.
struct Rows {
    values: Vec<f64>,
    heads: usize,
    dim: usize,
}

impl Rows {
    fn download(call: &Call, first: usize, count: usize) -> Result<Self, AnyError> {
        let heads = call.layer.heads();
        let (num_heads, dim) = (heads.num_qo_heads as usize, heads.head_dim_vo as usize);
        let row_bytes = num_heads * dim * call.dtype.size_bytes();
        let mut bytes = vec![0; count * row_bytes];
        call.out.download(first * row_bytes, &mut bytes)?;
        let shape = [count, num_heads, dim];
        let rows = Activation::new(Elements::from_bytes(call.dtype, &bytes), shape).ok_or("rows of another size")?;
        let mut values = vec![0.0; count * num_heads * dim];
        for (index, to) in values.chunks_exact_mut(dim).enumerate() {
            rows.view().read(index / num_heads, index % num_heads, to);
        }
        Ok(Self { values: values.into_iter().map(f64::from).collect(), heads: num_heads, dim })
    }

    fn get(&self, row: u32, head: u32) -> &[f64] {
        &self.values[(row as usize * self.heads + head as usize) * self.dim..][..self.dim]
    }
}

/// One query, as drawn.
fn query(call: &Call, request: &Request, row: u32, head: u32, noise: &Noise) -> Vec<f64> {
    let heads = call.layer.heads();
    let width = heads.head_dim_qk as usize;
    let begin = ((request.q_start + row) as usize * heads.num_qo_heads as usize + head as usize) * width;
    (0..width).map(|i| f64::from(noise.value(Q_FIRST + begin + i))).collect()
}

/// Keys or values of one head, in order: those of the cache, then those that the call appends.
fn vectors(call: &Call, request: &Request, kv_head: u32, like: [&Noise; 2], is_keys: bool) -> Vectors {
    let plane = if is_keys { call.cache.k() } else { call.cache.v() };
    let appended = if call.batch.slot_mapping().is_some() { request.q_len } else { 0 };
    let num_cached = request.kv_len - appended;
    let width = plane.head_dim;
    let mut data = vec![0.0; request.kv_len as usize * width];
    data.par_chunks_mut(width).zip(0..request.kv_len).for_each(|(to, position)| {
        if position < num_cached {
            cached(call, request, (position, kv_head), &plane, like[1], to);
        } else {
            appended_row(call, request, (position - num_cached, kv_head), like[0], is_keys, to);
        }
    });
    Vectors { width, data }
}

fn cached(call: &Call, request: &Request, at: (u32, u32), plane: &KvPlaneLayout, noise: &Noise, to: &mut [f64]) {
    let (position, kv_head) = at;
    let page_size = call.batch.page_size().get();
    let begin = plane.element(call.batch.page_of(request, position), position % page_size, kv_head);
    let scale = f64::from(call.format().k_scale());
    to.iter_mut().zip(begin..).for_each(|(to, index)| *to = f64::from(noise.value(index)) * scale);
}

/// A new vector as the cache stores it. Values that are columns of the keys are appended with them.
fn appended_row(call: &Call, request: &Request, at: (u32, u32), noise: &Noise, is_keys: bool, to: &mut [f64]) {
    let (row, kv_head) = at;
    let spec = call.layer.kv();
    let is_own = matches!(spec.values, kvpool::Values::Own(_));
    let (first, width) =
        if is_keys || !is_own { (NEW_K_FIRST, spec.head_dim_k) } else { (NEW_V_FIRST, spec.values.head_dim()) };
    let vector = (request.q_start + row) as usize * spec.num_kv_heads as usize + kv_head as usize;
    let begin = first + vector * width as usize;
    for (to, index) in to.iter_mut().zip(begin..) {
        *to = stored(noise.value(index), call);
    }
}

/// A new value after it was stored.
pub(super) fn stored(value: f32, call: &Call) -> f64 {
    let format = call.format();
    if format.dtype().is_scaled() {
        let scale = format.k_scale();
        return f64::from(fp8_e4m3_to_f32(f32_to_fp8_e4m3(value / scale))) * f64::from(scale);
    }
    let rounds = [(kvpool::KvDtype::F16, Dtype::F16), (kvpool::KvDtype::Bf16, Dtype::Bf16)];
    match rounds.into_iter().find(|(kv, _)| *kv == format.dtype()) {
        Some((_, dtype)) => f64::from(attn_reference::oracle::naive::round(dtype, value)),
        None => f64::from(value),
    }
}

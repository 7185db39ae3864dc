//! Float64 attention over a sample of rows, written from the formula: what a measured result is checked against.

use attn_metadata::{Layer, Request};
use kvpool::{HostKv, Slot};

use crate::replay::{Outcome, Problem};

/// Rows of one request and one query head that are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleRows {
    /// The request.
    pub request: usize,
    /// The query head.
    pub head: usize,
    /// At most this many rows, evenly spread, the last one always among them.
    pub max_rows: u32,
}

/// ‖out − truth‖ ÷ ‖truth‖ over the sample, the KV read from the cache as it is after the step. `None` where the sample
/// has no row.
#[must_use]
pub fn relative_error(problem: &Problem, outcome: &Outcome, sample: SampleRows) -> Option<f64> {
    let request = problem.batch.requests().get(sample.request).filter(|r| r.q_len > 0 && sample.max_rows > 0)?;
    let heads = problem.layer.heads();
    let kv_head = u32::try_from(sample.head).ok()? / heads.group_size();
    let keys = Vectors::read(problem, request, kv_head, true);
    let values = Vectors::read(problem, request, kv_head, false);
    let num_rows = request.q_len.min(sample.max_rows);
    let (mut error, mut norm) = (0.0, 0.0);
    for index in 0..num_rows {
        let row = u64::from(request.q_len) * (u64::from(index) + 1) / u64::from(num_rows) - 1;
        let row = u32::try_from(row).ok()?;
        let at = (request.q_start + row) as usize;
        let mut q = vec![0.0; heads.head_dim_qk as usize];
        problem.q.view().read(at, sample.head, &mut q);
        let truth = attend(&problem.layer, request.position(row), &widen(&q), &keys, &values);
        let mut got = vec![0.0; truth.len()];
        outcome.out.view().read(at, sample.head, &mut got);
        error += widen(&got).iter().zip(&truth).map(|(got, truth)| (got - truth).powi(2)).sum::<f64>();
        norm += truth.iter().map(|x| x.powi(2)).sum::<f64>();
    }
    // A NaN must not pass for a small error.
    let relative = (error / norm).sqrt();
    Some(if relative.is_nan() { f64::INFINITY } else { relative })
}

/// The keys or the values of one request and KV head, in order.
pub(super) struct Vectors {
    pub(super) width: usize,
    /// `[kv_len, width]`.
    pub(super) data: Vec<f64>,
}

impl Vectors {
    fn read(problem: &Problem, request: &Request, kv_head: u32, keys: bool) -> Self {
        let (cache, page_size) = (&problem.cache, problem.batch.page_size());
        let shape = cache.shape();
        let width = if keys { shape.head_dim_k } else { shape.head_dim_v } as usize;
        let mut vector = vec![0.0; width];
        let mut data = Vec::with_capacity(request.kv_len as usize * width);
        for position in 0..request.kv_len {
            let page = problem.batch.page_of(request, position);
            let slot = Slot::new(page, position % page_size.get(), page_size).expect("the batch was checked");
            let read = if keys { HostKv::read_k } else { HostKv::read_v };
            read(cache, slot, kv_head, &mut vector);
            data.extend(vector.iter().map(|&x| f64::from(x)));
        }
        Self { width, data }
    }

    fn get(&self, position: usize) -> &[f64] {
        &self.data[position * self.width..][..self.width]
    }

    fn len(&self) -> usize {
        self.data.len() / self.width
    }
}

fn widen(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}

/// One row: scale, softcap, causal mask, window.
pub(super) fn attend(layer: &Layer, position: i64, q: &[f64], keys: &Vectors, values: &Vectors) -> Vec<f64> {
    let sees = |key: usize| {
        let key = i64::try_from(key).unwrap_or(i64::MAX);
        (!layer.is_causal() || key <= position) && layer.window_left().is_none_or(|w| key >= position - i64::from(w))
    };
    let score = |key: usize| {
        let dot: f64 = q.iter().zip(keys.get(key)).map(|(a, b)| a * b).sum();
        let score = dot * f64::from(layer.sm_scale());
        layer.softcap().map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
    };
    let scores: Vec<(usize, f64)> = (0..keys.len()).filter(|&key| sees(key)).map(|key| (key, score(key))).collect();
    let max = scores.iter().map(|(_, score)| *score).fold(f64::NEG_INFINITY, f64::max);
    let (mut out, mut sum) = (vec![0.0; values.width], 0.0);
    for (key, score) in scores {
        let weight = (score - max).exp();
        sum += weight;
        out.iter_mut().zip(values.get(key)).for_each(|(out, value)| *out += weight * value);
    }
    if sum > 0.0 {
        out.iter_mut().for_each(|out| *out /= sum);
    }
    out
}

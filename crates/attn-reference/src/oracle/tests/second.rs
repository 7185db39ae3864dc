//! A second implementation of the same formulas, written differently, to check the first: keys are streamed from the
//! last to the first with a running maximum, and masks are ranges and a bit vector instead of predicates.

use attn_metadata::{HeadShape, LayerParams};

use super::{Problem, assert_close, plain};

struct Streamed {
    max: f64,
    sum: f64,
    acc: Vec<f64>,
}

impl Streamed {
    fn add(&mut self, score: f64, value: &[f64]) {
        let max = self.max.max(score);
        let (old, new) = ((self.max - max).exp(), (score - max).exp());
        self.sum = self.sum * old + new;
        self.acc.iter_mut().zip(value).for_each(|(a, v)| *a = *a * old + new * v);
        self.max = max;
    }
}

/// Outputs and LSEs by streaming.
fn streamed(problem: &Problem) -> (Vec<f64>, Vec<f64>) {
    let HeadShape { num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo } = problem.params.heads;
    let [hq, hkv, dk, dv] = [num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo].map(|n| n as usize);
    let bits: Vec<bool> = problem.mask.iter().flatten().flat_map(|b| (0..8).map(move |i| b & (1 << i) != 0)).collect();
    let (mut out, mut lse) = (Vec::new(), Vec::new());
    let (mut q_start, mut kv_start, mut bit_start) = (0usize, 0usize, 0usize);
    for &(n, len) in &problem.requests {
        let (n, len) = (n as usize, len as usize);
        for row in 0..n {
            for head in 0..hq {
                let q = &problem.q[((q_start + row) * hq + head) * dk..][..dk];
                // The keys lo..hi, with all positions moved up by n to stay above 0.
                let moved = len + row;
                let hi = if problem.params.causal { (moved + 1).saturating_sub(n).min(len) } else { len };
                let lo = problem.params.window_left.map_or(0, |w| moved.saturating_sub(w as usize).saturating_sub(n));
                let mut state = Streamed { max: f64::NEG_INFINITY, sum: 0.0, acc: vec![0.0; dv] };
                for key in (lo..hi).rev() {
                    if problem.mask.is_some() && !bits[bit_start + row * len + key] {
                        continue;
                    }
                    let at = (kv_start + key) * hkv + head * hkv / hq;
                    let k = &problem.k[at * dk..][..dk];
                    let dot: f64 = (0..dk).rev().map(|d| f64::from(q[d]) * f64::from(k[d])).sum();
                    let back = (n + key).cast_signed() - moved.cast_signed();
                    let score = finish(&problem.params, head, dot, i32::try_from(back).unwrap());
                    let v: Vec<f64> = problem.v[at * dv..][..dv].iter().map(|&v| v.into()).collect();
                    state.add(score, &v);
                }
                if let Some(sinks) = problem.params.sinks.as_ref().filter(|s| s[head].is_finite()) {
                    state.add(sinks[head].into(), &vec![0.0; dv]);
                }
                let empty = state.sum == 0.0;
                out.extend(state.acc.iter().map(|a| if empty { 0.0 } else { a / state.sum }));
                lse.push(if empty { f64::NEG_INFINITY } else { state.max + state.sum.ln() });
            }
        }
        (q_start, kv_start, bit_start) = (q_start + n, kv_start + len, bit_start + n * len);
    }
    (out, lse)
}

fn finish(params: &LayerParams, head: usize, dot: f64, back: i32) -> f64 {
    let scaled = dot * f64::from(params.sm_scale);
    let capped = params.softcap.map_or(scaled, |c| (scaled / f64::from(c)).tanh() * f64::from(c));
    params.alibi_slopes.as_ref().map_or(capped, |slopes| f64::from(back).mul_add(slopes[head].into(), capped))
}

fn check(params: &LayerParams, requests: &[(u32, u32)], masked: bool, seed: u64) {
    let mut problem = Problem::random(params.clone(), requests, seed);
    if masked {
        problem = problem.with_random_mask(seed + 1);
    }
    let (out, lse) = streamed(&problem);
    let oracle = problem.run();
    assert_close(&oracle.out, &out);
    assert_close(&oracle.lse, &lse);
}

#[test]
fn both_implementations_agree_over_all_masks_and_terms() {
    let requests = [(3, 11), (5, 2), (1, 8), (0, 5), (2, 0), (6, 6)];
    let heads = HeadShape { num_qo_heads: 6, num_kv_heads: 2, head_dim_qk: 7, head_dim_vo: 4 };
    let mut seed = 100;
    for causal in [true, false] {
        for window_left in [None, Some(0), Some(1), Some(4), Some(50), Some(u32::MAX)] {
            for terms in 0..16u8 {
                let has = |bit: u8| terms & (1 << bit) != 0;
                let params = LayerParams {
                    heads,
                    causal,
                    window_left,
                    softcap: has(0).then_some(1.5),
                    sinks: has(1).then(|| vec![0.5, -1.0, f32::NEG_INFINITY, 3.0, 0.0, 5.0]),
                    alibi_slopes: has(2).then(|| vec![0.5, 0.25, 0.125, -0.5, 0.0, 1.0]),
                    ..plain(6, 2, 7)
                };
                seed += 1;
                check(&params, &requests, has(3), seed);
            }
        }
    }
}

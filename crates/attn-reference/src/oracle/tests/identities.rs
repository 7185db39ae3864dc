//! Identities that hold for attention whatever the values.

use attn_metadata::{HeadShape, Layer, LayerParams};
use kvpool::{Dtype, HostKv, KvFormat, KvScales};

use super::super::{attend, naive};
use super::{Problem, assert_close, plain};

const REQUESTS: [(u32, u32); 4] = [(3, 7), (1, 10), (0, 4), (4, 4)];

#[test]
fn constant_values_come_back() {
    let mut problem = Problem::random(plain(4, 2, 5), &REQUESTS, 1);
    problem.v.fill(1.0);
    let output = problem.run();
    assert_close(&output.out, &vec![1.0; output.out.len()]);
}

#[test]
fn zero_queries_give_the_mean_of_the_values() {
    let mut problem = Problem::random(LayerParams { causal: false, ..plain(1, 1, 2) }, &[(1, 6)], 2);
    problem.q.fill(0.0);
    let mean = |d| problem.v.iter().skip(d).step_by(2).map(|&v| f64::from(v)).sum::<f64>() / 6.0;
    let output = problem.run();
    assert_close(&output.out, &[mean(0), mean(1)]);
    assert_close(&output.lse, &[6.0f64.ln()]);
}

#[test]
fn one_key_gives_the_scaled_dot_product_as_lse() {
    let problem = Problem::random(plain(1, 1, 8), &[(1, 1)], 3);
    let dot: f64 = problem.q.iter().zip(&problem.k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
    assert_close(&problem.run().lse, &[dot * f64::from(0.37f32)]);
}

#[test]
fn identical_keys_add_the_logarithm_of_their_number() {
    let mut problem = Problem::random(plain(1, 1, 4), &[(1, 9)], 4);
    let first: Vec<f32> = problem.k[..4].to_vec();
    problem.k.chunks_mut(4).for_each(|k| k.copy_from_slice(&first));
    let one = Problem { requests: vec![(1, 1)], k: first, v: problem.v[..4].to_vec(), ..problem.clone() };
    assert_close(&problem.run().lse, &[one.run().lse[0] + 9.0f64.ln()]);
}

#[test]
fn shifting_all_scores_shifts_the_lse_alone() {
    // A last column of q that is 1 and of k that is c adds c · scale to every score.
    let mut problem = Problem::random(plain(1, 1, 4), &[(2, 5)], 5);
    problem.q.iter_mut().skip(3).step_by(4).for_each(|q| *q = 1.0);
    problem.k.iter_mut().skip(3).step_by(4).for_each(|k| *k = 0.0);
    let base = problem.run();
    problem.k.iter_mut().skip(3).step_by(4).for_each(|k| *k = 1000.0);
    let shifted = problem.run();
    assert_close(&shifted.out, &base.out);
    let expected: Vec<f64> = base.lse.iter().map(|lse| lse + 1000.0 * f64::from(0.37f32)).collect();
    assert_close(&shifted.lse, &expected);
}

#[test]
fn grouped_heads_equal_heads_with_repeated_kv() {
    let grouped = Problem::random(plain(6, 2, 3), &REQUESTS, 6);
    let repeat = |x: &[f32]| x.chunks(3).flat_map(|head| [head; 3].concat()).collect::<Vec<f32>>();
    let repeated = Problem { params: plain(6, 6, 3), k: repeat(&grouped.k), v: repeat(&grouped.v), ..grouped.clone() };
    assert_eq!(repeated.run(), grouped.run());
}

#[test]
fn a_sink_scales_the_output_by_the_weight_it_leaves() {
    let plain = Problem::random(plain(2, 1, 4), &[(2, 5)], 7);
    let params = LayerParams { sinks: Some(vec![0.5, -2.0]), ..plain.params.clone() };
    let (base, sunk) = (plain.run(), Problem { params, ..plain }.run());
    for state in 0..base.lse.len() {
        let sink = if state % 2 == 0 { 0.5 } else { -2.0 };
        let lse = (base.lse[state].exp() + f64::exp(sink)).ln();
        assert_close(&sunk.lse[state..=state], &[lse]);
        let kept = (base.lse[state] - lse).exp();
        let expected: Vec<f64> = base.out[state * 4..][..4].iter().map(|o| o * kept).collect();
        assert_close(&sunk.out[state * 4..][..4], &expected);
    }
}

#[test]
fn scales_multiply_stored_values() {
    let params = LayerParams { sm_scale: 0.25, ..plain(2, 1, 4) };
    let mut problem = Problem::random(params, &[(2, 5)], 8);
    let exact = |x: &mut f32| *x = (*x * 8.0).round() / 8.0; // an FP8 value, also when scaled by powers of two
    problem.k.iter_mut().chain(&mut problem.v).for_each(exact);
    let batch = problem.batch();
    let layer = Layer::new(problem.params.clone()).unwrap();
    let base = problem.cache(&batch);
    let mut fp8 =
        HostKv::new(base.shape(), kvpool::KvLayout::Hnd, KvFormat::Fp8E4m3(KvScales::new(0.5, 2.0).unwrap())).unwrap();
    let slots: Vec<_> = (0..5).map(kvpool::Slot::from_raw).collect();
    let view = |data| kvpool::HostTensor::packed(data, [5, 1, 4]).unwrap();
    fp8.append(&slots, &view(&problem.k), Some(&view(&problem.v))).unwrap();
    assert_eq!(attend(&batch, &layer, &problem.q(), &fp8), attend(&batch, &layer, &problem.q(), &base));
}

#[test]
fn the_naive_evaluation_differs_by_its_rounding_only() {
    let params = LayerParams {
        heads: HeadShape { head_dim_vo: 3, ..HeadShape::new(4, 2, 8) },
        softcap: Some(5.0),
        sinks: Some(vec![0.1, 0.2, 0.3, 0.4]),
        alibi_slopes: Some(vec![0.01; 4]),
        window_left: Some(4),
        ..plain(4, 2, 8)
    };
    let problem = Problem::random(params, &REQUESTS, 9).with_random_mask(10);
    let batch = problem.batch();
    let layer = Layer::new(problem.params.clone()).unwrap();
    let naive = naive::attend(&batch, &layer, &problem.q(), &problem.cache(&batch));
    for (naive, exact) in naive.iter().zip(&problem.run().out) {
        assert!((f64::from(*naive) - exact).abs() < 1e-6, "{naive} is not {exact}");
    }
    assert_eq!(naive::round(Dtype::Bf16, 1.003), 1.0);
    assert_eq!(naive::round(Dtype::F16, 1.000_3), 1.0);
}

//! One to three tokens, worked out on paper: one head of width 1, scale 1, so a score is a product.

use attn_metadata::LayerParams;

use super::{Problem, assert_close, plain};

fn problem(edit: impl FnOnce(&mut LayerParams), requests: &[(u32, u32)], q: &[f32], k: &[f32], v: &[f32]) -> Problem {
    let mut params = LayerParams { sm_scale: 1.0, ..plain(1, 1, 1) };
    edit(&mut params);
    let (q, k, v) = (q.to_vec(), k.to_vec(), v.to_vec());
    Problem { params, requests: requests.to_vec(), q, k, v, page_size: 2, mask: None }
}

const LN_2: f32 = std::f32::consts::LN_2;

#[test]
fn one_token_returns_its_value_and_score() {
    let output = problem(|_| {}, &[(1, 1)], &[2.0], &[3.0], &[5.0]).run();
    assert_eq!((output.out[0], output.lse[0]), (5.0, 6.0));
}

#[test]
fn two_tokens_are_weighted_by_their_exponentials() {
    // Scores ln 2 and 0: weights 2/3 and 1/3, LSE ln 3. The first row sees the first key alone.
    let output = problem(|_| {}, &[(2, 2)], &[LN_2, LN_2], &[1.0, 0.0], &[3.0, 9.0]).run();
    let ln_2 = f64::from(LN_2);
    let sum = ln_2.exp() + 1.0;
    assert_close(&output.out, &[3.0, (3.0 * ln_2.exp() + 9.0) / sum]);
    assert_close(&output.lse, &[ln_2, sum.ln()]);
    assert!((output.out[1] - 5.0).abs() < 1e-6);
}

#[test]
fn causality_is_aligned_to_the_bottom_right() {
    // q = 0, so every visible key counts the same.
    let mean = |requests: &[(u32, u32)], v: &[f32]| {
        let rows = requests.iter().map(|r| r.0 as usize).sum();
        problem(|_| {}, requests, &vec![0.0; rows], &vec![1.0; v.len()], v).run()
    };
    assert_close(&mean(&[(2, 3)], &[1.0, 2.0, 6.0]).out, &[1.5, 3.0]);
    // More queries than keys: the first row sees nothing.
    let output = mean(&[(3, 2)], &[1.0, 2.0]);
    assert_eq!(output.out, [0.0, 1.0, 1.5]);
    assert_close(&output.lse, &[f64::NEG_INFINITY, 0.0, 2.0f64.ln()]);
    assert_eq!(output.num_visible, [0, 1, 2]);
}

#[test]
fn no_key_at_all_gives_zero_and_minus_infinity() {
    let output = problem(|_| {}, &[(1, 0), (1, 1)], &[1.0, 1.0], &[1.0], &[7.0]).run();
    assert_eq!(output.out, [0.0, 7.0]);
    assert_eq!(output.lse, [f64::NEG_INFINITY, 1.0]);
}

#[test]
fn a_window_holds_the_query_and_so_many_tokens_before() {
    let v = [1.0, 10.0, 100.0, 1000.0];
    let run = |causal, window| {
        let edit = |p: &mut LayerParams| (p.causal, p.window_left) = (causal, Some(window));
        problem(edit, &[(2, 4)], &[0.0; 2], &[0.0; 4], &v).run().out
    };
    assert_close(&run(true, 0), &[100.0, 1000.0]);
    assert_close(&run(true, 1), &[55.0, 550.0]);
    assert_close(&run(true, 9), &[37.0, 277.75]);
    assert_close(&run(false, 1), &[370.0, 550.0]); // from position − 1 to the end
}

#[test]
fn a_custom_mask_applies_together_with_causality() {
    let mut problem = problem(|_| {}, &[(1, 1), (2, 3)], &[0.0; 3], &[0.0; 4], &[5.0, 1.0, 2.0, 6.0]);
    // Bits: request 0: 1; request 1: row 0 sees 0 and 2 (2 is in its future), row 1 sees 1 and 2.
    problem.mask = Some(vec![0b110_1011]);
    assert_close(&problem.run().out, &[5.0, 1.0, 4.0]);
    problem.mask = Some(vec![0b000_0000]);
    assert_eq!(problem.run().lse, [f64::NEG_INFINITY; 3]);
}

#[test]
fn the_cap_comes_before_alibi() {
    let edit = |p: &mut LayerParams| (p.softcap, p.alibi_slopes) = (Some(2.0), Some(vec![0.5]));
    let output = problem(edit, &[(1, 2)], &[1.0], &[4.0, 4.0], &[1.0, 0.0]).run();
    let capped = 2.0 * 2.0f64.tanh();
    let (first, second) = ((capped - 0.5).exp(), capped.exp()); // the first key is one position back
    assert_close(&output.out, &[first / (first + second)]);
    assert_close(&output.lse, &[(first + second).ln()]);
}

#[test]
fn a_sink_takes_weight_and_gives_no_value() {
    let with = |sink| problem(|p| p.sinks = Some(vec![sink]), &[(1, 1)], &[0.0], &[0.0], &[8.0]).run();
    assert_close(&with(0.0).out, &[4.0]);
    assert_close(&with(0.0).lse, &[2.0f64.ln()]);
    assert_close(&with(f32::NEG_INFINITY).out, &[8.0]);
    // A row that sees no key still has its sink.
    let empty = problem(|p| p.sinks = Some(vec![1.5]), &[(1, 0)], &[0.0], &[], &[]).run();
    assert_eq!((empty.out[0], empty.lse[0]), (0.0, 1.5));
}

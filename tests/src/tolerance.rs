//! Owns the one table of tolerances and the comparison of a run with the oracle.
//!
//! A run passes where all of this holds:
//! 1. NaN, +∞ and −∞ are where the oracle has them, and rows that see nothing are exactly O = 0, LSE = −∞ (or the sink);
//! 2. each element is within `atol` or within `rtol`; `atol` is in units of the row's spread (the size of its sum if
//!    its terms had random signs), so that it does not go blind where the output is small because the KV is long;
//! 3. `1 − 2⟨x,y⟩/(⟨x,x⟩ + ⟨y,y⟩) ≤ cos` over the whole output;
//! 4. the largest error is at most a small multiple of that of a naive evaluation in the same dtype.
//!
//! To each the error is added that summing scores in f32 cannot avoid: in proportion to `Σ|q·k|` and to the square root
//! of the number of terms.

use attn_reference::oracle::{OracleOutput, naive};
use kvpool::Dtype;

use crate::harness::{Run, Stop, value};

/// What a backend may be off by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerance {
    /// Absolute error of an output element, in units of the row's spread.
    pub atol: f64,
    /// Relative error of an output element.
    pub rtol: f64,
    /// Cosine difference of the whole output.
    pub cos: f64,
    /// Absolute error of an LSE.
    pub lse_abs: f64,
    /// Relative error of an LSE.
    pub lse_rel: f64,
    /// Multiple of the largest error of the naive evaluation.
    pub naive_factor: f64,
    /// Units in the last place of the largest output, on top of that.
    pub naive_ulps: f64,
    /// Error that underflow causes: outputs below it may be flushed.
    pub floor: f64,
    /// Error of a score, relative to `Σ|q·k|·sm_scale + |bias|`.
    pub score: f64,
}

const EPS: f64 = f32::EPSILON as f64;

/// The table: a row for each dtype of q and out. f32 accumulation is assumed everywhere; with an FP8 cache the oracle
/// works on the values as stored, so the row is that of the output's dtype with probabilities of that dtype.
#[must_use]
pub fn tolerance(q_dtype: Dtype, head_dim_qk: u32) -> Tolerance {
    let score = EPS * f64::from(head_dim_qk).sqrt().max(2.0);
    match q_dtype {
        Dtype::F32 => Tolerance {
            atol: 4e-6,
            rtol: 1e-5,
            cos: 1e-10,
            lse_abs: 1e-6,
            lse_rel: 1e-6,
            naive_factor: 2.0,
            naive_ulps: 8.0,
            floor: 1.2e-38,
            score,
        },
        Dtype::F16 => Tolerance {
            atol: 1.5e-3,
            rtol: 2.0e-3,
            cos: 1e-6,
            lse_abs: 1e-6,
            lse_rel: 8.0 / 65_536.0,
            naive_factor: 2.0,
            naive_ulps: 1.0,
            floor: 3.0e-8,
            score,
        },
        Dtype::Bf16 => Tolerance {
            atol: 1.2e-2,
            rtol: 2.0 / 128.0,
            cos: 5e-6,
            lse_abs: 1e-6,
            lse_rel: 8.0 / 65_536.0,
            naive_factor: 2.0,
            naive_ulps: 1.0,
            floor: 1.2e-38,
            score,
        },
    }
}

/// Compares a run with the oracle; the result is the largest fraction of an allowance that was used.
///
/// `naive` is the naive evaluation in q's dtype, `[rows, heads, dim]`; without one, rule 4 is left out. `sinks` are the
/// layer's.
///
/// # Errors
/// [`Stop::Failed`] naming the rule, the place and the values.
pub fn compare(
    run: &Run,
    oracle: &OracleOutput,
    naive: Option<&[f32]>,
    sinks: Option<&[f32]>,
    allowed: &Tolerance,
) -> Result<f64, Stop> {
    let got = run.out_values();
    check_classes(run, &got, oracle, sinks)?;
    let mut worst = check_elements(&got, oracle, allowed)?;
    worst = worst.max(check_aggregate(&got, oracle, allowed)?);
    if let Some(naive) = naive {
        worst = worst.max(check_against_naive(run.dtype, &got, oracle, naive, allowed)?);
    }
    check_lse(run, oracle, allowed).map(|lse| worst.max(lse))
}

/// Largest error of an element that scores in f32 cannot avoid, for a state.
fn noise(oracle: &OracleOutput, state: usize, allowed: &Tolerance) -> f64 {
    let relative = (allowed.score * oracle.score_bound[state]).min(1.0);
    2.0 * relative * oracle.value_bound[state]
}

fn check_classes(run: &Run, got: &[f32], oracle: &OracleOutput, sinks: Option<&[f32]>) -> Result<(), Stop> {
    let dim = oracle.head_dim_vo;
    let class = |x: f32| (x.is_nan(), x.is_infinite(), x.is_infinite() && x > 0.0);
    for (index, (&got, &exact)) in got.iter().zip(&oracle.out).enumerate() {
        let (state, column) = (index / dim, index % dim);
        let empty = oracle.num_visible[state] == 0;
        if empty && got != 0.0 {
            return Err(at(oracle, state, &format!("sees nothing, but column {column} is {got:e}")));
        }
        let rounded = naive::round(run.dtype, narrow(exact));
        if class(got) != class(rounded) {
            return Err(at(oracle, state, &format!("column {column} is {got:e}, the oracle has {exact:e}")));
        }
    }
    let Some(lse) = &run.lse else { return Ok(()) };
    for (state, bits) in lse.iter().enumerate().filter(|(state, _)| oracle.num_visible[*state] == 0) {
        let used = oracle.lse[state] != f64::NEG_INFINITY;
        let sink = sinks.filter(|_| used).map_or(f32::NEG_INFINITY, |sinks| sinks[state % oracle.num_qo_heads]);
        if *bits != sink.to_bits() {
            let got = f32::from_bits(*bits);
            return Err(at(oracle, state, &format!("sees nothing, but its LSE is {got:e}, not {sink:e}")));
        }
    }
    Ok(())
}

fn check_elements(got: &[f32], oracle: &OracleOutput, allowed: &Tolerance) -> Result<f64, Stop> {
    let mut worst = 0.0f64;
    for (index, (&got, &exact)) in got.iter().zip(&oracle.out).enumerate() {
        let state = index / oracle.head_dim_vo;
        let absolute = allowed.atol * oracle.spread[state] + noise(oracle, state, allowed) + allowed.floor;
        let used = (f64::from(got) - exact).abs() / absolute.max(allowed.rtol * exact.abs());
        if used > 1.0 {
            let text = format!(
                "column {} is {got:e}, the oracle has {exact:e}: {used:.3} × what is allowed",
                index % oracle.head_dim_vo
            );
            return Err(at(oracle, state, &text));
        }
        worst = worst.max(used);
    }
    Ok(worst)
}

fn check_aggregate(got: &[f32], oracle: &OracleOutput, allowed: &Tolerance) -> Result<f64, Stop> {
    let (mut xy, mut squares) = (0.0f64, 0.0f64);
    for (&x, &y) in got.iter().zip(&oracle.out) {
        xy += f64::from(x) * y;
        squares += f64::from(x) * f64::from(x) + y * y;
    }
    let size = allowed.floor * allowed.floor * got.len() as f64;
    let unavoidable = oracle.score_bound.iter().fold(0.0f64, |a, b| a.max(*b)) * allowed.score;
    if squares <= 4.0 * size {
        return Ok(0.0); // all of it may have been flushed
    }
    let limit = allowed.cos + 4.0 * unavoidable.min(1.0).powi(2) + 4.0 * size / squares;
    let difference = 1.0 - 2.0 * xy / squares;
    if difference <= limit {
        return Ok((difference / limit).max(0.0));
    }
    Err(Stop::failed(format!(
        "the outputs differ from the oracle's by a cosine difference of {difference:e} > {limit:e}"
    )))
}

fn check_against_naive(
    dtype: Dtype,
    got: &[f32],
    oracle: &OracleOutput,
    naive: &[f32],
    allowed: &Tolerance,
) -> Result<f64, Stop> {
    let largest =
        |values: &[f32]| values.iter().zip(&oracle.out).map(|(&x, y)| (f64::from(x) - y).abs()).fold(0.0, f64::max);
    let unavoidable = (0..oracle.lse.len()).map(|state| noise(oracle, state, allowed)).fold(0.0, f64::max);
    let size = oracle.out.iter().fold(0.0f64, |a, b| a.max(b.abs()));
    let step = match dtype {
        Dtype::F32 => EPS,
        Dtype::F16 => 2.0f64.powi(-10),
        Dtype::Bf16 => 2.0f64.powi(-7),
    };
    let limit = allowed.naive_factor * largest(naive) + allowed.naive_ulps * step * size + unavoidable + allowed.floor;
    let error = largest(got);
    if error <= limit {
        return Ok(error / limit);
    }
    Err(Stop::failed(format!("the largest error is {error:e}, that of a naive evaluation allows {limit:e}")))
}

fn check_lse(run: &Run, oracle: &OracleOutput, allowed: &Tolerance) -> Result<f64, Stop> {
    let mut worst = 0.0f64;
    for (state, &bits) in run.lse.iter().flatten().enumerate().filter(|(s, _)| oracle.num_visible[*s] > 0) {
        let (got, exact) = (f64::from(value(Dtype::F32, bits)), oracle.lse[state]);
        let absolute = allowed.lse_abs + allowed.score * oracle.score_bound[state];
        let used = (got - exact).abs() / absolute.max(allowed.lse_rel * exact.abs());
        // A NaN is not within anything.
        if used.is_nan() || used > 1.0 {
            let text = format!("LSE is {got:e}, the oracle has {exact:e}: {used:.3} × what is allowed");
            return Err(at(oracle, state, &text));
        }
        worst = worst.max(used);
    }
    Ok(worst)
}

fn at(oracle: &OracleOutput, state: usize, text: &str) -> Stop {
    let (row, head) = (state / oracle.num_qo_heads, state % oracle.num_qo_heads);
    Stop::failed(format!("row {row}, head {head}: {text}"))
}

#[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is the point")]
const fn narrow(x: f64) -> f32 {
    x as f32
}

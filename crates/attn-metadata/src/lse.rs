//! The log-sum-exp of a row as a type, and the merge of partial attention results.
//!
//! A state is a row's output together with its LSE. Merging is how splits, prefix chunks and cascades combine:
//! `lse = ln(e^a + e^b)`, `O = (e^a·Oa + e^b·Ob) / (e^a + e^b)`, both shifted by the larger LSE.

use bytemuck::{Pod, Zeroable};
use thiserror::Error;

/// Natural-log LSE of a row: `ln Σ exp(score)`, −inf where no key is visible.
///
/// A type of its own, since systems differ in base (2 or e) and in the value of an empty row (−inf or +inf).
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Pod, Zeroable)]
#[repr(transparent)]
pub struct Lse(f32);

impl Lse {
    /// The LSE of a row that sees nothing.
    pub const EMPTY: Self = Self(f32::NEG_INFINITY);

    /// From a natural-log value.
    #[must_use]
    pub const fn from_ln(value: f32) -> Self {
        Self(value)
    }

    /// From a base-2 value, as some kernels return it.
    #[must_use]
    pub const fn from_log2(value: f32) -> Self {
        Self(value * std::f32::consts::LN_2)
    }

    /// The natural-log value.
    #[must_use]
    pub const fn ln(self) -> f32 {
        self.0
    }

    /// The value in base 2.
    #[must_use]
    pub const fn log2(self) -> f32 {
        self.0 * std::f32::consts::LOG2_E
    }

    /// Whether the row sees nothing.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == f32::NEG_INFINITY
    }
}

/// Slices of states whose lengths do not fit each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{what} has {got} elements, {expected} are needed")]
#[non_exhaustive]
pub struct StateShapeError {
    /// Which slice.
    pub what: &'static str,
    /// Elements needed.
    pub expected: usize,
    /// Elements given.
    pub got: usize,
}

/// Merges the states `b` into the states `a`, row by row, in place.
///
/// `out`: `[num_states, head_dim]`; `lse`: `[num_states]`, where a state is one (token, head). Where either side is
/// empty the other is the result, bit for bit.
///
/// # Errors
/// [`StateShapeError`] where the lengths do not fit; nothing is written then.
pub fn merge_state(
    a_out: &mut [f32],
    a_lse: &mut [Lse],
    b_out: &[f32],
    b_lse: &[Lse],
    head_dim: usize,
) -> Result<(), StateShapeError> {
    let expect = |what, expected, got| {
        if expected == got { Ok(()) } else { Err(StateShapeError { what, expected, got }) }
    };
    expect("b_lse", a_lse.len(), b_lse.len())?;
    expect("a_out", a_lse.len() * head_dim, a_out.len())?;
    expect("b_out", a_lse.len() * head_dim, b_out.len())?;
    if head_dim == 0 {
        return Ok(());
    }
    let rows = a_out.chunks_exact_mut(head_dim).zip(b_out.chunks_exact(head_dim));
    for ((a, b), (lse_a, lse_b)) in rows.zip(a_lse.iter_mut().zip(b_lse)) {
        *lse_a = merge_row(a, *lse_a, b, *lse_b);
    }
    Ok(())
}

/// Merges `n` states of each row, in ascending order.
///
/// `outs`: `[n, num_states, head_dim]`; `lses`: `[n, num_states]`; writes `out` `[num_states, head_dim]` and `lse`
/// `[num_states]`. With `n = 0` every row is empty: zeros and −inf.
///
/// # Errors
/// [`StateShapeError`] where the lengths do not fit; nothing is written then.
pub fn merge_states(
    outs: &[f32],
    lses: &[Lse],
    head_dim: usize,
    out: &mut [f32],
    lse: &mut [Lse],
) -> Result<(), StateShapeError> {
    let num_states = lse.len();
    let expect = |what, expected, got| {
        if expected == got { Ok(()) } else { Err(StateShapeError { what, expected, got }) }
    };
    expect("out", num_states * head_dim, out.len())?;
    let n = lses.len().checked_div(num_states).unwrap_or(0);
    expect("lses", n * num_states, lses.len())?;
    expect("outs", lses.len() * head_dim, outs.len())?;
    out.fill(0.0);
    lse.fill(Lse::EMPTY);
    for part in 0..n {
        let part_out = &outs[part * num_states * head_dim..][..num_states * head_dim];
        merge_state(out, lse, part_out, &lses[part * num_states..][..num_states], head_dim)?;
    }
    Ok(())
}

fn merge_row(a: &mut [f32], lse_a: Lse, b: &[f32], lse_b: Lse) -> Lse {
    if lse_b.is_empty() {
        return lse_a;
    }
    if lse_a.is_empty() {
        a.copy_from_slice(b);
        return lse_b;
    }
    let max = lse_a.ln().max(lse_b.ln());
    let (weight_a, weight_b) = ((lse_a.ln() - max).exp(), (lse_b.ln() - max).exp());
    let sum = weight_a + weight_b;
    let (weight_a, weight_b) = (weight_a / sum, weight_b / sum);
    for (a, &b) in a.iter_mut().zip(b) {
        *a = *a * weight_a + b * weight_b;
    }
    Lse::from_ln(max + sum.ln())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merging_with_an_empty_state_returns_the_other_bit_for_bit() {
        let (x, lse_x) = ([0.1f32, -0.0, 3.0e38], Lse::from_ln(-17.25));
        let mut left = x;
        let mut lse = [lse_x];
        merge_state(&mut left, &mut lse, &[f32::NAN; 3], &[Lse::EMPTY], 3).unwrap();
        assert_eq!(left.map(f32::to_bits), x.map(f32::to_bits));
        assert_eq!(lse[0], lse_x);
        let mut right = [f32::NAN; 3];
        let mut lse = [Lse::EMPTY];
        merge_state(&mut right, &mut lse, &x, &[lse_x], 3).unwrap();
        assert_eq!(right.map(f32::to_bits), x.map(f32::to_bits));
        assert_eq!(lse[0], lse_x);
    }

    #[test]
    fn two_empty_states_give_zeros_and_minus_infinity() {
        let mut out = [5.0f32; 2];
        let mut lse = [Lse::from_ln(1.0)];
        merge_states(&[0.0; 4], &[Lse::EMPTY; 2], 2, &mut out, &mut lse).unwrap();
        assert_eq!(out, [0.0; 2]);
        assert!(lse[0].is_empty());
    }

    #[test]
    fn large_logits_do_not_overflow() {
        let mut out = [1.0f32];
        let mut lse = [Lse::from_ln(1.0e5)];
        merge_state(&mut out, &mut lse, &[3.0], &[Lse::from_ln(1.0e5)], 1).unwrap();
        assert_eq!(out, [2.0]);
        assert!((lse[0].ln() - (1.0e5 + std::f32::consts::LN_2)).abs() < 0.01);
    }

    #[test]
    fn lengths_are_checked_before_anything_is_written() {
        let mut out = [1.0f32; 4];
        let mut lse = [Lse::from_ln(0.0); 2];
        let error = merge_state(&mut out, &mut lse, &[0.0; 3], &[Lse::EMPTY; 2], 2).unwrap_err();
        assert_eq!(error.to_string(), "b_out has 3 elements, 4 are needed");
        assert_eq!(out, [1.0; 4]);
    }
}

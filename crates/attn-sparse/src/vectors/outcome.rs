//! Owns what an implementation computed for a case, and the first difference to what the file says.

use std::fmt;

use super::file::{Case, Cube};

/// What an implementation computed; what it does not show is `None`.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) block_scores: Option<Cube<f64>>,
    /// Ids with their tail, `[rows][index heads][topk]`.
    pub(crate) by_index_head: Option<Cube<i32>>,
    /// Ids with their tail, `[rows][kv heads][group · topk]`.
    pub(crate) by_kv_head: Option<Cube<i32>>,
    pub(crate) index_out: Option<Cube<f64>>,
    pub(crate) out: Cube<f64>,
}

/// The first place where a result is not what the file says.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// Which result.
    pub what: &'static str,
    /// Where in it.
    pub place: Vec<usize>,
    /// What the file says.
    pub expected: f64,
    /// What was computed.
    pub got: f64,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, place, expected, got } = self;
        let place: String = place.iter().map(|i| format!("[{i}]")).collect();
        write!(f, "{what}{place} is {got}, expected {expected}")
    }
}

/// Tolerances of numbers: `|got − expected| ≤ tolerance · max(1, |expected|)`. Ids must be equal.
pub(crate) fn compare(case: &Case, outcome: &Outcome, tolerance: f64) -> Result<(), Difference> {
    let expected = &case.expected;
    if let Some(scores) = &outcome.block_scores {
        cubes("block_scores", &expected.block_scores, scores, tolerance)?;
    }
    let ids = |cube: &Cube<i32>| -> Cube<f64> {
        cube.iter().map(|row| row.iter().map(|ids| ids.iter().copied().map(f64::from).collect()).collect()).collect()
    };
    if let Some(got) = &outcome.by_index_head {
        cubes("topk_idx_per_index_head", &ids(&expected.topk_idx_per_index_head), &ids(got), 0.0)?;
    }
    if let Some(got) = &outcome.by_kv_head {
        cubes("topk_idx_per_kv_head", &ids(&expected.topk_idx_per_kv_head), &ids(got), 0.0)?;
    }
    match (&expected.idx_o, &outcome.index_out) {
        (Some(expected), Some(got)) => cubes("idx_o", expected, got, tolerance)?,
        (expected, got) => number("idx_o", &[], count(expected.is_some()), count(got.is_some()), 0.0)?,
    }
    cubes("o", &expected.o, &outcome.out, tolerance)
}

fn count(is_there: bool) -> f64 {
    f64::from(u8::from(is_there))
}

pub(crate) fn cubes(
    what: &'static str,
    expected: &Cube<f64>,
    got: &Cube<f64>,
    tolerance: f64,
) -> Result<(), Difference> {
    length(what, &[], expected.len(), got.len())?;
    for (i, (expected, got)) in expected.iter().zip(got).enumerate() {
        length(what, &[i], expected.len(), got.len())?;
        for (j, (expected, got)) in expected.iter().zip(got).enumerate() {
            row(what, &[i, j], expected, got, tolerance)?;
        }
    }
    Ok(())
}

/// Compares two lists.
pub(crate) fn row(
    what: &'static str,
    place: &[usize],
    expected: &[f64],
    got: &[f64],
    tolerance: f64,
) -> Result<(), Difference> {
    length(what, place, expected.len(), got.len())?;
    for (k, (&expected, &got)) in expected.iter().zip(got).enumerate() {
        number(what, &[place, &[k]].concat(), expected, got, tolerance)?;
    }
    Ok(())
}

/// Compares two lists of whole numbers.
pub(crate) fn whole<T: Copy + Into<f64>>(what: &'static str, expected: &[T], got: &[T]) -> Result<(), Difference> {
    let floats = |list: &[T]| -> Vec<f64> { list.iter().map(|&x| x.into()).collect() };
    row(what, &[], &floats(expected), &floats(got), 0.0)
}

fn length(what: &'static str, place: &[usize], expected: usize, got: usize) -> Result<(), Difference> {
    #[expect(clippy::cast_precision_loss, reason = "lengths of a test")]
    let (expected, got) = (expected as f64, got as f64);
    number(what, place, expected, got, 0.0)
}

pub(crate) fn number(
    what: &'static str,
    place: &[usize],
    expected: f64,
    got: f64,
    tolerance: f64,
) -> Result<(), Difference> {
    let is_close = got == expected || (got - expected).abs() <= tolerance * expected.abs().max(1.0);
    if is_close { Ok(()) } else { Err(Difference { what, place: place.to_vec(), expected, got }) }
}

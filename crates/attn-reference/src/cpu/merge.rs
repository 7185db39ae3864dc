//! Owns the merge of row states and their end: division by the sum, sink, LSE.
//! Invariants: merging with a row that has seen nothing gives the other, bit for bit; states merge in the order of
//! their keys; a sink enters once, here.

use super::isa::{Kernel, Simd};
use super::scratch::RowStates;

/// A row's maximum and sum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Moments {
    pub(crate) max: f32,
    pub(crate) sum: f32,
}

impl Moments {
    /// Whether no key was visible. A row that saw only NaN has a maximum of -inf too, but a sum of NaN.
    const fn has_seen_nothing(self) -> bool {
        self.max == f32::NEG_INFINITY && !self.sum.is_nan()
    }
}

/// Merges states over later keys into states over earlier ones.
pub(crate) struct MergeStates<'a> {
    max: &'a mut [f32],
    sum: &'a mut [f32],
    out: &'a mut [f32],
    later_max: &'a [f32],
    later_sum: &'a [f32],
    later_out: &'a [f32],
}

impl<'a> MergeStates<'a> {
    /// Rows `from..from + rows` of `later` into the first `rows` rows of `into`.
    pub(crate) fn new(into: &'a mut RowStates, later: &'a RowStates, from: usize, rows: usize, width: usize) -> Self {
        MergeStates {
            max: &mut into.max[..rows],
            sum: &mut into.sum[..rows],
            out: into.out.get_mut(rows * width),
            later_max: &later.max[from..from + rows],
            later_sum: &later.sum[from..from + rows],
            later_out: &later.out.get((from + rows) * width)[from * width..],
        }
    }
}

impl Kernel for MergeStates<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let width = self.out.len() / self.max.len();
        for row in 0..self.max.len() {
            let later = Moments { max: self.later_max[row], sum: self.later_sum[row] };
            let (out, later_out) = (&mut self.out[row * width..][..width], &self.later_out[row * width..][..width]);
            let mut moments = Moments { max: self.max[row], sum: self.sum[row] };
            merge_row(simd, &mut moments, out, later, later_out);
            (self.max[row], self.sum[row]) = (moments.max, moments.sum);
        }
    }
}

/// Merges one row.
#[inline(always)]
fn merge_row<S: Simd>(simd: S, into: &mut Moments, out: &mut [f32], later: Moments, later_out: &[f32]) {
    if later.has_seen_nothing() {
        return;
    }
    if into.has_seen_nothing() {
        *into = later;
        out.copy_from_slice(later_out);
        return;
    }
    let max = if later.max > into.max { later.max } else { into.max };
    let (a, b) = ((into.max - max).exp(), (later.max - max).exp());
    *into = Moments { max, sum: a.mul_add(into.sum, b * later.sum) };
    let (a, b) = (simd.splat(a), simd.splat(b));
    let out: &mut [S::Row] = bytemuck::cast_slice_mut(out);
    for (x, y) in out.iter_mut().zip(bytemuck::cast_slice::<f32, S::Row>(later_out)) {
        let merged = simd.fma(a, simd.load(x), simd.mul(b, simd.load(y)));
        simd.store(merged, x);
    }
}

/// What a finished row is multiplied by, and its LSE.
///
/// `value_scale` turns stored values into real ones. A row that has seen nothing gives factor 0 and -inf, or the sink.
pub(crate) fn finish(moments: Moments, sink: Option<f32>, value_scale: f32) -> (f32, f32) {
    let Moments { max, sum } = moments;
    let sink = sink.unwrap_or(f32::NEG_INFINITY);
    if moments.has_seen_nothing() {
        return (0.0, sink);
    }
    if sum.is_nan() {
        return (f32::NAN, f32::NAN);
    }
    if sink == f32::NEG_INFINITY {
        return (value_scale / sum, max + sum.ln());
    }
    let top = if sink > max { sink } else { max };
    let weight = (max - top).exp();
    let total = weight.mul_add(sum, (sink - top).exp());
    (value_scale * weight / total, top + total.ln())
}

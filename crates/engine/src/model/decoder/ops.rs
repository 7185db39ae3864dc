//! The operations between the matrix products, on plain f32 slices.
//!
//! Each works row by row: a row's result depends on nothing but the row.

use super::super::config::{Activation, RopeConfig, RopePairs};

/// Writes `x / rms(x) * weight` for each row of `[rows, weight.len()]`. The mean square is summed
/// in f64.
pub(super) fn rms_norm(x: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    for (row, out) in x.chunks_exact(weight.len()).zip(out.chunks_exact_mut(weight.len())) {
        let scale = inverse_rms(row, epsilon);
        for ((out, &v), &w) in out.iter_mut().zip(row).zip(weight) {
            *out = v * scale * w;
        }
    }
}

/// As [`rms_norm`], over `x` itself.
pub(super) fn rms_norm_in_place(x: &mut [f32], weight: &[f32], epsilon: f32) {
    for row in x.chunks_exact_mut(weight.len()) {
        let scale = inverse_rms(row, epsilon);
        row.iter_mut().zip(weight).for_each(|(v, &w)| *v = *v * scale * w);
    }
}

fn inverse_rms(row: &[f32], epsilon: f32) -> f32 {
    let square_sum: f64 = row.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
    let mean_square = square_sum / row.len() as f64;
    // Back to f32 once, after the reciprocal.
    #[allow(clippy::cast_possible_truncation)]
    let scale = (mean_square + f64::from(epsilon)).sqrt().recip() as f32;
    scale
}

/// `gate[i] = activation(gate[i]) * up[i]`.
pub(super) fn activate_mul(activation: Activation, gate: &mut [f32], up: &[f32]) {
    let pairs = gate.iter_mut().zip(up);
    match activation {
        Activation::Silu => pairs.for_each(|(g, &u)| *g = *g / (1.0 + (-*g).exp()) * u),
        Activation::GeluTanh => pairs.for_each(|(g, &u)| *g = gelu_tanh(*g) * u),
    }
}

fn gelu_tanh(x: f32) -> f32 {
    const ROOT_OF_2_OVER_PI: f32 = std::f32::consts::FRAC_2_SQRT_PI * std::f32::consts::FRAC_1_SQRT_2;
    0.5 * x * (1.0 + (ROOT_OF_2_OVER_PI * (x + 0.044_715 * x * x * x)).tanh())
}

/// `x = cap * tanh(x / cap)`.
pub(super) fn softcap(x: &mut [f32], cap: f32) {
    x.iter_mut().for_each(|x| *x = cap * (*x / cap).tanh());
}

/// `x *= factor`.
pub(super) fn scale(x: &mut [f32], factor: f32) {
    x.iter_mut().for_each(|x| *x *= factor);
}

/// `x += y`.
pub(super) fn add(x: &mut [f32], y: &[f32]) {
    for (x, &y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

/// Angles of the rotary embedding for the tokens of one batch.
#[derive(Debug, Default)]
pub(super) struct RopeTable {
    /// `[tokens, num_dims / 2]` cosines.
    cos: Vec<f32>,
    /// `[tokens, num_dims / 2]` sines.
    sin: Vec<f32>,
}

impl RopeTable {
    /// Computes the angles at `positions` (in f64, rounded once).
    pub(super) fn fill(&mut self, positions: &[u32], frequencies: &[f64]) {
        self.cos.clear();
        self.sin.clear();
        for &position in positions {
            for &frequency in frequencies {
                let (sin, cos) = (f64::from(position) * frequency).sin_cos();
                #[allow(clippy::cast_possible_truncation)]
                self.cos.push(cos as f32);
                #[allow(clippy::cast_possible_truncation)]
                self.sin.push(sin as f32);
            }
        }
    }

    /// Turns the pairs of each head of `x` `[tokens, heads, head_dim]`; elements past the rotated
    /// ones stay.
    pub(super) fn rotate(&self, x: &mut [f32], num_heads: usize, head_dim: usize, rope: &RopeConfig) {
        let num_pairs = rope.num_dims / 2;
        let angles = self.cos.chunks_exact(num_pairs).zip(self.sin.chunks_exact(num_pairs));
        for (token, (cos, sin)) in x.chunks_exact_mut(num_heads * head_dim).zip(angles) {
            for head in token.chunks_exact_mut(head_dim) {
                rotate_head(&mut head[..rope.num_dims], cos, sin, rope.pairs);
            }
        }
    }
}

fn rotate_head(head: &mut [f32], cos: &[f32], sin: &[f32], pairs: RopePairs) {
    let turn = |a: &mut f32, b: &mut f32, cos: f32, sin: f32| {
        (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
    };
    let angles = cos.iter().zip(sin);
    match pairs {
        RopePairs::Neighbours => {
            for (pair, (&cos, &sin)) in head.as_chunks_mut().0.iter_mut().zip(angles) {
                let [a, b] = pair;
                turn(a, b, cos, sin);
            }
        }
        RopePairs::Halves => {
            let (left, right) = head.split_at_mut(cos.len());
            for ((a, b), (&cos, &sin)) in left.iter_mut().zip(right).zip(angles) {
                turn(a, b, cos, sin);
            }
        }
    }
}

/// The frequency of each pair: `freq_base^(-2i / num_dims)`, divided by the linear factor and by
/// the model's own factor for the pair where it has such.
pub(super) fn rope_frequencies(rope: &RopeConfig, factors: Option<&[f32]>) -> Vec<f64> {
    let frequency = |pair: usize| {
        let exponent = -2.0 * pair as f64 / rope.num_dims as f64;
        let factor = factors.map_or(1.0, |factors| f64::from(factors[pair]));
        f64::from(rope.freq_base).powf(exponent) / f64::from(rope.linear_factor) / factor
    };
    (0..rope.num_dims / 2).map(frequency).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::cast_possible_truncation)] // frequencies are compared in f32

    use super::*;

    fn assert_close(got: &[f32], expected: &[f32]) {
        assert_eq!(got.len(), expected.len());
        for (g, e) in got.iter().zip(expected) {
            assert!((g - e).abs() <= 1e-6 * e.abs().max(1.0), "{got:?} is not {expected:?}");
        }
    }

    #[test]
    fn rms_norm_of_a_hand_computed_row() {
        let mut out = [0.0; 4];
        // Mean squares 12.5 and 0: the second row shows that epsilon keeps zeros finite.
        rms_norm(&[3.0, 4.0, 0.0, 0.0], &[1.0, 2.0], 1e-12, &mut out);
        assert_close(&out, &[3.0 / 12.5f32.sqrt(), 8.0 / 12.5f32.sqrt(), 0.0, 0.0]);
    }

    #[test]
    fn rms_norm_in_place_is_the_same() {
        let (x, weight) = ([3.0, 4.0, -1.0, 2.5], [1.0, 2.0]);
        let (mut out, mut in_place) = ([0.0; 4], x);
        rms_norm(&x, &weight, 1e-5, &mut out);
        rms_norm_in_place(&mut in_place, &weight, 1e-5);
        assert_eq!(out, in_place);
    }

    #[test]
    fn activations_of_hand_computed_values() {
        let mut gate = [0.0, 1.0, -1000.0];
        activate_mul(Activation::Silu, &mut gate, &[5.0, 2.0, 1.0]);
        assert_close(&gate, &[0.0, 2.0 * 0.731_058_6, 0.0]);
        let mut gate = [0.0, 1.0, -1.0, -1000.0, 1000.0];
        activate_mul(Activation::GeluTanh, &mut gate, &[5.0, 2.0, 2.0, 1.0, 1.0]);
        assert_close(&gate, &[0.0, 2.0 * 0.841_192, -2.0 * 0.158_808, 0.0, 1000.0]);
    }

    #[test]
    fn softcap_bends_to_the_cap() {
        let mut x = [0.0, 30.0, -1e6];
        softcap(&mut x, 30.0);
        assert_close(&x, &[0.0, 30.0 * 0.761_594_2, -30.0]);
    }

    fn rope(linear_factor: f32, pairs: RopePairs) -> RopeConfig {
        RopeConfig { freq_base: 100.0, num_dims: 4, linear_factor, pairs }
    }

    #[test]
    fn rope_turns_pairs_and_leaves_the_tail() {
        let rope = rope(1.0, RopePairs::Neighbours);
        let frequencies = rope_frequencies(&rope, None);
        assert_close(&frequencies.iter().map(|&f| f as f32).collect::<Vec<_>>(), &[1.0, 0.1]);
        let mut table = RopeTable::default();
        table.fill(&[0, 3], &frequencies);
        let mut x = [1.0, 0.0, 1.0, 0.0, 7.0, 1.0, 0.0, 0.0, 2.0, 7.0];
        table.rotate(&mut x, 1, 5, &rope);
        let turned = [3f32.cos(), 3f32.sin(), -2.0 * 0.3f32.sin(), 2.0 * 0.3f32.cos(), 7.0];
        assert_close(&x[..5], &[1.0, 0.0, 1.0, 0.0, 7.0]);
        assert_close(&x[5..], &turned);
        // The same pairs, apart.
        let mut x = [1.0, 1.0, 0.0, 0.0, 7.0, 1.0, 0.0, 0.0, 2.0, 7.0];
        table.rotate(&mut x, 1, 5, &RopeConfig { pairs: RopePairs::Halves, ..rope });
        assert_close(&x[5..], &[turned[0], turned[2], turned[1], turned[3], 7.0]);
    }

    #[test]
    fn rope_factors_slow_the_frequencies() {
        let slowed = rope_frequencies(&rope(2.0, RopePairs::Neighbours), Some(&[1.0, 5.0]));
        assert_close(&slowed.iter().map(|&f| f as f32).collect::<Vec<_>>(), &[0.5, 0.01]);
    }
}

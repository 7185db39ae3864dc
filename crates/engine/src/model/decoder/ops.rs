//! The operations between the matrix products, on plain f32 slices.
//!
//! Each works row by row: a row's result depends on nothing but the row.

use super::super::config::RopeConfig;

/// Writes `x / rms(x) * weight` for each row of `[rows, weight.len()]`. The mean square is summed
/// in f64.
pub(super) fn rms_norm(x: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    for (row, out) in x.chunks_exact(weight.len()).zip(out.chunks_exact_mut(weight.len())) {
        let square_sum: f64 = row.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
        let mean_square = square_sum / weight.len() as f64;
        // Back to f32 once, after the reciprocal.
        #[allow(clippy::cast_possible_truncation)]
        let scale = (mean_square + f64::from(epsilon)).sqrt().recip() as f32;
        for ((out, &v), &w) in out.iter_mut().zip(row).zip(weight) {
            *out = v * scale * w;
        }
    }
}

/// `gate[i] = silu(gate[i]) * up[i]`.
pub(super) fn silu_mul(gate: &mut [f32], up: &[f32]) {
    for (g, &u) in gate.iter_mut().zip(up) {
        *g = *g / (1.0 + (-*g).exp()) * u;
    }
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

    /// Rotates each pair of neighbours `(2i, 2i+1)` of each head of `x` `[tokens, heads, head_dim]`;
    /// elements past the rotated ones stay. GGUF stores the llama architecture's Q and K weights
    /// permuted so that the pairs are neighbours.
    pub(super) fn rotate(&self, x: &mut [f32], num_heads: usize, head_dim: usize, num_dims: usize) {
        let num_pairs = num_dims / 2;
        let angles = self.cos.chunks_exact(num_pairs).zip(self.sin.chunks_exact(num_pairs));
        for (token, (cos, sin)) in x.chunks_exact_mut(num_heads * head_dim).zip(angles) {
            for head in token.chunks_exact_mut(head_dim) {
                let pairs = head[..num_dims].chunks_exact_mut(2);
                for ((pair, &cos), &sin) in pairs.zip(cos).zip(sin) {
                    (pair[0], pair[1]) = (pair[0] * cos - pair[1] * sin, pair[0] * sin + pair[1] * cos);
                }
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
    fn silu_of_hand_computed_values() {
        let mut gate = [0.0, 1.0, -1000.0];
        silu_mul(&mut gate, &[5.0, 2.0, 1.0]);
        assert_close(&gate, &[0.0, 2.0 * 0.731_058_6, 0.0]);
    }

    #[test]
    fn rope_turns_neighbours_and_leaves_the_tail() {
        let rope = RopeConfig { freq_base: 100.0, num_dims: 4, linear_factor: 1.0 };
        let frequencies = rope_frequencies(&rope, None);
        assert_close(&frequencies.iter().map(|&f| f as f32).collect::<Vec<_>>(), &[1.0, 0.1]);
        let mut table = RopeTable::default();
        table.fill(&[0, 3], &frequencies);
        let mut x = [1.0, 0.0, 1.0, 0.0, 7.0, 1.0, 0.0, 0.0, 2.0, 7.0];
        table.rotate(&mut x, 1, 5, 4);
        let turned = [3f32.cos(), 3f32.sin(), -2.0 * 0.3f32.sin(), 2.0 * 0.3f32.cos(), 7.0];
        assert_close(&x[..5], &[1.0, 0.0, 1.0, 0.0, 7.0]);
        assert_close(&x[5..], &turned);
    }

    #[test]
    fn rope_factors_slow_the_frequencies() {
        let rope = RopeConfig { freq_base: 100.0, num_dims: 4, linear_factor: 2.0 };
        let slowed = rope_frequencies(&rope, Some(&[1.0, 5.0]));
        assert_close(&slowed.iter().map(|&f| f as f32).collect::<Vec<_>>(), &[0.5, 0.01]);
    }
}

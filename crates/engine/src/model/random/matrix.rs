//! Random matrices and the few operations between attention calls, in plain `f32`, a row at a time.

use std::ops::Range;

/// Numbers from a seed.
#[derive(Debug)]
pub(super) struct Noise(u64);

impl Noise {
    pub(super) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Uniform in −1..1.
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let bits = u16::try_from(self.0 >> 48).expect("16 bits");
        f32::from(bits) / 32768.0 - 1.0
    }

    /// A matrix `[num_out, num_in]` that keeps the size of what it is multiplied with.
    #[expect(clippy::cast_precision_loss, reason = "widths of a small model")]
    pub(super) fn matrix(&mut self, num_out: usize, num_in: usize) -> Matrix {
        let scale = (3.0 / num_in as f32).sqrt();
        Matrix { num_in, weight: (0..num_out * num_in).map(|_| self.next() * scale).collect() }
    }

    /// Weights of a norm, near 1.
    pub(super) fn norm(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| 1.0 + 0.1 * self.next()).collect()
    }
}

/// A matrix `[num_out, num_in]`.
#[derive(Debug)]
pub(super) struct Matrix {
    num_in: usize,
    weight: Vec<f32>,
}

impl Matrix {
    /// `x · weightᵀ` for each row of `x`, `[rows, num_in]`. A row does not depend on the others.
    pub(super) fn product(&self, x: &[f32]) -> Vec<f32> {
        let dot = |x: &[f32], w: &[f32]| x.iter().zip(w).map(|(a, b)| a * b).sum::<f32>();
        let rows = x.chunks_exact(self.num_in);
        rows.flat_map(|x| self.weight.chunks_exact(self.num_in).map(move |w| dot(x, w))).collect()
    }

    /// The elements, row by row.
    pub(super) fn elements(&self) -> &[f32] {
        &self.weight
    }

    /// A row of the matrix.
    pub(super) fn row(&self, index: usize) -> &[f32] {
        &self.weight[index * self.num_in..(index + 1) * self.num_in]
    }
}

/// `x / rms(x) · weight` for each row of `[rows, weight.len()]`.
#[expect(clippy::cast_precision_loss, reason = "widths of a small model")]
pub(super) fn rms_norm(x: &[f32], weight: &[f32]) -> Vec<f32> {
    let norm = |row: &[f32]| -> Vec<f32> {
        let mean = row.iter().map(|v| v * v).sum::<f32>() / row.len() as f32;
        let scale = (mean + 1e-6).sqrt().recip();
        row.iter().zip(weight).map(|(v, w)| v * scale * w).collect()
    };
    x.chunks_exact(weight.len()).flat_map(norm).collect()
}

/// Turns some columns of each head of `[tokens, heads · dim]` by the angles of its token's position; the first half of
/// them is paired with the second.
pub(super) fn rotate(x: &mut [f32], positions: &[u32], dim: usize, columns: &Range<usize>) {
    let half = columns.len() / 2;
    let width = x.len() / positions.len().max(1);
    for (token, &position) in x.chunks_exact_mut(width.max(1)).zip(positions) {
        for head in token.chunks_exact_mut(dim).map(|head| &mut head[columns.clone()]) {
            for i in 0..half {
                let exponent = f64::from(u32::try_from(i).expect("a small width"))
                    / f64::from(u32::try_from(half).expect("a small width"));
                let (sin, cos) = (f64::from(position) * 10_000f64.powf(-exponent)).sin_cos();
                #[expect(clippy::cast_possible_truncation, reason = "rounded once")]
                let (sin, cos) = (sin as f32, cos as f32);
                let (a, b) = (head[i], head[i + half]);
                (head[i], head[i + half]) = (a * cos - b * sin, a * sin + b * cos);
            }
        }
    }
}

/// The gated MLP of a layer.
#[derive(Debug)]
pub(super) struct Mlp {
    norm: Vec<f32>,
    gate: Matrix,
    up: Matrix,
    down: Matrix,
}

impl Mlp {
    pub(super) fn new(noise: &mut Noise, hidden: usize, inner: usize) -> Self {
        Self {
            norm: noise.norm(hidden),
            gate: noise.matrix(inner, hidden),
            up: noise.matrix(inner, hidden),
            down: noise.matrix(hidden, inner),
        }
    }

    /// What it adds to the stream.
    pub(super) fn delta(&self, hidden: &[f32]) -> Vec<f32> {
        let x = rms_norm(hidden, &self.norm);
        self.down.product(&gated(&self.gate.product(&x), &self.up.product(&x)))
    }
}

/// `x += y`.
pub(super) fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

/// `silu(gate) · up`.
fn gated(gate: &[f32], up: &[f32]) -> Vec<f32> {
    gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect()
}

/// Checks the arrays of a step against each other and the model, before anything is computed.
pub(super) fn check(
    input: &crate::lm::ModelInput<'_>,
    vocab_size: usize,
    context_length: usize,
) -> Result<(), crate::lm::ForwardError> {
    use crate::lm::ForwardError;
    let (num_tokens, num_positions) = (input.tokens.len(), input.positions.len());
    if num_tokens != num_positions {
        return Err(ForwardError::Positions { num_tokens, num_positions });
    }
    for (row, (&token, &position)) in input.tokens.iter().zip(input.positions).enumerate() {
        if token as usize >= vocab_size {
            return Err(ForwardError::Token { row, token, vocab_size });
        }
        if position as usize >= context_length {
            return Err(ForwardError::Position { row, position, context_length });
        }
    }
    match input.logit_rows.iter().find(|row| **row >= num_tokens) {
        Some(&row) => Err(ForwardError::LogitRow { row, num_tokens }),
        None => Ok(()),
    }
}

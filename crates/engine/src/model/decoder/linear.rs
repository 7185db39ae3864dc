//! Linear layers: `y = x wᵀ + b` in f32, on candle's matrix product.
//!
//! For few rows the product runs as `w xᵀ`, which streams the weights once and is several times
//! faster than `x wᵀ` there; for many rows it is the other way round. A single row is computed as
//! two: the product has a separate path for vectors, which sums in another order, and with that
//! path avoided a row's bits were the same in every batch size measured (2 to 512 rows, the shapes of a
//! 135M model). Rows of very small layers (below some 100 x 100) can still differ in the last bit.

use candle_core::{CpuStorage, Device, Storage, Tensor};

/// Up to this many rows the product runs with the weights on the left.
const MAX_ROWS_WEIGHTS_LEFT: usize = 64;

/// A linear layer.
#[derive(Debug, Clone)]
pub(super) struct Linear {
    /// `[out, in]`.
    weight: Tensor,
    bias: Option<Vec<f32>>,
    num_in: usize,
    num_out: usize,
}

impl Linear {
    /// Takes a weight `[num_out, num_in]` and a bias of `num_out`.
    pub(super) fn new(weight: &Tensor, bias: Option<Vec<f32>>) -> candle_core::Result<Self> {
        let (num_out, num_in) = weight.dims2()?;
        Ok(Self { weight: weight.contiguous()?, bias, num_in, num_out })
    }

    /// `x` `[rows, in]` into `out`, which becomes `[rows, out]`.
    pub(super) fn forward(&self, x: &[f32], out: &mut Vec<f32>) -> candle_core::Result<()> {
        let num_rows = x.len() / self.num_in;
        out.clear();
        out.resize(num_rows * self.num_out, 0.0);
        match num_rows {
            0 => return Ok(()),
            1 => self.product(&x.repeat(2), 2, out)?,
            _ => self.product(x, num_rows, out)?,
        }
        if let Some(bias) = &self.bias {
            out.chunks_exact_mut(self.num_out).for_each(|row| super::ops::add(row, bias));
        }
        Ok(())
    }

    /// Computes `num_rows` rows and keeps as many as `out` holds.
    fn product(&self, x: &[f32], num_rows: usize, out: &mut [f32]) -> candle_core::Result<()> {
        let x = Tensor::from_slice(x, (num_rows, self.num_in), &Device::Cpu)?;
        if num_rows > MAX_ROWS_WEIGHTS_LEFT {
            let y = x.matmul(&self.weight.t()?)?;
            return with_slice(&y, |y| out.copy_from_slice(&y[..out.len()]));
        }
        let y = self.weight.matmul(&x.t()?)?;
        with_slice(&y, |y| {
            for (row_idx, row) in out.chunks_exact_mut(self.num_out).enumerate() {
                for (out, y) in row.iter_mut().zip(y.chunks_exact(num_rows)) {
                    *out = y[row_idx];
                }
            }
        })
    }

    /// Copies row `index` of the weight (a token's embedding) into `out`.
    pub(super) fn copy_row(&self, index: usize, out: &mut [f32]) -> candle_core::Result<()> {
        let start = index * self.num_in;
        with_slice(&self.weight, |weight| out.copy_from_slice(&weight[start..start + self.num_in]))
    }
}

/// Gives `f` the elements of a contiguous f32 tensor in memory.
fn with_slice<T>(tensor: &Tensor, f: impl FnOnce(&[f32]) -> T) -> candle_core::Result<T> {
    let (storage, layout) = tensor.storage_and_layout();
    let (Storage::Cpu(CpuStorage::F32(elements)), Some((start, end))) = (&*storage, layout.contiguous_offsets()) else {
        candle_core::bail!("expected a contiguous f32 tensor in memory, got {tensor:?}");
    };
    Ok(f(&elements[start..end]))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values in -1..1 that look random.
    fn noise(len: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let step = |_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 8_388_608.0 - 1.0
        };
        (0..len).map(step).collect()
    }

    fn layer(num_out: usize, num_in: usize, bias: Option<Vec<f32>>) -> Linear {
        let weight = Tensor::from_vec(noise(num_out * num_in, 7), (num_out, num_in), &Device::Cpu).unwrap();
        Linear::new(&weight, bias).unwrap()
    }

    #[test]
    fn every_row_count_agrees_with_a_sum_in_f64() {
        let (num_out, num_in) = (5, 33);
        let weight = noise(num_out * num_in, 7);
        let bias = noise(num_out, 9);
        let layer = layer(num_out, num_in, Some(bias.clone()));
        let mut out = Vec::new();
        for num_rows in [0, 1, 2, 3, 64, 65, 100] {
            let x = noise(num_rows * num_in, 3);
            layer.forward(&x, &mut out).unwrap();
            assert_eq!(out.len(), num_rows * num_out);
            for (i, &got) in out.iter().enumerate() {
                let (row, column) = (i / num_out, i % num_out);
                let pairs = x[row * num_in..].iter().zip(&weight[column * num_in..][..num_in]);
                let sum: f64 = pairs.map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
                let expected = sum + f64::from(bias[column]);
                assert!((f64::from(got) - expected).abs() < 1e-4, "rows {num_rows}, element {i}: {got} {expected}");
            }
        }
    }

    #[test]
    fn a_row_has_the_same_bits_in_every_batch() {
        let layer = layer(192, 576, None);
        let row = noise(576, 11);
        let mut alone = Vec::new();
        layer.forward(&row, &mut alone).unwrap();
        for num_rows in [2, 3, 7, 8, 33, 64, 65, 130] {
            let mut x = noise(num_rows * 576, 5);
            let place = num_rows / 2;
            x[place * 576..][..576].copy_from_slice(&row);
            let mut out = Vec::new();
            layer.forward(&x, &mut out).unwrap();
            assert_eq!(out[place * 192..][..192], alone[..], "{num_rows} rows");
        }
    }
}

//! Owns [`MlaWeights`]: `kv_b_proj`, checked, with its rows by head and use.

use std::fmt;
use std::sync::Arc;

use kvpool::HostSlice;

use crate::{MlaError, MlaWidths};

/// `kv_b_proj` `[num_heads * (nope + value), latent]`: for each head `nope` rows for the keys, then `value` rows for the
/// values. Finite. Shared, so that clones are cheap.
#[derive(Clone)]
pub struct MlaWeights {
    widths: MlaWidths,
    num_heads: u32,
    kv_b_proj: Arc<[f32]>,
}

impl MlaWeights {
    /// Checks and widens the weights, row-major as the model file has them.
    ///
    /// # Errors
    /// [`MlaError::NoHeads`], [`MlaError::WeightLen`], [`MlaError::WeightValue`].
    pub fn new<'a>(
        widths: MlaWidths,
        num_heads: u32,
        kv_b_proj: impl Into<HostSlice<'a>>,
    ) -> Result<MlaWeights, MlaError> {
        if num_heads == 0 {
            return Err(MlaError::NoHeads);
        }
        let kv_b_proj = kv_b_proj.into();
        let MlaShape { nope, value, latent } = MlaShape::of(widths);
        let expected = u128::from(num_heads) * u128::from(nope + value) * u128::from(latent);
        if kv_b_proj.len() as u128 != expected {
            let expected = u64::try_from(expected).unwrap_or(u64::MAX);
            return Err(MlaError::WeightLen { got: kv_b_proj.len(), expected, num_heads, nope, value, latent });
        }
        let kv_b_proj = widened(kv_b_proj);
        if let Some(at) = kv_b_proj.iter().position(|x| !x.is_finite()) {
            let (row, column) = (at / latent as usize, at % latent as usize);
            return Err(MlaError::WeightValue { row, column, got: kv_b_proj[at] });
        }
        Ok(MlaWeights { widths, num_heads, kv_b_proj })
    }

    /// Heads that `rows` rows of `kv_b_proj` are for, where the caller knows the number of heads alone: the width of a
    /// head's part.
    ///
    /// # Errors
    /// [`MlaError::NoHeads`], [`MlaError::RowsNotDivisible`].
    pub const fn rows_per_head(rows: u32, num_heads: u32) -> Result<u32, MlaError> {
        match rows.checked_rem(num_heads) {
            None => Err(MlaError::NoHeads),
            Some(0) => Ok(rows / num_heads),
            Some(_) => Err(MlaError::RowsNotDivisible { rows, num_heads }),
        }
    }

    /// The widths.
    #[must_use]
    pub const fn widths(&self) -> MlaWidths {
        self.widths
    }

    /// Heads.
    #[must_use]
    pub const fn num_heads(&self) -> u32 {
        self.num_heads
    }

    /// The rows `Uk` `[nope, latent]` of a head.
    ///
    /// # Panics
    /// Where there is no such head. So does [`MlaWeights::value_rows`].
    #[must_use]
    pub fn key_rows(&self, head: u32) -> &[f32] {
        &self.head_rows(head)[..self.widths.nope() as usize * self.widths.latent() as usize]
    }

    /// The rows `Uv` `[value, latent]` of a head.
    #[must_use]
    pub fn value_rows(&self, head: u32) -> &[f32] {
        &self.head_rows(head)[self.widths.nope() as usize * self.widths.latent() as usize..]
    }

    fn head_rows(&self, head: u32) -> &[f32] {
        let len = self.widths.up() as usize * self.widths.latent() as usize;
        &self.kv_b_proj[head as usize * len..][..len]
    }
}

/// The three widths of the matrix.
struct MlaShape {
    nope: u32,
    value: u32,
    latent: u32,
}

impl MlaShape {
    const fn of(widths: MlaWidths) -> MlaShape {
        MlaShape { nope: widths.nope(), value: widths.value(), latent: widths.latent() }
    }
}

fn widened(data: HostSlice<'_>) -> Arc<[f32]> {
    match data {
        HostSlice::F32(data) => data.into(),
        HostSlice::F16(data) => data.iter().map(|x| x.to_f32()).collect(),
        HostSlice::Bf16(data) => data.iter().map(|x| x.to_f32()).collect(),
    }
}

impl fmt::Debug for MlaWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MlaWeights")
            .field("widths", &self.widths)
            .field("num_heads", &self.num_heads)
            .finish_non_exhaustive()
    }
}

impl PartialEq for MlaWeights {
    fn eq(&self, other: &MlaWeights) -> bool {
        (self.widths, self.num_heads) == (other.widths, other.num_heads)
            && (Arc::ptr_eq(&self.kv_b_proj, &other.kv_b_proj) || self.kv_b_proj == other.kv_b_proj)
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    fn widths() -> MlaWidths {
        MlaWidths::new(3, 2, 2, 1).unwrap()
    }

    #[test]
    fn rows_are_found_by_head_and_use() {
        let data: Vec<f32> = (0u8..18).map(f32::from).collect();
        let weights = MlaWeights::new(widths(), 2, &data).unwrap();
        assert_eq!(weights.key_rows(1), &data[9..15]);
        assert_eq!(weights.value_rows(1), &data[15..18]);
        let half: Vec<bf16> = data.iter().map(|x| bf16::from_f32(*x)).collect();
        assert_eq!(MlaWeights::new(widths(), 2, &half).unwrap(), weights);
    }

    #[test]
    fn weights_that_do_not_fit_are_refused() {
        let data = [0.5f32; 18];
        let refused = |num_heads, data: &[f32]| MlaWeights::new(widths(), num_heads, data).unwrap_err();
        assert_eq!(refused(0, &data), MlaError::NoHeads);
        let error = refused(3, &data);
        assert_eq!(error, MlaError::WeightLen { got: 18, expected: 27, num_heads: 3, nope: 2, value: 1, latent: 3 });
        assert_eq!(error.to_string(), "kv_b_proj holds 18 elements, 27 are needed: 3 heads x (2 + 1) x latent 3");
        for bad in [f32::NAN, f32::INFINITY] {
            let mut data = data;
            data[10] = bad;
            assert!(matches!(refused(2, &data), MlaError::WeightValue { row: 3, column: 1, .. }));
        }
    }

    #[test]
    fn rows_that_heads_cannot_share_are_refused() {
        assert_eq!(MlaWeights::rows_per_head(4096, 16), Ok(256));
        assert_eq!(MlaWeights::rows_per_head(4096, 0), Err(MlaError::NoHeads));
        let error = MlaWeights::rows_per_head(4096, 17).unwrap_err();
        assert_eq!(error, MlaError::RowsNotDivisible { rows: 4096, num_heads: 17 });
    }
}

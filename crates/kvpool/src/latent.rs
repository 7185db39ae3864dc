//! Owns the row of a quantised latent cache ([`LatentRow`]): `latent` values as FP8 E4M3 with one `f32` scale for each
//! 128 of them, then `rope` values as bf16.
//! Invariants: bytes of a row are `latent + 4 * latent / 128 + 2 * rope`, codes first, then scales, then bf16, each in
//! the machine's order; code x scale of its block = real value. 512 and 64 give the 656 bytes of the usual row.
//! Does not know pages or slots.

use half::bf16;

use crate::error::ShapeError;
use crate::fp8::{f32_to_fp8_e4m3, fp8_e4m3_to_f32};
use crate::slice::HostSlice;

/// Values that share a scale.
pub const LATENT_BLOCK: usize = 128;

/// Bytes of a scale.
const SCALE_BYTES: usize = size_of::<f32>();
/// Bytes of a RoPE value.
const ROPE_BYTES: usize = size_of::<bf16>();
/// The largest E4M3 value.
const MAX_CODE_VALUE: f32 = 448.0;

/// The widths of a quantised latent row, and where its parts lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LatentRow {
    latent: u32,
    rope: u32,
}

impl LatentRow {
    /// A row of `latent` quantised values and `rope` values in bf16.
    ///
    /// # Errors
    /// [`ShapeError::LatentRow`] where `latent` is not a positive multiple of 128, or `rope` is odd.
    pub const fn new(latent: u32, rope: u32) -> Result<LatentRow, ShapeError> {
        if latent == 0 || !(latent as usize).is_multiple_of(LATENT_BLOCK) || !rope.is_multiple_of(2) {
            return Err(ShapeError::LatentRow { latent, rope });
        }
        Ok(LatentRow { latent, rope })
    }

    /// The row of keys of `head_dim_k` elements whose first `head_dim_v` are the values.
    ///
    /// # Errors
    /// As [`LatentRow::new`], and [`ShapeError::SharedColumns`] where the values are wider than the keys.
    pub const fn of_widths(head_dim_k: u32, head_dim_v: u32) -> Result<LatentRow, ShapeError> {
        match head_dim_k.checked_sub(head_dim_v) {
            Some(rope) => LatentRow::new(head_dim_v, rope),
            None => {
                let (end, head_dim_k) = (head_dim_v as usize, head_dim_k as usize);
                Err(ShapeError::SharedColumns { v_column: 0, end, head_dim_k })
            }
        }
    }

    /// Quantised values: the first columns of the row.
    #[must_use]
    pub const fn latent(self) -> usize {
        self.latent as usize
    }

    /// Values in bf16: the last columns of the row.
    #[must_use]
    pub const fn rope(self) -> usize {
        self.rope as usize
    }

    /// All values of the row.
    #[must_use]
    pub const fn width(self) -> usize {
        self.latent() + self.rope()
    }

    /// Bytes of the row.
    #[must_use]
    pub const fn bytes(self) -> usize {
        self.rope_offset() + self.rope() * ROPE_BYTES
    }

    /// Bytes of a row of such keys and values by the formula, whether or not there can be one.
    pub(crate) const fn bytes_of_widths(head_dim_k: u32, head_dim_v: u32) -> u64 {
        let scales = (head_dim_v as u64).div_ceil(LATENT_BLOCK as u64) * SCALE_BYTES as u64;
        let rope = head_dim_k.saturating_sub(head_dim_v) as u64 * ROPE_BYTES as u64;
        head_dim_v as u64 + scales + rope
    }

    /// Byte of the row where the scales begin.
    #[must_use]
    pub const fn scale_offset(self) -> usize {
        self.latent()
    }

    /// Byte of the row where the bf16 values begin.
    #[must_use]
    pub const fn rope_offset(self) -> usize {
        self.latent() + self.latent() / LATENT_BLOCK * SCALE_BYTES
    }

    /// The codes of a row.
    ///
    /// # Panics
    /// Where `row` does not hold [`LatentRow::bytes`] bytes. So do the other parts.
    #[must_use]
    #[inline]
    pub fn codes(self, row: &[u8]) -> &[u8] {
        &row[..self.latent()]
    }

    /// The scale of a block of codes.
    ///
    /// # Panics
    /// Where there is no such block.
    #[must_use]
    #[inline]
    pub fn scale(self, row: &[u8], block: usize) -> f32 {
        let scales = &row[self.scale_offset()..self.rope_offset()];
        let bytes = &scales.as_chunks::<SCALE_BYTES>().0[block];
        f32::from_ne_bytes(*bytes)
    }

    /// The bytes of the bf16 values; they need not be aligned.
    #[must_use]
    #[inline]
    pub fn rope_bytes(self, row: &[u8]) -> &[[u8; ROPE_BYTES]] {
        row[self.rope_offset()..self.bytes()].as_chunks().0
    }

    /// Reads the first `out.len()` values of a row as real values.
    pub(crate) fn read(self, row: &[u8], out: &mut [f32]) {
        let (latent, rope) = out.split_at_mut(self.latent().min(out.len()));
        for (block, (out, codes)) in latent.chunks_mut(LATENT_BLOCK).zip(row.chunks(LATENT_BLOCK)).enumerate() {
            let scale = self.scale(row, block);
            for (out, code) in out.iter_mut().zip(codes) {
                *out = fp8_e4m3_to_f32(*code) * scale;
            }
        }
        for (out, bytes) in rope.iter_mut().zip(self.rope_bytes(row)) {
            *out = bf16::from_ne_bytes(*bytes).to_f32();
        }
    }

    /// Quantises the values `source[at..]` into a row.
    pub(crate) fn write(self, row: &mut [u8], source: HostSlice<'_>, at: usize) {
        let get = |index: usize| match source {
            HostSlice::F32(data) => data[at + index],
            HostSlice::F16(data) => data[at + index].to_f32(),
            HostSlice::Bf16(data) => data[at + index].to_f32(),
        };
        for block in 0..self.latent() / LATENT_BLOCK {
            let columns = block * LATENT_BLOCK..(block + 1) * LATENT_BLOCK;
            let scale = block_scale(columns.clone().map(get));
            for column in columns {
                row[column] = f32_to_fp8_e4m3(get(column) / scale);
            }
            let start = self.scale_offset() + block * SCALE_BYTES;
            row[start..start + SCALE_BYTES].copy_from_slice(&scale.to_ne_bytes());
        }
        for index in 0..self.rope() {
            let start = self.rope_offset() + index * ROPE_BYTES;
            let value = bf16::from_f32(get(self.latent() + index));
            row[start..start + ROPE_BYTES].copy_from_slice(&value.to_ne_bytes());
        }
    }
}

/// The scale of a block: its largest finite magnitude / 448, and never subnormal; 1 where there is none above 0.
///
/// So the largest value becomes ±448, infinities saturate to it, and NaN stays NaN without harm to its neighbours.
fn block_scale(values: impl Iterator<Item = f32>) -> f32 {
    let largest = values.map(f32::abs).filter(|x| x.is_finite()).fold(0.0, f32::max);
    if largest == 0.0 { 1.0 } else { (largest / MAX_CODE_VALUE).max(f32::MIN_POSITIVE) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usual_row_has_656_bytes_and_its_parts_in_order() {
        let row = LatentRow::new(512, 64).unwrap();
        assert_eq!((row.bytes(), row.width()), (656, 576));
        assert_eq!((row.scale_offset(), row.rope_offset()), (512, 528));
        assert_eq!(LatentRow::of_widths(576, 512), Ok(row));
        assert_eq!(LatentRow::bytes_of_widths(576, 512), 656);
        assert_eq!(LatentRow::new(128, 0).unwrap().bytes(), 132);
    }

    #[test]
    fn widths_that_no_row_has_are_refused() {
        for (latent, rope) in [(0, 64), (64, 64), (500, 64), (512, 63), (129, 0)] {
            assert_eq!(LatentRow::new(latent, rope), Err(ShapeError::LatentRow { latent, rope }));
        }
        let error = LatentRow::of_widths(512, 640).unwrap_err();
        assert_eq!(error, ShapeError::SharedColumns { v_column: 0, end: 640, head_dim_k: 512 });
    }

    /// The row of one block of `values`, and what it reads back as.
    fn stored(values: &[f32]) -> (f32, Vec<f32>) {
        let row = LatentRow::new(128, 2).unwrap();
        let mut block = vec![0.0; row.width()];
        block[..values.len()].copy_from_slice(values);
        let mut bytes = vec![0xa5; row.bytes()];
        row.write(&mut bytes, HostSlice::F32(&block), 0);
        let mut out = vec![9.0; row.width()];
        row.read(&bytes, &mut out);
        (row.scale(&bytes, 0), out)
    }

    #[test]
    fn a_block_is_scaled_by_its_largest_value() {
        let (scale, out) = stored(&[-896.0, 448.0, 2.0, 0.0]);
        assert_eq!(scale, 2.0);
        assert_eq!(out[..4], [-896.0, 448.0, 2.0, 0.0]);
        let (scale, out) = stored(&[0.0, -0.0]);
        assert_eq!((scale, out[0], out[1]), (1.0, 0.0, 0.0));
        let (scale, out) = stored(&[1e-44]);
        assert_eq!((scale, out[0]), (f32::MIN_POSITIVE, 0.0));
        let (_, out) = stored(&[f32::MAX, -f32::MAX]);
        assert!(out[0].is_finite() && out[0] >= 0.999 * f32::MAX && out[1] == -out[0]);
    }

    #[test]
    fn what_is_not_finite_harms_nobody_else() {
        let (scale, out) = stored(&[f32::NAN, 448.0, f32::INFINITY, f32::NEG_INFINITY, 1.0]);
        assert_eq!(scale, 1.0);
        assert!(out[0].is_nan());
        assert_eq!(out[1..5], [448.0, 448.0, -448.0, 1.0]);
        let (scale, out) = stored(&[f32::INFINITY]);
        assert_eq!((scale, out[0], out[1]), (1.0, 448.0, 0.0));
        let (_, out) = stored(&[f32::NAN]);
        assert!(out[0].is_nan() && out[1] == 0.0);
    }
}

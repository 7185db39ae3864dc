//! Owns how a KV value is stored: dtype and scales together ([`KvFormat`]), so that neither can be lost.
//! Invariant: scales are finite, normal and positive; stored value x scale = real value.
//! Does not store or convert anything.

use std::fmt;
use std::str::FromStr;

use crate::error::KvPart;
use crate::latent::LatentRow;
use crate::slice::UnknownName;

/// How the values of a KV cache are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvDtype {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// FP8 E4M3 without infinities.
    Fp8E4m3,
    /// Quantised latent rows, see [`LatentRow`]: FP8 E4M3 with a scale for each 128 values, and bf16. The values of a
    /// layer are the first columns of its keys.
    Fp8Latent,
}

impl KvDtype {
    /// All of them.
    pub const ALL: [KvDtype; 5] = [KvDtype::F32, KvDtype::F16, KvDtype::Bf16, KvDtype::Fp8E4m3, KvDtype::Fp8Latent];

    /// Those that store one element for each value, in keys and values of any width.
    pub const ELEMENTWISE: [KvDtype; 4] = [KvDtype::F32, KvDtype::F16, KvDtype::Bf16, KvDtype::Fp8E4m3];

    /// Bytes of one element of a buffer, which is what offsets and strides count: a value, or a byte of a row.
    #[must_use]
    pub const fn element_bytes(self) -> usize {
        match self {
            KvDtype::F32 => 4,
            KvDtype::F16 | KvDtype::Bf16 => 2,
            KvDtype::Fp8E4m3 | KvDtype::Fp8Latent => 1,
        }
    }

    /// Bytes that a token of one head takes: a key of `head_dim_k` elements and a value of `head_dim_v` beside it, or
    /// in it where the dtype is of rows.
    #[must_use]
    pub const fn token_bytes(self, head_dim_k: u32, head_dim_v: u32) -> u64 {
        match self {
            KvDtype::Fp8Latent => LatentRow::bytes_of_widths(head_dim_k, head_dim_v),
            _ => (head_dim_k as u64 + head_dim_v as u64) * self.element_bytes() as u64,
        }
    }

    /// Whether stored values are real values divided by a scale.
    #[must_use]
    pub const fn is_scaled(self) -> bool {
        match self {
            KvDtype::F32 | KvDtype::F16 | KvDtype::Bf16 => false,
            KvDtype::Fp8E4m3 | KvDtype::Fp8Latent => true,
        }
    }

    /// The name in files and on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            KvDtype::F32 => "f32",
            KvDtype::F16 => "f16",
            KvDtype::Bf16 => "bf16",
            KvDtype::Fp8E4m3 => "fp8_e4m3",
            KvDtype::Fp8Latent => "fp8_latent",
        }
    }
}

impl fmt::Display for KvDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for KvDtype {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<KvDtype, UnknownName> {
        KvDtype::ALL
            .into_iter()
            .find(|dtype| dtype.name() == name)
            .ok_or_else(|| UnknownName::new("kv dtype", name, "f32, f16, bf16, fp8_e4m3, fp8_latent"))
    }
}

/// A scale that cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// The scale is 0, negative, NaN, infinite or subnormal.
    #[error("{part}_scale is {value}, expected a finite, normal number above 0")]
    Scale {
        /// Whose scale.
        part: KvPart,
        /// The scale, as `f32`.
        value: f32,
    },
}

/// The scales of a scaled format, one for K and one for V of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KvScales {
    k: f32,
    v: f32,
}

impl KvScales {
    /// Scales `k` and `v`: stored value x scale = real value.
    ///
    /// # Errors
    /// [`FormatError::Scale`] naming the one that is 0, negative, NaN, infinite or subnormal (a `1e-50` that became an
    /// `f32` is 0).
    pub fn new(k: f32, v: f32) -> Result<KvScales, FormatError> {
        for (part, value) in [(KvPart::K, k), (KvPart::V, v)] {
            if !(value.is_normal() && value > 0.0) {
                return Err(FormatError::Scale { part, value });
            }
        }
        Ok(KvScales { k, v })
    }

    /// Scale of K, finite, normal, above 0.
    #[must_use]
    pub const fn k(self) -> f32 {
        self.k
    }

    /// Scale of V, finite, normal, above 0.
    #[must_use]
    pub const fn v(self) -> f32 {
        self.v
    }
}

/// How the KV values of a layer are stored: dtype, and scales where the dtype has them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum KvFormat {
    /// `f32`, unscaled.
    F32,
    /// `f16`, unscaled.
    F16,
    /// `bf16`, unscaled.
    Bf16,
    /// FP8 E4M3 with its scales.
    Fp8E4m3(KvScales),
    /// Quantised latent rows; each row has its scales in it.
    Fp8Latent,
}

impl KvFormat {
    /// The element type.
    #[must_use]
    pub const fn dtype(self) -> KvDtype {
        match self {
            KvFormat::F32 => KvDtype::F32,
            KvFormat::F16 => KvDtype::F16,
            KvFormat::Bf16 => KvDtype::Bf16,
            KvFormat::Fp8E4m3(_) => KvDtype::Fp8E4m3,
            KvFormat::Fp8Latent => KvDtype::Fp8Latent,
        }
    }

    /// What a stored K value is multiplied by; 1 where the format has no scales or has them in its rows.
    #[must_use]
    pub const fn k_scale(self) -> f32 {
        match self {
            KvFormat::Fp8E4m3(scales) => scales.k(),
            KvFormat::F32 | KvFormat::F16 | KvFormat::Bf16 | KvFormat::Fp8Latent => 1.0,
        }
    }

    /// What a stored V value is multiplied by; 1 where the format has no scales or has them in its rows.
    #[must_use]
    pub const fn v_scale(self) -> f32 {
        match self {
            KvFormat::Fp8E4m3(scales) => scales.v(),
            KvFormat::F32 | KvFormat::F16 | KvFormat::Bf16 | KvFormat::Fp8Latent => 1.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unusable_scales_are_refused_by_name() {
        #[allow(clippy::cast_possible_truncation)]
        let underflowed = 1e-50f64 as f32;
        for bad in [0.0, -0.0, -1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, underflowed, 1e-40] {
            let FormatError::Scale { part, .. } = KvScales::new(bad, 1.0).unwrap_err();
            assert_eq!(part, KvPart::K);
            let FormatError::Scale { part, .. } = KvScales::new(1.0, bad).unwrap_err();
            assert_eq!(part, KvPart::V);
        }
        let message = KvScales::new(0.5, -1.0).unwrap_err().to_string();
        assert_eq!(message, "v_scale is -1, expected a finite, normal number above 0");
    }

    #[test]
    fn a_format_keeps_its_scales_apart() {
        let format = KvFormat::Fp8E4m3(KvScales::new(0.5, 2.0).unwrap());
        assert_eq!((format.k_scale(), format.v_scale(), format.dtype()), (0.5, 2.0, KvDtype::Fp8E4m3));
        assert_eq!((KvFormat::Bf16.k_scale(), KvFormat::F16.v_scale()), (1.0, 1.0));
    }

    #[test]
    fn dtype_names_parse_back() {
        for dtype in KvDtype::ALL {
            assert_eq!(dtype.name().parse(), Ok(dtype));
        }
        assert!("e5m2".parse::<KvDtype>().is_err());
    }
}

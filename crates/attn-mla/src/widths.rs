//! Owns [`MlaWidths`]: the four widths of latent attention, and what follows from them.

use std::fmt;

use attn_metadata::HeadShape;

use crate::MlaError;

/// The widths of latent attention, in elements. All ≥ 1 but `rope`, which may be 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MlaWidths {
    latent: u32,
    rope: u32,
    nope: u32,
    value: u32,
}

impl MlaWidths {
    /// DeepSeek-V2 and V3: 512 latent, 64 RoPE, 128 without position, values of 128.
    pub const DEEPSEEK: MlaWidths = MlaWidths { latent: 512, rope: 64, nope: 128, value: 128 };

    /// Widths `latent` of a row's first part, `rope` of its second, `nope` of a query's and key's part without
    /// position, and `value`.
    ///
    /// # Errors
    /// [`MlaError::ZeroWidth`] where one but `rope` is 0, [`MlaError::WideWidths`] where a sum of two does not fit 31
    /// bits.
    pub fn new(latent: u32, rope: u32, nope: u32, value: u32) -> Result<MlaWidths, MlaError> {
        let named = [("latent", latent), ("nope", nope), ("value", value)];
        if let Some((what, _)) = named.into_iter().find(|(_, width)| *width == 0) {
            return Err(MlaError::ZeroWidth { what });
        }
        let sums = [("latent + rope", latent, rope), ("nope + rope", nope, rope), ("nope + value", nope, value)];
        for (what, a, b) in sums {
            let got = u64::from(a) + u64::from(b);
            if got > u64::from(u32::MAX / 2) {
                return Err(MlaError::WideWidths { what, got });
            }
        }
        Ok(MlaWidths { latent, rope, nope, value })
    }

    /// Width of a row's first part, which is also the width of absorbed values.
    #[must_use]
    pub const fn latent(self) -> u32 {
        self.latent
    }

    /// Width of the part with the position, in rows and in queries.
    #[must_use]
    pub const fn rope(self) -> u32 {
        self.rope
    }

    /// Width of a query's part without position.
    #[must_use]
    pub const fn nope(self) -> u32 {
        self.nope
    }

    /// Width of a value and of an output.
    #[must_use]
    pub const fn value(self) -> u32 {
        self.value
    }

    /// Width of a stored row, and of an absorbed query: `latent + rope`.
    #[must_use]
    pub const fn row(self) -> u32 {
        self.latent + self.rope
    }

    /// Width of a query: `nope + rope`. The scale comes from it.
    #[must_use]
    pub const fn query(self) -> u32 {
        self.nope + self.rope
    }

    /// Elements of a head of `kv_b_proj` for each latent value: `nope + value`.
    #[must_use]
    pub const fn up(self) -> u32 {
        self.nope + self.value
    }

    /// The shape of a layer as seen from outside: unabsorbed queries and outputs, one KV head.
    #[must_use]
    pub const fn heads(self, num_heads: u32) -> HeadShape {
        HeadShape { num_qo_heads: num_heads, num_kv_heads: 1, head_dim_qk: self.query(), head_dim_vo: self.value() }
    }

    /// The shape of the absorbed attention: all heads query one KV head, whose values are the first columns of its keys.
    #[must_use]
    pub const fn absorbed_heads(self, num_heads: u32) -> HeadShape {
        HeadShape { num_qo_heads: num_heads, num_kv_heads: 1, head_dim_qk: self.row(), head_dim_vo: self.latent() }
    }

    /// The shape of the expanded attention: each head has keys and values of its own.
    #[must_use]
    pub const fn expanded_heads(self, num_heads: u32) -> HeadShape {
        HeadShape {
            num_qo_heads: num_heads,
            num_kv_heads: num_heads,
            head_dim_qk: self.query(),
            head_dim_vo: self.value(),
        }
    }
}

impl fmt::Display for MlaWidths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MlaWidths { latent, rope, nope, value } = self;
        write!(f, "latent {latent}, rope {rope}, nope {nope}, value {value}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widths_that_cannot_be_are_refused_by_name() {
        for (widths, what) in [([0, 1, 1, 1], "latent"), ([1, 0, 0, 1], "nope"), ([1, 0, 1, 0], "value")] {
            let [latent, rope, nope, value] = widths;
            assert_eq!(MlaWidths::new(latent, rope, nope, value), Err(MlaError::ZeroWidth { what }));
        }
        let half = u32::MAX / 2;
        let error = MlaWidths::new(half, 1, 1, 1).unwrap_err();
        assert_eq!(error, MlaError::WideWidths { what: "latent + rope", got: 1 << 31 });
        assert!(MlaWidths::new(half, 0, 1, 1).is_ok());
    }

    #[test]
    fn the_usual_widths_are_576_over_512_absorbed_and_192_over_128_expanded() {
        let widths = MlaWidths::new(512, 64, 128, 128).unwrap();
        assert_eq!(widths, MlaWidths::DEEPSEEK);
        let absorbed = widths.absorbed_heads(16);
        assert_eq!((absorbed.head_dim_qk, absorbed.head_dim_vo, absorbed.group_size()), (576, 512, 16));
        let expanded = widths.expanded_heads(16);
        assert_eq!((expanded.head_dim_qk, expanded.head_dim_vo, expanded.group_size()), (192, 128, 1));
        assert_eq!(widths.heads(16).head_dim_qk, 192);
    }
}

//! Owns [`Scale`]: the multiplier of a score, which can be made from unabsorbed widths alone.

use crate::{MlaError, MlaWidths};

/// The multiplier of q·k for latent attention: a factor over the root of the **unabsorbed** query width.
///
/// Absorbed queries are wider, but their dot products are the same numbers, so the scale must not follow the width.
/// There is no way to make one from `latent + rope`; and where a number is brought along, [`Scale::checked`] refuses
/// those that must have come from there.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scale(f32);

impl Scale {
    /// `1 / √(nope + rope)`.
    #[must_use]
    pub fn of(widths: MlaWidths) -> Scale {
        Scale(root(widths.query()))
    }

    /// `factor / √(nope + rope)`, for models that scale their scores further (by the square of YaRN's `mscale`, say).
    ///
    /// # Errors
    /// [`MlaError::Scale`] where the product is not finite and above 0, [`MlaError::AbsorbedScale`] as for
    /// [`Scale::checked`].
    pub fn with_factor(widths: MlaWidths, factor: f32) -> Result<Scale, MlaError> {
        Scale::checked(widths, factor * root(widths.query()))
    }

    /// A scale that somebody else has worked out.
    ///
    /// # Errors
    /// [`MlaError::Scale`] where it is not finite and above 0; [`MlaError::AbsorbedScale`] where it is `1 / √latent` or
    /// `1 / √(latent + rope)` to a relative 1e-5 and those widths are not the query's.
    pub fn checked(widths: MlaWidths, scale: f32) -> Result<Scale, MlaError> {
        if !(scale.is_finite() && scale > 0.0) {
            return Err(MlaError::Scale { got: scale });
        }
        let is_from = |width: u32| width != widths.query() && (scale / root(width) - 1.0).abs() < 1e-5;
        match [widths.row(), widths.latent()].into_iter().find(|width| is_from(*width)) {
            Some(width) => Err(MlaError::AbsorbedScale { got: scale, width, expected: root(widths.query()) }),
            None => Ok(Scale(scale)),
        }
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> f32 {
        self.0
    }
}

/// `1 / √width`.
#[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is the point")]
fn root(width: u32) -> f32 {
    (1.0 / f64::from(width).sqrt()) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIDTHS: MlaWidths = MlaWidths::DEEPSEEK;

    #[test]
    fn the_scale_is_of_the_unabsorbed_width() {
        assert!((Scale::of(WIDTHS).get() - 0.072_168_79).abs() < 1e-7);
        assert_eq!(Scale::with_factor(WIDTHS, 2.0).unwrap().get(), 2.0 * Scale::of(WIDTHS).get());
        assert_eq!(Scale::checked(WIDTHS, 0.5).unwrap().get(), 0.5);
    }

    #[test]
    fn a_scale_of_an_absorbed_width_is_refused() {
        for (got, width) in [(1.0 / 576.0f32.sqrt(), 576), (1.0 / 512.0f32.sqrt(), 512)] {
            let error = Scale::checked(WIDTHS, got).unwrap_err();
            assert_eq!(error, MlaError::AbsorbedScale { got, width, expected: Scale::of(WIDTHS).get() });
            assert!(error.to_string().contains("absorbed width"), "{error}");
        }
        // Where the widths are equal, nobody can tell, and it does not matter.
        let equal = MlaWidths::new(128, 64, 128, 128).unwrap();
        assert!(Scale::checked(equal, Scale::of(equal).get()).is_ok());
    }

    #[test]
    fn a_scale_that_is_no_scale_is_refused() {
        for got in [0.0, -1.0, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(Scale::checked(WIDTHS, got), Err(MlaError::Scale { got }));
        }
        assert!(matches!(Scale::checked(WIDTHS, f32::NAN), Err(MlaError::Scale { .. })));
        assert!(matches!(Scale::with_factor(WIDTHS, f32::MAX * 2.0), Err(MlaError::Scale { .. })));
    }
}

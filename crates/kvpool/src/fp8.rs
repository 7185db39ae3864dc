//! Owns the conversion between `f32` and FP8 E4M3: 1 sign, 4 exponent (bias 7), 3 mantissa bits, no
//! infinity, NaN at `0x7f` and `0xff`, largest value 448, smallest 2^-9.
//! Rounds to nearest even and saturates. Does not know of scales; [`crate::KvFormat`] does.

/// Bits of 448.0, the largest finite E4M3 value.
const MAX_BITS: u32 = 448.0f32.to_bits();
/// Bits of 2^-6, the smallest normal E4M3 value.
const MIN_NORMAL_BITS: u32 = 0.015_625_f32.to_bits();
/// Bits of `f32` infinity; a larger magnitude is a NaN.
const INF_BITS: u32 = f32::INFINITY.to_bits();
/// Mantissa bits that `f32` has and E4M3 has not.
const DROPPED_BITS: u32 = 20;
/// Difference of the exponent biases, 127 − 7.
const BIAS_DIFFERENCE: u32 = 120;
/// One unit in the last place at 2^14 is 2^-9, the E4M3 subnormal step; adding it rounds to that step.
const SUBNORMAL_ROUNDER: f32 = 16_384.0;

/// The E4M3 code nearest to `x`, ties to even. Beyond ±448, infinity included, it is ±448; NaN stays NaN with its sign.
#[must_use]
pub const fn f32_to_fp8_e4m3(x: f32) -> u8 {
    let bits = x.to_bits();
    let sign = (bits >> 24) & 0x80;
    let magnitude = bits & 0x7fff_ffff;
    let code = if magnitude > INF_BITS {
        0x7f
    } else if magnitude >= MAX_BITS {
        0x7e
    } else if magnitude >= MIN_NORMAL_BITS {
        let half = (1 << (DROPPED_BITS - 1)) - 1;
        let rounded = magnitude + half + ((magnitude >> DROPPED_BITS) & 1);
        (rounded >> DROPPED_BITS) - (BIAS_DIFFERENCE << 3)
    } else {
        (f32::from_bits(magnitude) + SUBNORMAL_ROUNDER).to_bits() - SUBNORMAL_ROUNDER.to_bits()
    };
    // The code is at most 0x7f in each branch, so no bit is lost.
    (sign | code).to_le_bytes()[0]
}

/// The value of an E4M3 code, exact.
#[must_use]
#[inline]
pub fn fp8_e4m3_to_f32(code: u8) -> f32 {
    FP8_E4M3_TO_F32[usize::from(code)]
}

/// The value of every E4M3 code. Entries `0x7f` and `0xff` are NaN.
pub static FP8_E4M3_TO_F32: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut code = 0u32;
    while code < 256 {
        table[code as usize] = decode(code);
        code += 1;
    }
    table
};

const fn decode(code: u32) -> f32 {
    let sign = (code & 0x80) << 24;
    let (exponent, mantissa) = ((code >> 3) & 0xf, code & 7);
    if exponent == 0xf && mantissa == 7 {
        return f32::from_bits(sign | f32::NAN.to_bits());
    }
    if exponent == 0 {
        let magnitude = mantissa as f32 / 512.0;
        return f32::from_bits(sign | magnitude.to_bits());
    }
    f32::from_bits(sign | ((exponent + BIAS_DIFFERENCE) << 23) | (mantissa << DROPPED_BITS))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All finite non-negative values in code order, from the definition in `f64`.
    fn positive_values() -> Vec<f64> {
        (0u8..0x7f)
            .map(|code| {
                let (exponent, mantissa) = (i32::from(code >> 3), f64::from(code & 7));
                if exponent == 0 {
                    mantissa / 8.0 * 2f64.powi(-6)
                } else {
                    (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7)
                }
            })
            .collect()
    }

    /// Nearest code by looking at every value; on a tie the even code.
    fn slow_nearest(x: f32, values: &[f64]) -> u8 {
        let sign = if x.is_sign_negative() { 0x80 } else { 0 };
        if x.is_nan() {
            return sign | 0x7f;
        }
        let magnitude = f64::from(x).abs();
        let mut best = (f64::INFINITY, 0u8);
        for (code, value) in (0u8..).zip(values) {
            let distance = (value - magnitude).abs();
            if distance < best.0 || (distance == best.0 && code % 2 == 0) {
                best = (distance, code);
            }
        }
        // At infinity all distances are infinite; it saturates.
        sign | if magnitude.is_infinite() { 0x7e } else { best.1 }
    }

    #[test]
    fn every_code_round_trips() {
        let values = positive_values();
        for code in 0..=u8::MAX {
            let value = fp8_e4m3_to_f32(code);
            assert_eq!(f32_to_fp8_e4m3(value), code, "code {code:#x} is {value}");
            if code & 0x7f == 0x7f {
                assert!(value.is_nan());
            } else {
                let expected = values[usize::from(code & 0x7f)];
                assert_eq!(f64::from(value).abs(), expected);
                assert_eq!(value.is_sign_negative(), code >= 0x80);
            }
        }
    }

    #[test]
    fn rounding_equals_a_slow_nearest_search() {
        let values = positive_values();
        let check = |x: f32| assert_eq!(f32_to_fp8_e4m3(x), slow_nearest(x, &values), "x = {x:e} ({:#x})", x.to_bits());
        // Every exponent, sign and upper mantissa, with the low bits at, just below and just above.
        for upper in 0..=0xffffu32 {
            for low in [0, 1, 0x7fff, 0x8000, 0xffff] {
                check(f32::from_bits(upper << 16 | low));
            }
        }
        // Every midpoint between neighbours, and its two neighbouring floats.
        for pair in values.windows(2) {
            #[allow(clippy::cast_possible_truncation)]
            let middle = ((pair[0] + pair[1]) / 2.0) as f32;
            for x in [middle, middle.next_up(), middle.next_down()] {
                check(x);
                check(-x);
            }
        }
    }

    #[test]
    fn beyond_the_range_it_saturates() {
        for x in [448.1, 463.9, 464.0, 479.0, 480.0, 1e9, f32::MAX, f32::INFINITY] {
            assert_eq!(f32_to_fp8_e4m3(x), 0x7e);
            assert_eq!(f32_to_fp8_e4m3(-x), 0xfe);
        }
        assert_eq!(f32_to_fp8_e4m3(f32::NAN.copysign(1.0)), 0x7f);
        assert_eq!(f32_to_fp8_e4m3(f32::NAN.copysign(-1.0)), 0xff);
    }
}

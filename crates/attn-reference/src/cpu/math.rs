//! Owns the vectorised elementary functions: [`exp`] for arguments at or below 0 (the softmax) and [`tanh`] (the
//! softcap). Invariants: `exp(0) = 1` and `exp(-inf) = 0` exactly, NaN stays NaN, no other argument gives one.
//! The coefficients are a weighted minimax fit over the reduced range, rounded to `f32`.

use super::isa::Simd;

/// Below this, `exp` is subnormal in `f32` and given as 0.
const EXP_MIN: f32 = -87.336_54;

/// `exp(x)` for `x <= 88`, to 1.5 ulp; 0 where the result would be subnormal.
#[inline(always)]
pub(crate) fn exp<S: Simd>(simd: S, x: S::Vector) -> S::Vector {
    // n = x / ln 2 rounded to an integer: adding 1.5 * 2^23 leaves no bits for a fraction.
    let magic = simd.splat(12_582_912.0);
    let n = simd.sub(simd.fma(x, simd.splat(std::f32::consts::LOG2_E), magic), magic);
    // r = x - n ln 2, ln 2 in two parts of which the first has 9 bits, so that its product with n is exact.
    let r = simd.fma(n, simd.splat(-355.0 / 512.0), x);
    let r = simd.fma(n, simd.splat(2.121_944_4e-4), r);
    let mut p = simd.splat(1.381_459_9e-3);
    for c in [8.368_717_5e-3, 4.166_839e-2, 0.166_665_21, 0.499_999_94] {
        p = simd.fma(p, r, simd.splat(c));
    }
    // exp(r) = 1 + (r + r² p)
    let p = simd.add(simd.fma(simd.mul(r, r), p, r), simd.splat(1.0));
    simd.zero_if_lt(x, simd.splat(EXP_MIN), simd.scale_by_pow2(p, n))
}

/// `tanh(x)` to 2.5 ulp.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(simd: S, x: S::Vector) -> S::Vector {
    let a = simd.abs(x);
    // Near 0: x + x z P(z), z = x². Beyond: 1 - 2e / (1 + e) with e = exp(-2|x|).
    let z = simd.mul(x, x);
    let mut p = simd.splat(-5.717_042_4e-3);
    for c in [2.065_058_4e-2, -5.374_349_7e-2, 0.133_314_91, -0.333_332_84] {
        p = simd.fma(p, z, simd.splat(c));
    }
    let near = simd.fma(simd.mul(x, z), p, x);
    let e = exp(simd, simd.mul(a, simd.splat(-2.0)));
    let one = simd.splat(1.0);
    let far = simd.sub(one, simd.div(simd.add(e, e), simd.add(one, e)));
    simd.select_lt(a, simd.splat(0.625), near, simd.copysign(far, x))
}

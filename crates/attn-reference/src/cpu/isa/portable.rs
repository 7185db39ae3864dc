//! Owns [`Simd`] in plain Rust over `[f32; 8]`, which the compiler turns into whatever vectors the target has (two
//! NEON registers, four accumulator rows). No unsafe code. Multiply-add rounds once where the target has the instruction
//! and twice elsewhere, where [`f32::mul_add`] would be a call of a library.

use half::{bf16, f16};

use super::Simd;

/// The token of the portable implementation; always at hand.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

type Vector = [f32; 8];

#[inline(always)]
fn zip(a: Vector, b: Vector, f: impl Fn(f32, f32) -> f32) -> Vector {
    std::array::from_fn(|i| f(a[i], b[i]))
}

/// The greatest lane.
#[inline(always)]
pub(super) fn reduce_max(a: Vector) -> f32 {
    let four: [f32; 4] = std::array::from_fn(|i| if a[i] > a[i + 4] { a[i] } else { a[i + 4] });
    four.into_iter().fold(f32::NEG_INFINITY, |m, x| if m > x { m } else { x })
}

/// The sum of the lanes, by halves.
#[inline(always)]
pub(super) fn reduce_add(a: Vector) -> f32 {
    let four: [f32; 4] = std::array::from_fn(|i| a[i] + a[i + 4]);
    (four[0] + four[2]) + (four[1] + four[3])
}

/// Widens FP8 codes through a table.
#[inline(always)]
pub(super) fn widen_fp8(from: &[u8], to: &mut [f32]) {
    for (code, y) in from.iter().zip(to) {
        *y = kvpool::FP8_E4M3_TO_F32[usize::from(*code)];
    }
}

impl Simd for Portable {
    const LANES: usize = 8;
    const MAX_ROWS: usize = 4;
    const DOT_KEYS: usize = 2;
    type Vector = Vector;
    type Row = [f32; 8];

    #[inline(always)]
    fn splat(self, x: f32) -> Vector {
        [x; 8]
    }

    #[inline(always)]
    fn load(self, row: &Vector) -> Vector {
        *row
    }

    #[inline(always)]
    fn store(self, v: Vector, row: &mut Vector) {
        *row = v;
    }

    #[inline(always)]
    fn add(self, a: Vector, b: Vector) -> Vector {
        zip(a, b, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, a: Vector, b: Vector) -> Vector {
        zip(a, b, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, a: Vector, b: Vector) -> Vector {
        zip(a, b, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, a: Vector, b: Vector) -> Vector {
        zip(a, b, |a, b| a / b)
    }

    #[inline(always)]
    fn max(self, a: Vector, b: Vector) -> Vector {
        zip(a, b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn fma(self, a: Vector, b: Vector, c: Vector) -> Vector {
        const HAS_FMA: bool = cfg!(any(target_feature = "fma", target_arch = "aarch64"));
        std::array::from_fn(|i| if HAS_FMA { a[i].mul_add(b[i], c[i]) } else { a[i] * b[i] + c[i] })
    }

    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "n is an integer in -126..=127")]
    fn scale_by_pow2(self, a: Vector, n: Vector) -> Vector {
        zip(a, n, |a, n| a * f32::from_bits(((n as i32).wrapping_add(127) as u32) << 23))
    }

    #[inline(always)]
    fn zero_if_lt(self, a: Vector, b: Vector, y: Vector) -> Vector {
        std::array::from_fn(|i| if a[i] < b[i] { 0.0 } else { y[i] })
    }

    #[inline(always)]
    fn select_lt(self, a: Vector, b: Vector, x: Vector, y: Vector) -> Vector {
        std::array::from_fn(|i| if a[i] < b[i] { x[i] } else { y[i] })
    }

    #[inline(always)]
    fn abs(self, a: Vector) -> Vector {
        a.map(f32::abs)
    }

    #[inline(always)]
    fn copysign(self, a: Vector, b: Vector) -> Vector {
        zip(a, b, f32::copysign)
    }

    #[inline(always)]
    fn reduce_max(self, a: Vector) -> f32 {
        reduce_max(a)
    }

    #[inline(always)]
    fn reduce_add(self, a: Vector) -> f32 {
        reduce_add(a)
    }

    #[inline(always)]
    fn sums(self, rows: &[Vector]) -> Vector {
        std::array::from_fn(|i| reduce_add(rows[i]))
    }

    #[inline(always)]
    fn transpose(self, from: &[Vector], from_stride: usize, to: &mut [Vector], to_stride: usize) {
        for j in 0..8 {
            to[j * to_stride] = std::array::from_fn(|i| from[i * from_stride][j]);
        }
    }

    #[inline(always)]
    fn copy(self, from: &[f32], to: &mut [f32]) {
        to[..from.len()].copy_from_slice(from);
    }

    #[inline(always)]
    fn widen_f16(self, from: &[f16], to: &mut [f32]) {
        from.iter().zip(to).for_each(|(x, y)| *y = x.to_f32());
    }

    #[inline(always)]
    fn widen_bf16(self, from: &[bf16], to: &mut [f32]) {
        from.iter().zip(to).for_each(|(x, y)| *y = x.to_f32());
    }

    #[inline(always)]
    fn widen_fp8(self, from: &[u8], to: &mut [f32]) {
        widen_fp8(from, to);
    }

    #[inline(always)]
    fn prefetch<T>(self, _: &T, _: usize) {}

    #[inline(always)]
    fn prefetch_far<T>(self, _: &T) {}
}

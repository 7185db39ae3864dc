//! Owns [`Simd`] over AVX2 and FMA: 8 lanes, 6 x 2 accumulators of the 16 registers.
//! Each unsafe block is one intrinsic; the token proves that it exists, references prove that memory does.
#![allow(unsafe_code)]

use std::arch::x86_64::{
    __m256, _CMP_LT_OQ, _CMP_NLT_UQ, _MM_HINT_T0, _MM_HINT_T1, _mm_loadu_si128, _mm_prefetch, _mm256_add_epi32,
    _mm256_add_ps, _mm256_and_ps, _mm256_andnot_ps, _mm256_blendv_ps, _mm256_castsi256_ps, _mm256_cmp_ps,
    _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_cvtps_epi32, _mm256_div_ps, _mm256_fmadd_ps, _mm256_hadd_ps,
    _mm256_loadu_ps, _mm256_max_ps, _mm256_mul_ps, _mm256_or_ps, _mm256_permute2f128_ps, _mm256_set1_epi32,
    _mm256_set1_ps, _mm256_shuffle_ps, _mm256_slli_epi32, _mm256_storeu_ps, _mm256_sub_ps, _mm256_unpackhi_ps,
    _mm256_unpacklo_ps,
};

use half::{bf16, f16};

use super::{Kernel, Simd, portable};

/// Proof that this machine has AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// The token, where the machine has the instructions.
    pub(crate) fn detect() -> Option<Avx2> {
        let has =
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        has.then_some(Avx2(()))
    }
}

/// Compiles a kernel with the instructions enabled.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn enter<K: Kernel>(token: Avx2, kernel: K) -> K::Output {
    kernel.run(token)
}

/// Lane-wise operations that are one intrinsic each.
macro_rules! one_intrinsic {
    ($($name:ident($($arg:ident),+) = $call:expr;)+) => {$(
        #[inline(always)]
        fn $name(self, $($arg: __m256),+) -> __m256 {
            // SAFETY: the token proves that the instruction exists; it touches no memory.
            unsafe { $call }
        }
    )+};
}

impl Simd for Avx2 {
    const LANES: usize = 8;
    const MAX_ROWS: usize = 6;
    const DOT_KEYS: usize = 2;
    type Vector = __m256;
    type Row = [f32; 8];

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        // SAFETY: the token proves that the instruction exists.
        unsafe { _mm256_set1_ps(x) }
    }

    #[inline(always)]
    fn load(self, row: &[f32; 8]) -> __m256 {
        // SAFETY: the token proves that the instruction exists; the reference covers all 8 lanes.
        unsafe { _mm256_loadu_ps(row.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, v: __m256, row: &mut [f32; 8]) {
        // SAFETY: the token proves that the instruction exists; the reference covers all 8 lanes.
        unsafe { _mm256_storeu_ps(row.as_mut_ptr(), v) }
    }

    one_intrinsic! {
        add(a, b) = _mm256_add_ps(a, b);
        sub(a, b) = _mm256_sub_ps(a, b);
        mul(a, b) = _mm256_mul_ps(a, b);
        div(a, b) = _mm256_div_ps(a, b);
        max(a, b) = _mm256_max_ps(a, b);
        fma(a, b, c) = _mm256_fmadd_ps(a, b, c);
        scale_by_pow2(a, n) = scale_by_pow2(a, n);
        abs(a) = abs(a);
        copysign(a, b) = copysign(a, b);
        zero_if_lt(a, b, y) = zero_if_lt(a, b, y);
        select_lt(a, b, x, y) = select_lt(a, b, x, y);
    }

    #[inline(always)]
    fn reduce_max(self, a: __m256) -> f32 {
        let mut lanes = [0.0; 8];
        self.store(a, &mut lanes);
        portable::reduce_max(lanes)
    }

    #[inline(always)]
    fn reduce_add(self, a: __m256) -> f32 {
        let mut lanes = [0.0; 8];
        self.store(a, &mut lanes);
        portable::reduce_add(lanes)
    }

    #[inline(always)]
    fn sums(self, rows: &[[f32; 8]]) -> __m256 {
        let mut block = [self.splat(0.0); 8];
        for (v, row) in block.iter_mut().zip(rows) {
            *v = self.load(row);
        }
        // SAFETY: the token proves that the instructions exist; registers only.
        unsafe { sums(block) }
    }

    #[inline(always)]
    fn transpose(self, from: &[[f32; 8]], from_stride: usize, to: &mut [[f32; 8]], to_stride: usize) {
        let mut block = [self.splat(0.0); 8];
        for (i, v) in block.iter_mut().enumerate() {
            *v = self.load(&from[i * from_stride]);
        }
        // SAFETY: the token proves that the instructions exist; registers only.
        let block = unsafe { transpose(block) };
        for (j, v) in block.into_iter().enumerate() {
            self.store(v, &mut to[j * to_stride]);
        }
    }

    #[inline(always)]
    fn copy(self, from: &[f32], to: &mut [f32]) {
        let (blocks, rest) = from.as_chunks::<8>();
        let (to_blocks, to_rest) = to.split_at_mut(blocks.len() * 8);
        for (from, to) in blocks.iter().zip(to_blocks.as_chunks_mut::<8>().0) {
            self.store(self.load(from), to);
        }
        rest.iter().zip(to_rest).for_each(|(x, y)| *y = *x);
    }

    #[inline(always)]
    fn widen_f16(self, from: &[f16], to: &mut [f32]) {
        let (blocks, rest) = from.as_chunks::<8>();
        let (to_blocks, to_rest) = to.split_at_mut(blocks.len() * 8);
        for (from, to) in blocks.iter().zip(to_blocks.as_chunks_mut::<8>().0) {
            // SAFETY: the token proves that the instructions exist; the array covers 8 halves.
            let wide = unsafe { load_f16(from) };
            self.store(wide, to);
        }
        rest.iter().zip(to_rest).for_each(|(x, y)| *y = x.to_f32());
    }

    #[inline(always)]
    fn widen_bf16(self, from: &[bf16], to: &mut [f32]) {
        let (blocks, rest) = from.as_chunks::<8>();
        let (to_blocks, to_rest) = to.split_at_mut(blocks.len() * 8);
        for (from, to) in blocks.iter().zip(to_blocks.as_chunks_mut::<8>().0) {
            // SAFETY: the token proves that the instructions exist; the array covers 8 halves.
            let wide = unsafe { load_bf16(from) };
            self.store(wide, to);
        }
        rest.iter().zip(to_rest).for_each(|(x, y)| *y = x.to_f32());
    }

    #[inline(always)]
    fn widen_fp8(self, from: &[u8], to: &mut [f32]) {
        portable::widen_fp8(from, to);
    }

    #[inline(always)]
    fn prefetch<T>(self, x: &T, ahead: usize) {
        // SAFETY: a prefetch has no effect but on caches and may be given any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(x).wrapping_add(ahead).cast()) }
    }

    #[inline(always)]
    fn prefetch_far<T>(self, x: &T) {
        // SAFETY: a prefetch has no effect but on caches and may be given any address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(std::ptr::from_ref(x).cast()) }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn scale_by_pow2(a: __m256, n: __m256) -> __m256 {
    let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent)))
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn abs(a: __m256) -> __m256 {
    _mm256_andnot_ps(_mm256_set1_ps(-0.0), a)
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn copysign(a: __m256, b: __m256) -> __m256 {
    _mm256_or_ps(abs(a), _mm256_and_ps(_mm256_set1_ps(-0.0), b))
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn zero_if_lt(a: __m256, b: __m256, y: __m256) -> __m256 {
    _mm256_and_ps(_mm256_cmp_ps::<_CMP_NLT_UQ>(a, b), y)
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn select_lt(a: __m256, b: __m256, x: __m256, y: __m256) -> __m256 {
    _mm256_blendv_ps(y, x, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load_f16(from: &[f16; 8]) -> __m256 {
    // SAFETY: the array covers the 16 bytes that are read.
    _mm256_cvtph_ps(unsafe { _mm_loadu_si128(from.as_ptr().cast()) })
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn load_bf16(from: &[bf16; 8]) -> __m256 {
    // SAFETY: the array covers the 16 bytes that are read.
    let bits = unsafe { _mm_loadu_si128(from.as_ptr().cast()) };
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(bits)))
}

/// Sums lanes in three rounds: pairs of vectors twice, then halves.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn sums(r: [__m256; 8]) -> __m256 {
    // Of each 128-bit lane: the sums of four vectors.
    let mut four = [r[0], r[4]];
    for (g, four) in four.iter_mut().enumerate() {
        let low = _mm256_hadd_ps(r[4 * g], r[4 * g + 1]);
        *four = _mm256_hadd_ps(low, _mm256_hadd_ps(r[4 * g + 2], r[4 * g + 3]));
    }
    let low = _mm256_permute2f128_ps::<0x20>(four[0], four[1]);
    _mm256_add_ps(low, _mm256_permute2f128_ps::<0x31>(four[0], four[1]))
}

/// Transposes 8 x 8 in three rounds: pairs of floats, pairs of pairs, then 128-bit lanes.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn transpose(r: [__m256; 8]) -> [__m256; 8] {
    let mut t = r;
    for i in 0..4 {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    let mut u = t;
    for g in 0..2 {
        u[4 * g] = _mm256_shuffle_ps::<0x44>(t[4 * g], t[4 * g + 2]);
        u[4 * g + 1] = _mm256_shuffle_ps::<0xEE>(t[4 * g], t[4 * g + 2]);
        u[4 * g + 2] = _mm256_shuffle_ps::<0x44>(t[4 * g + 1], t[4 * g + 3]);
        u[4 * g + 3] = _mm256_shuffle_ps::<0xEE>(t[4 * g + 1], t[4 * g + 3]);
    }
    let mut out = r;
    for c in 0..4 {
        out[c] = _mm256_permute2f128_ps::<0x20>(u[c], u[4 + c]);
        out[4 + c] = _mm256_permute2f128_ps::<0x31>(u[c], u[4 + c]);
    }
    out
}

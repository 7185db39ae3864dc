//! Owns [`Simd`] over AVX-512F: 16 lanes, 12 x 2 accumulators of the 32 registers.
//! Each unsafe block is one intrinsic; the token proves that it exists, references prove that memory does.
#![allow(unsafe_code)]

use std::arch::x86_64::{
    __m512, _CMP_LT_OQ, _CMP_NLT_UQ, _MM_HINT_T0, _MM_HINT_T1, _mm_loadu_si128, _mm_prefetch, _mm256_and_si256,
    _mm256_andnot_si256, _mm256_cvtepu8_epi16, _mm256_loadu_si256, _mm256_or_si256, _mm256_set1_epi16,
    _mm256_slli_epi16, _mm512_abs_ps, _mm512_add_ps, _mm512_castpd_ps, _mm512_castps_pd, _mm512_castps_si512,
    _mm512_castsi512_ps, _mm512_cmp_ps_mask, _mm512_cmpeq_epi32_mask, _mm512_cvtepu16_epi32, _mm512_cvtph_ps,
    _mm512_div_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mask_blend_ps, _mm512_maskz_mov_ps, _mm512_max_ps,
    _mm512_mul_ps, _mm512_reduce_add_ps, _mm512_reduce_max_ps, _mm512_scalef_ps, _mm512_set1_epi32, _mm512_set1_ps,
    _mm512_shuffle_f32x4, _mm512_slli_epi32, _mm512_storeu_ps, _mm512_sub_ps, _mm512_ternarylogic_epi32,
    _mm512_unpackhi_pd, _mm512_unpackhi_ps, _mm512_unpacklo_pd, _mm512_unpacklo_ps,
};

use half::{bf16, f16};

use super::{Kernel, Simd};

/// Proof that this machine has AVX-512F, AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx512 {
    /// The token, where the machine has the instructions.
    pub(crate) fn detect() -> Option<Avx512> {
        let has = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        has.then_some(Avx512(()))
    }
}

/// Compiles a kernel with the instructions enabled.
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
pub(crate) fn enter<K: Kernel>(token: Avx512, kernel: K) -> K::Output {
    kernel.run(token)
}

/// Lane-wise operations that are one intrinsic each.
macro_rules! one_intrinsic {
    ($($name:ident($($arg:ident),+) = $call:expr;)+) => {$(
        #[inline(always)]
        fn $name(self, $($arg: __m512),+) -> __m512 {
            // SAFETY: the token proves that the instruction exists; it touches no memory.
            unsafe { $call }
        }
    )+};
}

impl Simd for Avx512 {
    const LANES: usize = 16;
    const MAX_ROWS: usize = 12;
    const DOT_KEYS: usize = 6;
    type Vector = __m512;
    type Row = [f32; 16];

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        // SAFETY: the token proves that the instruction exists.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    fn load(self, row: &[f32; 16]) -> __m512 {
        // SAFETY: the token proves that the instruction exists; the reference covers all 16 lanes.
        unsafe { _mm512_loadu_ps(row.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, v: __m512, row: &mut [f32; 16]) {
        // SAFETY: the token proves that the instruction exists; the reference covers all 16 lanes.
        unsafe { _mm512_storeu_ps(row.as_mut_ptr(), v) }
    }

    one_intrinsic! {
        add(a, b) = _mm512_add_ps(a, b);
        sub(a, b) = _mm512_sub_ps(a, b);
        mul(a, b) = _mm512_mul_ps(a, b);
        div(a, b) = _mm512_div_ps(a, b);
        max(a, b) = _mm512_max_ps(a, b);
        fma(a, b, c) = _mm512_fmadd_ps(a, b, c);
        scale_by_pow2(a, n) = _mm512_scalef_ps(a, n);
        abs(a) = _mm512_abs_ps(a);
        copysign(a, b) = copysign(a, b);
        zero_if_lt(a, b, y) = zero_if_lt(a, b, y);
        select_lt(a, b, x, y) = select_lt(a, b, x, y);
    }

    #[inline(always)]
    fn reduce_max(self, a: __m512) -> f32 {
        // SAFETY: the token proves that the instructions exist.
        unsafe { _mm512_reduce_max_ps(a) }
    }

    #[inline(always)]
    fn reduce_add(self, a: __m512) -> f32 {
        // SAFETY: the token proves that the instructions exist.
        unsafe { _mm512_reduce_add_ps(a) }
    }

    #[inline(always)]
    fn sums(self, rows: &[[f32; 16]]) -> __m512 {
        let mut block = [self.splat(0.0); 16];
        for (v, row) in block.iter_mut().zip(rows) {
            *v = self.load(row);
        }
        // SAFETY: the token proves that the instructions exist; registers only.
        unsafe { sums(block) }
    }

    #[inline(always)]
    fn transpose(self, from: &[[f32; 16]], from_stride: usize, to: &mut [[f32; 16]], to_stride: usize) {
        let mut block = [self.splat(0.0); 16];
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
        let (blocks, rest) = from.as_chunks::<16>();
        let (to_blocks, to_rest) = to.split_at_mut(blocks.len() * 16);
        for (from, to) in blocks.iter().zip(to_blocks.as_chunks_mut::<16>().0) {
            self.store(self.load(from), to);
        }
        rest.iter().zip(to_rest).for_each(|(x, y)| *y = *x);
    }

    #[inline(always)]
    fn widen_f16(self, from: &[f16], to: &mut [f32]) {
        let (blocks, rest) = from.as_chunks::<16>();
        let (to_blocks, to_rest) = to.split_at_mut(blocks.len() * 16);
        for (from, to) in blocks.iter().zip(to_blocks.as_chunks_mut::<16>().0) {
            // SAFETY: the token proves that the instructions exist; the array covers 16 halves.
            let wide = unsafe { load_f16(from) };
            self.store(wide, to);
        }
        rest.iter().zip(to_rest).for_each(|(x, y)| *y = x.to_f32());
    }

    #[inline(always)]
    fn widen_bf16(self, from: &[bf16], to: &mut [f32]) {
        let (blocks, rest) = from.as_chunks::<16>();
        let (to_blocks, to_rest) = to.split_at_mut(blocks.len() * 16);
        for (from, to) in blocks.iter().zip(to_blocks.as_chunks_mut::<16>().0) {
            // SAFETY: the token proves that the instructions exist; the array covers 16 halves.
            let wide = unsafe { load_bf16(from) };
            self.store(wide, to);
        }
        rest.iter().zip(to_rest).for_each(|(x, y)| *y = x.to_f32());
    }

    #[inline(always)]
    fn widen_fp8(self, from: &[u8], to: &mut [f32]) {
        let (blocks, rest) = from.as_chunks::<16>();
        let (to_blocks, to_rest) = to.split_at_mut(blocks.len() * 16);
        for (from, to) in blocks.iter().zip(to_blocks.as_chunks_mut::<16>().0) {
            // SAFETY: the token proves that the instructions exist; the array covers 16 codes.
            let wide = unsafe { load_fp8(from) };
            self.store(wide, to);
        }
        rest.iter().zip(to_rest).for_each(|(&x, y)| *y = kvpool::fp8_e4m3_to_f32(x));
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
#[target_feature(enable = "avx512f")]
fn copysign(a: __m512, b: __m512) -> __m512 {
    let sign = _mm512_set1_epi32(i32::MIN);
    // sign ? b : a, bit by bit.
    _mm512_castsi512_ps(_mm512_ternarylogic_epi32::<0xCA>(sign, _mm512_castps_si512(b), _mm512_castps_si512(a)))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn zero_if_lt(a: __m512, b: __m512, y: __m512) -> __m512 {
    _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(a, b), y)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn select_lt(a: __m512, b: __m512, x: __m512, y: __m512) -> __m512 {
    _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), y, x)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_f16(from: &[f16; 16]) -> __m512 {
    // SAFETY: the array covers the 32 bytes that are read.
    _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(from.as_ptr().cast()) })
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_bf16(from: &[bf16; 16]) -> __m512 {
    // SAFETY: the array covers the 32 bytes that are read.
    let bits = unsafe { _mm256_loadu_si256(from.as_ptr().cast()) };
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
}

/// E4M3 in the fields of an `f16` is the value x 2^-8: exponent bias 7 against 15. Widening is exact and quick for
/// subnormals too (as an `f32`, they would be subnormal operands, which are slow), and so is the product with 2^8.
/// 0x7F and 0xFF are NaN.
#[inline]
#[target_feature(enable = "avx512f,avx2")]
fn load_fp8(from: &[u8; 16]) -> __m512 {
    // SAFETY: the array covers the 16 bytes that are read.
    let codes = _mm256_cvtepu8_epi16(unsafe { _mm_loadu_si128(from.as_ptr().cast()) });
    let magnitude = _mm256_and_si256(codes, _mm256_set1_epi16(0x7F));
    let sign = _mm256_slli_epi16::<8>(_mm256_andnot_si256(_mm256_set1_epi16(0x7F), codes));
    let half = _mm256_or_si256(sign, _mm256_slli_epi16::<7>(magnitude));
    let value = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0));
    let is_nan = _mm512_cmpeq_epi32_mask(_mm512_cvtepu16_epi32(magnitude), _mm512_set1_epi32(0x7F));
    _mm512_mask_blend_ps(is_nan, value, _mm512_set1_ps(f32::NAN))
}

/// Sums lanes in four rounds: pairs of floats, pairs of doubles, then 128-bit lanes twice.
#[inline]
#[target_feature(enable = "avx512f")]
fn sums(r: [__m512; 16]) -> __m512 {
    let floats = |a, b| _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    let doubles = |a, b| {
        let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
        _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)))
    };
    let lanes = |a, b| _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xDD>(a, b));
    // Of each 128-bit lane: the sums of four vectors.
    let mut four = [r[0], r[4], r[8], r[12]];
    for (g, four) in four.iter_mut().enumerate() {
        *four = doubles(floats(r[4 * g], r[4 * g + 1]), floats(r[4 * g + 2], r[4 * g + 3]));
    }
    lanes(lanes(four[0], four[1]), lanes(four[2], four[3]))
}

/// Transposes 16 x 16 in four rounds: pairs of floats, pairs of doubles, then 128-bit lanes twice.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose(r: [__m512; 16]) -> [__m512; 16] {
    let mut t = r;
    for i in 0..8 {
        t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    // u[4g + c]: column c of each lane, rows 4g..4g+4.
    let mut u = t;
    for g in 0..4 {
        let [a, b, c, d] = [t[4 * g], t[4 * g + 1], t[4 * g + 2], t[4 * g + 3]].map(|v| _mm512_castps_pd(v));
        u[4 * g] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
        u[4 * g + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
        u[4 * g + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
        u[4 * g + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
    }
    let mut out = r;
    for c in 0..4 {
        let even_low = _mm512_shuffle_f32x4::<0x88>(u[c], u[4 + c]); // lanes 0, 2 of rows 0..4 and 4..8
        let odd_low = _mm512_shuffle_f32x4::<0xDD>(u[c], u[4 + c]); // lanes 1, 3
        let even_high = _mm512_shuffle_f32x4::<0x88>(u[8 + c], u[12 + c]);
        let odd_high = _mm512_shuffle_f32x4::<0xDD>(u[8 + c], u[12 + c]);
        out[c] = _mm512_shuffle_f32x4::<0x88>(even_low, even_high);
        out[4 + c] = _mm512_shuffle_f32x4::<0x88>(odd_low, odd_high);
        out[8 + c] = _mm512_shuffle_f32x4::<0xDD>(even_low, even_high);
        out[12 + c] = _mm512_shuffle_f32x4::<0xDD>(odd_low, odd_high);
    }
    out
}

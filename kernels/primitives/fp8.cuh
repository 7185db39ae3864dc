// e4m3 in registers: exact to f16 (which holds every e4m3 value), and from f32 with saturation.
// PTX has both as cvt from sm_89 on; before, bits are moved by hand.
#pragma once

#include "num.cuh"

// Four e4m3 values to two packed f16 words: bytes 0, 1 and bytes 2, 3.
__device__ __forceinline__ void fp8x4_to_f16(uint32_t x, uint32_t& lo, uint32_t& hi) {
#if __CUDA_ARCH__ >= 890
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}" : "=r"(lo), "=r"(hi) : "r"(x));
#else
  // Exponent and mantissa go 7 bits up, which divides by 2^8; subnormals come out right. 480 is NaN's pattern.
  auto widen = [](uint32_t bytes) {  // 0x00BB00AA
    uint32_t h = ((bytes & 0x00800080u) << 8) | ((bytes & 0x007f007fu) << 7), is_nan;
    asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(h) : "r"(0x5c005c00u));
    uint32_t magnitude = h & 0x7fff7fffu;
    asm("set.eq.u32.u32 %0, %1, %2;" : "=r"(is_nan) : "r"(magnitude & 0xffffu), "r"(0x5f80u));
    h |= is_nan & 0x7fffu;
    asm("set.eq.u32.u32 %0, %1, %2;" : "=r"(is_nan) : "r"(magnitude >> 16), "r"(0x5f80u));
    return h | (is_nan & 0x7fff0000u);
  };
  lo = widen(__byte_perm(x, 0, 0x4140));
  hi = widen(__byte_perm(x, 0, 0x4342));
#endif
}

// Two dims of two neighbouring tokens, as a transposed matrix of 16-bit elements has them, to a word of both tokens' even dims and
// one of their odd dims.
__device__ __forceinline__ void fp8_values_to_f16(uint32_t x, uint32_t& even, uint32_t& odd) {
  fp8x4_to_f16(__byte_perm(x, 0, 0x3120), even, odd);
}

#if __CUDA_ARCH__ < 890
// Round to nearest even, saturate at 448, NaN is 0x7f with x's sign dropped (as PTX cvt does).
__device__ __forceinline__ uint32_t f32_to_fp8_bits(float x) {
  const uint32_t sign = (__float_as_uint(x) >> 24) & 0x80u;
  const float a = fabsf(x);
  if (!(a == a)) return 0x7fu;
  if (a >= 464.0f) return sign | 0x7eu;             // the midpoint to 480, and all beyond, are 448
  if (a < 0.015625f) return sign | __float2uint_rn(a * 512.0f);  // subnormal: multiples of 2^-9; 8 is 2^-6
  const uint32_t bits = __float_as_uint(a) + 0x7ffffu + ((__float_as_uint(a) >> 20) & 1u);
  return sign | min(((bits >> 20) - (120u << 3)), 0x7eu);
}
#endif

// Two floats to e4m3: the first in the low byte.
__device__ __forceinline__ uint32_t floats_to_fp8x2(float lo, float hi) {
#if __CUDA_ARCH__ >= 890
  uint16_t r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo));
  return r;
#else
  return f32_to_fp8_bits(lo) | (f32_to_fp8_bits(hi) << 8);
#endif
}

// One e4m3 value as f32.
__device__ __forceinline__ float fp8_to_float(uint32_t byte) {
  uint32_t lo, hi;
  fp8x4_to_f16(byte & 0xffu, lo, hi);
  return unpack2<F16>(lo).x;
}

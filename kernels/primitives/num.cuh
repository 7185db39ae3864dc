// Element types as tags, and the arithmetic that kernels do on them in registers.
// Packed words hold two 16-bit elements, the first in the low half.
#pragma once

#include <stdint.h>

struct Bf16 {
  static constexpr int kBytes = 2;
};
struct F16 {
  static constexpr int kBytes = 2;
};
struct F32 {
  static constexpr int kBytes = 4;
};
struct Fp8 {  // e4m3, finite only but for NaN
  static constexpr int kBytes = 1;
};

static constexpr float kLog2e = 1.4426950408889634f;
static constexpr float kLn2 = 0.6931471805599453f;
static constexpr float kInf = __builtin_huge_valf();

template <class A, class B>
struct Same {
  static constexpr bool value = false;
};
template <class A>
struct Same<A, A> {
  static constexpr bool value = true;
};

// The first of two types where a condition holds, else the second.
template <bool, class A, class B>
struct Either {
  using T = A;
};
template <class A, class B>
struct Either<false, A, B> {
  using T = B;
};

constexpr int at_most(int x, int limit) { return x < limit ? x : limit; }

// 2^x, relative error 2^-22; PTX ex2.approx
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2 x; PTX lg2.approx
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x to one unit in the last place, exact for 1; PTX rcp.approx
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return x == 1.0f ? 1.0f : y;
}

// x / y rounded to nearest, for finite y that is neither tiny nor huge beside x (a scale); no call, unlike the operator.
__device__ __forceinline__ float divide(float x, float y) {
  const float q = x * reciprocal(y);
  const float r = fmaf(fmaf(-q, y, x), reciprocal(y), q);
  return isfinite(r) && x != 0.0f ? r : q;  // infinities, NaN and signed zeros pass
}

// tanh x to about 1e-7 absolute, by way of e^2x; PTX tanh.approx has 2^-11 only
__device__ __forceinline__ float tanh_exp(float x) { return 1.0f - 2.0f * reciprocal(1.0f + exp2_approx(2.0f * kLog2e * x)); }

// Two floats as packed 16-bit elements, rounded to nearest even; PTX cvt.rn.{bf16x2,f16x2}.f32
template <class T>
__device__ __forceinline__ uint32_t pack2(float lo, float hi) {
  uint32_t r;
  if constexpr (Same<T, Bf16>::value) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  }
  return r;
}

// Packed 16-bit elements as floats
template <class T>
__device__ __forceinline__ float2 unpack2(uint32_t x) {
  float2 r;
  if constexpr (Same<T, Bf16>::value) {
    r.x = __uint_as_float(x << 16);
    r.y = __uint_as_float(x & 0xffff0000u);
  } else {
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(r.x), "=f"(r.y) : "r"(x));
  }
  return r;
}

// The lane's number. `kIsFresh`: made anew each time, so that what follows from it is not kept in registers across a loop.
template <bool kIsFresh>
__device__ __forceinline__ int lane_of_thread() {
  int lane = threadIdx.x % 32;
  if constexpr (kIsFresh) asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
  return x;
}

// Over the lanes that share l % 4: the rows of a C fragment's columns, see mma.cuh.
__device__ __forceinline__ float column_max(float x) {
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
  return x;
}

__device__ __forceinline__ float column_sum(float x) {
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2) x += __shfl_xor_sync(~0u, x, lanes);
  return x;
}

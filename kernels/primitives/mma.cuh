// Tensor-core products and the loads that feed them; PTX mma.sync.m16n8k16 and ldmatrix.
//
// Fragments of lane l, with g = l / 4 and c = l % 4:
//   A (16 x 16): words (g, 2c), (g + 8, 2c), (g, 2c + 8), (g + 8, 2c + 8), two columns each
//   B (16 x 8):  words (2c, g), (2c + 8, g), two rows each
//   C (16 x 8):  (g, 2c), (g, 2c + 1), (g + 8, 2c), (g + 8, 2c + 1)
#pragma once

#include "num.cuh"

// c += a x b
template <class T>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (Same<T, Bf16>::value) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8 (16 bytes).
__device__ __forceinline__ void ldmatrix4(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void ldmatrix4_trans(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

// The transposed of an 8 x 8 matrix of 16-bit elements: lane l has words (g, 2c), (g, 2c + 1) before and after; PTX movmatrix, which
// text for older drivers does without.
__device__ __forceinline__ uint32_t transpose8(uint32_t x) {
#if __CUDA_ARCH__ >= 900
  uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
  return r;
#else
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const uint32_t even = __shfl_sync(~0u, x, 8 * c + g / 2), odd = __shfl_sync(~0u, x, 8 * c + 4 + g / 2);
  return __byte_perm(even, odd, g % 2 == 0 ? 0x5410 : 0x7632);
#endif
}

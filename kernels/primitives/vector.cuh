// Eight neighbouring elements as raw words: copied bit for bit, or widened and narrowed.
#pragma once

#include "fp8.cuh"
#include "memory.cuh"

template <class T>
struct Vector8 {
  static constexpr int kWords = 2 * T::kBytes;
  uint32_t words[kWords];

  __device__ __forceinline__ void store(char* to) const {
    if constexpr (kWords == 2) {
      *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    } else {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) reinterpret_cast<uint4*>(to)[i / 4] = make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
    }
  }

  __device__ __forceinline__ void to_floats(float (&x)[8]) const {
    static_assert(T::kBytes >= 2, "fp8 is only written");
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (Same<T, F32>::value) {
        x[i] = __uint_as_float(words[i]);
      } else {
        const float2 two = unpack2<T>(words[i]);
        x[2 * i] = two.x, x[2 * i + 1] = two.y;
      }
    }
  }

  // Rounds to nearest even; fp8 saturates.
  static __device__ __forceinline__ Vector8 from_floats(const float (&x)[8]) {
    Vector8 v;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (Same<T, F32>::value) {
        v.words[i] = __float_as_uint(x[i]);
      } else if constexpr (Same<T, Fp8>::value) {
        v.words[i] = floats_to_fp8x2(x[4 * i], x[4 * i + 1]) | (floats_to_fp8x2(x[4 * i + 2], x[4 * i + 3]) << 16);
      } else {
        v.words[i] = pack2<T>(x[2 * i], x[2 * i + 1]);
      }
    }
    return v;
  }
};

// Reads data that is used once. 16-bit and 32-bit elements.
template <class T>
__device__ __forceinline__ Vector8<T> load8(const char* from) {
  Vector8<T> v;
#pragma unroll
  for (int i = 0; i < Vector8<T>::kWords; i += 4) {
    const uint4 x = load_streamed(from + 4 * i);
    v.words[i] = x.x, v.words[i + 1] = x.y, v.words[i + 2] = x.z, v.words[i + 3] = x.w;
  }
  return v;
}

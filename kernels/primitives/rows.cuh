// Where rows of q, out and LSE are, and writing them.
#pragma once

#include "check.cuh"
#include "num.cuh"

// Four neighbouring outputs of one (row, head) from dim d on.
template <class T>
__device__ __forceinline__ void store_out4(const AttnParams& p, int row, int head, int d, float4 x) {
  const int64_t at = row * p.out_stride_row + head * p.out_stride_head + d;
  if constexpr (Same<T, F32>::value) {
    *reinterpret_cast<float4*>(ptr<float>(p.out) + at) = x;
  } else {
    *reinterpret_cast<uint2*>(ptr<uint16_t>(p.out) + at) = make_uint2(pack2<T>(x.x, x.y), pack2<T>(x.z, x.w));
  }
}

__device__ __forceinline__ void store_lse(const AttnParams& p, int row, int head, float lse) {
  if (p.lse != 0) ptr<float>(p.lse)[static_cast<int64_t>(row) * p.num_qo_heads + head] = lse;
}

__device__ __forceinline__ float sink_of(const AttnParams& p, int head) {
  return p.sinks != 0 ? ptr<const float>(p.sinks)[head] : -kInf;
}

// Writes the padding rows: 0, and -inf for their LSE. Every block takes its share; some of its threads, a multiple of 32, do it.
template <class T, int kDv>
__device__ __forceinline__ void zero_padding_rows(const AttnParams& p, int num_threads) {
  const int begin = load_table(&ptr<const AttnStep>(p.step)->zero_begin);
  for (int row = begin + static_cast<int>(blockIdx.x); row < p.num_rows; row += static_cast<int>(gridDim.x)) {
    const int dv = kDv > 0 ? kDv : p.head_dim_vo;
    for (int i = threadIdx.x % num_threads; i < p.num_qo_heads * (dv / 4); i += num_threads) {
      store_out4<T>(p, row, i / (dv / 4), i % (dv / 4) * 4, make_float4(0, 0, 0, 0));
    }
    for (int head = threadIdx.x % num_threads; head < p.num_qo_heads; head += num_threads) store_lse(p, row, head, -kInf);
  }
}

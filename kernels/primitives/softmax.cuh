// Running softmax of one query row, and what becomes of it in the end.
//
// Scores come in units where p = 2^(s c - m c), c = scale x log2 e; m is the largest s so far, l the sum of p (unrounded).
// A row that has seen nothing has m = -inf and l = 0, and never makes NaN by itself.
#pragma once

#include "num.cuh"

// The exponent's offset m c; 0 for a row that has seen nothing, whose p = 2^-inf is then 0.
__device__ __forceinline__ float exponent_offset(float m, float c) { return m == -kInf ? 0.0f : m * c; }

// Factor for earlier sums when the maximum rises from m_old to m_new.
__device__ __forceinline__ float rescale_factor(float m_old, float m_new, float c) {
  return m_old == m_new ? 1.0f : exp2_approx((m_old - m_new) * c);  // m_old = -inf: 0
}

// Base-2 LSE of a row; -inf where it saw nothing.
__device__ __forceinline__ float lse_base2(float m, float l, float c) { return l == 0.0f ? -kInf : m * c + log2_approx(l); }

// How a finished row is written: out = sum x scale, with a sink in the denominator where there is one.
struct RowEnd {
  float scale;  // of the unnormalised output
  float lse;    // natural
};

// `lse2`: base 2, of the keys alone; `sink`: natural, -inf for none.
__device__ __forceinline__ RowEnd end_row(float l, float lse2, float sink) {
  if (sink == -kInf) return {l == 0.0f ? 0.0f : reciprocal(l), lse2 * kLn2};
  // The denominator grows by 2^(sink2 - lse2) of itself.
  const float sink2 = sink * kLog2e;
  const float top = fmaxf(sink2, lse2);
  const float keys = exp2_approx(lse2 - top);  // lse2 = -inf: 0
  const float total = keys + exp2_approx(sink2 - top);
  return {l == 0.0f ? 0.0f : keys * reciprocal(total * l), (top + log2_approx(total)) * kLn2};
}

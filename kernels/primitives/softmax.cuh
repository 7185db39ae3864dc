// Running softmax of one query row, and what becomes of it in the end.
//
// Scores come in units where p = 2^(s c - m c), c = scale x log2 e; m is about the largest s so far, l the sum of p
// (unrounded).
// A row that has seen nothing has m = -inf and l = 0, and never makes NaN by itself.
#pragma once

#include "num.cuh"

// The exponent's offset m c; 0 for a row that has seen nothing, whose p = 2^-inf is then 0.
__device__ __forceinline__ float exponent_offset(float m, float c) { return m == -kInf ? 0.0f : m * c; }

// The maximum that a row goes on with: the old one while the new one is so little above that weights stay below 2^8, which
// spares rescaling the output. A function of the row alone.
__device__ __forceinline__ float next_maximum(float m_old, float m_new, float c) {
  return (m_new - m_old) * c <= 8.0f ? m_old : m_new;  // m_old = -inf: the new one, also where that is -inf
}

// Whether next_maximum may be another than the old one because of a score of `m_new`, the old maximum or a larger one.
__device__ __forceinline__ bool may_change_maximum(float m_old, float m_new, float c) { return (m_new - m_old) * c > 8.0f; }

// Factor for sums relative to `from` when they become relative to `to`; 0 for a row that has seen nothing.
__device__ __forceinline__ float rescale_factor(float from, float to, float c) {
  return from == to ? 1.0f : exp2_approx((from - to) * c);
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
  if (l == 0.0f) return {0.0f, sink};  // as given, not from base 2
  // The denominator grows by 2^(sink2 - lse2) of itself.
  const float sink2 = sink * kLog2e;
  const float top = fmaxf(sink2, lse2);
  const float keys = exp2_approx(lse2 - top);
  const float total = keys + exp2_approx(sink2 - top);
  return {keys * reciprocal(total * l), (top + log2_approx(total)) * kLn2};
}

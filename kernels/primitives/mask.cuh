// Which keys a query sees, and the rare terms of a score.
#pragma once

#include "check.cuh"
#include "num.cuh"

// Keys [first, last] that a query may see by the causal mask and the window; clip to the request's keys besides.
struct KeyRange {
  int first, last;
};

__device__ __forceinline__ KeyRange visible_keys(const AttnParams& p, int q_pos) {
  // A window reaches below 0 for early queries; q_pos >= -2^31 + 2^30 by the limits on lengths, so nothing wraps.
  return {p.window_left >= 0 ? q_pos - p.window_left : INT32_MIN, p.causal ? q_pos : INT32_MAX};
}

// Bit of (query r of a tile, key) in the custom mask.
__device__ __forceinline__ bool mask_bit(const AttnParams& p, int64_t mask_begin, int kv_len, int r, int key) {
  const int64_t bit = mask_begin + static_cast<int64_t>(r) * kv_len + key;
  return (ptr<const uint8_t>(p.custom_mask)[bit >> 3] >> (bit & 7)) & 1;
}

// tanh with a small relative error also near 0, where tanh_exp subtracts what is nearly 1 from 1: a few units in the last
// place of a cap of 30 are more than small scores can bear.
__device__ __forceinline__ float tanh_small(float x) {
  const float s = x * x;
  const float series = x * (1.0f + s * (-1.0f / 3.0f + s * (2.0f / 15.0f + s * (-17.0f / 315.0f + s * (62.0f / 2835.0f)))));
  return fabsf(x) < 0.35f ? series : tanh_exp(x);
}

// A scaled score (q.k x scales) with softcap and ALiBi; `distance` is key position - query position.
__device__ __forceinline__ float shape_score(const AttnParams& p, float score, float slope, int distance) {
  if (p.softcap > 0.0f) score = p.softcap * tanh_small(score / p.softcap);
  return score + slope * static_cast<float>(distance);
}

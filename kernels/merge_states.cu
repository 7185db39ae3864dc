// Merges partial states of disjoint KV, elementwise: a state is an output row and its natural LSE.
//
//   out = sum_i w_i out_i / sum_i w_i,  w_i = e^(lse_i - max lse);  lse = max lse + ln sum_i w_i
//
// Grid: any; a thread takes 8 neighbouring elements of a (row, head), a block whole rows. Reads each state once, writes once.
// A state with LSE = -inf is empty: it is not looked at, so the others come out bit for bit, signed zeros too. Where all are
// empty, out = 0 and lse = -inf. A NaN LSE makes NaN.
#include "primitives/launch.cuh"
#include "primitives/num.cuh"
#include "primitives/memory.cuh"
#include "primitives/vector.cuh"
#include "params.h"

namespace {

constexpr int kThreads = 256;

template <class T>
struct State {
  const char* out;
  float lse;
};

template <class T>
__device__ __forceinline__ State<T> state_at(const MergeStatesParams& p, int i, int64_t row_head, int64_t at) {
  if (i == 1 && p.out_second != 0) return {ptr<const char>(p.out_second) + at * T::kBytes, ptr<const float>(p.lse_second)[row_head]};
  const int64_t num = static_cast<int64_t>(p.num_rows) * p.num_heads;
  return {ptr<const char>(p.out_states) + (i * p.stride_state + at) * T::kBytes, ptr<const float>(p.lse_states)[i * num + row_head]};
}

constexpr int kAhead = 4;  // states whose loads are under way at once

// Running merge of 8 elements; the maximum is known before.
struct Merge {
  float sum[8];
  float total;

  template <class T>
  __device__ __forceinline__ void add(const Vector8<T>& state, float lse, float top) {
    if (lse == -kInf) return;
    const float w = exp2_approx((lse - top) * kLog2e);
    float x[8];
    state.to_floats(x);
    total += w;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = fmaf(w, x[i], sum[i]);
  }
};

// Elements [8 piece, 8 piece + 8) of one (row, head); returns its LSE.
template <class T>
__device__ __forceinline__ float merge_piece(const MergeStatesParams& p, int64_t row_head, int piece) {
  const int64_t at = row_head * p.head_dim + piece * 8;
  Vector8<T> x[kAhead];
  float lse[kAhead];
  float top = -kInf;
  bool has_nan = false;
#pragma unroll
  for (int k = 0; k < kAhead; ++k) {
    lse[k] = -kInf;
    if (k >= p.num_states) continue;
    const State<T> state = state_at<T>(p, k, row_head, at);
    lse[k] = state.lse;
    x[k] = load8<T>(state.out);
  }
#pragma unroll
  for (int k = 0; k < kAhead; ++k) top = fmaxf(top, lse[k]), has_nan |= lse[k] != lse[k];
  for (int k = kAhead; k < p.num_states; ++k) {
    const float other = state_at<T>(p, k, row_head, at).lse;
    top = fmaxf(top, other), has_nan |= other != other;
  }
  Merge m;
  m.total = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) m.sum[i] = -0.0f;  // the neutral element of addition
#pragma unroll
  for (int k = 0; k < kAhead; ++k) m.add(x[k], lse[k], top);
  for (int k = kAhead; k < p.num_states; ++k) {
    const State<T> state = state_at<T>(p, k, row_head, at);
    m.add(load8<T>(state.out), state.lse, top);
  }
  const bool is_empty = top == -kInf && !has_nan;
  const float scale = is_empty ? 0.0f : reciprocal(m.total);
#pragma unroll
  for (int i = 0; i < 8; ++i) m.sum[i] = is_empty ? 0.0f : m.sum[i] * scale;
  Vector8<T>::from_floats(m.sum).store(ptr<char>(p.out) + at * T::kBytes);
  return is_empty ? -kInf : top + log2_approx(m.total) * kLn2;
}

template <class T>
__device__ __forceinline__ void merge_states(const MergeStatesParams& p) {
  wait_for_previous();
  const int per_row = p.head_dim / 8, rows_per_pass = kThreads / per_row;
  const int64_t num = static_cast<int64_t>(p.num_rows) * p.num_heads;
  const int my_row = threadIdx.x / per_row, my_piece = threadIdx.x % per_row;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * rows_per_pass; first < num; first += static_cast<int64_t>(gridDim.x) * rows_per_pass) {
    const int64_t row_head = first + my_row;
    const bool is_mine = my_row < rows_per_pass && row_head < num;
    float lse = 0.0f;
    if (is_mine) lse = merge_piece<T>(p, row_head, my_piece);
    if (p.lse == p.lse_states) __syncthreads();  // in place: all have read the old LSEs
    if (is_mine && my_piece == 0 && p.lse != 0) ptr<float>(p.lse)[row_head] = lse;
  }
  launch_dependents();
}

}  // namespace

#define bf16 Bf16
#define f16 F16
#define f32 F32
#define KERNEL(name, q, kv, dqk, dvo, general, threads, shared_bytes, blocks, rows)        \
  static_assert(threads == kThreads && shared_bytes == 0, "the list states the launch");  \
  extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ MergeStatesParams p) { merge_states<q>(p); }
#include "merge_states.inst"

// Attention in f32, one warp a query row, key by key: slow and obvious, to compare other kernels with.
//
//   out = sum_j p_j v_j / (sum_j p_j + e^sink),  p_j = e^(s_j),  s_j = shape(q . k_j)
//
// Grid: any; a block walks its ranges of units, its warps share the rows of a unit. Any dtype, head dims up to
// 32 x kMaxPerLane, any group. All arithmetic is f32; a warp reads a key's elements in lanes' order and sums across lanes.
// Shared memory: none. Registers: two rows of kMaxPerLane values a lane.
#include "primitives/fp8.cuh"
#include "primitives/launch.cuh"
#include "primitives/mask.cuh"
#include "primitives/paged.cuh"
#include "primitives/rows.cuh"
#include "primitives/softmax.cuh"
#include "primitives/units.cuh"

namespace {

constexpr int kThreads = 128;
constexpr int kMaxPerLane = 16;

template <class T>
__device__ __forceinline__ float load_element(DevicePtr base, int64_t at) {
  if constexpr (Same<T, F32>::value) return ptr<const float>(base)[at];
  if constexpr (Same<T, Fp8>::value) return fp8_to_float(ptr<const uint8_t>(base)[at]);
  if constexpr (T::kBytes == 2) return unpack2<T>(ptr<const uint16_t>(base)[at]).x;
}

template <class T>
__device__ __forceinline__ void store_element(DevicePtr base, int64_t at, float x) {
  if constexpr (Same<T, F32>::value) {
    ptr<float>(base)[at] = x;
  } else {
    ptr<uint16_t>(base)[at] = static_cast<uint16_t>(pack2<T>(x, 0.0f));
  }
}

// One query row of one chunk, by one warp.
template <class Q, class KV>
struct Row {
  float q[kMaxPerLane], o[kMaxPerLane];
  float m, l;

  __device__ __forceinline__ void load_q(const AttnParams& p, int row, int head) {
    const int lane = threadIdx.x % 32;
    const int64_t at = row * p.q_stride_row + head * p.q_stride_head;
#pragma unroll
    for (int i = 0; i < kMaxPerLane; ++i) {
      const int d = i * 32 + lane;
      q[i] = d < p.head_dim_qk ? load_element<Q>(p.q, at + d) : 0.0f;
      o[i] = 0.0f;
    }
    m = -kInf, l = 0.0f;
  }

  __device__ __forceinline__ float dot(const AttnParams& p, int64_t at) const {
    const int lane = threadIdx.x % 32;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kMaxPerLane; ++i) {
      const int d = i * 32 + lane;
      if (d < p.head_dim_qk) sum = fmaf(q[i], load_element<KV>(p.k, at + d), sum);
    }
    return warp_sum(sum);
  }

  // Takes a key with score s (natural units).
  __device__ __forceinline__ void take(const AttnParams& p, float s, int64_t v_at) {
    const int lane = threadIdx.x % 32;
    const float m_new = fmaxf(m, s);
    const float rescale = m == m_new ? 1.0f : exp2f((m - m_new) * kLog2e);
    const float weight = m_new == -kInf ? s - s : exp2f((s - m_new) * kLog2e);  // -inf - -inf is NaN only where s is
    m = m_new;
    l = l * rescale + weight;
#pragma unroll
    for (int i = 0; i < kMaxPerLane; ++i) {
      const int d = i * 32 + lane;
      if (d < p.head_dim_vo) o[i] = fmaf(weight, load_element<KV>(p.v, v_at + d), o[i] * rescale);
    }
  }
};

// Writes a finished row: the result, or a partial state where the tile is split.
template <class Q, class KV>
__device__ void write_row(const AttnParams& p, const Row<Q, KV>& row, bool is_split, int64_t partial, int out_row, int head) {
  const int lane = threadIdx.x % 32;
  const float lse2 = row.l == 0.0f ? -kInf : row.m * kLog2e + log2f(row.l);
  const RowEnd end = end_row(row.l, lse2, is_split ? -kInf : sink_of(p, head));
  const float scale = end.scale * p.v_scale;
#pragma unroll
  for (int i = 0; i < kMaxPerLane; ++i) {
    const int d = i * 32 + lane;
    if (d >= p.head_dim_vo) continue;
    if (is_split) {
      ptr<float>(p.partial_out)[partial * p.head_dim_vo + d] = row.o[i] * scale;
    } else {
      store_element<Q>(p.out, out_row * p.out_stride_row + head * p.out_stride_head + d, row.o[i] * scale);
    }
  }
  if (lane != 0) return;
  if (is_split) {
    ptr<float>(p.partial_lse)[partial] = lse2;
  } else {
    store_lse(p, out_row, head, end.lse);
  }
}

template <class Q, class KV>
__device__ void attend_row(const AttnParams& p, const UnitCursor<kKernelPlain, INT32_MAX>& unit, int r, int head_in_group, int64_t partial) {
  const TileFacts& t = unit.facts;
  const int head = unit.kv_head * p.group_size + head_in_group;
  const int q_pos = t.q_pos + r;
  const float slope = p.alibi_slopes != 0 ? ptr<const float>(p.alibi_slopes)[head] : 0.0f;
  int begin, end;
  chunk_bounds(t, unit.chunk, begin, end);
  const KeyRange keys = visible_keys(p, q_pos);
  begin = max(begin, keys.first);
  end = keys.last == INT32_MAX ? end : min(end, keys.last + 1);
  const int64_t mask_begin = ptr<const AttnTile>(p.tiles)[unit.tile].mask_begin;
  Row<Q, KV> row;
  row.load_q(p, t.q_begin + r, head);
  for (int key = begin; key < end; ++key) {
    if (p.custom_mask != 0 && !mask_bit(p, mask_begin, t.kv_len, r, key)) continue;
    const Place place = place_of<kKernelPlain>(p, t.pages_begin, key, t.request);
    const float dot = row.dot(p, cache_offset(place, p.k_stride_page, p.k_stride_token) + unit.kv_head * p.k_stride_head);
    const float s = shape_score(p, dot * (p.sm_scale * p.k_scale), slope, key - q_pos);
    row.take(p, s, cache_offset(place, p.v_stride_page, p.v_stride_token) + unit.kv_head * p.v_stride_head);
  }
  write_row(p, row, t.num_chunks > 1, partial, t.q_begin + r, head);
}

template <class Q, class KV>
__device__ __forceinline__ void plain(const AttnParams& p) {
  wait_for_previous();
  UnitCursor<kKernelPlain, INT32_MAX> unit;
  unit.init(p, static_cast<int>(blockIdx.x));
  while (unit.next(p, static_cast<int>(gridDim.x))) {
    const int64_t first = unit.facts.num_chunks > 1 ? partial_row(p, unit.facts, unit.kv_head, unit.chunk) : 0;
    const int num_rows = unit.facts.q_len * p.group_size;
    for (int i = threadIdx.x / 32; i < num_rows; i += kThreads / 32) {
      attend_row<Q, KV>(p, unit, i / p.group_size, i % p.group_size, first + i);
    }
  }
  zero_padding_rows<Q, 0>(p, static_cast<int>(blockDim.x));
  launch_dependents();
}

}  // namespace

#define bf16 Bf16
#define f16 F16
#define f32 F32
#define fp8 Fp8
#define KERNEL(name, q, kv, dqk, dvo, general, threads, shared, blocks, rows) \
  extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ AttnParams p) { plain<q, kv>(p); }
#include "plain.inst"

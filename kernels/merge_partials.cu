// Merges the partial states that decode and extend kernels left in the workspace, chunk by chunk in ascending order.
//
//   out = sum_i w_i out_i / (sum_i w_i + sink),  w_i = 2^(lse_i - max lse);  lse = ln (sum + sink) + max
//
// Grid: any; a block of 8 warps takes merge units: a row and up to 8 heads, a warp each; or, where there are many chunks, a row, a
// head and a segment of its dims, 8 lanes each taking a 32nd of the chunks. Which it is depends on the tile alone: so do the bits.
// The list's blocks an SM are meant as the grid, so that all blocks are there, and have rehearsed, when the states are.
// After a decode kernel that counts its partial states (AttnParams.counters) a block merges as soon as its states are there, while
// others are still computed.
// Shared memory, static: 8 warps x (32 outputs, the largest LSE, the weight) f32. Empty states have lse = -inf and weight 0.
#include "primitives/launch.cuh"
#include "primitives/rows.cuh"
#include "primitives/softmax.cuh"
#include "primitives/units.cuh"

namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kAhead = 8;  // loads of partial outputs under way
static_assert(kWarps == kMergeHeads, "a warp a head");

// The states of one (row, head), `stride` rows apart.
struct States {
  const float* out;  // of the first
  const float* lse;
  int stride;
  int num;
};

struct Shared {
  float4 sum[kWarps][kMergeSegment / 4];
  float top[kWarps], weight[kWarps];
};

// kAhead states' outputs of dims d .. d + 3, from state `begin` on; 0 beyond `end`.
struct Outputs {
  float4 x[kAhead];

  __device__ __forceinline__ void load(const States& s, int begin, int end, int dv, int d) {
    const int step = s.stride * dv;
    const float* from = s.out + (static_cast<int64_t>(begin) * step + d);
    const int num = d < dv ? end - begin : 0;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      x[i] = make_float4(0, 0, 0, 0);
      if (i < num) x[i] = load_fresh4(from);
      from += step;
    }
  }

  // Adds them up; the weight of x[i] is w in lane `first` + i.
  __device__ __forceinline__ void add_to(float4& sum, float w, int first) const {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const float weight = __shfl_sync(~0u, w, (first + i) % 32);
      sum.x = fmaf(weight, x[i].x, sum.x), sum.y = fmaf(weight, x[i].y, sum.y);
      sum.z = fmaf(weight, x[i].z, sum.z), sum.w = fmaf(weight, x[i].w, sum.w);
    }
  }
};

__device__ __forceinline__ float load_lse(const States& s, int i) {
  return *const_cast<const volatile float*>(s.lse + i * s.stride);
}

template <class T>
__device__ __forceinline__ void write_row(const AttnParams& p, int row, int head, int d, float4 sum, RowEnd end) {
  sum.x *= end.scale, sum.y *= end.scale, sum.z *= end.scale, sum.w *= end.scale;
  if (d < p.head_dim_vo) store_out4<T>(p, row, head, d, sum);
  if (d == 0) store_lse(p, row, head, end.lse);
}

// One warp, at most 32 states. The first outputs are under way while weights are made. `writes`: false in a rehearsal.
template <class T>
__device__ __forceinline__ void merge_few(const AttnParams& p, const States& s, int row, int head, bool writes) {
  const int lane = threadIdx.x % 32;
  float w = 0.0f, top = 0.0f, total = 0.0f;
#pragma unroll 1
  for (int d = lane * 4; d < (p.head_dim_vo + 127) / 128 * 128; d += 128) {
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int i = 0; i < s.num; i += kAhead) {
      Outputs outputs;
      outputs.load(s, i, s.num, p.head_dim_vo, d);
      if (i == 0 && d < 128) {
        const float lse = lane < s.num ? load_lse(s, lane) : -kInf;
        top = warp_max(lse);
        w = exp2_approx(lse - (top == -kInf ? 0.0f : top));
        total = warp_sum(w);
      }
      outputs.add_to(sum, w, i);
    }
    if (writes) write_row<T>(p, row, head, d, sum, end_row(total, lse_base2(top, total, 1.0f), sink_of(p, head)));
  }
}

// The whole block, any number of states, dims of one segment: 8 lanes have the segment's dims, and 32 such groups of lanes an equal
// share of the states each.
template <class T>
__device__ __forceinline__ void merge_many(const AttnParams& p, const States& s, int row, int head, int segment, Shared& shared, bool writes) {
  constexpr int kLanes = kMergeSegment / 4, kGroups = kThreads / kLanes;
  static_assert(kAhead == kLanes, "a lane holds the weight of one state of a round");
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, mine = lane % kLanes, d = segment * kMergeSegment + mine * 4;
  const int share = (s.num + kGroups - 1) / kGroups;
  const int begin = static_cast<int>(threadIdx.x) / kLanes * share, end = min(begin + share, s.num);  // begin may be beyond
  float top = -kInf, total = 0.0f;
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 1
  for (int round = 0; round < share; round += kAhead) {  // alike for all lanes
    const int i = begin + round;
    Outputs outputs;
    outputs.load(s, i, end, p.head_dim_vo, d);
    const float lse = i + mine < end ? load_lse(s, i + mine) : -kInf;
    if (round == 0) {
      top = lse;
#pragma unroll 1
      for (int j = begin + kLanes + mine; j < end; j += kLanes) top = fmaxf(top, load_lse(s, j));
      top = warp_max(top);
      if (lane == 0) shared.top[warp] = top;
      __syncthreads();
#pragma unroll
      for (int w = 0; w < kWarps; ++w) top = fmaxf(top, shared.top[w]);
    }
    const float w = exp2_approx(lse - (top == -kInf ? 0.0f : top));
    total += w;
    outputs.add_to(sum, w, static_cast<int>(threadIdx.x) % 32 / kLanes * kLanes);
  }
  total = warp_sum(total);
#pragma unroll
  for (int group = kLanes; group < 32; group *= 2) {
    sum.x += __shfl_xor_sync(~0u, sum.x, group), sum.y += __shfl_xor_sync(~0u, sum.y, group);
    sum.z += __shfl_xor_sync(~0u, sum.z, group), sum.w += __shfl_xor_sync(~0u, sum.w, group);
  }
  if (lane < kLanes) shared.sum[warp][lane] = sum;
  if (lane == 0) shared.weight[warp] = total;
  __syncthreads();
  if (threadIdx.x < kLanes) {
    sum = make_float4(0, 0, 0, 0), total = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float4 x = shared.sum[w][lane];
      sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
      total += shared.weight[w];
    }
    if (writes) write_row<T>(p, row, head, d, sum, end_row(total, lse_base2(top, total, 1.0f), sink_of(p, head)));
  }
  __syncthreads();
}

// Where the decode kernel counts the states of a tile and KV head. A unit that has been merged counts too, and the last one leaves
// zero for the next launch.
__device__ __forceinline__ int* counter_of(const AttnParams& p, int tile, int head) {
  return ptr<int>(p.counters) + tile * p.num_kv_heads + head / p.group_size;
}

// By all lanes of a warp.
__device__ __forceinline__ void wait_for_states(const int* counter, int num_states) {
  if (threadIdx.x % 32 == 0) {
    while (load_acquire(counter) < num_states) __nanosleep(100);
  }
  __syncwarp();
}

// By one thread for each of num_readers.
__device__ __forceinline__ void leave_states(int* counter, int num_states, int num_readers) {
  if (atomicAdd(counter, 1) == num_states + num_readers - 1) *counter = 0;
}

template <class T>
__device__ __forceinline__ void merge_partials(const AttnParams& p) {
  __shared__ Shared shared;
  // Tables were there before the kernel that this one merges for began, so only states are waited for. Until they are
  // there a block rehearses: it merges its first unit from whatever is in the workspace and writes nothing, so that later its
  // instructions and tables are at hand.
  bool rehearses = kStartsEarly;
#pragma unroll 1
  for (int i = blockIdx.x; i < load_table(&ptr<const AttnStep>(p.step)->num_merge_units);) {
    const int4 unit = load_table4(ptr<const AttnMergeUnit>(p.merge_units) + i);
    const int row = unit.x, head_begin = unit.z;
    ATTN_CHECK(unit.y >= 0 && unit.y < load_table(&ptr<const AttnStep>(p.step)->num_tiles), p.check, kKernelMergePartials, kCheckMergeUnit, -1, row);
    const TileFacts t = load_tile(p, unit.y);
    check_tile<kKernelMergePartials>(p, unit.y, t, INT32_MAX);
    const bool is_many = t.num_chunks > kMergeWarpChunks;
    const int segment = -unit.w, num_heads = is_many ? 1 : unit.w;
    ATTN_CHECK(row >= t.q_begin && row < t.q_begin + t.q_len && t.num_chunks > 1 && head_begin >= 0 && num_heads >= 1 &&
                   num_heads <= kMergeHeads && head_begin + num_heads <= p.num_qo_heads &&
                   (!is_many || (segment >= 0 && segment * kMergeSegment < p.head_dim_vo)),
               p.check, kKernelMergePartials, kCheckMergeUnit, t.request, row);
    const int of_unit = is_many ? 0 : threadIdx.x / 32, head = head_begin + of_unit;
    const bool is_busy = of_unit < num_heads, is_counted = p.counters != 0 && !rehearses && is_busy;
    if (p.counters == 0 && !rehearses) wait_for_previous();
    if (is_counted) wait_for_states(counter_of(p, unit.y, head), t.num_chunks);
    const int64_t first = partial_row(p, t, head / p.group_size, 0) + (row - t.q_begin) * p.group_size + head % p.group_size;
    const int num = rehearses ? min(t.num_chunks, kAhead) : t.num_chunks;
    const States s = {ptr<const float>(p.partial_out) + first * p.head_dim_vo, ptr<const float>(p.partial_lse) + first, t.q_len * p.group_size, num};
    if (is_many) {
      merge_many<T>(p, s, row, head, segment, shared, !rehearses);
    } else if (is_busy) {
      merge_few<T>(p, s, row, head, !rehearses);
    }
    if (is_counted && threadIdx.x % (is_many ? kThreads : 32) == 0) {
      const int segments = is_many ? (p.head_dim_vo + kMergeSegment - 1) / kMergeSegment : 1;
      leave_states(counter_of(p, unit.y, head), t.num_chunks, t.q_len * p.group_size * segments);
    }
    if (!rehearses) i += static_cast<int>(gridDim.x);
    rehearses = false;
  }
  wait_for_previous();  // also where there was nothing to do: what comes next relies on it
  launch_dependents();
}

}  // namespace

#define bf16 Bf16
#define f16 F16
#define f32 F32
// Before sm_90 registers for three blocks are a few too little.
#define KERNEL(name, q, kv, dqk, dvo, general, threads, shared_bytes, blocks, rows)        \
  static_assert(threads == kThreads && shared_bytes == 0, "the list states the launch");  \
  extern "C" __global__ void __launch_bounds__(threads, kStartsEarly ? blocks : 2) name(const __grid_constant__ AttnParams p) { merge_partials<q>(p); }
#include "merge_partials.inst"

// Merges the partial states that decode and extend kernels left in the workspace, chunk by chunk in ascending order.
//
//   out = sum_i w_i out_i / (sum_i w_i + sink),  w_i = 2^(lse_i - max lse);  lse = ln (sum + sink) + max
//
// Grid: any; a block of 8 warps takes merge units (a row and up to 8 heads). A head of few chunks belongs to one warp; of
// more, to the block, each warp taking an eighth of the chunks. Which it is depends on the tile alone: so do the bits.
// Shared memory, static: 8 warps x (128 outputs + weight) f32. Empty states have lse = -inf and weight 0.
#include "primitives/launch.cuh"
#include "primitives/rows.cuh"
#include "primitives/softmax.cuh"
#include "primitives/units.cuh"

namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kAhead = 8;  // loads of partial outputs under way
static_assert(kWarps == kMergeHeads, "a warp a head");

// The states of one (row, head): state i is at base + i x stride.
struct States {
  const float* out;
  const float* lse;
  int64_t base, stride;
  int num;
};

struct Shared {
  float4 sum[kWarps][32];
  float top[kWarps], weight[kWarps];
};

// kAhead states' outputs of dims d .. d + 3, from state `begin` on; 0 beyond `end`.
struct Outputs {
  float4 x[kAhead];

  __device__ __forceinline__ void load(const States& s, int begin, int end, int dv, int d) {
    const int64_t step = s.stride * dv;
    const float* from = s.out + (s.base + begin * s.stride) * dv + d;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      x[i] = make_float4(0, 0, 0, 0);
      if (begin + i < end && d < dv) x[i] = load_fresh4(from);
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

// sum_i w_i out_i over states [begin, end) of dims d .. d + 3; `w` is weight i in lane i - begin, 0 beyond `end`.
__device__ __forceinline__ float4 weighted_sum(const States& s, int begin, int end, float w, int dv, int d) {
  float4 sum = make_float4(0, 0, 0, 0);
  Outputs outputs;
  for (int i = begin; i < end; i += kAhead) {
    outputs.load(s, i, end, dv, d);
    outputs.add_to(sum, w, i - begin);
  }
  return sum;
}

__device__ __forceinline__ float load_lse(const States& s, int i) {
  return *const_cast<const volatile float*>(s.lse + s.base + i * s.stride);
}

template <class T>
__device__ __forceinline__ void write_row(const AttnParams& p, int row, int head, int d, float4 sum, RowEnd end) {
  sum.x *= end.scale, sum.y *= end.scale, sum.z *= end.scale, sum.w *= end.scale;
  if (d < p.head_dim_vo) store_out4<T>(p, row, head, d, sum);
  if (d == 0) store_lse(p, row, head, end.lse);
}

// One warp, at most 32 states. The first outputs are under way while weights are made.
template <class T>
__device__ __forceinline__ void merge_few(const AttnParams& p, const States& s, int row, int head) {
  const int lane = threadIdx.x % 32;
  Outputs first;
  first.load(s, 0, s.num, p.head_dim_vo, lane * 4);
  const float lse = lane < s.num ? load_lse(s, lane) : -kInf;
  const float top = warp_max(lse);
  const float w = exp2_approx(lse - (top == -kInf ? 0.0f : top));
  const float total = warp_sum(w);
  const RowEnd end = end_row(total, lse_base2(top, total, 1.0f), sink_of(p, head));
  for (int d = lane * 4; d < (p.head_dim_vo + 127) / 128 * 128; d += 128) {
    float4 sum = make_float4(0, 0, 0, 0);
    if (d != lane * 4) first.load(s, 0, s.num, p.head_dim_vo, d);
    first.add_to(sum, w, 0);
    Outputs outputs;
    for (int i = kAhead; i < s.num; i += kAhead) {
      outputs.load(s, i, s.num, p.head_dim_vo, d);
      outputs.add_to(sum, w, i);
    }
    write_row<T>(p, row, head, d, sum, end);
  }
}

// The whole block, any number of states.
template <class T>
__device__ __forceinline__ void merge_many(const AttnParams& p, const States& s, int row, int head, Shared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int share = (s.num + kWarps - 1) / kWarps;
  const int begin = min(warp * share, s.num), end = min(begin + share, s.num);
  float top = -kInf;
  for (int i = begin + lane; i < end; i += 32) top = fmaxf(top, load_lse(s, i));
  top = warp_max(top);
  if (lane == 0) shared.top[warp] = top;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) top = fmaxf(top, shared.top[w]);
  const float offset = top == -kInf ? 0.0f : top;
  for (int d = lane * 4; d < (p.head_dim_vo + 127) / 128 * 128; d += 128) {
    float4 sum = make_float4(0, 0, 0, 0);
    float total = 0.0f;
    for (int i = begin; i < end; i += 32) {
      const float w = i + lane < end ? exp2_approx(load_lse(s, i + lane) - offset) : 0.0f;
      total += warp_sum(w);
      const float4 x = weighted_sum(s, i, min(i + 32, end), w, p.head_dim_vo, d);
      sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
    __syncthreads();  // the previous segment has been read
    shared.sum[warp][lane] = sum;
    if (lane == 0) shared.weight[warp] = total;
    __syncthreads();
    if (warp == 0) {
      sum = make_float4(0, 0, 0, 0), total = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float4 x = shared.sum[w][lane];
        sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
        total += shared.weight[w];
      }
      write_row<T>(p, row, head, d, sum, end_row(total, lse_base2(top, total, 1.0f), sink_of(p, head)));
    }
  }
  __syncthreads();
}

template <class T>
__device__ __forceinline__ void merge_partials(const AttnParams& p) {
  __shared__ Shared shared;
  // Tables were there before the kernel that this one merges for began, so only its results are waited for.
  const int num_units = load_table(&ptr<const AttnStep>(p.step)->num_merge_units);
  bool has_waited = false;
  for (int i = blockIdx.x; i < num_units; i += static_cast<int>(gridDim.x)) {
    const int4 unit = load_table4(ptr<const AttnMergeUnit>(p.merge_units) + i);
    const int row = unit.x, head_begin = unit.z, num_heads = unit.w;
    ATTN_CHECK(unit.y >= 0 && unit.y < load_table(&ptr<const AttnStep>(p.step)->num_tiles), p.check, kKernelMergePartials, kCheckMergeUnit, -1, row);
    const TileFacts t = load_tile(p, unit.y);
    check_tile<kKernelMergePartials>(p, unit.y, t, INT32_MAX);
    ATTN_CHECK(row >= t.q_begin && row < t.q_begin + t.q_len && t.num_chunks > 1 && head_begin >= 0 && num_heads >= 1 &&
                   num_heads <= kMergeHeads && head_begin + num_heads <= p.num_qo_heads,
               p.check, kKernelMergePartials, kCheckMergeUnit, t.request, row);
    if (!has_waited) wait_for_previous();
    has_waited = true;
    const bool is_many = t.num_chunks > kMergeWarpChunks;
    for (int h = is_many ? 0 : threadIdx.x / 32; h < num_heads; h += is_many ? 1 : kWarps) {
      const int head = head_begin + h, kv_head = head / p.group_size;
      const int64_t base = partial_row(p, t, kv_head, 0) + (row - t.q_begin) * p.group_size + head % p.group_size;
      const States s = {ptr<const float>(p.partial_out), ptr<const float>(p.partial_lse), base, static_cast<int64_t>(t.q_len) * p.group_size, t.num_chunks};
      if (is_many) {
        merge_many<T>(p, s, row, head, shared);
      } else {
        merge_few<T>(p, s, row, head);
      }
    }
  }
  if (!has_waited) wait_for_previous();
  launch_dependents();
}

}  // namespace

#define bf16 Bf16
#define f16 F16
#define f32 F32
#define KERNEL(name, q, kv, dqk, dvo, general, threads, shared_bytes, blocks, rows)        \
  static_assert(threads == kThreads && shared_bytes == 0, "the list states the launch");  \
  extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ AttnParams p) { merge_partials<q>(p); }
#include "merge_partials.inst"

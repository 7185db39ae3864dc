// How a unit of a decode kernel ends: the computing warps leave their states in shared memory, one more warp adds them up and writes
// the sum while they compute the next unit. So they never wait for each other.
//
// `C` is the kernel's Config, see decode.cuh. States are added in the order of their tokens, whoever adds them.
#pragma once

#include "decode_schedule.cuh"
#include "primitives/rows.cuh"
#include "primitives/softmax.cuh"

namespace {

constexpr int kComputingMeet = 1;  // the block's barrier of the computing warps

// What a warp knows of 16 rows of the unit that it computes, 8 and 8. Lane l has columns 2c and 2c + 1 of C fragments, see mma.cuh: of
// rows 2c and 2c + 1 of the 8, dims g and g + 8 of each 16, or for fp8 KV dims 2g and 2g + 1.
template <class C>
struct State {
  float o[2][C::kDv / 16][4];
  float m[2][2], l[2][2];  // l: of the lane's own tokens

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      m[half][0] = m[half][1] = -kInf, l[half][0] = l[half][1] = 0.0f;
#pragma unroll
      for (int i = 0; i < C::kDv / 16; ++i) o[half][i][0] = o[half][i][1] = o[half][i][2] = o[half][i][3] = 0.0f;
    }
  }
};

// A warp's state of 8 rows, in shared memory.
template <class C>
struct Slot {
  float* o;      // [8][kSlotPitch]
  float2* stat;  // (m, l) [8]

  static __device__ __forceinline__ Slot at(unsigned char* shared) {
    return {reinterpret_cast<float*>(shared), reinterpret_cast<float2*>(shared + 8 * C::kSlotPitch * 4)};
  }

  // `num_rows`: of the 8, those that are wanted.
  __device__ __forceinline__ void put(const State<C>& state, int half, int num_rows) const {
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float l = column_sum(state.l[half][j]);
      if (2 * c + j >= num_rows) continue;
      if (g == 0) stat[2 * c + j] = make_float2(state.m[half][j], l);
      float* row = o + (2 * c + j) * C::kSlotPitch;
#pragma unroll
      for (int i = 0; i < C::kDv / 16; ++i) {
        const float a = state.o[half][i][j], b = state.o[half][i][2 + j];
        if constexpr (C::kFp8) {
          *reinterpret_cast<float2*>(row + i * 16 + 2 * g) = make_float2(a, b);
        } else {
          row[i * 16 + g] = a, row[i * 16 + g + 8] = b;
        }
      }
    }
  }
};

// Adds up what all warps put into their slots, dims d .. d + 3 of a row of the 8, in the order of their tokens, and writes the result
// or the partial state: of row `row` of the unit.
template <class C, class SlotOf>
__device__ __forceinline__ void finish_dims(const AttnParams& p, const Unit& unit, const SlotOf& slot_of, int row, int d, float c) {
  float2 stat[C::kWarps];
  float m = -kInf, l = 0.0f;
#pragma unroll
  for (int warp = 0; warp < C::kWarps; ++warp) {
    stat[warp] = slot_of(warp).stat[row % 8];
    m = fmaxf(m, stat[warp].x);
  }
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int warp = 0; warp < C::kWarps; ++warp) {
    const float4 x = *reinterpret_cast<const float4*>(slot_of(warp).o + row % 8 * C::kSlotPitch + d);
    const float weight = rescale_factor(stat[warp].x, m, c);
    l = fmaf(stat[warp].y, weight, l);
    sum.x = fmaf(x.x, weight, sum.x), sum.y = fmaf(x.y, weight, sum.y);
    sum.z = fmaf(x.z, weight, sum.z), sum.w = fmaf(x.w, weight, sum.w);
  }
  const float lse2 = lse_base2(m, l, c);
  const int token = row < p.group_size ? 0 : row / p.group_size, head = unit.kv_head * p.group_size + row - token * p.group_size;
  const bool is_split = unit.partial >= 0;
  const RowEnd end = end_row(l, lse2, is_split ? -kInf : sink_of(p, head));
  const float scale = end.scale * p.v_scale;
  sum.x *= scale, sum.y *= scale, sum.z *= scale, sum.w *= scale;
  if (is_split) {
    const int64_t partial = static_cast<int64_t>(unit.partial) + row;
    // Evicted last: else they take a twentieth of the time of a long batch on their way to memory.
    store_kept(reinterpret_cast<float4*>(ptr<float>(p.partial_out) + partial * C::kDv + d), sum, evict_last_policy());
    if (d == 0) ptr<float>(p.partial_lse)[partial] = lse2;
  } else {
    store_out4<typename C::Q>(p, unit.q_begin + token, head, d, sum);
    if (d == 0) store_lse(p, unit.q_begin + token, head, end.lse);
  }
}

// Says that a unit's partial state is there, by one thread, when all that wrote it have fenced.
__device__ __forceinline__ void count_state(const AttnParams& p, const Unit& unit) {
  atomicAdd(ptr<int>(p.counters) + unit.counter, 1);
}

__device__ __forceinline__ bool is_counted(const AttnParams& p, const Unit& unit) { return p.counters != 0 && unit.partial >= 0; }

// Where the computing warps leave the states of a unit, 8 rows at a time.
template <class C>
struct Finish {
  unsigned char* shared;

  __device__ __forceinline__ Slot<C> slot(int warp) const { return Slot<C>::at(shared + C::kSlotAt + warp * C::kSlotBytes); }
  __device__ __forceinline__ uint64_t* filled() const { return reinterpret_cast<uint64_t*>(shared + C::kFinishBarriersAt); }
  __device__ __forceinline__ uint64_t* emptied() const { return filled() + 1; }
  __device__ __forceinline__ Unit& unit() const { return *reinterpret_cast<Unit*>(shared + C::kUnitAt); }  // num_rows == 0: no more

  // A warp keeps the unit that it ends until its state is left; a __syncwarp comes between.
  __device__ __forceinline__ void keep(const Unit& unit) const {
    if (threadIdx.x % 32 == 0) kept() = unit;
  }
  __device__ __forceinline__ Unit& kept() const { return *(&unit() + 1 + threadIdx.x / 32); }

  // By one thread, before the block's first __syncthreads.
  __device__ __forceinline__ void init() const { barrier_init(filled(), 32 * C::kWarps), barrier_init(emptied()); }
};

// The end of a unit, by each computing warp; a unit without rows tells that there are no more. `round`: how many times slots were
// filled; all warps count alike.
template <class C>
__device__ __forceinline__ void leave_state(const Finish<C>& finish, const State<C>& state, const Unit& unit, int& round) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half > 0 && 8 * half >= unit.num_rows) break;
    if (round > 0) barrier_wait(finish.emptied(), (round & 1) ^ 1);
    if (threadIdx.x == 0) finish.unit() = unit;
    if (8 * half < unit.num_rows) finish.slot(threadIdx.x / 32).put(state, half, unit.num_rows - 8 * half);
    barrier_arrive(finish.filled());
    ++round;
  }
}

// The warp that finishes units.
template <class C>
__device__ __forceinline__ void finish_units(const AttnParams& p, const Finish<C>& finish, float c) {
  constexpr int kQuads = C::kDv / 4;
  auto slot_of = [&](int warp) { return finish.slot(warp); };
  for (int round = 0;;) {
    barrier_wait_idly(finish.filled(), round & 1);
    const Unit unit = finish.unit();
    if (unit.num_rows == 0) return;
    for (int first = 0;;) {  // 0, then 8
      const int num = min(unit.num_rows - first, 8) * kQuads;
#pragma unroll 1
      for (int i = threadIdx.x % 32; i < num; i += 32) finish_dims<C>(p, unit, slot_of, first + i / kQuads, i % kQuads * 4, c);
      barrier_arrive(finish.emptied());
      ++round;
      first += 8;
      if (first >= unit.num_rows) break;
      barrier_wait_idly(finish.filled(), round & 1);
    }
    if (is_counted(p, unit)) {
      __threadfence();
      __syncwarp();
      if (threadIdx.x % 32 == 0) count_state(p, unit);
    }
  }
}

// The end of a block's last unit, by each computing warp. All that comes after the kernel waits for it, so the warps put their
// states into their rings, which are free, and share the rows and dims.
template <class C>
__device__ __forceinline__ void finish_last_unit(const AttnParams& p, const State<C>& state, const Unit& unit, float c, unsigned char* shared) {
  constexpr int kQuads = C::kDv / 4;
  static_assert(2 * C::kSlotBytes <= C::kStages * C::kStageBytes, "16 rows fit into a ring");
  auto slot_of = [&](int giver, int half) { return Slot<C>::at(shared + giver * C::kStages * C::kStageBytes + half * C::kSlotBytes); };
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (8 * half < unit.num_rows) slot_of(threadIdx.x / 32, half).put(state, half, unit.num_rows - 8 * half);
  }
  meet(kComputingMeet, 32 * C::kWarps);
#pragma unroll 1
  for (int i = threadIdx.x; i < unit.num_rows * kQuads; i += 32 * C::kWarps) {
    const int row = i / kQuads;
    auto of_half = [&](int giver) { return slot_of(giver, row / 8); };
    finish_dims<C>(p, unit, of_half, row, i % kQuads * 4, c);
  }
  if (!is_counted(p, unit)) return;
  __threadfence();
  meet(kComputingMeet, 32 * C::kWarps);
  if (threadIdx.x == 0) count_state(p, unit);
}

}  // namespace

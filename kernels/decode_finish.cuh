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

// What a warp knows of 16 rows of the unit that it computes.
template <class C>
struct State {
  float o[C::kDv / 8][4];  // C fragments; fp8: dims permuted within 16, see write_row
  float m[2], l[2];        // of rows g and g + 8; l: of the lane's own columns

  __device__ __forceinline__ void clear() {
    m[0] = m[1] = -kInf, l[0] = l[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < C::kDv / 8; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.0f;
  }
};

// A warp's state of 8 rows, in shared memory: a lane finds what the same lane of that warp put there.
template <class C>
struct Slot {
  float2* o;     // [kDv / 8][32]
  float2* stat;  // (m, l) [32]

  static __device__ __forceinline__ Slot at(unsigned char* shared) {
    return {reinterpret_cast<float2*>(shared), reinterpret_cast<float2*>(shared + C::kSlotBytes - 32 * sizeof(float2))};
  }

  __device__ __forceinline__ void put(const State<C>& state, int half) const {
    const int lane = threadIdx.x % 32;
    stat[lane] = make_float2(state.m[half], state.l[half]);
#pragma unroll
    for (int i = 0; i < C::kDv / 8; ++i) o[i * 32 + lane] = make_float2(state.o[i][2 * half], state.o[i][2 * half + 1]);
  }
};

// 8 x kFragments dims of the state of a row, in the registers of four lanes.
template <int kFragments>
struct Row {
  float2 o[kFragments];
  float m, l;     // l: of the lane's own columns
  int first_dim;  // 0: this part's warp writes the LSE too
};

// Adds up what all warps put into their slots, fragments `first` .. of them, in the order of their tokens.
template <class C, int kFragments, class SlotOf>
__device__ __forceinline__ Row<kFragments> sum_states(const SlotOf& slot_of, int first, float c) {
  const int lane = threadIdx.x % 32;
  Row<kFragments> sum = {{}, -kInf, 0.0f, first * 8};
#pragma unroll(kFragments <= 4 ? C::kWarps : 2)
  for (int warp = 0; warp < C::kWarps; ++warp) {
    const Slot<C> slot = slot_of(warp);
    const float2 stat = slot.stat[lane];
    const float m = fmaxf(sum.m, stat.x);
    const float before = rescale_factor(sum.m, m, c), own = rescale_factor(stat.x, m, c);
    sum.m = m, sum.l = fmaf(sum.l, before, stat.y * own);
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
      const float2 x = slot.o[(first + i) * 32 + lane];
      sum.o[i] = make_float2(fmaf(sum.o[i].x, before, x.x * own), fmaf(sum.o[i].y, before, x.y * own));
    }
  }
  return sum;
}

// Writes the result or the partial state of row g + 8 half of a unit.
template <class C, int kFragments>
__device__ __forceinline__ void write_row(const AttnParams& p, const Unit& unit, const Row<kFragments>& from, int half, float c) {
  const int lane = threadIdx.x % 32, row = lane / 4 + 8 * half, quad_lane = lane % 4;
  const float l = quad_sum(from.l);
  if (row >= unit.num_rows) return;
  const float lse2 = lse_base2(from.m, l, c);
  const int token = row / p.group_size, head = unit.kv_head * p.group_size + row - token * p.group_size;
  const bool is_split = unit.partial >= 0;
  const RowEnd end = end_row(l, lse2, is_split ? -kInf : sink_of(p, head));
  const float scale = end.scale * p.v_scale;
  const int64_t partial = static_cast<int64_t>(unit.partial) + row;
  if (quad_lane == 0 && from.first_dim == 0) {
    if (is_split) {
      ptr<float>(p.partial_lse)[partial] = lse2;
    } else {
      store_lse(p, unit.q_begin + token, head, end.lse);
    }
  }
  float* to = ptr<float>(p.partial_out) + partial * C::kDv;
  const uint64_t policy = evict_last_policy();  // else they take a twentieth of the time of a long batch on their way to memory
#pragma unroll
  for (int i = 0; i < kFragments; i += 2) {
    const float2 a = make_float2(from.o[i].x * scale, from.o[i].y * scale);
    const float2 b = make_float2(from.o[i + 1].x * scale, from.o[i + 1].y * scale);
    if constexpr (C::kFp8) {  // fragments i, i + 1: even and odd dims of 16
      const float4 x = make_float4(a.x, b.x, a.y, b.y);
      const int d = from.first_dim + i * 8 + 4 * quad_lane;
      if (is_split) {
        store_kept(reinterpret_cast<float4*>(to + d), x, policy);
      } else {
        store_out4<typename C::Q>(p, unit.q_begin + token, head, d, x);
      }
    } else {
      const int d = from.first_dim + i * 8 + 2 * quad_lane;
      if (is_split) {
        store_kept(reinterpret_cast<float2*>(to + d), a, policy);
        store_kept(reinterpret_cast<float2*>(to + d + 8), b, policy);
      } else {
        store_out2<typename C::Q>(p, unit.q_begin + token, head, d, a.x, a.y);
        store_out2<typename C::Q>(p, unit.q_begin + token, head, d + 8, b.x, b.y);
      }
    }
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
    if (8 * half < unit.num_rows) finish.slot(threadIdx.x / 32).put(state, half);
    barrier_arrive(finish.filled());
    ++round;
  }
}

// The warp that finishes units.
template <class C>
__device__ __forceinline__ void finish_units(const AttnParams& p, const Finish<C>& finish, float c) {
  auto slot_of = [&](int warp) { return finish.slot(warp); };
  for (int round = 0;;) {
    barrier_wait_idly(finish.filled(), round & 1);
    const Unit unit = finish.unit();
    if (unit.num_rows == 0) return;
    for (int half = 0;;) {
      const Row<C::kDv / 8> sum = sum_states<C, C::kDv / 8>(slot_of, 0, c);
      barrier_arrive(finish.emptied());
      ++round;
      write_row<C>(p, unit, sum, half, c);
      if (8 * ++half >= unit.num_rows) break;
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
// states into their rings, which are free, and each adds up some of the dims.
template <class C>
__device__ __forceinline__ void finish_last_unit(const AttnParams& p, const State<C>& state, const Unit& unit, float c, unsigned char* shared) {
  constexpr int kFragments = (C::kDv / 16 + C::kWarps - 1) / C::kWarps * 2;  // of a warp; a multiple of 2, see write_row
  static_assert(C::kDv / 8 % kFragments == 0, "a warp has a full share or none");
  static_assert(2 * C::kSlotBytes <= C::kStages * C::kStageBytes, "16 rows fit into a ring");
  const int warp = threadIdx.x / 32;
  auto slot_of = [&](int giver, int half) { return Slot<C>::at(shared + giver * C::kStages * C::kStageBytes + half * C::kSlotBytes); };
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (8 * half < unit.num_rows) slot_of(warp, half).put(state, half);
  }
  meet(kComputingMeet, 32 * C::kWarps);
  if (warp * kFragments < C::kDv / 8) {
#pragma unroll 1
    for (int half = 0; 8 * half < unit.num_rows; ++half) {
      auto of_half = [&](int giver) { return slot_of(giver, half); };
      write_row<C>(p, unit, sum_states<C, kFragments>(of_half, warp * kFragments, c), half, c);
    }
  }
  if (!is_counted(p, unit)) return;
  __threadfence();
  meet(kComputingMeet, 32 * C::kWarps);
  if (threadIdx.x == 0) count_state(p, unit);
}

}  // namespace

// Split-KV attention for few query rows: the GQA group (and a few query tokens) are the columns of one or two tensor-core products.
//
//   unit = (tile of query tokens, KV head, chunk of KV);  rows = q_len x group_size <= 16, row = token x group + head
//
// Grid: any; blocks are persistent and take units by number: the first by the block's, others by claim, since some SMs get far more
// of the memory's bandwidth than others. Of a block's warps one schedules (decode_schedule.cuh), one finishes (decode_finish.cuh), and
// the others copy and compute. A unit's KV goes by in tiles of kTile tokens, of which each of these owns 16 x kGroups, with its own
// running softmax and output. It copies just the tokens that it owns (decode_loader.cuh), into its own ring of kStages stages, and
// refills a stage as soon as it has computed it, so the rings stay full, also across units; it waits for no other that computes.
// Which tokens a warp takes, and the order in which states are added, depend on the chunk alone: so do the bits.
//
// Shared memory, bytes: kWarps x kStages x 16 kGroups x (row of K + row of V), see tile.cuh; kStages places, each of kMaxRows rows of
//   q, kSegment page ids and a Segment; a slot for each warp's state of 8 rows; barriers.
// Registers, per thread: kDv / 2 outputs, kDq / 4 of q (mostly, see kQInRegisters), 4 x 2 x kGroups scores.
// Synchronisation: a warp's copies are seen after its own cp.async wait and __syncwarp. Segments come, and states go, by barriers
//   between the computing warps and the one that schedules or finishes.
// Tokens beyond the chunk are zero-filled, never read; rows of q beyond the unit's are those of another unit or zero, and their
// results dropped.
//
// The file that includes this says how many warps compute: kComputingWarps; half as many where rows are wide.
#pragma once

#include "decode_finish.cuh"
#include "decode_loader.cuh"
#include "decode_schedule.cuh"
#include "primitives/barrier.cuh"
#include "primitives/cp_async.cuh"
#include "primitives/fp8.cuh"
#include "primitives/launch.cuh"
#include "primitives/mask.cuh"
#include "primitives/mma.cuh"
#include "primitives/rows.cuh"
#include "primitives/softmax.cuh"
#include "primitives/tile.cuh"
#include "primitives/units.cuh"

namespace {

template <class Q_, class KV_, int kDq_, int kDv_, bool kGeneral_>
struct Config {
  using Q = Q_;
  using KV = KV_;
  static constexpr int kDq = kDq_, kDv = kDv_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr bool kFp8 = Same<KV, Fp8>::value;
  using Math = typename Either<kFp8, F16, Q>::T;  // e4m3 is a subset of f16

  static constexpr int kWarps = kDq >= 192 ? kComputingWarps / 2 : kComputingWarps;  // that copy and compute
  static constexpr int kThreads = 32 * (kWarps + 2);
  static constexpr int kGroups = kDq <= 64 || (kFp8 && kDq == 128) ? 2 : 1;  // of 16 tokens, a warp and tile
  static constexpr int kOwn = 16 * kGroups;                                  // tokens of a warp and tile
  static constexpr int kTile = kOwn * kWarps;
  static constexpr int kKRow = kDq * KV::kBytes, kVRow = kDv * KV::kBytes;  // bytes
  using KLayout = RowLayout<kKRow>;
  using VLayout = RowLayout<kVRow>;
  using QLayout = RowLayout<kDq * 2>;
  static constexpr int kVAt = kOwn * KLayout::kPitch;  // V follows K in a stage
  static constexpr int kStageBytes = kVAt + kOwn * VLayout::kPitch;
  // More stages where rows are short, so that as much is on its way: by the bytes of a tile in blocks of four computing warps.
  static constexpr int kSmallTileBytes = kWarps * kStageBytes * 4 / kComputingWarps;
  static constexpr int kStages = kSmallTileBytes >= 24 * 1024 ? 2 : kSmallTileBytes >= 16 * 1024 ? 3 : 4;
  // Else its fragments come from shared memory for each tile.
  static constexpr bool kQInRegisters = kDq < (kFp8 && kGeneral ? 128 : 192);

  static constexpr int kSegment = (kComputingWarps > 4 ? 512 : 256) / kTile * kTile;  // tokens; measured, see docs/kernels/decode.md

  // What a warp hands on at a time: outputs of 8 rows, apart so that lanes write them without bank conflicts, and their (m, l).
  static constexpr int kSlotPitch = kDv + 4;  // floats
  static constexpr int kSlotBytes = 8 * kSlotPitch * 4 + 8 * 8;

  static constexpr int kRingBytes = kWarps * kStages * kStageBytes;
  static constexpr int kQAt = kRingBytes, kQBytes = kMaxRows * QLayout::kPitch;
  static constexpr int kSlotAt = kQAt + kStages * kQBytes;
  static constexpr int kPagesAt = kSlotAt + kWarps * kSlotBytes;
  static constexpr int kSegmentsAt = kPagesAt + kStages * kSegment * 4;
  static constexpr int kUnitAt = kSegmentsAt + kStages * static_cast<int>(sizeof(Segment));
  static constexpr int kFinishBarriersAt = kUnitAt + (kWarps + 1) * static_cast<int>(sizeof(Unit));
  static constexpr int kScheduleBarriersAt = kFinishBarriersAt + 2 * 8;
  static constexpr int kSharedBytes = kScheduleBarriersAt + kScheduleBarriers<kStages> * 8;

  // Copying: kLanesPerRow lanes share a row; each lane takes the rows r0, r0 + kRowsPerPass, ...
  static constexpr int kLanesPerRow = at_most(kKRow % 128 == 0 ? 8 : kKRow % 64 == 0 ? 4 : 2, kVRow % 128 == 0 ? 8 : kVRow % 64 == 0 ? 4 : 2);
  static constexpr int kKCopies = kKRow / 16 / kLanesPerRow, kVCopies = kVRow / 16 / kLanesPerRow;
  static constexpr int kRowsPerPass = 32 / kLanesPerRow;
  static constexpr int kPasses = kOwn / kRowsPerPass;

  static constexpr bool kIsCramped = kDq == 128 || kDq == 256;  // registers are short
  static_assert(16 % kRowsPerPass == 0 && kOwn <= 32 && kDq % 16 == 0 && kDv % 16 == 0 && kSegment > 0, "");
};

// What scores are multiplied by before they are exponents of 2; general: they are shaped, in base 2, before the softmax.
template <class C>
__device__ __forceinline__ float exponent_scale(const AttnParams& p) {
  return C::kGeneral ? 1.0f : p.sm_scale * p.k_scale * kLog2e;
}

// Products are made the other way round, K Q^T and V^T P^T, since a product has 16 rows but 8 columns: tokens, then dims, are the rows,
// and up to 8 rows of a unit the columns. Units of more have two products of each fragment of K and V (kHalves).

// Where a lane's rows of B fragments of q are: two dims of 8 for the first 8 rows of the unit and for the others.
template <class C>
__device__ __forceinline__ uint32_t q_address(uint32_t q_rows) {
  return q_rows + C::QLayout::at(threadIdx.x % 16, threadIdx.x % 32 / 16);
}

// What a warp knows of the unit it computes.
template <class C>
struct Rows : State<C> {
  uint32_t q[C::kQInRegisters ? C::kDq / 16 : 1][4];  // B fragments: words 0 and 2 of the first 8 rows, 1 and 3 of the others

  // Before a unit, whose rows of q are in shared memory.
  __device__ __forceinline__ void begin(uint32_t q_rows) {
    if constexpr (C::kQInRegisters) {
#pragma unroll
      for (int k = 0; k < C::kDq / 16; ++k) ldmatrix4(q[k], C::QLayout::further(q_address<C>(q_rows), k * 32));
    }
    this->clear();
  }
};

// Scores of the warp's tokens, 16 a group, and of kHalves times 8 rows: C fragments, whose rows are tokens.
template <class C, int kHalves>
using Scores = float[kHalves][C::kGroups][4];

template <class C, int kHalves>
__device__ __forceinline__ void scores(const Rows<C>& rows, uint32_t q_rows, uint32_t k_tile, Scores<C, kHalves>& s) {
  const int lane = lane_of_thread<C::kIsCramped>();
  // Matrices 0, 2: tokens 0..7, matrices 1, 3: tokens 8..15; the last two the second 16 bytes.
  const uint32_t from = k_tile + C::KLayout::at(lane % 16, lane / 16);
#pragma unroll
  for (int group = 0; group < C::kGroups; ++group) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[half][group][i] = 0.0f;
    }
#pragma unroll
    for (int k = 0; k < C::kKRow / 32; ++k) {
      uint32_t a[4];
      ldmatrix4(a, C::KLayout::further(from, k * 32) + group * 16 * C::KLayout::kPitch);
      constexpr int kQSteps = C::kFp8 ? 2 : 1;  // 32 bytes of K are 32 dims in fp8
#pragma unroll
      for (int i = 0; i < kQSteps; ++i) {
        uint32_t b[4];
        if constexpr (C::kQInRegisters) {
#pragma unroll
          for (int j = 0; j < 4; ++j) b[j] = rows.q[k * kQSteps + i][j];
        } else {
          ldmatrix4(b, C::QLayout::further(q_address<C>(q_rows), (k * kQSteps + i) * 32));
        }
        uint32_t of_step[4] = {a[0], a[1], a[2], a[3]};
        if constexpr (C::kFp8) {
          // Four neighbouring bytes a lane: bytes 0, 1 take the slots 2c of the contraction, bytes 2, 3 the slots 2c + 8.
          fp8x4_to_f16(a[2 * i], of_step[0], of_step[2]);
          fp8x4_to_f16(a[2 * i + 1], of_step[1], of_step[3]);
        }
#pragma unroll
        for (int half = 0; half < kHalves; ++half) mma<typename C::Math>(s[half][group], of_step, b[half], b[half + 2]);
      }
    }
  }
}

// Softcap, ALiBi, then -inf for keys that a row does not see. Rare for long chunks, so all that it needs is fetched here.
template <class C, int kHalves>
__device__ __forceinline__ void mask_scores(const AttnParams& p, const Segment& now, int pos, float scale, Scores<C, kHalves>& s) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  const int first = pos + warp * C::kOwn + g;
  const AttnTile* tile = ptr<const AttnTile>(p.tiles) + now.tile;
#pragma unroll
  for (int column = 0; column < 2 * kHalves; ++column) {
    const int row = min(column / 2 * 8 + 2 * c + column % 2, now.unit.num_rows - 1), token = row / p.group_size;  // surplus rows: any
    const int q_pos = now.q_pos + token;
    const KeyRange keys = visible_keys(p, q_pos);
    const int last = min(keys.last, now.end - 1);
    float slope = 0.0f;
    if (C::kGeneral && p.alibi_slopes != 0) slope = ptr<const float>(p.alibi_slopes)[now.unit.kv_head * p.group_size + row % p.group_size];
#pragma unroll
    for (int group = 0; group < C::kGroups; ++group) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key = first + group * 16 + i * 8;
        float& x = s[column / 2][group][2 * i + column % 2];
        bool visible = key >= keys.first && key <= last;
        if constexpr (C::kGeneral) {
          x = shape_score(p, x * scale, slope, key - q_pos) * kLog2e;
          if (p.custom_mask != 0 && visible) visible = mask_bit(p, tile->mask_begin, load_table(&tile->kv_len), token, key);
        }
        if (!visible) x = -kInf;
      }
    }
  }
}

// Turns scores into weights, and rescales what was summed before.
template <class C, int kHalves>
__device__ __forceinline__ void softmax_step(Rows<C>& rows, float c, Scores<C, kHalves>& s) {
  float top[kHalves][2];  // of the lane's own tokens
  bool grows = false;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float m = rows.m[half][j];
#pragma unroll
      for (int group = 0; group < C::kGroups; ++group) m = fmaxf(m, fmaxf(s[half][group][j], s[half][group][2 + j]));
      top[half][j] = m;
      grows |= may_change_maximum(rows.m[half][j], m, c);
    }
  }
  if (__any_sync(~0u, grows)) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float m = next_maximum(rows.m[half][j], column_max(top[half][j]), c);
        const float rescale = rescale_factor(rows.m[half][j], m, c);
        rows.m[half][j] = m;
        rows.l[half][j] *= rescale;
#pragma unroll
        for (int i = 0; i < C::kDv / 16; ++i) rows.o[half][i][j] *= rescale, rows.o[half][i][2 + j] *= rescale;
      }
    }
  }
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float offset = exponent_offset(rows.m[half][j], c);
#pragma unroll
      for (int group = 0; group < C::kGroups; ++group) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = s[half][group][2 * i + j];
          x = exp2_approx(fmaf(x, c, -offset));
          rows.l[half][j] += x;
        }
      }
    }
  }
}

// O += P V for the warp's tokens.
template <class C, int kHalves>
__device__ __forceinline__ void add_values(Rows<C>& rows, uint32_t v_tile, const Scores<C, kHalves>& s) {
  using Math = typename C::Math;
  const int lane = lane_of_thread<C::kIsCramped>();
  // bf16 and f16: matrices 0, 1 tokens 0..7 of 8 dims each, matrices 2, 3 tokens 8..15. fp8: as of K.
  const uint32_t from = v_tile + (C::kFp8 ? C::VLayout::at(lane % 16, lane / 16) : C::VLayout::at(lane % 8 + lane / 16 * 8, lane / 8 % 2));
#pragma unroll
  for (int group = 0; group < C::kGroups; ++group) {
    uint32_t b[kHalves][2];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < 2; ++i) b[half][i] = transpose8(pack2<Math>(s[half][group][2 * i], s[half][group][2 * i + 1]));
    }
#pragma unroll
    for (int i = 0; i < C::kVRow / 32; ++i) {
      uint32_t r[4];
      ldmatrix4_trans(r, C::VLayout::further(from, i * 32) + group * 16 * C::VLayout::kPitch);
      if constexpr (C::kFp8) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          uint32_t a[4];  // even dims of 16, then odd ones
          fp8_values_to_f16(r[2 * n], a[0], a[1]);
          fp8_values_to_f16(r[2 * n + 1], a[2], a[3]);
#pragma unroll
          for (int half = 0; half < kHalves; ++half) mma<F16>(rows.o[half][2 * i + n], a, b[half][0], b[half][1]);
        }
      } else {
#pragma unroll
        for (int half = 0; half < kHalves; ++half) mma<Math>(rows.o[half][i], r, b[half][0], b[half][1]);
      }
    }
  }
}

// A warp's tokens of a tile.
template <class C, int kHalves>
__device__ __forceinline__ void compute_tile(const AttnParams& p, const Segment& now, int pos, Rows<C>& rows, uint32_t q_rows, uint32_t stage) {
  Scores<C, kHalves> s;
  scores<C, kHalves>(rows, q_rows, stage, s);
  if (C::kGeneral || pos < now.unmasked_begin || pos + C::kTile > now.unmasked_end) mask_scores<C, kHalves>(p, now, pos, p.sm_scale * p.k_scale, s);
  softmax_step<C, kHalves>(rows, exponent_scale<C>(p), s);
  add_values<C, kHalves>(rows, stage + C::kVAt, s);
}

// A warp that copies and computes: its tokens of every tile of the block.
template <class C>
__device__ __forceinline__ void compute_all(const AttnParams& p, const Schedule<C>& schedule, const Start& start) {
  const int warp = threadIdx.x / 32;
  unsigned char* shared = schedule.shared;
  const uint32_t ring = shared_address(shared) + warp * C::kStages * C::kStageBytes;
  const Finish<C> finish = {shared};
  Loader<C> loader = {p, schedule, start.begin()};
  int pending = 0;  // tiles copied and not yet computed
  const int first_segment_end = start.first_segment_end<C>(p);
#pragma unroll 1
  for (int i = 0; i < C::kStages; ++i) pending += loader.copy_first(ring + i * C::kStageBytes, start, first_segment_end);
  if (pending > 0) barrier_wait(schedule.made(0), 0);

  Rows<C> rows;
  int stage = 0, round = 0, pos = 0;
  unsigned segment = 0;
  bool is_entered = false;
  while (pending > 0) {
    cp_async_wait<C::kStages - 1>();
    __syncwarp();
    const Segment& now = schedule.segment(segment);
    if (!is_entered) {
      if (now.is_first) {
        barrier_wait(schedule.q_is_there(now.q_place), now.q_parity);
        rows.begin(shared_address(schedule.q(now.q_place)));
      }
      pos = now.begin, is_entered = true;
    }
    if (pos + warp * C::kOwn < now.end) {
      const uint32_t from = ring + stage * C::kStageBytes, q_rows = C::kQInRegisters ? 0 : shared_address(schedule.q(now.q_place));
      if (now.unit.num_rows <= 8) {
        compute_tile<C, 1>(p, now, pos, rows, q_rows, from);
      } else {
        compute_tile<C, 2>(p, now, pos, rows, q_rows, from);
      }
    }
    pos += C::kTile;
    const bool leaves = pos >= now.end, ends = leaves && now.is_last;
    if (ends) finish.keep(now.unit);  // once left, the segment is made anew
    __syncwarp();                     // all lanes are done with the stage
    if (leaves) {
      barrier_arrive(schedule.left(segment));
      ++segment, is_entered = false;
    }
    --pending;
    pending += loader.copy(ring + stage * C::kStageBytes);
    if (ends && pending > 0) leave_state<C>(finish, rows, finish.kept(), round);
    stage = stage + 1 == C::kStages ? 0 : stage + 1;
  }
  leave_state<C>(finish, rows, Unit{}, round);
  if (segment > 0) finish_last_unit<C>(p, rows, finish.kept(), exponent_scale<C>(p), shared);
}

template <class C>
__device__ __forceinline__ void decode(const AttnParams& p) {
  extern __shared__ __align__(128) unsigned char shared[];
  const Schedule<C> schedule = {shared};
  check_shape<kKernelDecode, C::kDq, C::kDv>(p);
  const int role = static_cast<int>(threadIdx.x) / 32 - C::kWarps;  // < 0: computes; 0: schedules; 1: finishes
  Start start;
  start.load(p);  // tables are there before any kernel that this one could follow early
  schedule.init();
  if (threadIdx.x == 0) Finish<C>{shared}.init();
  wait_for_previous();
  __syncthreads();
  if (role < 0) {
    compute_all<C>(p, schedule, start);
  } else if (role == 0) {
    // The merging kernel may take what room there is: it waits for states, and blocks of this one are all there.
    launch_dependents();
    Scheduler<C>{p, schedule}.run(start);
    if (p.claim != 0 && threadIdx.x % 32 == 0) leave_claims(p);
  } else {
    if (start.has_unit()) hand_out_q<C>(p, schedule, 0, start.kv_head, start.rows.y, start.rows.z);
    zero_padding_rows<typename C::Q, C::kDv>(p, 32);
    finish_units<C>(p, Finish<C>{shared}, exponent_scale<C>(p));
  }
}

}  // namespace

#define bf16 Bf16
#define f16 F16
#define fp8 Fp8
#define KERNEL(name, q, kv, dqk, dvo, general, threads, shared_bytes, blocks, rows)                                            \
  static_assert(Config<q, kv, dqk, dvo, general>::kThreads == threads, "the list states the block size");                      \
  static_assert(Config<q, kv, dqk, dvo, general>::kSharedBytes == shared_bytes, "the list states the shared memory");          \
  static_assert(rows == kMaxRows, "the list states the rows");                                                                 \
  extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ AttnParams p) {                   \
    decode<Config<q, kv, dqk, dvo, general>>(p);                                                                               \
  }

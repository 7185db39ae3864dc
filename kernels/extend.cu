// Attention for many query rows: prefill, chunked prefill, speculative tokens; paged or ragged KV, causal or not.
//
//   unit = (tile of query tokens, KV head, chunk of KV);  row = token x group + head, so a group shares its KV loads
//
// Grid: any; blocks are persistent and take ranges of units by stride, or claim the KV heads of tiles one by one. A block holds kRows rows of q;
// a warp owns 16 x kMt of them and sees all tokens. KV goes by in tiles of kTile tokens through two stages, the next one under
// way while this one is used. A unit of more than kRows rows (a very large group) passes over its KV once for each kRows.
// A row's arithmetic depends on its chunk and its place in the tile alone.
//
// Shared memory, bytes: kRows rows of q; 2 x kTile x (row of K + row of V); see tile.cuh;
//   2 x kTile page ids; the claimed head; the chunk's bounds, the unit's rows and the unit (read there, to spare registers).
// Registers, per thread: kMt x (kDv / 2 outputs + kTile / 2 scores).
// Barriers: at the start of a pass, all warps are done with q and both stages; at the top of an iteration, the stage has
//   arrived for all, and the other one, consumed before, may be overwritten. A warp's rows of q are its own scratch at the end.
// Rows of K and V beyond the chunk are zero-filled, never read; surplus rows of q are zero and not written out.
#include "primitives/cp_async.cuh"
#include "primitives/fp8.cuh"
#include "primitives/launch.cuh"
#include "primitives/mask.cuh"
#include "primitives/mma.cuh"
#include "primitives/paged.cuh"
#include "primitives/rows.cuh"
#include "primitives/softmax.cuh"
#include "primitives/tile.cuh"
#include "primitives/units.cuh"

namespace {

using Cursor = UnitCursor<kKernelExtend, INT32_MAX>;

template <class Q_, class KV_, int kDq_, int kDv_, bool kGeneral_, int kRows_>
struct Config {
  using Q = Q_;
  using KV = KV_;
  static constexpr int kDq = kDq_, kDv = kDv_, kRows = kRows_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr bool kFp8 = Same<KV, Fp8>::value;
  using Math = typename Either<kFp8, F16, Q>::T;  // e4m3 is a subset of f16

  static constexpr int kMt = kRows == 128 && kDv <= 128 ? 2 : 1;  // 16-row tiles of a warp
  static constexpr int kWarps = kRows / (16 * kMt);
  static constexpr int kThreads = 32 * kWarps;
  static constexpr bool kIsTight = (kDq == 192 && kDv == 128) || (kMt == 2 && ((kDv == 128 && kGeneral) || (kDv >= 96 && kFp8)));
  static constexpr bool kIsCramped = kDq == 64 && kMt == 2 && !kFp8 && !kGeneral;  // three blocks an SM
  static constexpr int kTile = kIsTight ? 32 : 64;                                     // what registers and shared memory allow
  static constexpr int kQRow = kDq * 2, kKRow = kDq * KV::kBytes, kVRow = kDv * KV::kBytes;  // bytes
  using QLayout = RowLayout<kQRow, !kIsCramped>;
  using KLayout = RowLayout<kKRow, !kIsCramped>;
  using VLayout = RowLayout<kVRow, !kIsCramped>;
  static constexpr int kVAt = kTile * KLayout::kPitch;  // V follows K in a stage
  static constexpr int kStageBytes = kVAt + kTile * VLayout::kPitch;
  static constexpr int kQBytes = kRows * QLayout::kPitch;
  static constexpr int kPagesAt = kQBytes + 2 * kStageBytes;  // page ids of two tiles
  static constexpr int kClaimAt = kPagesAt + 2 * kTile * 4;
  static constexpr int kBoundsAt = kClaimAt + 4;
  static constexpr int kUnitAt = kClaimAt + 16;
  static constexpr int kSharedBytes = kUnitAt + static_cast<int>(sizeof(Cursor));

  // Copying: kLanesPerRow threads share a row; each thread takes the rows r0, r0 + kRowsPerPass, ...
  static constexpr int kLanesPerRow = at_most(kKRow % 128 == 0 ? 8 : kKRow % 64 == 0 ? 4 : 2, kVRow % 128 == 0 ? 8 : kVRow % 64 == 0 ? 4 : 2);
  static constexpr int kKCopies = kKRow / 16 / kLanesPerRow, kVCopies = kVRow / 16 / kLanesPerRow;
  static constexpr int kRowsPerPass = at_most(kThreads / kLanesPerRow, kTile);
  static constexpr int kPasses = kTile / kRowsPerPass;
  static_assert(kTile % kRowsPerPass == 0 && kDq % 16 == 0 && kDv % 16 == 0 && kDv <= kDq, "");
};

// Starts fetching the page ids of the tile at `pos`.
template <class C>
__device__ __forceinline__ void fetch_pages(const AttnParams& p, const Cursor& unit, int pos, int end, int* pages) {
  if (threadIdx.x < C::kTile && pos + static_cast<int>(threadIdx.x) < end) {
    fetch_page<kKernelExtend>(p, unit.facts.pages_begin, pos + threadIdx.x, pages + threadIdx.x);
  }
}

// Starts copying the K and V of the tile at `pos` into a stage.
template <class C>
__device__ __forceinline__ void copy_tile(const AttnParams& p, const Cursor& unit, int pos, int end, const int* pages, uint32_t stage) {
  const int r0 = threadIdx.x / C::kLanesPerRow, lane = threadIdx.x % C::kLanesPerRow;
  if (r0 >= C::kRowsPerPass) return;
  const char* k_base = ptr<const char>(p.k) + unit.kv_head * p.k_stride_head * C::KV::kBytes + lane * 16;
  const char* v_base = ptr<const char>(p.v) + unit.kv_head * p.v_stride_head * C::KV::kBytes + lane * 16;
#pragma unroll
  for (int i = 0; i < C::kPasses; ++i) {
    const int row = r0 + i * C::kRowsPerPass, t = pos + row;
    const bool valid = t < end;
    const Place place = {valid ? pages[row] : 0, t - page_of(p.page_magic, p.page_shift, t) * p.page_size};
    ATTN_CHECK(place.page >= 0 && place.page < p.num_pages, p.check, kKernelExtend, kCheckPageId, unit.facts.request, place.page);
    const char* k = k_base + cache_offset(place, p.k_stride_page, p.k_stride_token) * C::KV::kBytes;
    const char* v = v_base + cache_offset(place, p.v_stride_page, p.v_stride_token) * C::KV::kBytes;
#pragma unroll
    for (int j = 0; j < C::kKCopies; ++j) {
      cp_async16_or_zero(stage + C::KLayout::at(row, lane + j * C::kLanesPerRow), k + j * C::kLanesPerRow * 16, valid);
    }
#pragma unroll
    for (int j = 0; j < C::kVCopies; ++j) {
      cp_async16_or_zero(stage + C::kVAt + C::VLayout::at(row, lane + j * C::kLanesPerRow), v + j * C::kLanesPerRow * 16, valid);
    }
  }
}

// Whether some row of the unit does not see some key of the tile at `begin` by causal mask, window or the chunk's end.
template <class C>
__device__ __forceinline__ bool needs_mask(const AttnParams& p, const TileFacts& t, int begin, int end) {
  const KeyRange of_first = visible_keys(p, t.q_pos), of_last = visible_keys(p, t.q_pos + t.q_len - 1);
  return begin + C::kTile > end || begin + C::kTile - 1 > of_first.last || begin < of_last.first;
}

// A warp's rows.
template <class C>
struct Rows {
  float o[C::kMt][C::kDv / 8][4];  // C fragments; fp8: dims permuted within 16, see put_outputs
  float m[C::kMt][2], l[C::kMt][2];
};

// Row of the block's pass that lane's half `half` of 16-row tile `mt` is.
template <class C>
__device__ __forceinline__ int row_in_pass(int mt, int half) {
  return threadIdx.x / 32 * 16 * C::kMt + mt * 16 + threadIdx.x % 32 / 4 + half * 8;
}

// Starts copying the rows [first_row, first_row + kRows) of the unit's q.
template <class C>
__device__ __forceinline__ void issue_q(const AttnParams& p, const Cursor& unit, int first_row, uint32_t q_tile) {
  const int num_rows = unit.facts.q_len * p.group_size;
  constexpr int kLanes = 8, kRowsAtOnce = C::kThreads / kLanes;
  const int lane = threadIdx.x % kLanes;
#pragma unroll 4
  for (int r = threadIdx.x / kLanes; r < C::kRows; r += kRowsAtOnce) {
    const int row = first_row + r;
    const bool valid = row < num_rows;
    const int token = valid ? row / p.group_size : 0, head = unit.kv_head * p.group_size + (valid ? row - token * p.group_size : 0);
    const char* from = ptr<const char>(p.q) + ((unit.facts.q_begin + token) * p.q_stride_row + head * p.q_stride_head) * 2;
#pragma unroll
    for (int chunk = lane; chunk < C::kQRow / 16; chunk += kLanes) cp_async16_or_zero(q_tile + C::QLayout::at(r, chunk), from + chunk * 16, valid);
  }
}

// fp8 KV: the warp's rows of q become f16, dims within 16 in the order in which bytes of K come (see scores).
template <class C>
__device__ __forceinline__ void convert_q(unsigned char* q_tile) {
  const int first = threadIdx.x / 32 * 16 * C::kMt;
  for (int i = threadIdx.x % 32; i < 16 * C::kMt * (C::kDq / 16); i += 32) {
    const int row = first + i / (C::kDq / 16), chunk = i % (C::kDq / 16) * 2;
    uint4& lo = *reinterpret_cast<uint4*>(q_tile + C::QLayout::at(row, chunk));
    uint4& hi = *reinterpret_cast<uint4*>(q_tile + C::QLayout::at(row, chunk + 1));
    const uint4 x = lo, y = hi;
    auto convert = [](uint32_t two) {
      const float2 f = unpack2<typename C::Q>(two);
      return pack2<F16>(f.x, f.y);
    };
    lo = make_uint4(convert(x.x), convert(x.z), convert(y.x), convert(y.z));
    hi = make_uint4(convert(x.y), convert(x.w), convert(y.y), convert(y.w));
  }
  __syncwarp();
}

template <class C>
using Scores = float[C::kMt][C::kTile / 8][4];

// S = Q K^T for the warp's rows and all tokens of the tile.
template <class C>
__device__ __forceinline__ void scores(uint32_t q_tile, uint32_t k_tile, Scores<C>& s) {
  using Math = typename C::Math;
  const int lane = lane_of_thread<C::kIsCramped>();
  const uint32_t q_from = q_tile + threadIdx.x / 32 * 16 * C::kMt * C::QLayout::kPitch + C::QLayout::at(lane % 16, lane / 16);
  const uint32_t k_from = k_tile + C::KLayout::at(lane % 8 + lane / 16 * 8, lane / 8 & 1);
#pragma unroll
  for (int mt = 0; mt < C::kMt; ++mt) {
#pragma unroll
    for (int n = 0; n < C::kTile / 8; ++n) s[mt][n][0] = s[mt][n][1] = s[mt][n][2] = s[mt][n][3] = 0.0f;
  }
#pragma unroll
  for (int k = 0; k < C::kKRow / 32; ++k) {
    constexpr int kQSteps = C::kFp8 ? 2 : 1;  // 32 bytes of K are 32 dims in fp8
    uint32_t a[C::kMt][kQSteps][4];
#pragma unroll
    for (int mt = 0; mt < C::kMt; ++mt) {
#pragma unroll
      for (int i = 0; i < kQSteps; ++i) ldmatrix4(a[mt][i], C::QLayout::further(q_from, (k * kQSteps + i) * 32) + mt * 16 * C::QLayout::kPitch);
    }
#pragma unroll
    for (int n = 0; n < C::kTile / 16; ++n) {
      uint32_t b[4];
      ldmatrix4(b, C::KLayout::further(k_from, k * 32) + n * 16 * C::KLayout::kPitch);
      if constexpr (C::kFp8) {
        // Four neighbouring bytes a lane: bytes 0, 1 take the slots 2c of the contraction, bytes 2, 3 the slots 2c + 8.
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t lo, hi;
          fp8x4_to_f16(b[i], lo, hi);
#pragma unroll
          for (int mt = 0; mt < C::kMt; ++mt) mma<F16>(s[mt][2 * n + i / 2], a[mt][i % 2], lo, hi);
        }
      } else {
#pragma unroll
        for (int mt = 0; mt < C::kMt; ++mt) {
          mma<Math>(s[mt][2 * n], a[mt][0], b[0], b[1]);
          mma<Math>(s[mt][2 * n + 1], a[mt][0], b[2], b[3]);
        }
      }
    }
  }
}

// Softcap, ALiBi, then -inf for keys that a row does not see; `first_row`: of the pass.
template <class C>
__device__ __forceinline__ void mask_scores(const AttnParams& p, const Cursor& unit, int first_row, int tile_begin, int end, float scale, Scores<C>& s) {
  const int num_rows = unit.facts.q_len * p.group_size;
#pragma unroll
  for (int mt = 0; mt < C::kMt; ++mt) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(first_row + row_in_pass<C>(mt, half), num_rows - 1), token = row / p.group_size;  // surplus rows: any
      const int q_pos = unit.facts.q_pos + token;
      const KeyRange keys = visible_keys(p, q_pos);
      const int last = min(keys.last, end - 1);
      float slope = 0.0f;
      int64_t mask_begin = 0;
      if constexpr (C::kGeneral) {
        if (p.alibi_slopes != 0) slope = ptr<const float>(p.alibi_slopes)[unit.kv_head * p.group_size + row - token * p.group_size];
        mask_begin = ptr<const AttnTile>(p.tiles)[unit.tile].mask_begin;
      }
      const int first = tile_begin + threadIdx.x % 4 * 2;
#pragma unroll
      for (int n = 0; n < C::kTile / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int key = first + n * 8 + i;
          float& x = s[mt][n][2 * half + i];
          bool visible = key >= keys.first && key <= last;
          if constexpr (C::kGeneral) {
            x = shape_score(p, x * scale, slope, key - q_pos) * kLog2e;
            if (p.custom_mask != 0 && visible) visible = mask_bit(p, mask_begin, unit.facts.kv_len, token, key);
          }
          if (!visible) x = -kInf;
        }
      }
    }
  }
}

// Weights as A fragments, 16 tokens each.
template <class C>
using Weights = uint32_t[C::kMt][C::kTile / 16][4];

// Turns scores into weights, and rescales what was summed before.
template <class C>
__device__ __forceinline__ void softmax_step(Rows<C>& rows, float c, Scores<C>& s, Weights<C>& weights) {
  using Math = typename C::Math;
#pragma unroll
  for (int mt = 0; mt < C::kMt; ++mt) {
    float rescale[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float m = rows.m[mt][half];
#pragma unroll
      for (int n = 0; n < C::kTile / 8; ++n) m = fmaxf(m, fmaxf(s[mt][n][2 * half], s[mt][n][2 * half + 1]));
      m = next_maximum(rows.m[mt][half], quad_max(m), c);
      rescale[half] = rescale_factor(rows.m[mt][half], m, c);
      rows.m[mt][half] = m;
      const float offset = exponent_offset(m, c);
      float l = rows.l[mt][half] * rescale[half];
#pragma unroll
      for (int n = 0; n < C::kTile / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = s[mt][n][2 * half + i];
          x = exp2_approx(fmaf(x, c, -offset));
          l += x;
        }
      }
      rows.l[mt][half] = l;
    }
#pragma unroll
    for (int n = 0; n < C::kTile / 16; ++n) {
      const float(&s0)[4] = s[mt][2 * n];
      const float(&s1)[4] = s[mt][2 * n + 1];
      weights[mt][n][0] = pack2<Math>(s0[0], s0[1]), weights[mt][n][1] = pack2<Math>(s0[2], s0[3]);
      weights[mt][n][2] = pack2<Math>(s1[0], s1[1]), weights[mt][n][3] = pack2<Math>(s1[2], s1[3]);
    }
    if (__any_sync(~0u, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < C::kDv / 8; ++i) {
        rows.o[mt][i][0] *= rescale[0], rows.o[mt][i][1] *= rescale[0];
        rows.o[mt][i][2] *= rescale[1], rows.o[mt][i][3] *= rescale[1];
      }
    }
  }
}

// O += P V.
template <class C>
__device__ __forceinline__ void add_values(Rows<C>& rows, uint32_t v_tile, const Weights<C>& weights) {
  using Math = typename C::Math;
  const int lane = lane_of_thread<C::kIsCramped>();
  const uint32_t from = v_tile + C::VLayout::at(lane % 16, lane / 16);
#pragma unroll
  for (int n = 0; n < C::kTile / 16; ++n) {
#pragma unroll
    for (int i = 0; i < C::kVRow / 32; ++i) {
      uint32_t b[4];
      ldmatrix4_trans(b, C::VLayout::further(from, i * 32) + n * 16 * C::VLayout::kPitch);
      if constexpr (C::kFp8) {
        // A 16-bit element is two dims; bytes are sorted into (even, even, odd, odd) dims of tokens 2c, 2c + 1.
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          uint32_t even0, odd0, even1, odd1;
          fp8x4_to_f16(__byte_perm(b[2 * j], 0, 0x3120), even0, odd0);
          fp8x4_to_f16(__byte_perm(b[2 * j + 1], 0, 0x3120), even1, odd1);
#pragma unroll
          for (int mt = 0; mt < C::kMt; ++mt) {
            mma<F16>(rows.o[mt][4 * i + 2 * j], weights[mt][n], even0, even1);
            mma<F16>(rows.o[mt][4 * i + 2 * j + 1], weights[mt][n], odd0, odd1);
          }
        }
      } else {
#pragma unroll
        for (int mt = 0; mt < C::kMt; ++mt) {
          mma<Math>(rows.o[mt][2 * i], weights[mt][n], b[0], b[1]);
          mma<Math>(rows.o[mt][2 * i + 1], weights[mt][n], b[2], b[3]);
        }
      }
    }
  }
}

// Stores a row's pairs (fp8: quadruples) of outputs through `put(dim, values...)`, dims in their own order.
template <class C, class Put2, class Put4>
__device__ __forceinline__ void put_outputs(const float (&o)[C::kDv / 8][4], int half, float scale, Put2 put2, Put4 put4) {
  const int c = threadIdx.x % 4;
  if constexpr (C::kFp8) {
#pragma unroll
    for (int i = 0; i < C::kDv / 16; ++i) {  // fragments 2i, 2i + 1: even and odd dims of 16
      put4(i * 16 + 4 * c, make_float4(o[2 * i][2 * half] * scale, o[2 * i + 1][2 * half] * scale, o[2 * i][2 * half + 1] * scale, o[2 * i + 1][2 * half + 1] * scale));
    }
  } else {
#pragma unroll
    for (int i = 0; i < C::kDv / 8; ++i) put2(i * 8 + 2 * c, make_float2(o[i][2 * half] * scale, o[i][2 * half + 1] * scale));
  }
}

// Partial states of the warp's rows, to the workspace.
template <class C>
__device__ __forceinline__ void write_partials(const AttnParams& p, const Cursor& unit, int first_row, float c, Rows<C>& rows) {
  const int num_rows = unit.facts.q_len * p.group_size;
  const int64_t base = partial_row(p, unit.facts, unit.kv_head, unit.chunk);
#pragma unroll
  for (int mt = 0; mt < C::kMt; ++mt) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float l = quad_sum(rows.l[mt][half]);
      const int row = first_row + row_in_pass<C>(mt, half);
      if (row >= num_rows) continue;
      const float lse2 = lse_base2(rows.m[mt][half], l, c);
      const RowEnd end = end_row(l, lse2, -kInf);
      float* to = ptr<float>(p.partial_out) + (base + row) * C::kDv;
      put_outputs<C>(
          rows.o[mt], half, end.scale * p.v_scale, [&](int d, float2 x) { *reinterpret_cast<float2*>(to + d) = x; },
          [&](int d, float4 x) { *reinterpret_cast<float4*>(to + d) = x; });
      if (threadIdx.x % 4 == 0) ptr<float>(p.partial_lse)[base + row] = lse2;
    }
  }
}

// Results of the warp's rows, by way of its rows of q in shared memory, so that stores are 16 bytes wide and whole rows.
template <class C>
__device__ __forceinline__ void write_results(const AttnParams& p, const Cursor& unit, int first_row, float c, Rows<C>& rows, unsigned char* q_tile) {
  using Q = typename C::Q;
  const int num_rows = unit.facts.q_len * p.group_size;
#pragma unroll
  for (int mt = 0; mt < C::kMt; ++mt) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float l = quad_sum(rows.l[mt][half]);
      const int in_pass = row_in_pass<C>(mt, half), row = min(first_row + in_pass, num_rows - 1);
      const int token = row / p.group_size, head = unit.kv_head * p.group_size + row - token * p.group_size;
      const RowEnd end = end_row(l, lse_base2(rows.m[mt][half], l, c), sink_of(p, head));
      put_outputs<C>(
          rows.o[mt], half, end.scale * p.v_scale, [&](int d, float2 x) { *reinterpret_cast<uint32_t*>(q_tile + C::QLayout::at(in_pass, d / 8) + d % 8 * 2) = pack2<Q>(x.x, x.y); },
          [&](int d, float4 x) {
            *reinterpret_cast<uint2*>(q_tile + C::QLayout::at(in_pass, d / 8) + d % 8 * 2) = make_uint2(pack2<Q>(x.x, x.y), pack2<Q>(x.z, x.w));
          });
      if (threadIdx.x % 4 == 0 && first_row + in_pass < num_rows) store_lse(p, unit.facts.q_begin + token, head, end.lse);
    }
  }
  __syncwarp();
  constexpr int kChunks = C::kDv / 8;
  const int first = threadIdx.x / 32 * 16 * C::kMt;
#pragma unroll 4
  for (int i = threadIdx.x % 32; i < 16 * C::kMt * kChunks; i += 32) {
    const int in_pass = first + i / kChunks, chunk = i % kChunks, row = first_row + in_pass;
    if (row >= num_rows) break;
    const int token = row / p.group_size, head = unit.kv_head * p.group_size + row - token * p.group_size;
    const int64_t at = (unit.facts.q_begin + token) * p.out_stride_row + head * p.out_stride_head + chunk * 8;
    *reinterpret_cast<uint4*>(ptr<uint16_t>(p.out) + at) = *reinterpret_cast<const uint4*>(q_tile + C::QLayout::at(in_pass, chunk));
  }
}

// One pass of a unit: the rows [first_row, first_row + kRows) over the chunk.
template <class C>
__device__ __forceinline__ void pass(const AttnParams& p, const Cursor& unit, int first_row, unsigned char* shared) {
  const uint32_t q_tile = shared_address(shared), stages = q_tile + C::kQBytes;
  const float scale = p.sm_scale * p.k_scale;
  const float c = C::kGeneral ? 1.0f : scale * kLog2e;  // general: scores are shaped, in base 2, before the softmax
  Rows<C> rows;
#pragma unroll
  for (int mt = 0; mt < C::kMt; ++mt) {
    rows.m[mt][0] = rows.m[mt][1] = -kInf, rows.l[mt][0] = rows.l[mt][1] = 0.0f;
#pragma unroll
    for (int i = 0; i < C::kDv / 8; ++i) rows.o[mt][i][0] = rows.o[mt][i][1] = rows.o[mt][i][2] = rows.o[mt][i][3] = 0.0f;
  }
  const int* bounds = reinterpret_cast<const int*>(shared + C::kBoundsAt);
  int begin = bounds[0];
  const int& end = bounds[1];  // read there, to spare a register
  int* pages = reinterpret_cast<int*>(shared + C::kPagesAt);
  if (begin < end) {
    fetch_pages<C>(p, unit, begin, end, pages);
    cp_async_commit();
    issue_q<C>(p, unit, first_row, q_tile);
    fetch_pages<C>(p, unit, begin + C::kTile, end, pages + C::kTile);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    copy_tile<C>(p, unit, begin, end, pages, stages);
  }
  cp_async_commit();
  int odd = 0;  // number of the tile, modulo 2
  bool is_first = true;
#pragma unroll 1
  while (begin < end) {
    cp_async_wait<0>();
    __syncthreads();
    const uint32_t stage = stages + odd * C::kStageBytes;
    odd ^= 1;
    if (begin + C::kTile < end) copy_tile<C>(p, unit, begin + C::kTile, end, pages + odd * C::kTile, stages + odd * C::kStageBytes);
    fetch_pages<C>(p, unit, begin + 2 * C::kTile, end, pages + (odd ^ 1) * C::kTile);
    cp_async_commit();
    if (C::kFp8 && is_first) convert_q<C>(shared);
    is_first = false;
    Scores<C> s;
    scores<C>(q_tile, stage, s);
    if (C::kGeneral || needs_mask<C>(p, unit.facts, begin, end)) mask_scores<C>(p, unit, first_row, begin, end, scale, s);
    Weights<C> weights;
    softmax_step<C>(rows, c, s, weights);
    add_values<C>(rows, stage + C::kVAt, weights);
    begin += C::kTile;
  }
  __syncwarp();  // all lanes are done with the warp's rows of q
  if (unit.facts.num_chunks > 1) {
    write_partials<C>(p, unit, first_row, c, rows);
  } else {
    write_results<C>(p, unit, first_row, c, rows, shared);
  }
}

template <class C>
__device__ __forceinline__ void extend(const AttnParams& p) {
  extern __shared__ __align__(128) unsigned char shared[];
  int* claimed = reinterpret_cast<int*>(shared + C::kClaimAt);
  check_shape<kKernelExtend, C::kDq, C::kDv>(p);
  wait_for_previous();
  Cursor& unit = *reinterpret_cast<Cursor*>(shared + C::kUnitAt);
  int* bounds = reinterpret_cast<int*>(shared + C::kBoundsAt);
  if (threadIdx.x == 0) {
    unit.init(p, static_cast<int>(blockIdx.x));
    *claimed = static_cast<int>(blockIdx.x);
  }
  while (true) {
    __syncthreads();  // all are done with the last unit
    if (threadIdx.x == 0) {
      Cursor next = unit;
      const bool has_unit = p.claim != 0 && next.left == 0 ? next.take_head(p, *claimed) : next.next(p, static_cast<int>(gridDim.x));
      if (has_unit) {
        chunk_bounds(next.facts, next.chunk, bounds[0], bounds[1]);
        // The next head is claimed while the last chunk of this one is computed.
        if (p.claim != 0 && next.left == 0) *claimed = static_cast<int>(gridDim.x) + atomicAdd(ptr<int>(p.claim), 1);
      }
      bounds[2] = has_unit ? next.facts.q_len * p.group_size : 0;
      unit = next;
    }
    __syncthreads();
    const int num_rows = bounds[2];
    if (num_rows == 0) break;
    int first_row = 0;
    do {
      if (first_row > 0) __syncthreads();
      pass<C>(p, unit, first_row, shared);
      first_row += C::kRows;
    } while (first_row < (C::kIsCramped ? num_rows : bounds[2]));  // each of the two spills where the other does not
  }
  zero_padding_rows<typename C::Q, C::kDv>(p);
  launch_dependents();
  if (p.claim != 0 && threadIdx.x == 0) leave_claims(p);
}

}  // namespace

#define bf16 Bf16
#define f16 F16
#define fp8 Fp8
#define KERNEL(name, q, kv, dqk, dvo, general, threads, shared_bytes, blocks, rows)                                                  \
  static_assert(Config<q, kv, dqk, dvo, general, rows>::kThreads == threads, "the list states the block size");                      \
  static_assert(Config<q, kv, dqk, dvo, general, rows>::kSharedBytes == shared_bytes, "the list states the shared memory");          \
  extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ AttnParams p) {                         \
    extend<Config<q, kv, dqk, dvo, general, rows>>(p);                                                                               \
  }
#include "extend.inst"

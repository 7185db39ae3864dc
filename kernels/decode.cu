// Split-KV attention for few query rows: the GQA group (and a few query tokens) fill the 16 rows of a tensor-core tile.
//
//   unit = (tile of query tokens, KV head, chunk of KV);  rows = q_len x group_size <= 16, row = token x group + head
//
// Grid: any; blocks are persistent and walk ranges of units. A unit's KV goes by in tiles of kTile tokens, of which each
// warp owns 16 x kGroups, with its own running softmax and output. A warp copies just the tokens that it owns, into its own
// ring of kStages stages, and refills a stage as soon as it has computed it; so between the ends of units warps never wait
// for each other, and the rings stay full, also across units. At the end of a unit the warps' states meet, in the order of the warps.
// Which tokens a warp takes, and the order in which states meet, depend on the chunk alone: so do the bits.
//
// Shared memory, bytes: kWarps x kStages x 16 kGroups x (row of K + row of V), see tile.cuh;
//   kMaxRows rows of q; for each warp a Cursor and kStages TileInfos.
//   a scratch for the end of a unit: see kScratchInRing.
// Registers, per thread: kDv / 2 outputs, kDq / 4 of q, 4 x 2 x kGroups scores.
// Synchronisation: a warp's copies are seen after its own cp.async wait and __syncwarp. At the end of a unit there are block
//   barriers: a round's outputs are in the scratch; its results are read from it; the next q is in its place.
// Tokens beyond the chunk are zero-filled, never read; rows of q beyond the unit's are garbage and their results dropped.
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

constexpr int kMaxRows = 16;

// A tile in a warp's ring.
struct alignas(16) TileInfo {
  int begin, end;  // KV positions: [begin, min(begin + kTile, end))
  int tile, kv_head, chunk;
  int needs_mask;  // some row does not see some key of it by causal mask, window or the chunk's end
  int is_last;     // of its unit; then also:
  int num_rows;    // rows of the unit
  int q_begin;     // row of q of the first
  int partial;     // first workspace row of the unit; -1: writes results
};

using Cursor = UnitCursor<kKernelDecode, kMaxRows>;

constexpr int at_most(int x, int limit) { return x < limit ? x : limit; }
constexpr int at_least(int x, int limit) { return x > limit ? x : limit; }

template <class Q_, class KV_, int kDq_, int kDv_, bool kGeneral_>
struct Config {
  using Q = Q_;
  using KV = KV_;
  static constexpr int kDq = kDq_, kDv = kDv_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr bool kFp8 = Same<KV, Fp8>::value;
  template <bool, class A, class B>
  struct Pick {
    using T = A;
  };
  template <class A, class B>
  struct Pick<false, A, B> {
    using T = B;
  };
  using Math = typename Pick<kFp8, F16, Q>::T;  // e4m3 is a subset of f16

  static constexpr int kWarps = kDq >= 192 ? 2 : 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kGroups = kDq <= 64 || (kFp8 && kDq == 128) ? 2 : 1;  // of 16 tokens, a warp and tile
  static constexpr int kOwn = 16 * kGroups;                                  // tokens of a warp and tile
  static constexpr int kTile = kOwn * kWarps;
  static constexpr int kKRow = kDq * KV::kBytes, kVRow = kDv * KV::kBytes;  // bytes
  using KLayout = RowLayout<kKRow>;
  using VLayout = RowLayout<kVRow>;
  using QLayout = RowLayout<kDq * 2>;
  static constexpr int kVAt = kOwn * KLayout::kPitch;  // V follows K in a stage
  static constexpr int kStageBytes = kVAt + kOwn * VLayout::kPitch;
  static constexpr int kStages = kWarps * kStageBytes >= 24 * 1024 ? 2 : kWarps * kStageBytes >= 16 * 1024 ? 3 : 4;
  static constexpr bool kQInRegisters = kDq < 192 && !(kFp8 && kDq == 128);  // else its fragments come from shared memory for each tile
  // Meeting of the warps: outputs of kRoundRows rows at a time, then (m, l) of all rows, f32. The scratch is beside the ring, so
  // that a stage is refilled before its warp waits for others; where q stays in shared memory there is no
  // room, and the stage just computed is used.
  static constexpr bool kScratchInRing = !kQInRegisters;
  static constexpr int kScratchPitch = kDv + 8;
  static constexpr int kRoundRows = kScratchInRing && 8 * kScratchPitch * 4 + kMaxRows * 8 <= kStageBytes ? 8 : 4;
  static constexpr int kStatAt = kRoundRows * kScratchPitch * 4;
  static constexpr int kScratchBytes = kStatAt + kMaxRows * 8;
  static_assert(!kScratchInRing || kScratchBytes <= kStageBytes, "the scratch fits into a stage");
  static constexpr int kScratchStride = kScratchInRing ? kStages * kStageBytes : kScratchBytes;  // from warp to warp

  static constexpr int kRingBytes = kWarps * kStages * kStageBytes;
  static constexpr int kQAt = kRingBytes;
  static constexpr int kQBytes = kMaxRows * QLayout::kPitch;
  static constexpr bool kQSharesScratch = kDq == 128 && !kFp8;  // else three blocks do not fit; q is in registers by then
  static constexpr int kScratchAt = kQSharesScratch ? kQAt : kQAt + kQBytes;
  static constexpr int kWarpAt = kScratchInRing ? kQAt + kQBytes : at_least(kScratchAt + kWarps * kScratchBytes, kQAt + kQBytes);
  static constexpr int kWarpBytes = static_cast<int>(sizeof(Cursor)) + kStages * static_cast<int>(sizeof(TileInfo));
  static constexpr int kSharedBytes = kWarpAt + kWarps * kWarpBytes;

  // Copying: kLanesPerRow lanes share a row; each lane takes the rows r0, r0 + kRowsPerPass, ...
  static constexpr int kLanesPerRow = at_most(kKRow % 128 == 0 ? 8 : kKRow % 64 == 0 ? 4 : 2, kVRow % 128 == 0 ? 8 : kVRow % 64 == 0 ? 4 : 2);
  static constexpr int kKCopies = kKRow / 16 / kLanesPerRow, kVCopies = kVRow / 16 / kLanesPerRow;
  static constexpr int kRowsPerPass = 32 / kLanesPerRow;
  static constexpr int kPasses = kOwn / kRowsPerPass;

  // Copying q: 16 bytes a thread and step.
  static constexpr int kQChunks = kDq / 8;
  static constexpr int kQSteps = (kMaxRows * kQChunks + kThreads - 1) / kThreads;

  static constexpr bool kIsCramped = kDq == 128 || kDq == 256;  // registers are short
  static constexpr bool kLoadsQEarly = kQSteps <= 2 && !kFp8;  // where registers allow
  static_assert(kOwn % kRowsPerPass == 0 && kOwn <= 32 && kDq % 16 == 0 && kDv % 16 == 0, "");
};

// The copying half of a warp: runs kStages tiles ahead of its computing half.
// Its cursor lies in shared memory to spare registers: all lanes read it and step alike, lane 0 writes it back.
template <class C>
struct Loader {
  unsigned char* mine;  // the warp's Cursor and TileInfos
  int pos, end;         // the next tile's first token; end of its chunk
  int kv_head;
  bool has_more;
  int page;             // of the next tile's token that is the lane's number in what the warp owns

  __device__ __forceinline__ Cursor& cursor() const { return *reinterpret_cast<Cursor*>(mine); }
  __device__ __forceinline__ TileInfo& info(int stage) const { return reinterpret_cast<TileInfo*>(mine + sizeof(Cursor))[stage]; }

  __device__ __forceinline__ void start(const AttnParams& p, unsigned char* in_shared) {
    mine = in_shared;
    Cursor unit;
    has_more = unit.first(p);
    enter(p, unit);
    find_pages(p);
  }

  __device__ __forceinline__ void step(const AttnParams& p, Cursor& unit) {
    has_more = unit.next(p, static_cast<int>(gridDim.x));
    __syncwarp();  // all have read the cursor
    enter(p, unit);
  }

  __device__ __forceinline__ void enter(const AttnParams& p, const Cursor& unit) {
    if (has_more) {
      chunk_bounds(unit.facts, unit.chunk, pos, end);
      kv_head = unit.kv_head;
      if (threadIdx.x % 32 == 0) cursor() = unit;
    }
    __syncwarp();
  }

  // Page ids of the next tile, a whole tile before its copies need them.
  __device__ __forceinline__ void find_pages(const AttnParams& p) {
    const int t = pos + threadIdx.x / 32 * C::kOwn + threadIdx.x % 32;
    if (has_more && threadIdx.x % 32 < C::kOwn && t < end) page = place_of<kKernelDecode>(p, cursor().facts.pages_begin, t, cursor().facts.request).page;
  }

  __device__ __forceinline__ bool needs_mask(const AttnParams& p, const TileFacts& t) const {
    const KeyRange first = visible_keys(p, t.q_pos), last = visible_keys(p, t.q_pos + t.q_len - 1);
    return pos + C::kTile > end || pos + C::kTile - 1 > first.last || pos < last.first;
  }

  // Starts copying the warp's tokens of the next tile into a stage, if there is one; commits in any case.
  __device__ __forceinline__ bool copy(const AttnParams& p, uint32_t stage, int stage_idx) {
    const bool copied = has_more;
    if (has_more) {
      const int lane = threadIdx.x % 32, r0 = lane / C::kLanesPerRow, in_row = lane % C::kLanesPerRow;
      const char* k_base = ptr<const char>(p.k) + kv_head * p.k_stride_head * C::KV::kBytes + in_row * 16;
      const char* v_base = ptr<const char>(p.v) + kv_head * p.v_stride_head * C::KV::kBytes + in_row * 16;
      const int first = pos + threadIdx.x / 32 * C::kOwn;
#pragma unroll
      for (int i = 0; i < C::kPasses; ++i) {
        const int row = r0 + i * C::kRowsPerPass, t = first + row;
        const bool valid = t < end;
        const int its_page = __shfl_sync(~0u, page, row);
        const Place place = {valid ? its_page : 0, t - page_of(p.page_magic, p.page_shift, t) * p.page_size};
        const char* k = k_base + cache_offset(place, p.k_stride_page, p.k_stride_token) * C::KV::kBytes;
        const char* v = v_base + cache_offset(place, p.v_stride_page, p.v_stride_token) * C::KV::kBytes;
#pragma unroll
        for (int j = 0; j < C::kKCopies; ++j) {
          cp_async16_or_zero(stage + C::KLayout::at(row, in_row + j * C::kLanesPerRow), k + j * C::kLanesPerRow * 16, valid);
        }
#pragma unroll
        for (int j = 0; j < C::kVCopies; ++j) {
          cp_async16_or_zero(stage + C::kVAt + C::VLayout::at(row, in_row + j * C::kLanesPerRow), v + j * C::kLanesPerRow * 16, valid);
        }
      }
      const bool is_last = pos + C::kTile >= end;
      const Cursor& unit = cursor();
      if (lane == 0) {
        TileInfo& to = info(stage_idx);
        to.begin = pos, to.end = end, to.tile = unit.tile, to.kv_head = kv_head, to.chunk = unit.chunk;
        to.needs_mask = needs_mask(p, unit.facts), to.is_last = is_last;
        to.num_rows = unit.facts.q_len * p.group_size, to.q_begin = unit.facts.q_begin;
        if (is_last) to.partial = unit.facts.num_chunks > 1 ? static_cast<int>(partial_row(p, unit.facts, kv_head, unit.chunk)) : -1;
      }
      pos += C::kTile;
      if (is_last) {
        Cursor next = unit;
        step(p, next);
      }
      find_pages(p);
    }
    cp_async_commit();
    return copied;
  }
};

// A block's share of q on its way to shared memory.
template <class C>
struct QueryRows {
  uint4 x[C::kQSteps];

  // Loads the rows of a unit from global memory.
  __device__ __forceinline__ void load(const AttnParams& p, const TileInfo& info) {
#pragma unroll
    for (int i = 0; i < C::kQSteps; ++i) {
      const int at = threadIdx.x + i * C::kThreads, row = at / C::kQChunks, chunk = at % C::kQChunks;
      if (row >= info.num_rows) continue;
      const int token = row / p.group_size, head = info.kv_head * p.group_size + row - token * p.group_size;
      const int64_t from = (info.q_begin + token) * p.q_stride_row + head * p.q_stride_head + chunk * 8;
      x[i] = *reinterpret_cast<const uint4*>(ptr<const uint16_t>(p.q) + from);
    }
  }

  // Puts them where fragments come from. fp8 KV: as f16, dims within 16 in the order in which bytes of K come (see scores).
  __device__ __forceinline__ void put(unsigned char* q_rows) const {
#pragma unroll
    for (int i = 0; i < C::kQSteps; ++i) {
      const int at = threadIdx.x + i * C::kThreads, row = at / C::kQChunks, chunk = at % C::kQChunks;
      if (row >= kMaxRows) continue;
      if constexpr (C::kFp8) {
        const float2 a = unpack2<typename C::Q>(x[i].x), b = unpack2<typename C::Q>(x[i].y), c = unpack2<typename C::Q>(x[i].z),
                     d = unpack2<typename C::Q>(x[i].w);
        // Eight dims are two lanes' quadruples: their first pairs go to slots 2c, their second pairs to slots 2c + 8.
        const int even = chunk & ~1, half = chunk % 2 * 8;
        *reinterpret_cast<uint2*>(q_rows + C::QLayout::at(row, even) + half) = make_uint2(pack2<F16>(a.x, a.y), pack2<F16>(c.x, c.y));
        *reinterpret_cast<uint2*>(q_rows + C::QLayout::at(row, even + 1) + half) = make_uint2(pack2<F16>(b.x, b.y), pack2<F16>(d.x, d.y));
      } else {
        *reinterpret_cast<uint4*>(q_rows + C::QLayout::at(row, chunk)) = x[i];
      }
    }
  }
};

// Where a lane's rows of A fragments of q are.
template <class C>
__device__ __forceinline__ uint32_t q_address(uint32_t q_rows) {
  return q_rows + C::QLayout::at(threadIdx.x % 16, threadIdx.x % 32 / 16);
}

// What a warp knows of the unit it computes.
template <class C>
struct Rows {
  uint32_t q[C::kQInRegisters ? C::kDq / 16 : 1][4];  // A fragments
  float o[C::kDv / 8][4];                             // C fragments; fp8: dims permuted within 16, see put_outputs
  float m[2], l[2];                                   // of rows g and g + 8

  __device__ __forceinline__ void load_q(uint32_t q_rows) {
    if constexpr (C::kQInRegisters) {
#pragma unroll
      for (int k = 0; k < C::kDq / 16; ++k) ldmatrix4(q[k], C::QLayout::further(q_address<C>(q_rows), k * 32));
    }
  }

  // Before a unit.
  __device__ __forceinline__ void clear() {
    m[0] = m[1] = -kInf, l[0] = l[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < C::kDv / 8; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.0f;
  }
};

// S = Q K^T for the warp's 16 x kGroups tokens.
template <class C>
__device__ __forceinline__ void scores(const Rows<C>& rows, uint32_t q_rows, uint32_t k_tile, float (&s)[2 * C::kGroups][4]) {
  const int lane = lane_of_thread<C::kIsCramped>();
  // Matrices 0, 1: tokens 0..7, matrices 2, 3: tokens 8..15; odd ones the second 16 bytes.
  const uint32_t from = k_tile + C::KLayout::at(lane % 8 + lane / 16 * 8, lane / 8 & 1);
#pragma unroll
  for (int group = 0; group < C::kGroups; ++group) {
#pragma unroll
    for (int n = 0; n < 2; ++n) s[2 * group + n][0] = s[2 * group + n][1] = s[2 * group + n][2] = s[2 * group + n][3] = 0.0f;
#pragma unroll
    for (int k = 0; k < C::kKRow / 32; ++k) {
      uint32_t b[4];
      ldmatrix4(b, C::KLayout::further(from, k * 32) + group * 16 * C::KLayout::kPitch);
      constexpr int kQSteps = C::kFp8 ? 2 : 1;  // 32 bytes of K are 32 dims in fp8
      uint32_t a[kQSteps][4];
#pragma unroll
      for (int i = 0; i < kQSteps; ++i) {
        if constexpr (C::kQInRegisters) {
#pragma unroll
          for (int j = 0; j < 4; ++j) a[i][j] = rows.q[k * kQSteps + i][j];
        } else {
          ldmatrix4(a[i], C::QLayout::further(q_address<C>(q_rows), (k * kQSteps + i) * 32));
        }
      }
      if constexpr (C::kFp8) {
        // Four neighbouring bytes a lane: bytes 0, 1 take the slots 2c of the contraction, bytes 2, 3 the slots 2c + 8.
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t lo, hi;
          fp8x4_to_f16(b[i], lo, hi);
          mma<F16>(s[2 * group + i / 2], a[i % 2], lo, hi);
        }
      } else {
        mma<typename C::Math>(s[2 * group], a[0], b[0], b[1]);
        mma<typename C::Math>(s[2 * group + 1], a[0], b[2], b[3]);
      }
    }
  }
}

// Softcap, ALiBi, then -inf for keys that a row does not see. Rare for long chunks, so all that it needs is fetched here.
template <class C>
__device__ __forceinline__ void mask_scores(const AttnParams& p, const TileInfo& info, float scale, float (&s)[2 * C::kGroups][4]) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  const int first = info.begin + warp * 16 * C::kGroups + 2 * c;
  const AttnTile* tile = ptr<const AttnTile>(p.tiles) + info.tile;
  const int tile_pos = load_table(&tile->q_pos);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = min(g + half * 8, p.group_size * load_table(&tile->q_len) - 1), token = row / p.group_size;  // surplus rows: any
    const int q_pos = tile_pos + token;
    const KeyRange keys = visible_keys(p, q_pos);
    const int last = min(keys.last, info.end - 1);
    float slope = 0.0f;
    if (C::kGeneral && p.alibi_slopes != 0) slope = ptr<const float>(p.alibi_slopes)[info.kv_head * p.group_size + row % p.group_size];
#pragma unroll
    for (int n = 0; n < 2 * C::kGroups; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key = first + n * 8 + i;
        float& x = s[n][2 * half + i];
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
template <class C>
__device__ __forceinline__ void softmax_step(Rows<C>& rows, float c, float (&s)[2 * C::kGroups][4]) {
  float rescale[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float m = rows.m[half];
#pragma unroll
    for (int n = 0; n < 2 * C::kGroups; ++n) m = fmaxf(m, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
    m = next_maximum(rows.m[half], quad_max(m), c);
    rescale[half] = rescale_factor(rows.m[half], m, c);
    rows.m[half] = m;
    const float offset = exponent_offset(m, c);
    float l = rows.l[half] * rescale[half];
#pragma unroll
    for (int n = 0; n < 2 * C::kGroups; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& x = s[n][2 * half + i];
        x = exp2_approx(fmaf(x, c, -offset));
        l += x;
      }
    }
    rows.l[half] = l;
  }
  if (__any_sync(~0u, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
    for (int i = 0; i < C::kDv / 8; ++i) {
      rows.o[i][0] *= rescale[0], rows.o[i][1] *= rescale[0];
      rows.o[i][2] *= rescale[1], rows.o[i][3] *= rescale[1];
    }
  }
}

// O += P V for the warp's tokens.
template <class C>
__device__ __forceinline__ void add_values(Rows<C>& rows, uint32_t v_tile, const float (&s)[2 * C::kGroups][4]) {
  using Math = typename C::Math;
  const int lane = lane_of_thread<C::kIsCramped>();
  const uint32_t from = v_tile + C::VLayout::at(lane % 16, lane / 16);
#pragma unroll
  for (int group = 0; group < C::kGroups; ++group) {
    const float(&s0)[4] = s[2 * group];
    const float(&s1)[4] = s[2 * group + 1];
    const uint32_t a[4] = {pack2<Math>(s0[0], s0[1]), pack2<Math>(s0[2], s0[3]), pack2<Math>(s1[0], s1[1]), pack2<Math>(s1[2], s1[3])};
#pragma unroll
    for (int i = 0; i < C::kVRow / 32; ++i) {
      uint32_t b[4];
      ldmatrix4_trans(b, C::VLayout::further(from, i * 32) + group * 16 * C::VLayout::kPitch);
      if constexpr (C::kFp8) {
        // A 16-bit element is two dims; bytes are sorted into (even, even, odd, odd) dims of tokens 2c, 2c + 1.
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          uint32_t even0, odd0, even1, odd1;
          fp8x4_to_f16(__byte_perm(b[2 * n], 0, 0x3120), even0, odd0);
          fp8x4_to_f16(__byte_perm(b[2 * n + 1], 0, 0x3120), even1, odd1);
          mma<F16>(rows.o[4 * i + 2 * n], a, even0, even1);
          mma<F16>(rows.o[4 * i + 2 * n + 1], a, odd0, odd1);
        }
      } else {
        mma<Math>(rows.o[2 * i], a, b[0], b[1]);
        mma<Math>(rows.o[2 * i + 1], a, b[2], b[3]);
      }
    }
  }
}

// Puts a warp's outputs of rows [first, first + kRoundRows) into its scratch, dims in their own order.
template <class C>
__device__ __forceinline__ void put_outputs(const Rows<C>& rows, int first, float* scratch) {
  const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4, r = g - first % 8;
  if (r < 0 || r >= C::kRoundRows) return;
  const bool is_upper = first >= 8;
  auto at = [&](int i, int j) { return is_upper ? rows.o[i][2 + j] : rows.o[i][j]; };
  float* to = scratch + r * C::kScratchPitch;
  if constexpr (C::kFp8) {
#pragma unroll
    for (int i = 0; i < C::kDv / 8; i += 2) {  // fragments i, i + 1: even and odd dims of 16
      *reinterpret_cast<float4*>(to + i * 8 + 4 * c) = make_float4(at(i, 0), at(i + 1, 0), at(i, 1), at(i + 1, 1));
    }
  } else {
#pragma unroll
    for (int i = 0; i < C::kDv / 8; ++i) *reinterpret_cast<float2*>(to + i * 8 + 2 * c) = make_float2(at(i, 0), at(i, 1));
  }
}

// Merges what the warps left in the scratch for rows [first, first + kRoundRows) of the unit, and writes results or partial
// states. `scratch`: warp 0's; the others' follow at intervals of kScratchStride.
template <class C>
__device__ __forceinline__ void write_rows(const AttnParams& p, const TileInfo& info, int first, float c, const unsigned char* scratch) {
  auto stat_of = [&](int w, int row) { return *reinterpret_cast<const float2*>(scratch + w * C::kScratchStride + C::kStatAt + row * 8); };
  const int num = min(info.num_rows - first, C::kRoundRows);
  for (int i = threadIdx.x; i < num * (C::kDv / 4); i += C::kThreads) {
    const int r = i / (C::kDv / 4), d = i % (C::kDv / 4) * 4, row = first + r;
    float m = -kInf;
#pragma unroll
    for (int w = 0; w < C::kWarps; ++w) m = fmaxf(m, stat_of(w, row).x);
    float l = 0.0f;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int w = 0; w < C::kWarps; ++w) {
      const float2 stat = stat_of(w, row);
      const float factor = rescale_factor(stat.x, m, c);
      const float4 x = *reinterpret_cast<const float4*>(scratch + w * C::kScratchStride + (r * C::kScratchPitch + d) * 4);
      l += stat.y * factor;
      sum.x += x.x * factor, sum.y += x.y * factor, sum.z += x.z * factor, sum.w += x.w * factor;
    }
    const float lse2 = lse_base2(m, l, c);
    const int token = row / p.group_size, head = info.kv_head * p.group_size + row - token * p.group_size;
    const bool is_split = info.partial >= 0;
    const RowEnd end = end_row(l, lse2, is_split ? -kInf : sink_of(p, head));
    const float scale = end.scale * p.v_scale;
    sum.x *= scale, sum.y *= scale, sum.z *= scale, sum.w *= scale;
    if (is_split) {
      const int64_t at = static_cast<int64_t>(info.partial) + row;
      *reinterpret_cast<float4*>(ptr<float>(p.partial_out) + at * C::kDv + d) = sum;
      if (d == 0) ptr<float>(p.partial_lse)[at] = lse2;
    } else {
      store_out4<typename C::Q>(p, info.q_begin + token, head, d, sum);
      if (d == 0) store_lse(p, info.q_begin + token, head, end.lse);
    }
  }
}

// The end of a unit, for the whole block. `scratch`: warp 0's. `next`: a unit with other rows of q follows, which are put in
// place; null: not so.
template <class C>
__device__ __forceinline__ void end_unit(const AttnParams& p, const Rows<C>& rows, const TileInfo& info, const TileInfo* next, float c, unsigned char* shared,
                                         unsigned char* scratch) {
  const int g = threadIdx.x % 32 / 4;
  unsigned char* mine = scratch + threadIdx.x / 32 * C::kScratchStride;
  QueryRows<C> q;
  if (C::kLoadsQEarly && next != nullptr) q.load(p, *next);  // under way during what follows
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float l = quad_sum(rows.l[half]);
    if (threadIdx.x % 4 == 0) reinterpret_cast<float2*>(mine + C::kStatAt)[g + half * 8] = make_float2(rows.m[half], l);
  }
#pragma unroll 1
  for (int first = 0; first < info.num_rows; first += C::kRoundRows) {
    put_outputs<C>(rows, first, reinterpret_cast<float*>(mine));
    __syncthreads();
    write_rows<C>(p, info, first, c, scratch);
    __syncthreads();
  }
  if (next == nullptr) return;
  if (!C::kLoadsQEarly) q.load(p, *next);
  q.put(shared + C::kQAt);
  __syncthreads();
}

template <class C>
__device__ __forceinline__ void decode(const AttnParams& p) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int warp = threadIdx.x / 32;
  const uint32_t ring = shared_address(shared) + warp * C::kStages * C::kStageBytes;
  check_shape<kKernelDecode, C::kDq, C::kDv>(p);
  wait_for_previous();

  const float scale = p.sm_scale * p.k_scale;
  const float c = C::kGeneral ? 1.0f : scale * kLog2e;  // general: scores are shaped, in base 2, before the softmax
  Loader<C> loader;
  loader.start(p, shared + C::kWarpAt + warp * C::kWarpBytes);
  int pending = 0;  // tiles copied and not yet computed
#pragma unroll
  for (int i = 0; i < C::kStages; ++i) {
    pending += loader.copy(p, ring + i * C::kStageBytes, i);
    __syncwarp();
  }

  Rows<C> rows;
  if (pending > 0) {
    QueryRows<C> q;
    q.load(p, loader.info(0));
    q.put(shared + C::kQAt);
    __syncthreads();
    rows.load_q(shared_address(shared + C::kQAt));
    if (C::kQSharesScratch) __syncthreads();
    rows.clear();
  }
  int stage = 0;
  while (pending > 0) {
    cp_async_wait<C::kStages - 1>();
    __syncwarp();
    const TileInfo& info = loader.info(stage);
    const uint32_t k_tile = ring + stage * C::kStageBytes, v_tile = k_tile + C::kVAt;
    float s[2 * C::kGroups][4];
    scores<C>(rows, shared_address(shared + C::kQAt), k_tile, s);
    if (C::kGeneral || info.needs_mask) mask_scores<C>(p, info, scale, s);
    softmax_step<C>(rows, c, s);
    add_values<C>(rows, v_tile, s);
    const TileInfo unit = info;  // a copy: refilling the stage overwrites it
    __syncwarp();                // all lanes are done with the stage
    --pending;
    const int next_stage = stage + 1 == C::kStages ? 0 : stage + 1;
    const TileInfo* next = unit.is_last && pending > 0 ? &loader.info(next_stage) : nullptr;
    auto end = [&] {
      const bool keeps_q = next != nullptr && next->tile == unit.tile && next->kv_head == unit.kv_head;
      unsigned char* scratch = shared + (C::kScratchInRing ? stage * C::kStageBytes : C::kScratchAt);
      end_unit<C>(p, rows, unit, keeps_q ? nullptr : next, c, shared, scratch);
      if (!keeps_q && next != nullptr) rows.load_q(shared_address(shared + C::kQAt));
      if (C::kQSharesScratch && !keeps_q) __syncthreads();  // all have read q, which the next scratch overwrites
      rows.clear();
    };
    if (C::kScratchInRing && unit.is_last) end();
    pending += loader.copy(p, ring + stage * C::kStageBytes, stage);
    if (!C::kScratchInRing && unit.is_last) end();
    if (!loader.has_more) launch_dependents();
    stage = next_stage;
  }
  zero_padding_rows<typename C::Q, C::kDv>(p);
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
#include "decode.inst"

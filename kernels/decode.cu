// Split-KV attention for few query rows: the GQA group (and a few query tokens) fill the 16 rows of a tensor-core tile.
//
//   unit = (tile of query tokens, KV head, chunk of KV);  rows = q_len x group_size <= 16, row = token x group + head
//
// Grid: any; blocks are persistent and walk ranges of units. A unit's KV goes by in tiles of kTile tokens through a
// ring of kStages stages that cp.async keeps full, also across units. Each of the kWarps warps owns its own
// 16 x kGroups tokens of a tile, with its own running softmax and output; they meet at the end of a unit.
// Which tokens a warp takes, and the order in which states meet, depend on the chunk alone: so do the bits.
//
// Shared memory, bytes: kStages x kTile x (row of K + row of V), rows padded by 16 against bank conflicts;
//   kStages StageInfos; kWarps x 16 x (m, l); 2 Cursors. The end of a unit uses the stage it has just consumed as scratch.
// Registers, per thread: kDv / 2 outputs, kDq / 4 of q, 4 x 2 x kGroups scores.
// Barriers: the one at the top of an iteration makes the stage (copied by all threads) visible, and says that all warps
//   are done with the stage consumed before, which the next copies overwrite.
// Rows of a tile beyond the chunk are zero-filled, never read; rows of q beyond `rows` are zero and their results dropped.
#include "primitives/cp_async.cuh"
#include "primitives/fp8.cuh"
#include "primitives/launch.cuh"
#include "primitives/mask.cuh"
#include "primitives/mma.cuh"
#include "primitives/paged.cuh"
#include "primitives/rows.cuh"
#include "primitives/softmax.cuh"
#include "primitives/units.cuh"

namespace {

constexpr int kMaxRows = 16;

// A tile in the ring: written by thread 0 when the copies are issued.
struct StageInfo {
  int begin, end;  // its KV positions: [begin, min(begin + kTile, end))
  int tile, kv_head, chunk;
  int is_last;     // of its unit
  int needs_mask;  // some row does not see some key of it by causal mask, window or the chunk's end
  int pad;
};

using Cursor = UnitCursor<kKernelDecode, kMaxRows>;

constexpr int at_most(int x, int limit) { return x < limit ? x : limit; }

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
  static constexpr int kTile = 16 * kGroups * kWarps;
  static constexpr int kKRow = kDq * KV::kBytes, kVRow = kDv * KV::kBytes;  // bytes
  static constexpr int kKPitch = kKRow + 16, kVPitch = kVRow + 16;          // an odd number of 16-byte chunks
  static constexpr int kStageBytes = kTile * (kKPitch + kVPitch);
  static constexpr int kStages = kStageBytes >= 24 * 1024 ? 2 : kStageBytes >= 16 * 1024 ? 3 : 4;
  static constexpr int kInfoAt = kStages * kStageBytes;
  static constexpr int kStatAt = kInfoAt + kStages * static_cast<int>(sizeof(StageInfo));
  static constexpr int kCursorAt = kStatAt + kWarps * kMaxRows * 8;
  static constexpr int kSharedBytes = kCursorAt + 2 * static_cast<int>(sizeof(Cursor));

  // Copying: kLanesPerRow threads share a row; each thread takes the rows r0, r0 + kRowsPerPass, ...
  static constexpr int kLanesPerRow = at_most(kKRow % 128 == 0 ? 8 : kKRow % 64 == 0 ? 4 : 2, kVRow % 128 == 0 ? 8 : kVRow % 64 == 0 ? 4 : 2);
  static constexpr int kKCopies = kKRow / 16 / kLanesPerRow, kVCopies = kVRow / 16 / kLanesPerRow;
  static constexpr int kRowsPerPass = kThreads / kLanesPerRow;
  static constexpr int kPasses = kTile / kRowsPerPass;

  // Meeting of the warps: 8 rows at a time, f32.
  static constexpr int kScratchPitch = kDv + 8;
  static_assert(kWarps * 8 * kScratchPitch * 4 <= kStageBytes, "the consumed stage is the scratch");
  static_assert(kTile % kRowsPerPass == 0 && kDq % 16 == 0 && kDv % 16 == 0, "");
};

// The copying half: runs kStages - 1 tiles ahead of the computing half, on the same threads.
// Its cursor lies in shared memory, twice, to spare registers: all threads read one copy and step alike, thread 0 writes
// the other; there is at most one step between two barriers.
template <class C>
struct Loader {
  Cursor* cursors;
  int current;            // which of them holds the unit
  int pos, end;           // the next tile's first token; end of its chunk
  int kv_head, pages_begin;
  bool has_more;
  int pages[C::kPasses];  // of the next tile's rows

  __device__ __forceinline__ void start(const AttnParams& p, Cursor* in_shared) {
    cursors = in_shared;
    current = 1;
    Cursor unit;
    unit.init(p);
    step(p, unit);
  }

  __device__ __forceinline__ void step(const AttnParams& p, Cursor& unit) {
    has_more = unit.next(p, static_cast<int>(gridDim.x));
    current ^= 1;
    if (!has_more) return;
    chunk_bounds(unit.facts, unit.chunk, pos, end);
    kv_head = unit.kv_head, pages_begin = unit.facts.pages_begin;
    if (threadIdx.x == 0) cursors[current] = unit;
  }

  // Page ids of the next tile, a whole tile before its copies need them.
  __device__ __forceinline__ void find_pages(const AttnParams& p) {
    if (!has_more) return;
    const int r0 = threadIdx.x / C::kLanesPerRow;
#pragma unroll
    for (int i = 0; i < C::kPasses; ++i) {
      const int t = pos + r0 + i * C::kRowsPerPass;
      if (t < end) pages[i] = place_of<kKernelDecode>(p, pages_begin, t, -1).page;
    }
  }

  // Issues the copies of the next tile into a stage, if there is one; commits in any case.
  __device__ __forceinline__ bool issue(const AttnParams& p, uint32_t stage, StageInfo* info) {
    const bool issued = has_more;
    if (has_more) {
      const int r0 = threadIdx.x / C::kLanesPerRow, lane = threadIdx.x % C::kLanesPerRow;
      const char* k_base = ptr<const char>(p.k) + kv_head * p.k_stride_head * C::KV::kBytes + lane * 16;
      const char* v_base = ptr<const char>(p.v) + kv_head * p.v_stride_head * C::KV::kBytes + lane * 16;
#pragma unroll
      for (int i = 0; i < C::kPasses; ++i) {
        const int row = r0 + i * C::kRowsPerPass, t = pos + row;
        const bool valid = t < end;
        const Place place = {valid ? pages[i] : 0, t - page_of(p.page_magic, p.page_shift, t) * p.page_size};
        const char* k = k_base + cache_offset(place, 0, p.k_stride_page, p.k_stride_token, 0) * C::KV::kBytes;
        const char* v = v_base + cache_offset(place, 0, p.v_stride_page, p.v_stride_token, 0) * C::KV::kBytes;
        const uint32_t k_to = stage + row * C::kKPitch + lane * 16, v_to = stage + C::kTile * C::kKPitch + row * C::kVPitch + lane * 16;
#pragma unroll
        for (int j = 0; j < C::kKCopies; ++j) cp_async16_or_zero(k_to + j * C::kLanesPerRow * 16, k + j * C::kLanesPerRow * 16, valid);
#pragma unroll
        for (int j = 0; j < C::kVCopies; ++j) cp_async16_or_zero(v_to + j * C::kLanesPerRow * 16, v + j * C::kLanesPerRow * 16, valid);
      }
      const bool is_last = pos + C::kTile >= end;
      if (threadIdx.x == 0) {
        const Cursor& unit = cursors[current];
        *info = {pos, end, unit.tile, kv_head, unit.chunk, is_last, needs_mask(p, unit.facts), 0};
      }
      pos += C::kTile;
      if (is_last) {
        Cursor unit = cursors[current];
        step(p, unit);
      }
    }
    cp_async_commit();
    return issued;
  }

  __device__ __forceinline__ bool needs_mask(const AttnParams& p, const TileFacts& t) const {
    const KeyRange first = visible_keys(p, t.q_pos), last = visible_keys(p, t.q_pos + t.q_len - 1);
    return pos + C::kTile > end || pos + C::kTile - 1 > first.last || pos < last.first;
  }
};

// What a warp knows of the unit it computes.
template <class C>
struct Rows {
  uint32_t q[C::kDq / 16][4];  // A fragments
  float o[C::kDv / 8][4];      // C fragments; fp8: dims permuted within 16, see flush
  float m[2], l[2];            // of rows g and g + 8

  // Two packed elements of q at (row, d), as the tensor cores want them.
  static __device__ __forceinline__ uint32_t load_q2(const uint16_t* q, int d) {
    const uint32_t x = *reinterpret_cast<const uint32_t*>(q + d);
    if constexpr (Same<typename C::Math, typename C::Q>::value) return x;
    const float2 f = unpack2<typename C::Q>(x);
    return pack2<typename C::Math>(f.x, f.y);
  }

  __device__ __forceinline__ void begin(const AttnParams& p, const StageInfo& info) {
    const TileFacts tile = load_tile(p, info.tile);
    const int num_rows = tile.q_len * p.group_size;
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = g + half * 8;
      const bool valid = row < num_rows;
      const int r = valid ? row / p.group_size : 0, h = info.kv_head * p.group_size + (valid ? row % p.group_size : 0);
      const uint16_t* from = ptr<const uint16_t>(p.q) + (tile.q_begin + r) * p.q_stride_row + h * p.q_stride_head;
#pragma unroll
      for (int k = 0; k < C::kDq / 16; ++k) {
        // fp8: lane c holds the dims 4c..4c + 3 of 16, as its bytes of K come (see scores).
        q[k][half] = valid ? load_q2(from, k * 16 + (C::kFp8 ? 4 * c : 2 * c)) : 0;
        q[k][half + 2] = valid ? load_q2(from, k * 16 + (C::kFp8 ? 4 * c + 2 : 2 * c + 8)) : 0;
      }
      m[half] = -kInf, l[half] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < C::kDv / 8; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.0f;
  }
};

// S = Q K^T for the warp's 16 x kGroups tokens.
template <class C>
__device__ __forceinline__ void scores(const Rows<C>& rows, uint32_t k_tile, float (&s)[2 * C::kGroups][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Matrices 0, 1: tokens 0..7, matrices 2, 3: tokens 8..15; odd ones the second 16 bytes.
  const uint32_t from = k_tile + (warp * 16 * C::kGroups + lane % 8 + lane / 16 * 8) * C::kKPitch + (lane / 8 & 1) * 16;
#pragma unroll
  for (int group = 0; group < C::kGroups; ++group) {
#pragma unroll
    for (int n = 0; n < 2; ++n) s[2 * group + n][0] = s[2 * group + n][1] = s[2 * group + n][2] = s[2 * group + n][3] = 0.0f;
#pragma unroll
    for (int k = 0; k < C::kKRow / 32; ++k) {
      uint32_t b[4];
      ldmatrix4(b, from + group * 16 * C::kKPitch + k * 32);
      if constexpr (C::kFp8) {
        // 32 dims: four neighbouring bytes a lane; bytes 0, 1 take the slots 2c of the contraction, bytes 2, 3 the slots 2c + 8.
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          uint32_t lo, hi;
          fp8x4_to_f16(b[2 * n], lo, hi);
          mma<F16>(s[2 * group + n], rows.q[2 * k], lo, hi);
          fp8x4_to_f16(b[2 * n + 1], lo, hi);
          mma<F16>(s[2 * group + n], rows.q[2 * k + 1], lo, hi);
        }
      } else {
        mma<typename C::Math>(s[2 * group], rows.q[k], b[0], b[1]);
        mma<typename C::Math>(s[2 * group + 1], rows.q[k], b[2], b[3]);
      }
    }
  }
}

// Softcap, ALiBi, then -inf for keys that a row does not see. Rare for long chunks, so all that it needs is fetched here.
template <class C>
__device__ __forceinline__ void mask_scores(const AttnParams& p, const StageInfo& info, float scale, float (&s)[2 * C::kGroups][4]) {
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
    m = quad_max(m);
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
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t from = v_tile + (warp * 16 * C::kGroups + lane % 16) * C::kVPitch + lane / 16 * 16;
#pragma unroll
  for (int group = 0; group < C::kGroups; ++group) {
    const float(&s0)[4] = s[2 * group];
    const float(&s1)[4] = s[2 * group + 1];
    const uint32_t a[4] = {pack2<Math>(s0[0], s0[1]), pack2<Math>(s0[2], s0[3]), pack2<Math>(s1[0], s1[1]), pack2<Math>(s1[2], s1[3])};
#pragma unroll
    for (int i = 0; i < C::kVRow / 32; ++i) {
      uint32_t b[4];
      ldmatrix4_trans(b, from + group * 16 * C::kVPitch + i * 32);
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

// Puts a warp's outputs of rows half x 8 + g into the scratch, dims in their own order.
template <class C>
__device__ __forceinline__ void put_outputs(const Rows<C>& rows, int half, float* scratch) {
  const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4, warp = threadIdx.x / 32;
  float* to = scratch + (warp * 8 + g) * C::kScratchPitch;
  if constexpr (C::kFp8) {
#pragma unroll
    for (int i = 0; i < C::kDv / 16; ++i) {  // fragments 2i, 2i + 1: even and odd dims of 16
      const float(&even)[4] = rows.o[2 * i];
      const float(&odd)[4] = rows.o[2 * i + 1];
      *reinterpret_cast<float4*>(to + i * 16 + 4 * c) = make_float4(even[2 * half], odd[2 * half], even[2 * half + 1], odd[2 * half + 1]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < C::kDv / 8; ++i) *reinterpret_cast<float2*>(to + i * 8 + 2 * c) = make_float2(rows.o[i][2 * half], rows.o[i][2 * half + 1]);
  }
}

// The end of a unit: the warps' states meet, in the order of the warps, and the result or partial state is written.
template <class C>
__device__ __forceinline__ void flush(const AttnParams& p, Rows<C>& rows, const StageInfo& info, float c, float* scratch, float2* stats) {
  const int g = threadIdx.x % 32 / 4, warp = threadIdx.x / 32;
  const TileFacts tile = load_tile(p, info.tile);
  const bool is_split = tile.num_chunks > 1;
  const int num_rows = tile.q_len * p.group_size;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float l = quad_sum(rows.l[half]);
    if (threadIdx.x % 4 == 0) stats[warp * kMaxRows + g + half * 8] = make_float2(rows.m[half], l);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half * 8 >= num_rows) break;
    __syncthreads();  // all warps are done with the stage, or with the other half
    put_outputs<C>(rows, half, scratch);
    __syncthreads();
    const int num = min(num_rows - half * 8, 8);
    for (int i = threadIdx.x; i < num * (C::kDv / 4); i += C::kThreads) {
      const int r = i / (C::kDv / 4), d = i % (C::kDv / 4) * 4, row = half * 8 + r;
      float m = -kInf;
#pragma unroll
      for (int w = 0; w < C::kWarps; ++w) m = fmaxf(m, stats[w * kMaxRows + row].x);
      float l = 0.0f;
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int w = 0; w < C::kWarps; ++w) {
        const float2 stat = stats[w * kMaxRows + row];
        const float factor = rescale_factor(stat.x, m, c);
        const float4 x = *reinterpret_cast<const float4*>(scratch + (w * 8 + r) * C::kScratchPitch + d);
        l += stat.y * factor;
        sum.x += x.x * factor, sum.y += x.y * factor, sum.z += x.z * factor, sum.w += x.w * factor;
      }
      const float lse2 = lse_base2(m, l, c);
      const int token = row / p.group_size, head = info.kv_head * p.group_size + row % p.group_size;
      const RowEnd end = end_row(l, lse2, is_split ? -kInf : sink_of(p, head));
      const float scale = end.scale * p.v_scale;
      sum.x *= scale, sum.y *= scale, sum.z *= scale, sum.w *= scale;
      if (is_split) {
        const int64_t at = partial_row(p, info.tile, tile, info.kv_head, info.chunk) + row;
        *reinterpret_cast<float4*>(ptr<float>(p.partial_out) + at * C::kDv + d) = sum;
        if (d == 0) ptr<float>(p.partial_lse)[at] = lse2;
      } else {
        store_out4<typename C::Q>(p, tile.q_begin + token, head, d, sum);
        if (d == 0) store_lse(p, tile.q_begin + token, head, end.lse);
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void decode(const AttnParams& p) {
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t ring = shared_address(shared);
  StageInfo* infos = reinterpret_cast<StageInfo*>(shared + C::kInfoAt);
  float2* stats = reinterpret_cast<float2*>(shared + C::kStatAt);
  check_shape<kKernelDecode, C::kDq, C::kDv>(p);
  wait_for_previous();

  const float scale = p.sm_scale * p.k_scale;
  const float c = C::kGeneral ? 1.0f : scale * kLog2e;  // general: scores are shaped, in base 2, before the softmax
  Loader<C> loader;
  loader.start(p, reinterpret_cast<Cursor*>(shared + C::kCursorAt));
  __syncthreads();
  loader.find_pages(p);
  int pending = 0;  // tiles issued and not yet consumed
#pragma unroll
  for (int i = 0; i < C::kStages - 1; ++i) {
    pending += loader.issue(p, ring + i * C::kStageBytes, infos + i);
    loader.find_pages(p);
    __syncthreads();
  }

  Rows<C> rows;
  int stage = 0, free_stage = C::kStages - 1;
  bool is_first = true;
  while (pending > 0) {
    // A unit begins after a flush, whose barriers showed its first StageInfo; q comes while the tile is under way.
    if (is_first) rows.begin(p, infos[stage]);
    cp_async_wait<C::kStages - 2>();
    __syncthreads();
    pending += loader.issue(p, ring + free_stage * C::kStageBytes, infos + free_stage);
    loader.find_pages(p);
    if (!loader.has_more) launch_dependents();

    const StageInfo info = infos[stage];
    const uint32_t k_tile = ring + stage * C::kStageBytes, v_tile = k_tile + C::kTile * C::kKPitch;
    float s[2 * C::kGroups][4];
    scores<C>(rows, k_tile, s);
    if (C::kGeneral || info.needs_mask) mask_scores<C>(p, info, scale, s);
    softmax_step<C>(rows, c, s);
    add_values<C>(rows, v_tile, s);
    is_first = info.is_last;
    if (info.is_last) {
      flush<C>(p, rows, info, c, reinterpret_cast<float*>(shared + stage * C::kStageBytes), stats);
    }
    --pending;
    stage = stage + 1 == C::kStages ? 0 : stage + 1;
    free_stage = free_stage + 1 == C::kStages ? 0 : free_stage + 1;
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

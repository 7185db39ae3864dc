// The copying half of extend_sm90.cu without tensor maps, and what all halves share: the kernel's shape, its shared memory, units, pages.
#pragma once

// Warps have different numbers of registers, so nothing may be called.
#define ATTN_CHECK_INLINE __forceinline__
#include "primitives/barrier.cuh"
#include "primitives/cp_async.cuh"
#include "primitives/mask.cuh"
#include "primitives/paged.cuh"
#include "primitives/units.cuh"
#include "primitives/wgmma.cuh"

namespace {

static constexpr int kBoxTokens = 16;  // of a box of K or V
static constexpr int kMadeAhead = 2;   // units, of what is copied; where each copying warp has a part

using Cursor = UnitCursor<kKernelExtend, INT32_MAX>;

// What a computing warpgroup sees of a pass.
struct alignas(16) Sight {
  int first_tile, last_tile;         // tiles [first, last) of which it sees something
  int unmasked_begin, unmasked_end;  // keys that all its rows see
};

static constexpr int kMaxGroups = 3;

// A unit, or a pass of it.
struct Work {
  Cursor at;
  Sight sights[kMaxGroups];
  int begin, end;  // KV positions
  int num_rows;    // of the whole unit; 0: there is no more work
  int num_sent;    // computing warpgroups whose results leave by way of q's place: whole boxes, not of one of several chunks
  int first_row;   // of the pass
};

template <class Q_, class KV_, int kDq_, int kDv_, bool kGeneral_, int kRows_>
struct Config {
  using Q = Q_;
  static constexpr bool kFp8 = Same<KV_, Fp8>::value;
  static_assert(kFp8 || Same<Q_, KV_>::value, "KV is e4m3 or has the dtype of q");
  using Math = typename Either<kFp8, F16, Q>::T;  // of products: e4m3 is a subset of f16
  static constexpr bool kConvertsQ = !Same<Q, Math>::value;
  static constexpr int kDq = kDq_, kDv = kDv_, kRows = kRows_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr int kGroups = kRows / 64, kWarpgroup = 128, kThreads = (kGroups + 1) * kWarpgroup;
  static constexpr bool kEntersEarly = kDv < 256;  // the first scores of a unit are computed while the one before is written
  static constexpr bool kOverlaps = !kGeneral;  // general: shaping scores needs the registers of the weights
  static constexpr int kTile = kDq == 64 ? (kGeneral ? 80 : 112) : kDq == 192 ? 128 : kDq == 128 && kGeneral ? 64 : 80;
  static constexpr int kQs = kDq <= 128 ? 2 : 1;
  static constexpr bool kSendsBoxes = kQs > 1;  // results go by way of q's place, if there are maps: of one place, the next q would wait
  static constexpr int kStages = kDq == 64 ? 4 : kDq == 128 ? 3 : 2;
  // Registers of a copying and of a computing thread: their sum over the block is at most what it was launched with.
  static constexpr int kCopyRegisters = 56, kComputeRegisters = kGroups == 2 ? 224 : 152;

  static constexpr int kKGroup = kDq / 64 * kBlock, kVGroup = kDv / 64 * kBlock;  // bytes of 8 tokens
  static constexpr int kQBytes = kRows * kDq * 2, kKBytes = kTile * kDq * 2, kVBytes = kTile * kDv * 2;
  static constexpr int kUnits = 4;  // one is made ahead, kQs are in use
};

template <class C>
struct __align__(1024) Shared {
  unsigned char q[C::kQs][C::kQBytes];
  unsigned char k[C::kStages][C::kKBytes];
  unsigned char v[C::kStages][C::kVBytes];
  Work units[C::kUnits];
  uint64_t full_q[C::kQs][C::kGroups], empty_q[C::kQs][C::kGroups];  // the first of each place, where warpgroups share them
  uint64_t full_k[C::kStages], empty_k[C::kStages];
  uint64_t full_v[C::kStages], empty_v[C::kStages];
  uint64_t made[C::kUnits], begun[C::kUnits], done[C::kUnits];
  uint32_t magic;  // of the group
  uint64_t raw_k[C::kFp8 ? C::kStages : 1], raw_v[C::kFp8 ? C::kStages : 1];  // e4m3: `full` of copies
};

// A place in a ring of kSize, and how often it went round, modulo 2.
template <int kSize>
struct Ring {
  int at = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++at == kSize) at = 0, parity ^= 1;
  }
  __device__ __forceinline__ Ring before() const { return at == 0 ? Ring{kSize - 1, parity ^ 1} : Ring{at - 1, parity}; }
};

// Lets threads that meet go on without waiting for them.
__device__ __forceinline__ void announce(int barrier, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }

static constexpr int kCopyingMeet = 1, kTurn = 2, kGroupMeet = kTurn + kMaxGroups;  // the last two for each computing warpgroup

// The thread's number, made anew, so that what follows from it is not kept in registers across loops.
__device__ __forceinline__ unsigned thread_number() {
  unsigned x = threadIdx.x;
  asm volatile("" : "+r"(x));
  return x;
}

// Rows to tokens: what row / group_size is, by a multiplication where that is exact. 0: by division.
__device__ __forceinline__ uint32_t group_magic(const AttnParams& p) { return p.group_size < 1 << 15 ? 0xffffffffu / p.group_size + 1 : 0; }

__device__ __forceinline__ int token_of(const AttnParams& p, uint32_t magic, int row) {
  int token = static_cast<int>(__umulhi(row, magic));
  if (magic == 0) token = p.group_size == 1 ? row : row / p.group_size;
  return token;
}

// Waits until a unit is made; all lanes see it then.
template <class C>
__device__ __forceinline__ const Work& wait_made(Shared<C>& shared, unsigned unit) {
  barrier_wait(&shared.made[unit % C::kUnits], unit / C::kUnits % 2);
  return shared.units[unit % C::kUnits];
}

// The thread will not look at the unit again.
template <class C>
__device__ __forceinline__ void leave_unit(Shared<C>& shared, unsigned unit) {
  barrier_arrive(&shared.done[unit % C::kUnits]);
}

// Whether each copying warp has a part of its own: makes units, copies K, V or rows.
template <class C>
__device__ __forceinline__ bool has_parts(const AttnMappedParams& mapped) {
  return C::kFp8 || mapped.has_maps != 0;
}

// What warpgroup `group` sees of a pass.
template <class C>
__device__ __forceinline__ Sight sight_of(const AttnParams& p, uint32_t magic, const Work& work, int group) {
  const int first = work.first_row + group * 64, last = min(first + 64, work.num_rows) - 1;
  if (first > last) return {0, 0, 0, 0};
  const int q_pos = work.at.facts.q_pos;
  const KeyRange of_first = visible_keys(p, q_pos + token_of(p, magic, first)), of_last = visible_keys(p, q_pos + token_of(p, magic, last));
  const int begin = max(work.begin, of_first.first), end = min(work.end - 1, of_last.last) + 1;
  if (begin >= end) return {0, 0, 0, 0};
  return {(begin - work.begin) / C::kTile, (end - work.begin + C::kTile - 1) / C::kTile, max(work.begin, of_last.first),
          min(work.end - 1, of_first.last) + 1};
}

// Behind a window, lets a unit begin at a multiple of 16, so that its tiles come by boxes: with tokens that no row sees, of a page
// that has others. A later chunk begins where the one before ends.
__device__ __forceinline__ void begin_at_box(const AttnParams& p, const Cursor& at, Work& work) {
  if (at.chunk == 0 && work.begin < work.end && p.page_size % kBoxTokens == 0) work.begin -= work.begin % kBoxTokens;
}

// Makes the unit (or pass) after `from`, by one warp. `claimed`: the unit that the first lane has claimed.
template <class C>
__device__ __forceinline__ void make_next(const AttnMappedParams& mapped, uint32_t magic, const Work& from, Work& to, int& claimed) {
  const AttnParams& p = mapped.attn;
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(Work) / 4); i += 32) reinterpret_cast<int*>(&to)[i] = reinterpret_cast<const int*>(&from)[i];
  __syncwarp();
  if (threadIdx.x == 0) {
    if (to.first_row + C::kRows < to.num_rows) {
      to.first_row += C::kRows;
    } else {
      Cursor& next = to.at;
      const bool has_unit = p.claim != 0 ? next.take_unit(p, claimed) : next.next(p, static_cast<int>(gridDim.x));
      // The unit after this one is claimed now, so that the answer is there when it is wanted.
      if (has_unit && p.claim != 0) claimed = static_cast<int>(gridDim.x) + atomicAdd(ptr<int>(p.claim), 1);
      if (has_unit) chunk_bounds(next.facts, next.chunk, to.begin, to.end);
      if (C::kFp8 && has_unit) begin_at_box(p, next, to);
      to.first_row = 0;
      to.num_rows = has_unit ? next.facts.q_len * p.group_size : 0;
    }
    const bool sends = C::kSendsBoxes && mapped.has_row_maps != 0 && to.num_rows != 0 && to.at.facts.num_chunks == 1;
    to.num_sent = sends ? min(to.num_rows - to.first_row, C::kRows) / 64 : 0;
  }
  __syncwarp();
  if (threadIdx.x < C::kGroups) to.sights[threadIdx.x] = sight_of<C>(p, magic, to, threadIdx.x);
}

// Makes unit `unit` when there is a place for it (the first one is made); false: there is no more work. Where each copying warp has a
// part, by the first.
template <class C>
__device__ __forceinline__ bool make_unit(const AttnMappedParams& mapped, Shared<C>& shared, unsigned unit, int& claimed) {
  Work& work = shared.units[unit % C::kUnits];
  if (unit >= C::kUnits) barrier_wait(&shared.done[unit % C::kUnits], unit / C::kUnits % 2 ^ 1);
  if (!C::kFp8 && unit > kMadeAhead) barrier_wait(&shared.begun[(unit - kMadeAhead) % C::kUnits], (unit - kMadeAhead) / C::kUnits % 2);
  if (unit > 0) make_next<C>(mapped, shared.magic, shared.units[(unit - 1) % C::kUnits], work, claimed);
  barrier_arrive(&shared.made[unit % C::kUnits]);
  __syncwarp();  // the next one begins with what other lanes wrote
  return work.num_rows != 0;
}

// Starts copying the rows of the pass, by the copying warps from kFirstWarp on; places of rows that it does not have keep what they
// held, which nothing is made of. Eight threads share a row; each knows one of eight of theirs at a time.
template <class C, int kFirstWarp>
__device__ __forceinline__ void copy_q(const AttnParams& p, uint32_t magic, const Work& work, uint32_t q) {
  constexpr int kRowsAtOnce = (C::kWarpgroup - 32 * kFirstWarp) / 8;
  const int num_rows = min(work.num_rows - work.first_row, C::kRows);
  const int thread = static_cast<int>(thread_number()) - 32 * kFirstWarp, lane = thread % 8;
#pragma unroll 1
  for (int of_warps = 0; of_warps < num_rows; of_warps += 8 * kRowsAtOnce) {
    const int first = of_warps + thread / 8;
    const int of_pass = first + lane * kRowsAtOnce, row = work.first_row + of_pass, token = token_of(p, magic, row);
    const int head = work.at.kv_head * p.group_size + row - token * p.group_size;
    const int64_t known = (work.at.facts.q_begin + token) * p.q_stride_row + head * p.q_stride_head;
    const uint32_t known_to = q + of_pass / 64 * 64 * C::kDq * 2 + of_pass % 64 * kPanelRow;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int64_t offset = __shfl_sync(~0u, known, i, 8);
      const uint32_t to = __shfl_sync(~0u, known_to, i, 8);
      if (first + i * kRowsAtOnce >= num_rows) continue;
      const char* from = ptr<const char>(p.q) + offset * 2 + lane * 16;
      const uint32_t chunk = (lane * 16) ^ (to & 0x380) >> 3;  // swizzled by the row
#pragma unroll
      for (int panel = 0; panel < C::kDq / 64; ++panel) cp_async16(to + chunk + panel * 64 * kPanelRow, from + panel * kPanelRow);
    }
  }
}

// Page of position t of a request.
__device__ __forceinline__ int page_at(const AttnParams& p, int request, int pages_begin, int t) {
  const int at = pages_begin + page_of(p.page_magic, p.page_shift, t);
  if (p.kv_indices == 0) return at;
  ATTN_CHECK(at >= 0 && at < p.num_kv_indices, p.check, kKernelExtend, kCheckKvIndex, request, at);
  return load_table(ptr<const int32_t>(p.kv_indices) + at);
}

// Copies tiles of K and V. Eight threads share a row; lane i of them knows the place of their row i, i + 8, ...
template <class C>
struct TileCopier {
  static constexpr int kRowsAtOnce = C::kWarpgroup / 8, kPasses = C::kTile / kRowsAtOnce;
  static_assert(kPasses <= 8 && C::kTile % kRowsAtOnce == 0, "a lane knows one row");

  int page;  // of this lane's row in the tile to come

  static __device__ __forceinline__ int row() {
    const unsigned thread = thread_number();
    return static_cast<int>(thread / 8 + thread % 8 * kRowsAtOnce);
  }

  // Starts loading the page id of this lane's row in the tile at `pos`.
  __device__ __forceinline__ void load_page(const AttnParams& p, const Work& work, int pos) {
    const int t = pos + row();
    page = 0;
    if (threadIdx.x % 8 < kPasses && t < work.end) {
      const int at = work.at.facts.pages_begin + page_of(p.page_magic, p.page_shift, t);
      page = at;
      if (p.kv_indices != 0) {
        ATTN_CHECK(at >= 0 && at < p.num_kv_indices, p.check, kKernelExtend, kCheckKvIndex, work.at.facts.request, at);
        page = load_table(ptr<const int32_t>(p.kv_indices) + at);
      }
    }
  }

  // Copies the tile's rows of one cache: kDim elements each, from `base` on, `offset` elements further for this lane's row.
  template <int kDim>
  __device__ __forceinline__ void copy(const char* base, int64_t offset, int num_rows, uint32_t to) const {
    const int thread = static_cast<int>(thread_number());
    to += group_at(kDim / 64, thread / 8, thread % 8);
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const char* from = base + __shfl_sync(~0u, offset, i, 8) * 2;
      const bool valid = thread / 8 + i * kRowsAtOnce < num_rows;
#pragma unroll
      for (int panel = 0; panel < kDim / 64; ++panel) {
        cp_async16_or_zero(to + (i * (kRowsAtOnce / 8) * (kDim / 64) + panel) * kBlock, from + panel * kPanelRow, valid);
      }
    }
  }
};

template <class C>
__device__ __forceinline__ void copy_all(const AttnMappedParams& mapped, Shared<C>& shared, int claimed) {
  const AttnParams& p = mapped.attn;
  Ring<C::kStages> stage;
  TileCopier<C> copier;
  copier.load_page(p, shared.units[0], shared.units[0].begin);
  for (unsigned unit = 0;; ++unit) {
    const Work& work = shared.units[unit % C::kUnits];
    Work& next = shared.units[(unit + 1) % C::kUnits];
    const unsigned q = unit % C::kQs;
    const char* k = ptr<const char>(p.k) + work.at.kv_head * p.k_stride_head * 2 + threadIdx.x % 8 * 16;
    const char* v = ptr<const char>(p.v) + work.at.kv_head * p.v_stride_head * 2 + threadIdx.x % 8 * 16;
    // The next unit is made; page ids of its first tile are loaded ahead.
    auto look_ahead = [&] {
      meet(kCopyingMeet, C::kWarpgroup);
      copier.load_page(p, next, next.begin);
    };
    auto copy_tile = [&](int pos, bool looks_ahead) {
      const int t = pos + copier.row(), page = copier.page;
      const Place place = {page, t - page_of(p.page_magic, p.page_shift, t) * p.page_size};
      ATTN_CHECK(page >= 0 && page < p.num_pages, p.check, kKernelExtend, kCheckPageId, work.at.facts.request, page);
      if (looks_ahead) {
        look_ahead();
      } else {
        copier.load_page(p, work, pos + C::kTile);
      }
      barrier_wait(&shared.empty_k[stage.at], stage.parity ^ 1);
      copier.template copy<C::kDq>(k, cache_offset(place, p.k_stride_page, p.k_stride_token), work.end - pos, shared_address(shared.k[stage.at]));
      barrier_arrive_after_copies(&shared.full_k[stage.at]);
      barrier_wait(&shared.empty_v[stage.at], stage.parity ^ 1);
      copier.template copy<C::kDv>(v, cache_offset(place, p.v_stride_page, p.v_stride_token), work.end - pos, shared_address(shared.v[stage.at]));
      barrier_arrive_after_copies(&shared.full_v[stage.at]);
      stage.advance();
    };
    const bool is_last = work.num_rows == 0, has_tile = !is_last && work.begin < work.end;
    if (has_tile) copy_tile(work.begin, false);
    // q after the first tile: its place may be in use to the end of an earlier unit.
    barrier_wait(&shared.empty_q[q][0], unit / C::kQs % 2 ^ 1);
    if (threadIdx.x >= 32) {
      if (has_tile) copy_q<C, 1>(p, shared.magic, work, shared_address(shared.q[q]));
      barrier_arrive_after_copies(&shared.full_q[q][0]);
    } else {
      if (threadIdx.x == 0) barrier_arrive(&shared.full_q[q][0]);  // the unit is written
      if (!is_last) make_next<C>(mapped, shared.magic, work, next, claimed);
    }
    if (is_last) break;
    int pos = work.begin + C::kTile;
    if (pos >= work.end) look_ahead();
    for (; pos < work.end; pos += C::kTile) copy_tile(pos, pos + C::kTile >= work.end);
  }
}

}  // namespace

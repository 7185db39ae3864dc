// The copying half of a decode kernel's warp: which units its block computes, and their KV on its way to shared memory.
//
// `C` is the kernel's Config: kOwn and kTile tokens, kGroups, layouts and copies of rows, see decode.cu.
#pragma once

#include "primitives/copy_rows.cuh"
#include "primitives/mask.cuh"
#include "primitives/paged.cuh"
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

// Ranges that a block claimed beyond its first, by number: the first warp claims, the others read. A warp is never so far
// behind the first one that kClaims do not do.
constexpr int kClaims = 8;
constexpr int kClaimAhead = 3;  // tiles

struct Claims {
  unsigned long long* shared;  // [kClaims]: (number, range); atomics alone touch them

  // Before the block's first barrier.
  __device__ __forceinline__ void clear() const {
    if (threadIdx.x < kClaims) shared[threadIdx.x] = 0;
  }
  __device__ __forceinline__ void publish(int number, int range) const {
    atomicExch(shared + number % kClaims, static_cast<unsigned long long>(number) << 32 | static_cast<uint32_t>(range));
  }
  __device__ __forceinline__ int await(int number) const {
    unsigned long long found;
    do {
      found = atomicAdd(shared + number % kClaims, 0ull);
    } while (static_cast<int>(found >> 32) != number);
    return static_cast<int>(found);
  }
};

// The copying half of a warp: runs kStages tiles ahead of its computing half.
// Its cursor lies in shared memory to spare registers: all lanes read it and step alike, lane 0 writes it back.
template <class C>
struct Loader {
  // Page ids on their way to shared memory, of the unit's first kStages tiles: of what the warp owns, tile by tile over the lanes.
  static constexpr int kFresh = (C::kStages * C::kOwn + 31) / 32;

  unsigned char* mine;  // the warp's Cursor, TileInfos and page ids
  int pos, end;         // the next tile's first token; end of its chunk
  int kv_head;
  bool has_more;
  bool is_fresh;        // the next tile is the first of its unit
  int fresh[kFresh];
  int claimed;          // first lane of the first warp: how many were claimed before, by any block; -1: not asked for yet

  __device__ __forceinline__ Cursor& cursor() const { return *reinterpret_cast<Cursor*>(mine); }
  __device__ __forceinline__ TileInfo& info(int stage) const { return reinterpret_cast<TileInfo*>(mine + sizeof(Cursor))[stage]; }

  // Page ids of what the warp owns of the tile that goes to a stage.
  __device__ __forceinline__ int* pages(int stage) const {
    return reinterpret_cast<int*>(mine + sizeof(Cursor) + C::kStages * sizeof(TileInfo)) + stage * C::kOwn;
  }

  __device__ __forceinline__ void start(const AttnParams& p, unsigned char* in_shared) {
    mine = in_shared;
    Cursor unit;
    has_more = unit.first(p);
    unit.num_claims = p.claim != 0 && unit.num_ranges > static_cast<int>(gridDim.x) ? 0 : -1;
    enter(p, unit);
  }

  __device__ __forceinline__ void step(const AttnParams& p, Cursor& unit, Claims claims) {
    const bool is_claiming = unit.num_claims >= 0;
    if (is_claiming && unit.left == 0) {
      ++unit.num_claims;
      int range = static_cast<int>(gridDim.x) + claimed;
      if (threadIdx.x == 0) {
        claims.publish(unit.num_claims, range);
      } else if (threadIdx.x % 32 == 0) {
        range = claims.await(unit.num_claims);
      }
      unit.range = __shfl_sync(~0u, range, 0);
    }
    has_more = unit.next(p, is_claiming ? 0 : static_cast<int>(gridDim.x));
    __syncwarp();  // all have read the cursor
    enter(p, unit);
  }

  // Asks for the next range when the last unit of this one has few tiles left to copy: early enough for the answer to be there
  // in time, and no earlier, since a block that others have overtaken should not take more.
  __device__ __forceinline__ void claim(const AttnParams& p) {
    if (claimed < 0 && end - pos <= kClaimAhead * C::kTile) claimed = atomicAdd(ptr<int>(p.claim), 1);
  }

  __device__ __forceinline__ void enter(const AttnParams& p, const Cursor& unit) {
    if (has_more) {
      chunk_bounds(unit.facts, unit.chunk, pos, end);
      kv_head = unit.kv_head;
      claimed = -1;
      if (threadIdx.x % 32 == 0) cursor() = unit;
      find_pages(p, unit.facts);
    }
    __syncwarp();
  }

  // Asks for the page ids of the first tiles of a unit, as many as there are stages. Those of a later tile are copied to shared
  // memory by the copies of the tile kStages before it: in a register they would be waited for wherever q may be, since the few
  // counters of loads under way are shared.
  __device__ __forceinline__ void find_pages(const AttnParams& p, const TileFacts& facts) {
    is_fresh = true;
#pragma unroll
    for (int i = 0; i < kFresh; ++i) {
      const int at = threadIdx.x % 32 + 32 * i, t = pos + at / C::kOwn * C::kTile + threadIdx.x / 32 * C::kOwn + at % C::kOwn;
      fresh[i] = t < end ? place_of<kKernelDecode>(p, facts.pages_begin, t, facts.request).page : 0;
    }
  }

  // Puts them where copies find them; `stage_idx`: of the first tile.
  __device__ __forceinline__ void put_pages(int stage_idx) {
    is_fresh = false;
#pragma unroll
    for (int i = 0; i < kFresh; ++i) {
      const int at = threadIdx.x % 32 + 32 * i, stage = stage_idx + at / C::kOwn;
      if (at < C::kStages * C::kOwn) pages(stage >= C::kStages ? stage - C::kStages : stage)[at % C::kOwn] = fresh[i];
    }
    __syncwarp();
  }

  // Addresses of what the warp owns of a tile: each lane has found one row of K and one of V, or, where there are but 16, one of
  // either. A copying lane asks the one that has its row.
  struct Addresses {
    uint64_t of_lane[C::kGroups];

    __device__ __forceinline__ const char* k(int row) const { return ptr<const char>(__shfl_sync(~0u, of_lane[0], row)); }
    __device__ __forceinline__ const char* v(int row) const {
      return ptr<const char>(__shfl_sync(~0u, of_lane[C::kGroups - 1], C::kGroups == 1 ? row + C::kOwn : row));
    }
  };

  __device__ __forceinline__ Addresses find_rows(const AttnParams& p, int first, int stage_idx) const {
    const int lane = threadIdx.x % 32, row = lane % C::kOwn, t = first + row;
    const Place place = {t < end ? pages(stage_idx)[row] : 0, t - page_of(p.page_magic, p.page_shift, t) * p.page_size};
    ATTN_CHECK(place.page >= 0 && place.page < p.num_pages, p.check, kKernelDecode, kCheckPageId, cursor().facts.request, place.page);
    auto at = [&](uint64_t plane, int64_t stride_page, int64_t stride_token, int64_t stride_head) {
      return plane + (kv_head * stride_head + cache_offset(place, stride_page, stride_token)) * C::KV::kBytes;
    };
    if constexpr (C::kGroups == 1) {
      const bool is_k = lane < C::kOwn;
      return {{at(is_k ? p.k : p.v, is_k ? p.k_stride_page : p.v_stride_page, is_k ? p.k_stride_token : p.v_stride_token,
                  is_k ? p.k_stride_head : p.v_stride_head)}};
    } else {
      return {{at(p.k, p.k_stride_page, p.k_stride_token, p.k_stride_head), at(p.v, p.v_stride_page, p.v_stride_token, p.v_stride_head)}};
    }
  }

  __device__ __forceinline__ bool needs_mask(const AttnParams& p, const TileFacts& t) const {
    const KeyRange first = visible_keys(p, t.q_pos), last = visible_keys(p, t.q_pos + t.q_len - 1);
    return pos + C::kTile > end || pos + C::kTile - 1 > first.last || pos < last.first;
  }

  // Starts copying the warp's tokens of the next tile into a stage, if there is one; commits in any case.
  __device__ __forceinline__ bool copy(const AttnParams& p, uint32_t stage, int stage_idx, Claims claims) {
    const bool copied = has_more;
    if (has_more) {
      const int lane = threadIdx.x % 32, r0 = lane / C::kLanesPerRow, in_row = lane % C::kLanesPerRow;
      const int first = pos + threadIdx.x / 32 * C::kOwn;
      if (is_fresh) put_pages(stage_idx);
      const Addresses addresses = find_rows(p, first, stage_idx);
#pragma unroll
      for (int i = 0; i < C::kPasses; ++i) {
        const int row = r0 + i * C::kRowsPerPass;
        const bool valid = first + row < end;
        copy_row<C>(stage, row, addresses.k(row), addresses.v(row), in_row, valid);
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
      if (threadIdx.x == 0 && unit.num_claims >= 0 && unit.left == 0) claim(p);
      __syncwarp();  // all have read the page ids
      const int ahead = first + C::kStages * C::kTile + lane;
      if (lane < C::kOwn && ahead < end) fetch_page<kKernelDecode>(p, unit.facts.pages_begin, ahead, pages(stage_idx) + lane);
      pos += C::kTile;
      if (is_last) {
        Cursor next = unit;
        step(p, next, claims);
      }
    }
    cp_async_commit();
    return copied;
  }
};

}  // namespace

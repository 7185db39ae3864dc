// The copying half of a decode kernel's warp: which units its block computes, and their KV on its way to shared memory.
//
// `C` is the kernel's Config: kOwn and kTile tokens, kGroups, layouts and copies of rows, see decode.cu.
#pragma once

#include "primitives/cp_async.cuh"
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
  unsigned char* mine;  // the warp's Cursor and TileInfos
  int pos, end;         // the next tile's first token; end of its chunk
  int kv_head;
  bool has_more;
  // Page ids of what the warp owns of the next two tiles: where that is 16 tokens, half of the lanes hold one tile's each, see half.
  int page[C::kGroups];
  int claimed;          // first lane of the first warp: the range to go on with; -1: not asked for yet

  __device__ __forceinline__ Cursor& cursor() const { return *reinterpret_cast<Cursor*>(mine); }
  __device__ __forceinline__ TileInfo& info(int stage) const { return reinterpret_cast<TileInfo*>(mine + sizeof(Cursor))[stage]; }

  __device__ __forceinline__ void start(const AttnParams& p, unsigned char* in_shared) {
    mine = in_shared;
    Cursor unit;
    has_more = unit.first(p);
    unit.num_claims = p.claim != 0 && unit.num_ranges > static_cast<int>(gridDim.x) ? 0 : -1;
    enter(p, unit);
    find_pages(p, true);
  }

  __device__ __forceinline__ void step(const AttnParams& p, Cursor& unit, Claims claims) {
    const bool is_claiming = unit.num_claims >= 0;
    if (is_claiming && unit.left == 0) {
      ++unit.num_claims;
      int range = claimed;
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
    if (claimed < 0 && end - pos <= kClaimAhead * C::kTile) claimed = static_cast<int>(gridDim.x) + atomicAdd(ptr<int>(p.claim), 1);
  }

  __device__ __forceinline__ void enter(const AttnParams& p, const Cursor& unit) {
    if (has_more) {
      chunk_bounds(unit.facts, unit.chunk, pos, end);
      kv_head = unit.kv_head;
      claimed = -1;
      if (threadIdx.x % 32 == 0) cursor() = unit;
    }
    __syncwarp();
  }

  // Page ids of the tile after the next, two tiles before its copies need them; after a step also of the next one.
  __device__ __forceinline__ void find_pages(const AttnParams& p, bool is_new_unit) {
    const int lane = threadIdx.x % 32, first = pos + threadIdx.x / 32 * C::kOwn;
    if (C::kGroups == 2) {
      page[0] = is_new_unit ? page_at(p, first + lane) : page[C::kGroups - 1];
      page[C::kGroups - 1] = page_at(p, first + C::kTile + lane);
    } else {
      const bool holds_next = lane / 16 == half();
      if (is_new_unit || !holds_next) page[0] = page_at(p, first + (holds_next ? 0 : C::kTile) + lane % 16);
    }
  }

  __device__ __forceinline__ int half() const { return pos / C::kTile % 2; }

  __device__ __forceinline__ int page_at(const AttnParams& p, int t) const {
    return has_more && t < end ? place_of<kKernelDecode>(p, cursor().facts.pages_begin, t, cursor().facts.request).page : 0;
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
      const char* k_base = ptr<const char>(p.k) + kv_head * p.k_stride_head * C::KV::kBytes + in_row * 16;
      const char* v_base = ptr<const char>(p.v) + kv_head * p.v_stride_head * C::KV::kBytes + in_row * 16;
      const int first = pos + threadIdx.x / 32 * C::kOwn;
#pragma unroll
      for (int i = 0; i < C::kPasses; ++i) {
        const int row = r0 + i * C::kRowsPerPass, t = first + row;
        const bool valid = t < end;
        const int its_page = __shfl_sync(~0u, page[0], C::kGroups == 1 ? row + half() * 16 : row);
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
      if (threadIdx.x == 0 && unit.num_claims >= 0 && unit.left == 0) claim(p);
      pos += C::kTile;
      if (is_last) {
        Cursor next = unit;
        step(p, next, claims);
      }
      find_pages(p, is_last);
    }
    cp_async_commit();
    return copied;
  }
};

}  // namespace

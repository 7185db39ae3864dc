// Walking the units of a plan: (tile, KV head, chunk), range by range. See AttnRange in params.h.
#pragma once

#include "check.cuh"

// What a kernel needs of an AttnTile, in registers.
struct TileFacts {
  int request, q_begin;
  int q_len, q_pos, kv_begin, kv_end;
  int kv_len, pages_begin, chunk_len, num_chunks;
  int first_partial;
};

__device__ __forceinline__ TileFacts load_tile(const AttnParams& p, int tile) {
  const AttnTile* entry = ptr<const AttnTile>(p.tiles) + tile;
  const int4 a = load_table4(&entry->mask_begin), b = load_table4(&entry->q_len), c = load_table4(&entry->kv_len);
  return {a.z, a.w, b.x, b.y, b.z, b.w, c.x, c.y, c.z, c.w, load_table(&entry->first_partial)};
}

// First workspace row of a unit.
__device__ __forceinline__ int64_t partial_row(const AttnParams& p, const TileFacts& t, int kv_head, int chunk) {
  return t.first_partial + (static_cast<int64_t>(kv_head) * t.num_chunks + chunk) * t.q_len * p.group_size;
}

// KV positions [begin, end) of a chunk of a tile; empty where the tile sees nothing.
__device__ __forceinline__ void chunk_bounds(const TileFacts& t, int chunk, int& begin, int& end) {
  const int start = (t.kv_begin / t.chunk_len + chunk) * t.chunk_len;
  begin = max(start, t.kv_begin);
  end = t.kv_end - start > t.chunk_len ? start + t.chunk_len : t.kv_end;
}

// Tests what the host promises of a tile (checked flavour).
template <int kKernel>
__device__ __forceinline__ void check_tile(const AttnParams& p, int tile, const TileFacts& t, int max_rows) {
#ifdef ATTN_CHECKED
  bool ok = t.q_len >= 1 && t.q_begin >= 0 && t.q_begin <= p.num_rows - t.q_len && t.kv_begin >= 0 && t.kv_end >= t.kv_begin &&
            t.kv_end <= t.kv_len && t.chunk_len >= 1 && t.num_chunks >= 1 && static_cast<int64_t>(t.q_len) * p.group_size <= max_rows;
  if (ok) {
    const int last = max(t.kv_end - 1, t.kv_begin);
    ok = t.num_chunks == last / t.chunk_len - t.kv_begin / t.chunk_len + 1;
  }
  ATTN_CHECK(ok, p.check, kKernel, kCheckTile, t.request, tile);
  if (t.num_chunks > 1) {
    const int64_t end = partial_row(p, t, p.num_kv_heads, 0);
    ATTN_CHECK(p.partial_out != 0 && end <= p.num_partial_rows, p.check, kKernel, kCheckPartialRow, t.request, end);
  }
#endif
}

// Tests the shape that a kernel was built for (checked flavour).
template <int kKernel, int kDq, int kDv>
__device__ __forceinline__ void check_shape(const AttnParams& p) {
  ATTN_CHECK(p.head_dim_qk == kDq && p.head_dim_vo == kDv && p.num_qo_heads == p.num_kv_heads * p.group_size, p.check, kKernel, kCheckShape,
             -1, p.head_dim_qk);
}

// The units of a thread block, in order. All threads hold the same cursor.
template <int kKernel, int kMaxRows>
struct alignas(16) UnitCursor {
  int tile, kv_head, chunk;  // the unit
  int left;                  // units after it in the range
  int range, num_ranges;     // the next range
  TileFacts facts;           // of `tile`

  // Before the first unit; `first` is the first range.
  __device__ __forceinline__ void init(const AttnParams& p, int first) {
    num_ranges = load_table(&ptr<const AttnStep>(p.step)->num_ranges);
    range = first;
    left = 0;
  }

  // Unit `number` of ranges that are a chunk of a tile each, for every KV head; false where it is beyond them.
  __device__ __forceinline__ bool take_unit(const AttnParams& p, int number) {
    const int of_ranges = number / p.num_kv_heads;
    if (of_ranges >= num_ranges) return false;
    const int4 r = load_table4(ptr<const AttnRange>(p.ranges) + of_ranges);
    tile = r.x, kv_head = number - of_ranges * p.num_kv_heads, chunk = r.z, left = 0;
    enter_tile(p);
    return true;
  }

  __device__ __forceinline__ void enter_tile(const AttnParams& p) {
#ifdef ATTN_CHECKED
    const int num_tiles = load_table(&ptr<const AttnStep>(p.step)->num_tiles);
    ATTN_CHECK(tile >= 0 && tile < num_tiles && kv_head >= 0 && kv_head < p.num_kv_heads && left >= 0, p.check, kKernel, kCheckRange, -1,
               tile);
#endif
    facts = load_tile(p, tile);
    check_tile<kKernel>(p, tile, facts, kMaxRows);
    ATTN_CHECK(chunk >= 0 && chunk < facts.num_chunks, p.check, kKernel, kCheckRange, facts.request, tile);
  }

  // Goes to the next unit; false where there is none. `stride`: ranges to go on to the next one.
  __device__ __forceinline__ bool next(const AttnParams& p, int stride) {
    bool is_new_tile = false;
    if (left > 0) {
      if (++chunk == facts.num_chunks) {
        chunk = 0;
        if (++kv_head == p.num_kv_heads) {
          kv_head = 0;
          ++tile;
          is_new_tile = true;
        }
      }
    } else {
      do {
        if (range >= num_ranges) return false;
        const int4 r = load_table4(ptr<const AttnRange>(p.ranges) + range);
        tile = r.x, kv_head = r.y, chunk = r.z, left = r.w;
        range += stride;
      } while (left == 0);
      is_new_tile = true;
    }
    --left;
    if (is_new_tile) enter_tile(p);
    return true;
  }
};

// The end of a block that claimed ranges, by one thread: the last block leaves zeros for the next launch.
__device__ __forceinline__ void leave_claims(const AttnParams& p) {
  __threadfence();
  if (atomicAdd(ptr<int>(p.claim) + 1, 1) == static_cast<int>(gridDim.x) - 1) {
    ptr<int>(p.claim)[0] = 0;
    ptr<int>(p.claim)[1] = 0;
  }
}

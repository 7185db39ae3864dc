// What extend.cu copies and in which order: the kernel's shape, a block's items, and their KV on its way to shared memory.
#pragma once

#include "primitives/copy_rows.cuh"
#include "primitives/fp8.cuh"
#include "primitives/mask.cuh"
#include "primitives/paged.cuh"
#include "primitives/units.cuh"

namespace {

// What a block does at a time: rows [first_row, first_row + kRows) of a unit, over the unit's chunk.
struct Item {
  UnitCursor<kKernelExtend, INT32_MAX> unit;
  uint64_t k, v;               // addresses of the unit's head in K and V
  int begin, end;              // the chunk
  int clear_begin, clear_end;  // keys of the chunk that all rows see by causal mask and window
  int first_row, num_rows;     // num_rows: of the unit; 0: there is no item, the block's work is done
  uint32_t group_magic;        // 2^31 / group_size, rounded up
  int claimed;                 // see claim_after; thread 0's own

  // row / group_size, exact while row x group_size < 2^31
  __device__ __forceinline__ int token_of(int row) const {
    return static_cast<int>((static_cast<uint64_t>(static_cast<uint32_t>(row)) * group_magic) >> 31);
  }
};

// Where a token of a tile is: the addresses of its rows of K and V. Before a thread makes one of them, the token's page id
// comes to the same place.
struct alignas(16) RowPlace {
  uint64_t k, v;
};

template <class Q_, class KV_, int kDq_, int kDv_, bool kGeneral_, int kRows_>
struct Config {
  using Q = Q_;
  using KV = KV_;
  static constexpr int kDq = kDq_, kDv = kDv_, kRows = kRows_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr bool kFp8 = Same<KV, Fp8>::value;
  using Math = typename Either<kFp8, F16, Q>::T;  // e4m3 is a subset of f16

  static constexpr int kMt = 2;                     // 16-row tiles of a warp
  static constexpr int kParts = kDv > 128 ? 2 : 1;  // warps that have the same 32 rows
  static constexpr int kWarps = kRows / 32 * kParts;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr bool kIsTight = (kDq == 192 && kDv == 128) || (kDv == 128 && kGeneral) || ((kDv == 96 || kDv == 128) && kFp8);
  static constexpr bool kIsCramped = kDq == 64 && !kFp8 && !kGeneral;  // three blocks an SM
  static constexpr int kTile = kIsTight ? 32 : 64;                     // what registers and shared memory allow
  static constexpr int kTokens = kTile / kParts;                       // tokens of a tile that a warp makes scores of
  static constexpr int kDims = kDv / kParts;                           // dims that a warp sums
  static constexpr int kQRow = kDq * 2, kKRow = kDq * KV::kBytes, kVRow = kDv * KV::kBytes;  // bytes
  using QLayout = RowLayout<kQRow, !kIsCramped>;
  using KLayout = RowLayout<kKRow, !kIsCramped>;
  using VLayout = RowLayout<kVRow, !kIsCramped>;
  using WeightsLayout = RowLayout<kTile * 2>;
  static constexpr int kVAt = kTile * KLayout::kPitch;  // V follows K in a stage
  static constexpr int kStageBytes = kVAt + kTile * VLayout::kPitch;
  static constexpr int kWeightsBytes = kParts == 2 ? 32 * WeightsLayout::kPitch : 0;  // of a pair
  static constexpr int kStagesAt = kRows * QLayout::kPitch;
  static constexpr int kWeightsAt = kStagesAt + 2 * kStageBytes;
  static constexpr int kPlacesAt = kWeightsAt + kRows / 32 * kWeightsBytes;
  static constexpr int kItemsAt = kPlacesAt + 2 * kTile * static_cast<int>(sizeof(RowPlace));
  static constexpr int kSharedBytes = kItemsAt + 3 * static_cast<int>(sizeof(Item));

  // Copying: kLanesPerRow threads share a row; each thread takes the rows r0, r0 + kRowsPerPass, ...
  static constexpr int kLanesPerRow = at_most(kKRow % 128 == 0 ? 8 : kKRow % 64 == 0 ? 4 : 2, kVRow % 128 == 0 ? 8 : kVRow % 64 == 0 ? 4 : 2);
  static constexpr int kKCopies = kKRow / 16 / kLanesPerRow, kVCopies = kVRow / 16 / kLanesPerRow;
  static constexpr int kRowsPerPass = at_most(kThreads / kLanesPerRow, kTile);
  static constexpr int kPasses = kTile / kRowsPerPass;

  // Two threads make the places of a token's rows.
  static __device__ __forceinline__ bool makes_places(uint32_t thread) { return kThreads == 2 * kTile || thread < 2 * kTile; }
  static_assert(kThreads >= 2 * kTile, "");
  static_assert(kTile % kRowsPerPass == 0 && kDq % 16 == 0 && kDv % 16 == 0 && kDv <= kDq, "");
};

// The thread's number, made anew each time: what copying makes of it would else be kept in registers all the time.
__device__ __forceinline__ uint32_t fresh_thread() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Of the places of a tile the one that a thread makes: that of a row of K, or of V for threads from kTile on.
template <class C>
__device__ __forceinline__ uint64_t* place_of_thread(RowPlace* places, uint32_t thread) {
  return reinterpret_cast<uint64_t*>(places + thread % C::kTile) + thread / C::kTile;
}

// Starts fetching the page ids of the tile at `pos`.
template <class C>
__device__ __forceinline__ void fetch_pages(const AttnParams& p, const Item& item, int pos, RowPlace* places) {
  const uint32_t thread = fresh_thread();
  const int t = pos + static_cast<int>(thread % C::kTile);
  if (C::makes_places(thread) && t < item.end) {
    fetch_page<kKernelExtend>(p, item.unit.facts.pages_begin + page_of(p.page_magic, p.page_shift, t), reinterpret_cast<int*>(place_of_thread<C>(places, thread)));
  }
}

// Makes places of page ids that this very thread fetched, and that have come. Beyond the chunk: any that exist.
template <class C>
__device__ __forceinline__ void make_places(const AttnParams& p, const Item& item, int pos, RowPlace* places) {
  const uint32_t thread = fresh_thread();
  if (!C::makes_places(thread)) return;
  const bool is_v = thread >= C::kTile;
  const int t = pos + static_cast<int>(thread % C::kTile);
  uint64_t* to = place_of_thread<C>(places, thread);
  int64_t at = 0;
  if (t < item.end) {
    const Place place = {*reinterpret_cast<const int*>(to), t - page_of(p.page_magic, p.page_shift, t) * p.page_size};
    ATTN_CHECK(place.page >= 0 && place.page < p.num_pages, p.check, kKernelExtend, kCheckPageId, item.unit.facts.request, place.page);
    at = is_v ? cache_offset(place, p.v_stride_page, p.v_stride_token) : cache_offset(place, p.k_stride_page, p.k_stride_token);
  }
  *to = (is_v ? item.v : item.k) + at * C::KV::kBytes;
}

// Starts copying the K and V of the tile at `pos` into a stage.
template <class C>
__device__ __forceinline__ void copy_tile(const Item& item, int pos, const RowPlace* places, uint32_t stage) {
  const uint32_t thread = fresh_thread();
  const int r0 = static_cast<int>(thread / C::kLanesPerRow), lane = static_cast<int>(thread % C::kLanesPerRow);
  if (C::kThreads / C::kLanesPerRow > C::kRowsPerPass && r0 >= C::kRowsPerPass) return;
  const int num_valid = item.end - pos;
  RowPlace from[C::kPasses];
#pragma unroll
  for (int i = 0; i < C::kPasses; ++i) from[i] = places[r0 + i * C::kRowsPerPass];
#pragma unroll
  for (int i = 0; i < C::kPasses; ++i) {
    const int row = r0 + i * C::kRowsPerPass;
    const bool valid = row < num_valid;
    copy_row<C>(stage, row, ptr<const char>(from[i].k), ptr<const char>(from[i].v), lane, valid);
  }
}

// Claims the unit that the item after `item` is of, if it is one to be claimed.
template <class C>
__device__ __forceinline__ int claim_after(const AttnParams& p, const Item& item) {
  const bool is_last = item.first_row + C::kRows >= item.num_rows;
  return p.claim != 0 && item.num_rows > 0 && is_last ? static_cast<int>(gridDim.x) + atomicAdd(ptr<int>(p.claim), 1) : 0;
}

// The item after `item`, which is not the end.
template <class C>
__device__ __forceinline__ Item item_after(const AttnParams& p, const Item& item) {
  Item next = item;
  next.first_row += C::kRows;
  if (next.first_row < next.num_rows) return next;
  auto& unit = next.unit;
  const bool has_unit = p.claim != 0 ? unit.take_unit(p, item.claimed) : unit.next(p, static_cast<int>(gridDim.x));
  next.first_row = next.num_rows = next.begin = next.end = 0;
  if (!has_unit) return next;
  const TileFacts& tile = unit.facts;
  next.num_rows = tile.q_len * p.group_size;
  chunk_bounds(tile, unit.chunk, next.begin, next.end);
  next.clear_begin = visible_keys(p, tile.q_pos + tile.q_len - 1).first;
  next.clear_end = min(visible_keys(p, tile.q_pos).last, next.end - 1) + 1;
  next.k = p.k + unit.kv_head * p.k_stride_head * C::KV::kBytes;
  next.v = p.v + unit.kv_head * p.v_stride_head * C::KV::kBytes;
  return next;
}

}  // namespace

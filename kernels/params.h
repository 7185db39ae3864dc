// Parameters of every kernel: plain structs, passed by value as the single kernel argument.
//
// This header is the whole contract between host and kernels; the host's twins have the same fields in the same
// order, and both sides assert the sizes. Types are of fixed width, fields are ordered by falling alignment, so there
// is no padding. Every pointer is a device address; 0 means absent where that is allowed. Strides count elements
// and are 64-bit; tables are i32 and widen before the first multiplication by a stride.
//
// What the host promises of every launch (the checked flavour tests it on the device, see CheckRecord):
// - K, V, q and out rows are 16-byte aligned: base addresses, and all strides times the element size;
// - page and token strides of caches are in [0, 2^31) elements;
// - page ids, slots and rows in the tables are in range; `kv_indices` beyond a request's pages is never read;
// - a tile of a decode kernel has q_len x group_size <= its `rows` (see the .inst lists);
// - tables live unchanged until the launch has ended; for a captured graph they are rewritten in place between replays.
//   Grids, workspace and pointers stay what they were; all lengths are read from the tables.
//
// Conventions: scores are q.k x k_scale x sm_scale, then softcap, then + slope x (key position - query position),
// then the masks. out = sum p v / (sum p + e^sink); LSE is natural, f32. A row that sees nothing gives 0 and -inf
// (or 0 and its sink). Query row r of a tile sits at position q_pos + r (may be negative).
#pragma once

#include <stdint.h>

typedef uint64_t DevicePtr;  // a device address

// Head of a step's tables: the only lengths that kernels read. [1]
struct AttnStep {
  int32_t num_tiles;        // entries of `tiles`
  int32_t num_ranges;       // entries of `ranges`
  int32_t num_merge_units;  // entries of `merge_units`
  int32_t zero_begin;       // rows [zero_begin, num_rows) of out become 0, those of lse -inf; num_rows: none
};

// A run of query tokens of one request and the KV that any of them sees (attn-metadata's plan::Tile). [num_tiles]
struct AttnTile {
  int64_t mask_begin;     // bit of (first query of the tile, key 0) in custom_mask; the next query is kv_len bits on
  int32_t request;        // the request, for messages only
  int32_t q_begin;        // row of q, out and lse of the tile's first query
  int32_t q_len;          // query tokens, >= 1
  int32_t q_pos;          // position of the first query: kv_len - request's q_len + queries before the tile
  int32_t kv_begin;       // first KV position that any query of the tile sees
  int32_t kv_end;         // one past the last; kv_begin where they see nothing
  int32_t kv_len;         // KV tokens of the request
  int32_t pages_begin;    // first entry of the request in kv_indices; without kv_indices: row of its first token
  int32_t chunk_len;      // chunk boundaries are multiples of this KV position; INT32_MAX: one chunk
  int32_t num_chunks;     // chunks that [kv_begin, kv_end) touches, >= 1; > 1: results go to the workspace
  int32_t first_partial;  // first workspace row of the tile, where num_chunks > 1
  int32_t reserved[3];    // 0
};

// Consecutive units: all chunks of (tile, KV head), then of the next KV head, then of the next tile (but see AttnParams for
// claimed units of `extend_*`). [num_ranges]
struct AttnRange {
  int32_t tile;       // first unit
  int32_t kv_head;    //
  int32_t chunk;      //
  int32_t num_units;  // >= 0
};

// Page ids of an AttnStart.
static const int32_t kStartPages = 16;

// What a block of `decode_*` needs for its first unit, in one place: a chunk of a tile, and ids of its first pages. Block b reads
// number b / num_kv_heads. [grid / num_kv_heads, rounded up]
struct AttnStart {
  int32_t tile;
  int32_t chunk;       // -1: there are fewer ranges, and the rest is zeros
  int32_t begin, end;  // KV positions of the chunk that the tile sees
  int32_t request;     // these as in AttnTile
  int32_t q_begin;
  int32_t q_len;
  int32_t q_pos;
  int32_t pages_begin;
  int32_t num_chunks;
  int32_t first_partial;
  int32_t num_pages;   // ids that are here, from that of `begin` on
  int32_t pages[16];   // [kStartPages]
  int32_t reserved[4];
};

// Partial states to merge: query heads [head_begin, head_begin + num_heads) of one row. [num_merge_units]
struct AttnMergeUnit {
  int32_t row;         // row of out
  int32_t tile;        // its tile, with num_chunks > 1
  int32_t head_begin;  // first query head
  int32_t num_heads;   // 1..=kMergeHeads; of a tile of more than kMergeWarpChunks chunks: minus the segment of dims, of one head
};

// One warp merges a head of up to this many chunks; beyond, a whole thread block merges a segment of its dims.
static const int32_t kMergeWarpChunks = 32;
static const int32_t kMergeHeads = 8;
static const int32_t kMergeSegment = 32;

// Attention of one layer: `plain_*`, `decode_*`, `extend_*`, then `merge_partials_*` where num_merge_units > 0.
// The workspace row of (kv_head, chunk, query r of the tile, head h of the group) is
//   first_partial + ((kv_head x num_chunks + chunk) x q_len + r) x group_size + h.
//
// Grid: one-dimensional, any size. `plain_*`, and `extend_*` without `claim`: block b takes ranges b, b + grid, ... Others take units
// by number: number n is range n / num_kv_heads, which is one chunk of a tile for all KV heads (num_units of them, whatever order
// AttnRange has otherwise), and KV head n % num_kv_heads. Block b takes number b, then, with `claim`, what is next when it is free,
// and without it (`decode_*`) b + grid, ...
// Results do not depend on grid, ranges or claims. Suggested: num SMs x ctas_per_sm of the .inst entry.
struct AttnParams {
  DevicePtr q;             // [num_rows, num_qo_heads, head_dim_qk]
  DevicePtr out;           // [num_rows, num_qo_heads, head_dim_vo], dtype of q
  DevicePtr lse;           // f32 [num_rows, num_qo_heads], packed; 0: not wanted
  DevicePtr k;             // [num_pages, page_size, num_kv_heads, head_dim_qk] by strides
  DevicePtr v;             // [num_pages, page_size, num_kv_heads, head_dim_vo] by strides
  DevicePtr kv_indices;    // i32 page ids; 0: ragged, page of position t is pages_begin + t / page_size
  DevicePtr step;          // AttnStep
  DevicePtr tiles;         // AttnTile [num_tiles]
  DevicePtr ranges;        // AttnRange [num_ranges]
  DevicePtr merge_units;   // AttnMergeUnit [num_merge_units]; 0 where nothing is split
  DevicePtr partial_out;   // f32 [partial rows, head_dim_vo], normalised; 0 where nothing is split
  DevicePtr partial_lse;   // f32 [partial rows], base 2, without sink
  DevicePtr sinks;         // f32 [num_qo_heads]; 0: none
  DevicePtr alibi_slopes;  // f32 [num_qo_heads]; 0: none ("general" kernels only)
  DevicePtr custom_mask;   // packed bits, least significant first; 0: none ("general" kernels only)
  DevicePtr starts;        // AttnStart; read by `decode_*` alone
  DevicePtr counters;      // i32 [num_tiles, num_kv_heads], zeros before the first launch, left as zeros: partial states that are there,
                           //   counted by `decode_*` for a merging kernel that starts early; 0: that waits for the end of the kernel before it
  DevicePtr claim;         // i32 [2], zeros before the first launch, left as zeros; 0: blocks go by stride. See below
  DevicePtr check;         // CheckRecord, zeroed; read by the checked flavour alone

  int64_t q_stride_row;    // elements between rows
  int64_t q_stride_head;
  int64_t out_stride_row;
  int64_t out_stride_head;
  int64_t k_stride_page;
  int64_t k_stride_token;
  int64_t k_stride_head;
  int64_t v_stride_page;
  int64_t v_stride_token;
  int64_t v_stride_head;

  int32_t num_rows;        // rows of q and out, padding included
  int32_t num_qo_heads;
  int32_t num_kv_heads;
  int32_t group_size;      // num_qo_heads / num_kv_heads
  int32_t page_size;       // tokens, >= 1
  uint32_t page_magic;     // t / page_size == (uint64(t) x page_magic) >> page_shift for 0 <= t < 2^31, where
  uint32_t page_shift;     //   page_shift = 31 + ceil(log2 page_size), page_magic = ceil(2^page_shift / page_size)
  int32_t causal;          // 1: a query sees keys at or before its position
  int32_t window_left;     // tokens before itself that a query sees; -1: no limit
  float sm_scale;          // > 0
  float softcap;           // c of c tanh(s / c); 0: off ("general" kernels only)
  float k_scale;           // stored x scale = value; 1 where the format has none
  float v_scale;
  int32_t head_dim_qk;     // the checked flavour and plain_* read these two; others have them built in
  int32_t head_dim_vo;
  int32_t num_pages;       // limits for the checked flavour
  int32_t num_kv_indices;
  int32_t num_partial_rows;
};

// A CUtensorMap: how the device finds boxes of a tensor by itself.
struct TensorMap {
  uint64_t words[16];
} __attribute__((aligned(64)));

// The single argument of `extend_sm90_*`. Dimensions of the maps, the innermost first:
// - q, out: 64 elements of a row; query heads; rows; panels of 64 elements. A box is the heads of a group, 64 / group_size rows;
// - caches: 64 elements of a row; 8 tokens; panels of 64 elements; the page's groups of 8 tokens; steps between (page, KV head).
//   A box is 16 tokens of a page and head. Tiles of KV that do not begin at a multiple of 16 do not come by the maps.
// Boxes are swizzled by 128 bytes, those of e4m3 not at all.
struct AttnMappedParams {
  AttnParams attn;
  int32_t has_maps;      // 1: of k and v; page_size is a multiple of 16
  int32_t has_row_maps;  // 1: of q and out; group_size divides 64; with has_maps only, unless KV is e4m3
  int32_t k_page_step;   // a cache's last coordinate is page x page step + KV head x head step
  int32_t k_head_step;
  int32_t v_page_step;
  int32_t v_head_step;
  int32_t reserved[14];  // 0
  TensorMap k_map;
  TensorMap v_map;
  TensorMap q_map;
  TensorMap out_map;
};

// Writes new K and V to their slots: `store_kv_*`. Optionally rotates q and k first (RoPE).
// Grid: one-dimensional, any size; block-stride over rows.
struct StoreKvParams {
  DevicePtr k;          // [num_rows, num_kv_heads, head_dim_qk]
  DevicePtr v;          // [num_rows, num_kv_heads, head_dim_vo]
  DevicePtr k_cache;    // as in AttnParams; dtype of the entry's name
  DevicePtr v_cache;
  DevicePtr slots;      // i32 [num_rows]: page x page_size + offset; < 0: the row is skipped
  DevicePtr q;          // [num_rows, num_qo_heads, head_dim_qk], read where positions is given and q_out is not 0
  DevicePtr q_out;      // rotated q; may be q itself
  DevicePtr positions;  // i32 [num_rows] RoPE positions; 0: no rotation
  DevicePtr cos_sin;    // f32 [max position + 1, rotary_dim]: rotary_dim / 2 cosines, then as many sines
  DevicePtr check;      // as in AttnParams

  int64_t k_stride_row;  // sources, elements
  int64_t k_stride_head;
  int64_t v_stride_row;
  int64_t v_stride_head;
  int64_t q_stride_row;
  int64_t q_stride_head;
  int64_t q_out_stride_row;
  int64_t q_out_stride_head;
  int64_t k_cache_stride_page;
  int64_t k_cache_stride_token;
  int64_t k_cache_stride_head;
  int64_t v_cache_stride_page;
  int64_t v_cache_stride_token;
  int64_t v_cache_stride_head;

  int32_t num_rows;
  int32_t num_qo_heads;  // 0 where q is not rotated
  int32_t num_kv_heads;
  int32_t head_dim_qk;   // multiples of 8 (of 16 for an fp8 cache)
  int32_t head_dim_vo;
  int32_t page_size;
  uint32_t page_magic;   // as in AttnParams
  uint32_t page_shift;
  float k_scale;         // fp8: stored = round to nearest even of value / scale, saturated at +-448; NaN stays NaN
  float v_scale;
  int32_t rotary_dim;    // leading elements of q and k that rotate; a multiple of 16, <= head_dim_qk
  int32_t interleaved;   // 1: pairs (2i, 2i + 1); 0: pairs (i, i + rotary_dim / 2)
  int32_t num_pages;     // limits for the checked flavour
  int32_t max_position;
};

// Merges partial states of disjoint KV: `merge_states_*`. LSE is natural, f32, packed [num_rows, num_heads].
// n states: state i is at out_states + i x stride_state (and lse_states + i x num_rows x num_heads), i < num_states.
// Two states in unrelated places: num_states = 2 and out_second, lse_second are not 0.
// The result may overwrite state 0. Merging with an empty state (LSE = -inf) gives the other bit for bit.
// Grid: one-dimensional, any size; grid-stride over (row, head).
struct MergeStatesParams {
  DevicePtr out_states;  // [num_states, num_rows, num_heads, head_dim], packed, dtype of the entry's name
  DevicePtr lse_states;  // f32 [num_states, num_rows, num_heads]
  DevicePtr out_second;  // [num_rows, num_heads, head_dim]; 0: state 1 is in out_states
  DevicePtr lse_second;
  DevicePtr out;         // [num_rows, num_heads, head_dim]
  DevicePtr lse;         // f32 [num_rows, num_heads]; 0: not wanted
  int64_t stride_state;  // elements between states of out_states
  int32_t num_states;    // >= 1
  int32_t num_rows;
  int32_t num_heads;
  int32_t head_dim;      // a multiple of 8, <= 2048
};

// Which rule the checked flavour found broken. Kernels write the first record they find, then trap.
enum CheckRule : int32_t {
  kCheckNone = 0,
  kCheckPageId = 1,        // a page id outside 0..num_pages; value: the id
  kCheckKvIndex = 2,       // a page-table entry outside the table; value: its index
  kCheckTile = 3,          // a tile whose rows, KV range, chunks or size break the contract; value: the tile
  kCheckRange = 4,         // a range beyond the tiles or the heads; value: the tile
  kCheckPartialRow = 5,    // a workspace row out of bounds; value: the row
  kCheckSlot = 6,          // a slot beyond the pool; value: the slot
  kCheckPosition = 7,      // a RoPE position out of the table; value: the position
  kCheckMergeUnit = 8,     // a merge unit out of bounds; value: the row
  kCheckShape = 9,         // head dims of the parameters are not those of the kernel; value: head_dim_qk
};

// Which kernel wrote a record.
enum CheckKernel : int32_t {
  kKernelNone = 0,
  kKernelPlain = 1,
  kKernelDecode = 2,
  kKernelExtend = 3,
  kKernelMergePartials = 4,
  kKernelStoreKv = 5,
  kKernelMergeStates = 6,
};

// What the checked flavour leaves behind before it traps. `kernel` is 0 while nothing was found. [1]
// A trap ends the context, so the host keeps this in page-locked host memory that the device maps.
struct CheckRecord {
  int32_t kernel;   // CheckKernel
  int32_t rule;     // CheckRule
  int32_t block;    // blockIdx.x
  int32_t request;  // the request, or the row for store_kv; -1: unknown
  int64_t value;    // the offending value
};

#ifdef __cplusplus
static_assert(sizeof(AttnStep) == 16, "layout is part of the contract");
static_assert(sizeof(AttnTile) == 64, "layout is part of the contract");
static_assert(sizeof(AttnRange) == 16, "layout is part of the contract");
static_assert(sizeof(AttnStart) == 128, "layout is part of the contract");
static_assert(sizeof(AttnMergeUnit) == 16, "layout is part of the contract");
static_assert(sizeof(AttnParams) == 19 * 8 + 10 * 8 + 18 * 4, "layout is part of the contract");
static_assert(sizeof(AttnMappedParams) == sizeof(AttnParams) + 20 * 4 + 4 * 128, "layout is part of the contract");
static_assert(sizeof(StoreKvParams) == 10 * 8 + 14 * 8 + 14 * 4, "layout is part of the contract");
static_assert(sizeof(MergeStatesParams) == 7 * 8 + 4 * 4, "layout is part of the contract");
static_assert(sizeof(CheckRecord) == 24, "layout is part of the contract");
#endif

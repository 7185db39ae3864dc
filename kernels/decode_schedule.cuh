// What a decode block's scheduling warp hands to the warps that copy and compute: units, in segments.
//
// One warp of the block claims units, reads their tables, and brings their page ids and rows of q to shared memory, so that the
// others never wait for a table; the first unit all of them read for themselves (Start). A segment is at most kSegment tokens of a unit, a multiple of the tile unless the unit ends, so
// that room for page ids is bounded and tiles are the same wherever segments end. There are as many places for segments as a warp
// has stages, since each stage may hold a tile of another one.
//
// `C` is the kernel's Config, see decode.cuh.
#pragma once

#include "primitives/barrier.cuh"
#include "primitives/cp_async.cuh"
#include "primitives/mask.cuh"
#include "primitives/num.cuh"
#include "primitives/paged.cuh"
#include "primitives/units.cuh"

namespace {

constexpr int kMaxRows = 16;
// Tiles left to copy of a unit when the next one is claimed: early enough for that to be there in time, and no earlier in the last
// rounds, since a block that others have overtaken should not take more.
constexpr int kClaimAhead = 3, kClaimAheadAtLast = 2;
constexpr int kLastRounds = 2;  // units for each block

// What the end of a unit needs.
struct alignas(16) Unit {
  int kv_head;
  int num_rows;  // query tokens x heads of the group
  int q_begin;   // row of q of the first
  int partial;   // first workspace row of the unit; -1: writes results
  int counter;   // of the states that are merged with this one
  int reserved[3];
};

struct alignas(16) Segment {
  Unit unit;              // num_rows == 0: there are no more
  int begin, end;         // KV positions
  int ask_at;             // the position of the tile with which the next unit is asked for
  int first_page_idx;     // of the request's pages: that of `begin`
  int is_first, is_last;  // of its unit
  int q_place, q_parity;  // where the unit's rows of q are, and the phase of their barrier
  int tile, q_pos;
  int unmasked_begin, unmasked_end;  // every row sees the keys between
};

template <int kPlaces>
constexpr int kScheduleBarriers = 3 * kPlaces + 1;

// The part of shared memory by which the scheduling warp and the others talk.
template <class C>
struct Schedule {
  static constexpr int kPlaces = C::kStages;  // of segments, and of rows of q of their units

  unsigned char* shared;

  __device__ __forceinline__ uint64_t* barriers() const { return reinterpret_cast<uint64_t*>(shared + C::kScheduleBarriersAt); }
  __device__ __forceinline__ uint64_t* made(unsigned segment) const { return barriers() + segment % kPlaces; }
  __device__ __forceinline__ uint64_t* left(unsigned segment) const { return barriers() + kPlaces + segment % kPlaces; }
  __device__ __forceinline__ uint64_t* q_is_there(unsigned unit) const { return barriers() + 2 * kPlaces + unit % kPlaces; }
  __device__ __forceinline__ uint64_t* asked() const { return barriers() + 3 * kPlaces; }  // for the next unit

  // The phase in which a segment's barriers are when its turn comes.
  static __device__ __forceinline__ int parity(unsigned segment) { return segment / kPlaces % 2; }

  __device__ __forceinline__ Segment& segment(unsigned number) const {
    return reinterpret_cast<Segment*>(shared + C::kSegmentsAt)[number % kPlaces];
  }
  // Page ids from that of the segment's first token on.
  __device__ __forceinline__ int* pages(unsigned segment) const {
    return reinterpret_cast<int*>(shared + C::kPagesAt) + segment % kPlaces * C::kSegment;
  }
  __device__ __forceinline__ unsigned char* q(int place) const { return shared + C::kQAt + place * C::kQBytes; }

  // By all threads of the block, which meet afterwards. Rows of q that no unit has are zeros, or an earlier unit's.
  __device__ __forceinline__ void init() const {
    if (threadIdx.x < kPlaces) {
      barrier_init(made(threadIdx.x), 64), barrier_init(q_is_there(threadIdx.x), 64), barrier_init(left(threadIdx.x), 32 * C::kWarps);
    }
    if (threadIdx.x == kPlaces) barrier_init(asked(), 1);
    for (int i = threadIdx.x; i < kPlaces * C::kQBytes / 16; i += C::kThreads) reinterpret_cast<uint4*>(q(0))[i] = make_uint4(0, 0, 0, 0);
  }
};

// A block's first unit, which all warps read before anything else: one access to memory, where the tables of later units take three,
// one after the other. With it the copying warps, and the finishing warp, which brings its q, go ahead; none waits for the segments
// that the scheduling warp makes of it meanwhile.
struct Start {
  int4 unit, rows, pages;  // tile, chunk, begin, end; request, q_begin, q_len, q_pos; pages_begin, num_chunks, first_partial, num_pages
  int page;                // of these num_pages, that of the lane
  int kv_head;

  __device__ __forceinline__ void load(const AttnParams& p) {
    const int block = static_cast<int>(blockIdx.x), number = block / p.num_kv_heads;
    const AttnStart* from = ptr<const AttnStart>(p.starts) + number;
    unit = load_table4(&from->tile), rows = load_table4(&from->request), pages = load_table4(&from->pages_begin);
    page = load_table(&from->pages[threadIdx.x % kStartPages]);
    kv_head = block - number * p.num_kv_heads;
  }

  __device__ __forceinline__ bool has_unit() const { return unit.y >= 0; }
  __device__ __forceinline__ int begin() const { return unit.z; }
  __device__ __forceinline__ int end() const { return unit.w; }

  // The end of the unit's first segment: of the whole tiles whose page ids are here, at most a segment; begin() where there is none.
  template <class C>
  __device__ __forceinline__ int first_segment_end(const AttnParams& p) const {
    const int64_t end_of_pages = static_cast<int64_t>(page_of(p.page_magic, p.page_shift, begin()) + pages.w) * p.page_size;
    int until = end();
    if (end_of_pages < until) until = begin() + max(static_cast<int>(end_of_pages) - begin(), 0) / C::kTile * C::kTile;
    return min(until, begin() + C::kSegment);
  }
};

// By a warp: an arrival when all copies that it has started are there.
__device__ __forceinline__ void publish(uint64_t* barrier) {
  barrier_arrive_after_copies(barrier);
  barrier_arrive(barrier);
}

// Eight dims of q for fp8 KV: two lanes' quadruples, as f16; their first pairs go to slots 2c, their second pairs to slots 2c + 8.
template <class C>
__device__ __forceinline__ void put_q_of_fp8(uint4 x, unsigned char* rows, int row, int chunk) {
  using Q = typename C::Q;
  const float2 a = unpack2<Q>(x.x), b = unpack2<Q>(x.y), c = unpack2<Q>(x.z), d = unpack2<Q>(x.w);
  const int even = chunk & ~1, half = chunk % 2 * 8;
  *reinterpret_cast<uint2*>(rows + C::QLayout::at(row, even) + half) = make_uint2(pack2<F16>(a.x, a.y), pack2<F16>(c.x, c.y));
  *reinterpret_cast<uint2*>(rows + C::QLayout::at(row, even + 1) + half) = make_uint2(pack2<F16>(b.x, b.y), pack2<F16>(d.x, d.y));
}

// Copies a unit's rows of q, by a warp, 16 bytes a lane and step. fp8 KV: as f16, dims within 16 in the order in which bytes of K come
// (see scores).
template <class C>
__device__ __forceinline__ void hand_out_q(const AttnParams& p, const Schedule<C>& schedule, unsigned unit, int kv_head, int q_begin, int q_len) {
  constexpr int kChunks = C::kDq / 8;
  unsigned char* rows = schedule.q(unit % Schedule<C>::kPlaces);
  const int num = q_len * p.group_size * kChunks;
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < num; i += 32) {
    const int row = i / kChunks, chunk = i % kChunks;
    const int token = q_len == 1 ? 0 : row / p.group_size, head = kv_head * p.group_size + row - token * p.group_size;
    const uint16_t* from = ptr<const uint16_t>(p.q) + (q_begin + token) * p.q_stride_row + head * p.q_stride_head + chunk * 8;
    if constexpr (C::kFp8) {
      put_q_of_fp8<C>(*reinterpret_cast<const uint4*>(from), rows, row, chunk);
    } else {
      cp_async16(shared_address(rows) + C::QLayout::at(row, chunk), from);
    }
  }
  publish(schedule.q_is_there(unit));
}

// The scheduling warp.
template <class C>
struct Scheduler {
  using Cursor = UnitCursor<kKernelDecode, kMaxRows>;

  const AttnParams& p;
  Schedule<C> schedule;
  int number = static_cast<int>(blockIdx.x);  // of the unit
  unsigned num_segments = 0, num_units = 0;   // made; begun

  // Takes units and hands them out until there are none.
  __device__ __forceinline__ void run(const Start& start) {
    Cursor unit;
    unit.init(p, 0);
    if (hand_out_first(unit, start)) {
      for (;;) {
        barrier_wait_idly(schedule.asked(), (num_units - 1) % 2);
        number = next_number();
        if (!unit.take_unit(p, number)) break;
        int begin, end;
        chunk_bounds(unit.facts, unit.chunk, begin, end);
        hand_out(unit, begin, end);
      }
    }
    wait_for_place();
    if (threadIdx.x % 32 == 0) schedule.segment(num_segments).unit.num_rows = 0;
    publish(schedule.made(num_segments));
  }

  __device__ __forceinline__ int next_number() const {
    const int stride = static_cast<int>(gridDim.x);
    if (p.claim == 0) return number + stride;
    int claimed = 0;
    if (threadIdx.x % 32 == 0) claimed = atomicAdd(ptr<int>(p.claim), 1);
    return stride + __shfl_sync(~0u, claimed, 0);
  }

  __device__ __forceinline__ void wait_for_place() const { barrier_wait_idly(schedule.left(num_segments), Schedule<C>::parity(num_segments) ^ 1); }

  // The first unit begins with the tiles whose page ids came with it, of which the first kStages are copied without being told to
  // (see Loader::copy_first); what is left of it follows as usual. Its q is the finishing warp's.
  __device__ __forceinline__ bool hand_out_first(Cursor& unit, const Start& start) {
    const int begin = start.begin(), end = start.end();
    check_start(start);
    if (!start.has_unit()) return false;
    unit.tile = start.unit.x, unit.chunk = start.unit.y, unit.kv_head = start.kv_head;
    TileFacts& facts = unit.facts;
    facts.request = start.rows.x, facts.q_begin = start.rows.y, facts.q_len = start.rows.z, facts.q_pos = start.rows.w;
    facts.pages_begin = start.pages.x, facts.num_chunks = start.pages.y, facts.first_partial = start.pages.z;
    const int until = start.first_segment_end<C>(p);
    num_units = 1;
    if (until > begin) {
      const int lane = threadIdx.x % 32;
      if (lane < start.pages.w) schedule.pages(0)[lane] = start.page;
      hand_out_segment(unit, begin, end, begin, until);
      if (lane == 0) ask_early(schedule.segment(0));
    }
    if (until == begin || until < end) hand_out_rest(unit, begin, end, until);
    return true;
  }

  // Where the tile with which the next unit is asked for is one that is copied without being told to.
  __device__ __forceinline__ void ask_early(const Segment& first) const {
    if (first.ask_at >= first.begin && first.ask_at < first.begin + C::kStages * C::kTile) barrier_arrive(schedule.asked());
  }

  // Tests that the tables say the same of the first unit (checked flavour).
  __device__ __forceinline__ void check_start(const Start& start) const {
#ifdef ATTN_CHECKED
    Cursor unit;
    unit.init(p, 0);
    bool is_same = unit.take_unit(p, number) == start.has_unit();
    if (is_same && start.has_unit()) {
      const TileFacts& t = unit.facts;
      int begin, end;
      chunk_bounds(t, unit.chunk, begin, end);
      is_same = start.unit.x == unit.tile && start.unit.y == unit.chunk && start.begin() == begin && start.end() == end &&
                start.rows.x == t.request && start.rows.y == t.q_begin && start.rows.z == t.q_len && start.rows.w == t.q_pos &&
                start.pages.x == t.pages_begin && start.pages.y == t.num_chunks && start.pages.z == t.first_partial &&
                start.pages.w >= 0 && start.pages.w <= kStartPages;
    }
    ATTN_CHECK(is_same, p.check, kKernelDecode, kCheckRange, start.rows.x, start.unit.x);
#endif
  }

  __device__ __forceinline__ int claim_ahead(const Cursor& unit) const {
    const int left = unit.num_ranges * p.num_kv_heads - number;
    return left > kLastRounds * static_cast<int>(gridDim.x) ? kClaimAhead : kClaimAheadAtLast;
  }

  // A unit; q after page ids, since it is needed once tiles are there.
  __device__ __forceinline__ void hand_out(const Cursor& unit, int begin, int end) {
    ++num_units;
    const int until = min(begin + C::kSegment, end);
    hand_out_with_pages(unit, begin, end, begin, until);
    hand_out_q<C>(p, schedule, num_units - 1, unit.kv_head, unit.facts.q_begin, unit.facts.q_len);
    if (until < end) hand_out_rest(unit, begin, end, until);
  }

  // The segments of a unit from KV position `at` on: one at least.
  __device__ __forceinline__ void hand_out_rest(const Cursor& unit, int begin, int end, int at) {
    do {
      const int until = min(at + C::kSegment, end);
      hand_out_with_pages(unit, begin, end, at, until);
      at = until;
    } while (at < end);
  }

  __device__ __forceinline__ void hand_out_with_pages(const Cursor& unit, int begin, int end, int at, int until) {
    wait_for_place();
    fetch_pages(unit.facts, at, until);
    hand_out_segment(unit, begin, end, at, until);
  }

  // Its page ids are there or on their way.
  __device__ __forceinline__ void hand_out_segment(const Cursor& unit, int begin, int end, int at, int until) {
    if (threadIdx.x % 32 == 0) describe(unit, begin, end, at, until);
    publish(schedule.made(num_segments));
    ++num_segments;
  }

  __device__ __forceinline__ void fetch_pages(const TileFacts& facts, int begin, int end) const {
    if (begin >= end) return;
    const int first = page_of(p.page_magic, p.page_shift, begin), last = page_of(p.page_magic, p.page_shift, end - 1);
    int* to = schedule.pages(num_segments);
    for (int i = threadIdx.x % 32; first + i <= last; i += 32) fetch_page<kKernelDecode>(p, facts.pages_begin + first + i, to + i);
  }

  __device__ __forceinline__ void describe(const Cursor& unit, int begin, int end, int at, int until) const {
    const TileFacts& t = unit.facts;
    const KeyRange of_first = visible_keys(p, t.q_pos), of_last = visible_keys(p, t.q_pos + t.q_len - 1);
    const int partial = t.num_chunks > 1 ? static_cast<int>(partial_row(p, t, unit.kv_head, unit.chunk)) : -1;
    Segment& to = schedule.segment(num_segments);
    to.unit = {unit.kv_head, t.q_len * p.group_size, t.q_begin, partial, unit.tile * p.num_kv_heads + unit.kv_head, {}};
    to.ask_at = until < end ? -1 : max(at, begin + ((end - begin + C::kTile - 1) / C::kTile - claim_ahead(unit)) * C::kTile);
    to.begin = at, to.end = until, to.first_page_idx = page_of(p.page_magic, p.page_shift, at);
    to.is_first = at == begin, to.is_last = until == end;
    to.q_place = (num_units - 1) % Schedule<C>::kPlaces, to.q_parity = Schedule<C>::parity(num_units - 1);
    to.tile = unit.tile, to.q_pos = t.q_pos;
    to.unmasked_begin = max(begin, of_last.first), to.unmasked_end = min(end - 1, of_first.last) + 1;
  }
};

}  // namespace

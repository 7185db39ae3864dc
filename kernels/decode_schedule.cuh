// What a decode block's scheduling warp hands to the warps that copy and compute: units, in segments.
//
// One warp of the block claims units, reads their tables, and brings their page ids and rows of q to shared memory, so that the
// others never wait for a table. A segment is at most kSegment tokens of a unit, a multiple of the tile unless the unit ends, so
// that room for page ids is bounded and tiles are the same wherever segments end. There is a place for as many
// as a warp has stages, since each stage may hold a tile of another one.
//
// `C` is the kernel's Config, see decode.cu.
#pragma once

#include "primitives/barrier.cuh"
#include "primitives/cp_async.cuh"
#include "primitives/mask.cuh"
#include "primitives/num.cuh"
#include "primitives/paged.cuh"
#include "primitives/units.cuh"

namespace {

constexpr int kMaxRows = 16;
constexpr int kComputingMeet = 1;  // the block's barrier of the computing warps
// Tiles left to copy of a unit when the next one is claimed: early enough for that to be there in time, and no earlier, since a
// block that others have overtaken should not take more.
constexpr int kClaimAhead = 2;

// What the end of a unit needs.
struct alignas(16) Unit {
  int kv_head;
  int num_rows;  // query tokens x heads of the group
  int q_begin;   // row of q of the first
  int partial;   // first workspace row of the unit; -1: writes results
};

struct alignas(16) Segment {
  Unit unit;              // num_rows == 0: there are no more
  int begin, end;         // KV positions
  int first_page_idx;     // of the request's pages: that of `begin`
  int is_first, is_last;  // of its unit
  int q_place;
  int tile, q_pos;
  int unmasked_begin, unmasked_end;  // every row sees the keys between
};

// The part of shared memory by which the scheduling warp and the others talk.
template <class C>
struct Schedule {
  static constexpr int kPlaces = C::kStages;  // of segments, and of rows of q of their units

  unsigned char* shared;

  __device__ __forceinline__ uint64_t* barriers() const { return reinterpret_cast<uint64_t*>(shared + C::kScheduleBarriersAt); }
  __device__ __forceinline__ uint64_t* made(unsigned segment) const { return barriers() + segment % kPlaces; }
  __device__ __forceinline__ uint64_t* left(unsigned segment) const { return barriers() + kPlaces + segment % kPlaces; }
  __device__ __forceinline__ uint64_t* asked() const { return barriers() + 2 * kPlaces; }  // for the next unit
  static constexpr int kNumBarriers = 2 * kPlaces + 1;

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
    if (threadIdx.x < kPlaces) barrier_init(made(threadIdx.x), 64), barrier_init(left(threadIdx.x), 32 * C::kWarps);
    if (threadIdx.x == kPlaces) barrier_init(asked(), 1);
    for (int i = threadIdx.x; i < kPlaces * C::kQBytes / 16; i += C::kThreads) reinterpret_cast<uint4*>(q(0))[i] = make_uint4(0, 0, 0, 0);
  }
};

// The scheduling warp.
template <class C>
struct Scheduler {
  using Cursor = UnitCursor<kKernelDecode, kMaxRows>;

  const AttnParams& p;
  Schedule<C> schedule;
  unsigned num_segments = 0;  // made

  // Takes units and hands them out until there are none.
  __device__ __forceinline__ void run() {
    Cursor unit;
    int number = static_cast<int>(blockIdx.x);
    bool has_unit = unit.take_first_unit(p);
    for (unsigned num_units = 0; has_unit; ++num_units) {
      hand_out(unit, num_units % Schedule<C>::kPlaces);
      barrier_wait_idly(schedule.asked(), num_units % 2);
      number = next_number(number);
      has_unit = unit.take_unit(p, number);
    }
    wait_for_place();
    if (threadIdx.x % 32 == 0) schedule.segment(num_segments).unit.num_rows = 0;
    publish();
  }

  __device__ __forceinline__ int next_number(int number) const {
    const int stride = static_cast<int>(gridDim.x);
    if (p.claim == 0) return number + stride;
    int claimed = 0;
    if (threadIdx.x % 32 == 0) claimed = atomicAdd(ptr<int>(p.claim), 1);
    return stride + __shfl_sync(~0u, claimed, 0);
  }

  __device__ __forceinline__ void wait_for_place() const { barrier_wait_idly(schedule.left(num_segments), Schedule<C>::parity(num_segments) ^ 1); }

  // The segment is made when all copies are there.
  __device__ __forceinline__ void publish() {
    barrier_arrive_after_copies(schedule.made(num_segments));
    barrier_arrive(schedule.made(num_segments));
    ++num_segments;
  }

  __device__ __forceinline__ void hand_out(const Cursor& unit, int q_place) {
    int begin, end;
    chunk_bounds(unit.facts, unit.chunk, begin, end);
    int at = begin;
    do {
      const int until = min(at + C::kSegment, end);
      wait_for_place();
      fetch_pages(unit.facts, at, until);
      if (at == begin) fetch_q(unit, q_place);
      if (threadIdx.x % 32 == 0) describe(unit, begin, end, at, until, q_place);
      publish();
      at = until;
    } while (at < end);
  }

  __device__ __forceinline__ void fetch_pages(const TileFacts& facts, int begin, int end) const {
    if (begin >= end) return;
    const int first = page_of(p.page_magic, p.page_shift, begin), last = page_of(p.page_magic, p.page_shift, end - 1);
    int* to = schedule.pages(num_segments);
    for (int i = threadIdx.x % 32; first + i <= last; i += 32) fetch_page<kKernelDecode>(p, facts.pages_begin + first + i, to + i);
  }

  // Rows of q, 16 bytes a lane and step. fp8 KV: as f16, dims within 16 in the order in which bytes of K come (see scores).
  __device__ __forceinline__ void fetch_q(const Cursor& unit, int place) const {
    constexpr int kChunks = C::kDq / 8;
    unsigned char* rows = schedule.q(place);
    const int num = unit.facts.q_len * p.group_size * kChunks;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < num; i += 32) {
      const int row = i / kChunks, chunk = i % kChunks;
      const int token = row / p.group_size, head = unit.kv_head * p.group_size + row - token * p.group_size;
      const uint16_t* from = ptr<const uint16_t>(p.q) + (unit.facts.q_begin + token) * p.q_stride_row + head * p.q_stride_head + chunk * 8;
      if constexpr (C::kFp8) {
        put_q_of_fp8(*reinterpret_cast<const uint4*>(from), rows, row, chunk);
      } else {
        cp_async16(shared_address(rows) + C::QLayout::at(row, chunk), from);
      }
    }
  }

  // Eight dims are two lanes' quadruples: their first pairs go to slots 2c, their second pairs to slots 2c + 8.
  static __device__ __forceinline__ void put_q_of_fp8(uint4 x, unsigned char* rows, int row, int chunk) {
    using Q = typename C::Q;
    const float2 a = unpack2<Q>(x.x), b = unpack2<Q>(x.y), c = unpack2<Q>(x.z), d = unpack2<Q>(x.w);
    const int even = chunk & ~1, half = chunk % 2 * 8;
    *reinterpret_cast<uint2*>(rows + C::QLayout::at(row, even) + half) = make_uint2(pack2<F16>(a.x, a.y), pack2<F16>(c.x, c.y));
    *reinterpret_cast<uint2*>(rows + C::QLayout::at(row, even + 1) + half) = make_uint2(pack2<F16>(b.x, b.y), pack2<F16>(d.x, d.y));
  }

  __device__ __forceinline__ void describe(const Cursor& unit, int begin, int end, int at, int until, int q_place) const {
    const TileFacts& t = unit.facts;
    const KeyRange of_first = visible_keys(p, t.q_pos), of_last = visible_keys(p, t.q_pos + t.q_len - 1);
    const int partial = t.num_chunks > 1 ? static_cast<int>(partial_row(p, t, unit.kv_head, unit.chunk)) : -1;
    Segment& to = schedule.segment(num_segments);
    to.unit = {unit.kv_head, t.q_len * p.group_size, t.q_begin, partial};
    to.begin = at, to.end = until, to.first_page_idx = page_of(p.page_magic, p.page_shift, at);
    to.is_first = at == begin, to.is_last = until == end, to.q_place = q_place;
    to.tile = unit.tile, to.q_pos = t.q_pos;
    to.unmasked_begin = max(begin, of_last.first), to.unmasked_end = min(end - 1, of_first.last) + 1;
  }
};

}  // namespace

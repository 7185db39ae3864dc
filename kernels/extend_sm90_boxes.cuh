// The copying half of extend_sm90.cu where the caches have tensor maps: boxes of 16 tokens, which the device copies by itself.
//
// Each warp has a part: the first makes units, the second and the third copy K and V, the fourth copies rows of q and stores results.
// Units are made kMadeAhead ahead of what is copied. What of V no box may bring (tokens beyond the request's end must be zero), and
// tiles that do not begin at a multiple of 16, come by cp.async, of one warp: rarely, a tile of them takes it some microseconds.
#pragma once

#include "extend_sm90_fp8.cuh"

namespace {

// The first warp.
template <class C>
__device__ __forceinline__ void make_all(const AttnMappedParams& mapped, Shared<C>& shared, int claimed) {
  for (unsigned unit = 0; make_unit<C>(mapped, shared, unit, claimed); ++unit) {
  }
}

// Copies one cache, by one warp: lane i copies box i of a tile.
template <class C, bool kOfV>
struct BoxCopier {
  static constexpr int kDim = kOfV ? C::kDv : C::kDq, kGroup = kOfV ? C::kVGroup : C::kKGroup, kBoxes = C::kTile / kBoxTokens;
  static constexpr int kBoxBytes = kBoxTokens * kDim * 2;

  const AttnMappedParams& mapped;
  int page;  // of this lane's box in the tile to come

  // Starts loading the page id of this lane's box of the tile at `pos`.
  __device__ __forceinline__ void load_page(const Work& work, int pos) {
    const int t = pos + static_cast<int>(threadIdx.x % 32) * kBoxTokens;
    page = 0;
    if (threadIdx.x % 32 < kBoxes && t < work.end) page = page_at(mapped.attn, work.at.facts.request, work.at.facts.pages_begin, t);
  }

  // Copies rows [first, last) of the tile at `pos` by cp.async, those of tokens from the unit's end on as zeros, and waits for them.
  __device__ __forceinline__ void copy_rows(const Work& work, int pos, int first, int last, uint32_t to) const {
    const AttnParams& p = mapped.attn;
    const int lane = threadIdx.x % 32;
    const char* base = ptr<const char>(kOfV ? p.v : p.k) + work.at.kv_head * (kOfV ? p.v_stride_head : p.k_stride_head) * 2 + lane % 8 * 16;
#pragma unroll 1
    for (; first < last; first += 32) {
      const int t = pos + first + lane;  // of the row whose place this lane finds
      Place place = {0, 0};
      if (first + lane < last && t < work.end) {
        place = {page_at(p, work.at.facts.request, work.at.facts.pages_begin, t), t - page_of(p.page_magic, p.page_shift, t) * p.page_size};
        ATTN_CHECK(place.page >= 0 && place.page < p.num_pages, p.check, kKernelExtend, kCheckPageId, work.at.facts.request, place.page);
      }
      const int64_t known = cache_offset(place, kOfV ? p.v_stride_page : p.k_stride_page, kOfV ? p.v_stride_token : p.k_stride_token);
#pragma unroll 1
      for (int i = 0; i < 8; ++i) {
        const char* from = base + __shfl_sync(~0u, known, i * 4 + lane / 8) * 2;
        const int row = first + i * 4 + lane / 8;
        if (row >= last) continue;
#pragma unroll
        for (int panel = 0; panel < kDim / 64; ++panel) {
          cp_async16_or_zero(to + group_at(kDim / 64, row, lane % 8) + panel * kBlock, from + panel * kPanelRow, pos + row < work.end);
        }
      }
    }
    cp_async_commit();
    cp_async_wait<0>();
    publish_to_products();
  }

  // Copies the tile at `pos`, whose boxes are of the pages `of_page`. K beyond the unit's tokens stays what it was: those scores are
  // masked. V there is finite: other tokens of the request, or zeros.
  __device__ __forceinline__ void copy_tile(const Work& work, int pos, int of_page, uint32_t to, uint64_t* full) const {
    const AttnParams& p = mapped.attn;
    const int lane = threadIdx.x % 32, num_rows = min(work.end - pos, C::kTile);
    int bytes = 0;
    if (pos % kBoxTokens != 0) {
      copy_rows(work, pos, 0, kOfV ? C::kTile : num_rows, to);
    } else {
      const int num_boxes = (num_rows + kBoxTokens - 1) / kBoxTokens, kv_len = work.at.facts.kv_len, t = pos + lane * kBoxTokens;
      // The box that has tokens beyond the request's end.
      const int torn = kOfV && pos + num_boxes * kBoxTokens > kv_len ? num_boxes - 1 : kBoxes;
      bytes = (kOfV ? kBoxes : num_boxes) * kBoxBytes;
      if (lane < (kOfV ? kBoxes : num_boxes) && lane != torn) {
        const bool exists = lane < num_boxes;
        ATTN_CHECK(!exists || (of_page >= 0 && of_page < p.num_pages), p.check, kKernelExtend, kCheckPageId, work.at.facts.request, of_page);
        const int page_step = kOfV ? mapped.v_page_step : mapped.k_page_step, head_step = kOfV ? mapped.v_head_step : mapped.k_head_step;
        const int last = of_page * page_step + work.at.kv_head * head_step;
        const int in_page = t - page_of(p.page_magic, p.page_shift, t) * p.page_size;
        copy_box(to + lane * 2 * kGroup, kOfV ? &mapped.v_map : &mapped.k_map, 0, 0, 0, in_page / 8, exists ? last : -1, full);
      }
      if (torn != kBoxes) {
        bytes -= kBoxBytes;
        copy_rows(work, pos, torn * kBoxTokens, (torn + 1) * kBoxTokens, to);
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive_expecting(full, bytes);
  }
};

// The second and the third warp.
template <class C, bool kOfV>
__device__ __forceinline__ void copy_cache(const AttnMappedParams& mapped, Shared<C>& shared) {
  Ring<C::kStages> stage;
  BoxCopier<C, kOfV> copier = {mapped, 0};
  const Work* work = &wait_made<C>(shared, 0);
  copier.load_page(*work, work->begin);
  for (unsigned unit = 0; work->num_rows != 0; ++unit) {
    if (!kOfV && threadIdx.x % 32 == 0) barrier_arrive(&shared.begun[unit % C::kUnits]);
    const Work* next = nullptr;
    // Page ids of a tile are loaded ahead, also those of the next unit's first.
    auto look_ahead = [&] {
      next = &wait_made<C>(shared, unit + 1);
      copier.load_page(*next, next->begin);
    };
    for (int pos = work->begin; pos < work->end; pos += C::kTile) {
      const int of_page = copier.page;
      if (pos + C::kTile < work->end) {
        copier.load_page(*work, pos + C::kTile);
      } else {
        look_ahead();
      }
      barrier_wait(kOfV ? &shared.empty_v[stage.at] : &shared.empty_k[stage.at], stage.parity ^ 1);
      copier.copy_tile(*work, pos, of_page, shared_address(kOfV ? shared.v[stage.at] : shared.k[stage.at]),
                       kOfV ? &shared.full_v[stage.at] : &shared.full_k[stage.at]);
      stage.advance();
    }
    if (work->begin >= work->end) look_ahead();
    leave_unit<C>(shared, unit);
    work = next;
  }
}

// Rows of a pass in a place of q, as boxes of 64.
struct RowBoxes {
  int head, token;  // where this lane's box begins
  int num;          // of q to copy
  int num_results;  // of results to store
};

template <class C>
__device__ __forceinline__ RowBoxes row_boxes(const AttnParams& p, uint32_t magic, const Work& work) {
  const int num_rows = min(work.num_rows - work.first_row, C::kRows);
  const int token = work.at.facts.q_begin + token_of(p, magic, work.first_row + static_cast<int>(threadIdx.x % 32) * 64);
  return {work.at.kv_head * p.group_size, token, work.begin < work.end ? (num_rows + 63) / 64 : 0, work.num_sent};
}

// The fourth warp, by boxes: rows of q to their places, and results from there, one computing warpgroup's after the other's. Surplus
// rows are those of other tokens.
template <class C>
struct RowMover {
  const AttnMappedParams& mapped;
  Shared<C>& shared;

  __device__ __forceinline__ uint32_t rows_of(unsigned unit, int group) const {
    return shared_address(shared.q[unit % C::kQs]) + group * 64 * C::kDq * 2;
  }

  // Stores what warpgroup `group` leaves of unit `unit`, once it is done with its rows; lane `group` does.
  __device__ __forceinline__ void store(unsigned unit, int group, const RowBoxes& boxes) const {
    barrier_wait(&shared.empty_q[unit % C::kQs][group], unit / C::kQs % 2);
    if (threadIdx.x % 32 == group && group < boxes.num_results) store_box(&mapped.out_map, 0, boxes.head, boxes.token, 0, rows_of(unit, group));
  }

  // Copies rows of q; says too that the unit is written.
  __device__ __forceinline__ void copy(unsigned unit, int group, const RowBoxes& boxes) const {
    uint64_t* full = &shared.full_q[unit % C::kQs][group];
    if (threadIdx.x % 32 != group) return;
    barrier_arrive_expecting(full, group < boxes.num ? 64 * C::kDq * 2 : 0);
    if (group < boxes.num) copy_box(rows_of(unit, group), &mapped.q_map, 0, boxes.head, boxes.token, 0, full);
  }

  __device__ __forceinline__ void run() const {
    RowBoxes before[C::kQs] = {};  // of units whose places are not yet free, the last one first
    for (unsigned unit = 0;; ++unit) {
      const Work& work = wait_made<C>(shared, unit);
      const RowBoxes boxes = row_boxes<C>(mapped.attn, shared.magic, work);
      const bool is_last = work.num_rows == 0;
      // To the L2 cache at once: the place may be in use for long.
      if (static_cast<int>(threadIdx.x % 32) < boxes.num) fetch_box(&mapped.q_map, 0, boxes.head, boxes.token, 0);
#pragma unroll 1
      for (int group = 0; group < C::kGroups; ++group) {
        if (unit >= C::kQs) {
          store(unit - C::kQs, group, before[C::kQs - 1]);
          wait_stores_read();
        }
        copy(unit, group, boxes);
      }
      if (is_last) return store_rest(unit, before);
      leave_unit<C>(shared, unit);
#pragma unroll
      for (int i = C::kQs - 1; i > 0; --i) before[i] = before[i - 1];
      before[0] = boxes;
    }
  }

  // Stores what is left of the units before the end.
  __device__ __forceinline__ void store_rest(unsigned end, const RowBoxes (&before)[C::kQs]) const {
    if constexpr (C::kSendsBoxes) {
#pragma unroll
      for (unsigned i = C::kQs - 1; i > 0; --i) {
        if (end < i) continue;
#pragma unroll 1
        for (int group = 0; group < C::kGroups; ++group) store(end - i, group, before[i - 1]);
      }
      wait_stores();
    }
  }
};

// The fourth warp, by cp.async.
template <class C>
__device__ __forceinline__ void copy_rows_of_q(const AttnParams& p, Shared<C>& shared) {
  for (unsigned unit = 0;; ++unit) {
    const Work& work = wait_made<C>(shared, unit);
    const unsigned place = unit % C::kQs;
    barrier_wait(&shared.empty_q[place][0], unit / C::kQs % 2 ^ 1);
    const bool is_last = work.num_rows == 0;
    if (!is_last && work.begin < work.end) copy_q<C, 3>(p, shared.magic, work, shared_address(shared.q[place]));
    barrier_arrive_after_copies(&shared.full_q[place][0]);
    if (threadIdx.x % 32 == 0) barrier_arrive(&shared.full_q[place][0]);  // the unit is written
    if (is_last) return;
    leave_unit<C>(shared, unit);
  }
}

template <class C>
__device__ __forceinline__ void make_units(const AttnMappedParams& mapped, Shared<C>& shared, int claimed) {
  if constexpr (C::kFp8) {
    make_and_widen<C>(mapped, shared, claimed);
  } else {
    make_all<C>(mapped, shared, claimed);
  }
}

template <class C, bool kOfV>
__device__ __forceinline__ void copy_cache_of(const AttnMappedParams& mapped, Shared<C>& shared) {
  if constexpr (C::kFp8) {
    copy_fp8_cache<C, kOfV>(mapped, shared);
  } else {
    copy_cache<C, kOfV>(mapped, shared);
  }
}

template <class C>
__device__ __forceinline__ void copy_by_parts(const AttnMappedParams& mapped, Shared<C>& shared, int claimed) {
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  publish_global();  // what earlier kernels wrote
  if (warp == 0) {
    make_units<C>(mapped, shared, claimed);
  } else if (warp == 1) {
    copy_cache_of<C, false>(mapped, shared);
  } else if (warp == 2) {
    copy_cache_of<C, true>(mapped, shared);
  } else if (mapped.has_row_maps != 0) {
    RowMover<C>{mapped, shared}.run();
  } else {
    copy_rows_of_q<C>(mapped.attn, shared);
  }
}

}  // namespace

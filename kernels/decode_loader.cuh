// The copying half of a decode kernel's warp: its tokens of the block's tiles on their way to its ring.
//
// `C` is the kernel's Config: kOwn and kTile tokens, kGroups, layouts and copies of rows, see decode.cuh.
#pragma once

#include "decode_schedule.cuh"
#include "primitives/copy_rows.cuh"

namespace {

// Runs kStages tiles ahead of the warp's computing half.
template <class C>
struct Loader {
  // Addresses of what the warp owns of a tile: each lane has found one row of K and one of V, or, where there are but 16, one of
  // either. A copying lane asks the one that has its row.
  struct Addresses {
    uint64_t of_lane[C::kGroups];

    __device__ __forceinline__ const char* k(int row) const { return ptr<const char>(__shfl_sync(~0u, of_lane[0], row)); }
    __device__ __forceinline__ const char* v(int row) const {
      return ptr<const char>(__shfl_sync(~0u, of_lane[C::kGroups - 1], C::kGroups == 1 ? row + C::kOwn : row));
    }
  };

  const AttnParams& p;
  Schedule<C> schedule;
  int pos;  // the next tile's first token; at first the block's first
  unsigned segment = 0;
  int end = 0;           // of the segment
  bool is_open = false;  // the segment was waited for
  bool has_more = true;

  __device__ __forceinline__ void open() {
    barrier_wait(schedule.made(segment), Schedule<C>::parity(segment));
    const Segment& now = schedule.segment(segment);
    const int copied_to = segment == 0 ? pos : 0;  // see copy_first
    has_more = now.unit.num_rows != 0, pos = max(now.begin, copied_to), end = now.end, is_open = true;
  }

  // `place`: of the lane's row.
  __device__ __forceinline__ Addresses find_rows(Place place, int kv_head) const {
    auto at = [&](uint64_t plane, int64_t stride_page, int64_t stride_token, int64_t stride_head) {
      return plane + (kv_head * stride_head + cache_offset(place, stride_page, stride_token)) * C::KV::kBytes;
    };
    if constexpr (C::kGroups == 1) {
      const bool is_k = threadIdx.x % 32 < C::kOwn;
      return {{at(is_k ? p.k : p.v, is_k ? p.k_stride_page : p.v_stride_page, is_k ? p.k_stride_token : p.v_stride_token,
                  is_k ? p.k_stride_head : p.v_stride_head)}};
    } else {
      return {{at(p.k, p.k_stride_page, p.k_stride_token, p.k_stride_head), at(p.v, p.v_stride_page, p.v_stride_token, p.v_stride_head)}};
    }
  }

  // The place of position t. `page_at` gives the page of a number among the request's pages, `request` the request, for messages.
  template <class PageAt, class Request>
  __device__ __forceinline__ Place place_at(int t, const PageAt& page_at, const Request& request) const {
    const int page_idx = page_of(p.page_magic, p.page_shift, t);
    const Place place = {page_at(page_idx), t - page_idx * p.page_size};
    ATTN_CHECK(place.page >= 0 && place.page < p.num_pages, p.check, kKernelDecode, kCheckPageId, request(), place.page);
    return place;
  }

  // Starts copying the warp's tokens of the next tile, by all lanes; zeros for those from `end` on.
  template <class PageAt, class Request>
  __device__ __forceinline__ void copy_tokens(uint32_t stage, int kv_head, const PageAt& page_at, const Request& request) const {
    if (pos >= end) return;  // a tile that sees nothing
    const int lane = threadIdx.x % 32, first = pos + static_cast<int>(threadIdx.x) / 32 * C::kOwn;
    const Place place = place_at(min(first + lane % C::kOwn, end - 1), page_at, request);
    const Addresses addresses = find_rows(place, kv_head);
#pragma unroll
    for (int i = 0; i < C::kPasses; ++i) {
      const int row = lane / C::kLanesPerRow + i * C::kRowsPerPass;
      copy_row<C>(stage, row, addresses.k(row), addresses.v(row), lane % C::kLanesPerRow, first + row < end);
    }
  }

  __device__ __forceinline__ void advance() {
    pos += C::kTile;
    if (pos >= end) ++segment, is_open = false;
  }

  // Starts copying the warp's tokens of the next tile into a stage, if there is one; commits in any case.
  __device__ __forceinline__ bool copy(uint32_t stage) {
    if (has_more && !is_open) open();
    const bool copied = has_more;
    if (has_more) {
      const Segment& now = schedule.segment(segment);
      const int* pages = schedule.pages(segment) - now.first_page_idx;
      copy_tokens(stage, now.unit.kv_head, [&](int page_idx) { return pages[page_idx]; },
                  [&] { return load_table(&(ptr<const AttnTile>(p.tiles) + now.tile)->request); });
      if (threadIdx.x == 0 && pos == now.ask_at) barrier_arrive(schedule.asked());
      advance();
    }
    cp_async_commit();
    return copied;
  }

  // As copy, of the block's first tiles, by what Start says of them: the segment that is made of it need not be there.
  __device__ __forceinline__ bool copy_first(uint32_t stage, const Start& start, int first_segment_end) {
    if (segment > 0 || pos >= first_segment_end) return copy(stage);
    end = first_segment_end;
    const int first_page_idx = page_of(p.page_magic, p.page_shift, start.begin());
    copy_tokens(stage, start.kv_head, [&](int page_idx) { return __shfl_sync(~0u, start.page, page_idx - first_page_idx); },
                [&] { return start.rows.x; });
    advance();
    cp_async_commit();
    return true;
  }
};

}  // namespace

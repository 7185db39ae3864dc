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
  unsigned segment = 0;
  int pos = 0, end = 0;     // the next tile's first token; end of the segment
  bool is_open = false;     // the segment was waited for
  bool has_more = true;

  __device__ __forceinline__ void open() {
    barrier_wait(schedule.made(segment), Schedule<C>::parity(segment));
    const Segment& now = schedule.segment(segment);
    has_more = now.unit.num_rows != 0, pos = now.begin, end = now.end, is_open = true;
  }

  __device__ __forceinline__ Addresses find_rows(const Segment& now, int first) const {
    const int lane = threadIdx.x % 32, row = lane % C::kOwn, t = first + row, page_idx = page_of(p.page_magic, p.page_shift, t);
    const Place place = {t < end ? schedule.pages(segment)[page_idx - now.first_page_idx] : 0, t - page_idx * p.page_size};
    ATTN_CHECK(place.page >= 0 && place.page < p.num_pages, p.check, kKernelDecode, kCheckPageId, request_of(now), place.page);
    auto at = [&](uint64_t plane, int64_t stride_page, int64_t stride_token, int64_t stride_head) {
      return plane + (now.unit.kv_head * stride_head + cache_offset(place, stride_page, stride_token)) * C::KV::kBytes;
    };
    if constexpr (C::kGroups == 1) {
      const bool is_k = lane < C::kOwn;
      return {{at(is_k ? p.k : p.v, is_k ? p.k_stride_page : p.v_stride_page, is_k ? p.k_stride_token : p.v_stride_token,
                  is_k ? p.k_stride_head : p.v_stride_head)}};
    } else {
      return {{at(p.k, p.k_stride_page, p.k_stride_token, p.k_stride_head), at(p.v, p.v_stride_page, p.v_stride_token, p.v_stride_head)}};
    }
  }

  __device__ __forceinline__ int request_of(const Segment& now) const { return load_table(&(ptr<const AttnTile>(p.tiles) + now.tile)->request); }

  // Starts copying the warp's tokens of the next tile into a stage, if there is one; commits in any case.
  __device__ __forceinline__ bool copy(uint32_t stage) {
    if (has_more && !is_open) open();
    const bool copied = has_more;
    if (has_more) {
      const Segment& now = schedule.segment(segment);
      const int lane = threadIdx.x % 32, r0 = lane / C::kLanesPerRow, in_row = lane % C::kLanesPerRow;
      const int first = pos + static_cast<int>(threadIdx.x) / 32 * C::kOwn;
      const Addresses addresses = find_rows(now, first);
#pragma unroll
      for (int i = 0; i < C::kPasses; ++i) {
        const int row = r0 + i * C::kRowsPerPass;
        copy_row<C>(stage, row, addresses.k(row), addresses.v(row), in_row, first + row < end);
      }
      if (threadIdx.x == 0 && pos == now.ask_at) barrier_arrive(schedule.asked());
      pos += C::kTile;
      if (pos >= end) ++segment, is_open = false;
    }
    cp_async_commit();
    return copied;
  }
};

}  // namespace

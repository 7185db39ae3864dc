// Where a KV position lives. The only place that makes offsets into a cache; 64-bit before the first multiplication.
#pragma once

#include "check.cuh"
#include "cp_async.cuh"

// A token's place: its page and its offset there.
struct Place {
  int page, offset;
};

// t / page_size, see params.h
__device__ __forceinline__ int page_of(uint32_t magic, uint32_t shift, int t) {
  return static_cast<int>((static_cast<uint64_t>(static_cast<uint32_t>(t)) * magic) >> shift);
}

// The place of position t of the request whose pages start at `pages_begin`.
template <int kKernel>
__device__ __forceinline__ Place place_of(const AttnParams& p, int pages_begin, int t, int request) {
  const int page_idx = page_of(p.page_magic, p.page_shift, t);
  Place place = {pages_begin + page_idx, t - page_idx * p.page_size};
  if (p.kv_indices != 0) {
    ATTN_CHECK(place.page >= 0 && place.page < p.num_kv_indices, p.check, kKernel, kCheckKvIndex, request, place.page);
    place.page = load_table(ptr<const int32_t>(p.kv_indices) + place.page);
  }
  ATTN_CHECK(place.page >= 0 && place.page < p.num_pages, p.check, kKernel, kCheckPageId, request, place.page);
  return place;
}

// Starts copying a page id to shared memory: that of entry `at` of the page table.
template <int kKernel>
__device__ __forceinline__ void fetch_page(const AttnParams& p, int at, int* to) {
  if (p.kv_indices != 0) {
    ATTN_CHECK(at >= 0 && at < p.num_kv_indices, p.check, kKernel, kCheckKvIndex, -1, at);
    cp_async4(shared_address(to), ptr<const int32_t>(p.kv_indices) + at);
  } else {
    *to = at;
  }
}

// Elements from the cache's start to the vector of a place, without the head. Page and token strides are below 2^31 (see
// params.h), which makes this two multiply-adds.
__device__ __forceinline__ int64_t cache_offset(Place place, int64_t stride_page, int64_t stride_token) {
  return static_cast<int64_t>(place.page) * static_cast<int32_t>(stride_page) + static_cast<int64_t>(place.offset) * static_cast<int32_t>(stride_token);
}

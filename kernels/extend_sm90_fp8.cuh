// How tiles of e4m3 come to shared memory in extend_sm90.cu: as they are stored, and made f16 in place. Products see f16 alone.
//
// Each copying warp has its part: the second and the third copy K and V, by boxes where there are maps and a tile begins at a multiple
// of 16, else by cp.async. 16 tokens come to the second half of where they will be as f16, in blocks of 8 tokens and 64 dims. One
// warp widens them from the first block on: a block of the image ends where the block that it is made of ends, or before that, so
// nothing is overwritten that is still to be read. The first warp widens a share of each tile, besides making units.
//
// Products keep shared memory busy, so each access takes long: what is needed for every tile is kept in registers.
#pragma once

#include "extend_sm90_loader.cuh"
#include "primitives/fp8.cuh"
#include "primitives/tensor_map.cuh"

namespace {

static constexpr int kRawBlock = kBlock / 2;  // bytes

// Widens 16 tokens in the second half of `image`, by one warp.
template <int kPanels>
__device__ __forceinline__ void widen_box(uint32_t image) {
  constexpr int kBlocks = kPanels * 2, kAtOnce = kPanels == 3 ? 3 : kPanels == 2 ? 4 : 2;
  const unsigned lane = thread_number() % 32, row = lane / 4;
  const uint32_t from = image + kBlocks * kRawBlock + lane * 16, to = image + row * kPanelRow + (lane % 4 * 2 ^ row) * 16;
#pragma unroll
  for (int i = 0; i < kBlocks; i += kAtOnce) {
    uint4 x[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) x[j] = load_shared4(from + (i + j) * kRawBlock);
    __syncwarp();  // all lanes have read what is overwritten now
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      uint4 lo, hi;
      fp8x4_to_f16(x[j].x, lo.x, lo.y), fp8x4_to_f16(x[j].y, lo.z, lo.w);
      fp8x4_to_f16(x[j].z, hi.x, hi.y), fp8x4_to_f16(x[j].w, hi.z, hi.w);
      store_shared4(to + (i + j) * kBlock, lo), store_shared4((to ^ 16) + (i + j) * kBlock, hi);
    }
  }
}

// The stages of K, or of V.
template <class C, bool kOfV>
struct RawStages {
  static constexpr int kDim = kOfV ? C::kDv : C::kDq, kPanels = kDim / 64, kBoxes = C::kTile / kBoxTokens;
  static constexpr int kOwnBoxes = (kBoxes + (kPanels > 1)) / 2;  // widened by the warp that copies
  static constexpr int kRawBytes = kBoxTokens * kDim, kImageBytes = kRawBytes * 2;  // of 16 tokens

  Shared<C>& shared;

  __device__ __forceinline__ uint32_t image(int stage) const { return shared_address(kOfV ? shared.v[stage] : shared.k[stage]); }
  __device__ __forceinline__ uint64_t* raw(int stage) const { return kOfV ? &shared.raw_v[stage] : &shared.raw_k[stage]; }
  __device__ __forceinline__ uint64_t* full(int stage) const { return kOfV ? &shared.full_v[stage] : &shared.full_k[stage]; }
  __device__ __forceinline__ uint64_t* empty(int stage) const { return kOfV ? &shared.empty_v[stage] : &shared.empty_k[stage]; }

  // Widens a warp's share of a tile when it is there.
  template <bool kByFirstWarp>
  __device__ __forceinline__ void widen(const Ring<C::kStages>& stage) const {
    barrier_wait(raw(stage.at), stage.parity);
#pragma unroll 1
    for (int i = kByFirstWarp ? kOwnBoxes : 0; i < (kByFirstWarp ? kBoxes : kOwnBoxes); ++i) widen_box<kPanels>(image(stage.at) + i * kImageBytes);
    publish_to_products();
    barrier_arrive(full(stage.at));
  }
};

// A unit, as copying its KV needs it.
struct RawUnit {
  const Work* work;  // for messages
  int begin, end, kv_len, kv_head, pages_begin;
  bool has_rows;

  __device__ __forceinline__ explicit RawUnit(const Work& work)
      : work(&work), begin(work.begin), end(work.end), kv_len(work.at.facts.kv_len), kv_head(work.at.kv_head),
        pages_begin(work.at.facts.pages_begin), has_rows(work.num_rows != 0) {}

  // Page of position t.
  __device__ __forceinline__ int page_at(const AttnParams& p, int t) const {
    return ::page_at(p, work->at.facts.request, pages_begin, t);
  }
};

// Copies one cache, by one warp. Lane i knows the pages of boxes, or of rows, i, i + 32, ... of a tile.
template <class C, bool kOfV>
struct RawCopier {
  using Stages = RawStages<C, kOfV>;
  static constexpr int kPanels = Stages::kPanels, kBoxes = Stages::kBoxes, kGroups = C::kTile / 8;
  static constexpr int kKnown = (C::kTile + 31) / 32;
  static_assert(C::kTile % kBoxTokens == 0, "tiles of a unit are all of boxes, or none");

  const AttnMappedParams& mapped;
  Stages stages;
  int pages[kKnown];  // of the tile to come

  static __device__ __forceinline__ int lane() { return thread_number() % 32; }

  __device__ __forceinline__ bool has_boxes(const RawUnit& unit) const { return mapped.has_maps != 0 && unit.begin % kBoxTokens == 0; }

  // Starts loading the page ids of the tile at `pos`.
  __device__ __forceinline__ void load_pages(const RawUnit& unit, int pos) {
    const int tokens = has_boxes(unit) ? kBoxTokens : 1;
#pragma unroll
    for (int i = 0; i < kKnown; ++i) {
      const int of_tile = (lane() + i * 32) * tokens;
      pages[i] = 0;
      if (of_tile < C::kTile && pos + of_tile < unit.end) pages[i] = unit.page_at(mapped.attn, pos + of_tile);
    }
  }

  __device__ __forceinline__ void check_page(const RawUnit& unit, bool is_used, int page) const {
    ATTN_CHECK(!is_used || (page >= 0 && page < mapped.attn.num_pages), mapped.attn.check, kKernelExtend, kCheckPageId, unit.work->at.facts.request, page);
  }

  // Elements from the first of the caches' to token t of a page.
  __device__ __forceinline__ int64_t offset_of(int page, int t) const {
    const AttnParams& p = mapped.attn;
    const Place place = {page, t - page_of(p.page_magic, p.page_shift, t) * p.page_size};
    return cache_offset(place, kOfV ? p.v_stride_page : p.k_stride_page, kOfV ? p.v_stride_token : p.k_stride_token);
  }

  // Copies 8 tokens by cp.async; four lanes share a token, which is `offset` elements on. Zeros where it is not valid.
  __device__ __forceinline__ void copy_group(const RawUnit& unit, int group, int64_t offset, bool is_valid, uint32_t image) const {
    const AttnParams& p = mapped.attn;
    const char* from = ptr<const char>(kOfV ? p.v : p.k) + unit.kv_head * (kOfV ? p.v_stride_head : p.k_stride_head) + offset + lane() % 4 * 16;
    const uint32_t to = image + group / 2 * Stages::kImageBytes + Stages::kRawBytes + group % 2 * kPanels * kRawBlock + lane() * 16;
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) cp_async16_or_zero(to + panel * kRawBlock, from + panel * 64, is_valid);
  }

  // Copies the tile at `pos` by cp.async, tokens from the unit's end on as zeros.
  __device__ __forceinline__ void copy_rows(const RawUnit& unit, int pos, const int (&of_pages)[kKnown], uint32_t image) const {
    int64_t known;  // where one row of 32 is
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (group % 4 == 0) {
        const int t = pos + group * 8 + lane();
        check_page(unit, t < unit.end, of_pages[group / 4]);
        known = offset_of(of_pages[group / 4], t);
      }
      copy_group(unit, group, __shfl_sync(~0u, known, group % 4 * 8 + lane() / 4), pos + group * 8 + lane() / 4 < unit.end, image);
    }
  }

  // Copies the tile at `pos` by boxes, except for one of V that has tokens beyond the request's end: those must be zero. K beyond the
  // unit's tokens stays what it was: those scores are masked. V there is other tokens of the request, or zeros. Returns the boxes' bytes.
  __device__ __forceinline__ int copy_boxes(const RawUnit& unit, int pos, int page, uint32_t image, uint64_t* barrier) const {
    const AttnParams& p = mapped.attn;
    const int num_boxes = (min(unit.end - pos, C::kTile) + kBoxTokens - 1) / kBoxTokens, num_copied = kOfV ? kBoxes : num_boxes;
    const int torn = kOfV && pos + num_boxes * kBoxTokens > unit.kv_len ? num_boxes - 1 : kBoxes;
    const bool exists = lane() < num_boxes;
    check_page(unit, exists, page);
    if (lane() < num_copied && lane() != torn) {
      const int page_step = kOfV ? mapped.v_page_step : mapped.k_page_step, head_step = kOfV ? mapped.v_head_step : mapped.k_head_step;
      const int last = page * page_step + unit.kv_head * head_step, t = pos + lane() * kBoxTokens;
      const int in_page = t - page_of(p.page_magic, p.page_shift, t) * p.page_size;
      const uint32_t to = image + lane() * Stages::kImageBytes + Stages::kRawBytes;
      copy_box(to, kOfV ? &mapped.v_map : &mapped.k_map, 0, 0, 0, in_page / 8, exists ? last : -1, barrier);
    }
    if (torn == kBoxes) return num_copied * Stages::kRawBytes;
    const int torn_page = __shfl_sync(~0u, page, torn);
#pragma unroll
    for (int group = torn * 2; group < torn * 2 + 2; ++group) {
      const int t = pos + group * 8 + lane() / 4;
      copy_group(unit, group, offset_of(torn_page, t), t < unit.kv_len, image);
    }
    return (num_copied - 1) * Stages::kRawBytes;
  }

  // Starts copying the tile at `pos`, whose pages are `of_pages`, to a stage.
  __device__ __forceinline__ void copy_tile(const RawUnit& unit, int pos, const int (&of_pages)[kKnown], int stage) const {
    const uint32_t image = stages.image(stage);
    int bytes = 0;
    if (has_boxes(unit)) {
      bytes = copy_boxes(unit, pos, of_pages[0], image, stages.raw(stage));
    } else {
      copy_rows(unit, pos, of_pages, image);
    }
    barrier_arrive_after_copies(stages.raw(stage));
    if (lane() == 0) barrier_arrive_expecting(stages.raw(stage), bytes);
  }
};

// The second and the third warp. A share of a tile is widened when the next tile's copies have been started; of two stages there is
// none for those while products read the other.
template <class C, bool kOfV>
__device__ __forceinline__ void copy_fp8_cache(const AttnMappedParams& mapped, Shared<C>& shared) {
  using Copier = RawCopier<C, kOfV>;
  constexpr bool kStartsNext = C::kStages > 2;
  Ring<C::kStages> stage;
  Copier copier = {mapped, {shared}, {}};
  bool is_pending = false;  // the tile before is still to be widened
  auto widen_pending = [&] {
    if (is_pending) copier.stages.template widen<false>(stage.before());
    is_pending = false;
  };
  RawUnit now(wait_made<C>(shared, 0));
  copier.load_pages(now, now.begin);
  for (unsigned unit = 0; now.has_rows; ++unit) {
    // Page ids of a tile are loaded ahead, also those of the next unit's first.
    auto look_ahead = [&] {
      const RawUnit next(wait_made<C>(shared, unit + 1));
      copier.load_pages(next, next.begin);
    };
    for (int pos = now.begin; pos < now.end; pos += C::kTile) {
      int of_pages[Copier::kKnown];
#pragma unroll
      for (int i = 0; i < Copier::kKnown; ++i) of_pages[i] = copier.pages[i];
      if (pos + C::kTile < now.end) {
        copier.load_pages(now, pos + C::kTile);
      } else {
        look_ahead();
      }
      barrier_wait(copier.stages.empty(stage.at), stage.parity ^ 1);
      copier.copy_tile(now, pos, of_pages, stage.at);
      if (!kStartsNext) copier.stages.template widen<false>(stage);
      widen_pending();
      is_pending = kStartsNext;
      stage.advance();
    }
    if (now.begin >= now.end) {
      widen_pending();  // units are made when earlier ones are done
      look_ahead();
    }
    leave_unit<C>(shared, unit);
    now = RawUnit(shared.units[(unit + 1) % C::kUnits]);
  }
  widen_pending();
}

// The first warp.
template <class C>
__device__ __forceinline__ void make_and_widen(const AttnMappedParams& mapped, Shared<C>& shared, int claimed) {
  const RawStages<C, false> k = {shared};
  const RawStages<C, true> v = {shared};
  Ring<C::kStages> stage;
  unsigned num_made = 0;
  bool has_more = true;
  for (unsigned unit = 0;; ++unit) {
    for (; has_more && num_made <= unit + kMadeAhead; ++num_made) has_more = make_unit<C>(mapped, shared, num_made, claimed);
    const Work& work = shared.units[unit % C::kUnits];
    if (work.num_rows == 0) return;
    for (int pos = work.begin; pos < work.end; pos += C::kTile) {
      k.template widen<true>(stage);
      v.template widen<true>(stage);
      stage.advance();
    }
  }
}

}  // namespace

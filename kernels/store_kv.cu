// Writes new K and V rows to their slots in the cache; with positions, rotates k and q first (RoPE).
//
//   rotated pair: (x, y) -> (x cos - y sin, y cos + x sin), in f32, rounded to the source's dtype, so that the result is that of
//   a rotation followed by a store, bit for bit. fp8: value / scale, rounded to nearest even, saturated at +-448.
//
// Grid: any; rows by block stride. Work is cut into pieces of 8 elements of a head, one a thread: 16-byte loads of 16-bit
// sources, coalesced along a row. Plain copies keep the bits. Rows with a negative slot are skipped: not read, not written.
// Two rows with one slot in a launch: either wins.
#include "params.h"
#include "primitives/check.cuh"
#include "primitives/launch.cuh"
#include "primitives/paged.cuh"
#include "primitives/vector.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kAhead = 4;  // pieces that a thread loads before it stores

// Source and destination of a piece.
struct Move {
  const char* from;
  char* to;
  float scale;
};

// Where a row of K or V goes, in bytes from the cache's start without the head.
template <class Dst>
__device__ __forceinline__ Move row_move(const StoreKvParams& p, int64_t row, bool is_v, Place place, int src_bytes) {
  const int64_t from = row * (is_v ? p.v_stride_row : p.k_stride_row);
  const int64_t to = is_v ? place.page * p.v_cache_stride_page + place.offset * p.v_cache_stride_token
                          : place.page * p.k_cache_stride_page + place.offset * p.k_cache_stride_token;
  return {ptr<const char>(is_v ? p.v : p.k) + from * src_bytes, ptr<char>(is_v ? p.v_cache : p.k_cache) + to * Dst::kBytes, is_v ? p.v_scale : p.k_scale};
}

template <class Dst>
__device__ __forceinline__ Place place_of_slot(const StoreKvParams& p, int row, int slot) {
  const int page = page_of(p.page_magic, p.page_shift, slot);
  ATTN_CHECK(page < p.num_pages, p.check, kKernelStoreKv, kCheckSlot, row, slot);
  return {page, slot - page * p.page_size};
}

template <class Src, class Dst>
__device__ __forceinline__ void store_piece(char* to, const Vector8<Src>& x, float scale) {
  if constexpr (Same<Src, Dst>::value) {
    x.store(to);
  } else {
    float f[8];
    x.to_floats(f);
#pragma unroll
    for (int i = 0; i < 8; ++i) f[i] = divide(f[i], scale);
    Vector8<Dst>::from_floats(f).store(to);
  }
}

// Copies K and V of kAhead rows at a time; the threads of a block are shared out over rows where rows are short.
template <class Src, class Dst>
__device__ __forceinline__ void copy_rows(const StoreKvParams& p) {
  const int k_pieces = p.head_dim_qk / 8, v_pieces = p.head_dim_vo / 8;
  const int all_k = p.num_kv_heads * k_pieces, all = all_k + p.num_kv_heads * v_pieces;
  const int lanes = min(all, kThreads), rows_per_pass = kThreads / lanes;
  const int my_row = threadIdx.x / lanes, my_piece = threadIdx.x % lanes;
  if (my_row >= rows_per_pass) return;
  const int* slots = ptr<const int>(p.slots);
  for (int piece = my_piece; piece < all; piece += lanes) {
    const bool is_v = piece >= all_k;
    const int in_part = is_v ? piece - all_k : piece, pieces = is_v ? v_pieces : k_pieces;
    const int head = in_part / pieces, d = in_part % pieces * 8;
    const int64_t from = head * (is_v ? p.v_stride_head : p.k_stride_head) + d;
    const int64_t to = head * (is_v ? p.v_cache_stride_head : p.k_cache_stride_head) + d;
    for (int64_t row0 = static_cast<int64_t>(blockIdx.x) * rows_per_pass * kAhead + my_row; row0 < p.num_rows;
         row0 += static_cast<int64_t>(gridDim.x) * rows_per_pass * kAhead) {
      Vector8<Src> x[kAhead];
      int slot[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int64_t row = row0 + i * rows_per_pass;
        slot[i] = row < p.num_rows ? slots[row] : -1;
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int64_t row = row0 + i * rows_per_pass;
        if (slot[i] >= 0) x[i] = load8<Src>(row_move<Dst>(p, row, is_v, {0, 0}, Src::kBytes).from + from * Src::kBytes);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (slot[i] < 0) continue;
        const Place place = place_of_slot<Dst>(p, static_cast<int>(row0 + i * rows_per_pass), slot[i]);
        const Move move = row_move<Dst>(p, 0, is_v, place, Src::kBytes);
        store_piece<Src, Dst>(move.to + to * Dst::kBytes, x[i], move.scale);
      }
    }
  }
}

// Rotates 8 neighbouring elements at d < rotary_dim of a head; returns them rounded to the source's dtype.
template <class T>
__device__ __forceinline__ Vector8<T> rotate(const StoreKvParams& p, const char* head, int d, const float* cos_sin) {
  const int half = p.rotary_dim / 2;
  float x[8], y[8];
  load8<T>(head + d * T::kBytes).to_floats(x);
  if (p.interleaved) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const float c = cos_sin[(d + i) / 2], s = cos_sin[half + (d + i) / 2];
      y[i] = x[i] * c - x[i + 1] * s;
      y[i + 1] = x[i + 1] * c + x[i] * s;
    }
  } else {
    const bool is_second = d >= half;
    float other[8];
    load8<T>(head + (is_second ? d - half : d + half) * T::kBytes).to_floats(other);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int at = d + i - (is_second ? half : 0);
      const float c = cos_sin[at], s = cos_sin[half + at];
      y[i] = is_second ? x[i] * c + other[i] * s : x[i] * c - other[i] * s;
    }
  }
  return Vector8<T>::from_floats(y);
}

// One block a row: its K rotated, its V, its q rotated. q may be rotated in place: all of a row is read before any is written.
template <class Src, class Dst>
__device__ __forceinline__ void rotate_rows(const StoreKvParams& p) {
  const int qk_pieces = p.head_dim_qk / 8, v_pieces = p.head_dim_vo / 8;
  const int all_q = p.q_out != 0 ? p.num_qo_heads * qk_pieces : 0, all_k = p.num_kv_heads * qk_pieces;
  const int all = all_q + all_k + p.num_kv_heads * v_pieces;
  for (int row = blockIdx.x; row < p.num_rows; row += static_cast<int>(gridDim.x)) {
    const int slot = ptr<const int>(p.slots)[row];
    if (slot < 0) continue;
    const int position = ptr<const int>(p.positions)[row];
    ATTN_CHECK(position >= 0 && position <= p.max_position, p.check, kKernelStoreKv, kCheckPosition, row, position);
    const float* cos_sin = ptr<const float>(p.cos_sin) + static_cast<int64_t>(position) * p.rotary_dim;
    const Place place = place_of_slot<Dst>(p, row, slot);
    // Whole heads a pass, so that the two halves of a pair are read before either is written.
    const int per_pass = max(kThreads / qk_pieces, 1) * qk_pieces;
    for (int first = 0; first < all; first += first < all_q ? min(per_pass, all_q - first) : kThreads) {
      const int piece = first + threadIdx.x;
      const bool is_q = first < all_q, is_mine = piece < (is_q ? min(all_q, first + per_pass) : all);
      Vector8<Src> x;
      char* to = nullptr;
      float scale = 1.0f;
      if (is_mine) {
        const bool is_v = !is_q && piece >= all_q + all_k;
        const int in_part = is_q ? piece : is_v ? piece - all_q - all_k : piece - all_q, pieces = is_v ? v_pieces : qk_pieces;
        const int head = in_part / pieces, d = in_part % pieces * 8;
        const char* from;
        if (is_q) {
          from = ptr<const char>(p.q) + (row * p.q_stride_row + head * p.q_stride_head) * Src::kBytes;
          to = ptr<char>(p.q_out) + (row * p.q_out_stride_row + head * p.q_out_stride_head + d) * Src::kBytes;
        } else {
          const Move move = row_move<Dst>(p, row, is_v, place, Src::kBytes);
          from = move.from + head * (is_v ? p.v_stride_head : p.k_stride_head) * Src::kBytes;
          to = move.to + (head * (is_v ? p.v_cache_stride_head : p.k_cache_stride_head) + d) * Dst::kBytes;
          scale = move.scale;
        }
        x = !is_v && d < p.rotary_dim ? rotate<Src>(p, from, d, cos_sin) : load8<Src>(from + d * Src::kBytes);
      }
      if (is_q) __syncthreads();
      if (is_mine && is_q) x.store(to);
      if (is_mine && !is_q) store_piece<Src, Dst>(to, x, scale);
    }
  }
}

template <class Src, class Dst>
__device__ __forceinline__ void store_kv(const StoreKvParams& p) {
  wait_for_previous();
  if (p.positions == 0) {
    copy_rows<Src, Dst>(p);
  } else {
    rotate_rows<Src, Dst>(p);
  }
  launch_dependents();
}

}  // namespace

#define bf16 Bf16
#define f16 F16
#define f32 F32
#define fp8 Fp8
#define KERNEL(name, q, kv, dqk, dvo, general, threads, shared_bytes, blocks, rows)        \
  static_assert(threads == kThreads && shared_bytes == 0, "the list states the launch");  \
  extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ StoreKvParams p) { store_kv<q, kv>(p); }
#include "store_kv.inst"

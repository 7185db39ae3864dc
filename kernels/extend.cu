// Attention for many query rows: prefill, chunked prefill, speculative tokens; paged or ragged KV, causal or not.
//
//   unit = (tile of query tokens, KV head, chunk of KV);  row = token x group + head, so a group shares its KV loads
//
// Grid: any; blocks are persistent and claim units one by one, or take ranges of them by stride. A block holds
// kRows rows of q; a warp owns 32 of them and sees all tokens. KV goes by in tiles of kTile tokens through two stages, the next
// one under way while this one is used. A unit of more than kRows rows (a very large group) passes over its KV once for each
// kRows: an item is one such pass, and while an item ends the next one's q and first tile are under way.
// Above 128 dims two warps own the same 32 rows: in the first product each takes half of the tokens, in the second half of the
// dims; maxima and weights go between them through shared memory. That halves what each reads of K and V.
// A row's arithmetic depends on its chunk and its place in the tile alone.
//
// Shared memory, bytes: kRows rows of q; 2 x kTile x (row of K + row of V); see tile.cuh; pairs: 32 x kTile weights each;
//   2 x kTile places of tokens; three items.
// Registers, per thread: 2 x (kDv / 2 outputs + kTile / 2 scores), for pairs half of that.
// Barriers: at the end of an item, all warps are done with q and both stages; at the top of an iteration, the stage has
//   arrived for all, the other one, consumed before, may be overwritten, and the next tile's places are made; those of a pair
//   (named, 1 to 4) lie between what one warp shows and the other reads.
// Items: thread 0 writes the next one's while this one begins; the one before, whose results may still be on their way out, is
//   the third. A block claims one unit ahead of that which it begins.
// Rows of K and V beyond the chunk are zero-filled, never read; surplus rows of q are zero and not written out.
#include "extend_loader.cuh"
#include "primitives/cp_async.cuh"
#include "primitives/fp8.cuh"
#include "primitives/launch.cuh"
#include "primitives/mask.cuh"
#include "primitives/mma.cuh"
#include "primitives/paged.cuh"
#include "primitives/rows.cuh"
#include "primitives/softmax.cuh"
#include "primitives/tile.cuh"
#include "primitives/units.cuh"

namespace {

// The shift of a row that has seen nothing: below any that scores lead to, and finite.
static constexpr float kUnseen = -1e30f;

// A warp's rows. Weights are p = 2^(s c - shift), where shift / c is about the largest score s so far: it stays while no weight
// goes beyond 2^8, which spares rescaling the output.
template <class C>
struct Rows {
  float o[C::kMt][C::kDims / 8][4];  // C fragments; see group_of_row; fp8: dims permuted within 16, see put_outputs
  float l[C::kMt][2];                // sums of the weights of a lane's tokens, unrounded
  float shift[C::kMt][2];
};

// The first of the warp's rows, as the item counts them.
template <class C>
__device__ __forceinline__ int first_of_warp() {
  return threadIdx.x / (32 * C::kParts) * 32;
}

// Which half of the tokens and dims the warp has.
template <class C>
__device__ __forceinline__ int part_of_warp() {
  return C::kParts == 2 ? threadIdx.x / 32 % 2 : 0;
}

// Waits for all lanes that have the warp's rows.
template <class C>
__device__ __forceinline__ void sync_rows() {
  if constexpr (C::kParts == 2) {
    asm volatile("bar.sync %0, 64;" ::"r"(1 + threadIdx.x / 64) : "memory");
  } else {
    __syncwarp();
  }
}

// Whether `x` holds for one of all lanes that have the warp's rows; waits for them.
template <class C>
__device__ __forceinline__ bool any_of_rows(bool x) {
  if constexpr (C::kParts == 2) {
    int any;
    asm volatile("{.reg .pred p, q; setp.ne.s32 p, %1, 0; bar.red.or.pred q, %2, 64, p; selp.s32 %0, 1, 0, q;}"
                 : "=r"(any)
                 : "r"(static_cast<int>(x)), "r"(1 + threadIdx.x / 64)
                 : "memory");
    return any != 0;
  } else {
    return __any_sync(~0u, x);
  }
}

// Row of the item that lane's half `half` of 16-row tile `mt` is.
template <class C>
__device__ __forceinline__ int row_in_item(int mt, int half) {
  return first_of_warp<C>() + mt * 16 + threadIdx.x % 32 / 4 + half * 8;
}

// Starts copying the item's rows of q.
template <class C>
__device__ __forceinline__ void issue_q(const AttnParams& p, const Item& item, uint32_t q_tile) {
  constexpr int kLanes = 8, kRowsAtOnce = C::kThreads / kLanes;
  const int lane = threadIdx.x % kLanes;
#pragma unroll 4
  for (int r = threadIdx.x / kLanes; r < C::kRows; r += kRowsAtOnce) {
    const int row = min(item.first_row + r, item.num_rows - 1), token = item.token_of(row);
    const int head = item.unit.kv_head * p.group_size + row - token * p.group_size;
    const bool valid = item.first_row + r < item.num_rows;
    const char* from = ptr<const char>(p.q) + ((item.unit.facts.q_begin + token) * p.q_stride_row + head * p.q_stride_head) * 2;
#pragma unroll
    for (int chunk = lane; chunk < C::kQRow / 16; chunk += kLanes) cp_async16_or_zero(q_tile + C::QLayout::at(r, chunk), from + chunk * 16, valid);
  }
}

// fp8 KV: the warp's rows of q become f16, dims within 16 in the order in which bytes of K come (see scores).
template <class C>
__device__ __forceinline__ void convert_q(unsigned char* q_tile) {
  const int first = first_of_warp<C>() + part_of_warp<C>() * 16;
  for (int i = threadIdx.x % 32; i < 32 / C::kParts * (C::kDq / 16); i += 32) {
    const int row = first + i / (C::kDq / 16), chunk = i % (C::kDq / 16) * 2;
    uint4& lo = *reinterpret_cast<uint4*>(q_tile + C::QLayout::at(row, chunk));
    uint4& hi = *reinterpret_cast<uint4*>(q_tile + C::QLayout::at(row, chunk + 1));
    const uint4 x = lo, y = hi;
    auto convert = [](uint32_t two) {
      const float2 f = unpack2<typename C::Q>(two);
      return pack2<F16>(f.x, f.y);
    };
    lo = make_uint4(convert(x.x), convert(x.z), convert(y.x), convert(y.z));
    hi = make_uint4(convert(x.y), convert(x.w), convert(y.y), convert(y.w));
  }
  sync_rows<C>();
}

template <class C>
using Scores = float[C::kMt][C::kTokens / 8][4];

// S = Q K^T for the warp's rows and its tokens of the tile.
template <class C>
__device__ __forceinline__ void scores(uint32_t q_tile, uint32_t k_tile, Scores<C>& s) {
  using Math = typename C::Math;
  const uint32_t lane = lane_of_thread<C::kIsCramped>();
  const uint32_t q_from = q_tile + first_of_warp<C>() * C::QLayout::kPitch + C::QLayout::at(lane % 16, lane / 16);
  const uint32_t k_from = k_tile + part_of_warp<C>() * C::kTokens * C::KLayout::kPitch + C::KLayout::at(lane % 8 + lane / 16 * 8, lane / 8 & 1);
#pragma unroll
  for (int mt = 0; mt < C::kMt; ++mt) {
#pragma unroll
    for (int n = 0; n < C::kTokens / 8; ++n) s[mt][n][0] = s[mt][n][1] = s[mt][n][2] = s[mt][n][3] = 0.0f;
  }
#pragma unroll
  for (int k = 0; k < C::kKRow / 32; ++k) {
    constexpr int kQSteps = C::kFp8 ? 2 : 1;  // 32 bytes of K are 32 dims in fp8
    uint32_t a[C::kMt][kQSteps][4];
#pragma unroll
    for (int mt = 0; mt < C::kMt; ++mt) {
#pragma unroll
      for (int i = 0; i < kQSteps; ++i) ldmatrix4(a[mt][i], C::QLayout::further(q_from, (k * kQSteps + i) * 32) + mt * 16 * C::QLayout::kPitch);
    }
#pragma unroll
    for (int n = 0; n < C::kTokens / 16; ++n) {
      uint32_t b[4];
      ldmatrix4(b, C::KLayout::further(k_from, k * 32) + n * 16 * C::KLayout::kPitch);
      if constexpr (C::kFp8) {
        // Four neighbouring bytes a lane: bytes 0, 1 take the slots 2c of the contraction, bytes 2, 3 the slots 2c + 8.
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t lo, hi;
          fp8x4_to_f16(b[i], lo, hi);
#pragma unroll
          for (int mt = 0; mt < C::kMt; ++mt) mma<F16>(s[mt][2 * n + i / 2], a[mt][i % 2], lo, hi);
        }
      } else {
#pragma unroll
        for (int mt = 0; mt < C::kMt; ++mt) {
          mma<Math>(s[mt][2 * n], a[mt][0], b[0], b[1]);
          mma<Math>(s[mt][2 * n + 1], a[mt][0], b[2], b[3]);
        }
      }
    }
  }
}

// Softcap, ALiBi, then -inf for keys that a row does not see.
template <class C>
__device__ __forceinline__ void mask_scores(const AttnParams& p, const Item& item, int tile_begin, float scale, Scores<C>& s) {
  const TileFacts& facts = item.unit.facts;
#pragma unroll
  for (int mt = 0; mt < C::kMt; ++mt) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(item.first_row + row_in_item<C>(mt, half), item.num_rows - 1), token = item.token_of(row);  // surplus rows: any
      const int q_pos = facts.q_pos + token;
      const KeyRange keys = visible_keys(p, q_pos);
      // Of the tile's keys the row sees those from `lo` to `hi`, counted from the lane's first one.
      const int first = tile_begin + part_of_warp<C>() * C::kTokens + threadIdx.x % 4 * 2;
      const int lo = max(keys.first, tile_begin) - first, hi = max(min(keys.last, item.end - 1), tile_begin - 1) - first;
      float slope = 0.0f;
      int64_t mask_begin = 0;
      if constexpr (C::kGeneral) {
        if (p.alibi_slopes != 0) slope = ptr<const float>(p.alibi_slopes)[item.unit.kv_head * p.group_size + row - token * p.group_size];
        mask_begin = ptr<const AttnTile>(p.tiles)[item.unit.tile].mask_begin;
      }
#pragma unroll
      for (int n = 0; n < C::kTokens / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = s[mt][n][2 * half + i];
          bool visible = n * 8 + i >= lo && n * 8 + i <= hi;
          if constexpr (C::kGeneral) {
            const int key = first + n * 8 + i;
            x = shape_score(p, x * scale, slope, key - q_pos) * kLog2e;
            if (p.custom_mask != 0 && visible) visible = mask_bit(p, mask_begin, facts.kv_len, token, key);
          }
          if (!visible) x = -kInf;
        }
      }
    }
  }
}

// Weights of 16 tokens, as A fragments.
template <class C>
using Weights = uint32_t[C::kMt][4];

// A pair: each row's maximum over the warp's tokens becomes that over the tile. The other warp's maximum comes where this warp's
// weights of the row will stand.
template <class C>
__device__ __forceinline__ void share_maxima(unsigned char* shared_weights, float (&top)[C::kMt][2]) {
  const int part = part_of_warp<C>(), lane = threadIdx.x % 32;
  auto slot = [&](int mt, int half, int of_part) {
    return reinterpret_cast<float*>(shared_weights + C::WeightsLayout::at(mt * 16 + lane / 4 + half * 8, of_part * (C::kTokens / 8)));
  };
#pragma unroll
  for (int i = 0; i < 2 * C::kMt; ++i) {
    if (lane % 4 == 0) *slot(i / 2, i % 2, part ^ 1) = top[i / 2][i % 2];
  }
  sync_rows<C>();
#pragma unroll
  for (int i = 0; i < 2 * C::kMt; ++i) top[i / 2][i % 2] = fmaxf(top[i / 2][i % 2], *slot(i / 2, i % 2, part));
  __syncwarp();
}

// A pair: shows the warp's weights of 16 of its tokens, the `n`th such, to the other warp.
template <class C>
__device__ __forceinline__ void show_weights(unsigned char* shared_weights, int n, const Weights<C>& weights) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int mt = 0; mt < C::kMt; ++mt) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = mt * 16 + lane / 4 + i % 2 * 8, chunk = part_of_warp<C>() * (C::kTokens / 8) + 2 * n + i / 2;
      *reinterpret_cast<uint32_t*>(shared_weights + C::WeightsLayout::at(row, chunk) + lane % 4 * 4) = weights[mt][i];
    }
  }
}

// A pair: what the other warp has shown.
template <class C>
__device__ __forceinline__ void load_weights(uint32_t shared_weights, int n, Weights<C>& weights) {
  const int lane = threadIdx.x % 32, chunk = (part_of_warp<C>() ^ 1) * (C::kTokens / 8) + 2 * n + lane / 16;
#pragma unroll
  for (int mt = 0; mt < C::kMt; ++mt) ldmatrix4(weights[mt], shared_weights + C::WeightsLayout::at(mt * 16 + lane % 16, chunk));
}

// Moves the shifts of rows whose weights would go beyond 2^8, and rescales what was summed before. That is rare: only then the
// lanes of a row compare what each has seen. A row's shift follows from its own scores alone.
template <class C>
__device__ __forceinline__ void raise_shifts(Rows<C>& rows, float c, unsigned char* shared_weights, const Scores<C>& s) {
  float top[C::kMt][2];
  bool grew = false;
#pragma unroll
  for (int mt = 0; mt < C::kMt; ++mt) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float m = fmaxf(s[mt][0][2 * half], s[mt][0][2 * half + 1]);
#pragma unroll
      for (int n = 1; n < C::kTokens / 8; ++n) m = fmaxf(m, fmaxf(s[mt][n][2 * half], s[mt][n][2 * half + 1]));
      top[mt][half] = m;
      grew = grew || fmaf(m, c, -rows.shift[mt][half]) > 8.0f;
    }
  }
  if (!any_of_rows<C>(grew)) return;
#pragma unroll
  for (int i = 0; i < 2 * C::kMt; ++i) top[i / 2][i % 2] = quad_max(top[i / 2][i % 2]);
  if constexpr (C::kParts == 2) share_maxima<C>(shared_weights, top);
#pragma unroll
  for (int mt = 0; mt < C::kMt; ++mt) {
    float rescale[2] = {1.0f, 1.0f};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float m = top[mt][half];
      float& shift = rows.shift[mt][half];
      if (fmaf(m, c, -shift) > 8.0f) {
        rescale[half] = exp2_approx(shift - m * c);
        shift = m * c;
      }
      rows.l[mt][half] *= rescale[half];
    }
#pragma unroll
    for (int i = 0; i < C::kDims / 8; ++i) {
      rows.o[mt][i][0] *= rescale[0], rows.o[mt][i][1] *= rescale[0];
      rows.o[mt][i][2] *= rescale[1], rows.o[mt][i][3] *= rescale[1];
    }
  }
}

// Weights of 16 of the warp's tokens, the `n`th such.
template <class C>
__device__ __forceinline__ void make_weights(Rows<C>& rows, float c, const Scores<C>& s, int n, Weights<C>& weights) {
  using Math = typename C::Math;
#pragma unroll
  for (int mt = 0; mt < C::kMt; ++mt) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = exp2_approx(fmaf(s[mt][2 * n + i / 2][2 * half + i % 2], c, -rows.shift[mt][half]));
      rows.l[mt][half] += (x[0] + x[1]) + (x[2] + x[3]);
      weights[mt][half] = pack2<Math>(x[0], x[1]), weights[mt][2 + half] = pack2<Math>(x[2], x[3]);
    }
  }
}

// O += P V, for 16 tokens from row `token` of V on. A pair takes the 32 bytes of V's rows in turn.
template <class C>
__device__ __forceinline__ void add_values(Rows<C>& rows, uint32_t v_tile, int token, const Weights<C>& weights) {
  using Math = typename C::Math;
  const uint32_t lane = lane_of_thread<C::kIsCramped>();
  const uint32_t from = v_tile + token * C::VLayout::kPitch + C::VLayout::at(lane % 16, lane / 16 + part_of_warp<C>() * 2);
#pragma unroll
  for (int i = 0; i < C::kVRow / 32 / C::kParts; ++i) {
    uint32_t b[4];
    ldmatrix4_trans(b, C::VLayout::further(from, i * 32 * C::kParts));
    if constexpr (C::kFp8) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        uint32_t even0, odd0, even1, odd1;
        fp8_values_to_f16(b[2 * j], even0, odd0);
        fp8_values_to_f16(b[2 * j + 1], even1, odd1);
#pragma unroll
        for (int mt = 0; mt < C::kMt; ++mt) {
          mma<F16>(rows.o[mt][4 * i + 2 * j], weights[mt], even0, even1);
          mma<F16>(rows.o[mt][4 * i + 2 * j + 1], weights[mt], odd0, odd1);
        }
      }
    } else {
#pragma unroll
      for (int mt = 0; mt < C::kMt; ++mt) {
        mma<Math>(rows.o[mt][2 * i], weights[mt], b[0], b[1]);
        mma<Math>(rows.o[mt][2 * i + 1], weights[mt], b[2], b[3]);
      }
    }
  }
}

// Weights of the tile, times its V.
template <class C>
__device__ __forceinline__ void add_tile(Rows<C>& rows, float c, uint32_t v_tile, unsigned char* shared_weights, const Scores<C>& s) {
  constexpr int kSteps = C::kTokens / 16;
  if constexpr (C::kParts == 2) {
    // Exponentials of 16 tokens stand beside the products of those before.
    const int part = part_of_warp<C>();
    Weights<C> weights;
#pragma unroll
    for (int n = 0; n < kSteps; ++n) {
      make_weights<C>(rows, c, s, n, weights);
      show_weights<C>(shared_weights, n, weights);
      add_values<C>(rows, v_tile, part * C::kTokens + n * 16, weights);
    }
    sync_rows<C>();
#pragma unroll
    for (int n = 0; n < kSteps; ++n) {
      load_weights<C>(shared_address(shared_weights), n, weights);
      add_values<C>(rows, v_tile, (part ^ 1) * C::kTokens + n * 16, weights);
    }
  } else {
    // All weights come first. Mixed by the compiler, the two phases would take more moves of registers, and longer.
    Weights<C> weights[kSteps];
#pragma unroll
    for (int n = 0; n < kSteps; ++n) make_weights<C>(rows, c, s, n, weights[n]);
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kSteps; ++n) add_values<C>(rows, v_tile, n * 16, weights[n]);
  }
}

// Where the warp's dims are: its group `i` of 16 bytes of V's row (fp8: 16 dims, else 8) among those of the row.
template <class C>
__device__ __forceinline__ int group_of_row(int i) {
  return (i / 2 * C::kParts + part_of_warp<C>()) * 2 + i % 2;
}

// Gives a row's outputs to `put(dim, float4)`, four dims in their own order. Without fp8 a lane has pairs of dims; neighbours
// exchange them, so that a lane gets four dims of every other group of eight.
template <class C, class Put>
__device__ __forceinline__ void put_outputs(const float (&o)[C::kDims / 8][4], int half, float scale, Put put) {
  const int c = threadIdx.x % 4;
  if constexpr (C::kFp8) {
#pragma unroll
    for (int i = 0; i < C::kDims / 16; ++i) {  // fragments 2i, 2i + 1: even and odd dims of 16
      const float(&even)[4] = o[2 * i];
      const float(&odd)[4] = o[2 * i + 1];
      put(group_of_row<C>(i) * 16 + 4 * c,
          make_float4(even[2 * half] * scale, odd[2 * half] * scale, even[2 * half + 1] * scale, odd[2 * half + 1] * scale));
    }
  } else {
    const bool is_odd = c % 2 != 0;
#pragma unroll
    for (int i = 0; i < C::kDims / 8; i += 2) {
      const float(&x)[4] = o[i];
      const float(&y)[4] = o[i + 1];
      const float give0 = is_odd ? x[2 * half] : y[2 * half], give1 = is_odd ? x[2 * half + 1] : y[2 * half + 1];
      const float keep0 = is_odd ? y[2 * half] : x[2 * half], keep1 = is_odd ? y[2 * half + 1] : x[2 * half + 1];
      const float get0 = __shfl_xor_sync(~0u, give0, 1), get1 = __shfl_xor_sync(~0u, give1, 1);
      put(group_of_row<C>(i) * 8 + c % 2 * 8 + c / 2 * 4,
          is_odd ? make_float4(get0 * scale, get1 * scale, keep0 * scale, keep1 * scale)
                 : make_float4(keep0 * scale, keep1 * scale, get0 * scale, get1 * scale));
    }
  }
}

// The sums of weights of the warp's rows, over all tokens.
template <class C>
__device__ __forceinline__ void complete_sums(unsigned char* shared_weights, Rows<C>& rows) {
  float* sums = reinterpret_cast<float*>(shared_weights);  // [kParts][32], weights are done with
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2 * C::kMt; ++i) {
    float& l = rows.l[i / 2][i % 2];
    l = quad_sum(l);
    if (C::kParts == 2 && lane % 4 == 0) sums[part_of_warp<C>() * 32 + i * 8 + lane / 4] = l;
  }
  if constexpr (C::kParts == 2) {
    sync_rows<C>();
#pragma unroll
    for (int i = 0; i < 2 * C::kMt; ++i) rows.l[i / 2][i % 2] = sums[i * 8 + lane / 4] + sums[32 + i * 8 + lane / 4];
  }
}

// Writes the warp's rows of an item: results, or partial states to the workspace.
template <class C>
__device__ __forceinline__ void write_rows(const AttnParams& p, const Item& item, unsigned char* shared_weights, Rows<C>& rows) {
  using Q = typename C::Q;
  const auto& unit = item.unit;
  complete_sums<C>(shared_weights, rows);
  const bool writes_lse = threadIdx.x % 4 == 0 && part_of_warp<C>() == 0;
#pragma unroll
  for (int mt = 0; mt < C::kMt; ++mt) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float l = rows.l[mt][half], lse2 = l == 0.0f ? -kInf : rows.shift[mt][half] + log2_approx(l);
      const int row = item.first_row + row_in_item<C>(mt, half);
      const bool valid = row < item.num_rows;
      if (unit.facts.num_chunks > 1) {
        const int64_t to = partial_row(p, unit.facts, unit.kv_head, unit.chunk) + row;
        put_outputs<C>(rows.o[mt], half, end_row(l, lse2, -kInf).scale * p.v_scale, [&](int d, float4 x) {
          if (valid) *reinterpret_cast<float4*>(ptr<float>(p.partial_out) + to * C::kDv + d) = x;
        });
        if (valid && writes_lse) ptr<float>(p.partial_lse)[to] = lse2;
      } else {
        const int any_valid = min(row, item.num_rows - 1), token = item.token_of(any_valid);
        const int head = unit.kv_head * p.group_size + any_valid - token * p.group_size;
        const RowEnd end = end_row(l, lse2, sink_of(p, head));
        uint16_t* to = ptr<uint16_t>(p.out) + (unit.facts.q_begin + token) * p.out_stride_row + head * p.out_stride_head;
        put_outputs<C>(rows.o[mt], half, end.scale * p.v_scale, [&](int d, float4 x) {
          if (valid) *reinterpret_cast<uint2*>(to + d) = make_uint2(pack2<Q>(x.x, x.y), pack2<Q>(x.z, x.w));
        });
        if (valid && writes_lse) store_lse(p, unit.facts.q_begin + token, head, end.lse);
      }
    }
  }
}

// Starts copying an item's q and its first tile into the first stage. The page ids of two tiles are under way.
template <class C>
__device__ __forceinline__ void start_item(const AttnParams& p, const Item& item, unsigned char* shared) {
  RowPlace* places = reinterpret_cast<RowPlace*>(shared + C::kPlacesAt);
  const uint32_t q_tile = shared_address(shared);
  cp_async_wait<0>();
  make_places<C>(p, item, item.begin, places);
  __syncthreads();  // all are done with the item before
  if (item.num_rows > 0) {
    copy_tile<C>(item, item.begin, places, q_tile + C::kStagesAt);
    issue_q<C>(p, item, q_tile);
  }
  cp_async_commit();
}

// Sums an item's tiles, of which there is one at least (an empty chunk: all masked), and starts fetching page ids of `next`.
template <class C>
__device__ __forceinline__ void sum_tiles(const AttnParams& p, const Item& item, const Item& next, unsigned char* shared,
                                          unsigned char* shared_weights, float scale, float c, Rows<C>& rows) {
  const uint32_t q_tile = shared_address(shared), stages = q_tile + C::kStagesAt;
  RowPlace* places = reinterpret_cast<RowPlace*>(shared + C::kPlacesAt);
#pragma unroll
  for (int mt = 0; mt < C::kMt; ++mt) {
    rows.l[mt][0] = rows.l[mt][1] = 0.0f, rows.shift[mt][0] = rows.shift[mt][1] = kUnseen;
#pragma unroll
    for (int i = 0; i < C::kDims / 8; ++i) rows.o[mt][i][0] = rows.o[mt][i][1] = rows.o[mt][i][2] = rows.o[mt][i][3] = 0.0f;
  }
  int begin = item.begin;
  int odd = 0;  // number of the tile, modulo 2
#pragma unroll 1
  do {
    cp_async_wait<0>();
    if (begin + C::kTile < item.end) make_places<C>(p, item, begin + C::kTile, places + (odd ^ 1) * C::kTile);
    __syncthreads();
    const uint32_t stage = stages + odd * C::kStageBytes;
    if (begin + C::kTile < item.end) {
      copy_tile<C>(item, begin + C::kTile, places + (odd ^ 1) * C::kTile, stages + (odd ^ 1) * C::kStageBytes);
      fetch_pages<C>(p, item, begin + 2 * C::kTile, places + odd * C::kTile);
    } else if (next.num_rows > 0) {
      fetch_pages<C>(p, next, next.begin, places);
      fetch_pages<C>(p, next, next.begin + C::kTile, places + C::kTile);
    }
    cp_async_commit();
    odd ^= 1;
    if (C::kFp8 && begin == item.begin) convert_q<C>(shared);
    Scores<C> s;
    scores<C>(q_tile, stage, s);
    if (C::kGeneral || begin < item.clear_begin || begin + C::kTile > item.clear_end) mask_scores<C>(p, item, begin, scale, s);
    raise_shifts<C>(rows, c, shared_weights, s);
    add_tile<C>(rows, c, stage + C::kVAt, shared_weights, s);
    begin += C::kTile;
  } while (begin < item.end);
}

template <class C>
__device__ __forceinline__ void extend(const AttnParams& p) {
  extern __shared__ __align__(128) unsigned char shared[];
  check_shape<kKernelExtend, C::kDq, C::kDv>(p);
  wait_for_previous();
  const float scale = p.sm_scale * p.k_scale;
  const float c = C::kGeneral ? 1.0f : scale * kLog2e;  // general: scores are shaped, in base 2, before the softmax
  unsigned char* shared_weights = shared + C::kWeightsAt + threadIdx.x / 64 * C::kWeightsBytes;  // of the pair
  Item* items = reinterpret_cast<Item*>(shared + C::kItemsAt);  // item i is at i modulo 3
  if (threadIdx.x == 0) {
    Item none;
    none.unit.init(p, static_cast<int>(blockIdx.x));
    none.first_row = none.num_rows = 0;
    none.claimed = static_cast<int>(blockIdx.x);
    none.group_magic = (0x7fffffffu + static_cast<uint32_t>(p.group_size)) / static_cast<uint32_t>(p.group_size);
    items[0] = item_after<C>(p, none);
  }
  __syncthreads();
  if (items[0].num_rows > 0) {
    RowPlace* places = reinterpret_cast<RowPlace*>(shared + C::kPlacesAt);
    fetch_pages<C>(p, items[0], items[0].begin, places);
    fetch_pages<C>(p, items[0], items[0].begin + C::kTile, places + C::kTile);
    cp_async_commit();
    start_item<C>(p, items[0], shared);
  }
  if (threadIdx.x == 0) items[0].claimed = claim_after<C>(p, items[0]);
  Item* current = items;
#pragma unroll 1
  while (current->num_rows > 0) {
    // This item's q and first tile are under way.
    const Item& item = *current;
    current = current == items + 2 ? items : current + 1;
    Item& next = *current;
    if (threadIdx.x == 0) next = item_after<C>(p, item);
    Rows<C> rows;
    sum_tiles<C>(p, item, next, shared, shared_weights, scale, c, rows);
    start_item<C>(p, next, shared);
    const int claimed = threadIdx.x == 0 ? claim_after<C>(p, next) : 0;
    write_rows<C>(p, item, shared_weights, rows);
    if (threadIdx.x == 0) next.claimed = claimed;
  }
  zero_padding_rows<typename C::Q, C::kDv>(p, static_cast<int>(blockDim.x));
  launch_dependents();
  if (p.claim != 0 && threadIdx.x == 0) leave_claims(p);
}

}  // namespace

#define bf16 Bf16
#define f16 F16
#define fp8 Fp8
#define KERNEL(name, q, kv, dqk, dvo, general, threads, shared_bytes, blocks, rows)                                                  \
  static_assert(Config<q, kv, dqk, dvo, general, rows>::kThreads == threads, "the list states the block size");                      \
  static_assert(Config<q, kv, dqk, dvo, general, rows>::kSharedBytes == shared_bytes, "the list states the shared memory");          \
  extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ AttnParams p) {                         \
    extend<Config<q, kv, dqk, dvo, general, rows>>(p);                                                                               \
  }
#include "extend.inst"

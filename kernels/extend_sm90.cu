// Attention for many query rows on Hopper: what extend.cu does, with products of warpgroups (wgmma).
//
//   unit = (tile of query tokens, KV head, chunk of KV);  row = token x group + head, so a group shares its KV loads
//
// Grid: any; blocks are persistent and claim units, or take ranges of them by stride. One block an SM: one warpgroup copies,
// kGroups others compute 64 rows each over tiles of kTile tokens. The copying one runs ahead, into the next units too, as far as
// the stages reach; rows of q have kQs places of their own. A unit of more rows than the block holds passes over its KV once for
// each kRows. A row's arithmetic depends on its chunk alone, and on where its tile's KV begins, not on how things are copied.
//
// Where there are tensor maps, the device copies boxes by itself and each copying warp has a part (extend_sm90_boxes.cuh); where
// there are none, all four copy row by row (extend_sm90_loader.cuh). Computing is compiled for either: copies by threads need fences.
//
// KV in e4m3 becomes f16, which holds every e4m3 value, on its way to where products read it (extend_sm90_fp8.cuh), and so do rows of q
// in bf16, in place. Copying warps have parts then, with maps or without.
//
// The computing ones start the scores of tile j + 1 before the values of tile j, and do the softmax of the one while the other
// product runs. They take turns in issuing products, so one is in its softmax while those of another run. The first scores of
// a unit are started before the results of the one before are written. Tiles that none of a warpgroup's rows sees it lets go
// by: they would change nothing, bit for bit.
//
// Shared memory: kQs x kRows rows of q; kStages x (tile of K, tile of V), as wgmma.cuh has them; units; barriers.
// Registers: 64 x kDv / 128 outputs a thread, kTile / 2 scores, kTile / 4 weights.
// Barriers: `full` when copies are there, `empty` when every computing warp is done, one of each for every stage of K and of V
//   and every place of q; with maps of rows, for every warpgroup's part of a place. `made`, `begun`, `done`: of units, with maps.
//   e4m3: `raw` of a stage when copies are there, `full` when they are f16.
//   Without maps a unit is written before the `full` of its q, and its place is written again three units later, for which the q
//   of a unit after it must have been let go. With maps units have their own barriers, at which every thread that wrote or read
//   arrives: what a lane arrives for others is ordered too, but racecheck does not know it.
// Results leave from registers, or (whole boxes of 64 rows, two places of q) by way of the warpgroup's rows of q, which are then
//   let go when the results are there instead of after the last scores.
// Rows of V beyond the request are zero, never read; those of K beyond the chunk are zero, tokens of no row's sight, or what was there
//   before, and their scores masked. Surplus rows of q are garbage, and their results dropped.
#include "extend_sm90_boxes.cuh"
#include "extend_sm90_loader.cuh"
#include "primitives/launch.cuh"
#include "primitives/rows.cuh"
#include "primitives/softmax.cuh"

namespace {

// Row of the pass that this thread has: the first of two, the other is 8 below.
__device__ __forceinline__ int row_of_thread() {
  const unsigned thread = thread_number();
  return static_cast<int>(thread / 32 * 16 + thread % 32 / 4) - 64;
}

// A thread's share of the warpgroup's 64 rows: halves of two rows.
template <class C>
struct Rows {
  float o[C::kDv / 2];
  float m[2], l[2];
};

template <class C>
using Scores = float[C::kTile / 2];

template <class C>
using Weights = uint32_t[C::kTile / 16][4];

template <class C>
__device__ __forceinline__ void start_scores(uint32_t q, uint32_t k, Scores<C>& s) {
  q = __shfl_sync(~0u, q, 0);  // in a uniform register; operands are made of it anew for every tile
  const Operand rows(q, kBlock, 16), keys(k, C::kKGroup, 16);
  hold(s);
  products_begin();
#pragma unroll
  for (int i = 0; i < C::kDq / 16; ++i) {
    scores_product<typename C::Math>(s, rows.at(i / 4 * 64 * kPanelRow + i % 4 * 32), keys.at(i / 4 * kBlock + i % 4 * 32), i > 0);
  }
  products_commit();
}

template <class C>
__device__ __forceinline__ void start_values(const Weights<C>& weights, uint32_t v, Rows<C>& rows) {
  const Operand values(v, C::kVGroup, kBlock);
  hold(rows.o);
  products_begin();
#pragma unroll
  for (int i = 0; i < C::kTile / 16; ++i) values_product<typename C::Math>(rows.o, weights[i], values.at(i * 2 * C::kVGroup));
  products_commit();
}

// A row of this thread, and what it sees.
struct RowSight {
  int token, head_in_group, q_pos;
  KeyRange keys;
};

__device__ __forceinline__ RowSight sight_of_row(const AttnParams& p, uint32_t magic, const Work& work, int half) {
  const int row = min(work.first_row + row_of_thread() + half * 8, work.num_rows - 1), token = token_of(p, magic, row);  // surplus rows: any
  const int q_pos = work.at.facts.q_pos + token;
  KeyRange keys = visible_keys(p, q_pos);
  keys.last = min(keys.last, work.end - 1);
  return {token, row - token * p.group_size, q_pos, keys};
}

// -inf for keys that rows do not see, on one side of those that they do.
template <class C, bool kAbove>
__device__ __forceinline__ void mask_side(const AttnParams& p, uint32_t magic, const Work& work, int tile_begin, Scores<C>& s) {
  int bounds[2];  // from the thread's first key of the tile on
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const KeyRange keys = sight_of_row(p, magic, work, half).keys;
    bounds[half] = (kAbove ? keys.last : keys.first) - (tile_begin + static_cast<int>(threadIdx.x % 4) * 2);
  }
#pragma unroll
  for (int n = 0; n < C::kTile / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = n * 8 + i % 2;
      if (kAbove ? key > bounds[i / 2] : key < bounds[i / 2]) s[4 * n + i] = -kInf;
    }
  }
}

template <class C>
__device__ __forceinline__ void mask_scores(const AttnParams& p, uint32_t magic, const Work& work, const Sight& sight, int tile_begin,
                                            Scores<C>& s) {
  if (tile_begin + C::kTile > sight.unmasked_end) mask_side<C, true>(p, magic, work, tile_begin, s);
  if (tile_begin < sight.unmasked_begin) mask_side<C, false>(p, magic, work, tile_begin, s);
}

// Softcap, ALiBi, then -inf for keys that a row does not see.
template <class C>
__device__ __forceinline__ void shape_scores(const AttnParams& p, uint32_t magic, const Work& work, int tile_begin, Scores<C>& s) {
  const float scale = p.sm_scale * p.k_scale;
  const int first = tile_begin + threadIdx.x % 4 * 2;
  const int64_t mask_begin = ptr<const AttnTile>(p.tiles)[work.at.tile].mask_begin;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const RowSight row = sight_of_row(p, magic, work, half);
    const float slope = p.alibi_slopes != 0 ? ptr<const float>(p.alibi_slopes)[work.at.kv_head * p.group_size + row.head_in_group] : 0.0f;
#pragma unroll
    for (int n = 0; n < C::kTile / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key = first + n * 8 + i;
        float& x = s[4 * n + 2 * half + i];
        bool visible = key >= row.keys.first && key <= row.keys.last;
        x = shape_score(p, x * scale, slope, key - row.q_pos) * kLog2e;
        if (p.custom_mask != 0 && visible) visible = mask_bit(p, mask_begin, work.at.facts.kv_len, row.token, key);
        if (!visible) x = -kInf;
      }
    }
  }
}

// Turns scores into weights (still f32); `rescale` is what becomes of earlier sums.
template <class C>
__device__ __forceinline__ void softmax_step(Rows<C>& rows, float c, Scores<C>& s, float (&rescale)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float m = rows.m[half];
#pragma unroll
    for (int n = 0; n < C::kTile / 8; ++n) m = fmaxf(m, fmaxf(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]));
    m = next_maximum(rows.m[half], quad_max(m), c);
    rescale[half] = rescale_factor(rows.m[half], m, c);
    rows.m[half] = m;
    const float offset = exponent_offset(m, c);
    float l = rows.l[half] * rescale[half];
#pragma unroll
    for (int n = 0; n < C::kTile / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& x = s[4 * n + 2 * half + i];
        x = exp2_approx(fmaf(x, c, -offset));
        l += x;
      }
    }
    rows.l[half] = l;
  }
}

template <class C>
__device__ __forceinline__ void pack_weights(const Scores<C>& s, Weights<C>& weights) {
#pragma unroll
  for (int i = 0; i < C::kTile / 4; ++i) weights[i / 4][i % 4] = pack2<typename C::Math>(s[2 * i], s[2 * i + 1]);
}

template <class C>
__device__ __forceinline__ void rescale_outputs(Rows<C>& rows, const float (&rescale)[2]) {
  if (!__any_sync(~0u, rescale[0] != 1.0f || rescale[1] != 1.0f)) return;
#pragma unroll
  for (int i = 0; i < C::kDv / 2; ++i) rows.o[i] *= rescale[i / 2 % 2];
}

// One warpgroup after the other issues products, each for every tile once, also for those that it lets go by. So one is in its
// softmax while the products of another run. `group` is the same for a warp.
__device__ __forceinline__ void take_turn(int group) { meet(kTurn + group, 256); }

// The next warpgroup's turn: it waits, this one does not.
template <class C>
__device__ __forceinline__ void pass_turn(int group) {
  announce(group == C::kGroups - 1 ? kTurn : kTurn + 1 + group, 256);
}

__device__ __forceinline__ void release(uint64_t* barrier) {
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// Waits for what products read. Copies by threads need a fence, boxes do not.
__device__ __forceinline__ void wait_full(uint64_t* barrier, int parity, bool is_of_boxes) {
  barrier_wait(barrier, parity);
  if (!is_of_boxes) publish_to_products();
}

// Lets tiles go by.
template <class C>
__device__ __forceinline__ void skip_tiles(Shared<C>& shared, Ring<C::kStages>& stage, int group, int count) {
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    barrier_wait(&shared.full_k[stage.at], stage.parity);
    take_turn(group);
    pass_turn<C>(group);
    release(&shared.empty_k[stage.at]);
    barrier_wait(&shared.full_v[stage.at], stage.parity);
    release(&shared.empty_v[stage.at]);
    stage.advance();
  }
}

// The warpgroup's rows of q become f16, in place.
template <class C>
__device__ __forceinline__ void convert_q(uint32_t rows, int group) {
  rows += thread_number() % 128 * 16;
#pragma unroll 2
  for (int i = 0; i < C::kDq / 16; ++i) {
    auto convert = [](uint32_t two) {
      const float2 x = unpack2<typename C::Q>(two);
      return pack2<F16>(x.x, x.y);
    };
    const uint4 x = load_shared4(rows + i * 128 * 16);
    store_shared4(rows + i * 128 * 16, make_uint4(convert(x.x), convert(x.y), convert(x.z), convert(x.w)));
  }
  publish_to_products();
  meet(kGroupMeet + group, 128);
}

// A computing warpgroup on its way through the units of the block. kMapped: copying warps have parts, and tiles of KV need no fence.
template <class C, bool kMapped>
struct Walk {
  const AttnMappedParams& mapped;
  const AttnParams& p;
  Shared<C>& shared;
  Ring<C::kStages> stage;
  float c;  // scores times this are exponents of 2
  int group;

  __device__ __forceinline__ const Work& work_of(unsigned unit) const { return shared.units[unit % C::kUnits]; }

  __device__ __forceinline__ const Sight& sight_in(const Work& work) const { return work.sights[group]; }

  // Which barriers of a place of q are the warpgroup's.
  __device__ __forceinline__ int of_group() const { return kMapped && mapped.has_row_maps != 0 ? group : 0; }

  // Whether the warpgroup's results leave by way of its rows of q.
  __device__ __forceinline__ bool sends_boxes(const Work& work) const { return kMapped && C::kSendsBoxes && group < work.num_sent; }

  // Waits for unit `unit`, lets the tiles go by that the warpgroup does not see, and starts the scores of the first that it does
  // (of anything where there is none, so that what is under way is always the same).
  __device__ __forceinline__ void enter(unsigned unit, Scores<C>& s) {
    const unsigned place = unit % C::kQs;
    if (kMapped) barrier_wait(&shared.made[unit % C::kUnits], unit / C::kUnits % 2);
    wait_full(&shared.full_q[place][of_group()], unit / C::kQs % 2, kMapped && mapped.has_row_maps != 0);
    const Work& work = work_of(unit);
    if (work.num_rows != 0) skip_tiles<C>(shared, stage, group, sight_in(work).first_tile);
    const bool sees = work.num_rows != 0 && sight_in(work).first_tile < sight_in(work).last_tile;
    if constexpr (C::kConvertsQ) {
      if (sees) convert_q<C>(shared_address(shared.q[place] + group * 64 * C::kDq * 2), group);
    }
    if (sees) wait_full(&shared.full_k[stage.at], stage.parity, kMapped);
    if (sees) take_turn(group);
    start_scores<C>(shared_address(shared.q[place] + group * 64 * C::kDq * 2), shared_address(shared.k[stage.at]), s);
    if (sees) pass_turn<C>(group);
  }

  __device__ __forceinline__ void shape(const Work& work, int pos, Scores<C>& s) const {
    const Sight& sight = sight_in(work);
    if constexpr (C::kGeneral) {
      shape_scores<C>(p, shared.magic, work, pos, s);
    } else if (pos < sight.unmasked_begin || pos + C::kTile > sight.unmasked_end) {
      mask_scores<C>(p, shared.magic, work, sight, pos, s);
    }
  }

  __device__ __forceinline__ void begin_values(const Weights<C>& weights, Rows<C>& rows) {
    const Ring<C::kStages> of_values = stage.before();
    wait_full(&shared.full_v[of_values.at], of_values.parity, kMapped);
    start_values<C>(weights, shared_address(shared.v[of_values.at]), rows);
  }

  // The unit whose first scores are under way; its last values are under way in the end, unless tiles follow that it does not see.
  __device__ __forceinline__ bool compute(unsigned unit, const Work& work, Scores<C>& s, Rows<C>& rows) {
    uint64_t* empty_q = &shared.empty_q[unit % C::kQs][of_group()];
    rows.m[0] = rows.m[1] = -kInf, rows.l[0] = rows.l[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < C::kDv / 2; ++i) rows.o[i] = 0.0f;
    products_wait<0>();
    hold(s);
    const int num_unseen = (work.end - work.begin + C::kTile - 1) / C::kTile - sight_in(work).last_tile;
    bool is_pending = false;
    if (sight_in(work).first_tile < sight_in(work).last_tile) {
      int pos = work.begin + sight_in(work).first_tile * C::kTile;
      const int end = work.begin + sight_in(work).last_tile * C::kTile;
      Weights<C> weights;
      float rescale[2];
      release(&shared.empty_k[stage.at]);
      shape(work, pos, s);
      softmax_step<C>(rows, c, s, rescale);
      pack_weights<C>(s, weights);
      stage.advance();
#pragma unroll 1
      for (pos += C::kTile; pos < end; pos += C::kTile) {
        if (!C::kOverlaps) {
          begin_values(weights, rows);
          end_values(rows);
        }
        wait_full(&shared.full_k[stage.at], stage.parity, kMapped);
        take_turn(group);
        start_scores<C>(shared_address(shared.q[unit % C::kQs] + group * 64 * C::kDq * 2), shared_address(shared.k[stage.at]), s);
        if (C::kOverlaps) begin_values(weights, rows);
        pass_turn<C>(group);
        products_wait<C::kOverlaps ? 1 : 0>();
        hold(s);
        release(&shared.empty_k[stage.at]);
        shape(work, pos, s);
        softmax_step<C>(rows, c, s, rescale);
        if (C::kOverlaps) end_values(rows);
        pack_weights<C>(s, weights);
        rescale_outputs<C>(rows, rescale);
        stage.advance();
      }
      if (!sends_boxes(work)) release(empty_q);
      begin_values(weights, rows);
      is_pending = true;
      if (num_unseen > 0) {
        end_values(rows);
        is_pending = false;
      }
    } else if (!sends_boxes(work)) {
      release(empty_q);
    }
    skip_tiles<C>(shared, stage, group, num_unseen);
    return is_pending;
  }

  __device__ __forceinline__ void end_values(Rows<C>& rows) {
    products_wait<0>();
    hold(rows.o);
    release(&shared.empty_v[stage.before().at]);
  }
};

// Partial states of the thread's rows, to the workspace.
template <class C>
__device__ __forceinline__ void write_partials(const AttnParams& p, const Work& work, float c, Rows<C>& rows) {
  const int64_t base = partial_row(p, work.at.facts, work.at.kv_head, work.at.chunk);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float l = quad_sum(rows.l[half]);
    const int row = work.first_row + row_of_thread() + half * 8;
    if (row >= work.num_rows) continue;
    const float lse2 = lse_base2(rows.m[half], l, c);
    const float scale = end_row(l, lse2, -kInf).scale * p.v_scale;
    float* to = ptr<float>(p.partial_out) + (base + row) * C::kDv + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < C::kDv / 8; ++i) *reinterpret_cast<float2*>(to + i * 8) = make_float2(rows.o[4 * i + 2 * half] * scale, rows.o[4 * i + 2 * half + 1] * scale);
    if (threadIdx.x % 4 == 0) ptr<float>(p.partial_lse)[base + row] = lse2;
  }
}

// Words of the four lanes of a quad, transposed: lane i has word i of every lane, in order.
__device__ __forceinline__ void transpose_quad(uint32_t (&x)[4]) {
  const bool is_odd = threadIdx.x & 1, is_high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {  // pairs of lanes
    const uint32_t got = __shfl_xor_sync(~0u, is_odd ? x[i] : x[i + 1], 1);
    x[i] = is_odd ? got : x[i], x[i + 1] = is_odd ? x[i + 1] : got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {  // pairs of pairs
    const uint32_t got = __shfl_xor_sync(~0u, is_high ? x[i] : x[i + 2], 2);
    x[i] = is_high ? got : x[i], x[i + 2] = is_high ? x[i + 2] : got;
  }
}

// Results of the thread's rows. Quads swap words, so that stores are 16 bytes wide.
template <class C>
__device__ __forceinline__ void write_results(const AttnParams& p, uint32_t magic, const Work& work, float c, Rows<C>& rows) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float l = quad_sum(rows.l[half]);
    const int of_pass = row_of_thread() + half * 8, row = min(work.first_row + of_pass, work.num_rows - 1);
    const bool is_real = work.first_row + of_pass < work.num_rows;
    const int token = token_of(p, magic, row), head = work.at.kv_head * p.group_size + row - token * p.group_size;
    const int in_batch = work.at.facts.q_begin + token;
    const RowEnd end = end_row(l, lse_base2(rows.m[half], l, c), sink_of(p, head));
    const float scale = end.scale * p.v_scale;
    uint16_t* to = ptr<uint16_t>(p.out) + in_batch * p.out_stride_row + head * p.out_stride_head + threadIdx.x % 4 * 8;
#pragma unroll
    for (int i = 0; i < C::kDv / 32; ++i) {
      uint32_t x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = pack2<typename C::Q>(rows.o[16 * i + 4 * j + 2 * half] * scale, rows.o[16 * i + 4 * j + 2 * half + 1] * scale);
      transpose_quad(x);
      if (is_real) *reinterpret_cast<uint4*>(to + i * 32) = make_uint4(x[0], x[1], x[2], x[3]);
    }
    if (threadIdx.x % 4 == 0 && is_real) store_lse(p, in_batch, head, end.lse);
  }
}

// Results of the warpgroup's rows, all of them real, to where its rows of q were; from there a copying warp stores them.
template <class C>
__device__ __forceinline__ void send_results(const AttnParams& p, Shared<C>& shared, unsigned unit, int group, float c, Rows<C>& rows) {
  const Work& work = shared.units[unit % C::kUnits];
  const unsigned thread = thread_number() % 128;
  // Two lanes of four find the end of each of their two rows.
  const bool is_second = thread & 2;
  const float sums[2] = {quad_sum(rows.l[0]), quad_sum(rows.l[1])};
  const float l = is_second ? sums[1] : sums[0], m = is_second ? rows.m[1] : rows.m[0];
  const int of_unit = work.first_row + row_of_thread() + (is_second ? 8 : 0);
  const int token = token_of(p, shared.magic, of_unit), head = work.at.kv_head * p.group_size + of_unit - token * p.group_size;
  const RowEnd end = end_row(l, lse_base2(m, l, c), sink_of(p, head));
  const float scale = end.scale * p.v_scale;
  const float scales[2] = {__shfl_sync(~0u, scale, 0, 4), __shfl_sync(~0u, scale, 2, 4)};
  // Lanes say where rows of two neighbouring chunks begin, first 8 rows and last 8 rows of each.
  const unsigned row = thread / 32 * 16 + thread % 16;
  const uint32_t to = shared_address(shared.q[unit % C::kQs]) + group * 64 * C::kDq * 2 + row * kPanelRow;
  meet(kGroupMeet + group, 128);  // all products that read q have ended
#pragma unroll
  for (int i = 0; i < C::kDv / 16; ++i) {
    uint32_t x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = pack2<typename C::Q>(rows.o[8 * i + 2 * j] * scales[j % 2], rows.o[8 * i + 2 * j + 1] * scales[j % 2]);
    store_matrices(to + i / 4 * 64 * kPanelRow + ((i % 4 * 2 + thread % 32 / 16) ^ thread % 8) * 16, x[0], x[1], x[2], x[3]);
  }
  publish_to_products();
  __syncwarp();
  release(&shared.empty_q[unit % C::kQs][group]);
  if (thread % 2 == 0) store_lse(p, work.at.facts.q_begin + token, head, end.lse);  // last: the fence would wait for it
}

template <class C, bool kMapped>
__device__ __forceinline__ void compute_all(const AttnMappedParams& mapped, Shared<C>& shared) {
  const AttnParams& p = mapped.attn;
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0) - 1;  // known to be the same for a warp
  // General: scores are shaped, in base 2, before the softmax.
  Walk<C, kMapped> walk = {mapped, p, shared, {}, C::kGeneral ? 1.0f : p.sm_scale * p.k_scale * kLog2e, group};
  if (group == C::kGroups - 1) pass_turn<C>(group);  // the first turn is the first warpgroup's
  Scores<C> s;
  walk.enter(0, s);
#pragma unroll 1
  for (unsigned unit = 0; walk.work_of(unit).num_rows != 0; ++unit) {
    Rows<C> rows;
    const bool is_pending = walk.compute(unit, walk.work_of(unit), s, rows);
    const int of_values = walk.stage.before().at;
    if (C::kEntersEarly) walk.enter(unit + 1, s);
    products_wait<C::kEntersEarly ? 1 : 0>();
    hold(rows.o);
    if (is_pending) release(&shared.empty_v[of_values]);
    if (walk.work_of(unit).first_row + group * 64 >= walk.work_of(unit).num_rows) {
      // The warpgroup has no rows.
    } else if (walk.sends_boxes(walk.work_of(unit))) {
      send_results<C>(p, shared, unit, group, walk.c, rows);
    } else if (walk.work_of(unit).at.facts.num_chunks > 1) {
      write_partials<C>(p, walk.work_of(unit), walk.c, rows);
    } else {
      write_results<C>(p, shared.magic, walk.work_of(unit), walk.c, rows);
    }
    barrier_arrive(&shared.done[unit % C::kUnits]);
    if (!C::kEntersEarly) walk.enter(unit + 1, s);
  }
  products_wait<0>();
  hold(s);
}

// How many arrivals end a barrier's phase.
template <class C>
__device__ __forceinline__ void init_barriers(const AttnMappedParams& mapped, Shared<C>& shared) {
  const int copying_q = mapped.has_row_maps != 0 ? 0 : has_parts<C>(mapped) ? 32 : C::kWarpgroup - 32;
  const int copying_tile = C::kFp8 ? 64 : has_parts<C>(mapped) ? 1 : C::kWarpgroup;
  constexpr int kComputing = C::kGroups * 4;  // warps
  for (int i = 0; i < C::kQs * C::kGroups; ++i) {
    barrier_init(&shared.full_q[0][0] + i, copying_q + 1), barrier_init(&shared.empty_q[0][0] + i, mapped.has_row_maps != 0 ? 4 : kComputing);
  }
  for (int i = 0; i < C::kStages; ++i) {
    barrier_init(&shared.full_k[i], copying_tile), barrier_init(&shared.empty_k[i], kComputing);
    barrier_init(&shared.full_v[i], copying_tile), barrier_init(&shared.empty_v[i], kComputing);
    if (C::kFp8) barrier_init(&shared.raw_k[i], 33), barrier_init(&shared.raw_v[i], 33);
  }
  for (int i = 0; i < C::kUnits; ++i) {
    barrier_init(&shared.made[i]), barrier_init(&shared.begun[i], 1);
    barrier_init(&shared.done[i], 32 * (kComputing + (has_parts<C>(mapped) ? 3 : 0)));
  }
}

__device__ __forceinline__ void prefetch_maps(const AttnMappedParams& mapped) {
  if (mapped.has_maps != 0) prefetch_map(&mapped.k_map), prefetch_map(&mapped.v_map);
  if (mapped.has_row_maps != 0) prefetch_map(&mapped.q_map), prefetch_map(&mapped.out_map);
}

template <class C>
__device__ __forceinline__ void extend(const AttnMappedParams& mapped) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared<C>& shared = *reinterpret_cast<Shared<C>*>(memory);
  const AttnParams& p = mapped.attn;
  check_shape<kKernelExtend, C::kDq, C::kDv>(p);
  if (threadIdx.x == 0) init_barriers<C>(mapped, shared);
  if (threadIdx.x == 32) prefetch_maps(mapped);
  wait_for_previous();
  int claimed = static_cast<int>(blockIdx.x);
  if (threadIdx.x < 32) {
    Work& none = shared.units[C::kUnits - 1];
    if (threadIdx.x == 0) shared.magic = group_magic(p);
    if (threadIdx.x == 0) none.at.init(p, static_cast<int>(blockIdx.x)), none.begin = none.end = none.num_rows = none.first_row = 0;
    __syncwarp();
    make_next<C>(mapped, group_magic(p), none, shared.units[0], claimed);
  }
  zero_padding_rows<typename C::Q, C::kDv>(p, static_cast<int>(blockDim.x));
  __syncthreads();
  if (threadIdx.x < C::kWarpgroup) {
    give_registers<C::kCopyRegisters>();
    if (has_parts<C>(mapped)) {
      copy_by_parts<C>(mapped, shared, claimed);
    } else {
      copy_all<C>(mapped, shared, claimed);
    }
    launch_dependents();
    if (p.claim != 0 && threadIdx.x == 0) leave_claims(p);
  } else {
    take_registers<C::kComputeRegisters>();
    if (has_parts<C>(mapped)) {
      compute_all<C, true>(mapped, shared);
    } else {
      compute_all<C, false>(mapped, shared);
    }
  }
}

}  // namespace

#define bf16 Bf16
#define f16 F16
#define fp8 Fp8
#define KERNEL(name, q, kv, dqk, dvo, general, threads, shared_bytes, blocks, rows)                                                  \
  static_assert(Config<q, kv, dqk, dvo, general, rows>::kThreads == threads, "the list states the block size");                      \
  static_assert(sizeof(Shared<Config<q, kv, dqk, dvo, general, rows>>) == shared_bytes, "the list states the shared memory");        \
  extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ AttnMappedParams p) {                   \
    extend<Config<q, kv, dqk, dvo, general, rows>>(p);                                                                               \
  }
#include "extend_sm90.inst"

//! The planner against a naive twin and against its promises: every visible (row, head, key) is covered once, chunk
//! boundaries depend on the request alone, workers and padding change nothing, the workspace bound holds.

#![allow(clippy::unwrap_used)]

use std::collections::HashMap;

use attn_metadata::plan::{Chunking, CutBy, Plan, PlanConfig, PlanReport, Sharing, Unit, workspace_requirement};
use attn_metadata::{Batch, BatchLimits, HeadShape, Layer, LayerParams, ModelSpec, PlanGroup, PoolShape, RawBatch};
use kvpool::{Dtype, KvDtype, PageSize};
use proptest::prelude::*;

/// A batch of (q_len, kv_len) with one page each, and some padding rows.
fn batch(lens: &[(u32, u32)], padding: u32) -> Batch {
    let page = 1 << 20;
    let pool = PoolShape { num_pages: 1, page_size: PageSize::new(page).unwrap() };
    let mut raw = (vec![0i32], vec![0i32], vec![], vec![]);
    for &(q, kv) in lens {
        raw.0.push(raw.0.last().unwrap() + i32::try_from(q).unwrap());
        raw.1.push(raw.1.last().unwrap() + i32::from(kv > 0));
        raw.2.extend((kv > 0).then_some(0));
        raw.3.push(i32::try_from(kv).unwrap());
    }
    let num_rows = usize::try_from(*raw.0.last().unwrap()).unwrap() + padding as usize;
    let raw = RawBatch {
        num_rows,
        qo_indptr: &raw.0,
        kv_indptr: &raw.1,
        kv_indices: &raw.2,
        kv_last_page_len: &raw.3,
        slot_mapping: None,
        custom_mask: None,
    };
    Batch::from_raw(pool, &raw).unwrap()
}

/// The naive twin: for each (request, query, KV head) the keys it sees, straight from the definitions.
fn naive(lens: &[(u32, u32)], group: &PlanGroup) -> HashMap<(u32, u32, u32), Vec<u32>> {
    let mut seen = HashMap::new();
    for (request, &(q, kv)) in (0u32..).zip(lens) {
        for (row, head) in (0..q).flat_map(|r| (0..group.heads.num_kv_heads).map(move |h| (r, h))) {
            let position = i64::from(kv) - i64::from(q) + i64::from(row);
            let sees = |key: &u32| {
                let key = i64::from(*key);
                (!group.causal || key <= position) && group.window_left.is_none_or(|w| key >= position - i64::from(w))
            };
            seen.insert((request, row, head), (0..kv).filter(sees).collect());
        }
    }
    seen
}

/// What the plan's units cover, each row clipped to what it sees; asserts that no key comes twice and that partial
/// rows do not overlap.
fn covered(plan: &Plan, lens: &[(u32, u32)], group: &PlanGroup) -> HashMap<(u32, u32, u32), Vec<u32>> {
    let (mut seen, mut rows): (HashMap<_, Vec<u32>>, Vec<u64>) = Default::default();
    let mut numbers = Vec::new();
    for range in plan.ranges() {
        for unit in plan.units(range) {
            numbers.push(plan.number(&unit));
            let tile = &plan.tiles()[unit.tile as usize];
            let chunk = tile.chunk(unit.chunk);
            if tile.is_split() {
                let first = tile.partial_row(unit.kv_head, unit.chunk, group.heads.group_size());
                rows.extend(first..first + u64::from(tile.q_len * group.heads.group_size()));
            }
            let (q, kv) = lens[tile.request as usize];
            for row in tile.q_begin..tile.q_begin + tile.q_len {
                let position = i64::from(kv) - i64::from(q) + i64::from(row);
                let end = if group.causal { (position + 1).max(0) } else { i64::from(kv) };
                let begin = group.window_left.map_or(0, |w| position - i64::from(w));
                let keys = chunk.clone().filter(|k| (begin..end).contains(&i64::from(*k)));
                seen.entry((tile.request, row, unit.kv_head)).or_default().extend(keys);
            }
        }
    }
    if plan.config().sharing.is_by_unit() {
        numbers.sort_unstable();
        seen.values_mut().for_each(|keys| keys.sort_unstable());
    }
    assert!(numbers.into_iter().eq(0..plan.num_units()), "units come once, in order");
    rows.sort_unstable();
    assert!(rows.iter().copied().eq(0..plan.num_partial_rows()), "partial rows are used once, without gaps");
    seen
}

fn config() -> impl Strategy<Value = PlanConfig> {
    let by = prop_oneof![Just(CutBy::Request), Just(CutBy::Batch)];
    let chunking =
        (by, prop_oneof![1..40u32, Just(u32::MAX)], 1..9u32, 0..6u32).prop_map(|(by, chunk_len, part, max_q_len)| {
            Chunking { by, chunk_len, shortest: (chunk_len / part).max(1), max_q_len }
        });
    let sharing = prop_oneof![
        Just(Sharing::Even),
        Just(Sharing::InOrder),
        (1u32..9, 0..40u32).prop_map(|(rest_len, short_kv_len)| Sharing::LongestFirst { rest_len, short_kv_len })
    ];
    (1..20u32, chunking, 1..9u32, sharing, 0..50u32).prop_map(
        |(tile_len, chunking, num_workers, sharing, unit_overhead)| PlanConfig {
            tile_len,
            chunking,
            num_workers,
            sharing,
            unit_overhead,
        },
    )
}

fn cut_by(by: CutBy, config: PlanConfig) -> PlanConfig {
    PlanConfig { chunking: Chunking { by, ..config.chunking }, ..config }
}

fn unit_cost(plan: &Plan, unit: Unit) -> u64 {
    plan.unit_cost(&plan.tiles()[unit.tile as usize], unit.chunk)
}

/// Number of the first unit of each worker's share, by walking all units.
fn naive_even(plan: &Plan) -> Vec<u64> {
    let all: Vec<Unit> = plan.ranges().iter().flat_map(|range| plan.units(range)).collect();
    let workers = u64::from(plan.config().num_workers);
    let begin = |worker: u64| {
        let target = plan.total_cost() * worker / workers;
        let mut cost = 0;
        let before = all.iter().take_while(|unit| {
            let starts_before = cost < target;
            cost += unit_cost(plan, **unit);
            starts_before
        });
        u64::try_from(before.count()).unwrap()
    };
    (0..workers).map(begin).collect()
}

fn group() -> impl Strategy<Value = PlanGroup> {
    (1..4u32, 1..4u32, any::<bool>(), prop::option::of(0..50u32)).prop_map(|(kv, size, causal, window_left)| {
        PlanGroup::plain(HeadShape::new(kv * size, kv, 8), causal, window_left)
    })
}

fn lens() -> impl Strategy<Value = Vec<(u32, u32)>> {
    prop::collection::vec((prop_oneof![3 => 0..4u32, 1 => 0..40u32], 0..120u32), 0..8)
}

/// Eight workers with a range each.
fn even_shares(tile_len: u32, chunk_len: u32) -> PlanConfig {
    PlanConfig {
        tile_len,
        chunking: Chunking { by: CutBy::Request, chunk_len, shortest: chunk_len, max_q_len: 8 },
        num_workers: 8,
        sharing: Sharing::Even,
        unit_overhead: 64,
    }
}

fn plan_of(config: PlanConfig, group: PlanGroup, batch: &Batch) -> Plan {
    let mut plan = Plan::new(config, group);
    plan.update(batch);
    plan
}

/// The tiles of a request, free of where the request stands in the batch.
fn tiles_of(plan: &Plan, request: u32) -> Vec<(u32, u32, u32, u32, u32, u32)> {
    let tiles = plan.tiles().iter().filter(|t| t.request == request);
    tiles.map(|t| (t.q_begin, t.q_len, t.kv_begin, t.kv_end, t.chunk_len, t.num_chunks)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn each_visible_key_is_covered_once(config in config(), group in group(), lens in lens()) {
        let plan = plan_of(config, group, &batch(&lens, 0));
        let max_chunks = plan.tiles().iter().map(|tile| tile.num_chunks).max().unwrap_or(1);
        prop_assert!(plan.ranges().len() <= config.max_ranges(plan.tiles().len(), max_chunks as usize));
        prop_assert_eq!(covered(&plan, &lens, &group), naive(&lens, &group));
    }

    #[test]
    fn a_request_is_cut_the_same_whatever_its_neighbours(
        config in config(), group in group(), lens in lens(), workers in 1..9u32, padding in 0..4u32,
    ) {
        // Tiles that are cut short for a last round depend on the batch; which KV a row sees in which chunk does not.
        let sharing = match config.sharing {
            Sharing::LongestFirst { short_kv_len, .. } => {
                Sharing::LongestFirst { rest_len: config.tile_len, short_kv_len }
            }
            sharing => sharing,
        };
        let config = cut_by(CutBy::Request, PlanConfig { sharing, ..config });
        let plan = plan_of(config, group, &batch(&lens, padding));
        for (request, one) in (0u32..).zip(&lens) {
            let config = PlanConfig { num_workers: workers, ..config };
            let alone = plan_of(config, group, &batch(std::slice::from_ref(one), 0));
            prop_assert_eq!(tiles_of(&plan, request), tiles_of(&alone, 0));
        }
        let reversed: Vec<_> = lens.iter().rev().copied().collect();
        let other = plan_of(config, group, &batch(&reversed, 0));
        prop_assert_eq!(plan.num_units(), other.num_units());
        prop_assert_eq!(plan.total_cost(), other.total_cost());
    }

    #[test]
    fn updating_a_used_plan_is_as_planning_afresh(config in config(), group in group(), a in lens(), b in lens()) {
        let mut used = plan_of(config, group, &batch(&a, 1));
        used.update(&batch(&b, 0));
        let fresh = plan_of(config, group, &batch(&b, 0));
        prop_assert_eq!(used.tiles(), fresh.tiles());
        prop_assert_eq!(used.ranges(), fresh.ranges());
        prop_assert_eq!(used.workspace(), fresh.workspace());
    }

    #[test]
    fn the_workspace_bound_holds_and_is_monotone(
        config in config(), group in group(), lens in lens(), more in (0..9u32, 0..200u32),
    ) {
        let batch = batch(&lens, 0);
        let limits = BatchLimits {
            max_rows: batch.num_rows(),
            max_requests: u32::try_from(lens.len()).unwrap(),
            max_kv_len: batch.max_kv_len(),
        };
        let bound = workspace_requirement(&config, &group, &limits).total_bytes();
        prop_assert!(plan_of(config, group, &batch).workspace().total_bytes() <= bound);
        let larger = BatchLimits {
            max_rows: limits.max_rows + more.0,
            max_kv_len: limits.max_kv_len + more.1,
            ..limits
        };
        prop_assert!(bound <= workspace_requirement(&config, &group, &larger).total_bytes());
    }

    #[test]
    fn even_shares_begin_where_a_walk_over_all_units_says(config in config(), group in group(), lens in lens()) {
        // Units that cost nothing may be in either of two shares.
        let unit_overhead = config.unit_overhead.max(1);
        let config = PlanConfig { sharing: Sharing::Even, unit_overhead, ..config };
        let plan = plan_of(config, group, &batch(&lens, 0));
        prop_assert_eq!(plan.ranges().len(), config.num_workers as usize);
        let begins: Vec<u64> = plan.ranges().iter().map(|range| plan.number(&range.first)).collect();
        prop_assert_eq!(begins, naive_even(&plan));
        let largest = plan.ranges().iter().flat_map(|r| plan.units(r)).map(|u| unit_cost(&plan, u)).max().unwrap_or(0);
        let share = plan.total_cost().div_ceil(u64::from(config.num_workers));
        for range in plan.ranges() {
            prop_assert!(plan.units(range).map(|u| unit_cost(&plan, u)).sum::<u64>() <= share + largest);
        }
    }

    #[test]
    fn chunks_in_order_have_a_range_each(config in config(), group in group(), lens in lens()) {
        let config = PlanConfig { sharing: Sharing::InOrder, ..config };
        let plan = plan_of(config, group, &batch(&lens, 0));
        let chunks = (0u32..).zip(plan.tiles()).flat_map(|(tile, of)| (0..of.num_chunks).map(move |chunk| (tile, chunk)));
        prop_assert!(plan.ranges().iter().map(|range| (range.first.tile, range.first.chunk)).eq(chunks));
        let num_kv_heads = u64::from(group.heads.num_kv_heads);
        prop_assert!(plan.ranges().iter().all(|range| (range.first.kv_head, range.num_units) == (0, num_kv_heads)));
    }

    #[test]
    fn longest_chunks_come_first(config in config(), group in group(), lens in lens()) {
        let config = PlanConfig { sharing: Sharing::LongestFirst { rest_len: config.tile_len, short_kv_len: 0 }, ..config };
        let plan = plan_of(config, group, &batch(&lens, 0));
        let mut least = u64::MAX;
        for range in plan.ranges() {
            let tile = &plan.tiles()[range.first.tile as usize];
            prop_assert_eq!((range.first.kv_head, range.num_units), (0, u64::from(group.heads.num_kv_heads)));
            prop_assert!(plan.units(range).all(|unit| (unit.tile, unit.chunk) == (range.first.tile, range.first.chunk)));
            let kv = tile.chunk(range.first.chunk);
            let pairs = u64::from(kv.end - kv.start) * u64::from(tile.q_len);
            prop_assert!(pairs <= least.max(1).saturating_add(least / 8), "{} after {}", pairs, least);
            least = least.min(pairs);
        }
    }

    #[test]
    fn short_requests_have_two_chunks_or_the_shortest(config in config(), lens in lens()) {
        let group = PlanGroup::plain(HeadShape::new(2, 1, 8), false, None);
        let config = cut_by(CutBy::Request, config);
        let plan = plan_of(config, group, &batch(&lens, 0));
        let Chunking { chunk_len, shortest, max_q_len, .. } = config.chunking;
        for tile in plan.tiles() {
            let (q_len, kv_len) = lens[tile.request as usize];
            if q_len > max_q_len {
                prop_assert_eq!(tile.chunk_len, u32::MAX);
            } else if kv_len > chunk_len {
                prop_assert_eq!(tile.chunk_len, chunk_len);
            } else {
                prop_assert_eq!(tile.num_chunks, if kv_len > shortest { 2 } else { 1 });
            }
        }
    }
}

/// What the CUDA backend decodes with, cut either way, on 132 multiprocessors with two blocks each: 264 workers.
fn decode_config(by: CutBy, num_workers: u32) -> PlanConfig {
    PlanConfig {
        tile_len: 4,
        chunking: Chunking { by, chunk_len: 512, shortest: 128, max_q_len: u32::MAX },
        num_workers,
        sharing: Sharing::InOrder,
        unit_overhead: 64,
    }
}

/// Request and first token of the tiles of 48 tokens, in the order of their ranges.
fn order_of(lens: &[(u32, u32)], short_kv_len: u32, num_workers: u32) -> Vec<(u32, u32)> {
    let sharing = Sharing::LongestFirst { rest_len: 48, short_kv_len };
    let config = PlanConfig { tile_len: 48, num_workers, sharing, ..PlanConfig::UNCUT };
    let plan = plan_of(config, PlanGroup::plain(HeadShape::new(32, 8, 128), true, None), &batch(lens, 0));
    let tile = |range: &attn_metadata::plan::WorkRange| &plan.tiles()[range.first.tile as usize];
    plan.ranges().iter().map(|range| (tile(range).request, tile(range).q_begin)).collect()
}

#[test]
fn tiles_of_a_short_request_stay_together() {
    let lens = [(128, 128), (128, 128)];
    assert_eq!(order_of(&lens, 128, 1), [(1, 96), (1, 48), (1, 0), (0, 96), (0, 48), (0, 0)]);
    let by_cost = [(0, 48), (1, 48), (0, 96), (1, 96), (0, 0), (1, 0)];
    assert_eq!(order_of(&lens, 127, 1), by_cost);
    assert_eq!(order_of(&lens, 128, 132), by_cost, "of two requests each worker has a unit at most");
    // Longer requests come first, also tiles of theirs that see little.
    let order = [(1, 48), (1, 96), (1, 0), (0, 96), (0, 48), (0, 0)];
    assert_eq!(order_of(&[(128, 128), (129, 129)], 128, 1), order);
    // With a prefix it is what the request sees that counts.
    assert_eq!(order_of(&[(48, 1000), (48, 128)], 128, 1), [(0, 0), (1, 0)]);
    assert_eq!(order_of(&[(48, 128), (48, 1000)], 128, 1), [(1, 0), (0, 0)]);
}

#[test]
fn many_short_prompts_fill_a_gpu_request_by_request() {
    let together = |lens: &[(u32, u32)]| order_of(lens, 1024, 132).is_sorted_by(|a, b| a.0 >= b.0);
    for (count, len) in [(64, 128), (64, 256), (32, 512), (16, 1024)] {
        assert!(together(&vec![(len, len); count]), "{count} of {len}");
        assert!(!together(&vec![(len, len); count / 8]), "{} of {len}", count / 8);
    }
    assert!(!together(&[(4096, 4096); 4]));
}

/// Tables of one page again and again make more units than memory holds: how many there are is known before there is
/// a range for each.
#[test]
fn a_plan_is_counted_before_it_is_shared_out() {
    let chunking = Chunking { by: CutBy::Request, chunk_len: 1, shortest: 1, max_q_len: u32::MAX };
    let sharing = Sharing::LongestFirst { rest_len: 4, short_kv_len: 0 };
    let config = PlanConfig { chunking, sharing, ..decode_config(CutBy::Request, 264) };
    let mut plan = Plan::new(config, PlanGroup::plain(HeadShape::new(8, 2, 64), true, None));
    plan.update(&batch(&[(1, 100)], 0));
    assert_eq!((plan.num_units(), plan.ranges().len()), (200, 100));
    plan.cut(&batch(&[(1, 1 << 20); 1 << 14], 0));
    assert_eq!((plan.num_units(), plan.num_partial_rows(), plan.ranges().len()), (2 << 34, 8 << 34, 0));
    plan.cut(&batch(&[(1, 100)], 0));
    plan.share_out();
    assert_eq!((plan.num_units(), plan.ranges().len()), (200, 100));
}

#[test]
fn cut_by_the_batch_there_are_fewer_states_and_no_worse_balance() {
    let group = PlanGroup::plain(HeadShape::new(32, 8, 128), true, None);
    let skewed: Vec<(u32, u32)> = [(1, 65_536)].into_iter().chain([(1, 1024); 15]).collect();
    let even = [(vec![(1, 4096); 64], 0.4), (vec![(1, 131_072)], 0.25)];
    let check = |num_workers: u32, lens: &[(u32, u32)], is_few: &dyn Fn(f64, f64) -> bool| {
        let plans =
            [CutBy::Batch, CutBy::Request].map(|by| plan_of(decode_config(by, num_workers), group, &batch(lens, 0)));
        let [free, fixed] = plans.each_ref().map(|plan| plan.num_partial_rows() as f64);
        assert!(
            is_few(free, fixed),
            "{free} rows of partial states, {fixed} cut by requests, {num_workers} workers: {lens:?}"
        );
        // Rounds of the longest units, over what each worker would have at best.
        let workers = u64::from(num_workers);
        let [free, fixed] = plans.each_ref().map(|plan| {
            let longest = plan.ranges().iter().flat_map(|r| plan.units(r)).map(|u| unit_cost(plan, u)).max().unwrap();
            (plan.num_units().div_ceil(workers) * longest * workers) as f64 / plan.total_cost() as f64
        });
        assert!(free < 1.25 && free < 1.05 * fixed, "{free} rounds of the best, {fixed} cut by requests: {lens:?}");
    };
    for num_workers in [264, 396] {
        for (lens, most) in &even {
            check(num_workers, lens, &|free, fixed| free < most * fixed);
        }
    }
    check(396, &skewed, &|free, fixed| free < 0.9 * fixed);
    // For so many workers chunks of 512 tokens are the best for this batch, which requests have by themselves.
    check(264, &skewed, &|free, fixed| free == fixed);
}

#[test]
fn cut_by_the_batch_a_request_depends_on_its_neighbours() {
    let group = PlanGroup::plain(HeadShape::new(32, 8, 128), true, None);
    for num_workers in [264, 396] {
        let num_chunks = |count: u32| {
            let lens = vec![(1, 4096); count as usize];
            plan_of(decode_config(CutBy::Batch, num_workers), group, &batch(&lens, 0)).tiles()[0].num_chunks
        };
        assert!(num_chunks(1) > num_chunks(64), "{} and {}", num_chunks(1), num_chunks(64));
        assert_eq!(num_chunks(num_workers), 1, "enough requests fill the workers as they are");
    }
}

#[test]
fn a_skewed_batch_balances() {
    let mut lens = vec![(1, 64); 63];
    lens.push((1, 100_000));
    let group = PlanGroup::plain(HeadShape::new(32, 8, 128), true, None);
    let plan = plan_of(even_shares(16, 512), group, &batch(&lens, 0));
    let cost = |u: attn_metadata::plan::Unit| plan.unit_cost(&plan.tiles()[u.tile as usize], u.chunk);
    let costs: Vec<u64> = plan.ranges().iter().map(|r| plan.units(r).map(cost).sum()).collect();
    assert!(*costs.iter().max().unwrap() * 8 <= plan.total_cost() * 105 / 100, "{costs:?}");
}

/// Tiles of 48 tokens of prompts after a long prefix, on 132 workers of 8 heads.
fn long_tiles(lens: &[(u32, u32)], window_left: Option<u32>, rest_len: u32) -> Vec<u32> {
    tiles_cut_by(lens, window_left, rest_len, Plan::update)
}

fn tiles_cut_by(
    lens: &[(u32, u32)],
    window_left: Option<u32>,
    rest_len: u32,
    cut: impl Fn(&mut Plan, &Batch),
) -> Vec<u32> {
    let config = PlanConfig {
        tile_len: 48,
        num_workers: 132,
        sharing: Sharing::LongestFirst { rest_len, short_kv_len: 0 },
        unit_overhead: 64,
        ..PlanConfig::UNCUT
    };
    let chunking = Chunking { max_q_len: 128, ..config.chunking };
    let group = PlanGroup::plain(HeadShape::new(32, 8, 128), true, window_left);
    let mut plan = Plan::new(PlanConfig { chunking, ..config }, group);
    cut(&mut plan, &batch(lens, 0));
    plan.tiles().iter().map(|tile| tile.q_len).collect()
}

#[test]
fn tiles_of_an_unfilled_last_round_are_cut_short() {
    // 86 tiles of 8 heads are 5 rounds of 132 and 28 units: 4 tiles more.
    let prompts = [(2048, 18_432); 2];
    let lens = long_tiles(&prompts, None, 16);
    assert_eq!(lens.iter().filter(|len| **len == 16).count(), 12, "{lens:?}");
    assert_eq!(lens.iter().sum::<u32>(), 4096);
    let uncut = long_tiles(&prompts, None, 48);
    assert_eq!(uncut.len() + 8, lens.len());
    assert_eq!(tiles_cut_by(&prompts, None, 16, Plan::cut_beside), uncut, "rounds of all workers do not count");
    // Not where rounds are full, tiles differ, a window makes rows depend on their tile, or requests are cut in chunks.
    assert!(long_tiles(&[(48 * 33, 18_432)], None, 16).iter().all(|len| *len == 48));
    for (lens, window) in [(&[(4096, 4096); 2][..], None), (&prompts, Some(1024)), (&[(100, 20_000); 70], None)] {
        assert_eq!(long_tiles(lens, window, 16), long_tiles(lens, window, 48), "{lens:?}");
    }
}

#[test]
fn explained_pairs_are_those_that_rows_see() {
    let model = |group: &PlanGroup| {
        let params =
            LayerParams { causal: group.causal, window_left: group.window_left, ..LayerParams::causal(group.heads) };
        let layer = Layer::new(params).unwrap();
        ModelSpec::new(vec![layer], Dtype::F32, KvDtype::F32, PageSize::new(1 << 20).unwrap()).unwrap()
    };
    let lens = [(504, 504), (30, 100), (5, 3), (1, 70), (0, 9)];
    let config = even_shares(504, 64);
    for (causal, window_left) in [(true, None), (false, None), (true, Some(1)), (true, Some(40)), (false, Some(7))] {
        let group = PlanGroup::plain(HeadShape::new(4, 2, 8), causal, window_left);
        let batch = batch(&lens, 0);
        let plan = plan_of(config, group, &batch);
        let report = PlanReport::new("test", &model(&group), &batch, std::slice::from_ref(&plan), None);
        let pairs: usize = naive(&lens, &group).values().map(Vec::len).sum::<usize>() / 2;
        let flops = 2 * pairs as u64 * 4 * 16;
        assert_eq!(report.groups[0].flops, flops, "causal {causal}, window_left {window_left:?}");
    }
}

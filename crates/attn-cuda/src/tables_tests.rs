//! Tables are read back as a kernel reads them: every unit once, every split row merged once, nothing out of bounds.

use std::collections::HashSet;
use std::sync::Arc;

use attn_metadata::{
    Batch, BatchLimits, Bucket, CaptureLimits, HeadShape, Layer, LayerParams, ModelSpec, PlanGroup, PoolShape, RawBatch,
};
use kvpool::{Dtype, KvDtype, PageSize, Slot};

use super::*;
use crate::device::DeviceProperties;
use crate::device::runs;
use crate::entry::{Families, Limits, kernels_of};
use crate::policy::{GroupPolicy, Invariance, capture_limits};
use crate::spans;

const HOPPER: Limits = Limits { capability: (9, 0), shared_bytes: 232_448 };
const PAGE: u32 = 16;
const KEEPS: [Invariance; 3] = [Invariance::Row, Invariance::Batch, Invariance::None];

struct Rng(u64);

impl Rng {
    fn below(&mut self, bound: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        u32::try_from(self.0 >> 33).unwrap() % bound
    }
}

fn model(heads: HeadShape, window_left: Option<u32>) -> Arc<ModelSpec> {
    let layer = Layer::new(LayerParams { window_left, ..LayerParams::causal(heads) }).unwrap();
    let page_size = PageSize::new(PAGE).unwrap();
    Arc::new(ModelSpec::new(vec![layer], Dtype::Bf16, KvDtype::Bf16, page_size).unwrap())
}

fn policy(model: &ModelSpec, num_sms: u32, keeps: Invariance) -> GroupPolicy {
    let kernels = kernels_of(model, &model.layers()[0], &HOPPER, Families::All).unwrap();
    let gpu = DeviceProperties { num_sms, ..DeviceProperties::h200() };
    GroupPolicy::of_model(model, &[kernels], &gpu, keeps).remove(0)
}

/// Heads, windows and what bits do not depend on, in turns.
fn of_case(case: usize) -> (Arc<ModelSpec>, GroupPolicy) {
    let heads = [HeadShape::new(8, 2, 128), HeadShape::new(40, 8, 64), HeadShape::new(64, 1, 128)][case % 3];
    let model = model(heads, [None, Some(700)][case % 2]);
    let policy = policy(&model, 5, KEEPS[case / 6 % 3]);
    (model, policy)
}

/// A batch of requests (q_len, kv_len) that appends, with some padding rows.
fn batch(requests: &[(u32, u32)], padding_rows: u32) -> Batch {
    let indptr = |counts: Vec<u32>| -> Vec<i32> {
        let mut sums = vec![0];
        counts.iter().for_each(|n| sums.push(sums[sums.len() - 1] + i32::try_from(*n).unwrap()));
        sums
    };
    let pages: Vec<u32> = requests.iter().map(|(_, kv)| kv.div_ceil(PAGE)).collect();
    let num_pages: u32 = pages.iter().sum::<u32>() + 1;
    let last = |kv: u32| if kv == 0 { 0 } else { (kv - 1) % PAGE + 1 };
    let rows: u32 = requests.iter().map(|(q, _)| q).sum();
    let mut slots = Vec::new();
    let mut first_page = 0;
    for ((q, kv), pages) in requests.iter().zip(&pages) {
        slots.extend((kv - q..*kv).map(|t| Slot::from_raw(i32::try_from(first_page * PAGE + t).unwrap())));
        first_page += pages;
    }
    slots.extend((0..padding_rows).map(|_| Slot::PADDING));
    let raw = RawBatch {
        num_rows: (rows + padding_rows) as usize,
        qo_indptr: &indptr(requests.iter().map(|(q, _)| *q).collect()),
        kv_indptr: &indptr(pages),
        kv_indices: &(0..i32::try_from(num_pages - 1).unwrap()).collect::<Vec<_>>(),
        kv_last_page_len: &requests.iter().map(|(_, kv)| i32::try_from(last(*kv)).unwrap()).collect::<Vec<_>>(),
        slot_mapping: Some(&slots),
        custom_mask: None,
    };
    Batch::from_raw(PoolShape { num_pages, page_size: PageSize::new(PAGE).unwrap() }, &raw).unwrap()
}

fn random_requests(rng: &mut Rng, count: u32, max_q: u32, max_kv: u32) -> Vec<(u32, u32)> {
    let request = |_| {
        let q = if rng.below(3) == 0 { 1 + rng.below(max_q) } else { rng.below(2) };
        let long = if rng.below(4) == 0 { max_kv } else { 300 };
        (q, q + rng.below(long.saturating_sub(q).max(1)))
    };
    (0..count).map(request).collect()
}

/// Bytes as aligned as pinned memory.
fn room(len: usize) -> Vec<u128> {
    vec![u128::MAX; len.div_ceil(16)]
}

fn read<T: bytemuck::Pod>(bytes: &[u8], at: usize, count: usize) -> Vec<T> {
    bytes[at..at + count * size_of::<T>()].chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

/// Checks the tables of a group as a kernel would read them.
fn check_group(bytes: &[u8], at: &GroupOffsets, plan: &GroupPlan, group: &PlanGroup, batch: &Batch, num_rows: u32) {
    let heads = group.heads;
    let merge: AttnStep = read(bytes, at.merge_step, 1)[0];
    let all_tiles: Vec<AttnTile> = read(bytes, at.tiles, usize::try_from(merge.num_tiles).unwrap());
    let mut partial_rows = HashSet::new();
    let mut covered = HashSet::new();
    let mut num_split_rows = 0;
    let mut parts = vec![(&at.extend, &plan.extend)];
    parts.extend(plan.decode.iter().map(|part| (&at.decode, part)));
    for (offsets, part) in parts {
        let step: AttnStep = read(bytes, offsets.step, 1)[0];
        let tiles: Vec<AttnTile> = read(bytes, offsets.tiles, usize::try_from(step.num_tiles).unwrap());
        let ranges: Vec<AttnRange> = read(bytes, offsets.ranges, usize::try_from(step.num_ranges).unwrap());
        let is_first = plan.decode.is_none() || std::ptr::eq(offsets, &raw const at.decode);
        let expected = if is_first { batch.num_used_rows() } else { num_rows };
        assert_eq!(u32::try_from(step.zero_begin).unwrap(), expected);
        if is_first && plan.decode.is_some() {
            check_starts(&read(bytes, offsets.starts, num_starts(part.plan.config(), group)), &tiles, &ranges, part);
        }
        // Units, by walking the ranges as a block does.
        let mut units = HashSet::new();
        for range in ranges {
            let (mut tile, mut head, mut chunk) = (range.tile, range.kv_head, range.chunk);
            let goes_by_head = part.plan.config().sharing.is_by_unit();
            if goes_by_head {
                // Kernels that claim units take every head of such a range, whatever it says.
                assert_eq!((head, u32::try_from(range.num_units).unwrap()), (0, heads.num_kv_heads));
            }
            for _ in 0..range.num_units {
                assert!(units.insert((tile, head, chunk)), "a unit twice");
                if goes_by_head {
                    head += 1;
                    continue;
                }
                chunk += 1;
                if chunk == tiles[usize::try_from(tile).unwrap()].num_chunks {
                    (head, chunk) = (head + 1, 0);
                }
                if head == i32::try_from(heads.num_kv_heads).unwrap() {
                    (tile, head) = (tile + 1, 0);
                }
            }
        }
        let expected: i32 =
            tiles.iter().map(|tile| tile.num_chunks).sum::<i32>() * i32::try_from(heads.num_kv_heads).unwrap();
        assert_eq!(i32::try_from(units.len()).unwrap(), expected, "every unit once");
        assert_eq!(u64::try_from(expected).unwrap(), part.plan.num_units());
        for tile in &tiles {
            let rows = tile.q_begin..tile.q_begin + tile.q_len;
            rows.for_each(|row| assert!(covered.insert(row), "row {row} twice"));
            assert!(tile.kv_begin <= tile.kv_end && tile.kv_end <= tile.kv_len);
            if tile.num_chunks > 1 {
                num_split_rows += usize::try_from(tile.q_len).unwrap();
                let count = tile.num_chunks * tile.q_len * i32::try_from(heads.num_qo_heads).unwrap();
                (tile.first_partial..tile.first_partial + count)
                    .for_each(|row| assert!(partial_rows.insert(row), "partial row {row} twice"));
            }
        }
    }
    assert_eq!(covered.len(), usize::try_from(batch.num_used_rows()).unwrap());
    assert_eq!(partial_rows.len() as u64, plan.num_partial_rows());
    assert!(partial_rows.iter().all(|row| u64::try_from(*row).unwrap() < plan.num_partial_rows()));
    let num_merged = check_merge(
        bytes,
        at,
        &all_tiles,
        merge.num_merge_units,
        i32::try_from(heads.head_dim_vo.div_ceil(32)).unwrap(),
    );
    assert_eq!(num_merged, num_split_rows * heads.num_qo_heads as usize);
}

/// Checks the first units of blocks: each says what the tables say, and has pages from its first on.
fn check_starts(starts: &[AttnStart], tiles: &[AttnTile], ranges: &[AttnRange], part: &Part) {
    for (number, start) in starts.iter().enumerate() {
        let Some(range) = ranges.get(number) else {
            assert_eq!(*start, AttnStart { chunk: -1, ..AttnStart::default() });
            continue;
        };
        let tile = tiles[usize::try_from(range.tile).unwrap()];
        assert_eq!((start.tile, start.chunk), (range.tile, range.chunk));
        assert_eq!([start.request, start.q_begin, start.q_len], [tile.request, tile.q_begin, tile.q_len]);
        assert_eq!([start.q_pos, start.pages_begin], [tile.q_pos, tile.pages_begin]);
        assert_eq!([start.num_chunks, start.first_partial], [tile.num_chunks, tile.first_partial]);
        let chunk = i64::from(tile.kv_begin / tile.chunk_len + range.chunk) * i64::from(tile.chunk_len);
        let seen = i64::from(tile.kv_begin).max(chunk)..i64::from(tile.kv_end).min(chunk + i64::from(tile.chunk_len));
        assert_eq!(i64::from(start.begin)..i64::from(start.end), seen);
        let page = i32::try_from(PAGE).unwrap();
        let num_pages = if start.begin < start.end { (start.end - 1) / page - start.begin / page + 1 } else { 0 };
        assert_eq!(start.num_pages, num_pages.min(16));
        let request = &part.batch.requests()[usize::try_from(tile.request).unwrap()];
        for i in 0..start.num_pages {
            let page = part.batch.pages(request)[usize::try_from(start.begin / page + i).unwrap()];
            assert_eq!(start.pages[usize::try_from(i).unwrap()], page);
        }
    }
}

/// Checks the merge units; returns how many (row, head) they merge.
fn check_merge(bytes: &[u8], at: &GroupOffsets, tiles: &[AttnTile], count: i32, segments: i32) -> usize {
    let units: Vec<AttnMergeUnit> = read(bytes, at.merge_units, usize::try_from(count).unwrap());
    let mut merged = HashSet::new();
    for unit in units {
        let tile = tiles[usize::try_from(unit.tile).unwrap()];
        assert!(tile.num_chunks > 1 && (tile.q_begin..tile.q_begin + tile.q_len).contains(&unit.row));
        if tile.num_chunks > 32 {
            assert!((0..segments).contains(&-unit.num_heads));
            assert!(merged.insert((unit.row, unit.head_begin, -unit.num_heads)), "{unit:?} twice");
            continue;
        }
        assert!((1..=8).contains(&unit.num_heads));
        for head in unit.head_begin..unit.head_begin + unit.num_heads {
            for segment in 0..segments {
                assert!(merged.insert((unit.row, head, segment)), "row {}, head {head} merged twice", unit.row);
            }
        }
    }
    assert_eq!(merged.len() % usize::try_from(segments).unwrap(), 0);
    merged.len() / usize::try_from(segments).unwrap()
}

fn contents_of(batch: &Batch, num_rows: u32) -> Contents<'_> {
    Contents { batch, num_rows, has_slots: true }
}

#[test]
fn tables_cover_every_unit_and_merge_every_split_row_once() {
    let mut rng = Rng(7);
    for case in 0..40 {
        let heads = [HeadShape::new(8, 2, 128), HeadShape::new(3, 3, 64), HeadShape::new(48, 1, 128)][case % 3];
        let model = model(heads, [None, Some(100)][case % 2]);
        let policy = policy(&model, 7, KEEPS[case / 6 % 3]);
        let count = 1 + rng.below(9);
        let (requests, padding) = (random_requests(&mut rng, count, 200, 20_000), rng.below(4));
        let batch = batch(&requests, padding);
        let mut plan = policy.plan(batch.pool());
        plan.update(&batch);
        let mut offsets = Offsets::default();
        let sizes =
            Sizes { num_slots: batch.num_rows() as usize, mask_bytes: 0, num_kv_indices: batch.kv_indices().len() };
        offsets.update(std::iter::once(plan.sizes()), sizes);
        let mut bytes = room(offsets.len);
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut bytes);
        let plans = [plan];
        write(bytes, &offsets, &plans, contents_of(&batch, batch.num_rows()));
        check_group(bytes, &offsets.groups[0], &plans[0], &model.groups()[0], &batch, batch.num_rows());
        let slots: Vec<i32> = read(bytes, offsets.slots, batch.num_rows() as usize);
        assert!(slots.iter().zip(batch.slot_mapping().unwrap()).all(|(to, slot)| *to == slot.raw()));
        assert!(offsets.kv_indices + size_of_val(batch.kv_indices()) <= offsets.len);
    }
}

#[test]
fn a_bucket_has_room_for_every_batch_that_fits_it() {
    let mut rng = Rng(11);
    for case in 0..40 {
        let (model, policy) = of_case(case);
        let group = &model.groups()[0];
        let bucket = Bucket { num_requests: 6, num_rows: 150 };
        let limits = CaptureLimits { buckets: vec![bucket], max_kv_len: 40_000, num_pool_pages: 20_000, appends: true };
        let bound = policy.size_bound(group, &limits, bucket);
        let mut offsets = Offsets::default();
        let sizes = Sizes { num_slots: 150, mask_bytes: 0, num_kv_indices: 6 * 2500 };
        offsets.update(std::iter::once(bound), sizes);
        let mut bytes = room(offsets.len);
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut bytes);
        for _ in 0..5 {
            let count = 1 + rng.below(6);
            let batch = batch(&random_requests(&mut rng, count, 25, 39_000), 0);
            let mut plan = policy.plan(batch.pool());
            plan.update(&batch);
            assert!(plan.num_partial_rows() <= policy.partial_row_bound(group, &limits, bucket));
            let num_decode_tiles = plan.decode.as_ref().map_or(0, |part| part.plan.tiles().len() as u64);
            assert_eq!(plan.counter_bytes(), num_decode_tiles * u64::from(group.heads.num_kv_heads) * 4);
            assert!(plan.counter_bytes() <= bound.counter_bytes(&group.heads));
            let needed = plan.sizes();
            assert!(needed.num_merge_units <= bound.num_merge_units, "{needed:?} in {bound:?}");
            let (decode, extend) = (needed.decode.unwrap_or_default(), needed.extend);
            for (needed, bound) in [(decode, bound.decode.unwrap_or_default()), (extend, bound.extend)] {
                assert!(needed.num_tiles <= bound.num_tiles && needed.num_ranges <= bound.num_ranges, "{needed:?}");
                assert_eq!(needed.num_starts, bound.num_starts);
            }
            let plans = [plan];
            write(bytes, &offsets, &plans, contents_of(&batch, bucket.num_rows));
            check_group(bytes, &offsets.groups[0], &plans[0], group, &batch, bucket.num_rows);
            let slots: Vec<i32> = read(bytes, offsets.slots, 150);
            assert!(slots[batch.num_rows() as usize..].iter().all(|slot| *slot < 0), "padding rows write nothing");
        }
    }
}

#[test]
fn a_captured_step_without_a_batch_appends_nothing() {
    let model = model(HeadShape::new(8, 2, 128), None);
    let policy = policy(&model, 5, Invariance::Batch);
    let batch = Batch::empty(PoolShape { num_pages: 9, page_size: model.page_size() });
    let mut plan = policy.plan(batch.pool());
    plan.update(&batch);
    let mut offsets = Offsets::default();
    offsets.update(std::iter::once(plan.sizes()), Sizes { num_slots: 12, mask_bytes: 0, num_kv_indices: 4 });
    let mut bytes = room(offsets.len);
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut bytes);
    let plans = [plan];
    write(bytes, &offsets, &plans, contents_of(&batch, 12));
    assert_eq!(read::<i32>(bytes, offsets.slots, 12), [-1; 12]);
    check_group(bytes, &offsets.groups[0], &plans[0], &model.groups()[0], &batch, 12);
}

#[test]
fn sections_are_aligned_and_do_not_overlap() {
    let part = |num_tiles| PartSizes { num_tiles, num_ranges: 3, num_starts: 2 };
    let group = |n| GroupSizes { decode: Some(part(n)), extend: part(n + 1), num_merge_units: 5 };
    let mut offsets = Offsets::default();
    offsets.update([group(1), group(9)].into_iter(), Sizes { num_slots: 7, mask_bytes: 3, num_kv_indices: 11 });
    let mut begins = vec![offsets.slots, offsets.mask, offsets.kv_indices];
    for group in &offsets.groups {
        begins.extend([group.decode.step, group.decode.ranges, group.extend.step, group.extend.ranges]);
        begins.extend([group.tiles, group.merge_step, group.merge_units, group.decode.starts, group.extend.starts]);
    }
    assert!(begins.iter().all(|begin| begin % 256 == 0 && *begin < offsets.len));
    assert_eq!(begins.iter().collect::<HashSet<_>>().len(), begins.len());
    assert_eq!(offsets.groups[1].first_tile(&offsets.groups[1].extend), 9);
}

#[test]
fn a_bucket_for_decoding_takes_no_long_request() {
    let model = model(HeadShape::new(32, 8, 128), None);
    let policy = policy(&model, 132, Invariance::Batch);
    assert_eq!(policy.max_q_len(Bucket::decode(8)), 4);
    assert_eq!(policy.max_q_len(Bucket { num_requests: 8, num_rows: 9 }), u32::MAX);
    let limits = CaptureLimits { buckets: vec![], max_kv_len: 9000, num_pool_pages: 9000, appends: true };
    let grids = policy.captured_grids(&model.groups()[0], &limits, Bucket::decode(8));
    assert!(grids.extend == 0 && grids.decode > 0 && grids.merge > 0);
}

#[test]
fn a_bucket_has_no_room_for_requests_that_the_backend_refuses() {
    let given = CaptureLimits { buckets: vec![], max_kv_len: 1 << 20, num_pool_pages: 9000, appends: true };
    let own = |max_kv_len| BatchLimits { max_kv_len, ..BatchLimits::NONE };
    assert_eq!(capture_limits(&given, &BatchLimits::NONE).max_kv_len, 1 << 20);
    let limits = capture_limits(&given, &own(4096));
    assert_eq!(limits, CaptureLimits { max_kv_len: 4096, ..given.clone() });
    let model = model(HeadShape::new(32, 8, 128), None);
    let (policy, group) = (policy(&model, 132, Invariance::Batch), &model.groups()[0]);
    let rows = |limits| policy.partial_row_bound(group, limits, Bucket::decode(8));
    assert!(rows(&limits) < rows(&given));
}

#[test]
fn a_bucket_for_decoding_has_room_for_decoding_alone() {
    let model = model(HeadShape::new(32, 8, 128), None);
    let (policy, group) = (policy(&model, 132, Invariance::Batch), &model.groups()[0]);
    let limits = CaptureLimits { buckets: vec![], max_kv_len: 9000, num_pool_pages: 9000, appends: true };
    let bound = policy.size_bound(group, &limits, Bucket::decode(8));
    assert_eq!(bound.extend, PartSizes::default());
    let mut offsets = Offsets::default();
    offsets.update(std::iter::once(bound), Sizes { num_slots: 8, mask_bytes: 0, num_kv_indices: 8 * 563 });
    let mut bytes = room(offsets.len);
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut bytes);
    let batch = batch(&[(1, 9000), (2, 300), (4, 8999), (0, 5)], 1);
    let mut plan = policy.plan(batch.pool());
    plan.update(&batch);
    let plans = [plan];
    write(bytes, &offsets, &plans, contents_of(&batch, 8));
    check_group(bytes, &offsets.groups[0], &plans[0], group, &batch, 8);
}

/// What a captured step has on the device after batches one after the other, each sent as far as it is used.
struct Sent {
    staged: Vec<u128>,
    device: Vec<u128>,
    offsets: Offsets,
    num_rows: u32,
}

impl Sent {
    fn new(bound: GroupSizes, num_rows: u32, num_kv_indices: usize) -> Self {
        let mut offsets = Offsets::default();
        let sizes = Sizes { num_slots: num_rows as usize, mask_bytes: 0, num_kv_indices };
        offsets.update(std::iter::once(bound), sizes);
        Self { staged: room(offsets.len), device: room(offsets.len), offsets, num_rows }
    }

    fn device(&self) -> &[u8] {
        bytemuck::cast_slice(&self.device)
    }

    /// Bytes and copies that were sent, the page table apart.
    fn send(&mut self, plan: GroupPlan, batch: &Batch) -> ((usize, usize), GroupPlan) {
        let (plans, contents) = ([plan], contents_of(batch, self.num_rows));
        let staged: &mut [u8] = bytemuck::cast_slice_mut(&mut self.staged);
        write(&mut staged[..self.offsets.kv_indices], &self.offsets, &plans, contents);
        let device: &mut [u8] = bytemuck::cast_slice_mut(&mut self.device);
        let (mut num_bytes, mut num_copies) = (0, 0);
        for run in runs(spans::used(&self.offsets, &plans, contents)) {
            assert!(run.end <= self.offsets.kv_indices);
            device[run.clone()].copy_from_slice(&staged[run.clone()]);
            (num_bytes, num_copies) = (num_bytes + run.len(), num_copies + 1);
        }
        // Each block reads the range of its number, whether it counts or not.
        for (part, at) in plans[0].decode.iter().zip([&self.offsets.groups[0].decode]) {
            let end = at.ranges + part.plan.config().num_workers as usize * size_of::<AttnRange>();
            assert!(
                spans::used(&self.offsets, &plans, contents).any(|span| span.start <= at.ranges && end <= span.end)
            );
        }
        let [plan] = plans;
        ((num_bytes, num_copies), plan)
    }
}

/// Whatever was there before: large batches, small ones, none.
#[test]
fn what_is_sent_of_a_buckets_tables_is_all_that_kernels_read() {
    let mut rng = Rng(23);
    for case in 0..20 {
        let (model, policy) = of_case(case);
        let group = &model.groups()[0];
        // Room enough that used parts lie further apart than a copy bridges.
        let bucket = Bucket { num_requests: 3000, num_rows: 6000 };
        let limits = CaptureLimits { buckets: vec![bucket], max_kv_len: 40_000, num_pool_pages: 20_000, appends: true };
        let mut sent = Sent::new(policy.size_bound(group, &limits, bucket), bucket.num_rows, 6 * 2500);
        let mut most_copies = 0;
        for _ in 0..6 {
            let count = rng.below(7);
            let batch = batch(&random_requests(&mut rng, count, 25, 39_000), 0);
            let mut plan = policy.plan(batch.pool());
            plan.update(&batch);
            let ((_, num_copies), plan) = sent.send(plan, &batch);
            most_copies = most_copies.max(num_copies);
            check_group(sent.device(), &sent.offsets.groups[0], &plan, group, &batch, bucket.num_rows);
            let slots: Vec<i32> = read(sent.device(), sent.offsets.slots, bucket.num_rows as usize);
            assert!(slots[batch.num_rows() as usize..].iter().all(|slot| *slot < 0), "padding rows write nothing");
        }
        assert!(most_copies > 1, "the bucket is too small to leave anything out");
    }
}

#[test]
fn a_large_bucket_sends_what_its_batch_uses() {
    let model = model(HeadShape::new(64, 8, 128), None);
    let (policy, group) = (policy(&model, 132, Invariance::Batch), &model.groups()[0]);
    let bucket = Bucket::decode(8192);
    let limits = CaptureLimits { buckets: vec![bucket], max_kv_len: 131_072, num_pool_pages: 1 << 20, appends: true };
    let mut sent = Sent::new(policy.size_bound(group, &limits, bucket), bucket.num_rows, 0);
    let room = sent.offsets.kv_indices;
    let mut bytes_of = |requests: &[(u32, u32)]| {
        let batch = batch(requests, 0);
        let mut plan = policy.plan(batch.pool());
        plan.update(&batch);
        sent.send(plan, &batch).0
    };
    let (one, few, many) = (bytes_of(&[(1, 300)]), bytes_of(&[(1, 131_072); 8]), bytes_of(&[(1, 300); 8192]));
    println!("room {room}, sent (bytes, copies): one {one:?}, few long {few:?}, all short {many:?}");
    assert!(room > 16 << 20, "{room}");
    // The slots of all rows, padding for most of them, are 32 KiB.
    assert!(one.0 < 256 << 10 && few.0 < 512 << 10 && many.0 < 2 << 20, "{one:?}, {few:?}, {many:?} of {room}");
    assert!([one, few, many].iter().all(|(_, num_copies)| *num_copies <= 4), "{one:?}, {few:?}, {many:?}");
}

/// Prefill leaves multiprocessors to decoding, and its tiles are not cut for rounds of all of them.
#[test]
fn a_mixed_batch_runs_at_once_and_a_bucket_does_not() {
    let model = model(HeadShape::new(32, 8, 128), None);
    let (policy, group) = (policy(&model, 132, Invariance::Batch), &model.groups()[0]);
    let (prefill, decode) = ([(512, 4096); 4], [(1, 4096); 60]);
    let planned = |requests: &[(u32, u32)]| {
        let batch = batch(requests, 0);
        let mut plan = policy.plan(batch.pool());
        plan.update(&batch);
        let grids = policy.eager_grids(&plan, contents_of(&batch, batch.num_rows()));
        (plan, grids)
    };
    let (alone, of_alone) = planned(&prefill);
    let (both, of_both) = planned(&[&prefill[..], &decode].concat());
    assert!(!of_alone.is_at_once && of_alone.extend == 132 && of_alone.decode == 0, "{of_alone:?}");
    assert!(of_both.is_at_once && of_both.decode == 132 && (66..=124).contains(&of_both.extend), "{of_both:?}");
    let shortest = |plan: &GroupPlan| plan.extend.plan.tiles().iter().map(|tile| tile.q_len).min();
    // 512 tokens are ten tiles of 48 and 32 tokens; for a last round some have 16.
    assert_eq!((shortest(&alone), shortest(&both)), (Some(16), Some(32)));

    // Also where nothing is merged.
    let (unsplit, of_unsplit) = planned(&[&prefill[..], &[(1, 1000); 200]].concat());
    assert!(of_unsplit.is_at_once && unsplit.num_partial_rows() == 0, "{of_unsplit:?}");

    let bucket = Bucket { num_requests: 64, num_rows: 4096 };
    let limits = CaptureLimits { buckets: vec![bucket], max_kv_len: 4096, num_pool_pages: 1 << 16, appends: true };
    let recorded = policy.captured_grids(group, &limits, bucket);
    assert!(!recorded.is_at_once && recorded.extend == 132 && recorded.decode == 132, "{recorded:?}");
}

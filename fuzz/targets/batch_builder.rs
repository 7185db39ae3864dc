//! Bytes as the raw tables of a batch: what is accepted holds, is the same in a batch that is used again and in one that
//! was not, and the plan over it covers each row's keys once.

#![no_main]

mod input;

use std::cell::RefCell;

use attn_metadata::plan::{Plan, workspace_requirement};
use attn_metadata::{Batch, BatchLimits, PoolShape, RawBatch, SubBatch};
use libfuzzer_sys::fuzz_target;

use input::{Input, Tables};

/// Plans of larger batches take long to check.
const MAX_ROWS: u32 = 4096;
const MAX_UNITS: u64 = 1 << 14;

thread_local! {
    /// A batch that lives on from input to input, as an engine's does.
    static USED: RefCell<Option<Batch>> = const { RefCell::new(None) };
}

fuzz_target!(|input: Input| {
    let Some(pool) = input.pool() else { return };
    let tables = input.tables(pool);
    let raw = tables.raw();
    let fresh = Batch::from_raw(pool, &raw);
    USED.with_borrow_mut(|used| {
        let kept = used.take().filter(|batch| batch.pool() == pool);
        let mut batch = kept.unwrap_or_else(|| Batch::empty(pool));
        let before = batch.clone();
        match (&fresh, batch.set(&raw)) {
            (Ok(fresh), Ok(())) => assert_same(&batch, fresh),
            (Err(error), Err(again)) => {
                assert!(!error.violations().is_empty() && !error.to_string().is_empty());
                assert_eq!(error.violations(), again.violations());
                assert_same(&batch, &before);
            }
            (fresh, used) => panic!("a fresh batch says {fresh:?}, a used one {used:?}"),
        }
        *used = Some(batch);
    });
    if let Ok(batch) = fresh {
        check_batch(&batch, &tables);
        check_halves(&batch);
        check_plan(&batch, &input);
    }
});

fn assert_same(a: &Batch, b: &Batch) {
    assert_eq!((a.num_rows(), a.num_used_rows()), (b.num_rows(), b.num_used_rows()));
    assert_eq!((a.requests(), a.kv_indices(), a.slot_mapping()), (b.requests(), b.kv_indices(), b.slot_mapping()));
    assert_eq!(a.custom_mask().map(|mask| mask.bytes()), b.custom_mask().map(|mask| mask.bytes()));
}

/// The batch says what the tables say, and all that it names is there.
fn check_batch(batch: &Batch, tables: &Tables) {
    let RawBatch { num_rows, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, .. } = tables.raw();
    let PoolShape { num_pages, page_size } = batch.pool();
    assert_eq!((batch.num_rows() as usize, batch.kv_indices()), (num_rows, kv_indices));
    assert_eq!(batch.requests().len() + 1, qo_indptr.len());
    for (at, request) in batch.requests().iter().enumerate() {
        assert_eq!(i64::from(request.q_len), i64::from(qo_indptr[at + 1]) - i64::from(qo_indptr[at]));
        assert_eq!(i64::from(request.num_pages), i64::from(kv_indptr[at + 1]) - i64::from(kv_indptr[at]));
        let before_last = i64::from(request.num_pages.saturating_sub(1)) * i64::from(page_size.get());
        assert_eq!(i64::from(request.kv_len), before_last + i64::from(kv_last_page_len[at]));
        assert_eq!(request.num_pages, page_size.pages_for(request.kv_len as usize) as u32);
        assert!(batch.pages(request).iter().all(|&page| u32::try_from(page).unwrap() < num_pages));
        assert!(request.q_start + request.q_len <= batch.num_used_rows());
        if request.kv_len > 0 {
            let _ = batch.page_of(request, request.kv_len - 1);
        }
        if let (Some(mask), true) = (batch.custom_mask(), request.q_len > 0 && request.kv_len > 0) {
            let _ = mask.is_visible(request, request.q_len - 1, request.kv_len - 1);
        }
    }
    assert!(batch.num_used_rows() <= batch.num_rows());
    if let Some(slots) = batch.slot_mapping() {
        assert_eq!(slots.len(), num_rows);
        let mut used: Vec<_> = slots.iter().filter_map(|slot| slot.index()).collect();
        assert!(used.iter().all(|&slot| (slot as u64) < batch.pool().num_slots()));
        used.sort_unstable();
        assert!(used.windows(2).all(|pair| pair[0] < pair[1]), "no slot is written twice");
    }
}

/// Two sub-batches have each request once; one appends and writes the padding.
fn check_halves(batch: &Batch) {
    let [mut first, mut later] = [Batch::empty(batch.pool()), Batch::empty(batch.pool())];
    batch.select_into(&mut first, SubBatch::First, |request| request.q_len > 1);
    batch.select_into(&mut later, SubBatch::Later, |request| request.q_len <= 1);
    assert_eq!(first.requests().len() + later.requests().len(), batch.requests().len());
    assert_eq!((first.slot_mapping(), later.slot_mapping()), (batch.slot_mapping(), None));
    assert!(first.writes_padding() && !later.writes_padding());
    for part in [&first, &later] {
        assert!(part.requests().iter().all(|request| part.pages(request) == batch.pages(request)));
    }
}

/// Tiles cut each request's rows without gaps, chunks cut each tile's keys without gaps, and each row's keys are in.
fn check_plan(batch: &Batch, input: &Input) {
    let (config, group) = (input.plan_config(), input.plan_group());
    let chunks_at_most = u64::from(batch.max_kv_len() / config.chunking.chunk_len) + 2;
    let tiles_at_most = u64::from(batch.num_used_rows() / config.tile_len) + batch.requests().len() as u64;
    let units_at_most = tiles_at_most * chunks_at_most * u64::from(group.heads.num_kv_heads);
    if batch.num_rows() > MAX_ROWS || units_at_most > MAX_UNITS {
        return;
    }
    let mut plan = Plan::new(config, group);
    plan.update(batch);
    let mut tiles = plan.tiles().iter().peekable();
    for (at, request) in (0u32..).zip(batch.requests()) {
        let mut next_row = 0;
        while let Some(tile) = tiles.next_if(|tile| tile.request == at) {
            assert_eq!(tile.q_begin, next_row);
            assert!((1..=config.tile_len).contains(&tile.q_len));
            next_row += tile.q_len;
            let mut next_key = tile.kv_begin;
            for chunk in (0..tile.num_chunks).map(|chunk| tile.chunk(chunk)) {
                assert_eq!(chunk.start, next_key);
                assert!(chunk.end - chunk.start <= tile.chunk_len);
                assert!(!chunk.is_empty() || !tile.is_split(), "{tile:?}");
                next_key = chunk.end;
            }
            assert_eq!(next_key, tile.kv_end);
            for position in (tile.q_begin..next_row).map(|row| request.position(row)) {
                let end = if group.causal { position + 1 } else { i64::MAX }.clamp(0, i64::from(request.kv_len));
                let begin = group.window_left.map_or(0, |left| position - i64::from(left)).max(0);
                let is_in = i64::from(tile.kv_begin) <= begin && end <= i64::from(tile.kv_end);
                assert!(begin >= end || is_in, "keys {begin}..{end} at {position}, {tile:?}");
            }
        }
        assert_eq!(next_row, request.q_len);
    }
    assert!(tiles.next().is_none());
    check_units(&plan);
    let limits = BatchLimits {
        max_rows: batch.num_rows(),
        max_requests: u32::try_from(batch.requests().len()).unwrap(),
        max_kv_len: batch.max_kv_len(),
    };
    let bound = workspace_requirement(&config, &group, &limits).total_bytes();
    assert!(plan.workspace().total_bytes() <= bound, "{limits:?}");
}

/// Each unit comes once, in order; the partial rows of split tiles lie side by side; no worker has much too much.
fn check_units(plan: &Plan) {
    assert_eq!(plan.ranges().len(), plan.config().num_workers as usize);
    let (mut next_unit, mut total, mut largest, mut loads) = (0, 0, 0, Vec::new());
    let mut partial_rows = Vec::new();
    for range in plan.ranges() {
        let mut load = 0;
        for unit in plan.units(range) {
            assert_eq!(plan.number(&unit), next_unit);
            next_unit += 1;
            let tile = &plan.tiles()[unit.tile as usize];
            let cost = plan.unit_cost(tile, unit.chunk);
            (load, largest) = (load + cost, cost.max(largest));
            if tile.is_split() {
                let group_size = plan.group().heads.group_size();
                let first = tile.partial_row(unit.kv_head, unit.chunk, group_size);
                partial_rows.push(first..first + u64::from(tile.q_len * group_size));
            }
        }
        loads.push(load);
        total += load;
    }
    assert_eq!((next_unit, total), (plan.num_units(), plan.total_cost()));
    let share = total.div_ceil(u64::from(plan.config().num_workers));
    assert!(loads.iter().all(|&load| load <= share + largest), "{loads:?}");
    partial_rows.sort_unstable_by_key(|rows| rows.start);
    let end = partial_rows.iter().fold(0, |end, rows| {
        assert_eq!(rows.start, end, "partial rows do not overlap");
        rows.end
    });
    assert_eq!(end, plan.num_partial_rows());
}

//! Owns the order and the size of the work items of a plan: (query tile, some KV heads, chunk).
//!
//! KV heads of one item take turns tile by tile, which reads memory in longer runs; so an item takes as many heads as
//! leave enough items for all workers. No result depends on any choice made here.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use attn_metadata::plan::{Plan, Tile};

use super::unit::STREAM_ROWS;

/// Items for each worker that balance well enough.
const ITEMS_PER_WORKER: u64 = 6;

/// Work that one worker does at a time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Item {
    pub(crate) tile: u32,
    pub(crate) chunk: u32,
    /// First KV head.
    pub(crate) kv_head: u32,
    pub(crate) num_kv_heads: u32,
    cost: u64,
}

/// The items of a plan, the costly ones first.
#[derive(Debug, Default)]
pub(crate) struct Schedule {
    items: Vec<Item>,
}

impl Schedule {
    pub(crate) fn items(&self) -> &[Item] {
        &self.items
    }

    /// Bytes that a plan's items take.
    pub(crate) fn bytes(plan: &Plan, num_workers: usize) -> u64 {
        num_items(plan, num_workers).saturating_mul(size_of::<Item>() as u64)
    }

    /// Makes room for a plan's items, whose number only its batch bounds. False where there is no such memory.
    pub(crate) fn make_room(&mut self, plan: &Plan, num_workers: usize) -> bool {
        let num_items = usize::try_from(num_items(plan, num_workers)).unwrap_or(usize::MAX);
        self.items.clear();
        self.items.try_reserve(num_items).is_ok()
    }

    /// Cuts a plan anew. Reuses memory.
    pub(crate) fn update(&mut self, plan: &Plan, num_workers: usize) {
        self.items.clear();
        for (index, tile, heads) in heads_of_items(plan, num_workers) {
            self.add(plan, tile, index, heads);
        }
        self.items.sort_unstable_by_key(|item| (Reverse(item.cost), item.tile, item.kv_head, item.chunk));
    }

    /// Cost of the most loaded worker over the mean, where each takes the next item when it is done with one.
    #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
    pub(crate) fn imbalance(&self, num_workers: usize) -> f64 {
        let mut loads: BinaryHeap<Reverse<u64>> = (0..num_workers.max(1)).map(|_| Reverse(0)).collect();
        for item in &self.items {
            loads.peek_mut().expect("there is a worker").0 += item.cost;
        }
        let loads: Vec<u64> = loads.into_iter().map(|Reverse(load)| load).collect();
        let (sum, max) = (loads.iter().sum::<u64>(), loads.iter().copied().max().unwrap_or(0));
        if sum == 0 { 1.0 } else { max as f64 * loads.len() as f64 / sum as f64 }
    }

    fn add(&mut self, plan: &Plan, tile: &Tile, index: u32, heads: u32) {
        let all_heads = plan.group().heads.num_kv_heads;
        for kv_head in (0..all_heads).step_by(heads as usize) {
            let num_kv_heads = heads.min(all_heads - kv_head);
            for chunk in 0..tile.num_chunks {
                let cost = plan.unit_cost(tile, chunk) * u64::from(num_kv_heads);
                self.items.push(Item { tile: index, chunk, kv_head, num_kv_heads, cost });
            }
        }
    }
}

/// The KV heads of a tile's items, for each tile with its number.
fn heads_of_items(plan: &Plan, num_workers: usize) -> impl Iterator<Item = (u32, &Tile, u32)> {
    let all_heads = plan.group().heads.num_kv_heads;
    let pairs: u64 = plan.tiles().iter().map(|tile| u64::from(tile.num_chunks)).sum();
    // Blocks of heads that each (tile, chunk) should be cut into.
    let wanted = (num_workers as u64 * ITEMS_PER_WORKER).div_ceil(pairs.max(1));
    let wanted = if num_workers == 1 { 1 } else { wanted };
    let balanced = u64::from(all_heads).div_ceil(wanted);
    (0u32..).zip(plan.tiles()).map(move |(index, tile)| {
        (index, tile, u32::try_from(balanced).map_or(1, |n| n.min(heads_that_fit(plan, tile))))
    })
}

fn num_items(plan: &Plan, num_workers: usize) -> u64 {
    let all_heads = plan.group().heads.num_kv_heads;
    let of_tile =
        |(_, tile, heads): (u32, &Tile, u32)| u64::from(tile.num_chunks) * u64::from(all_heads.div_ceil(heads));
    heads_of_items(plan, num_workers).map(of_tile).sum()
}

/// KV heads that an item may hold: their scores stay in the first-level cache, or one whose tiles are packed.
fn heads_that_fit(plan: &Plan, tile: &Tile) -> u32 {
    let rows = tile.q_len as usize * plan.group().heads.group_size() as usize;
    u32::try_from((STREAM_ROWS / rows).max(1)).expect("at most the rows of a unit")
}

//! Adding up what units cost, tile by tile in place of unit by unit: a plan of few tiles may have billions of units.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::{Plan, Tile, WorkRange};

/// What a unit costs, by its tile and chunk.
#[derive(Clone, Copy, Debug)]
pub(super) struct UnitCost<F> {
    pub(super) of: F,
    /// Chunks of a tile but the first and the last cost the same where their length is a multiple of this.
    pub(super) step: u32,
}

impl<F: Fn(&Tile, u32) -> u64> UnitCost<F> {
    /// Cost of the first `count` chunks of a head.
    fn first_chunks(&self, tile: &Tile, count: u32) -> u64 {
        let last = tile.num_chunks - 1;
        if count <= 3 || !tile.chunk_len.is_multiple_of(self.step) {
            return (0..count).map(|chunk| (self.of)(tile, chunk)).sum();
        }
        let of_last = if count > last { (self.of)(tile, last) } else { (self.of)(tile, 1) };
        (self.of)(tile, 0) + (self.of)(tile, 1) * u64::from(count - 2) + of_last
    }

    /// Cost of the first `count` units of a tile, head by head.
    fn first_units(&self, tile: &Tile, count: u64) -> u64 {
        let num_chunks = u64::from(tile.num_chunks);
        let rest = u32::try_from(count % num_chunks).expect("fewer than the chunks");
        let heads = count / num_chunks;
        let of_heads = if heads > 0 { heads * self.first_chunks(tile, tile.num_chunks) } else { 0 };
        of_heads + self.first_chunks(tile, rest)
    }

    /// Cost of the units of a range that goes through chunks, then heads, then tiles.
    fn range(&self, plan: &Plan, range: &WorkRange) -> u64 {
        let num_kv_heads = u64::from(plan.group().heads.num_kv_heads);
        let (mut left, mut sum) = (range.num_units, 0);
        let mut begin = match plan.tiles().get(range.first.tile as usize) {
            Some(tile) => u64::from(range.first.kv_head) * u64::from(tile.num_chunks) + u64::from(range.first.chunk),
            None => 0,
        };
        for tile in plan.tiles().iter().skip(range.first.tile as usize) {
            if left == 0 {
                break;
            }
            let end = (begin + left).min(num_kv_heads * u64::from(tile.num_chunks));
            sum += self.first_units(tile, end) - self.first_units(tile, begin);
            left -= end - begin;
            begin = 0;
        }
        sum
    }
}

/// Cost of the busiest worker, where whoever is free takes what is next.
pub(super) fn busiest(plan: &Plan, cost: &UnitCost<impl Fn(&Tile, u32) -> u64>) -> u64 {
    let mut loads: BinaryHeap<Reverse<u64>> = (0..plan.config().num_workers).map(|_| Reverse(0)).collect();
    let mut give = |cost: u64| {
        if let Some(mut least) = loads.peek_mut() {
            least.0 += cost;
        }
    };
    for range in plan.ranges() {
        if plan.config().sharing.is_by_unit() {
            // A chunk of a tile for each head.
            let of_unit = (cost.of)(&plan.tiles()[range.first.tile as usize], range.first.chunk);
            (0..range.num_units).for_each(|_| give(of_unit));
        } else {
            give(cost.range(plan, range));
        }
    }
    loads.iter().map(|Reverse(load)| *load).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::super::{Chunking, CutBy, PlanConfig, Sharing};
    use super::*;
    use crate::batch::{Batch, PoolShape, RawBatch};
    use crate::layer::HeadShape;
    use crate::model::PlanGroup;

    /// A batch of (q_len, kv_len) that all read one page.
    fn batch(lens: &[(i32, i32)]) -> Batch {
        let sums = |counts: &mut dyn Iterator<Item = i32>| {
            let mut sums = vec![0];
            counts.for_each(|count| sums.push(sums[sums.len() - 1] + count));
            sums
        };
        let (qo_indptr, kv_indptr) =
            (sums(&mut lens.iter().map(|l| l.0)), sums(&mut lens.iter().map(|l| i32::from(l.1 > 0))));
        let raw = RawBatch {
            num_rows: lens.iter().map(|l| l.0 as usize).sum(),
            qo_indptr: &qo_indptr,
            kv_indptr: &kv_indptr,
            kv_indices: &vec![0; lens.iter().filter(|l| l.1 > 0).count()],
            kv_last_page_len: &lens.iter().map(|l| l.1).collect::<Vec<_>>(),
            slot_mapping: None,
            custom_mask: None,
        };
        Batch::from_raw(PoolShape { num_pages: 1, page_size: kvpool::PageSize::new(1 << 30).unwrap() }, &raw).unwrap()
    }

    fn plan(lens: &[(i32, i32)], chunk_len: u32, sharing: Sharing, window_left: Option<u32>) -> Plan {
        let heads = HeadShape::new(6, 3, 64);
        let layer = crate::layer::LayerParams { window_left, ..crate::layer::LayerParams::causal(heads) };
        let layer = crate::layer::Layer::new(layer).unwrap();
        let page_size = kvpool::PageSize::new(1 << 30).unwrap();
        let model = crate::model::ModelSpec::new(vec![layer], kvpool::Dtype::F32, kvpool::KvDtype::F32, page_size);
        let group: PlanGroup = model.unwrap().groups()[0];
        let chunking = Chunking { by: CutBy::Request, chunk_len, shortest: chunk_len, max_q_len: u32::MAX };
        let config = PlanConfig { tile_len: 4, chunking, num_workers: 5, sharing, unit_overhead: 7 };
        let mut plan = Plan::new(config, group);
        plan.update(&batch(lens));
        plan
    }

    const SHARINGS: [Sharing; 3] =
        [Sharing::Even, Sharing::InOrder, Sharing::LongestFirst { rest_len: 2, short_kv_len: 3 }];

    /// As [`busiest`], by walking all units.
    fn busiest_by_units(plan: &Plan, cost: impl Fn(&Tile, u32) -> u64) -> u64 {
        let mut loads = vec![0u64; plan.config().num_workers as usize];
        let mut give = |cost: u64| *loads.iter_mut().min().unwrap() += cost;
        for range in plan.ranges() {
            let costs = plan.units(range).map(|unit| cost(&plan.tiles()[unit.tile as usize], unit.chunk));
            if plan.config().sharing.is_by_unit() { costs.for_each(&mut give) } else { give(costs.sum()) }
        }
        loads.into_iter().max().unwrap()
    }

    #[test]
    fn tiles_add_up_to_what_their_units_add_up_to() {
        let lens = [(1, 1000), (9, 77), (1, 0), (3, 3), (1, 100), (30, 5000), (2, 129), (1, 64)];
        for (sharing, chunk_len) in SHARINGS.into_iter().flat_map(|s| [1, 16, 24, 64, 1000, u32::MAX].map(|c| (s, c))) {
            for window_left in [None, Some(200)] {
                let plan = plan(&lens, chunk_len, sharing, window_left);
                let of_unit = |tile: &Tile, chunk| plan.unit_cost(tile, chunk);
                let by_units = busiest_by_units(&plan, of_unit);
                assert_eq!(busiest(&plan, &UnitCost { of: of_unit, step: 1 }), by_units, "{sharing:?}, {chunk_len}");
                // What a kernel computes: whole steps, so chunks of 24 cost now one step, now two.
                let of_steps = |tile: &Tile, chunk| {
                    let kv = tile.chunk(chunk);
                    u64::from(kv.end.div_ceil(16) - kv.start / 16)
                };
                let by_units = busiest_by_units(&plan, of_steps);
                assert_eq!(busiest(&plan, &UnitCost { of: of_steps, step: 16 }), by_units, "{sharing:?}, {chunk_len}");
            }
        }
    }

    #[test]
    fn a_billion_units_are_added_up_in_a_moment() {
        let plan = plan(&[(1, 1 << 30); 256], 512, Sharing::Even, None);
        assert_eq!(plan.num_units(), 3 << 29);
        let num_asked = Cell::new(0);
        let of = |tile: &Tile, chunk| {
            num_asked.set(num_asked.get() + 1);
            plan.unit_cost(tile, chunk)
        };
        let total = plan.total_cost();
        assert!(busiest(&plan, &UnitCost { of, step: 1 }) >= total / 5);
        assert!(num_asked.get() < 12 * (plan.tiles().len() + plan.ranges().len()), "{num_asked:?}");
    }
}

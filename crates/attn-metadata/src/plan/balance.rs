//! Chunk lengths for a whole batch ([`CutBy::Batch`](super::CutBy::Batch)): balance with as few partial states as may be.

use super::PlanConfig;
use super::planner::visible;
use crate::batch::{Batch, Request};
use crate::model::PlanGroup;

/// Units a worker that are tried, at most. So a plan has at most this many units a worker besides one for each tile and
/// KV head.
pub(super) const MAX_UNITS_PER_WORKER: u32 = 8;

/// The chunk length, a multiple of the shortest, with which all workers are done first: of some lengths that give each
/// worker 1, 2, … units.
///
/// Workers take the next unit when they are free, so the last is done after as many rounds of the longest unit as there
/// are units for each, at most; or, where few are that long, about half of one after the mean.
pub(super) fn balanced_chunk_len(config: &PlanConfig, group: &PlanGroup, batch: &Batch) -> u32 {
    let work = || batch.requests().iter().filter(|r| r.q_len > 0).map(|r| Work::of(config, group, r));
    let total: u64 = work().map(|work| work.tiles * u64::from(work.visible)).sum();
    let workers = u64::from(config.num_workers);
    let cost = |len: u32| {
        let (mut units, mut longest) = (0, 0);
        for work in work() {
            let num_chunks = work.num_chunks(len);
            units += work.tiles * u64::from(num_chunks);
            longest = longest.max(u64::from(work.visible.div_ceil(num_chunks)));
        }
        let rounds = units.div_ceil(workers);
        let done = rounds.saturating_mul(longest).min(total / workers + longest / 2);
        done.saturating_add(rounds.saturating_mul(config.unit_overhead.into()))
    };
    let len = |units_per_worker: u32| {
        let share = total.div_ceil(workers * u64::from(units_per_worker)).max(1);
        u32::try_from(share.next_multiple_of(config.chunking.shortest.into())).unwrap_or(u32::MAX)
    };
    let lens = (1..=MAX_UNITS_PER_WORKER).map(len);
    lens.min_by_key(|len| cost(*len)).unwrap_or(u32::MAX)
}

/// What one request is to all heads.
struct Work {
    /// Tiles times KV heads.
    tiles: u64,
    visible: u32,
    is_cut: bool,
}

impl Work {
    fn of(config: &PlanConfig, group: &PlanGroup, request: &Request) -> Self {
        let (first, last) = visible(group, request, 0, request.q_len);
        let tiles = u64::from(request.q_len.div_ceil(config.tile_len)) * u64::from(group.heads.num_kv_heads);
        Self { tiles, visible: last - first, is_cut: request.q_len <= config.chunking.max_q_len }
    }

    fn num_chunks(&self, len: u32) -> u32 {
        if self.is_cut { self.visible.div_ceil(len).max(1) } else { 1 }
    }
}

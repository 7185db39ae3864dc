//! Balance over a whole batch: chunk lengths ([`CutBy::Batch`](super::CutBy::Batch)) with as few partial states as may
//! be, and tiles that are cut short for a last round ([`Sharing::LongestFirst`](super::Sharing::LongestFirst)).

use super::planner::visible;
use super::{PlanConfig, Sharing};
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

/// Rounds beyond which a last one is not worth cutting tiles for.
const MAX_ROUNDS: u64 = 12;

/// Tiles to cut to [`rest_len`](Sharing::LongestFirst::rest_len): those that do not fill a last round. 0 where tiles are of
/// different lengths, which fill it by themselves, where requests are cut into chunks, or where it would not be shorter.
///
/// Rows of a tile are independent of each other, but a window's tiles of KV begin where a tile of queries begins to see,
/// so windows are left alone: this changes no result.
pub(super) fn rest_tiles(config: &PlanConfig, group: &PlanGroup, batch: &Batch) -> u32 {
    let Sharing::LongestFirst { rest_len, .. } = config.sharing else { return 0 };
    if rest_len >= config.tile_len || group.window_left.is_some() {
        return 0;
    }
    let (mut num_tiles, mut shortest, mut longest) = (0, u32::MAX, 0);
    for request in batch.requests().iter().filter(|r| r.q_len > 0) {
        if request.q_len <= config.chunking.max_q_len {
            return 0;
        }
        let last = visible(group, request, 0, request.q_len).1;
        let first = visible(group, request, 0, config.tile_len.min(request.q_len)).1;
        num_tiles += u64::from(request.q_len.div_ceil(config.tile_len));
        (shortest, longest) = (shortest.min(first), longest.max(last));
    }
    let (heads, workers) = (u64::from(group.heads.num_kv_heads), u64::from(config.num_workers));
    let (rounds, rest) = (num_tiles * heads / workers, num_tiles * heads % workers);
    let is_even = u64::from(shortest) * 4 >= u64::from(longest) * 3;
    if !is_even || rest == 0 || !(1..=MAX_ROUNDS).contains(&rounds) {
        return 0;
    }
    let (count, pieces) = (rest.div_ceil(heads), u64::from(config.tile_len.div_ceil(rest_len)));
    // A piece takes about a quarter more than its share of a tile.
    let is_shorter = (count * pieces * heads).div_ceil(workers) * 5 < pieces * 4;
    if is_shorter { u32::try_from(count).unwrap_or(0) } else { 0 }
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

//! Cutting a batch into tiles, chunks and ranges. One pass over the requests, no allocation once warm.

use std::ops::Range;

use super::balance::{balanced_chunk_len, rest_tiles};
use super::order::order_chunks;
use crate::batch::{Batch, Request};
use crate::model::PlanGroup;

/// What the length of a request's chunks depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CutBy {
    /// The request alone: so do its bits.
    Request,
    /// The whole batch and the number of workers: chunks as long as they may be while all workers are done at about the
    /// same time. Far fewer partial states, and other bits in another batch.
    Batch,
}

/// How a request's KV is cut into chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunking {
    /// What the length depends on.
    pub by: CutBy,
    /// Tokens of a chunk, ≥ 1; chunk boundaries are its multiples. `u32::MAX`: one chunk, however long. Not used where
    /// the batch decides.
    pub chunk_len: u32,
    /// Chunks of requests that see fewer tokens are halved until there are two of them, or until they are this long;
    /// `chunk_len`: never. Where the batch decides, lengths are multiples of it.
    pub shortest: u32,
    /// Requests with more query tokens than this are not cut: their tiles keep the workers busy.
    pub max_q_len: u32,
}

/// In which shares the workers get the units; changes no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// A range for each worker, in order, of about the same cost; some may be empty.
    Even,
    /// For workers that take the next unit when they are free: each range a chunk of a tile for all KV heads, tile by
    /// tile.
    InOrder,
    /// As [`InOrder`](Self::InOrder), but by falling cost (within an eighth).
    LongestFirst {
        /// Requests that see up to so many tokens come last, one after the other, and of each the tile that sees most comes
        /// first: workers that compute the tiles of a request at about the same time read its KV from memory once. Only
        /// requests whose tiles are each a small part of what a worker has to do ([`SHORT_PART`](Self::SHORT_PART)).
        short_kv_len: u32,
        /// Query tokens of the tiles that a last round would leave most workers without, where all tiles are about as
        /// long: they are cut to this length if the round is shorter then. The tile's length: none is cut.
        rest_len: u32,
    },
}

impl Sharing {
    /// A tile of a short request of [`LongestFirst`](Self::LongestFirst) costs a worker at most this part of its share: the
    /// last of them are waited for, and few requests have so little KV that it stays in a cache whatever the order.
    pub const SHORT_PART: u32 = 6;

    /// Whether each range is a chunk of a tile for all KV heads, of which workers take one unit after the other.
    #[must_use]
    pub const fn is_by_unit(self) -> bool {
        !matches!(self, Self::Even)
    }
}

/// How a plan is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanConfig {
    /// Query tokens of a tile, ≥ 1.
    pub tile_len: u32,
    /// How KV is cut.
    pub chunking: Chunking,
    /// Who share the units, ≥ 1; does not change any result.
    pub num_workers: u32,
    /// How they share them.
    pub sharing: Sharing,
    /// Cost of starting a unit, in (query token × KV token) pairs.
    pub unit_overhead: u32,
}

impl PlanConfig {
    /// A tile for each query token, its KV in one chunk, one worker: for backends that have nothing to plan.
    pub const UNCUT: Self = Self {
        tile_len: 1,
        chunking: Chunking { by: CutBy::Request, chunk_len: u32::MAX, shortest: u32::MAX, max_q_len: u32::MAX },
        num_workers: 1,
        sharing: Sharing::Even,
        unit_overhead: 0,
    };

    /// Chunk length for a request of `q_len` query tokens that see `visible` KV tokens, all of them together; `target`
    /// is what the batch asks for, [`Plan::batch_chunk_len`].
    #[must_use]
    pub const fn chunk_len(&self, q_len: u32, visible: u32, target: u32) -> u32 {
        let Chunking { by, chunk_len, shortest, max_q_len } = self.chunking;
        if q_len > max_q_len {
            return u32::MAX;
        }
        if matches!(by, CutBy::Batch) {
            // As many chunks as the target makes, of about the same length.
            let num_chunks = if visible <= target { 1 } else { visible.div_ceil(target) };
            let len = visible.div_ceil(num_chunks).checked_next_multiple_of(shortest);
            return match len {
                Some(0) => shortest,
                Some(len) => len,
                None => u32::MAX,
            };
        }
        let mut len = chunk_len;
        while len > shortest && visible <= len {
            len = if len.div_ceil(2) > shortest { len.div_ceil(2) } else { shortest };
        }
        len
    }

    /// Ranges that a plan of at most so many tiles of at most so many chunks has, at most.
    #[must_use]
    pub const fn max_ranges(&self, num_tiles: usize, max_chunks: usize) -> usize {
        match self.sharing {
            Sharing::Even => self.num_workers as usize,
            Sharing::InOrder | Sharing::LongestFirst { .. } => num_tiles.saturating_mul(max_chunks),
        }
    }
}

/// A run of query tokens of one request, and the KV that any of them can see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// The request.
    pub request: u32,
    /// First query token, counted within the request.
    pub q_begin: u32,
    /// Query tokens, ≥ 1.
    pub q_len: u32,
    /// First KV token that any query token of the tile sees.
    pub kv_begin: u32,
    /// One past the last; `kv_begin` where they see nothing.
    pub kv_end: u32,
    /// Chunk length of the request.
    pub chunk_len: u32,
    /// Chunks that the tile's KV touches, ≥ 1 (an empty tile has one empty chunk).
    pub num_chunks: u32,
    /// Number of the tile's first unit.
    pub first_unit: u64,
    /// Row of the tile's first partial state in the workspace; tiles of one chunk have none.
    pub first_partial: u64,
}

impl Tile {
    /// KV tokens of a chunk, clipped to what the tile sees.
    #[must_use]
    pub fn chunk(&self, chunk: u32) -> Range<u32> {
        let first = self.kv_begin / self.chunk_len + chunk;
        let begin = u64::from(first) * u64::from(self.chunk_len);
        let end = begin + u64::from(self.chunk_len);
        let clip = |x: u64| x.clamp(u64::from(self.kv_begin), u64::from(self.kv_end));
        let narrow = |x: u64| u32::try_from(x).expect("clipped to 32-bit bounds");
        narrow(clip(begin))..narrow(clip(end))
    }

    /// Whether the result is merged from partial states.
    #[must_use]
    pub const fn is_split(&self) -> bool {
        self.num_chunks > 1
    }

    /// First workspace row of a unit's partial states: `q_len × group_size` rows, token by token, heads within.
    #[must_use]
    pub fn partial_row(&self, kv_head: u32, chunk: u32, group_size: u32) -> u64 {
        let unit = u64::from(kv_head) * u64::from(self.num_chunks) + u64::from(chunk);
        self.first_partial + unit * u64::from(self.q_len) * u64::from(group_size)
    }
}

/// One unit of work: a tile, a KV head with its group of query heads, a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unit {
    /// Index of the tile.
    pub tile: u32,
    /// The KV head.
    pub kv_head: u32,
    /// The chunk, counted within the tile.
    pub chunk: u32,
}

/// A share of the work: `num_units` units from `first` on, in the plan's order (chunks, then heads, then tiles), or, where
/// workers [take units](Sharing::is_by_unit), from head to head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkRange {
    /// The first unit.
    pub first: Unit,
    /// Number of units; may be 0 in [`Sharing::Even`].
    pub num_units: u64,
}

/// A plan for one batch and one [`PlanGroup`].
#[derive(Clone, Debug)]
pub struct Plan {
    config: PlanConfig,
    group: PlanGroup,
    tiles: Vec<Tile>,
    ranges: Vec<WorkRange>,
    /// Chunk length that the batch asks for.
    batch_chunk_len: u32,
    /// Scratch of [`Sharing::LongestFirst`].
    buckets: Vec<u32>,
    /// Tiles that are still to be cut short in this update.
    rest_tiles: u32,
    num_units: u64,
    num_partial_rows: u64,
    total_cost: u64,
}

impl Plan {
    /// An empty plan, to be filled by [`update`](Self::update).
    ///
    /// # Panics
    /// If a size of the configuration is 0.
    #[must_use]
    pub fn new(config: PlanConfig, group: PlanGroup) -> Self {
        let sizes = [config.tile_len, config.chunking.chunk_len, config.chunking.shortest, config.num_workers];
        assert!(!sizes.contains(&0), "a plan needs tiles, chunks and workers: {config:?}");
        Self {
            config,
            group,
            tiles: Vec::new(),
            ranges: Vec::new(),
            batch_chunk_len: u32::MAX,
            buckets: Vec::new(),
            rest_tiles: 0,
            num_units: 0,
            num_partial_rows: 0,
            total_cost: 0,
        }
    }

    /// Plans a batch, replacing the previous one. Reuses memory.
    pub fn update(&mut self, batch: &Batch) {
        self.cut(batch);
        self.share_out();
    }

    /// The first half of [`update`](Self::update): tiles, and how much work there is. It takes time and memory for tiles
    /// alone, however many units they are, so a plan that is too large can be refused after it. There are no ranges before
    /// [`share_out`](Self::share_out).
    pub fn cut(&mut self, batch: &Batch) {
        self.rest_tiles = rest_tiles(&self.config, &self.group, batch);
        self.cut_requests(batch);
    }

    /// As [`cut`](Self::cut), where only some of the workers will take units at first, since others do other work: no tiles
    /// are cut for a last round of all of them.
    pub fn cut_beside(&mut self, batch: &Batch) {
        self.rest_tiles = 0;
        self.cut_requests(batch);
    }

    fn cut_requests(&mut self, batch: &Batch) {
        self.tiles.clear();
        self.ranges.clear();
        (self.num_units, self.num_partial_rows, self.total_cost) = (0, 0, 0);
        if self.config.chunking.by == CutBy::Batch {
            self.batch_chunk_len = balanced_chunk_len(&self.config, &self.group, batch);
        }
        for (index, request) in (0u32..).zip(batch.requests()) {
            self.cut_request(index, request);
        }
    }

    /// The second half of [`update`](Self::update): ranges for the workers, one for each chunk of a tile where workers
    /// [take units](Sharing::is_by_unit).
    pub fn share_out(&mut self) {
        self.ranges.clear();
        match self.config.sharing {
            Sharing::InOrder => self.list_chunks(),
            Sharing::Even => self.cut_even(),
            Sharing::LongestFirst { short_kv_len, .. } => {
                let (short_kv_len, num_kv_heads) = (self.short_kv_len(short_kv_len), self.group.heads.num_kv_heads);
                order_chunks(&self.tiles, short_kv_len, num_kv_heads, &mut self.ranges, &mut self.buckets);
            }
        }
    }

    /// Tokens that short requests of this batch see, at most, of those that may be short.
    fn short_kv_len(&self, most: u32) -> u32 {
        let share = self.total_cost / u64::from(self.config.num_workers);
        let of_share = share / (u64::from(Sharing::SHORT_PART) * u64::from(self.config.tile_len));
        u32::try_from(of_share).map_or(most, |len| len.min(most))
    }

    /// How the plan was made.
    #[must_use]
    pub const fn config(&self) -> &PlanConfig {
        &self.config
    }

    /// What it was made for.
    #[must_use]
    pub const fn group(&self) -> &PlanGroup {
        &self.group
    }

    /// Chunk length that the last batch asked for; `u32::MAX` where lengths do not depend on it.
    #[must_use]
    pub const fn batch_chunk_len(&self) -> u32 {
        self.batch_chunk_len
    }

    /// The query tiles, request by request.
    #[must_use]
    pub fn tiles(&self) -> &[Tile] {
        &self.tiles
    }

    /// The shares of the work, see [`Sharing`]; together they hold each unit once.
    #[must_use]
    pub fn ranges(&self) -> &[WorkRange] {
        &self.ranges
    }

    /// Number of units.
    #[must_use]
    pub const fn num_units(&self) -> u64 {
        self.num_units
    }

    /// Rows of partial states in the workspace; a row is `head_dim_vo` values and an LSE.
    #[must_use]
    pub const fn num_partial_rows(&self) -> u64 {
        self.num_partial_rows
    }

    /// Cost of all units, in (query token × KV token) pairs of one head.
    #[must_use]
    pub const fn total_cost(&self) -> u64 {
        self.total_cost
    }

    /// The units of a range, in order.
    #[must_use]
    pub fn units(&self, range: &WorkRange) -> UnitIter<'_> {
        let goes_by_head = self.config.sharing.is_by_unit();
        UnitIter { plan: self, next: range.first, left: range.num_units, goes_by_head }
    }

    /// Cost of one unit, in (query token × KV token) pairs.
    #[must_use]
    pub fn unit_cost(&self, tile: &Tile, chunk: u32) -> u64 {
        let kv = tile.chunk(chunk);
        u64::from(kv.end - kv.start) * u64::from(tile.q_len) + u64::from(self.config.unit_overhead)
    }

    fn cut_request(&mut self, index: u32, request: &Request) {
        let (first, last) = match request.q_len {
            0 => (0, 0),
            q_len => visible(&self.group, request, 0, q_len),
        };
        let chunk_len = self.config.chunk_len(request.q_len, last - first, self.batch_chunk_len);
        let mut q_begin = 0;
        while q_begin < request.q_len {
            let tile_len = self.config.tile_len;
            let tile_end = (q_begin - q_begin % tile_len).saturating_add(tile_len).min(request.q_len);
            let q_len = match self.config.sharing {
                Sharing::LongestFirst { rest_len, .. } if self.rest_tiles > 0 => rest_len.min(tile_end - q_begin),
                _ => tile_end - q_begin,
            };
            if q_begin + q_len == tile_end {
                self.rest_tiles = self.rest_tiles.saturating_sub(1);
            }
            let (kv_begin, kv_end) = visible(&self.group, request, q_begin, q_len);
            // Chunks from the one that holds kv_begin to the one that holds the last token.
            let last = kv_end.saturating_sub(1).max(kv_begin);
            let tile = Tile {
                request: index,
                q_begin,
                q_len,
                kv_begin,
                kv_end,
                chunk_len,
                num_chunks: last / chunk_len - kv_begin / chunk_len + 1,
                first_unit: self.num_units,
                first_partial: self.num_partial_rows,
            };
            self.add(tile);
            q_begin += q_len;
        }
    }

    fn add(&mut self, tile: Tile) {
        let heads = self.group.heads;
        let units = u64::from(tile.num_chunks) * u64::from(heads.num_kv_heads);
        self.num_units += units;
        if tile.is_split() {
            self.num_partial_rows += units * u64::from(tile.q_len) * u64::from(heads.group_size());
        }
        self.total_cost += self.tile_cost(&tile);
        self.tiles.push(tile);
    }

    /// Cost of all units of a tile: its chunks partition its KV.
    fn tile_cost(&self, tile: &Tile) -> u64 {
        let pairs = u64::from(tile.kv_end - tile.kv_begin) * u64::from(tile.q_len);
        let head = pairs + u64::from(tile.num_chunks) * u64::from(self.config.unit_overhead);
        head * u64::from(self.group.heads.num_kv_heads)
    }

    /// Cuts the units into `num_workers` ranges: a range begins with the first unit that starts at or after its
    /// share of the total cost.
    fn cut_even(&mut self) {
        let workers = u64::from(self.config.num_workers);
        // total x worker / workers, without a product that is wider than the total.
        let (share, rest) = (self.total_cost / workers, self.total_cost % workers);
        let mut cursor = Cursor::default();
        let mut begin = Unit { tile: 0, kv_head: 0, chunk: 0 };
        for worker in 1..=workers {
            let target = share * worker + rest * worker / workers;
            let end = if worker == workers { self.end_unit() } else { self.seek(&mut cursor, target) };
            self.ranges.push(WorkRange { first: begin, num_units: self.number(&end) - self.number(&begin) });
            begin = end;
        }
    }

    /// A range for each chunk of a tile, in order.
    fn list_chunks(&mut self) {
        let num_units = self.group.heads.num_kv_heads.into();
        for (tile, of) in (0u32..).zip(&self.tiles) {
            let of_tile =
                (0..of.num_chunks).map(|chunk| WorkRange { first: Unit { tile, kv_head: 0, chunk }, num_units });
            self.ranges.extend(of_tile);
        }
    }

    /// The first unit that starts at or after a cost; the cursor only moves forward.
    fn seek(&self, cursor: &mut Cursor, target: u64) -> Unit {
        while let Some(tile) = self.tiles.get(cursor.tile as usize) {
            let cost = self.tile_cost(tile);
            if cursor.cost + cost > target {
                let (kv_head, chunk) = self.seek_in_tile(tile, target.saturating_sub(cursor.cost));
                if kv_head < self.group.heads.num_kv_heads {
                    return Unit { tile: cursor.tile, kv_head, chunk };
                }
            }
            cursor.cost += cost;
            cursor.tile += 1;
        }
        self.end_unit()
    }

    /// The first (KV head, chunk) of a tile that starts at or after a cost within the tile.
    fn seek_in_tile(&self, tile: &Tile, target: u64) -> (u32, u32) {
        let head_cost = self.tile_cost(tile) / u64::from(self.group.heads.num_kv_heads);
        if head_cost == 0 {
            return (0, 0);
        }
        let kv_head = u32::try_from(target / head_cost).expect("the target is within the tile");
        let left = target % head_cost;
        let first = self.unit_cost(tile, 0);
        // All chunks but the first and the last cost the same.
        let chunk = match left {
            0 => 0,
            left if left <= first => 1,
            left => 1 + (left - first).div_ceil(self.unit_cost(tile, 1).max(1)),
        };
        match u32::try_from(chunk) {
            Ok(chunk) if chunk < tile.num_chunks => (kv_head, chunk),
            _ => (kv_head + 1, 0),
        }
    }

    fn end_unit(&self) -> Unit {
        Unit { tile: u32::try_from(self.tiles.len()).expect("tiles hold 32-bit rows"), kv_head: 0, chunk: 0 }
    }

    /// Number of a unit in the plan's order.
    #[must_use]
    pub fn number(&self, unit: &Unit) -> u64 {
        match self.tiles.get(unit.tile as usize) {
            Some(tile) => {
                tile.first_unit + u64::from(unit.kv_head) * u64::from(tile.num_chunks) + u64::from(unit.chunk)
            }
            None => self.num_units,
        }
    }
}

/// KV tokens that any of a run of query tokens sees, by the causal mask and the window.
pub(super) fn visible(group: &PlanGroup, request: &Request, q_begin: u32, q_len: u32) -> (u32, u32) {
    let kv_len = i64::from(request.kv_len);
    let (first, last) = (request.position(q_begin), request.position(q_begin + q_len - 1));
    let end = if group.causal { (last + 1).clamp(0, kv_len) } else { kv_len };
    let begin = group.window_left.map_or(0, |w| (first - i64::from(w)).clamp(0, end));
    let narrow = |x: i64| u32::try_from(x).expect("within 0..=kv_len");
    (narrow(begin), narrow(end))
}

#[derive(Default)]
struct Cursor {
    tile: u32,
    cost: u64,
}

/// Units of a range, see [`Plan::units`].
#[derive(Clone, Debug)]
pub struct UnitIter<'a> {
    plan: &'a Plan,
    next: Unit,
    left: u64,
    goes_by_head: bool,
}

impl Iterator for UnitIter<'_> {
    type Item = Unit;

    fn next(&mut self) -> Option<Unit> {
        self.left = self.left.checked_sub(1)?;
        let unit = self.next;
        if self.goes_by_head {
            self.next.kv_head += 1;
            return Some(unit);
        }
        let tile = &self.plan.tiles[unit.tile as usize];
        self.next.chunk += 1;
        if self.next.chunk == tile.num_chunks {
            self.next = Unit { kv_head: unit.kv_head + 1, chunk: 0, ..unit };
        }
        if self.next.kv_head == self.plan.group.heads.num_kv_heads {
            self.next = Unit { tile: unit.tile + 1, kv_head: 0, chunk: 0 };
        }
        Some(unit)
    }
}

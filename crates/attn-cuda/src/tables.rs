//! Owns a step's tables as the kernels read them: which sections there are, where each begins, what is in it.
//!
//! The host plans ([`GroupPlan`]), then writes the sections into one pinned buffer, and what is used of them goes to the
//! device. For a captured step the sections have room for every batch that fits the bucket, so that their addresses
//! stay what was recorded, and copies take what the batch uses of it (`spans.rs`); the page table comes last, so that
//! what is sent ends with what is used of it, and so that the device may read it where the batch has it.

use attn_metadata::plan::{Plan, PlanConfig, Tile, Unit};
use attn_metadata::{Batch, HeadShape, PlanGroup, Request, SubBatch};
use kvpool::Slot;

use crate::params::{AttnMergeUnit, AttnRange, AttnStart, AttnStep, AttnTile};

/// Heads of a merge unit at most: `kMergeHeads` of `kernels/params.h`.
const MERGE_HEADS: u32 = 8;
/// Page ids of a first unit: `kStartPages` of `kernels/params.h`.
const START_PAGES: usize = 16;
/// Chunks that one warp merges: `kMergeWarpChunks` of `kernels/params.h`.
pub(crate) const MERGE_WARP_CHUNKS: u32 = 32;
/// Dims that a block merges of more: `kMergeSegment` of `kernels/params.h`.
const MERGE_SEGMENT: u32 = 32;
/// Sections begin at multiples of this.
const ALIGN_BYTES: usize = 256;

/// The plan of one group of layers: requests that decode, and those that extend.
#[derive(Debug)]
pub(crate) struct GroupPlan {
    /// `None`: there is no kernel for decoding, all requests extend.
    pub(crate) decode: Option<Part>,
    pub(crate) extend: Part,
    /// Query tokens of a request that decodes, at most.
    pub(crate) max_decode_q_len: u32,
    /// Whether both parts may run at the same time.
    pub(crate) may_be_at_once: bool,
}

/// The plan of some requests.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) plan: Plan,
    /// The requests that it is for.
    pub(crate) batch: Batch,
}

impl Part {
    fn cut(&mut self, batch: &Batch, role: SubBatch, is_beside: bool, keep: impl Fn(&Request) -> bool) {
        batch.select_into(&mut self.batch, role, keep);
        if is_beside { self.plan.cut_beside(&self.batch) } else { self.plan.cut(&self.batch) }
    }
}

impl GroupPlan {
    /// Plans a batch. Reuses memory.
    pub(crate) fn update(&mut self, batch: &Batch) {
        self.cut(batch);
        self.share_out();
    }

    /// The first half of planning, after which a plan that is too large can be refused.
    pub(crate) fn cut(&mut self, batch: &Batch) {
        let max = if self.decode.is_some() { self.max_decode_q_len } else { 0 };
        if let Some(decode) = &mut self.decode {
            decode.cut(batch, SubBatch::First, false, |r| r.q_len <= max);
        }
        let role = if self.decode.is_some() { SubBatch::Later } else { SubBatch::First };
        let decodes = self.decode.as_ref().is_some_and(|part| part.plan.num_units() > 0);
        self.extend.cut(batch, role, self.may_be_at_once && decodes, |r| r.q_len > max);
    }

    /// The second half.
    pub(crate) fn share_out(&mut self) {
        self.decode.iter_mut().chain([&mut self.extend]).for_each(|part| part.plan.share_out());
    }

    /// The parts in order of launch: the first writes the padding rows.
    pub(crate) fn parts(&self) -> impl Iterator<Item = &Part> {
        self.decode.iter().chain(std::iter::once(&self.extend))
    }

    /// Rows of partial states of all parts.
    pub(crate) fn num_partial_rows(&self) -> u64 {
        self.parts().map(|part| part.plan.num_partial_rows()).sum()
    }

    /// Bytes of the counters of states that decoding leaves: `counters` of `kernels/params.h`.
    pub(crate) fn counter_bytes(&self) -> u64 {
        let of_part = |part: &Part| counter_bytes(part.plan.tiles().len(), &part.plan.group().heads);
        self.decode.as_ref().map_or(0, of_part)
    }

    /// Room that a batch's tables need.
    pub(crate) fn sizes(&self) -> GroupSizes {
        // Each block of the grid reads the range of its number, whether there is one or not.
        let part = |part: &Part| PartSizes {
            num_tiles: part.plan.tiles().len(),
            num_ranges: part.plan.ranges().len().max(part.plan.config().num_workers as usize),
            num_starts: 0,
        };
        let decode = |decode: &Part| PartSizes {
            num_starts: num_starts(decode.plan.config(), decode.plan.group()),
            ..part(decode)
        };
        let num_merge_units = self.parts().map(|part| num_merge_units(&part.plan)).sum();
        GroupSizes { decode: self.decode.as_ref().map(decode), extend: part(&self.extend), num_merge_units }
    }
}

/// Room for the tables of one part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PartSizes {
    pub(crate) num_tiles: usize,
    pub(crate) num_ranges: usize,
    /// First units of blocks: of the part that decodes alone.
    pub(crate) num_starts: usize,
}

impl GroupSizes {
    /// As [`GroupPlan::counter_bytes`], of as many tiles as there is room for.
    pub(crate) fn counter_bytes(&self, heads: &HeadShape) -> u64 {
        self.decode.map_or(0, |part| counter_bytes(part.num_tiles, heads))
    }
}

/// One counter for each tile and KV head.
const fn counter_bytes(num_tiles: usize, heads: &HeadShape) -> u64 {
    num_tiles as u64 * heads.num_kv_heads as u64 * size_of::<i32>() as u64
}

/// Entries of the table of first units: blocks that follow each other have the heads of a chunk.
pub(crate) fn num_starts(config: &PlanConfig, group: &PlanGroup) -> usize {
    config.num_workers.div_ceil(group.heads.num_kv_heads) as usize
}

/// Room for the tables of one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GroupSizes {
    pub(crate) decode: Option<PartSizes>,
    pub(crate) extend: PartSizes,
    pub(crate) num_merge_units: usize,
}

/// Where the tables of one part begin, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PartOffsets {
    pub(crate) step: usize,
    pub(crate) tiles: usize,
    pub(crate) ranges: usize,
    pub(crate) starts: usize,
}

/// Where the tables of one group begin, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GroupOffsets {
    /// Of the requests that decode; unused where there is no kernel for them.
    pub(crate) decode: PartOffsets,
    pub(crate) extend: PartOffsets,
    /// Head for merging, over the tiles of all parts.
    pub(crate) merge_step: usize,
    /// Tiles of all parts, one after the other.
    pub(crate) tiles: usize,
    pub(crate) merge_units: usize,
}

/// Where every section begins, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Offsets {
    pub(crate) groups: Vec<GroupOffsets>,
    pub(crate) slots: usize,
    pub(crate) mask: usize,
    pub(crate) kv_indices: usize,
    /// Bytes of all sections.
    pub(crate) len: usize,
}

/// Room for everything besides the groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub(crate) num_slots: usize,
    pub(crate) mask_bytes: usize,
    pub(crate) num_kv_indices: usize,
}

/// Gives out aligned places one after the other.
struct Carver {
    at: usize,
}

impl Carver {
    fn take<T>(&mut self, count: usize) -> usize {
        let begin = self.at;
        self.at = (begin + count * size_of::<T>()).next_multiple_of(ALIGN_BYTES);
        begin
    }
}

impl Offsets {
    /// Lays out the sections. Reuses memory.
    pub(crate) fn update(&mut self, groups: impl Iterator<Item = GroupSizes>, sizes: Sizes) {
        let mut carver = Carver { at: 0 };
        self.groups.clear();
        self.groups.extend(groups.map(|sizes| GroupOffsets::carve(&mut carver, &sizes)));
        self.slots = carver.take::<i32>(sizes.num_slots);
        self.mask = carver.take::<u8>(sizes.mask_bytes);
        self.kv_indices = carver.take::<i32>(sizes.num_kv_indices);
        self.len = carver.at;
    }
}

impl GroupOffsets {
    fn carve(carver: &mut Carver, sizes: &GroupSizes) -> Self {
        let decode = sizes.decode.unwrap_or_default();
        let tiles = carver.take::<AttnTile>(decode.num_tiles + sizes.extend.num_tiles);
        let extend_tiles = tiles + decode.num_tiles * size_of::<AttnTile>();
        let mut part = |tiles, sizes: &PartSizes| PartOffsets {
            step: carver.take::<AttnStep>(1),
            tiles,
            ranges: carver.take::<AttnRange>(sizes.num_ranges),
            starts: carver.take::<AttnStart>(sizes.num_starts),
        };
        let decode = part(tiles, &decode);
        let extend = part(extend_tiles, &sizes.extend);
        let merge_step = carver.take::<AttnStep>(1);
        let merge_units = carver.take::<AttnMergeUnit>(sizes.num_merge_units);
        Self { decode, extend, merge_step, tiles, merge_units }
    }

    /// Place of a part's first tile among the tiles of all parts.
    const fn first_tile(&self, part: &PartOffsets) -> usize {
        (part.tiles - self.tiles) / size_of::<AttnTile>()
    }
}

/// What is written besides the plans.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Contents<'a> {
    pub(crate) batch: &'a Batch,
    /// Rows of q and out, padding included: the bucket's for a captured step.
    pub(crate) num_rows: u32,
    /// Whether there is a section of slots: of a captured step also where the batch has no row to append.
    pub(crate) has_slots: bool,
}

/// Writes all sections of a step but the last, the page table.
pub(crate) fn write(bytes: &mut [u8], offsets: &Offsets, plans: &[GroupPlan], contents: Contents<'_>) {
    for (group, plan) in offsets.groups.iter().zip(plans) {
        write_group(bytes, group, plan, contents);
    }
    let Contents { batch, num_rows, has_slots } = contents;
    if has_slots {
        let to = section::<i32>(bytes, offsets.slots, num_rows as usize);
        to.fill(Slot::PADDING.raw());
        let slots = batch.slot_mapping().unwrap_or_default();
        to.iter_mut().zip(slots).for_each(|(to, slot)| *to = slot.raw());
    }
    if let Some(mask) = batch.custom_mask() {
        section::<u8>(bytes, offsets.mask, mask.bytes().len()).copy_from_slice(mask.bytes());
    }
}

fn write_group(bytes: &mut [u8], offsets: &GroupOffsets, plan: &GroupPlan, contents: Contents<'_>) {
    let num_rows = contents.num_rows;
    let zeroes_padding = contents.batch.writes_padding();
    let (mut first_partial, mut num_units) = (0, 0);
    let extend = (&plan.extend, &offsets.extend);
    let parts = plan.decode.iter().map(|part| (part, &offsets.decode)).chain([extend]);
    for (index, (part, at)) in parts.enumerate() {
        let tiles = part.plan.tiles();
        let zero_begin = if index == 0 && zeroes_padding { contents.batch.num_used_rows() } else { num_rows };
        let step = AttnStep {
            num_tiles: narrow(tiles.len()),
            num_ranges: narrow(part.plan.ranges().len()),
            num_merge_units: 0,
            zero_begin: narrow(zero_begin),
        };
        section::<AttnStep>(bytes, at.step, 1)[0] = step;
        let to = section::<AttnTile>(bytes, at.tiles, tiles.len());
        for (to, tile) in to.iter_mut().zip(tiles) {
            *to = device_tile(tile, &part.batch, first_partial);
        }
        let to = section::<AttnRange>(bytes, at.ranges, part.plan.ranges().len());
        for (to, range) in to.iter_mut().zip(part.plan.ranges()) {
            let first = range.first;
            let num_units = narrow(range.num_units);
            let [tile, kv_head, chunk] = [first.tile, first.kv_head, first.chunk].map(narrow);
            *to = AttnRange { tile, kv_head, chunk, num_units };
        }
        if index == 0 && plan.decode.is_some() {
            write_starts(bytes, offsets, part);
        }
        let tile_base = offsets.first_tile(at);
        let count = num_merge_units(&part.plan);
        let begin = offsets.merge_units + num_units * size_of::<AttnMergeUnit>();
        write_merge_units(section(bytes, begin, count), part, tile_base);
        num_units += count;
        first_partial += part.plan.num_partial_rows();
    }
    let num_tiles = offsets.first_tile(&offsets.extend) + plan.extend.plan.tiles().len();
    let step = AttnStep {
        num_tiles: narrow(num_tiles),
        num_ranges: 0,
        num_merge_units: narrow(num_units),
        zero_begin: narrow(num_rows),
    };
    section::<AttnStep>(bytes, offsets.merge_step, 1)[0] = step;
}

/// Writes the first units of the blocks that decode, from tables that are written.
fn write_starts(bytes: &mut [u8], offsets: &GroupOffsets, part: &Part) {
    let count = num_starts(part.plan.config(), part.plan.group());
    let at = offsets.decode;
    for number in 0..count {
        let first = part.plan.ranges().get(number).map(|range| range.first);
        let start = first.map_or(AttnStart { chunk: -1, ..AttnStart::default() }, |unit| {
            let tile = section::<AttnTile>(bytes, at.tiles, part.plan.tiles().len())[unit.tile as usize];
            device_start(unit, &tile, &part.batch)
        });
        section::<AttnStart>(bytes, at.starts, count)[number] = start;
    }
}

fn device_start(unit: Unit, tile: &AttnTile, batch: &Batch) -> AttnStart {
    let chunk: i32 = narrow(unit.chunk);
    let begin_of_chunk = (tile.kv_begin / tile.chunk_len + chunk) * tile.chunk_len;
    let begin = begin_of_chunk.max(tile.kv_begin);
    let end = tile.kv_end.min(begin_of_chunk.saturating_add(tile.chunk_len));
    // Positions are not negative.
    let page_of = |position: i32| position.unsigned_abs() / batch.pool().page_size.get();
    let ids = batch.pages(&batch.requests()[tile.request.unsigned_abs() as usize]);
    let ids = if begin < end { &ids[page_of(begin) as usize..=page_of(end - 1) as usize] } else { &[] };
    let mut pages = [0; START_PAGES];
    pages.iter_mut().zip(ids).for_each(|(to, id)| *to = *id);
    AttnStart {
        tile: narrow(unit.tile),
        chunk,
        begin,
        end,
        request: tile.request,
        q_begin: tile.q_begin,
        q_len: tile.q_len,
        q_pos: tile.q_pos,
        pages_begin: tile.pages_begin,
        num_chunks: tile.num_chunks,
        first_partial: tile.first_partial,
        num_pages: narrow(ids.len().min(START_PAGES)),
        pages,
        reserved: [0; 4],
    }
}

fn device_tile(tile: &Tile, batch: &Batch, first_partial: u64) -> AttnTile {
    let request = &batch.requests()[tile.request as usize];
    let mask_begin = request.mask_start + u64::from(tile.q_begin) * u64::from(request.kv_len);
    AttnTile {
        mask_begin: i64::try_from(mask_begin).expect("a mask is in memory"),
        request: narrow(tile.request),
        q_begin: narrow(request.q_start + tile.q_begin),
        q_len: narrow(tile.q_len),
        q_pos: i32::try_from(request.position(tile.q_begin)).expect("positions are below 2^31"),
        kv_begin: narrow(tile.kv_begin),
        kv_end: narrow(tile.kv_end),
        kv_len: narrow(request.kv_len),
        pages_begin: narrow(request.pages_start),
        chunk_len: i32::try_from(tile.chunk_len).unwrap_or(i32::MAX),
        num_chunks: narrow(tile.num_chunks),
        first_partial: if tile.is_split() { narrow(first_partial + tile.first_partial) } else { 0 },
        reserved: [0; 3],
    }
}

/// The heads of a merge unit, or, where there are many chunks, one head and the negative segment of its dims; `number` is
/// below [`merge_shares`].
fn merge_share(number: u32, is_many: bool, heads: &HeadShape) -> (i32, i32) {
    if is_many {
        let segments = heads.head_dim_vo.div_ceil(MERGE_SEGMENT);
        return (narrow(number / segments), -narrow(number % segments));
    }
    let begin = number * MERGE_HEADS;
    (narrow(begin), narrow(MERGE_HEADS.min(heads.num_qo_heads - begin)))
}

/// Writes as many merge units as [`num_merge_units`] counts.
fn write_merge_units(to: &mut [AttnMergeUnit], part: &Part, tile_base: usize) {
    let heads = &part.plan.group().heads;
    let mut to = to.iter_mut();
    for (index, tile) in part.plan.tiles().iter().enumerate().filter(|(_, tile)| tile.is_split()) {
        let first_row = part.batch.requests()[tile.request as usize].q_start + tile.q_begin;
        let (is_many, tile_index) = (merges_many(tile.num_chunks.into()), narrow(tile_base + index));
        for row in first_row..first_row + tile.q_len {
            let row = narrow(row);
            for (number, to) in (0..merge_shares(is_many, heads)).zip(&mut to) {
                let (head_begin, num_heads) = merge_share(number, is_many, heads);
                *to = AttnMergeUnit { row, tile: tile_index, head_begin, num_heads };
            }
        }
    }
}

/// Whether a block merges a segment of one head, in place of a warp a whole one.
const fn merges_many(num_chunks: u64) -> bool {
    num_chunks > MERGE_WARP_CHUNKS as u64
}

/// Merge units of a row.
const fn merge_shares(is_many: bool, heads: &HeadShape) -> u32 {
    if is_many {
        heads.num_qo_heads * heads.head_dim_vo.div_ceil(MERGE_SEGMENT)
    } else {
        heads.num_qo_heads.div_ceil(MERGE_HEADS)
    }
}

/// Merge units of a plan.
fn num_merge_units(plan: &Plan) -> usize {
    let heads = &plan.group().heads;
    let of_tile = |tile: &Tile| tile.q_len as usize * merge_shares(merges_many(tile.num_chunks.into()), heads) as usize;
    plan.tiles().iter().filter(|tile| tile.is_split()).map(of_tile).sum()
}

/// Merge units of `num_rows` rows at most, whatever the chunks.
pub(crate) fn merge_unit_bound(num_rows: u32, heads: &HeadShape, max_chunks: u64) -> usize {
    let shares = merge_shares(merges_many(max_chunks), heads).max(merge_shares(false, heads));
    if max_chunks > 1 { num_rows as usize * shares as usize } else { 0 }
}

/// `count` values of a section.
fn section<T: bytemuck::Pod>(bytes: &mut [u8], at: usize, count: usize) -> &mut [T] {
    bytemuck::cast_slice_mut(&mut bytes[at..at + count * size_of::<T>()])
}

/// Table entries are 32-bit: batches count rows, pages and tokens below 2³¹, plans were checked.
fn narrow<T: TryInto<i32>>(value: T) -> i32
where
    T::Error: std::fmt::Debug,
{
    value.try_into().expect("table entries fit 31 bits")
}

#[cfg(test)]
#[path = "tables_tests.rs"]
mod tests;

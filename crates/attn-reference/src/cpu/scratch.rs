//! Owns the memory of a worker: tiles, scores, outputs and row states, aligned to cache lines, grown only on demand.
//! Invariant: nothing in it survives from one unit to the next; every part is written before it is read.

use std::ops::Range;

use bytemuck::Zeroable;
use bytemuck::allocation::try_zeroed_vec;

use super::dots::STAGE_LEN;
use super::isa::Isa;
use super::pack::KV_TILE;
use super::qk::ScoreRow;
use super::unit::{MAX_SCORE_ROWS, UNIT_ROWS};

/// Floats of a cache line.
const LINE: usize = 16;

/// Floats that begin with a cache line and fill whole ones.
///
/// The alignment is made here, not asked of the allocator: for zeros of a larger alignment than its own it writes them
/// all, in place of taking pages that the system zeroes when they are first touched.
#[derive(Default)]
pub(crate) struct AlignedFloats {
    floats: Vec<f32>,
    begin: usize,
    len: usize,
}

impl AlignedFloats {
    /// At least `len` zeros or left-overs.
    ///
    /// # Panics
    /// Where there is no such memory.
    pub(crate) fn grow(&mut self, len: usize) {
        let is_made = self.len >= len || self.replace(len);
        assert!(is_made, "no memory for {len} floats");
    }

    /// Room for `len` floats; values are gone where it grows. False where there is no such memory: the room is as it was.
    pub(crate) fn make_room(&mut self, len: usize) -> bool {
        self.len >= len || with_spare(len).any(|len| self.replace(len))
    }

    /// False, with what there was, where there is no such memory: the live plan's is kept.
    fn replace(&mut self, len: usize) -> bool {
        let Some(len) = len.checked_next_multiple_of(LINE) else { return false };
        let Ok(floats) = try_zeroed_vec::<f32>(len.saturating_add(LINE - 1)) else { return false };
        let begin = floats.as_ptr().align_offset(LINE * size_of::<f32>());
        *self = Self { floats, begin, len };
        true
    }

    pub(crate) fn get(&self, len: usize) -> &[f32] {
        &self.floats[self.begin..self.begin + self.len][..len]
    }

    pub(crate) fn get_mut(&mut self, len: usize) -> &mut [f32] {
        &mut self.all_mut()[..len]
    }

    /// All of it.
    pub(crate) fn all_mut(&mut self) -> &mut [f32] {
        &mut self.floats[self.begin..self.begin + self.len]
    }
}

/// Widths of a head and their paddings, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dims {
    pub(crate) qk: usize,
    /// `qk` rounded up to vectors.
    pub(crate) qk_padded: usize,
    pub(crate) vo: usize,
    /// `vo` rounded up to panels.
    pub(crate) vo_padded: usize,
    /// From a row to the next in a tile of keys that hold their values: whole panels, an odd number of them. With an even
    /// one the panels of all keys would fall into few sets of the first-level cache.
    pub(crate) row_stride: usize,
}

impl Dims {
    pub(crate) fn new(isa: Isa, qk: usize, vo: usize) -> Dims {
        let panel = isa.panel();
        let row_stride = (qk.max(vo).div_ceil(panel) | 1) * panel;
        Dims { qk, qk_padded: qk.next_multiple_of(panel / 2), vo, vo_padded: vo.next_multiple_of(panel), row_stride }
    }
}

/// Lengths to try in turn for a buffer that is too short: half as long again, so that a batch that needs a little more in
/// each step allocates rarely, then what is needed.
fn with_spare(len: usize) -> impl Iterator<Item = usize> {
    [len.saturating_add(len / 2), len].into_iter()
}

/// Replaces a vector that is too short by one of zeros, and leaves it where there is no such memory. The system zeroes a
/// page when it is first touched, not here.
fn make_room<T: Zeroable>(buffer: &mut Vec<T>, len: usize) -> bool {
    if buffer.len() >= len {
        return true;
    }
    let made = with_spare(len).find_map(|len| try_zeroed_vec(len).ok());
    made.map(|made| *buffer = made).is_some()
}

/// Running maximum, sum and output of the rows of a unit: the part of the softmax over the keys seen so far.
#[derive(Default)]
pub(crate) struct RowStates {
    pub(crate) max: Vec<f32>,
    pub(crate) sum: Vec<f32>,
    /// `[rows, vo_padded]`, relative to the maximum.
    pub(crate) out: AlignedFloats,
}

impl RowStates {
    /// Makes room.
    pub(crate) fn grow(&mut self, rows: usize, width: usize) {
        if self.max.len() < rows {
            self.max.resize(rows, 0.0);
            self.sum.resize(rows, 0.0);
        }
        self.out.grow(rows * width);
    }

    /// Makes room for a plan's partial states, whose number only its batch bounds; values are gone where it grows. False
    /// where there is no such memory: there is room for as many rows as before.
    pub(crate) fn make_room(&mut self, rows: usize, width: usize) -> bool {
        make_room(&mut self.max, rows)
            && make_room(&mut self.sum, rows)
            && self.out.make_room(rows.saturating_mul(width))
    }

    /// Bytes that so many rows take.
    pub(crate) const fn bytes(rows: u64, width: usize) -> u64 {
        rows.saturating_mul((size_of::<f32>() * (width + 2)) as u64)
    }

    /// Copies the rows `rows` of `from` to the rows from `begin` on.
    pub(crate) fn store(&mut self, begin: usize, from: &RowStates, rows: Range<usize>, width: usize) {
        self.max[begin..begin + rows.len()].copy_from_slice(&from.max[rows.clone()]);
        self.sum[begin..begin + rows.len()].copy_from_slice(&from.sum[rows.clone()]);
        let out = &mut self.out.all_mut()[begin * width..(begin + rows.len()) * width];
        out.copy_from_slice(&from.out.get(rows.end * width)[rows.start * width..]);
    }

    /// Rows that have seen nothing.
    pub(crate) fn clear(&mut self, rows: usize, width: usize) {
        self.max[..rows].fill(f32::NEG_INFINITY);
        self.sum[..rows].fill(0.0);
        self.out.get_mut(rows * width).fill(0.0);
    }
}

/// The memory of one worker.
pub(crate) struct Scratch {
    /// Query blocks.
    pub(crate) queries: AlignedFloats,
    pub(crate) keys: AlignedFloats,
    pub(crate) values: AlignedFloats,
    /// Vectors on their way to a transposition.
    pub(crate) stage: AlignedFloats,
    scores: AlignedFloats,
    /// States over the chunk at hand.
    pub(crate) chunk: RowStates,
    /// States over the chunks before it.
    pub(crate) total: RowStates,
}

impl Scratch {
    pub(crate) fn new() -> Scratch {
        Scratch {
            queries: AlignedFloats::default(),
            keys: AlignedFloats::default(),
            values: AlignedFloats::default(),
            stage: AlignedFloats::default(),
            scores: AlignedFloats::default(),
            chunk: RowStates::default(),
            total: RowStates::default(),
        }
    }

    /// Makes room for units of any number of rows with these widths.
    pub(crate) fn grow(&mut self, isa: Isa, dims: Dims) {
        self.queries.grow(UNIT_ROWS * dims.qk_padded);
        self.keys.grow(KV_TILE * dims.qk_padded);
        // Values in keys: a row holds both.
        self.values.grow(KV_TILE * dims.row_stride);
        self.stage.grow((dims.qk_padded * isa.panel() / 2).max(STAGE_LEN));
        self.scores.grow(MAX_SCORE_ROWS * KV_TILE);
        self.chunk.grow(UNIT_ROWS, dims.vo_padded);
        self.total.grow(UNIT_ROWS, dims.vo_padded);
    }

    /// The parts that the tiles of a unit need at once.
    pub(crate) fn tile_parts(&mut self) -> TileParts<'_> {
        let scores: &mut [ScoreRow] = bytemuck::cast_slice_mut(self.scores.all_mut());
        TileParts {
            queries: self.queries.all_mut(),
            keys: self.keys.all_mut(),
            values: self.values.all_mut(),
            stage: self.stage.all_mut(),
            scores: &mut scores[..MAX_SCORE_ROWS],
            chunk: &mut self.chunk,
        }
    }
}

/// Borrowed parts of a [`Scratch`].
pub(crate) struct TileParts<'a> {
    pub(crate) queries: &'a mut [f32],
    pub(crate) keys: &'a mut [f32],
    pub(crate) values: &'a mut [f32],
    pub(crate) stage: &'a mut [f32],
    pub(crate) scores: &'a mut [ScoreRow],
    pub(crate) chunk: &'a mut RowStates,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_that_grows_step_by_step_is_made_a_few_times() {
        let mut states = RowStates::default();
        let (mut num_made, mut len) = (0, 0);
        for rows in 1..=10_000 {
            assert!(states.make_room(rows, 16));
            assert!(
                states.max.len() >= rows && states.sum.len() >= rows && states.out.get(rows * 16).len() == rows * 16
            );
            num_made += usize::from(states.max.len() != len);
            len = states.max.len();
        }
        assert!(num_made < 30, "made {num_made} times");
    }

    /// Bytes of the process that are in memory; 0 where the system does not say.
    fn resident_bytes() -> usize {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        line.and_then(|line| line.split_whitespace().next()?.parse::<usize>().ok()).unwrap_or(0) << 10
    }

    #[test]
    fn room_takes_no_memory_before_it_is_used() {
        let before = resident_bytes();
        let mut states = RowStates::default();
        assert!(states.make_room(1 << 20, 256), "1.5 GiB of addresses");
        let taken = resident_bytes().saturating_sub(before);
        assert!(taken < 1 << 29, "{taken} bytes are in memory before anything was written");
        assert!(states.out.get(1 << 28).iter().step_by(1 << 20).all(|&x| x == 0.0));
    }

    #[test]
    fn floats_begin_with_a_cache_line_and_fill_whole_ones() {
        for len in [1, 16, 17, 1000, 1 << 20] {
            let mut floats = AlignedFloats::default();
            floats.grow(len);
            assert_eq!(floats.all_mut().as_ptr().align_offset(64), 0);
            assert_eq!(floats.all_mut().len(), len.next_multiple_of(LINE));
            assert_eq!(floats.get(len).len(), len);
        }
    }

    #[test]
    fn room_beyond_memory_is_refused() {
        assert!(!RowStates::default().make_room(usize::MAX, 16));
        assert!(!RowStates::default().make_room(1 << 44, 1 << 10));
        let mut states = RowStates::default();
        assert!(states.make_room(100, 16) && !states.make_room(1 << 44, 1 << 10));
        assert_eq!((states.max.len().min(states.sum.len()) >= 100, states.out.get(1600).len()), (true, 1600), "kept");
    }
}

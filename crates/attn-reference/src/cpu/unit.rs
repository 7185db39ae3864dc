//! Owns the work on one unit: some query tokens of a request, the query heads of one KV head, a range of its keys.
//!
//! The loop: for each chunk of keys, for each tile of it, pack K and V once, then for a few rows at a time: scores,
//! mask, softmax, output, so that the scores stay in the first-level cache.
//!
//! Invariant (numerics): tiles begin at multiples of [`KV_TILE`] and chunks at multiples of [`CHUNK_LEN`], counted
//! from the request's first key; a row's state is built tile by tile within a chunk and merged chunk by chunk in
//! ascending order. All of it depends on the row's own query and keys only: not on the other rows of the unit, on how
//! units were cut or on the thread. So a token's result has the same bits whether it was prefilled, chunked or decoded.

use std::ops::Range;

use super::isa::Isa;
use super::mask::Visibility;
use super::merge::MergeStates;
use super::pack::{KV_TILE, PackKeys, PackValues, PagedRows, block_rows};
use super::pv::{Accumulate, Rescale};
use super::qk::{ScoreRow, Scores};
use super::scratch::{Dims, Scratch, TileParts};
use super::softmax::{OnlineSoftmax, Softcap};

/// Keys in a chunk: states over chunks merge in ascending order. A multiple of [`KV_TILE`].
pub(crate) const CHUNK_LEN: usize = 1024;

/// Rows whose scores are in the first-level cache at once; a multiple of every register block.
pub(crate) const SUPER_ROWS: usize = 24;

/// Most rows of a unit.
pub(crate) const UNIT_ROWS: usize = 504;

/// One unit of work. Row `i` is query token `tokens.start + i / heads` and the `i % heads`-th query head.
#[derive(Clone)]
pub(crate) struct UnitWork<'a> {
    pub(crate) isa: Isa,
    pub(crate) dims: Dims,
    pub(crate) keys: PagedRows<'a>,
    pub(crate) values: PagedRows<'a>,
    pub(crate) visibility: Visibility<'a>,
    pub(crate) softcap: Option<f32>,
    /// Slope of each query head of the unit.
    pub(crate) slopes: Option<&'a [f32]>,
    /// Query tokens, counted in the request.
    pub(crate) tokens: Range<usize>,
    /// Query heads; `tokens * heads <= UNIT_ROWS`.
    pub(crate) heads: usize,
    /// KV positions to attend to; others are left to other units.
    pub(crate) range: Range<usize>,
}

impl UnitWork<'_> {
    pub(crate) fn num_rows(&self) -> usize {
        self.tokens.len() * self.heads
    }

    /// Leaves the states of the rows over `range` in `scratch.total`. The query blocks are in place.
    pub(crate) fn run(&self, scratch: &mut Scratch) {
        let (rows, width) = (self.num_rows(), self.dims.vo_padded);
        let union = self.visibility.union(self.tokens.clone());
        let keys = union.start.max(self.range.start)..union.end.min(self.range.end);
        let mut is_first = true;
        let mut start = keys.start;
        while start < keys.end {
            let end = (start / CHUNK_LEN + 1).saturating_mul(CHUNK_LEN).min(keys.end);
            scratch.chunk.clear(rows, width);
            self.run_chunk(start..end, keys.end, &mut scratch.tile_parts());
            if is_first {
                std::mem::swap(&mut scratch.chunk, &mut scratch.total);
            } else {
                self.isa.run(MergeStates::new(&mut scratch.total, &scratch.chunk, 0, rows, width));
            }
            is_first = false;
            start = end;
        }
        if is_first {
            scratch.total.clear(rows, width);
        }
    }

    /// Attends to the keys of one chunk; `last` is one past the last key that the unit will read.
    fn run_chunk(&self, keys: Range<usize>, last: usize, parts: &mut TileParts<'_>) {
        let mut start = keys.start / KV_TILE * KV_TILE;
        while start < keys.end {
            // Whole tiles, whatever the union of the rows begins or ends with: only valid keys count.
            let len = KV_TILE.min(self.visibility.kv_len - start);
            let next = start + KV_TILE;
            let ahead = (next, KV_TILE.min(last.saturating_sub(next)));
            self.pack(start, len, ahead, parts);
            let mut row = 0;
            while row < self.num_rows() {
                let rows = SUPER_ROWS.min(self.num_rows() - row);
                self.run_rows(start, len, row..row + rows, parts);
                row += rows;
            }
            start = next;
        }
    }

    fn pack(&self, start: usize, len: usize, ahead: (usize, usize), parts: &mut TileParts<'_>) {
        let Dims { qk_padded, .. } = self.dims;
        let stage = &mut parts.stage[..qk_padded * self.isa.panel() / 2];
        let tile = &mut *parts.keys;
        self.isa.run(PackKeys { rows: self.keys, start, len, ahead, stage, tile });
        let tile = &mut *parts.values;
        self.isa.run(PackValues { rows: self.values, start, len, ahead, tile });
    }

    /// One tile for a few rows.
    fn run_rows(&self, start: usize, len: usize, rows: Range<usize>, parts: &mut TileParts<'_>) {
        let tokens = self.token_of(rows.start)..self.token_of(rows.end - 1) + 1;
        let first = self.visibility.columns(tokens.start, start, len);
        let last = self.visibility.columns(tokens.end - 1, start, len);
        // Both ends of a row's columns ascend with the token.
        let union = first.start..last.end;
        if union.is_empty() {
            return;
        }
        let common = last.start..first.end;
        let scores = &mut parts.scores[..rows.len()];
        let panel = self.isa.panel();
        let panels = union.start / panel..union.end.div_ceil(panel);
        let columns = panels.start * panel..panels.end * panel;
        self.isa.run(Scores {
            isa: self.isa,
            queries: &parts.queries[self.block_start(rows.start)..],
            keys: parts.keys,
            dim: self.dims.qk,
            dim_padded: self.dims.qk_padded,
            panels,
            scores,
        });
        if let Some(cap) = self.softcap {
            self.isa.run(Softcap { scores, columns: columns.clone(), cap });
        }
        if let Some(slopes) = self.slopes {
            self.add_alibi(slopes, start, rows.clone(), columns.clone(), scores);
        }
        let is_whole = common == columns && self.visibility.custom.is_none();
        if !is_whole {
            for (row, scores) in rows.clone().zip(scores.iter_mut()) {
                self.visibility.mask_row(self.token_of(row), start, scores);
            }
        }
        let mut factors = [0.0; SUPER_ROWS];
        let factors = &mut factors[..rows.len()];
        let (max, sum) = (&mut parts.chunk.max[rows.clone()], &mut parts.chunk.sum[rows.clone()]);
        let any = self.isa.run(OnlineSoftmax { scores, columns, max, sum, factors });
        let width = self.dims.vo_padded;
        let out = &mut parts.chunk.out.all_mut()[rows.start * width..rows.end * width];
        if any {
            self.isa.run(Rescale { factors, out });
        }
        let values = &*parts.values;
        if is_whole {
            self.isa.run(Accumulate { isa: self.isa, probs: scores, values, columns: common, out });
        } else {
            self.accumulate_masked(start, len, rows, scores, values, out);
        }
    }

    /// `O += P V` over just the columns that each row sees: those that all rows see together, the others token by
    /// token; in ascending order for every row.
    fn accumulate_masked(
        &self,
        start: usize,
        len: usize,
        rows: Range<usize>,
        probs: &[ScoreRow],
        values: &[f32],
        out: &mut [f32],
    ) {
        let width = self.dims.vo_padded;
        let (first, last) = (self.token_of(rows.start), self.token_of(rows.end - 1));
        let (low, high) = (self.visibility.columns(last, start, len).start, self.visibility.columns(first, start, len).end);
        let common = if self.visibility.custom.is_some() || low >= high { len..len } else { low..high };
        let rows_of = |token: usize| {
            let begin = (token - self.tokens.start) * self.heads;
            begin.max(rows.start) - rows.start..(begin + self.heads).min(rows.end) - rows.start
        };
        let mut add = |local: Range<usize>, columns: Range<usize>| {
            let out = &mut out[local.start * width..local.end * width];
            self.isa.run(Accumulate { isa: self.isa, probs: &probs[local], values, columns, out });
        };
        for token in first..=last {
            let columns = self.visibility.columns(token, start, len);
            let mut from = columns.start;
            let end = columns.end.min(common.start);
            while let Some(run) = self.visibility.next_run(token, start, from, end) {
                from = run.end;
                add(rows_of(token), run);
            }
        }
        if !common.is_empty() {
            add(0..rows.len(), common.clone());
            for token in first..=last {
                let columns = self.visibility.columns(token, start, len);
                if columns.end > common.end {
                    add(rows_of(token), common.end..columns.end);
                }
            }
        }
    }

    /// Adds `slope * (key position - query position)`.
    fn add_alibi(
        &self,
        slopes: &[f32],
        start: usize,
        rows: Range<usize>,
        columns: Range<usize>,
        scores: &mut [ScoreRow],
    ) {
        for (row, scores) in rows.zip(scores) {
            let (token, head) = (self.token_of(row), (row % self.heads));
            let slope = slopes[head];
            let position = self.visibility.position(token);
            for column in columns.clone() {
                #[expect(clippy::cast_precision_loss, clippy::cast_possible_wrap, reason = "distances are below 2^24")]
                let distance = ((start + column) as i64 - position) as f32;
                scores[column] = slope.mul_add(distance, scores[column]);
            }
        }
    }

    fn token_of(&self, row: usize) -> usize {
        self.tokens.start + row / self.heads
    }

    /// Index in the query blocks of the block that begins with `row`, a multiple of [`SUPER_ROWS`].
    fn block_start(&self, row: usize) -> usize {
        row / self.isa.max_rows() * self.dims.qk_padded * self.isa.panel() / 2
    }
}

/// The register blocks of a unit's rows, in order: first row and number of rows.
pub(crate) fn blocks(isa: Isa, rows: usize) -> impl Iterator<Item = Range<usize>> {
    let mut start = 0;
    std::iter::from_fn(move || {
        let in_super = (SUPER_ROWS - start % SUPER_ROWS).min(rows.checked_sub(start)?);
        if in_super == 0 {
            return None;
        }
        let block = start..start + block_rows(isa, in_super);
        start = block.end;
        Some(block)
    })
}

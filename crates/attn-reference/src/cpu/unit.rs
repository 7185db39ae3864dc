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

use super::ahead::Ahead;
use super::dots::{DotScores, KEY_BLOCK, STAGE_LEN};
use super::isa::Isa;
use super::mask::Visibility;
use super::merge::MergeStates;
use super::pack::{KV_TILE, PackKeys, PackRows, PackValues, PagedRows, Prefetch, Run, block_rows};
use super::pv::{Accumulate, Rescale, Strides, Values};
use super::qk::{ScoreRow, Scores};
use super::scratch::{Dims, Scratch, TileParts};
use super::softmax::{Alibi, OnlineSoftmax, Softcap};

/// Keys in a chunk: states over chunks merge in ascending order. A multiple of [`KV_TILE`].
pub(crate) const CHUNK_LEN: usize = 1024;

/// Rows whose scores are in the first-level cache at once; a multiple of every register block.
pub(crate) const SUPER_ROWS: usize = 12;

/// Rows up to which a unit streams its keys instead of packing a whole tile.
pub(crate) const STREAM_ROWS: usize = 32;

/// Rows whose scores are held at once where one tile of rows serves both products.
const SHARED_ROWS: usize = 32;

/// Values packed at a time while streaming.
pub(crate) const STREAM_KEYS: usize = 32;

/// Most rows whose scores are held at once.
pub(crate) const MAX_SCORE_ROWS: usize = 32;
const _: () = assert!(SUPER_ROWS <= MAX_SCORE_ROWS && STREAM_ROWS <= MAX_SCORE_ROWS && SHARED_ROWS <= MAX_SCORE_ROWS);

/// Most rows of a unit.
pub(crate) const UNIT_ROWS: usize = 504;

/// One unit of work. Its rows: KV head by KV head, in a head token by token, for a token the query heads.
#[derive(Clone)]
pub(crate) struct UnitWork<'a> {
    pub(crate) isa: Isa,
    pub(crate) dims: Dims,
    /// The keys of the first KV head.
    pub(crate) keys: PagedRows<'a>,
    /// The values of the first KV head.
    pub(crate) values: PagedRows<'a>,
    pub(crate) visibility: Visibility<'a>,
    pub(crate) softcap: Option<f32>,
    /// Slope of each query head of the unit.
    pub(crate) slopes: Option<&'a [f32]>,
    /// Query tokens, counted in the request.
    pub(crate) tokens: Range<usize>,
    /// Consecutive KV heads.
    pub(crate) num_kv_heads: usize,
    /// Query heads of each KV head.
    pub(crate) heads: usize,
    /// KV positions to attend to; others are left to other units.
    pub(crate) range: Range<usize>,
    /// Whether the values are the first columns of the keys, and one tile of rows serves both products.
    pub(crate) shares_rows: bool,
    /// Keys that the worker packs after the unit, where that is known.
    pub(crate) then: Option<Run<'a>>,
}

/// Keys that are packed together: a tile of one KV head.
#[derive(Clone, Copy)]
struct Step {
    start: usize,
    kv_head: usize,
}

/// What some rows see of a tile, in columns.
struct Seen {
    /// Whole panels around all that any row sees.
    columns: Range<usize>,
    /// What every row sees; empty, at the end, where there is a custom mask.
    common: Range<usize>,
    /// Whether every row sees all of `columns`.
    is_whole: bool,
}

/// Columns whose values are packed.
struct Columns<'a> {
    packed: Range<usize>,
    strides: Strides,
    /// Asked for by the columns that all rows see.
    ahead: Option<&'a Ahead<'a>>,
}

/// Rows of output to add to.
struct Sum<'a> {
    isa: Isa,
    width: usize,
    probs: &'a [ScoreRow],
    values: Values<'a>,
    out: &'a mut [f32],
    ahead: Option<&'a Ahead<'a>>,
}

impl Sum<'_> {
    fn add(&mut self, rows: Range<usize>, columns: Range<usize>) {
        if columns.is_empty() {
            return;
        }
        let out = &mut self.out[rows.start * self.width..rows.end * self.width];
        self.isa.run(Accumulate {
            isa: self.isa,
            probs: &self.probs[rows],
            values: self.values,
            columns,
            out,
            ahead: self.ahead,
        });
    }
}

impl<'a> UnitWork<'a> {
    pub(crate) fn num_rows(&self) -> usize {
        self.num_kv_heads * self.rows_per_head()
    }

    /// Rows of one KV head.
    pub(crate) fn rows_per_head(&self) -> usize {
        self.tokens.len() * self.heads
    }

    /// Leaves the states of the rows over `range` in `scratch.total`. The query blocks are in place.
    pub(crate) fn run(&self, scratch: &mut Scratch) {
        let (rows, width) = (self.num_rows(), self.dims.vo_padded);
        let keys = self.all_keys();
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

    /// The keys that any row sees.
    fn all_keys(&self) -> Range<usize> {
        let union = self.visibility.union(self.tokens.clone());
        union.start.max(self.range.start)..union.end.min(self.range.end)
    }

    /// The first keys that are packed.
    pub(crate) fn first_run(&self) -> Option<Run<'a>> {
        let keys = self.all_keys();
        (!keys.is_empty()).then(|| self.runs(Step { start: keys.start / KV_TILE * KV_TILE, kv_head: 0 })[0])
    }

    /// Attends to the keys of one chunk; `last` is one past the last key that the unit will read.
    fn run_chunk(&self, keys: Range<usize>, last: usize, parts: &mut TileParts<'_>) {
        let mut start = keys.start / KV_TILE * KV_TILE;
        while start < keys.end {
            if self.shares_rows {
                for kv_head in 0..self.num_kv_heads {
                    self.run_shared(Step { start, kv_head }, last, parts);
                }
            } else if self.num_rows() <= STREAM_ROWS {
                self.stream(start, parts);
            } else {
                for kv_head in 0..self.num_kv_heads {
                    self.run_step(Step { start, kv_head }, last, parts);
                }
            }
            start += KV_TILE;
        }
    }

    /// One tile of one KV head: packs it, attends, and asks for the next one on the way.
    fn run_step(&self, step: Step, last: usize, parts: &mut TileParts<'_>) {
        let rows = self.rows_per_head();
        let runs = self.runs(step);
        let ahead = self.runs(Step { start: (step.start + KV_TILE).min(last), ..step });
        self.pack_keys(runs[0], runs[0].part(0..0), parts);
        self.pack_values(runs[1], runs[1].part(0..0), KV_TILE, parts);
        let num_supers = rows.div_ceil(SUPER_ROWS);
        for i in 0..num_supers {
            let local = i * SUPER_ROWS..((i + 1) * SUPER_ROWS).min(rows);
            self.run_rows(step, runs[0].len, local, parts);
            for run in ahead {
                let part = run.len * i / num_supers..run.len * (i + 1) / num_supers;
                self.isa.run(Prefetch(run.part(part)));
            }
        }
    }

    /// One tile of one KV head whose values are in its keys: packs it once for both products, some keys at a time, used
    /// while they are in the first-level cache; and asks for the next tile from within the products.
    fn run_shared(&self, step: Step, last: usize, parts: &mut TileParts<'_>) {
        let rows = self.rows_per_head();
        let [run, _] = self.runs(step);
        let next = Step { start: (step.start + KV_TILE).min(last), ..step };
        let next = if next.start < last { self.runs(next)[0] } else { self.then.unwrap_or(run.part(0..0)) };
        let ahead = Ahead::new(next, self.shared_fmas(run.len));
        let mut num_packed = 0;
        for first in (0..rows).step_by(SHARED_ROWS) {
            let local = first..rows.min(first + SHARED_ROWS);
            let Some(seen) = self.seen(step.start, run.len, local.clone()) else { continue };
            let columns = seen.columns.start..seen.columns.end.min(run.len);
            for key in columns.clone().step_by(KEY_BLOCK) {
                let keys = key..columns.end.min(key + KEY_BLOCK);
                if num_packed < keys.end {
                    self.pack_rows(run, num_packed..keys.end, parts);
                    num_packed = keys.end;
                }
                self.dot_scores(step, local.clone(), keys, &ahead, parts);
            }
            self.softmax(step, local.clone(), &seen, parts);
            let strides = Strides::of_rows(self.isa, self.dims.row_stride);
            let columns = Columns { packed: 0..columns.end, strides, ahead: Some(&ahead) };
            self.accumulate(step, local, &seen, columns, parts);
        }
    }

    /// Multiply-adds of vectors in a tile of this many keys that hold their values.
    fn shared_fmas(&self, num_keys: usize) -> usize {
        self.rows_per_head() * num_keys * (self.dims.qk_padded + self.dims.vo_padded) / (self.isa.panel() / 2)
    }

    fn pack_rows(&self, run: Run<'a>, keys: Range<usize>, parts: &mut TileParts<'_>) {
        let stride = self.dims.row_stride;
        let rows = &mut parts.values[keys.start * stride..keys.end * stride];
        self.isa.run(PackRows { run: run.part(keys), stride, rows });
    }

    fn dot_scores(
        &self,
        step: Step,
        local: Range<usize>,
        keys: Range<usize>,
        ahead: &Ahead<'_>,
        parts: &mut TileParts<'_>,
    ) {
        self.isa.run(DotScores {
            queries: &parts.queries[self.block_start(step.kv_head, local.start)..],
            dim_padded: self.dims.qk_padded,
            tile: &*parts.values,
            stride: self.dims.row_stride,
            keys,
            ahead,
            stage: &mut parts.stage[..STAGE_LEN],
            scores: &mut parts.scores[..local.len()],
        });
    }

    /// One tile of all KV heads for few rows, bound by the reading of keys and values: packs a panel at a time, used
    /// while it is in the first-level cache.
    ///
    /// KV heads take turns panel by panel: in most layouts the heads of a token are neighbours, so memory is read in
    /// long runs.
    fn stream(&self, start: usize, parts: &mut TileParts<'_>) {
        let local = 0..self.rows_per_head();
        let len = KV_TILE.min(self.visibility.kv_len - start);
        let Some(seen) = self.seen(start, len, local.clone()) else { return };
        let steps = (0..self.num_kv_heads).map(|kv_head| Step { start, kv_head });
        let panel = self.isa.panel();
        for first in seen.columns.clone().step_by(panel) {
            for step in steps.clone() {
                let next =
                    if step.kv_head + 1 < self.num_kv_heads { (first, step.kv_head + 1) } else { (first + panel, 0) };
                let ahead = self.runs(Step { start, kv_head: next.1 })[0].part(next.0..next.0 + panel);
                self.pack_keys(self.runs(step)[0].part(first..first + panel), ahead, parts);
                self.scores(step, local.clone(), first..first + panel, first, parts);
            }
        }
        for step in steps.clone() {
            self.softmax(step, local.clone(), &seen, parts);
        }
        let columns = seen.columns.start..seen.columns.end.min(len);
        for first in columns.clone().step_by(STREAM_KEYS) {
            let packed = first..(first + STREAM_KEYS).min(columns.end);
            for step in steps.clone() {
                let next = if step.kv_head + 1 < self.num_kv_heads {
                    (first, step.kv_head + 1)
                } else {
                    (first + STREAM_KEYS, 0)
                };
                let ahead = self.runs(Step { start, kv_head: next.1 })[1].part(next.0..next.0 + STREAM_KEYS);
                self.pack_values(self.runs(step)[1].part(packed.clone()), ahead, STREAM_KEYS, parts);
                let strides = Strides::of_panels(STREAM_KEYS);
                let columns = Columns { packed: packed.clone(), strides, ahead: None };
                self.accumulate(step, local.clone(), &seen, columns, parts);
            }
        }
    }

    /// The keys and values of a step. Whole tiles, wherever the rows' ranges begin or end: only valid keys count.
    fn runs(&self, step: Step) -> [Run<'a>; 2] {
        let kv_head = u32::try_from(step.kv_head).expect("a head of the unit");
        let len = KV_TILE.min(self.visibility.kv_len - step.start);
        [self.keys, self.values].map(|rows| {
            let rows = PagedRows { head: rows.head + kv_head, ..rows };
            Run { rows, start: step.start, len }
        })
    }

    fn pack_keys(&self, run: Run<'a>, ahead: Run<'a>, parts: &mut TileParts<'_>) {
        let stage = &mut parts.stage[..self.dims.qk_padded * self.isa.panel() / 2];
        self.isa.run(PackKeys { run, ahead, stage, tile: &mut *parts.keys });
    }

    fn pack_values(&self, run: Run<'a>, ahead: Run<'a>, room: usize, parts: &mut TileParts<'_>) {
        self.isa.run(PackValues { run, ahead, room, tile: &mut *parts.values });
    }

    /// One packed step for a few of the rows of its KV head.
    fn run_rows(&self, step: Step, len: usize, local: Range<usize>, parts: &mut TileParts<'_>) {
        let Some(seen) = self.seen(step.start, len, local.clone()) else { return };
        self.scores(step, local.clone(), seen.columns.clone(), 0, parts);
        self.softmax(step, local.clone(), &seen, parts);
        let columns = Columns { packed: 0..len, strides: Strides::of_panels(KV_TILE), ahead: None };
        self.accumulate(step, local, &seen, columns, parts);
    }

    /// What some rows see of a tile; `None` where they see nothing.
    fn seen(&self, start: usize, len: usize, local: Range<usize>) -> Option<Seen> {
        let (first, last) = (self.token_of(local.start), self.token_of(local.end - 1));
        let low = self.visibility.columns(first, start, len);
        let high = self.visibility.columns(last, start, len);
        // Both ends of a token's columns ascend with the token.
        let (union, common) = (low.start..high.end, high.start..low.end);
        if union.is_empty() {
            return None;
        }
        let panel = self.isa.panel();
        let columns = union.start / panel * panel..union.end.next_multiple_of(panel);
        let is_whole = common == columns && self.visibility.custom.is_none();
        let has_common = self.visibility.custom.is_none() && !common.is_empty();
        let common = if has_common { common } else { columns.end..columns.end };
        Some(Seen { columns, common, is_whole })
    }

    /// Scores of some rows in whole panels of columns; the packed keys begin with column `packed`.
    fn scores(&self, step: Step, local: Range<usize>, columns: Range<usize>, packed: usize, parts: &mut TileParts<'_>) {
        let panel = self.isa.panel();
        let rows = self.score_rows(step, &local);
        self.isa.run(Scores {
            isa: self.isa,
            queries: &parts.queries[self.block_start(step.kv_head, local.start)..],
            keys: &parts.keys[(columns.start - packed) * self.dims.qk_padded..],
            dim: self.dims.qk,
            dim_padded: self.dims.qk_padded,
            panels: columns.start / panel..columns.end / panel,
            scores: &mut parts.scores[rows],
        });
    }

    /// Where the scores of some rows are: streams hold those of all rows, packed steps those of a few.
    fn score_rows(&self, step: Step, local: &Range<usize>) -> Range<usize> {
        let is_stream = !self.shares_rows && self.num_rows() <= STREAM_ROWS;
        if is_stream { self.rows_of(step, local) } else { 0..local.len() }
    }

    /// Scores to weights; the states and outputs follow the new maxima.
    fn softmax(&self, step: Step, local: Range<usize>, seen: &Seen, parts: &mut TileParts<'_>) {
        let scores = &mut parts.scores[self.score_rows(step, &local)];
        self.adjust(step, local.clone(), seen.columns.clone(), !seen.is_whole, scores);
        let rows = self.rows_of(step, &local);
        let mut factors = [0.0; MAX_SCORE_ROWS];
        let factors = &mut factors[..rows.len()];
        let (max, sum) = (&mut parts.chunk.max[rows.clone()], &mut parts.chunk.sum[rows.clone()]);
        let any = self.isa.run(OnlineSoftmax { scores, columns: seen.columns.clone(), max, sum, factors });
        if any {
            let width = self.dims.vo_padded;
            let out = &mut parts.chunk.out.all_mut()[rows.start * width..rows.end * width];
            self.isa.run(Rescale { factors, out });
        }
    }

    /// `O += P V` over just the packed columns that each row sees: those that all rows see together, the others token
    /// by token; in ascending order for every row.
    fn accumulate(
        &self,
        step: Step,
        local: Range<usize>,
        seen: &Seen,
        columns: Columns<'_>,
        parts: &mut TileParts<'_>,
    ) {
        let (rows, width) = (self.rows_of(step, &local), self.dims.vo_padded);
        let mut sum = Sum {
            isa: self.isa,
            width,
            probs: &parts.scores[self.score_rows(step, &local)],
            values: Values { tile: parts.values, strides: columns.strides, first: columns.packed.start },
            out: &mut parts.chunk.out.all_mut()[rows.start * width..rows.end * width],
            ahead: columns.ahead,
        };
        let packed = columns.packed;
        let clip = |x: usize| x.clamp(packed.start, packed.end);
        let common = clip(seen.common.start)..clip(seen.common.end);
        if seen.is_whole {
            return sum.add(0..local.len(), common);
        }
        let (first, last) = (self.token_of(local.start), self.token_of(local.end - 1));
        let rows_of_token = |token: usize| {
            let begin = (token - self.tokens.start) * self.heads;
            begin.max(local.start) - local.start..(begin + self.heads).min(local.end) - local.start
        };
        let seen_by = |token: usize| {
            let columns = self.visibility.columns(token, step.start, packed.end);
            clip(columns.start)..clip(columns.end)
        };
        for token in first..=last {
            let mut left = seen_by(token);
            left.end = left.end.min(common.start.max(packed.start));
            while let Some(run) = self.visibility.next_run(token, step.start, left.clone()) {
                left.start = run.end;
                sum.add(rows_of_token(token), run);
            }
        }
        sum.add(0..local.len(), common.clone());
        for token in first..=last {
            let columns = seen_by(token);
            sum.add(rows_of_token(token), columns.start.max(common.end)..columns.end);
        }
    }

    /// The rows of the unit that are some rows of a KV head.
    fn rows_of(&self, step: Step, local: &Range<usize>) -> Range<usize> {
        let offset = step.kv_head * self.rows_per_head();
        offset + local.start..offset + local.end
    }

    /// What comes between q·k and the softmax: softcap, `ALiBi`, masks.
    fn adjust(&self, step: Step, local: Range<usize>, columns: Range<usize>, mask: bool, scores: &mut [ScoreRow]) {
        if let Some(cap) = self.softcap {
            self.isa.run(Softcap { scores, columns: columns.clone(), cap });
        }
        if let Some(slopes) = self.slopes {
            self.add_alibi(&slopes[step.kv_head * self.heads..], step.start, local.clone(), columns, scores);
        }
        if mask {
            for (row, scores) in local.zip(scores) {
                self.visibility.mask_row(self.token_of(row), step.start, scores);
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
            let slope = slopes[row % self.heads];
            let position = self.visibility.position(self.token_of(row));
            #[expect(clippy::cast_precision_loss, clippy::cast_possible_wrap, reason = "distances are below 2^24")]
            let distance = (start as i64 - position) as f32;
            self.isa.run(Alibi { slope, distance, columns: columns.clone(), scores });
        }
    }

    /// The query token of a row, counted in its KV head.
    fn token_of(&self, local: usize) -> usize {
        self.tokens.start + local / self.heads
    }

    /// Where the query blocks from a row on begin; the row is a multiple of [`SUPER_ROWS`] in its KV head, or any where
    /// rows are shared.
    pub(crate) fn block_start(&self, kv_head: usize, local: usize) -> usize {
        (kv_head * self.rows_per_head() + local) * self.dims.qk_padded
    }
}

/// The register blocks of the rows of a KV head, in order.
///
/// [`SUPER_ROWS`] is a multiple of the largest one, so a part of the rows that begins there has the same blocks.
pub(crate) fn blocks(isa: Isa, rows: usize) -> impl Iterator<Item = Range<usize>> {
    let mut start = 0;
    std::iter::from_fn(move || {
        if start == rows {
            return None;
        }
        let block = start..start + block_rows(isa, rows - start);
        start = block.end;
        Some(block)
    })
}

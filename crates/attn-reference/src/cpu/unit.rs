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
use super::pack::{KV_TILE, PackKeys, PackValues, PagedRows, Prefetch, Run, block_rows};
use super::pv::{Accumulate, Rescale};
use super::qk::{ScoreRow, Scores};
use super::scratch::{Dims, Scratch, TileParts};
use super::softmax::{OnlineSoftmax, Softcap};

/// Keys in a chunk: states over chunks merge in ascending order. A multiple of [`KV_TILE`].
pub(crate) const CHUNK_LEN: usize = 1024;

/// Rows whose scores are in the first-level cache at once; a multiple of every register block.
pub(crate) const SUPER_ROWS: usize = 12;

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
}

/// Keys that are packed together: a tile of one KV head.
#[derive(Clone, Copy)]
struct Step {
    start: usize,
    kv_head: usize,
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
    ///
    /// KV heads take turns tile by tile: in most layouts the heads of a token are neighbours, so memory is read in
    /// long runs.
    fn run_chunk(&self, keys: Range<usize>, last: usize, parts: &mut TileParts<'_>) {
        let mut start = keys.start / KV_TILE * KV_TILE;
        while start < keys.end {
            for kv_head in 0..self.num_kv_heads {
                let next = if kv_head + 1 < self.num_kv_heads {
                    Step { start, kv_head: kv_head + 1 }
                } else {
                    Step { start: start + KV_TILE, kv_head: 0 }
                };
                let ahead = if next.start < last { self.runs(next) } else { self.no_runs() };
                self.run_step(Step { start, kv_head }, ahead, parts);
            }
            start += KV_TILE;
        }
    }

    /// One tile of one KV head: packs it, attends, and asks for the next one on the way.
    fn run_step(&self, step: Step, ahead: [Run<'a>; 2], parts: &mut TileParts<'_>) {
        let rows_per_head = self.rows_per_head();
        let num_supers = rows_per_head.div_ceil(SUPER_ROWS);
        // Packing hides the wait where there is little else to do, the arithmetic where there is much.
        let is_bound_by_memory = num_supers <= 2;
        let runs = self.runs(step);
        self.pack(runs, if is_bound_by_memory { ahead } else { self.no_runs() }, parts);
        for i in 0..num_supers {
            let first = i * SUPER_ROWS;
            let local = first..(first + SUPER_ROWS).min(rows_per_head);
            self.run_rows(step, runs[0].len, local, parts);
            if !is_bound_by_memory {
                for run in ahead {
                    let part = run.len * i / num_supers..run.len * (i + 1) / num_supers;
                    self.isa.run(Prefetch(Run { start: run.start + part.start, len: part.len(), ..run }));
                }
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

    fn no_runs(&self) -> [Run<'a>; 2] {
        [self.keys, self.values].map(|rows| Run { rows, start: 0, len: 0 })
    }

    fn pack(&self, runs: [Run<'a>; 2], ahead: [Run<'a>; 2], parts: &mut TileParts<'_>) {
        let stage = &mut parts.stage[..self.dims.qk_padded * self.isa.panel() / 2];
        self.isa.run(PackKeys { run: runs[0], ahead: ahead[0], stage, tile: &mut *parts.keys });
        self.isa.run(PackValues { run: runs[1], ahead: ahead[1], tile: &mut *parts.values });
    }

    /// One step for a few of the rows of its KV head.
    fn run_rows(&self, step: Step, len: usize, local: Range<usize>, parts: &mut TileParts<'_>) {
        let (first, last) = (self.token_of(local.start), self.token_of(local.end - 1));
        let (low, high) = (self.visibility.columns(first, step.start, len), self.visibility.columns(last, step.start, len));
        // Both ends of a token's columns ascend with the token.
        let (union, common) = (low.start..high.end, high.start..low.end);
        if union.is_empty() {
            return;
        }
        let panel = self.isa.panel();
        let columns = union.start / panel * panel..union.end.next_multiple_of(panel);
        let is_whole = common == columns && self.visibility.custom.is_none();
        let scores = &mut parts.scores[..local.len()];
        self.isa.run(Scores {
            isa: self.isa,
            queries: &parts.queries[self.block_start(step.kv_head, local.start)..],
            keys: parts.keys,
            dim: self.dims.qk,
            dim_padded: self.dims.qk_padded,
            panels: columns.start / panel..columns.end / panel,
            scores,
        });
        self.adjust(step, local.clone(), columns.clone(), !is_whole, scores);
        let offset = step.kv_head * self.rows_per_head();
        let rows = offset + local.start..offset + local.end;
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
            self.accumulate_masked(step.start, len, local, scores, values, out);
        }
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
        let low = self.visibility.columns(last, start, len).start;
        let high = self.visibility.columns(first, start, len).end;
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

    /// The query token of a row, counted in its KV head.
    fn token_of(&self, local: usize) -> usize {
        self.tokens.start + local / self.heads
    }

    /// Where the query blocks from a row on begin; the row is a multiple of [`SUPER_ROWS`] in its KV head.
    pub(crate) fn block_start(&self, kv_head: usize, local: usize) -> usize {
        let block = kv_head * num_blocks(self.isa, self.rows_per_head()) + local / self.isa.max_rows();
        block * self.dims.qk_padded * self.isa.panel() / 2
    }
}

/// Register blocks of the rows of a KV head.
pub(crate) fn num_blocks(isa: Isa, rows: usize) -> usize {
    blocks(isa, rows).count()
}

/// The register blocks of the rows of a KV head, in order.
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

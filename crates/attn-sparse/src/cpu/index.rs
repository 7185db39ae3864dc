//! Owns the fast scoring of blocks: [`BlockIndex`].
//!
//! The index keys are read once for all index heads of some rows. A block's score depends on the row's query and the
//! block's keys alone, so it has the same bits whatever the batch, the threads or how the work was cut.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use attn_metadata::Request;
use attn_reference::cpu::tiles::{KvRun, MAX_ROWS, MAX_RUN, QueryRows, Tile};
use kvpool::{HostKv, HostTensor};

use crate::params::{ScoreType, SparseParams};
use crate::selection::{Unit, visible_tokens};
use crate::stage::{Index, Scores, StageError, Step};

/// Keys of one piece of work.
const ITEM_LEN: usize = 4096;

/// Blocks whose scores a worker collects before it hands them over.
const COLLECTED: usize = 128;

/// Scores blocks by `max` or `ln Σ exp` over the scaled products of index queries and index keys.
#[derive(Clone, Debug)]
pub struct BlockIndex {
    params: SparseParams,
    items: Vec<Item>,
}

/// What [`BlockIndex`] is given.
#[derive(Clone, Copy, Debug)]
pub struct BlockIndexInput<'a> {
    /// Index queries `[num_rows, num_index_heads, index_dim]`.
    pub q: HostTensor<'a>,
    /// The side cache: one head of `index_dim`.
    pub cache: &'a HostKv,
}

/// Some rows of a request, some heads, some keys.
#[derive(Clone, Debug)]
struct Item {
    request: usize,
    rows: Range<usize>,
    heads: Range<usize>,
    keys: Range<usize>,
}

impl BlockIndex {
    /// An index for layers with these settings.
    #[must_use]
    pub const fn new(params: SparseParams) -> Self {
        Self { params, items: Vec::new() }
    }

    /// Cuts the rows to be scored into pieces of work.
    fn plan(&mut self, step: &Step<'_>, scores: &Scores) {
        self.items.clear();
        let heads = self.params.num_index_heads as usize;
        let heads_per_tile = heads.min(MAX_ROWS);
        let rows_per_tile = (MAX_ROWS / heads_per_tile).max(1);
        let item_len = ITEM_LEN.max(self.params.blocks.block_size as usize);
        let all = scores.rows();
        for (index, request) in step.batch.requests().iter().enumerate() {
            let start = request.q_start as usize;
            let rows = all.start.max(start)..all.end.min(start + request.q_len as usize);
            // Rows see more the later they are: those without scores come first.
            let Some(first) = rows.clone().find(|row| scores.num_units(*row) > 0) else { continue };
            for begin in (first..rows.end).step_by(rows_per_tile) {
                let rows = begin..(begin + rows_per_tile).min(rows.end);
                let visible = visible_at(request, rows.end - 1);
                for head in (0..heads).step_by(heads_per_tile) {
                    let heads = head..(head + heads_per_tile).min(heads);
                    let keys = (0..visible).step_by(item_len).map(|key| key..(key + item_len).min(visible));
                    let item = |keys| Item { request: index, rows: rows.clone(), heads: heads.clone(), keys };
                    self.items.extend(keys.map(item));
                }
            }
        }
    }
}

impl Index for BlockIndex {
    type Input<'a> = BlockIndexInput<'a>;

    fn num_heads(&self) -> usize {
        self.params.num_index_heads as usize
    }

    fn unit(&self) -> Unit {
        Unit::block(self.params.blocks.block_size)
    }

    fn score(
        &mut self,
        step: &mut Step<'_>,
        input: &mut BlockIndexInput<'_>,
        out: &mut Scores,
    ) -> Result<(), StageError> {
        let expected = [step.num_rows, self.num_heads(), self.params.index_dim as usize];
        if input.q.shape() != expected {
            return Err(StageError::Shape { tensor: "index q", expected, got: input.q.shape() });
        }
        self.plan(step, out);
        let (params, items, batch) = (self.params, &self.items, step.batch);
        let shared = Mutex::new(out);
        step.workers.share_out(items.len(), |tile, i| {
            let item = &items[i];
            let request = &batch.requests()[item.request];
            let scorer = Scorer { params: &params, input, item, pages: batch.pages(request), shared: &shared };
            scorer.run(tile, |row| visible_at(request, row));
        });
        Ok(())
    }
}

/// Tokens that a row of a request sees; the row is counted in the batch.
fn visible_at(request: &Request, row: usize) -> usize {
    let query = u32::try_from(row).expect("a row of the batch") - request.q_start;
    visible_tokens(request.position(query)) as usize
}

/// One piece of work in the hands of a worker.
struct Scorer<'a, 'b> {
    params: &'a SparseParams,
    input: &'a BlockIndexInput<'b>,
    item: &'a Item,
    pages: &'a [i32],
    shared: &'a Mutex<&'b mut Scores>,
}

/// Scores of the blocks at hand: `[vectors, COLLECTED]`.
struct Collected {
    /// The greatest score of a block's keys so far; NaN where there was one.
    max: [f32; MAX_ROWS * COLLECTED],
    /// `Σ exp(score − max)`.
    sum: [f32; MAX_ROWS * COLLECTED],
    blocks: Range<usize>,
}

impl Scorer<'_, '_> {
    fn run(&self, tile: &mut Tile, visible: impl Fn(usize) -> usize) {
        let Item { rows, heads, keys, .. } = self.item;
        let mut seen = [0; MAX_ROWS];
        for (seen, row) in seen.iter_mut().zip(rows.clone()) {
            *seen = visible(row);
        }
        let queries = QueryRows {
            q: self.input.q,
            first_row: rows.start,
            num_rows: rows.len(),
            first_head: heads.start,
            num_heads: heads.len(),
            scale: self.params.index_scale * self.input.cache.format().k_scale(),
        };
        tile.load(&queries, 1);
        let block_size = self.params.blocks.block_size as usize;
        let first = keys.start / block_size;
        let empty = [f32::NEG_INFINITY; MAX_ROWS * COLLECTED];
        let mut collected = Collected { max: empty, sum: [0.0; MAX_ROWS * COLLECTED], blocks: first..first };
        for start in keys.clone().step_by(MAX_RUN) {
            let run = |start: usize| KvRun {
                cache: self.input.cache,
                pages: self.pages,
                kv_head: 0,
                start,
                len: MAX_RUN.min(keys.end - start),
            };
            let next = (start + MAX_RUN < keys.end).then(|| run(start + MAX_RUN));
            let run = run(start);
            let end = (start + run.len).div_ceil(block_size);
            if end - collected.blocks.start > COLLECTED {
                self.hand_over(&mut collected);
                collected.blocks = start / block_size..end;
            }
            collected.blocks.end = end;
            let scores = tile.scores(&run, next.as_ref());
            for (vector, scores) in scores.iter().enumerate() {
                let seen = seen[vector / heads.len()].clamp(start, start + run.len) - start;
                self.collect(&mut collected, vector, start, &scores[..seen]);
            }
        }
        self.hand_over(&mut collected);
    }

    /// Pools the scores of consecutive keys from `start` on into the scores of their blocks.
    fn collect(&self, collected: &mut Collected, vector: usize, start: usize, scores: &[f32]) {
        let block_size = self.params.blocks.block_size as usize;
        let mut rest = scores;
        let mut at = start;
        while !rest.is_empty() {
            let len = (block_size - at % block_size).min(rest.len());
            let (block, tail) = rest.split_at(len);
            let place = vector * COLLECTED + at / block_size - collected.blocks.start;
            let (max, sum) = (&mut collected.max[place], &mut collected.sum[place]);
            let greatest = maximum(block);
            match self.params.score {
                ScoreType::Max => *max = if *max >= greatest || max.is_nan() { *max } else { greatest },
                ScoreType::Lse => add_exponentials(max, sum, block, greatest),
            }
            (rest, at) = (tail, at + len);
        }
    }

    /// Copies the scores of the blocks at hand to their place and forgets them.
    fn hand_over(&self, collected: &mut Collected) {
        let Item { rows, heads, .. } = self.item;
        let blocks = collected.blocks.clone();
        let mut out = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        for (vector, (row, head)) in rows.clone().flat_map(|row| heads.clone().map(move |head| (row, head))).enumerate()
        {
            let place = vector * COLLECTED..vector * COLLECTED + blocks.len();
            let (max, sum) = (&mut collected.max[place.clone()], &mut collected.sum[place]);
            let target = out.get_mut(row, head);
            let end = blocks.end.min(target.len());
            if blocks.start < end {
                for (target, (max, sum)) in target[blocks.start..end].iter_mut().zip(max.iter().zip(sum.iter())) {
                    *target = match self.params.score {
                        ScoreType::Max => *max,
                        ScoreType::Lse if *max == f32::NEG_INFINITY => *max,
                        ScoreType::Lse => max + sum.ln(),
                    };
                }
            }
            max.fill(f32::NEG_INFINITY);
            sum.fill(0.0);
        }
    }
}

/// The greatest of some numbers, NaN where one of them is.
fn maximum(scores: &[f32]) -> f32 {
    const LANES: usize = 16;
    let (mut max, mut sum) = ([f32::NEG_INFINITY; LANES], [0.0f32; LANES]);
    let (chunks, rest) = scores.as_chunks::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            max[i] = if chunk[i] > max[i] { chunk[i] } else { max[i] };
            // A NaN survives here.
            sum[i] += chunk[i] * 0.0;
        }
    }
    let greater = |a: f32, &b: &f32| if b > a { b } else { a };
    let max = rest.iter().fold(max.iter().fold(f32::NEG_INFINITY, greater), greater);
    // Infinities are no numbers here either: look again, for a NaN itself.
    let is_suspect = sum.iter().any(|x| x.is_nan()) || rest.iter().any(|x| x.is_nan());
    if is_suspect && scores.iter().any(|x| x.is_nan()) { f32::NAN } else { max }
}

/// Adds the exponentials of some scores, of which `greatest` is the maximum, to a block's.
fn add_exponentials(max: &mut f32, sum: &mut f32, scores: &[f32], greatest: f32) {
    if max.is_nan() || greatest.is_nan() {
        *max = f32::NAN;
        return;
    }
    let top = if greatest > *max { greatest } else { *max };
    if top == f32::NEG_INFINITY {
        return;
    }
    let before = if *max == f32::NEG_INFINITY { 0.0 } else { *sum * (*max - top).exp() };
    *sum = before + scores.iter().map(|score| (score - top).exp()).sum::<f32>();
    *max = top;
}

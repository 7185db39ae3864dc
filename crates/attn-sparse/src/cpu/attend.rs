//! Owns the fast attention to what was selected: [`SparseAttend`]. Reads the chosen units and nothing else.
//!
//! The visible tokens of a unit are a prefix of it, so no mask is needed: a run of keys ends where the row's sight ends.
//! Runs and chunks are cut by the row's ids alone; so a row has the same bits whatever the batch and the threads.

use std::ops::Range;

use attn_metadata::{HeadShape, Request};
use attn_reference::cpu::Output;
use attn_reference::cpu::tiles::{KvRun, MAX_ROWS, MAX_RUN, PartialStates, QueryRows, Tile};

use crate::selection::{Fanout, Selection};
use crate::stage::{Attend, AttendInput, AttendOutput, Offer, Refusal, StageError, Step};

/// Runs of keys whose states are merged as one.
const CHUNK_RUNS: usize = 8;

/// Pieces of work for each worker below which rows are split.
const MIN_ITEMS: usize = 4;

/// Attends to the selected units of each row, block or token.
#[derive(Debug)]
pub struct SparseAttend {
    heads: HeadShape,
    items: Vec<Item>,
    partials: PartialStates,
}

/// One row, one KV head, some of its query heads.
#[derive(Clone, Debug)]
struct Item {
    request: usize,
    row: usize,
    kv_head: u32,
    /// Query heads.
    heads: Range<usize>,
    /// Chunks of its runs.
    num_chunks: usize,
    /// First partial state, where rows are split.
    partial: usize,
}

impl SparseAttend {
    /// For layers with these heads.
    #[must_use]
    pub fn new(heads: HeadShape) -> Self {
        Self { heads, items: Vec::new(), partials: PartialStates::new() }
    }

    /// Lists the work; returns the number of partial states that a split needs.
    fn plan(&mut self, step: &Step<'_>, selection: &Selection) -> usize {
        self.items.clear();
        let group = self.heads.group_size() as usize;
        let mut num_partials = 0;
        for (index, request) in step.batch.requests().iter().enumerate() {
            let start = request.q_start as usize;
            for row in start..start + request.q_len as usize {
                for kv_head in 0..self.heads.num_kv_heads {
                    let set = selection.fanout().set_of(kv_head as usize);
                    let num_chunks = Runs::new(selection, row, set).count().div_ceil(CHUNK_RUNS);
                    for begin in (0..group).step_by(MAX_ROWS) {
                        let first = kv_head as usize * group + begin;
                        let heads = first..first + MAX_ROWS.min(group - begin);
                        let num_rows = heads.len();
                        let item = Item { request: index, row, kv_head, heads, num_chunks, partial: num_partials };
                        self.items.push(item);
                        num_partials += num_chunks * num_rows;
                    }
                }
            }
        }
        num_partials
    }
}

impl Attend for SparseAttend {
    fn accepts(&self, offer: &Offer) -> Result<(), Vec<Refusal>> {
        if offer.num_kv_heads != self.heads.num_kv_heads {
            return refusal("the KV heads that it was made for", offer.num_kv_heads);
        }
        accepts_sets(&self.heads, offer.fanout)
    }

    fn attend(
        &mut self,
        step: &mut Step<'_>,
        input: &AttendInput<'_>,
        selection: &Selection,
        mut output: AttendOutput<'_>,
    ) -> Result<(), StageError> {
        check(&self.heads, step, input, selection)?;
        check_output(&self.heads, step, &output)?;
        let num_partials = self.plan(step, selection);
        let vo = self.heads.head_dim_vo as usize;
        let batch = step.batch;
        let out = &Output::new(&mut output.out, output.lse);
        let work = |item: &Item| Work {
            heads: &self.heads,
            input,
            selection,
            request: &batch.requests()[item.request],
            pages: batch.pages(&batch.requests()[item.request]),
        };
        let items = &self.items;
        let num_units: usize = items.iter().map(|item| item.num_chunks).sum();
        if items.len() >= MIN_ITEMS * step.workers.len() || num_units <= items.len() {
            step.workers.share_out(items.len(), |tile, i| {
                let item = &items[i];
                let work = work(item);
                work.load(tile, item);
                work.run(tile, item, 0..item.num_chunks);
                work.write(tile, item, out);
            });
            return Ok(());
        }
        self.partials.resize(step.workers.isa(), num_partials, vo);
        let partials = &self.partials;
        let most = items.iter().map(|item| item.num_chunks).max().unwrap_or(0);
        step.workers.share_out(items.len() * most, |tile, i| {
            let (item, chunk) = (&items[i / most], i % most);
            if chunk < item.num_chunks {
                let work = work(item);
                work.load(tile, item);
                work.run(tile, item, chunk..chunk + 1);
                tile.store(partials, item.partial + chunk * item.heads.len());
            }
        });
        step.workers.share_out(items.len(), |tile, i| {
            let item = &items[i];
            tile.begin_merge(item.heads.len(), vo);
            (0..item.num_chunks).for_each(|chunk| tile.merge(partials, item.partial + chunk * item.heads.len()));
            work(item).write(tile, item, out);
        });
        Ok(())
    }
}

fn refusal(needed: &'static str, got: u32) -> Result<(), Vec<Refusal>> {
    Err(vec![Refusal { attend: "sparse attention on the CPU", needed, got }])
}

fn accepts_sets(heads: &HeadShape, fanout: Fanout) -> Result<(), Vec<Refusal>> {
    let sets = fanout.num_sets();
    if fanout == Fanout::Shared || sets == heads.num_kv_heads as usize {
        return Ok(());
    }
    refusal("one set of ids for each KV head, or one for all", u32::try_from(sets).unwrap_or(u32::MAX))
}

/// The selection may be another layer's, of other heads than the pipeline was made for.
fn check(heads: &HeadShape, step: &Step<'_>, input: &AttendInput<'_>, selection: &Selection) -> Result<(), StageError> {
    accepts_sets(heads, selection.fanout()).map_err(StageError::Refused)?;
    if !selection.fits(step.batch) {
        let expected = step.batch.num_rows() as usize;
        return Err(StageError::OtherRows { expected, got: selection.num_rows() });
    }
    let expected = [step.num_rows, heads.num_qo_heads as usize, heads.head_dim_qk as usize];
    if input.q.shape() != expected {
        return Err(StageError::Shape { tensor: "q", expected, got: input.q.shape() });
    }
    Ok(())
}

fn check_output(heads: &HeadShape, step: &Step<'_>, output: &AttendOutput<'_>) -> Result<(), StageError> {
    let num_heads = heads.num_qo_heads as usize;
    let expected = [step.num_rows, num_heads, heads.head_dim_vo as usize];
    if output.out.shape() != expected {
        return Err(StageError::Shape { tensor: "out", expected, got: output.out.shape() });
    }
    match output.lse.as_deref() {
        Some(lse) if lse.len() != step.num_rows * num_heads => {
            let (expected, got) = ([step.num_rows, num_heads, 1], [lse.len() / num_heads, num_heads, 1]);
            Err(StageError::Shape { tensor: "lse", expected, got })
        }
        _ => Ok(()),
    }
}

/// What a worker needs for one item.
struct Work<'a> {
    heads: &'a HeadShape,
    input: &'a AttendInput<'a>,
    selection: &'a Selection,
    request: &'a Request,
    pages: &'a [i32],
}

impl Work<'_> {
    fn load(&self, tile: &mut Tile, item: &Item) {
        let queries = QueryRows {
            q: self.input.q,
            first_row: item.row,
            num_rows: 1,
            first_head: item.heads.start,
            num_heads: item.heads.len(),
            scale: self.input.sm_scale * self.input.cache.format().k_scale(),
        };
        tile.load(&queries, self.heads.head_dim_vo as usize);
    }

    fn run(&self, tile: &mut Tile, item: &Item, chunks: Range<usize>) {
        let set = self.selection.fanout().set_of(item.kv_head as usize);
        let kv_run = |tokens: Range<usize>| KvRun {
            cache: self.input.cache,
            pages: self.pages,
            kv_head: item.kv_head,
            start: tokens.start,
            len: tokens.len(),
        };
        debug_assert!(self.selection.visible(item.row) <= self.request.kv_len, "a row sees KV of its request");
        let mut runs = Runs::new(self.selection, item.row, set).map(kv_run).skip(chunks.start * CHUNK_RUNS).peekable();
        for _ in chunks {
            for _ in 0..CHUNK_RUNS {
                let Some(run) = runs.next() else { break };
                tile.attend(&run, runs.peek());
            }
            tile.end_chunk();
        }
    }

    fn write(&self, tile: &mut Tile, item: &Item, out: &Output<'_>) {
        tile.finish(0..item.heads.len(), self.input.cache.format().v_scale(), |outputs, lses| {
            out.write(item.row, item.heads.start, outputs.vectors(), lses);
        });
    }
}

/// The visible tokens of a row's ids as runs of at most [`MAX_RUN`], units that follow each other joined.
#[derive(Clone)]
struct Runs<'a> {
    selection: &'a Selection,
    row: usize,
    ids: std::slice::Iter<'a, i32>,
    /// Tokens of units already taken from `ids`.
    open: Range<usize>,
}

impl<'a> Runs<'a> {
    fn new(selection: &'a Selection, row: usize, set: usize) -> Self {
        Self { selection, row, ids: selection.ids(row, set).iter(), open: 0..0 }
    }
}

impl Iterator for Runs<'_> {
    type Item = Range<usize>;

    fn next(&mut self) -> Option<Range<usize>> {
        if self.open.is_empty() {
            self.open = self.selection.tokens(self.row, *self.ids.next()?);
        }
        while self.open.len() < MAX_RUN {
            let Some(next) = self.ids.clone().next().map(|id| self.selection.tokens(self.row, *id)) else { break };
            if next.start != self.open.end {
                break;
            }
            self.open.end = next.end;
            self.ids.next();
        }
        let run = self.open.start..self.open.end.min(self.open.start + MAX_RUN);
        self.open.start = run.end;
        Some(run)
    }
}

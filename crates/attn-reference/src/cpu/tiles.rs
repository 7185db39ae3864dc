//! Owns the tile loop as a building block for other crates' backends: some query rows, and runs of keys that all of them
//! see. Which runs, and who sees what, is the caller's; packing, scores, softmax, output and merging are this module's.
//!
//! Invariants: exactly the given positions are read. A row's state depends on its query, on the runs and on where
//! [`Tile::end_chunk`] was called: not on the other rows of the tile, the worker or the number of workers. So whoever
//! cuts runs and chunks by the row alone gets the same bits whatever the batch and the machine's threads.

use std::ops::Range;
use std::sync::Mutex;

use kvpool::{HostKv, HostTensor};
use rayon::{ThreadPool, ThreadPoolBuildError};

use super::isa::Isa;
use super::layer::share_out;
use super::merge::{MergeStates, Moments, finish};
use super::pack::{KV_TILE, PackKeys, PackValues, PagedRows, Run};
use super::pv::{Accumulate, Rescale, Strides, Values};
use super::qk::{ScoreRow, Scores};
use super::queries::{PackQueries, QueryVectors};
use super::scratch::{Dims, RowStates, Scratch};
use super::softmax::OnlineSoftmax;
use super::threads::start_threads;
use super::unit::{STREAM_KEYS, STREAM_ROWS, blocks};

/// Most keys of a run.
pub const MAX_RUN: usize = KV_TILE;

/// Most query rows of a tile.
pub const MAX_ROWS: usize = STREAM_ROWS;

/// Consecutive KV positions of one request and one KV head.
#[derive(Clone, Copy, Debug)]
pub struct KvRun<'a> {
    /// The layer's cache.
    pub cache: &'a HostKv,
    /// Page ids of the request.
    pub pages: &'a [i32],
    /// The KV head.
    pub kv_head: u32,
    /// First position.
    pub start: usize,
    /// Positions, 1 to [`MAX_RUN`]. All must hold KV.
    pub len: usize,
}

impl<'a> KvRun<'a> {
    fn rows(&self, plane: kvpool::KvPlane<'a>) -> Run<'a> {
        let page_size = self.cache.shape().page_size.get();
        let rows = PagedRows { plane, pages: self.pages, page_size, head: self.kv_head };
        Run { rows, start: self.start, len: self.len }
    }
}

/// Query vectors that become the rows of a tile: token by token, for a token head by head.
#[derive(Clone, Copy, Debug)]
pub struct QueryRows<'a> {
    /// `[rows, heads, dim]`.
    pub q: HostTensor<'a>,
    /// First row.
    pub first_row: usize,
    /// Consecutive rows.
    pub num_rows: usize,
    /// First head.
    pub first_head: usize,
    /// Consecutive heads of each row.
    pub num_heads: usize,
    /// What the scores are multiplied by; a scale of stored keys belongs in it.
    pub scale: f32,
}

/// Some query rows of one worker, and what they have seen so far.
pub struct Tile {
    isa: Isa,
    dims: Dims,
    scratch: Scratch,
    num_rows: usize,
}

impl std::fmt::Debug for Tile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tile").field("isa", &self.isa).field("dims", &self.dims).finish_non_exhaustive()
    }
}

impl Tile {
    /// A tile without rows.
    #[must_use]
    pub fn new(isa: Isa) -> Self {
        Tile { isa, dims: Dims::new(isa, 1, 1), scratch: Scratch::new(), num_rows: 0 }
    }

    /// Loads queries, and forgets everything seen. `head_dim_vo` is the width of the values that will be attended to;
    /// 1 where only scores are wanted.
    ///
    /// # Panics
    /// Where there are more than [`MAX_ROWS`] vectors, none, or vectors outside the tensor.
    pub fn load(&mut self, queries: &QueryRows<'_>, head_dim_vo: usize) {
        let QueryRows { q, first_row, first_head, num_heads, scale, .. } = *queries;
        let num_rows = queries.num_rows * num_heads;
        assert!((1..=MAX_ROWS).contains(&num_rows), "{num_rows} rows of a tile");
        self.dims = Dims::new(self.isa, q.dim(), head_dim_vo);
        self.num_rows = num_rows;
        self.scratch.grow(self.isa, self.dims);
        let padded = self.dims.qk_padded;
        let stage = self.scratch.stage.get_mut(self.isa.panel() / 2 * padded);
        let all = self.scratch.queries.all_mut();
        for block in blocks(self.isa, num_rows) {
            let vectors = QueryVectors {
                q,
                first: (first_row + block.start / num_heads, first_head + block.start % num_heads),
                heads: first_head..first_head + num_heads,
                scale,
                num_rows: block.len(),
                num_ahead: 0,
            };
            self.isa.run(PackQueries {
                vectors,
                stage: &mut *stage,
                block: &mut all[block.start * padded..block.end * padded],
            });
        }
        let width = self.dims.vo_padded;
        self.scratch.chunk.clear(num_rows, width);
        self.scratch.total.clear(num_rows, width);
    }

    /// Scores of all rows against the keys of a run, `[rows][len]`; columns from `len` on have no meaning. `next` is
    /// asked for on the way.
    pub fn scores(&mut self, run: &KvRun<'_>, next: Option<&KvRun<'_>>) -> &[[f32; MAX_RUN]] {
        let (isa, dims, num_rows) = (self.isa, self.dims, self.num_rows);
        let parts = self.scratch.tile_parts();
        let keys = run.rows(run.cache.k());
        let ahead = next.map_or(keys.part(0..0), |next| next.rows(next.cache.k()));
        let panel = isa.panel();
        for first in (0..run.len).step_by(panel) {
            let part = first..first + panel;
            let stage = &mut parts.stage[..dims.qk_padded * panel / 2];
            isa.run(PackKeys { run: keys.part(part.clone()), ahead: ahead.part(part), stage, tile: &mut *parts.keys });
            isa.run(Scores {
                isa,
                queries: parts.queries,
                keys: parts.keys,
                dim: dims.qk,
                dim_padded: dims.qk_padded,
                panels: first / panel..first / panel + 1,
                scores: &mut parts.scores[..num_rows],
            });
        }
        &parts.scores[..num_rows]
    }

    /// Attends with all rows to all keys and values of a run. `next` is asked for on the way.
    pub fn attend(&mut self, run: &KvRun<'_>, next: Option<&KvRun<'_>>) {
        self.scores(run, next);
        let (isa, dims, num_rows) = (self.isa, self.dims, self.num_rows);
        let width = dims.vo_padded;
        let parts = self.scratch.tile_parts();
        let scores: &mut [ScoreRow] = &mut parts.scores[..num_rows];
        let columns = 0..run.len.next_multiple_of(isa.panel() / 2);
        scores.iter_mut().for_each(|row| row[run.len..columns.end].fill(f32::NEG_INFINITY));
        let mut factors = [0.0; MAX_ROWS];
        let factors = &mut factors[..num_rows];
        let (max, sum) = (&mut parts.chunk.max[..num_rows], &mut parts.chunk.sum[..num_rows]);
        let any = isa.run(OnlineSoftmax { scores: &mut *scores, columns, max, sum, factors });
        let out = &mut parts.chunk.out.all_mut()[..num_rows * width];
        if any {
            isa.run(Rescale { factors, out: &mut *out });
        }
        let values = run.rows(run.cache.v());
        let ahead = next.map_or(values.part(0..0), |next| next.rows(next.cache.v()));
        for first in (0..run.len).step_by(STREAM_KEYS) {
            let part = first..(first + STREAM_KEYS).min(run.len);
            let (packed, ahead) = (values.part(part.clone()), ahead.part(part.clone()));
            isa.run(PackValues { run: packed, ahead, room: STREAM_KEYS, tile: &mut *parts.values });
            let values = Values { tile: parts.values, strides: Strides::of_panels(STREAM_KEYS), first };
            isa.run(Accumulate { isa, probs: scores, values, columns: part, out: &mut *out, ahead: None });
        }
    }

    /// Ends a chunk: what was seen since the last one is merged to what was seen before.
    pub fn end_chunk(&mut self) {
        let Scratch { chunk, total, .. } = &mut self.scratch;
        let (rows, width) = (self.num_rows, self.dims.vo_padded);
        self.isa.run(MergeStates::new(total, chunk, 0, rows, width));
        chunk.clear(rows, width);
    }

    /// Keeps what the rows have seen in the ended chunks, as the states from row `begin` on.
    ///
    /// # Panics
    /// Where the states were not made for so many rows of this width.
    pub fn store(&self, states: &PartialStates, begin: usize) {
        assert_eq!(states.head_dim_vo, self.dims.vo, "width of partial states");
        let mut kept = states.rows.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        kept.store(begin, &self.scratch.total, 0..self.num_rows, self.dims.vo_padded);
    }

    /// Merges stored states over later keys, from row `begin` on, to what was seen before.
    pub fn merge(&mut self, states: &PartialStates, begin: usize) {
        let kept = states.rows.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (rows, width) = (self.num_rows, self.dims.vo_padded);
        self.isa.run(MergeStates::new(&mut self.scratch.total, &kept, begin, rows, width));
    }

    /// As [`load`](Self::load) for rows whose queries are not needed: to merge stored states.
    ///
    /// # Panics
    /// Where there are more than [`MAX_ROWS`] rows.
    pub fn begin_merge(&mut self, num_rows: usize, head_dim_vo: usize) {
        assert!(num_rows <= MAX_ROWS, "{num_rows} rows of a tile");
        self.dims = Dims::new(self.isa, 1, head_dim_vo);
        self.num_rows = num_rows;
        self.scratch.grow(self.isa, self.dims);
        self.scratch.total.clear(num_rows, self.dims.vo_padded);
    }

    /// Finishes some rows of what was seen in the ended chunks: calls `write` with their outputs and LSEs. The scale of
    /// stored values goes in here. Rows that saw nothing give zeros and −∞.
    pub fn finish(&mut self, rows: Range<usize>, value_scale: f32, write: impl FnOnce(Outputs<'_>, &[f32])) {
        let Dims { vo, vo_padded, .. } = self.dims;
        let RowStates { max, sum, out } = &mut self.scratch.total;
        for row in rows.clone() {
            (sum[row], max[row]) = finish(Moments { max: max[row], sum: sum[row] }, None, value_scale);
        }
        let out = &mut out.all_mut()[rows.start * vo_padded..rows.end * vo_padded];
        self.isa.run(Rescale { factors: &sum[rows.clone()], out: &mut *out });
        write(Outputs { data: out, width: vo_padded, dim: vo }, &max[rows]);
    }
}

/// Finished outputs of consecutive rows.
#[derive(Clone, Copy, Debug)]
pub struct Outputs<'a> {
    data: &'a [f32],
    width: usize,
    dim: usize,
}

impl<'a> Outputs<'a> {
    /// The vectors, `[head_dim_vo]` each.
    pub fn vectors(self) -> impl Iterator<Item = &'a [f32]> {
        self.data.chunks_exact(self.width).map(move |row| &row[..self.dim])
    }
}

/// States of rows over parts of their keys, left by several workers to be merged.
pub struct PartialStates {
    rows: Mutex<RowStates>,
    head_dim_vo: usize,
}

impl std::fmt::Debug for PartialStates {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PartialStates").field("head_dim_vo", &self.head_dim_vo).finish_non_exhaustive()
    }
}

impl PartialStates {
    /// Room for no row.
    #[must_use]
    pub fn new() -> Self {
        Self { rows: Mutex::new(RowStates::default()), head_dim_vo: 0 }
    }

    /// Makes room for this many rows. What was there is lost.
    pub fn resize(&mut self, isa: Isa, num_rows: usize, head_dim_vo: usize) {
        self.head_dim_vo = head_dim_vo;
        let width = Dims::new(isa, 1, head_dim_vo).vo_padded;
        self.rows.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner).grow(num_rows, width);
    }
}

impl Default for PartialStates {
    fn default() -> Self {
        Self::new()
    }
}

/// Threads with a [`Tile`] each.
#[derive(Debug)]
pub struct Workers {
    isa: Isa,
    pool: ThreadPool,
    tiles: Vec<Tile>,
}

impl Workers {
    /// Starts threads; `None`: as many as the process may use.
    ///
    /// # Errors
    /// Where threads cannot be started.
    pub fn new(isa: Isa, num_threads: Option<usize>, name: &'static str) -> Result<Self, ThreadPoolBuildError> {
        let pool = start_threads(num_threads, name)?;
        let tiles = (0..pool.current_num_threads()).map(|_| Tile::new(isa)).collect();
        Ok(Self { isa, pool, tiles })
    }

    /// The instruction set in use.
    #[must_use]
    pub const fn isa(&self) -> Isa {
        self.isa
    }

    /// Threads.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.tiles.len()
    }

    /// Whether there is no thread: never.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.tiles.is_empty()
    }

    /// Calls `work` with every number below `count`, each once, from all threads.
    pub fn share_out(&mut self, count: usize, work: impl Fn(&mut Tile, usize) + Sync) {
        let Self { pool, tiles, .. } = self;
        pool.install(|| share_out(tiles, count, |tile, i, _| work(tile, i)));
    }
}

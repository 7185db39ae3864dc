//! Owns the scores of keys that are packed as values are: rows of queries in the lanes of a vector, keys one by one.
//!
//! Where the values are columns of the keys (a latent cache), one packed tile serves both products: the outputs take its
//! vectors, the scores broadcast its elements, and nothing is transposed but a small block of scores.
//!
//! Invariant: each score is the chain of multiply-adds that `qk.rs` forms, over the dimensions in ascending order,
//! starting at 0. So a score has the same bits on either way.

use std::ops::Range;

use kvpool::KvPlane;

use super::isa::{Isa, Kernel, Simd};
use super::pack::{KV_TILE, MAX_LANES, PagedRows, Run, block_rows};
use super::qk::ScoreRow;

/// Bytes of a cache line.
const LINE: usize = 64;

/// The vectors that will be packed next, asked for line by line while there is work to do: the first half of a vector's
/// lines by the scores, the second half by the outputs.
pub(crate) struct Ahead<'a> {
    bytes: &'a [u8],
    /// Byte where each vector begins.
    starts: [usize; KV_TILE],
    len: usize,
    num_lines: usize,
}

impl<'a> Ahead<'a> {
    /// The vectors of a run, at most a tile.
    pub(crate) fn new(run: Run<'a>) -> Ahead<'a> {
        let PagedRows { plane: KvPlane { data, layout }, .. } = run.rows;
        let size = data.dtype().element_bytes();
        let mut starts = [0; KV_TILE];
        for (start, position) in starts.iter_mut().zip(run.start..run.start + run.len) {
            *start = run.rows.element(position) * size;
        }
        let num_lines = (layout.vector_len() * size).div_ceil(LINE);
        Ahead { bytes: data.as_bytes(), starts, len: run.len, num_lines }
    }

    /// Lines that the scores ask for in one of their steps.
    fn score_lines(&self, step: usize, num_steps: usize) -> Range<usize> {
        let half = self.num_lines / 2;
        step * half / num_steps..(step + 1) * half / num_steps
    }

    /// Lines that the outputs ask for in one of their steps.
    pub(crate) fn output_lines(&self, step: usize, num_steps: usize) -> Range<usize> {
        let (half, rest) = (self.num_lines / 2, self.num_lines - self.num_lines / 2);
        half + step * rest / num_steps..half + (step + 1) * rest / num_steps
    }

    #[inline(always)]
    pub(crate) fn ask<S: Simd>(&self, simd: S, key: usize, lines: Range<usize>) {
        if key < self.len {
            for line in lines {
                if let Some(byte) = self.bytes.get(self.starts[key] + line * LINE) {
                    simd.prefetch_far(byte);
                }
            }
        }
    }
}

/// Computes the scores of `scores.len()` rows for some keys of the tile.
pub(crate) struct LaneScores<'a> {
    pub(crate) isa: Isa,
    /// Blocks of L rows, `[dim_padded, L]` each.
    pub(crate) queries: &'a [f32],
    /// `[dim / 2L, room, 2, L]`, as values are packed.
    pub(crate) tile: &'a [f32],
    pub(crate) room: usize,
    /// Elements of a query and of a key.
    pub(crate) dim: usize,
    pub(crate) dim_padded: usize,
    /// Keys to compute; other columns of `scores` hold anything afterwards.
    pub(crate) keys: Range<usize>,
    pub(crate) ahead: &'a Ahead<'a>,
    /// `[KV_TILE, 2, L]`, to work in.
    pub(crate) stage: &'a mut [f32],
    pub(crate) scores: &'a mut [ScoreRow],
}

/// What the register blocks read.
struct Tile<'a, R> {
    panels: &'a [[R; 2]],
    room: usize,
    dim: usize,
    ahead: Option<&'a Ahead<'a>>,
}

impl Kernel for LaneScores<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let queries: &[S::Row] = bytemuck::cast_slice(self.queries);
        let stage: &mut [[S::Row; 2]] = bytemuck::cast_slice_mut(self.stage);
        let panels = bytemuck::cast_slice(self.tile);
        let num_rows = self.scores.len();
        for first in (0..num_rows).step_by(2 * S::LANES) {
            let ahead = (first == 0).then_some(self.ahead);
            let tile = Tile { panels, room: self.room, dim: self.dim, ahead };
            let block = |i: usize| &queries[(first / S::LANES + i) * self.dim_padded..][..self.dim];
            let is_wide = num_rows - first > S::LANES;
            let mut key = self.keys.start;
            while key < self.keys.end {
                let num_keys = block_rows(self.isa, self.keys.end - key);
                if is_wide {
                    blocks::<S, 2>(simd, [block(0), block(1)], &tile, key, num_keys, stage);
                } else {
                    blocks::<S, 1>(simd, [block(0)], &tile, key, num_keys, stage);
                }
                key += num_keys;
            }
            let rows = first..num_rows.min(first + 2 * S::LANES);
            transpose(simd, stage, self.keys.clone(), &mut self.scores[rows]);
        }
    }
}

#[inline(always)]
fn blocks<S: Simd, const V: usize>(
    simd: S,
    queries: [&[S::Row]; V],
    tile: &Tile<'_, S::Row>,
    key: usize,
    num_keys: usize,
    stage: &mut [[S::Row; 2]],
) {
    match num_keys {
        12 => micro::<S, 12, V>(simd, queries, tile, key, stage),
        8 => micro::<S, 8, V>(simd, queries, tile, key, stage),
        6 => micro::<S, 6, V>(simd, queries, tile, key, stage),
        4 => micro::<S, 4, V>(simd, queries, tile, key, stage),
        2 => micro::<S, 2, V>(simd, queries, tile, key, stage),
        _ => micro::<S, 1, V>(simd, queries, tile, key, stage),
    }
}

/// `K` keys by `V` vectors of rows, in `K V` registers.
#[inline(always)]
fn micro<S: Simd, const K: usize, const V: usize>(
    simd: S,
    queries: [&[S::Row]; V],
    tile: &Tile<'_, S::Row>,
    key: usize,
    stage: &mut [[S::Row; 2]],
) {
    let mut acc = [[simd.splat(0.0); V]; K];
    let num_steps = tile.dim.div_ceil(S::LANES);
    for step in 0..num_steps {
        let columns = step * S::LANES..tile.dim.min((step + 1) * S::LANES);
        let Some(keys) = tile.panels[step / 2 * tile.room + key..].first_chunk::<K>() else { return };
        let mut rows = queries;
        for rows in &mut rows {
            *rows = &rows[columns.clone()];
        }
        // The next panel's part of these keys: panels are far apart, and no hardware foresees the step.
        if let Some(next) = tile.panels[step / 2 * tile.room + key..].get(tile.room..tile.room + K) {
            for next in next {
                simd.prefetch(&next[step % 2], 0);
            }
        }
        // Plain loops: closures over arrays would not be inlined, and vectors would go through memory.
        for j in 0..columns.len() {
            let mut q = [simd.splat(0.0); V];
            for (q, rows) in q.iter_mut().zip(&rows) {
                *q = simd.load(&rows[j]);
            }
            for k in 0..K {
                let x = simd.splat(keys[k][step % 2].as_ref()[j]);
                for v in 0..V {
                    acc[k][v] = simd.fma(q[v], x, acc[k][v]);
                }
            }
        }
        if let Some(ahead) = tile.ahead {
            let lines = ahead.score_lines(step, num_steps);
            for key in key..key + K {
                ahead.ask(simd, key, lines.clone());
            }
        }
    }
    for (acc, stage) in acc.into_iter().zip(&mut stage[key..key + K]) {
        for (acc, row) in acc.into_iter().zip(stage) {
            simd.store(acc, row);
        }
    }
}

/// Scores by key to scores by row, in whole vectors of keys.
#[inline(always)]
fn transpose<S: Simd>(simd: S, stage: &[[S::Row; 2]], keys: Range<usize>, scores: &mut [ScoreRow]) {
    let flat: &[S::Row] = bytemuck::cast_slice(stage);
    let mut wide = [[0.0; KV_TILE]; MAX_LANES];
    for (half, rows) in scores.chunks_mut(S::LANES).enumerate() {
        for group in keys.start / S::LANES..keys.end.div_ceil(S::LANES) {
            let to: &mut [S::Row] = bytemuck::cast_slice_mut(wide.as_flattened_mut());
            let stride = KV_TILE / S::LANES;
            simd.transpose(&flat[group * S::LANES * 2 + half..], 2, &mut to[group..], stride);
        }
        let columns = keys.start / S::LANES * S::LANES..keys.end.next_multiple_of(S::LANES);
        for (row, wide) in rows.iter_mut().zip(&wide) {
            row[columns.clone()].copy_from_slice(&wide[columns.clone()]);
        }
    }
}

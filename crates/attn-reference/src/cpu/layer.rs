//! Owns one call of the backend: the units of a plan shared out to the workers, the merge of split ones, the results.
//!
//! Workers claim ranges of the plan in turn, so a busy core delays nobody; no result depends on who claims what.
//! Units of split tiles leave their states in the partials, and a second pass merges them in ascending order.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use attn_metadata::plan::{Plan, Tile};
use attn_metadata::{Batch, Layer, Request};
use kvpool::{HostKv, HostTensor, Values};
use rayon::prelude::*;

use super::isa::Isa;
use super::mask::Visibility;
use super::merge::{MergeStates, Moments, finish};
use super::output::Output;
use super::pack::{PagedRows, Run};
use super::pv::Rescale;
use super::queries::{PackQueries, PackQueryRows, QueryVectors};
use super::schedule::{Item, Schedule};
use super::scratch::{Dims, RowStates, Scratch};
use super::unit::{UNIT_ROWS, UnitWork, blocks};

/// Tokens between asking for the memory of an output and writing it.
const WRITE_AHEAD: usize = 4;

/// Most query heads of a KV head up to which one tile of rows serves both products. Measured: 16 heads take 0.7 times
/// as long so, 64 heads 0.9 times, 128 heads 1.05 times.
const MAX_SHARED_HEADS: usize = 64;

/// What all workers read.
pub(crate) struct LayerCall<'a> {
    pub(crate) isa: Isa,
    pub(crate) batch: &'a Batch,
    pub(crate) plan: &'a Plan,
    pub(crate) schedule: &'a Schedule,
    pub(crate) layer: &'a Layer,
    pub(crate) q: HostTensor<'a>,
    pub(crate) cache: &'a HostKv,
    pub(crate) output: Output<'a>,
}

/// Some of the query heads of a unit: all, unless they are more than a unit holds.
#[derive(Clone, Copy)]
struct HeadSlice {
    /// First query head, counted in the group.
    begin: usize,
    len: usize,
}

impl LayerCall<'_> {
    /// Attends for the whole batch. Call it inside the thread pool that is to be used.
    pub(crate) fn run(&self, workers: &mut [Scratch], partials: &mut RowStates) {
        let dims = self.dims();
        for scratch in workers.iter_mut() {
            scratch.grow(self.isa, dims);
        }
        let num_partials = usize::try_from(self.plan.num_partial_rows()).expect("the workspace is in memory");
        let shared = Mutex::new(&mut *partials);
        let items = self.schedule.items();
        share_out(workers, items.len(), |scratch, i, then| {
            self.run_item(&items[i], then.map(|then| &items[then]), scratch, &shared);
        });
        if num_partials > 0 {
            let partials = &*partials;
            share_out(workers, self.plan.tiles().len(), |scratch, i, _| {
                let tile = &self.plan.tiles()[i];
                if tile.is_split() {
                    self.merge_tile(tile, scratch, partials);
                }
            });
        }
    }

    fn dims(&self) -> Dims {
        let heads = self.layer.heads();
        Dims::new(self.isa, heads.head_dim_qk as usize, heads.head_dim_vo as usize)
    }

    fn group_size(&self) -> usize {
        self.layer.heads().group_size() as usize
    }

    /// Whether one tile of rows serves both products: the values are the first columns of the keys, and the heads are
    /// not so many that the packing of keys and values on their own costs little beside the products.
    ///
    /// It depends on the layer alone: the two ways round differently.
    fn shares_rows(&self) -> bool {
        matches!(self.cache.spec().values, Values::InKeys(_))
            && self.cache.k().layout.offset == self.cache.v().layout.offset
            && self.group_size() <= MAX_SHARED_HEADS
    }

    fn request(&self, tile: &Tile) -> &Request {
        &self.batch.requests()[tile.request as usize]
    }

    fn head_slices(&self) -> impl Iterator<Item = HeadSlice> + use<> {
        let group = self.group_size();
        (0..group).step_by(UNIT_ROWS).map(move |begin| HeadSlice { begin, len: UNIT_ROWS.min(group - begin) })
    }

    /// Does an item; `then` is what the worker does next, where that is known.
    fn run_item(&self, item: &Item, then: Option<&Item>, scratch: &mut Scratch, partials: &Mutex<&mut RowStates>) {
        let tile = &self.plan.tiles()[item.tile as usize];
        let then = then.and_then(|then| self.first_run(then));
        for slice in self.head_slices() {
            let work = UnitWork { then, ..self.unit_work(tile, item, slice) };
            for kv_head in 0..item.num_kv_heads {
                self.pack_queries(tile, item, kv_head, slice, &work, scratch);
            }
            work.run(scratch);
            let rows = work.rows_per_head();
            for kv_head in 0..item.num_kv_heads {
                let first = kv_head as usize * rows;
                if tile.is_split() {
                    let begin = self.partial_row(tile, item.kv_head + kv_head, item.chunk, slice);
                    let mut partials = partials.lock().unwrap_or_else(PoisonError::into_inner);
                    partials.store(begin, &scratch.total, first..first + rows, work.dims.vo_padded);
                } else {
                    self.write(tile, item.kv_head + kv_head, slice, first, scratch);
                }
            }
        }
    }

    fn partial_row(&self, tile: &Tile, kv_head: u32, chunk: u32, slice: HeadSlice) -> usize {
        let row = tile.partial_row(kv_head, chunk, self.layer.heads().group_size());
        usize::try_from(row).expect("the workspace is in memory") + slice.begin
    }

    fn unit_work(&self, tile: &Tile, item: &Item, slice: HeadSlice) -> UnitWork<'_> {
        let request = self.request(tile);
        let rows = |plane| PagedRows {
            plane,
            pages: self.batch.pages(request),
            page_size: self.batch.page_size().get(),
            head: item.kv_head,
        };
        let first_head = item.kv_head as usize * self.group_size() + slice.begin;
        let num_kv_heads = item.num_kv_heads as usize;
        let range = tile.chunk(item.chunk);
        UnitWork {
            isa: self.isa,
            dims: self.dims(),
            keys: rows(self.cache.k()),
            values: rows(self.cache.v()),
            visibility: Visibility {
                q_len: request.q_len as usize,
                kv_len: request.kv_len as usize,
                causal: self.layer.is_causal(),
                window_left: self.layer.window_left(),
                custom: self.batch.custom_mask().map(|mask| (mask.bytes(), request.mask_start)),
            },
            softcap: self.layer.softcap(),
            slopes: self.layer.alibi_slopes().map(|all| &all[first_head..first_head + num_kv_heads * slice.len]),
            tokens: tile.q_begin as usize..(tile.q_begin + tile.q_len) as usize,
            num_kv_heads,
            heads: slice.len,
            range: range.start as usize..range.end as usize,
            shares_rows: self.shares_rows(),
            then: None,
        }
    }

    /// The keys that an item packs first.
    fn first_run(&self, item: &Item) -> Option<Run<'_>> {
        let tile = &self.plan.tiles()[item.tile as usize];
        self.unit_work(tile, item, self.head_slices().next()?).first_run()
    }

    /// Widens, scales and packs the queries of a unit's `kv_head`-th KV head. The scale of K goes in here too.
    fn pack_queries(
        &self,
        tile: &Tile,
        item: &Item,
        kv_head: u32,
        slice: HeadSlice,
        work: &UnitWork<'_>,
        scratch: &mut Scratch,
    ) {
        let qk_padded = work.dims.qk_padded;
        let first_token = (self.request(tile).q_start + tile.q_begin) as usize;
        let first_head = (item.kv_head + kv_head) as usize * self.group_size() + slice.begin;
        let vectors = |rows: Range<usize>, num_ahead| QueryVectors {
            q: self.q,
            first: (first_token + rows.start / slice.len, first_head + rows.start % slice.len),
            heads: first_head..first_head + slice.len,
            scale: self.layer.sm_scale() * self.cache.format().k_scale(),
            num_rows: rows.len(),
            num_ahead,
        };
        let queries = &mut scratch.queries.all_mut()[work.block_start(kv_head as usize, 0)..];
        let num_rows = work.rows_per_head();
        if work.shares_rows {
            let rows = &mut queries[..num_rows * qk_padded];
            self.isa.run(PackQueryRows { vectors: vectors(0..num_rows, 0), dim_padded: qk_padded, rows });
            return;
        }
        let stage = scratch.stage.get_mut(self.isa.panel() / 2 * qk_padded);
        for rows in blocks(self.isa, num_rows) {
            let num_ahead = rows.len().min(num_rows - rows.end);
            let block = &mut queries[rows.start * qk_padded..rows.end * qk_padded];
            self.isa.run(PackQueries { vectors: vectors(rows, num_ahead), stage: &mut *stage, block });
        }
    }

    /// Merges the partial states of a tile's units, chunk by chunk.
    fn merge_tile(&self, tile: &Tile, scratch: &mut Scratch, partials: &RowStates) {
        let width = self.dims().vo_padded;
        for kv_head in 0..self.layer.heads().num_kv_heads {
            for slice in self.head_slices() {
                let rows = tile.q_len as usize * slice.len;
                scratch.total.clear(rows, width);
                for chunk in 0..tile.num_chunks {
                    let from = self.partial_row(tile, kv_head, chunk, slice);
                    self.isa.run(MergeStates::new(&mut scratch.total, partials, from, rows, width));
                }
                self.write(tile, kv_head, slice, 0, scratch);
            }
        }
    }

    /// Finishes the states of a KV head in `scratch.total`, from row `first` on, and writes them out token by token.
    fn write(&self, tile: &Tile, kv_head: u32, slice: HeadSlice, first: usize, scratch: &mut Scratch) {
        let Dims { vo, vo_padded, .. } = self.dims();
        let first_row = (self.request(tile).q_start + tile.q_begin) as usize;
        let first_head = kv_head as usize * self.group_size() + slice.begin;
        let value_scale = self.cache.format().v_scale();
        let RowStates { max, sum, out } = &mut scratch.total;
        let (max, sum, out) = (&mut max[first..], &mut sum[first..], &mut out.all_mut()[first * vo_padded..]);
        let num_tokens = tile.q_len as usize;
        // Workers finish the heads of a tile at about the same time: they begin with different tokens.
        let begin = kv_head as usize * num_tokens / self.layer.heads().num_kv_heads as usize;
        for i in 0..num_tokens {
            let token = (begin + i) % num_tokens;
            let rows = token * slice.len..(token + 1) * slice.len;
            for (head, row) in rows.clone().enumerate() {
                let sink = self.layer.sinks().map(|sinks| sinks[first_head + head]);
                (sum[row], max[row]) = finish(Moments { max: max[row], sum: sum[row] }, sink, value_scale);
            }
            let values = &mut out[rows.start * vo_padded..rows.end * vo_padded];
            self.isa.run(Rescale { factors: &sum[rows.clone()], out: &mut *values });
            if i + WRITE_AHEAD < num_tokens {
                let next = first_row + (token + WRITE_AHEAD) % num_tokens;
                self.output.prefetch(self.isa, next, first_head..first_head + slice.len);
            }
            let vectors = values.chunks_exact(vo_padded).map(|row| &row[..vo]);
            self.output.write(first_row + token, first_head, vectors, &max[rows]);
        }
    }
}

/// Calls `work` with every number below `count`, each once, from all workers; with the number that the worker takes next,
/// too, while there are enough for everybody.
pub(crate) fn share_out<W: Send>(workers: &mut [W], count: usize, work: impl Fn(&mut W, usize, Option<usize>) + Sync) {
    let (next, enough) = (AtomicUsize::new(0), 2 * workers.len());
    let claim = || next.fetch_add(1, Ordering::Relaxed);
    let claim_all = |scratch: &mut W| {
        let mut i = claim();
        while i < count {
            let then = (next.load(Ordering::Relaxed) + enough < count).then(claim).filter(|then| *then < count);
            work(scratch, i, then);
            i = then.unwrap_or_else(claim);
        }
    };
    match workers {
        [one] => claim_all(one),
        many => many.par_iter_mut().with_max_len(1).for_each(claim_all),
    }
}

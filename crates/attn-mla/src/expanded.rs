//! Owns the expanded form: the rows of a request become keys and values of each head, a chunk at a time, so that memory
//! does not grow with the prefix; partial states over the chunks merge in ascending order by their LSE.
//!
//! Invariant: chunks begin at multiples of their length, counted from the request's first key, so a row's result
//! depends on its own query and keys alone.

use std::ops::Range;
use std::sync::Arc;

use attn_metadata::{
    AttentionBackend as _, BackendConfig, Batch, BatchLimits, CreateError, HostDevice, Io, Kv, Layer, LayerParams, Lse,
    ModelSpec, PoolShape, RawBatch, Request, RunError, merge_state,
};
use attn_reference::cpu::{CpuBackend, Isa, PackedRows};
use kvpool::{
    Dtype, HostKv, HostTensor, HostTensorMut, KvDtype, KvFormat, KvLayout, KvSliceMut, KvSpec, PageSize, Values,
};
use rayon::ThreadPool;
use rayon::prelude::*;

use crate::backend::NAME;
use crate::project::{HeadProjections, Projections};
use crate::rows::part;
use crate::{MlaFamily, MlaWidths};

/// Bytes of expanded keys and values, about.
const CHUNK_BYTES: usize = 128 << 20;
/// Fewest and most rows that are expanded at a time; multiples of the CPU backend's tiles.
const CHUNK_LENS: [usize; 2] = [128, 2048];
/// Query tokens that attend at a time.
const QUERY_BLOCK: usize = 256;

/// Attention in the expanded form, for one latent layer.
pub(crate) struct Expanded {
    /// Layer 0 as the latent layer is, layer 1 seeing everything.
    attention: CpuBackend,
    widths: MlaWidths,
    num_heads: usize,
    is_causal: bool,
    chunk_len: usize,
    batch: Batch,
    /// One page of keys and values, `[1, num_heads, chunk_len, width]`.
    chunk: Option<HostKv>,
    /// `[chunk_len, latent + rope]`.
    rows: Vec<f32>,
    packed: PackedRows,
    /// `[QUERY_BLOCK, num_heads, nope + rope]`.
    queries: Vec<f32>,
    /// `[QUERY_BLOCK, num_heads, value]`, over one chunk.
    part_out: Vec<f32>,
    part_lse: Vec<Lse>,
    /// `[q_len, num_heads, value]`, over the chunks so far.
    out: Vec<f32>,
    lse: Vec<Lse>,
}

/// The results of a request.
pub(crate) struct ExpandedRows<'a> {
    /// `[q_len, num_heads, value]`.
    pub(crate) outputs: &'a [f32],
    /// `[q_len, num_heads]`.
    pub(crate) lse: &'a [Lse],
}

/// What a request is computed from.
pub(crate) struct ExpandedCall<'a> {
    pub(crate) batch: &'a Batch,
    pub(crate) request: &'a Request,
    pub(crate) layer: usize,
    pub(crate) projections: &'a Projections,
    pub(crate) q: HostTensor<'a>,
    pub(crate) cache: &'a HostKv,
}

impl Expanded {
    /// For a latent layer without window, softcap, sinks and ALiBi.
    pub(crate) fn new(layer: &Layer, isa: Isa, pool: Arc<ThreadPool>) -> Result<Expanded, CreateError> {
        let weights = layer.family_as::<MlaFamily>().expect("a latent layer").weights();
        let (widths, num_heads) = (weights.widths(), weights.num_heads());
        let heads = widths.expanded_heads(num_heads);
        let params = LayerParams { heads, family: None, ..layer.params().clone() };
        let layers = [params.clone(), LayerParams { causal: false, ..params }];
        let layers = layers.map(|params| Layer::new(params).expect("a latent layer is a plain one once expanded"));
        let chunk_len = chunk_len(widths, num_heads);
        let page_size = u32::try_from(chunk_len).ok().and_then(|len| PageSize::new(len).ok());
        let page_size = page_size.expect("a chunk is a small page");
        let model = ModelSpec::new(layers.to_vec(), Dtype::F32, KvDtype::F32, page_size);
        let model = Arc::new(model.expect("there are layers"));
        let config = BackendConfig { model, limits: BatchLimits::NONE, device: HostDevice::default() };
        Ok(Expanded {
            attention: CpuBackend::with_pool(&config, isa, pool)?,
            widths,
            num_heads: num_heads as usize,
            is_causal: layer.is_causal(),
            chunk_len,
            batch: Batch::empty(PoolShape { num_pages: 1, page_size }),
            chunk: None,
            rows: Vec::new(),
            packed: PackedRows::new(isa),
            queries: Vec::new(),
            part_out: Vec::new(),
            part_lse: Vec::new(),
            out: Vec::new(),
            lse: Vec::new(),
        })
    }

    /// Attends for one request.
    pub(crate) fn forward(&mut self, call: &ExpandedCall<'_>) -> Result<ExpandedRows<'_>, RunError> {
        let (q_len, value) = (call.request.q_len as usize, self.widths.value() as usize);
        let states = q_len * self.num_heads;
        self.out.clear();
        self.out.resize(states * value, 0.0);
        self.lse.clear();
        self.lse.resize(states, Lse::EMPTY);
        let kv_len = call.request.kv_len as usize;
        for start in (0..kv_len).step_by(self.chunk_len) {
            let keys = start..kv_len.min(start + self.chunk_len);
            let seeing = self.rows_that_see(call.request, keys.start);
            if seeing < q_len {
                self.expand(call, keys.clone());
                self.attend(call, seeing, &keys)?;
            }
        }
        Ok(ExpandedRows { outputs: &self.out, lse: &self.lse })
    }

    /// The first row of a request that sees a key; `q_len` where none does.
    fn rows_that_see(&self, request: &Request, key: usize) -> usize {
        if !self.is_causal {
            return 0;
        }
        let key = i64::try_from(key).expect("positions fit 32 bits");
        let first = key - request.position(0);
        usize::try_from(first.max(0)).map_or(usize::MAX, |row| row.min(request.q_len as usize))
    }

    /// All rows from `first` on over the keys of the chunk: those that see a part of them, then those that see all.
    fn attend(&mut self, call: &ExpandedCall<'_>, first: usize, keys: &Range<usize>) -> Result<(), RunError> {
        let q_len = call.request.q_len as usize;
        let whole = self.rows_that_see(call.request, keys.end - 1).max(first);
        for (rows, is_partial) in [(first..whole, true), (whole..q_len, false)] {
            for start in rows.clone().step_by(QUERY_BLOCK) {
                let block = start..rows.end.min(start + QUERY_BLOCK);
                let num_keys = if is_partial { visible_keys(call.request, &block, keys) } else { keys.len() };
                self.attend_block(call, &block, num_keys, !is_partial)?;
            }
        }
        Ok(())
    }

    /// Some rows over the first keys of the chunk, merged into the states.
    fn attend_block(
        &mut self,
        call: &ExpandedCall<'_>,
        block: &Range<usize>,
        num_keys: usize,
        is_full: bool,
    ) -> Result<(), RunError> {
        let (num_heads, query, value) = (self.num_heads, self.widths.query() as usize, self.widths.value() as usize);
        let states = block.len() * num_heads;
        self.queries.resize(states * query, 0.0);
        self.part_out.resize(states * value, 0.0);
        self.part_lse.resize(states, Lse::EMPTY);
        let first = call.request.q_start as usize + block.start;
        let q = part(&call.q, first..first + block.len(), 0..query);
        let pool = Arc::clone(self.attention.pool());
        pool.install(|| {
            self.queries.par_chunks_mut(num_heads * query).enumerate().for_each(|(row, queries)| {
                queries.chunks_exact_mut(query).enumerate().for_each(|(head, out)| q.read(row, head, out));
            });
        });
        let narrow = |x: usize| i32::try_from(x).expect("a block of a chunk is small");
        let raw = RawBatch {
            num_rows: block.len(),
            qo_indptr: &[0, narrow(block.len())],
            kv_indptr: &[0, 1],
            kv_indices: &[0],
            kv_last_page_len: &[narrow(num_keys)],
            slot_mapping: None,
            custom_mask: None,
        };
        self.batch.set(&raw).expect("one request over one page");
        let failed = |source| RunError::Environment { backend: NAME, layer: call.layer, source };
        let prepared = self.attention.prepare_metadata(&self.batch).map_err(|error| failed(Box::new(error)))?;
        let io = Io {
            q: HostTensor::packed(&self.queries, [block.len(), num_heads, query]).expect("packed"),
            kv: Kv::Attend { cache: self.chunk.as_ref().expect("a chunk was expanded") },
            side: None,
            out: HostTensorMut::packed(&mut self.part_out, [block.len(), num_heads, value]).expect("packed"),
            lse: Some(self.part_lse.as_mut_slice()),
        };
        self.attention.forward(&prepared, usize::from(is_full), io)?;
        pool.install(|| self.merge(block));
        Ok(())
    }

    /// Merges the states of a block over the chunk into those over the chunks before it.
    fn merge(&mut self, block: &Range<usize>) {
        let (num_heads, value) = (self.num_heads, self.widths.value() as usize);
        let states = block.start * num_heads..block.end * num_heads;
        let out = self.out[states.start * value..states.end * value].par_chunks_mut(num_heads * value);
        let lse = self.lse[states].par_chunks_mut(num_heads);
        let part = self.part_out.par_chunks(num_heads * value).zip(self.part_lse.par_chunks(num_heads));
        out.zip(lse).zip(part).for_each(|((out, lse), (part_out, part_lse))| {
            merge_state(out, lse, part_out, part_lse, value).expect("states of one row");
        });
    }

    /// Makes keys and values of some rows.
    fn expand(&mut self, call: &ExpandedCall<'_>, keys: Range<usize>) {
        let (row, latent) = (self.widths.row() as usize, self.widths.latent() as usize);
        self.read_rows(call, &keys);
        let rows = &self.rows[..keys.len() * row];
        let rows = HostTensor::packed(rows, [keys.len(), 1, row]).expect("rows of the chunk");
        self.packed.pack(part(&rows, 0..keys.len(), 0..latent), 0);
        let (widths, num_heads, chunk_len) = (self.widths, self.num_heads, self.chunk_len);
        let (query, value) = (widths.query() as usize, widths.value() as usize);
        let chunk = self.chunk.get_or_insert_with(|| chunk_cache(widths, num_heads, chunk_len));
        let KvSliceMut::F32(data) = chunk.buffer_mut() else { unreachable!("the chunk is in f32") };
        let (all_keys, all_values) = data.split_at_mut(num_heads * chunk_len * query);
        let heads = all_keys.par_chunks_mut(chunk_len * query).zip(all_values.par_chunks_mut(chunk_len * value));
        let packed = &self.packed;
        self.attention.pool().install(|| {
            heads.zip(&call.projections.heads).for_each(|((keys, values), weights)| {
                expand_head(weights, packed, &rows, widths, keys, values);
            });
        });
    }

    /// Reads rows of the cache as real values.
    fn read_rows(&mut self, call: &ExpandedCall<'_>, keys: &Range<usize>) {
        let row = self.widths.row() as usize;
        let (page_size, scale) = (call.batch.page_size().get(), call.cache.format().k_scale());
        self.rows.resize(self.rows.len().max(keys.len() * row), 0.0);
        let first = u32::try_from(keys.start).expect("positions fit 32 bits");
        let num_keys = u32::try_from(keys.len()).expect("a chunk is small");
        let plane = call.cache.k();
        self.attention.pool().install(|| {
            let rows = self.rows[..keys.len() * row].par_chunks_mut(row).zip(first..first + num_keys);
            rows.for_each(|(out, position)| {
                plane.read(call.batch.page_of(call.request, position), position % page_size, 0, out);
                if scale.to_bits() != 1.0f32.to_bits() {
                    out.iter_mut().for_each(|x| *x *= scale);
                }
            });
        });
    }
}

/// Keys of a chunk that the last row of a causal block sees; it sees one at least.
fn visible_keys(request: &Request, block: &Range<usize>, keys: &Range<usize>) -> usize {
    let last = u32::try_from(block.end - 1).expect("rows are counted in 32 bits");
    let end = usize::try_from(request.position(last) + 1).expect("a row that sees a key");
    end.min(keys.end) - keys.start
}

/// Keys `[rows, nope + rope]` and values `[rows, value]` of one head.
fn expand_head(
    weights: &HeadProjections,
    packed: &PackedRows,
    rows: &HostTensor<'_>,
    widths: MlaWidths,
    keys: &mut [f32],
    values: &mut [f32],
) {
    let (query, nope, latent) = (widths.query() as usize, widths.nope() as usize, widths.latent() as usize);
    weights.key.multiply(packed, keys, query);
    weights.value.multiply(packed, values, widths.value() as usize);
    let rope = part(rows, 0..rows.rows(), latent..widths.row() as usize);
    for (i, key) in keys.chunks_exact_mut(query).take(rows.rows()).enumerate() {
        rope.read(i, 0, &mut key[nope..]);
    }
}

/// Rows that are expanded at a time: as many as fit the memory for a chunk.
fn chunk_len(widths: MlaWidths, num_heads: u32) -> usize {
    let row_bytes = size_of::<f32>() * num_heads as usize * (widths.query() + widths.value()) as usize;
    let [least, most] = CHUNK_LENS;
    (CHUNK_BYTES / row_bytes / least * least).clamp(least, most)
}

fn chunk_cache(widths: MlaWidths, num_heads: usize, chunk_len: usize) -> HostKv {
    let num_kv_heads = u32::try_from(num_heads).expect("heads of a layer");
    let spec = KvSpec { num_kv_heads, head_dim_k: widths.query(), values: Values::Own(widths.value()) };
    let page_size = u32::try_from(chunk_len).ok().and_then(|len| PageSize::new(len).ok()).expect("a small page");
    HostKv::for_spec(spec, 1, page_size, KvLayout::Hnd, KvFormat::F32).expect("a chunk fits memory")
}

//! Token-sparse decode of an absorbed latent layer, as DeepSeek's sparse attention has it, from two crates that do not
//! know each other: a selector over the stages of `attn-sparse` chooses tokens, `attn-mla` attends to their slots.
//!
//! What passes between them is a list of slots: the ids of a [`Selection`] are tokens counted from the request's start,
//! an [`IndexList`] names places in the pool.
//!
//! ```text
//! cargo run --package engine --no-default-features --example token_sparse
//! ```
#![allow(clippy::print_stdout)]

#[path = "../../attn-sparse/examples/token_selector/selector.rs"]
mod selector;

use std::error::Error;

use attn_metadata::{Batch, HostDevice, Layer, LayerParams, PoolShape, RawBatch};
use attn_mla::{IndexList, MlaWidths, Scale, SparseAttention, absorbed_params};
use attn_reference::cpu::Isa;
use attn_reference::cpu::tiles::Workers;
use attn_sparse::cpu::SparseAttend;
use attn_sparse::stage::{StageError, Step, rows_of};
use attn_sparse::{Pipeline, Selection};
use kvpool::{Dtype, HostKv, HostTensor, HostTensorMut, KvFormat, KvLayout, KvSpec, PageSize, Slot, Values};
use selector::{TokenIndex, TokenInput, TokenSelect};

const NUM_HEADS: u32 = 16;
const INDEX_HEADS: usize = 4;
const INDEX_DIM: usize = 16;
const TOPK: usize = 64;
const PAGE_SIZE: u32 = 16;
/// Tokens in the cache of each request: more than a row may take, and fewer.
const KV_LENS: [usize; 3] = [400, 40, 150];

/// The slots of the tokens that each row selected, `[rows, width]`, −1 where there is none.
fn slots_of(batch: &Batch, selection: &Selection) -> Vec<i32> {
    let (page_size, width) = (batch.page_size(), selection.width());
    let mut slots = vec![-1; selection.num_rows() * width];
    for (request, row, _) in rows_of(batch, 0..selection.num_rows()) {
        for (slot, id) in slots[row * width..].iter_mut().zip(selection.ids(row, 0)) {
            let token = id.unsigned_abs(); // ids are not negative
            let page = batch.page_of(request, token);
            *slot = Slot::new(page, token % page_size.get(), page_size).expect("a slot of the pool").raw();
        }
    }
    slots
}

fn main() -> Result<(), Box<dyn Error>> {
    let widths = MlaWidths::new(128, 16, 32, 32)?;
    let layer = Layer::new(absorbed_params(widths, NUM_HEADS, Scale::of(widths)))?;
    let batch = batch()?;
    let (rows, row, latent) = (KV_LENS.len(), widths.row() as usize, widths.latent() as usize);
    let cache = filled(&batch, layer.kv(), 1)?;
    let index_spec = KvSpec { num_kv_heads: 1, head_dim_k: u32::try_from(INDEX_DIM)?, values: Values::None };
    let index_cache = filled(&batch, index_spec, 2)?;
    let heads = NUM_HEADS as usize;
    let q = noise(3, rows * heads * row);
    let (index_q, weights) = (noise(4, rows * INDEX_HEADS * INDEX_DIM), noise(5, rows * INDEX_HEADS));

    // Which tokens: index and select.
    let mut workers = Workers::new(Isa::detect(), None, "example")?;
    let mut step = Step { batch: &batch, num_rows: rows, workers: &mut workers };
    let (index, select) = (TokenIndex::new(INDEX_HEADS, INDEX_DIM), TokenSelect { topk: TOPK });
    let attend = SparseAttend::new(layer.heads());
    let mut pipeline = Pipeline::new(index, select, attend, batch.page_size(), 1).map_err(StageError::Refused)?;
    let mut selection = pipeline.new_selection();
    let mut input = TokenInput {
        q: HostTensor::packed(&index_q[..], [rows, INDEX_HEADS, INDEX_DIM])?,
        weights: HostTensor::packed(&weights[..], [rows, INDEX_HEADS, 1])?,
        cache: &index_cache,
    };
    pipeline.select(&mut step, &mut input, &mut selection)?;

    // Attention to them: the list is checked once more, where it becomes an index list.
    let mut list = IndexList::new();
    list.set(&slots_of(&batch, &selection), selection.width(), None, cache.shape().num_slots())?;
    let mut attention = SparseAttention::new(&layer, KvFormat::F32, Dtype::F32, HostDevice::default())?;
    let q = HostTensor::packed(&q[..], [rows, heads, row])?;
    let mut out = vec![0.0f32; rows * heads * latent];
    let mut tensor = HostTensorMut::packed(&mut out[..], [rows, heads, latent])?;
    attention.attend(&q, &cache, &list, &mut tensor, None)?;

    let mut worst = 0.0f64;
    for (row, request) in batch.requests().iter().enumerate() {
        let ids = selection.ids(row, 0);
        assert_eq!(ids.len(), TOPK.min(request.kv_len as usize), "short requests take all that they have");
        for head in 0..heads {
            let expected = expected(&batch, &cache, layer.params(), (&q, row, head), ids);
            let got = &out[(row * heads + head) * latent..][..latent];
            worst = got.iter().zip(expected).map(|(g, e)| (f64::from(*g) - e).abs()).fold(worst, f64::max);
        }
        println!("row {row} sees {} tokens and attends to {}: {:?} ...", request.kv_len, ids.len(), &ids[..6]);
    }
    println!("largest error against float64: {worst:.1e}");
    assert!(worst < 1e-5, "attention to the selected tokens");
    Ok(())
}

/// One new token of each request, over pages in a scattered order.
fn batch() -> Result<Batch, Box<dyn Error>> {
    let page_size = PageSize::new(PAGE_SIZE)?;
    let (mut qo_indptr, mut kv_indptr, mut last) = (vec![0], vec![0], Vec::new());
    for kv_len in KV_LENS {
        qo_indptr.push(i32::try_from(qo_indptr.len())?);
        let begin = kv_indptr.last().copied().unwrap_or(0);
        kv_indptr.push(begin + i32::try_from(page_size.pages_for(kv_len))?);
        last.push(i32::try_from(page_size.last_page_len(kv_len))?);
    }
    let num_pages = kv_indptr.last().copied().unwrap_or(0);
    // 7 has no divisor in common with the number of pages, 38.
    let pages: Vec<i32> = (0..num_pages).map(|page| page * 7 % num_pages).collect();
    let raw = RawBatch {
        num_rows: KV_LENS.len(),
        qo_indptr: &qo_indptr,
        kv_indptr: &kv_indptr,
        kv_indices: &pages,
        kv_last_page_len: &last,
        slot_mapping: None,
        custom_mask: None,
    };
    Ok(Batch::from_raw(PoolShape { num_pages: num_pages.unsigned_abs(), page_size }, &raw)?)
}

/// A cache with a random row for each token of the batch.
fn filled(batch: &Batch, spec: KvSpec, seed: u64) -> Result<HostKv, Box<dyn Error>> {
    let (page_size, width) = (batch.page_size(), spec.head_dim_k as usize);
    let mut cache = HostKv::for_spec(spec, batch.pool().num_pages, page_size, KvLayout::Nhd, KvFormat::F32)?;
    for (request, number) in batch.requests().iter().zip(0u64..) {
        let tokens = request.kv_len as usize;
        let slot = |token: u32| Slot::new(batch.page_of(request, token), token % page_size.get(), page_size);
        let slots = (0..request.kv_len).map(slot).collect::<Option<Vec<_>>>().ok_or("slots of the pool")?;
        let rows = noise(seed + 10 * (number + 1), tokens * width);
        cache.append(&slots, &HostTensor::packed(&rows[..], [tokens, 1, width])?, None)?;
    }
    Ok(cache)
}

/// Attention of a head to the given tokens, in float64.
fn expected(
    batch: &Batch,
    cache: &HostKv,
    params: &LayerParams,
    (q, row, head): (&HostTensor<'_>, usize, usize),
    ids: &[i32],
) -> Vec<f64> {
    let (request, page_size) = (&batch.requests()[row], batch.page_size());
    let read = |id: &i32| {
        let token = id.unsigned_abs();
        let slot = Slot::new(batch.page_of(request, token), token % page_size.get(), page_size);
        let mut key = vec![0.0f32; params.heads.head_dim_qk as usize];
        cache.read_k(slot.expect("a slot of the pool"), 0, &mut key);
        key
    };
    let keys: Vec<Vec<f32>> = ids.iter().map(read).collect();
    let mut query = vec![0.0f32; params.heads.head_dim_qk as usize];
    q.read(row, head, &mut query);
    let dot = |key: &Vec<f32>| key.iter().zip(&query).map(|(k, q)| f64::from(*k) * f64::from(*q)).sum::<f64>();
    let weights: Vec<f64> = keys.iter().map(|key| (dot(key) * f64::from(params.sm_scale)).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let column = |c: usize| keys.iter().zip(&weights).map(|(key, w)| w / sum * f64::from(key[c])).sum();
    (0..params.heads.head_dim_vo as usize).map(column).collect()
}

/// Reproducible numbers in −1..1.
fn noise(seed: u64, len: usize) -> Vec<f32> {
    let mut rng = attn_conformance::Rng::new(&[seed]);
    (0..len).map(|_| rng.normal() / 3.5).collect()
}

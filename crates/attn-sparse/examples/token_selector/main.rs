//! A selector of single tokens, as DSA has it: written against the public boundary alone.
//!
//! The selector is in `selector.rs`. The layer is an absorbed latent one: one KV head, values in the first columns of the
//! keys. Attention to single tokens needs nothing new: [`SparseAttend`] takes any unit. That `attn-mla` attends to the
//! same selection is shown by an example of `engine`, `token_sparse`.
//!
//! ```text
//! cargo run --package attn-sparse --example token_selector
//! ```
#![allow(clippy::print_stdout)]

mod selector;

use std::error::Error;

use attn_metadata::{Batch, HeadShape, Lse, PoolShape, RawBatch};
use attn_reference::cpu::Isa;
use attn_reference::cpu::tiles::Workers;
use attn_sparse::Pipeline;
use attn_sparse::cpu::SparseAttend;
use attn_sparse::selection::TAIL;
use attn_sparse::stage::{AttendInput, AttendOutput, StageError, Step};
use kvpool::{HostKv, HostTensor, HostTensorMut, KvFormat, KvLayout, KvSpec, PageSize, Slot, Values};
use selector::{TokenIndex, TokenInput, TokenSelect};

const INDEX_HEADS: usize = 4;
const INDEX_DIM: usize = 16;
const TOPK: usize = 32;
const LATENT: u32 = 24;
const VALUE: u32 = 16;
const HEADS: HeadShape = HeadShape { num_qo_heads: 8, num_kv_heads: 1, head_dim_qk: LATENT, head_dim_vo: VALUE };

fn main() -> Result<(), Box<dyn Error>> {
    let page_size = PageSize::new(16)?;
    let pool = PoolShape { num_pages: 20, page_size };
    let tokens = 300usize;
    let pages: Vec<i32> = (0..19).map(|page| (page * 7) % 19).collect();
    let slot = |token: usize| Slot::from_raw(pages[token / 16] * 16 + i32::try_from(token % 16).unwrap_or(0));
    let slots: Vec<Slot> = (0..tokens).map(slot).collect();
    let latent = KvSpec { num_kv_heads: 1, head_dim_k: LATENT, values: Values::InKeys(VALUE) };
    let index = KvSpec { num_kv_heads: 1, head_dim_k: 16, values: Values::None };
    let new_cache = |spec| HostKv::for_spec(spec, pool.num_pages, page_size, KvLayout::Nhd, KvFormat::F32);
    let (mut cache, mut index_cache) = (new_cache(latent)?, new_cache(index)?);
    let keys = noise(1, tokens * LATENT as usize);
    let index_keys = noise(2, tokens * INDEX_DIM);
    // Stored first, then scored: a row sees its own key.
    cache.append(&slots, &HostTensor::packed(&keys[..], [tokens, 1, LATENT as usize])?, None)?;
    index_cache.append(&slots, &HostTensor::packed(&index_keys[..], [tokens, 1, INDEX_DIM])?, None)?;
    let rows = 2;
    let batch = Batch::from_raw(
        pool,
        &RawBatch {
            num_rows: rows,
            qo_indptr: &[0, 2],
            kv_indptr: &[0, 19],
            kv_indices: &pages,
            kv_last_page_len: &[page_size.last_page_len(tokens).cast_signed()],
            slot_mapping: None,
            custom_mask: None,
        },
    )?;

    let (q, index_q, weights) = (noise(3, rows * 8 * 24), noise(4, rows * INDEX_HEADS * INDEX_DIM), noise(5, rows * 4));
    let mut workers = Workers::new(Isa::detect(), None, "example")?;
    let mut step = Step { batch: &batch, num_rows: rows, workers: &mut workers };
    let attend = SparseAttend::new(HEADS);
    let mut pipeline =
        Pipeline::new(TokenIndex::new(INDEX_HEADS, INDEX_DIM), TokenSelect { topk: TOPK }, attend, page_size, 1)
            .map_err(StageError::Refused)?;
    let mut selection = pipeline.new_selection();
    let mut input = TokenInput {
        q: HostTensor::packed(&index_q[..], [rows, INDEX_HEADS, INDEX_DIM])?,
        weights: HostTensor::packed(&weights[..], [rows, INDEX_HEADS, 1])?,
        cache: &index_cache,
    };
    pipeline.select(&mut step, &mut input, &mut selection)?;
    let mut out = vec![0.0f32; rows * 8 * VALUE as usize];
    let mut lse = vec![Lse::EMPTY; rows * 8];
    let q = HostTensor::packed(&q[..], [rows, 8, LATENT as usize])?;
    let output =
        AttendOutput { out: HostTensorMut::packed(&mut out[..], [rows, 8, VALUE as usize])?, lse: Some(&mut lse[..]) };
    pipeline.attend(&mut step, &AttendInput { q, cache: &cache, sm_scale: 0.2 }, &selection, output)?;

    // The same in float64, over the selected tokens alone.
    let mut worst = 0.0f64;
    for row in 0..rows {
        let ids = selection.ids(row, 0);
        assert!(ids.len() == TOPK && ids.is_sorted() && !ids.contains(&TAIL));
        for head in 0..8 {
            let expected = expected(&q, row, head, ids, &keys);
            let got = &out[(row * 8 + head) * VALUE as usize..][..VALUE as usize];
            worst = got.iter().zip(expected).map(|(g, e)| (f64::from(*g) - e).abs()).fold(worst, f64::max);
        }
        println!("row {row} sees {} tokens and attends to {}: {:?} ...", selection.visible(row), ids.len(), &ids[..8]);
    }
    println!("largest error against float64: {worst:.1e}");
    assert!(worst < 1e-5, "attention to the selected tokens");
    Ok(())
}

fn expected(q: &HostTensor<'_>, row: usize, head: usize, ids: &[i32], keys: &[f32]) -> Vec<f64> {
    let key = |id: i32| &keys[id.unsigned_abs() as usize * LATENT as usize..][..LATENT as usize];
    let mut query = vec![0.0; LATENT as usize];
    q.read(row, head, &mut query);
    let score = |id: &i32| key(*id).iter().zip(&query).map(|(k, q)| f64::from(*k) * f64::from(*q)).sum::<f64>() * 0.2;
    let weights: Vec<f64> = ids.iter().map(|id| score(id).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let column = |c: usize| ids.iter().zip(&weights).map(|(id, w)| w / sum * f64::from(key(*id)[c])).sum();
    (0..VALUE as usize).map(column).collect()
}

/// Reproducible numbers in −1..1.
fn noise(seed: u64, len: usize) -> Vec<f32> {
    let mut rng = attn_conformance::Rng::new(&[seed]);
    (0..len).map(|_| rng.normal() / 3.5).collect()
}

//! A selector that reads another branch's result, as NSA has it: written against the public boundary alone.
//!
//! Three branches. *Compressed*: windows of keys and values, averaged, one row each `STRIDE` tokens, written when a window
//! is complete; every query attends to those. *Selected*: a block's score is the sum of the compressed branch's
//! probabilities over the windows that overlap it and over the query heads of a KV head; the first block and the last two
//! are forced. *Window*: the last tokens. The model adds the three, weighted by gates; here each gate is 1/3.
//! The selected branch is this crate's [`SparseAttend`]; the window is a selection too, of tokens.
//!
//! ```text
//! cargo run --package attn-sparse --example compressed_selector
//! ```
#![allow(clippy::print_stdout)]

use std::error::Error;

use attn_metadata::{Batch, HeadShape, PoolShape, RawBatch};
use attn_reference::cpu::Isa;
use attn_reference::cpu::tiles::Workers;
use attn_sparse::cpu::{BlockSelect, SparseAttend};
use attn_sparse::stage::{Attend, AttendInput, AttendOutput, Index, Scores, StageError, Step, rows_of};
use attn_sparse::{BlockParams, Fanout, Pipeline, Selection, SparseParams, Unit};
use kvpool::{HostKv, HostTensor, HostTensorMut, KvFormat, KvLayout, KvSpec, PageSize, Slot};

const HEADS: HeadShape = HeadShape::new(4, 2, 16);
const DIM: usize = 16;
/// Tokens of a compressed window, and tokens between two of them.
const WINDOW: usize = 8;
const STRIDE: usize = 4;
const BLOCKS: BlockParams = BlockParams { block_size: 16, topk: 6, init_blocks: 1, local_blocks: 2 };
const SLIDING: usize = 24;
const SM_SCALE: f32 = 0.25;

/// The side cache: averaged keys and values, `[windows, kv heads, dim]`. One row a stride, not one a token.
struct Compressed {
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Compressed {
    fn new(keys: &[f32], values: &[f32]) -> Self {
        let width = HEADS.num_kv_heads as usize * DIM;
        let average = |data: &[f32]| -> Vec<f32> {
            let tokens = data.len() / width;
            let windows = (0..tokens).step_by(STRIDE).filter(|start| start + WINDOW <= tokens);
            windows
                .flat_map(|start| {
                    (0..width).map(move |c| {
                        let column = (start..start + WINDOW).map(|token| data[token * width + c]);
                        column.sum::<f32>() / WINDOW as f32
                    })
                })
                .collect()
        };
        Self { keys: average(keys), values: average(values) }
    }

    /// Windows that are complete where a row sees this many tokens.
    const fn visible(tokens: usize) -> usize {
        if tokens < WINDOW { 0 } else { (tokens - WINDOW) / STRIDE + 1 }
    }

    fn row(data: &[f32], window: usize, kv_head: usize) -> &[f32] {
        &data[(window * HEADS.num_kv_heads as usize + kv_head) * DIM..][..DIM]
    }
}

/// Scores blocks by the probabilities of the compressed branch, and keeps that branch's output.
struct CompressedIndex;

struct CompressedInput<'a> {
    q: HostTensor<'a>,
    compressed: &'a Compressed,
    /// The branch's own output, `[rows, query heads, dim]`.
    out: &'a mut [f32],
}

impl Index for CompressedIndex {
    type Input<'a> = CompressedInput<'a>;

    fn num_heads(&self) -> usize {
        HEADS.num_kv_heads as usize // summed over the query heads of each
    }

    fn unit(&self) -> Unit {
        Unit::block(BLOCKS.block_size)
    }

    fn score(
        &mut self,
        step: &mut Step<'_>,
        input: &mut CompressedInput<'_>,
        out: &mut Scores,
    ) -> Result<(), StageError> {
        let mut query = [0.0; DIM];
        for (_, row, visible) in rows_of(step.batch, out.rows()) {
            let windows = Compressed::visible(visible as usize);
            for head in 0..HEADS.num_qo_heads as usize {
                let kv_head = head / HEADS.group_size() as usize;
                input.q.read(row, head, &mut query);
                let key = |window| Compressed::row(&input.compressed.keys, window, kv_head);
                let score = |window| key(window).iter().zip(&query).map(|(k, q)| k * q).sum::<f32>() * SM_SCALE;
                let weights: Vec<f32> = (0..windows).map(|window| score(window).exp()).collect();
                let sum: f32 = weights.iter().sum();
                let target = &mut input.out[(row * HEADS.num_qo_heads as usize + head) * DIM..][..DIM];
                target.fill(0.0);
                let scores = out.get_mut(row, kv_head);
                if head.is_multiple_of(HEADS.group_size() as usize) {
                    scores.fill(0.0);
                }
                for (window, weight) in weights.iter().enumerate() {
                    let probability = weight / sum;
                    let value = Compressed::row(&input.compressed.values, window, kv_head);
                    target.iter_mut().zip(value).for_each(|(o, v)| *o += probability * v);
                    let block_size = BLOCKS.block_size as usize;
                    let (first, last) = (window * STRIDE / block_size, (window * STRIDE + WINDOW - 1) / block_size);
                    scores.iter_mut().take(last + 1).skip(first).for_each(|score| *score += probability);
                }
            }
        }
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let page_size = PageSize::new(16)?;
    let pool = PoolShape { num_pages: 40, page_size };
    let (tokens, rows) = (600usize, 2usize);
    let pages: Vec<i32> = (0..38).map(|page| (page * 15) % 38).collect();
    let slot = |token: usize| Slot::from_raw(pages[token / 16] * 16 + i32::try_from(token % 16).unwrap_or(0));
    let slots: Vec<Slot> = (0..tokens).map(slot).collect();
    let width = HEADS.num_kv_heads as usize * DIM;
    let (keys, values) = (noise(1, tokens * width), noise(2, tokens * width));
    let spec = KvSpec::new(HEADS.num_kv_heads, 16);
    let mut cache = HostKv::for_spec(spec, pool.num_pages, page_size, KvLayout::Nhd, KvFormat::F32)?;
    let shape = [tokens, HEADS.num_kv_heads as usize, DIM];
    cache.append(&slots, &HostTensor::packed(&keys[..], shape)?, Some(&HostTensor::packed(&values[..], shape)?))?;
    let compressed = Compressed::new(&keys, &values);
    let raw = RawBatch {
        num_rows: rows,
        qo_indptr: &[0, 2],
        kv_indptr: &[0, 38],
        kv_indices: &pages,
        kv_last_page_len: &[page_size.last_page_len(tokens).cast_signed()],
        slot_mapping: None,
        custom_mask: None,
    };
    let batch = Batch::from_raw(pool, &raw)?;
    let q = noise(3, rows * HEADS.num_qo_heads as usize * DIM);
    let q = HostTensor::packed(&q[..], [rows, HEADS.num_qo_heads as usize, DIM])?;
    let mut workers = Workers::new(Isa::detect(), None, "example")?;
    let mut step = Step { batch: &batch, num_rows: rows, workers: &mut workers };

    // Two forced blocks at the end, one at the start, inside the budget: this crate's block selector as it is.
    let select = BlockSelect::new(&SparseParams::new(BLOCKS, HEADS.num_kv_heads, 16), &HEADS);
    let mut pipeline = Pipeline::new(CompressedIndex, select, SparseAttend::new(HEADS), page_size, HEADS.num_kv_heads)
        .map_err(StageError::Refused)?;
    let mut selection = pipeline.new_selection();
    let len = rows * HEADS.num_qo_heads as usize * DIM;
    let (mut branch, mut selected, mut sliding) = (vec![0.0; len], vec![0.0; len], vec![0.0; len]);
    let mut input = CompressedInput { q, compressed: &compressed, out: &mut branch };
    pipeline.select(&mut step, &mut input, &mut selection)?;
    let attend = AttendInput { q, cache: &cache, sm_scale: SM_SCALE };
    pipeline.attend(&mut step, &attend, &selection, output(&mut selected, rows)?)?;

    // The third branch: the last tokens, as a selection that needs no scores.
    let mut window = Selection::new(Unit::Token, Fanout::Shared);
    window.reset_for(&batch, SLIDING);
    for row in 0..rows {
        let end = i32::try_from(window.visible(row))?;
        let ids: Vec<i32> = ((end - i32::try_from(SLIDING)?).max(0)..end).collect();
        window.set(row, 0, &ids)?;
    }
    SparseAttend::new(HEADS).attend(&mut step, &attend, &window, output(&mut sliding, rows)?)?;

    for row in 0..rows {
        for kv_head in 0..HEADS.num_kv_heads as usize {
            let ids = selection.ids(row, kv_head);
            println!("row {row}, KV head {kv_head}: blocks {ids:?}");
            assert!(ids.len() == BLOCKS.topk as usize && ids.starts_with(&[0]) && ids.ends_with(&[36, 37]));
        }
    }
    let combined: Vec<f32> = branch.iter().zip(&selected).zip(&sliding).map(|((a, b), c)| (a + b + c) / 3.0).collect();
    let worst = combined.iter().fold(0.0f32, |worst, x| worst.max(x.abs()));
    println!("{} outputs of three branches, none above {worst:.2}", combined.len());
    assert!(worst.is_finite() && worst <= 1.0, "an average of values is no larger than they are");
    Ok(())
}

fn output(data: &mut [f32], rows: usize) -> Result<AttendOutput<'_>, kvpool::ShapeError> {
    let out = HostTensorMut::packed(data, [rows, HEADS.num_qo_heads as usize, DIM])?;
    Ok(AttendOutput { out, lse: None })
}

/// Reproducible numbers in −1..1.
fn noise(seed: u64, len: usize) -> Vec<f32> {
    let mut rng = attn_conformance::Rng::new(&[seed]);
    (0..len).map(|_| rng.normal() / 3.5).collect()
}

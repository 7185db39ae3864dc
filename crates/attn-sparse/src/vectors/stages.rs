//! Runs the first two stages of the CPU backend on a case: scores and selections, which the waist does not show.

use attn_metadata::{Batch, HeadShape};
use attn_reference::cpu::Isa;
use attn_reference::cpu::tiles::Workers;
use kvpool::HostKv;

use super::file::Cube;
use super::problem::Problem;
use crate::cpu::{BlockIndex, BlockIndexInput, BlockSelect, SparseAttend};
use crate::params::SparseParams;
use crate::pipeline::Pipeline;
use crate::select::BlockSelector;
use crate::selection::{Selection, TAIL};
use crate::stage::{Index, Scores, Step};

/// What the first two stages give.
#[derive(Debug)]
pub(crate) struct Stages {
    pub(crate) block_scores: Cube<f64>,
    pub(crate) by_index_head: Cube<i32>,
    pub(crate) by_kv_head: Cube<i32>,
    pub(crate) selection: Selection,
}

/// Scores and selects for a batch whose new index keys are in the cache.
pub(crate) fn run(problem: &Problem, index_cache: &HostKv, params: &SparseParams, heads: HeadShape) -> Stages {
    let mut workers = Workers::new(Isa::detect(), Some(2), "vectors").expect("two threads");
    let mut step = Step { batch: &problem.batch, num_rows: problem.batch.num_rows() as usize, workers: &mut workers };
    let mut input = BlockIndexInput { q: problem.index_q.tensor(), cache: index_cache };
    let mut pipeline = Pipeline::new(
        BlockIndex::new(*params),
        BlockSelect::new(params, &heads),
        SparseAttend::new(heads),
        problem.page_size,
        heads.num_kv_heads,
    )
    .expect("the CPU attends to every selection of blocks");
    let mut selection = pipeline.new_selection();
    pipeline.select(&mut step, &mut input, &mut selection).expect("a checked case");

    let used = problem.batch.num_used_rows() as usize;
    let mut index = BlockIndex::new(*params);
    let mut scores = Scores::default();
    let units = (0..used).map(|row| selection.unit().count(selection.visible(row)) as usize);
    scores.reset(0, index.num_heads(), units);
    index.score(&mut step, &mut input, &mut scores).expect("a checked case");
    let mut selector = BlockSelector::new(params.blocks);
    let heads_of = |row: usize| (0..params.num_index_heads as usize).map(move |head| (row, head));
    let widened = |x: &[f32]| x.iter().copied().map(f64::from).collect();
    let mut padded = |(row, head)| {
        let mut ids = selector.select(scores.get(row, head)).to_vec();
        ids.resize(params.blocks.topk as usize, TAIL);
        ids
    };
    Stages {
        block_scores: (0..used).map(|row| heads_of(row).map(|(r, h)| widened(scores.get(r, h))).collect()).collect(),
        by_index_head: (0..used).map(|row| heads_of(row).map(&mut padded).collect()).collect(),
        by_kv_head: ids(&problem.batch, &selection),
        selection,
    }
}

/// Ids with their tail of the rows of a batch's requests.
fn ids(batch: &Batch, selection: &Selection) -> Cube<i32> {
    let sets = |row| (0..selection.fanout().num_sets()).map(move |set| (row, set));
    let of_row = |row| sets(row).map(|(row, set)| selection.padded(row, set).to_vec()).collect();
    (0..batch.num_used_rows() as usize).map(of_row).collect()
}

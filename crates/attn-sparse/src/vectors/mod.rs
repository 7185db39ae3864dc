//! Checks implementations against files of test vectors: attention, selection, union and configuration cases.
//!
//! Two kinds of subjects: the oracle itself, in float64, and any backend of the waist, in `f32`. A backend's outputs
//! are compared through the waist; scores and selections, which the waist does not show, are those of the stages that
//! this crate's CPU backends share.

mod file;
mod oracle;
mod outcome;
mod problem;
mod stages;

use std::sync::Arc;

use attn_metadata::{
    BackendConfig, BackendEntry, BatchLimits, BoxedBackend, CreateError, HeadShape, Host, HostDevice, Io, Kv, Layer,
    LayerParams, ModelSpec, Side,
};
use attn_metadata::{FamilyRef, RunError};
use kvpool::{Dtype, HostTensorMut, KvDtype};
use thiserror::Error;

pub use file::{VectorError, VectorFile};
pub use outcome::Difference;

use crate::family::SparseFamily;
use crate::params::{BlockParams, SparseParams};
use crate::plan::{DecodePlans, PlanLimits};
use crate::select::{BlockSelector, unite};
use crate::selection::TAIL;
use crate::table::PageTable;
use file::{Case, ConfigCase, Cube, DecodeMeta, DenseDecode, SelectionCase};
use outcome::{Outcome, compare, number, row, whole};
use problem::Problem;

/// Tolerance of the oracle, relative to the greater of 1 and the expected value.
const ORACLE_TOLERANCE: f64 = 1e-12;
/// Tolerance of backends in `f32`.
const F32_TOLERANCE: f64 = 2e-5;

/// What is checked.
#[derive(Clone, Copy, Debug)]
pub enum Subject {
    /// The oracle, in float64.
    Oracle,
    /// A backend, through the waist.
    Backend(BackendEntry<Host>),
}

/// How one case went.
#[derive(Debug)]
pub struct CaseReport {
    /// The kind of the case, and its name or place.
    pub name: String,
    /// What happened.
    pub outcome: CaseOutcome,
}

/// What happened to a case.
#[derive(Debug)]
pub enum CaseOutcome {
    /// Everything as the file says.
    Passed,
    /// The backend cannot run the case, and says so.
    Refused(String),
    /// The first difference, or a call that failed.
    Failed(Failure),
}

/// Why a case failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Failure {
    /// A result differs.
    #[error("{0}")]
    Difference(Difference),
    /// A call failed.
    #[error("a call failed")]
    Call(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl From<Difference> for Failure {
    fn from(difference: Difference) -> Self {
        Self::Difference(difference)
    }
}

impl VectorFile {
    /// Checks a subject against every case.
    ///
    /// # Errors
    /// [`VectorError`] where a case describes no layer.
    pub fn check(&self, subject: &Subject) -> Result<Vec<CaseReport>, VectorError> {
        let mut reports = Vec::new();
        for case in &self.cases {
            let report = |outcome| CaseReport { name: format!("attention {}", case.name), outcome };
            reports.push(report(check_attention(case, subject)?));
        }
        let mut add = |name: String, result: Result<(), Failure>| {
            let outcome = result.map_or_else(CaseOutcome::Failed, |()| CaseOutcome::Passed);
            reports.push(CaseReport { name, outcome });
        };
        for case in &self.selection_cases {
            add(format!("selection {}", case.name), check_selection(case, subject));
        }
        for (place, case) in self.union_cases.iter().enumerate() {
            add(format!("union {place}"), check_union(&case.rows, &case.expected, subject));
        }
        for (place, case) in self.config_cases.iter().enumerate() {
            add(format!("config {place}"), check_config(case));
        }
        Ok(reports)
    }
}

fn check_attention(case: &Case, subject: &Subject) -> Result<CaseOutcome, VectorError> {
    let (params, heads) = layer_of(case)?;
    let checked = match subject {
        Subject::Oracle => compare(case, &oracle::run(case, &params, heads), ORACLE_TOLERANCE).map_err(Failure::from),
        Subject::Backend(entry) => match run_backend(case, entry, &params, heads) {
            Ok(outcome) => compare(case, &outcome, F32_TOLERANCE).map_err(Failure::from),
            Err(Stop::Refused(why)) => return Ok(CaseOutcome::Refused(why)),
            Err(Stop::Failed(source)) => Err(Failure::Call(source)),
        },
    };
    let checked = checked.and_then(|()| check_decode(case, &params, heads));
    Ok(checked.map_or_else(CaseOutcome::Failed, |()| CaseOutcome::Passed))
}

#[expect(clippy::cast_possible_truncation, reason = "scales of a layer are f32")]
fn layer_of(case: &Case) -> Result<(SparseParams, HeadShape), VectorError> {
    let p = &case.params;
    let named = |source| VectorError::Score { case: case.name.clone(), source };
    let heads = HeadShape::new(p.num_q_heads, p.num_kv_heads, p.head_dim);
    let params = SparseParams {
        blocks: BlockParams {
            block_size: p.block_size_k,
            topk: p.topk_blocks,
            init_blocks: p.init_blocks,
            local_blocks: p.local_blocks,
        },
        score: p.score_type.parse().map_err(named)?,
        num_index_heads: p.num_idx_heads,
        index_dim: p.idx_head_dim,
        index_scale: p.idx_sm_scale as f32,
        has_index_value: case.inputs.idx_v.is_some(),
    };
    let broken = |source| VectorError::Params { case: case.name.clone(), source };
    SparseFamily::new(params, &heads).map_err(broken)?;
    Ok((params, heads))
}

/// Why a backend has no result for a case.
enum Stop {
    Refused(String),
    Failed(Box<dyn std::error::Error + Send + Sync>),
}

impl Stop {
    fn failed(error: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self::Failed(Box::new(error))
    }
}

/// Runs a case through the waist, and the stages for what the waist does not show.
fn run_backend(
    case: &Case,
    entry: &BackendEntry<Host>,
    params: &SparseParams,
    heads: HeadShape,
) -> Result<Outcome, Stop> {
    let mut problem = Problem::new(case, heads);
    let mut backend = make(case, entry, params, heads, &problem)?;
    let rows = problem.batch.num_rows() as usize;
    let (mut cache, mut index_cache) = (problem.cache.clone(), problem.index_cache.clone());
    let [q_heads, dim, index_heads, index_dim] =
        [heads.num_qo_heads, heads.head_dim_vo, params.num_index_heads, params.index_dim].map(|x| x as usize);
    let mut out = vec![f32::NAN; rows * q_heads * dim];
    let mut index_out = vec![f32::NAN; rows * index_heads * index_dim];
    let step = backend.prepare_metadata(&problem.batch).map_err(Stop::failed)?;
    let tensor_mut = |data, heads, dim| HostTensorMut::packed(data, [rows, heads, dim]).expect("a packed tensor");
    let side = Side {
        q: problem.index_q.tensor(),
        kv: Kv::Append {
            cache: &mut index_cache,
            k: problem.index_k.tensor(),
            v: problem.index_v.as_ref().map(problem::Floats::tensor),
        },
        out: params.has_index_value.then(|| tensor_mut(index_out.as_mut_slice(), index_heads, index_dim)),
    };
    let io = Io {
        q: problem.q.tensor(),
        kv: Kv::Append { cache: &mut cache, k: problem.k.tensor(), v: Some(problem.v.tensor()) },
        side: Some(side),
        out: tensor_mut(out.as_mut_slice(), q_heads, dim),
        lse: None,
    };
    backend.forward(&step, 0, io).map_err(|error: RunError| Stop::failed(error))?;
    problem.index_cache = index_cache;
    let stages = stages::run(&problem, &problem.index_cache, params, heads);
    let cube = |data: &[f32], heads: usize, dim: usize| -> Cube<f64> {
        let vector = |vector: &[f32]| vector.iter().copied().map(f64::from).collect();
        data.chunks(heads * dim).map(|row| row.chunks(dim).map(vector).collect()).collect()
    };
    Ok(Outcome {
        block_scores: Some(stages.block_scores),
        by_index_head: Some(stages.by_index_head),
        by_kv_head: Some(stages.by_kv_head),
        index_out: params.has_index_value.then(|| cube(&index_out, index_heads, index_dim)),
        out: cube(&out, q_heads, dim),
    })
}

#[expect(clippy::cast_possible_truncation, reason = "scales of a layer are f32")]
fn make(
    case: &Case,
    entry: &BackendEntry<Host>,
    params: &SparseParams,
    heads: HeadShape,
    problem: &Problem,
) -> Result<BoxedBackend<Host>, Stop> {
    let family = SparseFamily::new(*params, &heads).expect("checked with the case");
    let layer = LayerParams {
        sm_scale: case.params.sm_scale as f32,
        family: Some(FamilyRef::new(family)),
        ..LayerParams::causal(heads)
    };
    let layer = Layer::new(layer).map_err(Stop::failed)?;
    let model = ModelSpec::new(vec![layer], Dtype::F32, KvDtype::F32, problem.page_size).map_err(Stop::failed)?;
    let device = HostDevice::with_threads(2);
    let config = BackendConfig { model: Arc::new(model), limits: BatchLimits::NONE, device };
    match (entry.create)(&config) {
        Ok(backend) => Ok(backend),
        Err(error @ CreateError::Unsupported { .. }) => Err(Stop::Refused(error.to_string())),
        Err(error) => Err(Stop::failed(error)),
    }
}

/// The tables of a decode step that the file gives: those of dense attention over a sparse page table, and those of a
/// captured decode step.
fn check_decode(case: &Case, params: &SparseParams, heads: HeadShape) -> Result<(), Failure> {
    let mut problem = Problem::new(case, heads);
    let slots = problem.slots.clone();
    let (index_k, index_v) = (problem.index_k.tensor(), problem.index_v.as_ref().map(problem::Floats::tensor));
    let stored = problem.index_cache.append(&slots, &index_k, index_v.as_ref());
    stored.map_err(|error| Failure::Call(Box::new(error)))?;
    let stages = stages::run(&problem, &problem.index_cache, params, heads);
    if let Some(expected) = &case.expected.dense_decode {
        let mut table = PageTable::default();
        let filled = table.fill(&problem.batch, &stages.selection);
        filled.map_err(|error| Failure::Call(Box::new(error)))?;
        check_table(&table, expected, heads.num_kv_heads as usize)?;
    }
    if let Some(expected) = &case.expected.msa_decode_meta {
        check_meta(&problem, expected, params, heads)?;
        let ids: Cube<f64> = to_floats(&expected.kv_block_indexes);
        outcome::cubes("kv_block_indexes", &ids, &to_floats(&stages.by_kv_head), 0.0)?;
    }
    Ok(())
}

fn to_floats(ids: &Cube<i32>) -> Cube<f64> {
    ids.iter().map(|row| row.iter().map(|ids| ids.iter().copied().map(f64::from).collect()).collect()).collect()
}

fn check_table(table: &PageTable, expected: &DenseDecode, num_kv_heads: usize) -> Result<(), Difference> {
    whole("real_seq_lens", &expected.real_seq_lens, &table.real_seq_lens)?;
    for (sequence, pages) in expected.page_table.iter().enumerate() {
        let coded: Vec<i32> =
            table.head_coded(sequence / num_kv_heads, sequence % num_kv_heads, num_kv_heads).collect();
        // Entries behind the sequence's pages are null: nobody reads them.
        let expected: Vec<f64> = pages.iter().flatten().copied().map(f64::from).collect();
        let got: Vec<f64> = coded.into_iter().map(f64::from).collect();
        row("page_table", &[sequence], &expected, &got, 0.0)?;
    }
    Ok(())
}

fn check_meta(
    problem: &Problem,
    expected: &DecodeMeta,
    params: &SparseParams,
    heads: HeadShape,
) -> Result<(), Failure> {
    let limits = PlanLimits {
        blocks: params.blocks,
        index_group: params.index_group(&heads),
        max_kv_len: problem.batch.max_kv_len(),
        page_size: problem.page_size,
    };
    let mut plans = DecodePlans::new(limits);
    let plan = plans.prepare(&problem.batch).map_err(|error| Failure::Call(Box::new(error)))?;
    let num_requests = f64::from(u32::try_from(problem.batch.requests().len()).unwrap_or(u32::MAX));
    #[expect(clippy::cast_precision_loss, reason = "a batch size of a test")]
    number("plan_key_batch_size", &[], expected.plan_key_batch_size as f64, num_requests, 0.0)?;
    let Some(plan) = plan else { return Ok(()) };
    whole("kv_indices", &expected.kv_indices, plan.indices())?;
    whole("kv_page_indptr", &expected.kv_page_indptr, &plan.page_indptr)?;
    whole("kv_segment_lens", &expected.kv_segment_lens, &plan.segment_lens)?;
    whole("kv_segment_offsets", &expected.kv_segment_offsets, &plan.segment_offsets)?;
    whole("qo_offset", &expected.qo_offset_requested, &plan.qo_offset)?;
    whole("plan_reference_kv_len", &[expected.plan_reference_kv_len], &[plan.reference_kv_len])?;
    Ok(())
}

/// Blocks of a selection case: their size does not matter.
const fn blocks_of(case: &SelectionCase) -> BlockParams {
    let SelectionCase { topk, init_blocks, local_blocks, .. } = *case;
    BlockParams { block_size: 1, topk, init_blocks, local_blocks }
}

#[expect(clippy::cast_possible_truncation, reason = "the scores of the cases are exact in f32")]
fn check_selection(case: &SelectionCase, subject: &Subject) -> Result<(), Failure> {
    let scores: Vec<f64> = case.scores.iter().map(|score| score.unwrap_or(f64::NAN)).collect();
    let blocks = blocks_of(case);
    let mut ids: Vec<i32> = match subject {
        Subject::Oracle => narrow(&single_head_oracle(blocks).select(&scores)),
        Subject::Backend(_) => {
            let scores: Vec<f32> = scores.iter().map(|&score| score as f32).collect();
            BlockSelector::new(blocks).select(&scores).to_vec()
        }
    };
    ids.resize(ids.len().max(case.topk as usize), TAIL);
    Ok(whole("ids", &case.expected, &ids)?)
}

fn check_union(rows: &[Vec<i32>], expected: &[i32], subject: &Subject) -> Result<(), Failure> {
    let mut ids = Vec::new();
    match subject {
        Subject::Oracle => {
            let sets: Vec<Vec<usize>> =
                rows.iter().map(|row| row.iter().filter_map(|&id| usize::try_from(id).ok()).collect()).collect();
            let mut oracle =
                single_head_oracle(BlockParams { block_size: 1, topk: 1, init_blocks: 0, local_blocks: 0 });
            oracle.params.num_index_heads = u32::try_from(rows.len()).unwrap_or(u32::MAX);
            ids.extend(oracle.sets(&sets).iter().flat_map(|set| narrow(set)));
        }
        Subject::Backend(_) => rows.iter().for_each(|row| unite(&mut ids, row)),
    }
    let width = rows.iter().map(Vec::len).sum::<usize>();
    ids.resize(ids.len().max(width), TAIL);
    Ok(whole("ids", expected, &ids)?)
}

fn check_config(case: &ConfigCase) -> Result<(), Failure> {
    let blocks = BlockParams::from_json(&case.cfg).map_err(|error| Failure::Call(Box::new(error)))?;
    let BlockParams { block_size, topk, init_blocks, local_blocks } = blocks;
    let expected = &case.expected;
    for (what, expected, got) in [
        ("block_size_k", expected.block_size_k, block_size),
        ("topk_blocks", expected.topk_blocks, topk),
        ("init_blocks", expected.init_blocks, init_blocks),
        ("local_blocks", expected.local_blocks, local_blocks),
    ] {
        number(what, &[], f64::from(expected), f64::from(got), 0.0)?;
    }
    Ok(())
}

fn single_head_oracle(blocks: BlockParams) -> crate::oracle::Oracle {
    let params = SparseParams::new(blocks, 1, 1);
    let scales = crate::oracle::Scales { main: 1.0, index: 1.0 };
    crate::oracle::Oracle { heads: HeadShape::new(1, 1, 1), params, scales }
}

fn narrow(ids: &[usize]) -> Vec<i32> {
    ids.iter().map(|&id| i32::try_from(id).expect("a block of a case")).collect()
}

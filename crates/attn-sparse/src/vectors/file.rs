//! Owns the file's schema, `attn-sparse/minimax/1`: what is in it, and the checks that make it safe to compute with.

use serde::Deserialize;
use serde_json::{Map, Value};
use thiserror::Error;

use super::problem::batch_of;

/// The schema that is read.
const SCHEMA: &str = "attn-sparse/minimax/1";

/// `[a][b]`.
pub(crate) type Table<T> = Vec<Vec<T>>;
/// `[a][b][c]`.
pub(crate) type Cube<T> = Vec<Vec<Vec<T>>>;

/// A file of test vectors.
#[derive(Debug, Deserialize)]
pub struct VectorFile {
    schema: String,
    /// Attention cases.
    pub(crate) cases: Vec<Case>,
    /// Scores and the ids to be selected.
    pub(crate) selection_cases: Vec<SelectionCase>,
    /// Rows of ids and their union.
    pub(crate) union_cases: Vec<UnionCase>,
    /// Settings and what they mean.
    pub(crate) config_cases: Vec<ConfigCase>,
}

/// A file that cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum VectorError {
    /// It is not JSON of the schema's shape.
    #[error("not a file of sparse vectors")]
    Json(#[from] serde_json::Error),
    /// It is of another schema.
    #[error("schema {got:?}, {SCHEMA:?} is needed")]
    Schema {
        /// The file's schema.
        got: String,
    },
    /// A case contradicts itself.
    #[error("case {case}: {what} is {got}, {expected} is needed")]
    Case {
        /// The case.
        case: String,
        /// What is wrong.
        what: &'static str,
        /// What is needed.
        expected: u64,
        /// What it is.
        got: u64,
    },
    /// A case describes no batch.
    #[error("case {case}")]
    Batch {
        /// The case.
        case: String,
        /// Every broken rule.
        source: attn_metadata::BatchError,
    },
    /// A case describes no layer.
    #[error("case {case}")]
    Params {
        /// The case.
        case: String,
        /// Every broken rule.
        source: crate::Violations,
    },
    /// A case has an unknown score type.
    #[error("case {case}")]
    Score {
        /// The case.
        case: String,
        /// The name.
        source: crate::params::UnknownScoreType,
    },
}

impl VectorFile {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// [`VectorError`].
    pub fn parse(text: &str) -> Result<Self, VectorError> {
        let file: Self = serde_json::from_str(text)?;
        if file.schema != SCHEMA {
            return Err(VectorError::Schema { got: file.schema });
        }
        file.cases.iter().try_for_each(Case::check)?;
        file.selection_cases.iter().try_for_each(SelectionCase::check)?;
        Ok(file)
    }
}

#[derive(Debug, Deserialize)]
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) params: CaseParams,
    pub(crate) inputs: Inputs,
    pub(crate) expected: Expected,
}

#[derive(Debug, Deserialize)]
pub(crate) struct CaseParams {
    pub(crate) num_q_heads: u32,
    pub(crate) num_kv_heads: u32,
    pub(crate) num_idx_heads: u32,
    pub(crate) head_dim: u32,
    pub(crate) idx_head_dim: u32,
    pub(crate) block_size_k: u32,
    pub(crate) page_size: u32,
    pub(crate) topk_blocks: u32,
    pub(crate) init_blocks: u32,
    pub(crate) local_blocks: u32,
    pub(crate) score_type: String,
    pub(crate) sm_scale: f64,
    pub(crate) idx_sm_scale: f64,
    pub(crate) num_slots: usize,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Inputs {
    pub(crate) req_to_token: Table<usize>,
    pub(crate) req_pool_indices: Vec<usize>,
    pub(crate) seq_lens: Vec<usize>,
    pub(crate) prefix_lens: Vec<usize>,
    pub(crate) cu_seqlens_q: Vec<usize>,
    pub(crate) out_cache_loc: Vec<usize>,
    pub(crate) q: Cube<f64>,
    pub(crate) k: Cube<f64>,
    pub(crate) v: Cube<f64>,
    pub(crate) idx_q: Cube<f64>,
    pub(crate) idx_k: Cube<f64>,
    pub(crate) idx_v: Option<Cube<f64>>,
    pub(crate) caches_before: Caches,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Caches {
    pub(crate) k_cache: Cube<f64>,
    pub(crate) v_cache: Cube<f64>,
    pub(crate) idx_k_cache: Cube<f64>,
    pub(crate) idx_v_cache: Option<Cube<f64>>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Expected {
    pub(crate) block_scores: Cube<f64>,
    pub(crate) topk_idx_per_index_head: Cube<i32>,
    pub(crate) topk_idx_per_kv_head: Cube<i32>,
    pub(crate) idx_o: Option<Cube<f64>>,
    pub(crate) o: Cube<f64>,
    pub(crate) dense_decode: Option<DenseDecode>,
    pub(crate) msa_decode_meta: Option<DecodeMeta>,
}

/// Dense decode over a sparse page table. `null` in the table is never read.
#[derive(Debug, Deserialize)]
pub(crate) struct DenseDecode {
    pub(crate) page_table: Table<Option<i32>>,
    pub(crate) real_seq_lens: Vec<u32>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct DecodeMeta {
    pub(crate) kv_indices: Vec<i32>,
    pub(crate) kv_page_indptr: Vec<i32>,
    pub(crate) kv_segment_lens: Vec<i32>,
    pub(crate) kv_segment_offsets: Vec<i32>,
    pub(crate) qo_offset_requested: Vec<i32>,
    pub(crate) kv_block_indexes: Cube<i32>,
    pub(crate) plan_key_batch_size: usize,
    pub(crate) plan_reference_kv_len: u32,
}

#[derive(Debug, Deserialize)]
pub(crate) struct SelectionCase {
    pub(crate) name: String,
    /// `null` is NaN.
    pub(crate) scores: Vec<Option<f64>>,
    pub(crate) topk: u32,
    pub(crate) init_blocks: u32,
    pub(crate) local_blocks: u32,
    pub(crate) expected: Vec<i32>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct UnionCase {
    pub(crate) rows: Table<i32>,
    pub(crate) expected: Vec<i32>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct ConfigCase {
    pub(crate) cfg: Map<String, Value>,
    pub(crate) expected: ExpectedConfig,
}

#[derive(Debug, Deserialize)]
pub(crate) struct ExpectedConfig {
    pub(crate) block_size_k: u32,
    pub(crate) init_blocks: u32,
    pub(crate) local_blocks: u32,
    pub(crate) topk_blocks: u32,
}

impl Case {
    /// Whether all that is computed with is there and in range.
    fn check(&self) -> Result<(), VectorError> {
        let Self { params: p, inputs, .. } = self;
        let expect = |what, expected: usize, got: usize| {
            let case = self.name.clone();
            let error = || VectorError::Case { case, what, expected: expected as u64, got: got as u64 };
            if expected == got { Ok(()) } else { Err(error()) }
        };
        let rows = inputs.q.len();
        let cube = |what, cube: &Cube<f64>, rows: usize, heads: u32, dim: u32| {
            expect(what, rows, cube.len())?;
            cube.iter().try_for_each(|row| {
                expect(what, heads as usize, row.len())?;
                row.iter().try_for_each(|vector| expect(what, dim as usize, vector.len()))
            })
        };
        cube("q", &inputs.q, rows, p.num_q_heads, p.head_dim)?;
        cube("k", &inputs.k, rows, p.num_kv_heads, p.head_dim)?;
        cube("v", &inputs.v, rows, p.num_kv_heads, p.head_dim)?;
        cube("idx_q", &inputs.idx_q, rows, p.num_idx_heads, p.idx_head_dim)?;
        cube("idx_k", &inputs.idx_k, rows, 1, p.idx_head_dim)?;
        let caches = &inputs.caches_before;
        cube("k_cache", &caches.k_cache, p.num_slots, p.num_kv_heads, p.head_dim)?;
        cube("v_cache", &caches.v_cache, p.num_slots, p.num_kv_heads, p.head_dim)?;
        cube("idx_k_cache", &caches.idx_k_cache, p.num_slots, 1, p.idx_head_dim)?;
        expect("idx_v_cache", usize::from(inputs.idx_v.is_some()), usize::from(caches.idx_v_cache.is_some()))?;
        if let (Some(idx_v), Some(cache)) = (&inputs.idx_v, &caches.idx_v_cache) {
            cube("idx_v", idx_v, rows, 1, p.idx_head_dim)?;
            cube("idx_v_cache", cache, p.num_slots, 1, p.idx_head_dim)?;
        }
        self.check_tables(&expect)
    }

    fn check_tables(
        &self,
        expect: &dyn Fn(&'static str, usize, usize) -> Result<(), VectorError>,
    ) -> Result<(), VectorError> {
        let Self { params: p, inputs, .. } = self;
        let n = inputs.seq_lens.len();
        expect("prefix_lens", n, inputs.prefix_lens.len())?;
        expect("req_pool_indices", n, inputs.req_pool_indices.len())?;
        expect("cu_seqlens_q", n + 1, inputs.cu_seqlens_q.len())?;
        expect("out_cache_loc", inputs.q.len(), inputs.out_cache_loc.len())?;
        let slot = |what, slot: usize| expect(what, slot.min(p.num_slots.saturating_sub(1)), slot);
        inputs.out_cache_loc.iter().try_for_each(|&loc| slot("out_cache_loc", loc))?;
        // Pages beyond the slots would be made, and never read.
        let page_size = p.page_size as usize;
        expect("page_size", page_size.clamp(1, p.num_slots.max(1)), page_size)?;
        expect("first of cu_seqlens_q", 0, inputs.cu_seqlens_q[0])?;
        for (i, &seq_len) in inputs.seq_lens.iter().enumerate() {
            let (begin, end) = (inputs.cu_seqlens_q[i], inputs.cu_seqlens_q[i + 1]);
            expect("cu_seqlens_q", end.max(begin), end)?;
            expect("seq_lens", inputs.prefix_lens[i].saturating_add(end - begin), seq_len)?;
            let row = inputs.req_to_token.get(inputs.req_pool_indices[i]);
            expect("row of req_to_token", 1, usize::from(row.is_some_and(|row| row.len() >= seq_len)))?;
            row.into_iter().flat_map(|row| &row[..seq_len]).try_for_each(|&loc| slot("req_to_token", loc))?;
        }
        let used = inputs.cu_seqlens_q[n];
        expect("last of cu_seqlens_q", used.min(inputs.q.len()), used)?;
        let batch_error = |source| VectorError::Batch { case: self.name.clone(), source };
        batch_of(self).map(|_| ()).map_err(batch_error)
    }
}

impl SelectionCase {
    /// Ids that are expected are padded to the budget.
    fn check(&self) -> Result<(), VectorError> {
        if self.expected.len() < self.topk as usize {
            let (expected, got) = (u64::from(self.topk), self.expected.len() as u64);
            return Err(VectorError::Case { case: self.name.clone(), what: "length of expected", expected, got });
        }
        Ok(())
    }
}

//! Explains a plan: what was chosen and why, and how a backend would cut a batch of given lengths.

use std::sync::Arc;

use attn_metadata::plan::PlanReport;
use attn_metadata::{
    BackendConfig, Batch, BatchError, BatchLimits, HeadShape, HostDevice, Layer, LayerError, LayerParams, ModelSpec,
    PoolShape, PrepareError, RawBatch, RunError, SelectError, Selection,
};
use kvpool::{Dtype, KvDtype, PageSize, ShapeError};
use thiserror::Error;

use crate::backends::create_backend;

/// Pages that an explained batch may have together.
const MAX_PAGES: u64 = 1 << 27;

/// A batch to explain, by lengths alone.
#[derive(Clone, Debug, PartialEq)]
pub struct ExplainRequest {
    /// Query tokens of each request.
    pub q_lens: Vec<u32>,
    /// KV tokens of each request.
    pub kv_lens: Vec<u32>,
    /// Head counts and widths.
    pub heads: HeadShape,
    /// Whether values are the first columns of the keys, as in a latent cache.
    pub values_in_keys: bool,
    /// Tokens in a page.
    pub page_size: u32,
    /// Earlier tokens that a query sees besides itself.
    pub window_left: Option<u32>,
    /// Dtype of q.
    pub q_dtype: Dtype,
    /// Dtype of the stored KV.
    pub kv_dtype: KvDtype,
    /// The backend: a name, a pair or `"auto"`.
    pub choice: String,
    /// The processor.
    pub device: HostDevice,
}

/// A plan explained.
#[derive(Clone, Debug)]
pub struct Explained {
    /// Who was chosen and who was not.
    pub selection: Selection,
    /// How the batch is cut.
    pub plan: PlanReport,
}

/// A batch that cannot be explained.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ExplainError {
    /// The two lists differ in length.
    #[error("{q_lens} query lengths and {kv_lens} KV lengths, give as many of the one as of the other, at least 1")]
    Lengths {
        /// Query lengths given.
        q_lens: usize,
        /// KV lengths given.
        kv_lens: usize,
    },
    /// The lengths add up to too much.
    #[error("the batch has {got} {what}, at most {max} can be explained")]
    TooLarge {
        /// What there is too much of.
        what: &'static str,
        /// How much.
        got: u64,
        /// The most.
        max: u64,
    },
    /// The page size is not one.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The heads do not fit each other.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// The lengths break a rule.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// No backend.
    #[error(transparent)]
    Select(#[from] SelectError),
    /// The backend refuses the batch.
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    /// The backend has no explanation.
    #[error(transparent)]
    Explain(#[from] RunError),
}

/// Plans a batch and asks the backend what it did.
///
/// # Errors
/// [`ExplainError`].
pub fn explain(request: &ExplainRequest) -> Result<Explained, ExplainError> {
    let page_size = PageSize::new(request.page_size)?;
    let batch = batch_of(request, page_size)?;
    let ExplainRequest { window_left, values_in_keys, heads, .. } = *request;
    let params = LayerParams { window_left, values_in_keys, ..LayerParams::causal(heads) };
    let model = ModelSpec::new(vec![Layer::new(params)?], request.q_dtype, request.kv_dtype, page_size)
        .expect("a model of one layer has a layer");
    let limits = BatchLimits {
        max_rows: batch.num_rows(),
        max_requests: u32::try_from(batch.requests().len()).unwrap_or(u32::MAX),
        max_kv_len: batch.max_kv_len(),
    };
    let config = BackendConfig { model: Arc::new(model), limits, device: request.device };
    let (mut backend, selection) = create_backend(&request.choice, &config)?;
    let step = backend.prepare_metadata(&batch)?;
    Ok(Explained { selection, plan: backend.explain(&step)? })
}

/// A batch whose requests have their pages one after the other, and which appends nothing.
fn batch_of(request: &ExplainRequest, page_size: PageSize) -> Result<Batch, ExplainError> {
    let (q_lens, kv_lens) = (&request.q_lens, &request.kv_lens);
    if q_lens.len() != kv_lens.len() || q_lens.is_empty() {
        return Err(ExplainError::Lengths { q_lens: q_lens.len(), kv_lens: kv_lens.len() });
    }
    let page_len = page_size.get();
    let num_pages: Vec<u32> = kv_lens.iter().map(|kv_len| kv_len.div_ceil(page_len)).collect();
    let max_slots = u64::from(i32::MAX.unsigned_abs());
    let max_pages = MAX_PAGES.min(max_slots / u64::from(page_len));
    let qo_indptr = offsets("query tokens", q_lens, max_slots)?;
    let kv_indptr = offsets("pages", &num_pages, max_pages)?;
    let total = kv_indptr.last().copied().unwrap_or(0);
    let last_len = |kv_len: &u32| if *kv_len == 0 { 0 } else { ((kv_len - 1) % page_len + 1).cast_signed() };
    let raw = RawBatch {
        num_rows: qo_indptr.last().map_or(0, |&rows| rows.unsigned_abs() as usize),
        qo_indptr: &qo_indptr,
        kv_indptr: &kv_indptr,
        kv_indices: &(0..total).collect::<Vec<i32>>(),
        kv_last_page_len: &kv_lens.iter().map(last_len).collect::<Vec<i32>>(),
        slot_mapping: None,
        custom_mask: None,
    };
    Ok(Batch::from_raw(PoolShape { num_pages: total.unsigned_abs(), page_size }, &raw)?)
}

/// Running sums from 0.
fn offsets(what: &'static str, lens: &[u32], max: u64) -> Result<Vec<i32>, ExplainError> {
    let got = lens.iter().map(|&len| u64::from(len)).sum();
    if got > max {
        return Err(ExplainError::TooLarge { what, got, max });
    }
    let mut sum = 0i32;
    let rest = lens.iter().map(|&len| {
        sum += len.cast_signed();
        sum
    });
    Ok([0].into_iter().chain(rest).collect())
}

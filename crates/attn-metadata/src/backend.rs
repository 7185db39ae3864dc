//! The trait that every attention backend implements, and what one is made from.

use std::sync::Arc;

use crate::batch::Batch;
use crate::capability::{Capabilities, Feature};
use crate::capture::{Bucket, CaptureLimits};
use crate::error::{CaptureError, PrepareError, RunError};
use crate::model::ModelSpec;
use crate::plan::PlanReport;
use crate::space::{CacheFacts, Io, Kv, Space, TensorFacts};
use crate::steps::Prepared;

/// The largest batch that a backend will be given: decides its buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchLimits {
    /// Rows of q, padding included.
    pub max_rows: u32,
    /// Requests.
    pub max_requests: u32,
    /// KV tokens of one request.
    pub max_kv_len: u32,
}

impl BatchLimits {
    /// No limit: for backends that can grow their buffers, and for tests.
    pub const NONE: Self = Self { max_rows: u32::MAX, max_requests: u32::MAX, max_kv_len: u32::MAX };

    /// Checks a batch against the limits.
    ///
    /// # Errors
    /// [`PrepareError::OverLimit`] for the first one exceeded.
    pub fn check(&self, batch: &Batch) -> Result<(), PrepareError> {
        let facts = [
            ("rows", u64::from(batch.num_rows()), self.max_rows),
            ("requests", batch.requests().len() as u64, self.max_requests),
            ("KV tokens in one request", u64::from(batch.max_kv_len()), self.max_kv_len),
        ];
        match facts.into_iter().find(|(_, got, limit)| *got > u64::from(*limit)) {
            Some((what, got, limit)) => Err(PrepareError::OverLimit { what, got, limit: u64::from(limit) }),
            None => Ok(()),
        }
    }
}

/// What a backend is made from.
#[derive(Clone, Debug)]
pub struct BackendConfig<S: Space> {
    /// The model's attention layers.
    pub model: Arc<ModelSpec>,
    /// The largest batch.
    pub limits: BatchLimits,
    /// The device.
    pub device: S::Device,
}

/// Runs attention for a model, in one space. The contract of every backend; the conformance suite checks it.
///
/// The caller prepares a batch once a step and calls [`forward`](Self::forward) once a layer. A backend holds the
/// plan of the last prepared batch (and those of captured graphs); a [`Prepared`] is the ticket for it.
///
/// Everything in [`conventions`](crate::conventions) holds, determinism included. In particular a backend must not
/// let anything outside a request's valid KV (other pages, the tail of the last page, padding rows) reach a result.
pub trait AttentionBackend<S: Space>: Send {
    /// Name in the registry.
    fn name(&self) -> &'static str;

    /// What the backend can do.
    fn capabilities(&self) -> &Capabilities;

    /// The model that it was made for.
    fn model(&self) -> &ModelSpec;

    /// Plans a batch: pure host work, once a step. The backend keeps what it needs of the batch. Does not allocate
    /// once warm. Makes earlier uncaptured steps stale.
    ///
    /// # Errors
    /// [`PrepareError`]; the previous plan then stays valid.
    fn prepare_metadata(&mut self, batch: &Batch) -> Result<Prepared, PrepareError>;

    /// Runs one layer: appends new KV where the batch says so, then attends. Writes every row of `out` (and of
    /// `lse`, where given) that belongs to the batch, padding rows included.
    ///
    /// # Errors
    /// [`RunError`]; refusals leave all buffers unchanged.
    fn forward(&mut self, step: &Prepared, layer: usize, io: Io<'_, S>) -> Result<(), RunError>;

    /// What was planned for a step and why.
    ///
    /// # Errors
    /// [`RunError::StalePlan`].
    fn explain(&self, step: &Prepared) -> Result<PlanReport, RunError>;

    /// Sizes the buffers that captured graphs share. Makes earlier captured steps stale.
    ///
    /// # Errors
    /// [`CaptureError`]; nothing is changed then.
    fn init_capture_graph(&mut self, limits: &CaptureLimits) -> Result<(), CaptureError>;

    /// A step to record calls of [`forward`](Self::forward) with, for a bucket. Until the first replay it stands for
    /// a batch of padding requests only.
    ///
    /// # Errors
    /// [`CaptureError`].
    fn prepare_for_capture(&mut self, bucket: Bucket) -> Result<Prepared, CaptureError>;

    /// Gives the recorded calls of a step a new batch, at most as large as the bucket; the caller then replays them.
    /// Missing requests and rows become padding.
    ///
    /// # Errors
    /// [`CaptureError`]; the step then keeps its previous batch.
    fn prepare_for_replay(&mut self, step: &mut Prepared, batch: &Batch) -> Result<(), CaptureError>;
}

/// Checks a batch against a model, limits and capabilities: what every `prepare_metadata` does first.
///
/// # Errors
/// [`PrepareError`].
pub fn check_batch(
    backend: &'static str,
    batch: &Batch,
    model: &ModelSpec,
    limits: &BatchLimits,
    capabilities: &Capabilities,
) -> Result<(), PrepareError> {
    limits.check(batch)?;
    let (expected, got) = (model.page_size().get(), batch.page_size().get());
    if expected != got {
        return Err(PrepareError::PageSize { expected, got });
    }
    let needs = [(Feature::CustomMask, batch.custom_mask().is_some()), (Feature::Extend, batch.max_q_len() > 1)];
    match needs.into_iter().find(|(feature, needed)| *needed && !capabilities.features.contains(*feature)) {
        Some((feature, _)) => Err(PrepareError::Unsupported { backend, feature }),
        None => Ok(()),
    }
}

/// Checks the tensors of a call against the model's layer and the step: what every `forward` does first.
///
/// # Errors
/// [`RunError`] for the first thing that does not fit.
pub fn check_io<S: Space>(model: &ModelSpec, step: &Prepared, layer: usize, io: &Io<'_, S>) -> Result<(), RunError> {
    let num_layers = model.layers().len();
    let spec = model.layers().get(layer).ok_or(RunError::NoSuchLayer { got: layer, num_layers })?;
    let heads = spec.heads();
    let rows = step.num_rows() as usize;
    let check = |tensor, facts: TensorFacts, num_heads: u32, dim: u32| {
        let expected = [rows, num_heads as usize, dim as usize];
        if facts.shape != expected {
            return Err(RunError::Shape { tensor, layer, expected, got: facts.shape });
        }
        if facts.dtype != model.q_dtype() {
            let (expected, got) = (model.q_dtype().name(), facts.dtype.name());
            return Err(RunError::Dtype { tensor, layer, expected, got });
        }
        Ok(())
    };
    check("q", S::tensor_facts(&io.q), heads.num_qo_heads, heads.head_dim_qk)?;
    check("out", S::tensor_mut_facts(&io.out), heads.num_qo_heads, heads.head_dim_vo)?;
    let cache = match &io.kv {
        Kv::Attend { cache } => S::cache_facts(cache),
        Kv::Append { cache, k, v } => {
            check("k", S::tensor_facts(k), heads.num_kv_heads, heads.head_dim_qk)?;
            check("v", S::tensor_facts(v), heads.num_kv_heads, heads.head_dim_vo)?;
            S::cache_facts(&S::share_cache(cache))
        }
    };
    let needed = CacheFacts::needed(heads, step.num_pool_pages(), model.page_size(), model.kv_dtype());
    check_cache(layer, &needed, &cache)?;
    let call_appends = matches!(io.kv, Kv::Append { .. });
    if call_appends != step.appends() {
        return Err(RunError::AppendMismatch { layer, batch_appends: step.appends() });
    }
    let expected = rows * heads.num_qo_heads as usize;
    match io.lse.as_ref().map(S::lse_len) {
        Some(got) if got != expected => Err(RunError::LseLen { layer, expected, got }),
        _ => Ok(()),
    }
}

fn check_cache(layer: usize, needed: &CacheFacts, got: &CacheFacts) -> Result<(), RunError> {
    if needed.dtype != got.dtype {
        let (expected, got) = (needed.dtype.name(), got.dtype.name());
        return Err(RunError::Dtype { tensor: "cache", layer, expected, got });
    }
    let exact = [
        ("tokens in a page", needed.page_size.get(), got.page_size.get()),
        ("KV heads", needed.num_kv_heads, got.num_kv_heads),
        ("elements in a key", needed.head_dim_k, got.head_dim_k),
        ("elements in a value", needed.head_dim_v, got.head_dim_v),
    ];
    let wrong = exact.into_iter().find(|(_, expected, got)| expected != got);
    let few = (got.num_pages < needed.num_pages).then_some(("pages", needed.num_pages, got.num_pages));
    match wrong.or(few) {
        Some((what, expected, got)) => {
            Err(RunError::Cache { layer, what, expected: u64::from(expected), got: u64::from(got) })
        }
        None => Ok(()),
    }
}

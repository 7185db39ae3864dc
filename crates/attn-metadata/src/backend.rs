//! The trait that every attention backend implements, and what one is made from.

use std::sync::Arc;

use crate::batch::Batch;
use crate::capability::{Capabilities, Feature};
use crate::capture::{Bucket, CaptureLimits};
use crate::error::{CaptureError, PrepareError, RunError};
use crate::model::ModelSpec;
use crate::plan::PlanReport;
use crate::space::{Io, Space};
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
    /// [`PrepareError`]; the previous plan then stays valid, or, of a backend of several parts some of which had moved
    /// on, is stale.
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
    /// [`CaptureError`]; nothing is changed then, or, of a backend of several parts some of which were changed, earlier
    /// captured steps are stale.
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
    /// [`CaptureError`]; the step then keeps its previous batch, or, of a backend of several parts some of which had
    /// moved on, is stale.
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

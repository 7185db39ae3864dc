//! Errors of the backend trait, one enum for each verb.

use kvpool::KvSpec;
use thiserror::Error;

use crate::capability::{Feature, Reason};
use crate::capture::Bucket;

/// A backend that cannot be made.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CreateError {
    /// The backend cannot run the model here.
    #[error("backend {backend} cannot run this model: {}", reasons.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Unsupported {
        /// The backend.
        backend: &'static str,
        /// Every reason.
        reasons: Vec<Reason>,
    },
    /// The parts of a hybrid were made for different models.
    #[error("backends {extend} and {decode} were made for different models, so they cannot share a batch")]
    DifferentModels {
        /// The part for requests that extend.
        extend: &'static str,
        /// The part for requests that decode.
        decode: &'static str,
    },
    /// A router's layers are not those of its parts.
    #[error("layer {layer} is not the layer that backend {backend} was made for")]
    RoutedLayer {
        /// The layer of the whole model.
        layer: usize,
        /// The part that it is routed to.
        backend: &'static str,
    },
    /// The environment failed.
    #[error("backend {backend} could not be started")]
    Environment {
        /// The backend.
        backend: &'static str,
        /// What failed.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// A batch that cannot be planned.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PrepareError {
    /// The batch is larger than the backend was made for.
    #[error("the batch has {got} {what}, the backend was made for at most {limit}")]
    OverLimit {
        /// What is too large.
        what: &'static str,
        /// The batch's value.
        got: u64,
        /// The backend's limit.
        limit: u64,
    },
    /// The plan needs more memory than there is.
    #[error("the batch needs {} MiB for {what}, more than can be had; give it in smaller batches", bytes.div_ceil(1 << 20))]
    OutOfMemory {
        /// What the memory is for.
        what: &'static str,
        /// Bytes needed.
        bytes: u64,
    },
    /// The environment failed.
    #[error("backend {backend} cannot take the batch: {why}")]
    Environment {
        /// The backend.
        backend: &'static str,
        /// What failed.
        why: String,
    },
    /// The batch was built for another page size.
    #[error("the batch has pages of {got} tokens, the model has pages of {expected}")]
    PageSize {
        /// The model's page size.
        expected: u32,
        /// The batch's page size.
        got: u32,
    },
    /// The batch needs a feature that the backend does not have.
    #[error("the batch needs {}, which backend {backend} does not support", feature.name())]
    Unsupported {
        /// The backend.
        backend: &'static str,
        /// What is missing.
        feature: Feature,
    },
}

/// A forward call that is refused or fails.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RunError {
    /// The plan is not the backend's current one: another batch was prepared since, or another backend made it.
    #[error(
        "stale plan: it was made as number {got_generation} by backend {got_backend}, current is number {generation} of backend {backend}"
    )]
    StalePlan {
        /// This backend's id.
        backend: u64,
        /// Its current plan.
        generation: u64,
        /// The id in the plan given.
        got_backend: u64,
        /// The number in the plan given.
        got_generation: u64,
    },
    /// The model has no such layer.
    #[error("layer {got} does not exist, the model has {num_layers} layers")]
    NoSuchLayer {
        /// The layer asked for.
        got: usize,
        /// Layers of the model.
        num_layers: usize,
    },
    /// A tensor has the wrong shape.
    #[error("{tensor} is {got:?}, {expected:?} is needed (layer {layer})")]
    Shape {
        /// Which tensor.
        tensor: &'static str,
        /// The layer.
        layer: usize,
        /// `[rows, heads, dim]` needed.
        expected: [usize; 3],
        /// `[rows, heads, dim]` given.
        got: [usize; 3],
    },
    /// A tensor or cache has the wrong dtype.
    #[error("{tensor} is {got}, {expected} is needed (layer {layer})")]
    Dtype {
        /// Which tensor.
        tensor: &'static str,
        /// The layer.
        layer: usize,
        /// Dtype needed.
        expected: &'static str,
        /// Dtype given.
        got: &'static str,
    },
    /// The LSE has the wrong number of elements.
    #[error("lse has {got} elements, {expected} are needed (layer {layer})")]
    LseLen {
        /// The layer.
        layer: usize,
        /// Elements needed.
        expected: usize,
        /// Elements given.
        got: usize,
    },
    /// The cache does not fit the layer or the batch's pool.
    #[error("the {cache} has {got} {what}, {expected} is needed (layer {layer})")]
    Cache {
        /// Which cache.
        cache: &'static str,
        /// The layer.
        layer: usize,
        /// What does not fit.
        what: &'static str,
        /// Value needed.
        expected: u64,
        /// Value given.
        got: u64,
    },
    /// The cache keeps something else of a token than the layer does.
    #[error("the {cache} keeps {got}; {expected} is needed (layer {layer})")]
    CacheSpec {
        /// Which cache.
        cache: &'static str,
        /// The layer.
        layer: usize,
        /// What is needed.
        expected: KvSpec,
        /// What it keeps.
        got: KvSpec,
    },
    /// A tensor that the layer needs was not given.
    #[error("{tensor} is missing (layer {layer})")]
    Missing {
        /// Which tensor.
        tensor: &'static str,
        /// The layer.
        layer: usize,
    },
    /// A tensor was given that the layer has no use for.
    #[error("{tensor} was given, and the layer has none (layer {layer})")]
    Unwanted {
        /// Which tensor.
        tensor: &'static str,
        /// The layer.
        layer: usize,
    },
    /// The batch appends, the call does not, or the other way round.
    #[error("{} (layer {layer})", if *batch_appends {
        "the batch appends new tokens, but the call gives no k and v"
    } else {
        "the call gives k and v, but the batch has no slot mapping"
    })]
    AppendMismatch {
        /// The layer.
        layer: usize,
        /// Whether the batch has a slot mapping.
        batch_appends: bool,
    },
    /// The backend does not write an LSE.
    #[error("backend {backend} does not write an LSE")]
    NoLse {
        /// The backend.
        backend: &'static str,
    },
    /// Writing new KV failed; the cache is unchanged.
    #[error("appending KV failed (layer {layer})")]
    Append {
        /// The layer.
        layer: usize,
        /// Why.
        source: kvpool::AppendError,
    },
    /// The environment failed.
    #[error("backend {backend} failed (layer {layer})")]
    Environment {
        /// The backend.
        backend: &'static str,
        /// The layer.
        layer: usize,
        /// What failed.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// A capture hook that is refused or fails.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CaptureError {
    /// [`init_capture_graph`](crate::AttentionBackend::init_capture_graph) has not been called.
    #[error("capture limits were not set: call init_capture_graph first")]
    NotInitialised,
    /// A bucket of no request or no row.
    #[error("a bucket of {} requests and {} rows is not valid: at least 1 request and 1 row are needed", bucket.num_requests, bucket.num_rows)]
    InvalidBucket {
        /// The bucket.
        bucket: Bucket,
    },
    /// The bucket was not among the limits.
    #[error("no bucket of {} requests and {} rows was declared to init_capture_graph", bucket.num_requests, bucket.num_rows)]
    UnknownBucket {
        /// The bucket.
        bucket: Bucket,
    },
    /// The step given to a replay was not made by `prepare_for_capture`.
    #[error("the step is not a captured one: it comes from prepare_metadata, not from prepare_for_capture")]
    NotCaptured,
    /// The batch is larger than the captured bucket or the limits.
    #[error("the batch has {got} {what}, the captured bucket holds {limit}")]
    OverBucket {
        /// What is too large.
        what: &'static str,
        /// The batch's value.
        got: u64,
        /// The bucket's limit.
        limit: u64,
    },
    /// The batch appends where the captured calls do not, or the other way round.
    #[error("the captured calls {}, the batch {}", if *captured_appends {"append"} else {"do not append"}, if *captured_appends {"has no slot mapping"} else {"has a slot mapping"})]
    AppendMismatch {
        /// Whether the captured calls append.
        captured_appends: bool,
    },
    /// The step is of another backend or of an older capture.
    #[error(transparent)]
    Stale(RunError),
    /// The batch cannot be planned.
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    /// The backend has no graph hooks.
    #[error("backend {backend} does not support graphs")]
    Unsupported {
        /// The backend.
        backend: &'static str,
    },
}

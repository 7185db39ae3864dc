//! The waist between LLM inference engines and attention backends.
//!
//! An engine describes its model once ([`ModelSpec`]) and a batch once a step ([`Batch`]); a backend
//! turns the batch into a plan ([`AttentionBackend::prepare_metadata`]) and runs attention once a layer
//! ([`AttentionBackend::forward`]). Everything that both sides must agree on lives here: what a batch is and
//! when it is valid, what a layer computes, which conventions hold (see [`conventions`]), what a backend can do
//! ([`Capabilities`]), how one is chosen ([`Registry`]), and how work is cut and scheduled ([`plan`]).
//!
//! This crate knows no backend and no GPU. Validation happens once, when a [`Batch`] is built; backends trust it.
#![forbid(unsafe_code)]

pub mod conventions;
pub mod plan;

mod backend;
mod batch;
mod capability;
mod capture;
mod check;
mod error;
mod family;
mod host;
mod hybrid;
mod layer;
mod lse;
mod model;
mod registry;
mod router;
mod space;
mod steps;

pub use backend::{AttentionBackend, BackendConfig, BatchLimits, check_batch};
pub use batch::{
    Batch, BatchError, KeptBatch, KvIndices, PackedMask, PoolShape, RawBatch, Request, SubBatch, Violation, mask_bytes,
};
pub use capability::{Capabilities, DimRule, Feature, FeatureSet, Reason, Requirements, SizeRule};
pub use capture::{Bucket, CaptureLimits};
pub use check::{check_io, check_store};
pub use error::{CaptureError, CreateError, PrepareError, RunError};
pub use family::{Family, FamilyRef, PLAIN, SideSpec};
pub use host::{Host, HostDevice};
pub use hybrid::HybridBackend;
pub use layer::{HeadShape, Layer, LayerError, LayerParams};
pub use lse::{Lse, StateShapeError, merge_state, merge_states};
pub use model::{ModelSpec, ModelSpecError, PlanGroup};
pub use registry::{
    Alias, BackendEntry, BoxedBackend, LayerBackends, Registry, Rejection, Role, SelectError, Selection,
};
pub use router::LayerRouter;
pub use space::{CacheFacts, Io, Kv, Side, Space, TensorFacts};
pub use steps::{Prepared, Steps};

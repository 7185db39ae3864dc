//! Owns [`Context`]: what checks share: making backends, and comparing with the oracle.

use std::sync::Arc;

use attn_metadata::{BackendConfig, BatchLimits, BoxedBackend, CreateError, Host, HostDevice, Layer, ModelSpec};
use attn_reference::oracle::{self, naive};

use super::Make;
use crate::case::Case;
use crate::harness::{Problem, Run, Stop, expected_after};
use crate::suite::Suite;
use crate::tolerance::{compare, tolerance};

/// What a check gets.
#[allow(missing_debug_implementations, reason = "a closure is not printable")]
pub struct Context<'a> {
    suite: &'a Suite,
    make: Make<'a>,
}

impl<'a> Context<'a> {
    pub(super) const fn new(suite: &'a Suite, make: Make<'a>) -> Self {
        Self { suite, make }
    }

    /// The suite that is run.
    #[must_use]
    pub const fn suite(&self) -> &'a Suite {
        self.suite
    }

    /// A backend for a case: its one layer, limits with some room.
    ///
    /// # Errors
    /// [`Stop::Refused`] where the backend says why, [`Stop::Failed`] where it does not.
    pub fn backend(&self, case: &Case) -> Result<BoxedBackend<Host>, Stop> {
        self.backend_of(case, vec![case.layer()])
    }

    /// A backend for a case with other layers.
    ///
    /// # Errors
    /// As [`backend`](Self::backend).
    pub fn backend_of(&self, case: &Case, layers: Vec<Layer>) -> Result<BoxedBackend<Host>, Stop> {
        self.backend_with(&case.model(layers), roomy(case), self.suite.device)
    }

    /// A backend for a model.
    ///
    /// # Errors
    /// As [`backend`](Self::backend).
    pub fn backend_with(
        &self,
        model: &Arc<ModelSpec>,
        limits: BatchLimits,
        device: HostDevice,
    ) -> Result<BoxedBackend<Host>, Stop> {
        let config = BackendConfig { model: Arc::clone(model), limits, device };
        match (self.make)(&config) {
            Ok(backend) => match backend.capabilities().supports_model(model) {
                Ok(()) => Ok(backend),
                Err(reasons) => Err(Stop::failed(format!("it was made, but says that it cannot: {reasons:?}"))),
            },
            Err(CreateError::Unsupported { reasons, .. }) if reasons.is_empty() => {
                Err(Stop::failed("it was refused without a reason"))
            }
            Err(error @ CreateError::Unsupported { .. }) => Err(Stop::Refused(error.to_string())),
            Err(error) => Err(Stop::error("it could not be made", &error)),
        }
    }

    /// Makes a backend and runs a problem.
    ///
    /// # Errors
    /// [`Stop`].
    pub fn run(&self, problem: &Problem) -> Result<Run, Stop> {
        crate::harness::run(problem, &mut *self.backend(&problem.case)?)
    }

    /// Compares a run with the oracle, over the cache as it must be after the step.
    ///
    /// # Errors
    /// [`Stop::Failed`].
    pub fn compare(&self, problem: &Problem, run: &Run) -> Result<f64, Stop> {
        let (batch, layer) = (problem.batch(), problem.layer());
        let cache = expected_after(problem);
        let exact = oracle::attend(&batch, &layer, &problem.q.view(), &cache);
        let naive = naive::attend(&batch, &layer, &problem.q.view(), &cache);
        let allowed = tolerance(problem.case.q_dtype, problem.case.heads.head_dim_qk);
        compare(run, &exact, Some(&naive), layer.sinks(), &allowed)
    }
}

/// Limits that hold the case and what checks make of it.
pub(super) fn roomy(case: &Case) -> BatchLimits {
    BatchLimits {
        max_rows: 2 * (case.num_used_rows() + case.padding_rows) + 64,
        max_requests: 2 * u32::try_from(case.requests.len()).expect("cases are small") + 16,
        max_kv_len: case.max_kv_len() + 64,
    }
}

/// Leaves a case as it is.
pub(super) fn as_drawn(_: &mut Case, _: &mut crate::rng::Rng) {}

/// At least one query token, so that there is something to look at.
pub(super) fn with_queries(case: &mut Case, rng: &mut crate::rng::Rng) {
    if case.num_used_rows() == 0 {
        let q_len = 1 + u32::from(rng.below(2) == 1 && case.requests.iter().any(|r| r.q_len > 1));
        case.requests.push(crate::case::RequestShape { q_len, kv_len: 40 + q_len });
    }
}

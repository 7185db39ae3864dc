//! Two backends for one model: one for requests that extend, one for those that decode.
//!
//! A batch is cut by request, so a request meets the same backend whatever its neighbours do in that step. The
//! sub-batch that extends runs first and appends the new KV of all rows.

use crate::backend::{AttentionBackend, BatchLimits, check_batch};
use crate::batch::{Batch, PoolShape, Request, SubBatch};
use crate::capability::{Capabilities, DimRule, Feature, FeatureSet, SizeRule};
use crate::capture::{Bucket, CaptureLimits};
use crate::check::check_io;
use crate::error::{CaptureError, CreateError, PrepareError, RunError};
use crate::model::ModelSpec;
use crate::plan::PlanReport;
use crate::registry::BoxedBackend;
use crate::space::{Io, Space};
use crate::steps::{Prepared, Steps};

/// Runs requests of few query tokens on one backend and the others on another.
pub struct HybridBackend<S: Space> {
    extend: BoxedBackend<S>,
    decode: BoxedBackend<S>,
    limits: BatchLimits,
    max_decode_q_len: u32,
    capabilities: Capabilities,
    /// The parts' tickets; `None` before the first batch.
    steps: Steps<Option<Parts>>,
    extend_batch: Batch,
    decode_batch: Batch,
}

/// A hybrid's plan: those of its parts.
#[derive(Debug)]
struct Parts {
    extend: Prepared,
    decode: Prepared,
}

impl<S: Space> std::fmt::Debug for HybridBackend<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HybridBackend")
            .field("extend", &self.extend.name())
            .field("decode", &self.decode.name())
            .field("max_decode_q_len", &self.max_decode_q_len)
            .finish_non_exhaustive()
    }
}

impl<S: Space> HybridBackend<S> {
    /// Pairs two backends made for the same model and limits: requests of 1 to `max_decode_q_len` query tokens go to
    /// `decode`. The limits hold for the whole batch, of which each part sees some requests.
    ///
    /// # Errors
    /// [`CreateError::DifferentModels`].
    pub fn new(
        extend: BoxedBackend<S>,
        decode: BoxedBackend<S>,
        limits: BatchLimits,
        max_decode_q_len: u32,
    ) -> Result<Self, CreateError> {
        if extend.model() != decode.model() {
            return Err(CreateError::DifferentModels { extend: extend.name(), decode: decode.name() });
        }
        let pool = PoolShape { num_pages: 0, page_size: extend.model().page_size() };
        let capabilities = intersection(extend.capabilities(), decode.capabilities());
        Ok(Self {
            extend,
            decode,
            limits,
            max_decode_q_len,
            capabilities,
            steps: Steps::new(None),
            extend_batch: Batch::empty(pool),
            decode_batch: Batch::empty(pool),
        })
    }

    /// The backend for requests that extend, and the one for those that decode.
    #[must_use]
    pub fn parts(&self) -> (&dyn AttentionBackend<S>, &dyn AttentionBackend<S>) {
        (&*self.extend, &*self.decode)
    }

    fn split(&mut self, batch: &Batch) {
        let max = self.max_decode_q_len;
        let decodes = |r: &Request| (1..=max).contains(&r.q_len);
        batch.select_into(&mut self.extend_batch, SubBatch::First, |r| !decodes(r));
        batch.select_into(&mut self.decode_batch, SubBatch::Later, decodes);
    }
}

impl<S: Space> AttentionBackend<S> for HybridBackend<S> {
    fn name(&self) -> &'static str {
        "hybrid"
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn model(&self) -> &ModelSpec {
        self.extend.model()
    }

    fn prepare_metadata(&mut self, batch: &Batch) -> Result<Prepared, PrepareError> {
        // The parts see fewer requests than the batch has, and the first of them must not move on where the batch is
        // refused: so the whole batch is checked before either.
        check_batch(self.name(), batch, self.extend.model(), &self.limits, &self.capabilities)?;
        self.split(batch);
        let extend = self.extend.prepare_metadata(&self.extend_batch)?;
        match self.decode.prepare_metadata(&self.decode_batch) {
            Ok(decode) => self.steps.prepare(batch, |parts| {
                *parts = Some(Parts { extend, decode });
                Ok(())
            }),
            Err(error) => {
                // The part that extends has moved on, so the previous plan is lost.
                self.steps.invalidate();
                Err(error)
            }
        }
    }

    fn forward(&mut self, step: &Prepared, layer: usize, mut io: Io<'_, S>) -> Result<(), RunError> {
        let Self { extend, decode, steps, .. } = self;
        let parts = steps.get(step)?.as_ref().expect("a live plan has parts");
        check_io(extend.model(), step, layer, &io)?;
        extend.forward(&parts.extend, layer, io.reborrow())?;
        decode.forward(&parts.decode, layer, io.attending())
    }

    fn explain(&self, step: &Prepared) -> Result<PlanReport, RunError> {
        let parts = self.steps.get(step)?.as_ref().expect("a live plan has parts");
        let mut report = self.extend.explain(&parts.extend)?;
        report.absorb(self.decode.explain(&parts.decode)?);
        Ok(report)
    }

    fn init_capture_graph(&mut self, limits: &CaptureLimits) -> Result<(), CaptureError> {
        limits.validate()?;
        self.extend.init_capture_graph(limits)?;
        // Only the part that extends appends.
        let of_decode = CaptureLimits { appends: false, ..limits.clone() };
        // Where this one refuses, what the other had captured is gone.
        self.decode.init_capture_graph(&of_decode).inspect_err(|_| self.steps.invalidate_all_captured())?;
        self.steps.init_capture(limits)
    }

    fn prepare_for_capture(&mut self, bucket: Bucket) -> Result<Prepared, CaptureError> {
        let Self { extend, decode, steps, .. } = self;
        steps.capture(bucket, |_| {
            let (extend, decode) = (extend.prepare_for_capture(bucket)?, decode.prepare_for_capture(bucket)?);
            Ok(Some(Parts { extend, decode }))
        })
    }

    fn prepare_for_replay(&mut self, step: &mut Prepared, batch: &Batch) -> Result<(), CaptureError> {
        check_batch(self.name(), batch, self.extend.model(), &BatchLimits::NONE, &self.capabilities)?;
        self.split(batch);
        let Self { extend, decode, steps, extend_batch, decode_batch, .. } = self;
        let mut has_moved = false;
        let result = steps.replay(step, batch, |parts, _| {
            let parts = parts.as_mut().expect("a captured plan has parts");
            extend.prepare_for_replay(&mut parts.extend, extend_batch)?;
            has_moved = true;
            decode.prepare_for_replay(&mut parts.decode, decode_batch)
        });
        // One part has the new batch and the other the old one: the step is neither's.
        result.inspect_err(|_| {
            if has_moved {
                steps.invalidate_captured(step);
            }
        })
    }
}

/// What both parts can do.
pub(crate) fn intersection(a: &Capabilities, b: &Capabilities) -> Capabilities {
    let common = |f: &Feature| a.features.contains(*f) && b.features.contains(*f);
    Capabilities {
        families: both(&a.families, &b.families),
        q_dtypes: both(&a.q_dtypes, &b.q_dtypes),
        kv_dtypes: both(&a.kv_dtypes, &b.kv_dtypes),
        head_dims: both_dims(&a.head_dims, &b.head_dims),
        group_sizes: both_sizes(&a.group_sizes, &b.group_sizes),
        page_sizes: both_sizes(&a.page_sizes, &b.page_sizes),
        features: Feature::ALL.into_iter().filter(common).collect::<FeatureSet>(),
    }
}

fn both<T: PartialEq + Copy>(a: &[T], b: &[T]) -> Vec<T> {
    a.iter().filter(|x| b.contains(x)).copied().collect()
}

fn both_sizes(a: &SizeRule, b: &SizeRule) -> SizeRule {
    match (a, b) {
        (SizeRule::UpTo(x), SizeRule::UpTo(y)) => SizeRule::UpTo(*x.min(y)),
        (SizeRule::OneOf(sizes), rule) | (rule, SizeRule::OneOf(sizes)) => {
            SizeRule::OneOf(sizes.iter().filter(|s| rule.accepts(**s)).copied().collect())
        }
        (SizeRule::UpTo(x), SizeRule::MultipleOf { unit, up_to })
        | (SizeRule::MultipleOf { unit, up_to }, SizeRule::UpTo(x)) => {
            SizeRule::MultipleOf { unit: *unit, up_to: *x.min(up_to) }
        }
        (SizeRule::MultipleOf { unit: u, up_to: x }, SizeRule::MultipleOf { unit: v, up_to: y }) => {
            SizeRule::MultipleOf { unit: lcm(*u, *v), up_to: *x.min(y) }
        }
    }
}

fn both_dims(a: &DimRule, b: &DimRule) -> DimRule {
    match (a, b) {
        (DimRule::Independent { qk: q, vo: v }, DimRule::Independent { qk, vo }) => {
            DimRule::Independent { qk: both_sizes(q, qk), vo: both_sizes(v, vo) }
        }
        (DimRule::Pairs(pairs), rule) | (rule, DimRule::Pairs(pairs)) => {
            let fits = |(qk, vo): &&(u32, u32)| match rule {
                DimRule::Independent { qk: q, vo: v } => q.accepts(*qk) && v.accepts(*vo),
                DimRule::Pairs(others) => others.contains(&(*qk, *vo)),
            };
            DimRule::Pairs(pairs.iter().filter(fits).copied().collect())
        }
    }
}

fn lcm(a: u32, b: u32) -> u32 {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    (a / x).saturating_mul(b)
}

//! A wrapper that shadows any host backend with the oracle on some steps and keeps the worst error of each layer.
//!
//! For production as much as for tests: the results are the inner backend's, bit for bit; on a sampled step the oracle
//! attends to the same pages after the inner backend has, and the difference is recorded. Nothing is stopped: whoever
//! holds the [`VerifyHandle`] decides what an error means.

mod family;

use std::sync::Arc;

use attn_metadata::plan::PlanReport;
use attn_metadata::{
    AttentionBackend, Batch, BoxedBackend, Bucket, Capabilities, CaptureError, CaptureLimits, Host, Io, Layer, Lse,
    ModelSpec, PoolShape, PrepareError, Prepared, RunError, Steps, SubBatch, check_io,
};
use kvpool::HostTensor;
use parking_lot::Mutex;

use self::family::FamilyOracle;
use crate::oracle::attend;

/// Errors of one layer over all sampled steps.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerErrors {
    /// Output vectors compared: rows × query heads.
    pub num_vectors: u64,
    /// Largest difference of an element.
    pub max_abs: f64,
    /// Largest L2 norm of a vector's difference, relative to that of the oracle's vector.
    pub max_rel: f64,
    /// Largest difference of an LSE, where the call asked for it.
    pub max_lse_abs: f64,
    /// Vectors that are not finite where the oracle's are, not zero where a row sees nothing, or the other way round.
    pub num_anomalies: u64,
}

/// What was seen so far.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VerifyReport {
    /// Steps prepared or replayed.
    pub num_steps: u64,
    /// Steps that were compared.
    pub num_sampled: u64,
    /// One entry for each layer of the model; of a layer of a family that nobody gave an oracle for, an empty one.
    pub layers: Vec<LayerErrors>,
}

impl VerifyReport {
    /// The layer with the largest relative error, and its errors; `None` before anything was compared.
    #[must_use]
    pub fn worst(&self) -> Option<(usize, &LayerErrors)> {
        let compared = self.layers.iter().enumerate().filter(|(_, errors)| errors.num_vectors > 0);
        compared.max_by(|(_, a), (_, b)| a.max_rel.total_cmp(&b.max_rel))
    }

    /// Anomalies over all layers.
    #[must_use]
    pub fn num_anomalies(&self) -> u64 {
        self.layers.iter().map(|errors| errors.num_anomalies).sum()
    }
}

/// Reads the report of a [`VerifyBackend`] while it runs, from any thread.
#[derive(Clone, Debug)]
pub struct VerifyHandle(Arc<Mutex<VerifyReport>>);

impl VerifyHandle {
    /// A copy of the report.
    #[must_use]
    pub fn report(&self) -> VerifyReport {
        self.0.lock().clone()
    }
}

/// A step of the inner backend and, where it is sampled, what the oracle needs of it.
struct Shadowed {
    inner: Option<Prepared>,
    batch: Batch,
    /// Its number among the sampled steps, from 1 on.
    sample: Option<u64>,
}

/// A backend shadowed by the oracle.
pub struct VerifyBackend {
    inner: BoxedBackend<Host>,
    families: Option<FamilyOracle>,
    every: u64,
    steps: Steps<Shadowed>,
    report: Arc<Mutex<VerifyReport>>,
}

impl std::fmt::Debug for VerifyBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VerifyBackend")
            .field("inner", &self.inner.name())
            .field("every", &self.every)
            .finish_non_exhaustive()
    }
}

impl VerifyBackend {
    /// Shadows `inner` on the first step and every `every`-th after it; 0 never does.
    #[must_use]
    pub fn new(inner: BoxedBackend<Host>, every: u64) -> Self {
        let layers = vec![LayerErrors::default(); inner.model().layers().len()];
        let pool = PoolShape { num_pages: 0, page_size: inner.model().page_size() };
        Self {
            inner,
            families: None,
            every,
            steps: Steps::new(Shadowed::new(pool)),
            report: Arc::new(Mutex::new(VerifyReport { layers, ..VerifyReport::default() })),
        }
    }

    /// Compares layers of families too, with a backend made for the same model that runs them on their oracles.
    #[must_use]
    pub fn with_families(self, oracle: BoxedBackend<Host>) -> Self {
        Self { families: Some(FamilyOracle::new(oracle)), ..self }
    }

    /// A handle to the report.
    #[must_use]
    pub fn handle(&self) -> VerifyHandle {
        VerifyHandle(Arc::clone(&self.report))
    }
}

impl Shadowed {
    fn new(pool: PoolShape) -> Self {
        Self { inner: None, batch: Batch::empty(pool), sample: None }
    }

    /// Keeps what the oracle needs, if this step is to be compared, and counts the step.
    fn sample(&mut self, batch: &Batch, every: u64, report: &Mutex<VerifyReport>) {
        let mut report = report.lock();
        let is_sampled = every != 0 && report.num_steps.is_multiple_of(every);
        report.num_steps += 1;
        report.num_sampled += u64::from(is_sampled);
        self.sample = is_sampled.then_some(report.num_sampled);
        if is_sampled {
            // The new KV is in the pages when the oracle looks.
            batch.select_into(&mut self.batch, SubBatch::Later, |_| true);
        }
    }
}

impl AttentionBackend<Host> for VerifyBackend {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn model(&self) -> &ModelSpec {
        self.inner.model()
    }

    fn prepare_metadata(&mut self, batch: &Batch) -> Result<Prepared, PrepareError> {
        let Self { inner, every, steps, report, .. } = self;
        steps.prepare(batch, |step| {
            step.inner = Some(inner.prepare_metadata(batch)?);
            step.sample(batch, *every, report);
            Ok(())
        })
    }

    fn forward(&mut self, step: &Prepared, layer: usize, mut io: Io<'_, Host>) -> Result<(), RunError> {
        let Self { inner, families, steps, report, .. } = self;
        let shadowed = steps.get(step)?;
        check_io(inner.model(), step, layer, &io)?;
        inner.forward(shadowed.inner.as_ref().expect("a live step has its inner one"), layer, io.reborrow())?;
        if let Some(sample) = shadowed.sample {
            let spec = &inner.model().layers()[layer];
            let expected = if spec.family().is_some() {
                families.as_mut().and_then(|oracle| {
                    oracle.prepare(sample, &shadowed.batch);
                    oracle.attend(layer, spec, &mut io)
                })
            } else {
                let expected = attend(&shadowed.batch, spec, &io.q, io.kv.cache());
                Some((expected.out, expected.lse))
            };
            if let Some((out, lse)) = expected {
                let found = Comparison { batch: &shadowed.batch, spec, out: &out, lse: &lse };
                let errors = found.errors(&io.out.as_ref(), io.lse.as_deref());
                report.lock().layers[layer].add(&errors);
            }
        }
        Ok(())
    }

    fn explain(&self, step: &Prepared) -> Result<PlanReport, RunError> {
        let shadowed = self.steps.get(step)?;
        self.inner.explain(shadowed.inner.as_ref().expect("a live step has its inner one"))
    }

    fn init_capture_graph(&mut self, limits: &CaptureLimits) -> Result<(), CaptureError> {
        self.inner.init_capture_graph(limits)?;
        self.steps.init_capture(limits)
    }

    fn prepare_for_capture(&mut self, bucket: Bucket) -> Result<Prepared, CaptureError> {
        let Self { inner, steps, .. } = self;
        let page_size = inner.model().page_size();
        steps.capture(bucket, |limits| {
            let mut step = Shadowed::new(PoolShape { num_pages: limits.num_pool_pages, page_size });
            step.inner = Some(inner.prepare_for_capture(bucket)?);
            Ok(step)
        })
    }

    fn prepare_for_replay(&mut self, step: &mut Prepared, batch: &Batch) -> Result<(), CaptureError> {
        let Self { inner, every, steps, report, .. } = self;
        steps.replay(step, batch, |step, _| {
            inner.prepare_for_replay(step.inner.as_mut().expect("a captured step has its inner one"), batch)?;
            step.sample(batch, *every, report);
            Ok(())
        })
    }
}

impl LayerErrors {
    fn add(&mut self, other: &Self) {
        self.num_vectors += other.num_vectors;
        self.max_abs = self.max_abs.max(other.max_abs);
        self.max_rel = self.max_rel.max(other.max_rel);
        self.max_lse_abs = self.max_lse_abs.max(other.max_lse_abs);
        self.num_anomalies += other.num_anomalies;
    }
}

/// A call's result beside the oracle's.
struct Comparison<'a> {
    batch: &'a Batch,
    spec: &'a Layer,
    /// The oracle's outputs `[rows, heads, width]`.
    out: &'a [f64],
    /// Its LSEs `[rows, heads]`.
    lse: &'a [f64],
}

impl Comparison<'_> {
    fn errors(&self, out: &HostTensor<'_>, lse: Option<&[Lse]>) -> LayerErrors {
        let mut errors = LayerErrors::default();
        let heads = self.spec.heads();
        let (num_heads, dim) = (heads.num_qo_heads as usize, heads.head_dim_vo as usize);
        let mut got = vec![0.0; dim];
        for row in self.batch.requests().iter().flat_map(|r| r.q_start as usize..(r.q_start + r.q_len) as usize) {
            for head in 0..num_heads {
                let vector = row * num_heads + head;
                out.read(row, head, &mut got);
                let lse = lse.map(|lse| (f64::from(lse[vector].ln()), self.lse[vector]));
                errors.add(&vector_errors(&got, &self.out[vector * dim..][..dim], lse));
            }
        }
        errors
    }
}

/// Errors of one output vector, and of its (found, expected) LSE.
fn vector_errors(got: &[f32], expected: &[f64], lse: Option<(f64, f64)>) -> LayerErrors {
    let mut errors = LayerErrors { num_vectors: 1, ..LayerErrors::default() };
    let is_finite = (got.iter().all(|x| x.is_finite()), expected.iter().all(|x| x.is_finite()));
    let norm: f64 = expected.iter().map(|x| x * x).sum::<f64>().sqrt();
    let is_empty_wrong = norm == 0.0 && got.iter().any(|&x| x != 0.0);
    // The LSE of a row that sees nothing is -inf, and neither +inf nor NaN.
    let is_wrong =
        |(got, expected): (f64, f64)| got.to_bits() != expected.to_bits() && !(got.is_nan() && expected.is_nan());
    let lse_anomaly = lse.is_some_and(|lse| !(lse.0.is_finite() && lse.1.is_finite()) && is_wrong(lse));
    if is_finite.0 != is_finite.1 || is_empty_wrong || lse_anomaly {
        errors.num_anomalies = 1;
        return errors;
    }
    let difference = || got.iter().zip(expected).map(|(&g, e)| f64::from(g) - e);
    errors.max_abs = difference().map(f64::abs).fold(0.0, f64::max);
    if norm > 0.0 {
        errors.max_rel = difference().map(|d| d * d).sum::<f64>().sqrt() / norm;
    }
    if let Some((got, expected)) = lse.filter(|(got, _)| got.is_finite()) {
        errors.max_lse_abs = (got - expected).abs();
    }
    errors
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_a_vector_are_absolute_and_relative() {
        let errors = vector_errors(&[3.0, 4.5], &[3.0, 4.0], Some((1.25, 1.0)));
        let expected = LayerErrors { num_vectors: 1, max_abs: 0.5, max_rel: 0.1, max_lse_abs: 0.25, num_anomalies: 0 };
        assert_eq!(errors, expected);
    }

    #[test]
    fn anomalies_are_counted_and_not_averaged_away() {
        let count = |got: &[f32], expected: &[f64], lse| vector_errors(got, expected, lse).num_anomalies;
        assert_eq!(count(&[f32::NAN, 1.0], &[1.0, 1.0], None), 1);
        assert_eq!(count(&[1.0], &[f64::INFINITY], None), 1);
        assert_eq!(count(&[1e-30], &[0.0], None), 1);
        assert_eq!(count(&[0.0], &[0.0], Some((0.0, f64::NEG_INFINITY))), 1);
        assert_eq!(count(&[0.0], &[0.0], Some((f64::INFINITY, f64::NEG_INFINITY))), 1);
        assert_eq!(count(&[0.0], &[0.0], Some((f64::NAN, f64::NEG_INFINITY))), 1);
        assert_eq!(count(&[0.0], &[0.0], Some((f64::NEG_INFINITY, f64::NEG_INFINITY))), 0);
        assert_eq!(count(&[f32::NAN], &[f64::NAN], Some((f64::NAN, -f64::NAN))), 0);
    }
}

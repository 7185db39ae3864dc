//! The backend of the tutorial: plain f32 attention on the host, one query at a time. `README.md` explains it.

use attn_metadata::plan::{Plan, PlanConfig, PlanReport};
use attn_metadata::{
    AttentionBackend, BackendConfig, BackendEntry, Batch, BoxedBackend, Bucket, Capabilities, CaptureError,
    CaptureLimits, CreateError, DimRule, FeatureSet, Host, Io, KeptBatch, Layer, Lse, ModelSpec, PLAIN, PlanGroup,
    PoolShape, PrepareError, Prepared, Request, Role, RunError, SizeRule, Steps, check_batch, check_io,
};
use kvpool::{Dtype, KvDtype, Slot};

/// Its name in the registry.
const NAME: &str = "naive";

/// The registry's row for this backend.
#[must_use]
pub fn entry() -> BackendEntry<Host> {
    BackendEntry {
        name: NAME,
        summary: "plain f32, one query at a time; for learning",
        role: Role::ByName,
        capabilities: |_| Ok(capabilities()),
        create,
    }
}

/// Everything, on every machine: all formats go through the host views, and no size is built in.
fn capabilities() -> Capabilities {
    let any = SizeRule::UpTo(u32::MAX);
    Capabilities {
        families: vec![PLAIN],
        q_dtypes: Dtype::ALL.to_vec(),
        kv_dtypes: KvDtype::ALL.to_vec(),
        head_dims: DimRule::Independent { qk: any.clone(), vo: any.clone() },
        group_sizes: any.clone(),
        page_sizes: any,
        features: FeatureSet::all(),
    }
}

/// Refuses, with every reason, a model that needs more than the capabilities.
fn create(config: &BackendConfig<Host>) -> Result<BoxedBackend<Host>, CreateError> {
    let unsupported = |reasons| CreateError::Unsupported { backend: NAME, reasons };
    capabilities().supports_model(&config.model).map_err(unsupported)?;
    let no_pool = PoolShape { num_pages: 0, page_size: config.model.page_size() };
    let steps = Steps::new(KeptBatch::empty(no_pool, 0));
    Ok(Box::new(NaiveBackend { config: config.clone(), capabilities: capabilities(), steps }))
}

/// The attention backend `naive`: it keeps a copy of each live batch, and nothing else.
#[derive(Debug)]
pub struct NaiveBackend {
    config: BackendConfig<Host>,
    capabilities: Capabilities,
    steps: Steps<KeptBatch>,
}

impl AttentionBackend<Host> for NaiveBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn model(&self) -> &ModelSpec {
        &self.config.model
    }

    fn prepare_metadata(&mut self, batch: &Batch) -> Result<Prepared, PrepareError> {
        check_batch(NAME, batch, &self.config.model, &self.config.limits, &self.capabilities)?;
        self.steps.prepare(batch, |kept| {
            kept.keep(batch, batch.num_rows());
            Ok(())
        })
    }

    fn forward(&mut self, step: &Prepared, layer: usize, mut io: Io<'_, Host>) -> Result<(), RunError> {
        let kept = self.steps.get(step)?;
        check_io(&self.config.model, step, layer, &io)?;
        io.kv.append(kept.slots(), layer)?;
        attend_all(kept.batch(), &self.config.model.layers()[layer], io);
        Ok(())
    }

    fn explain(&self, step: &Prepared) -> Result<PlanReport, RunError> {
        let batch = self.steps.get(step)?.batch();
        let plan = |group: &PlanGroup| Plan::new(PlanConfig::UNCUT, *group);
        let mut plans: Vec<_> = self.config.model.groups().iter().map(plan).collect();
        plans.iter_mut().for_each(|plan| plan.update(batch));
        Ok(PlanReport::new(NAME, &self.config.model, batch, &plans, None))
    }

    fn init_capture_graph(&mut self, limits: &CaptureLimits) -> Result<(), CaptureError> {
        self.steps.init_capture(limits)
    }

    fn prepare_for_capture(&mut self, bucket: Bucket) -> Result<Prepared, CaptureError> {
        let page_size = self.config.model.page_size();
        self.steps.capture(bucket, |limits| {
            let pool = PoolShape { num_pages: limits.num_pool_pages, page_size };
            Ok(KeptBatch::empty(pool, bucket.num_rows))
        })
    }

    fn prepare_for_replay(&mut self, step: &mut Prepared, batch: &Batch) -> Result<(), CaptureError> {
        let Self { config, capabilities, steps } = self;
        steps.replay(step, batch, |kept, bucket| {
            check_batch(NAME, batch, &config.model, &config.limits, capabilities)?;
            kept.keep(batch, bucket.num_rows);
            Ok(())
        })
    }
}

/// Writes every row of the step: zeros to the padding, and what each query of each request sees to its own.
fn attend_all(batch: &Batch, layer: &Layer, io: Io<'_, Host>) {
    let Io { q, kv, mut out, mut lse, .. } = io;
    let (heads, cache) = (layer.heads(), kv.cache());
    let padding = batch.num_used_rows() as usize..q.rows();
    for row in if batch.writes_padding() { padding } else { 0..0 } {
        out.fill_row(row, 0.0);
        lse.iter_mut().for_each(|lse| lse[row * q.heads()..][..q.heads()].fill(Lse::EMPTY));
    }
    let (mut query, mut result) = (vec![0.0; q.dim()], vec![0.0; out.dim()]);
    for (request, head) in batch.requests().iter().flat_map(|r| (0..heads.num_qo_heads).map(move |head| (r, head))) {
        let kv_head = head / heads.group_size();
        let keys = gather(batch, request, q.dim(), |slot, key| cache.read_k(slot, kv_head, key));
        let values = gather(batch, request, out.dim(), |slot, value| cache.read_v(slot, kv_head, value));
        for row in 0..request.q_len {
            let (place, head) = ((request.q_start + row) as usize, head as usize);
            q.read(place, head, &mut query);
            let state = Query { batch, layer, request, row, head }.attend(&query, &keys, &values, &mut result);
            out.write(place, head, &result);
            lse.iter_mut().for_each(|lse| lse[place * q.heads() + head] = state);
        }
    }
}

/// One head's keys or values of a request, as real values: `[kv_len, dim]`.
fn gather(batch: &Batch, request: &Request, dim: usize, read: impl Fn(Slot, &mut [f32])) -> Vec<f32> {
    let mut vectors = vec![0.0; request.kv_len as usize * dim];
    for (position, vector) in (0..).zip(vectors.chunks_exact_mut(dim)) {
        let (page, offset) = (batch.page_of(request, position), position % batch.page_size().get());
        read(Slot::new(page, offset, batch.page_size()).expect("slots of a cache fit an i32"), vector);
    }
    vectors
}

/// One query token of one head. `row` counts within the request.
struct Query<'a> {
    batch: &'a Batch,
    layer: &'a Layer,
    request: &'a Request,
    row: u32,
    head: usize,
}

impl Query<'_> {
    /// All scores, then the weighted sum of the values into `out`; the result is the LSE.
    fn attend(&self, q: &[f32], keys: &[f32], values: &[f32], out: &mut [f32]) -> Lse {
        let score = |key| (key, self.score(key, q, &keys[key as usize * q.len()..]));
        let scores: Vec<(u32, f32)> = (0..self.request.kv_len).filter(|&key| self.sees(key)).map(score).collect();
        let sink = self.layer.sinks().map_or(f32::NEG_INFINITY, |sinks| sinks[self.head]);
        let max = scores.iter().fold(sink, |max, &(_, s)| if s > max || s.is_nan() { s } else { max });
        out.fill(0.0);
        if max == f32::NEG_INFINITY {
            return Lse::EMPTY;
        }
        let mut sum = (sink - max).exp();
        for (key, score) in scores {
            let weight = (score - max).exp();
            sum += weight;
            let value = &values[key as usize * out.len()..];
            out.iter_mut().zip(value).for_each(|(out, v)| *out += weight * v);
        }
        out.iter_mut().for_each(|out| *out /= sum);
        Lse::from_ln(max + sum.ln())
    }

    /// Causality, window and custom mask: each applies where given.
    fn sees(&self, key: u32) -> bool {
        let age = self.request.position(self.row) - i64::from(key);
        let causal = !self.layer.is_causal() || age >= 0;
        let window = self.layer.window_left().is_none_or(|window| age <= i64::from(window));
        let custom = || self.batch.custom_mask().is_none_or(|mask| mask.is_visible(self.request, self.row, key));
        causal && window && custom()
    }

    /// Scale, softcap, ALiBi, in this order.
    fn score(&self, key: u32, q: &[f32], k: &[f32]) -> f32 {
        let scaled = q.iter().zip(k).map(|(q, k)| q * k).sum::<f32>() * self.layer.sm_scale();
        let capped = self.layer.softcap().map_or(scaled, |cap| cap * (scaled / cap).tanh());
        let distance = (i64::from(key) - self.request.position(self.row)) as f32;
        capped + self.layer.alibi_slopes().map_or(0.0, |slopes| slopes[self.head] * distance)
    }
}

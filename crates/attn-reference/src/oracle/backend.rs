//! Owns [`OracleBackend`]: the oracle behind the backend trait, with every capability and no speed.
//! Invariants: it keeps copies of the prepared batches and nothing else, so every result is that of
//! [`attend`](super::attend) for the batch of the step. Its plans are for show: nothing is split.

use std::sync::Arc;

use attn_metadata::plan::{Chunking, Plan, PlanConfig, PlanReport};
use attn_metadata::{
    AttentionBackend, BackendConfig, BackendEntry, Batch, BatchLimits, Bucket, Capabilities, CaptureError,
    CaptureLimits, DimRule, FeatureSet, Host, Io, Kv, Lse, ModelSpec, PoolShape, PrepareError, Prepared, RunError,
    SizeRule, StampIssuer, SubBatch, check_batch, check_io,
};
use kvpool::{Dtype, HostTensorMut, KvDtype, Slot};

use super::attend::{OracleOutput, attend};

const NAME: &str = "oracle";

/// The registry row of the oracle: chosen by name alone.
#[must_use]
pub fn entry() -> BackendEntry<Host> {
    BackendEntry {
        name: NAME,
        summary: "float64 from the formulas; slow, for checking",
        auto: false,
        capabilities: |_| Ok(capabilities()),
        create: |config| Ok(Box::new(OracleBackend::new(config))),
    }
}

fn capabilities() -> Capabilities {
    let any = SizeRule::UpTo(u32::MAX);
    Capabilities {
        q_dtypes: Dtype::ALL.to_vec(),
        kv_dtypes: KvDtype::ALL.to_vec(),
        head_dims: DimRule::Independent { qk: any.clone(), vo: any.clone() },
        group_sizes: any.clone(),
        page_sizes: any,
        features: FeatureSet::all(),
    }
}

/// The oracle as a backend.
#[derive(Debug)]
pub struct OracleBackend {
    model: Arc<ModelSpec>,
    limits: BatchLimits,
    capabilities: Capabilities,
    stamps: StampIssuer,
    eager: Batch,
    capture: Option<CaptureLimits>,
    captured: Vec<(u64, Batch)>,
}

impl OracleBackend {
    /// An oracle for a model. It can run every model.
    #[must_use]
    pub fn new(config: &BackendConfig<Host>) -> Self {
        let pool = PoolShape { num_pages: 0, page_size: config.model.page_size() };
        Self {
            model: Arc::clone(&config.model),
            limits: config.limits,
            capabilities: capabilities(),
            stamps: StampIssuer::default(),
            eager: Batch::empty(pool),
            capture: None,
            captured: Vec::new(),
        }
    }

    fn batch_of(&self, step: &Prepared) -> Result<&Batch, RunError> {
        let find = |generation| self.captured.iter().find(|(g, _)| *g == generation).map(|(_, batch)| batch);
        self.stamps.check(step, |generation| find(generation).is_some())?;
        let captured = || find(StampIssuer::generation(step)).expect("a checked stamp has its batch");
        Ok(if step.bucket().is_some() { captured() } else { &self.eager })
    }
}

impl AttentionBackend<Host> for OracleBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn model(&self) -> &ModelSpec {
        &self.model
    }

    fn prepare_metadata(&mut self, batch: &Batch) -> Result<Prepared, PrepareError> {
        check_batch(NAME, batch, &self.model, &self.limits, &self.capabilities)?;
        copy_batch(batch, &mut self.eager);
        Ok(self.stamps.issue(batch))
    }

    fn forward(&mut self, step: &Prepared, layer: usize, io: Io<'_, Host>) -> Result<(), RunError> {
        let batch = self.batch_of(step)?;
        check_io(&self.model, step, layer, &io)?;
        let spec = &self.model.layers()[layer];
        let Io { q, kv, out, lse } = io;
        let output = match kv {
            Kv::Attend { cache } => attend(batch, spec, &q, cache),
            Kv::Append { cache, k, v } => {
                let slots = padded_slots(batch, k.rows());
                cache.append(&slots, &k, &v).map_err(|source| RunError::Append { layer, source })?;
                attend(batch, spec, &q, cache)
            }
        };
        write(batch, &output, out, lse);
        Ok(())
    }

    fn explain(&self, step: &Prepared) -> Result<PlanReport, RunError> {
        let batch = self.batch_of(step)?;
        let chunking = Chunking { chunk_len: u32::MAX, max_q_len: u32::MAX };
        let config = PlanConfig { tile_len: 1, chunking, num_workers: 1, unit_overhead: 0 };
        let plan = |group: &attn_metadata::PlanGroup| {
            let mut plan = Plan::new(config, *group);
            plan.update(batch);
            plan
        };
        let plans: Vec<_> = self.model.groups().iter().map(plan).collect();
        Ok(PlanReport::new(NAME, &self.model, batch, &plans, None))
    }

    fn init_capture_graph(&mut self, limits: &CaptureLimits) -> Result<(), CaptureError> {
        limits.validate()?;
        self.capture = Some(limits.clone());
        self.captured.clear();
        Ok(())
    }

    fn prepare_for_capture(&mut self, bucket: Bucket) -> Result<Prepared, CaptureError> {
        let limits = self.capture.as_ref().ok_or(CaptureError::NotInitialised)?;
        if !limits.buckets.contains(&bucket) {
            return Err(CaptureError::UnknownBucket { bucket });
        }
        let step = self.stamps.issue_captured(bucket, limits.num_pool_pages, limits.appends);
        let pool = PoolShape { num_pages: limits.num_pool_pages, page_size: self.model.page_size() };
        self.captured.push((StampIssuer::generation(&step), Batch::empty(pool)));
        Ok(step)
    }

    fn prepare_for_replay(&mut self, step: &mut Prepared, batch: &Batch) -> Result<(), CaptureError> {
        let bucket = step.bucket().ok_or(CaptureError::NotCaptured)?;
        self.batch_of(step).map_err(CaptureError::Stale)?;
        let limits = self.capture.as_ref().ok_or(CaptureError::NotInitialised)?;
        check_replay(batch, bucket, limits)?;
        check_batch(NAME, batch, &self.model, &BatchLimits::NONE, &self.capabilities)?;
        let generation = StampIssuer::generation(step);
        let (_, kept) = self.captured.iter_mut().find(|(g, _)| *g == generation).expect("the step was checked");
        copy_batch(batch, kept);
        Ok(())
    }
}

/// A sub-batch of all requests that also does all the rest is a copy, and reuses memory.
fn copy_batch(batch: &Batch, into: &mut Batch) {
    batch.select_into(into, SubBatch::First, |_| true);
}

fn check_replay(batch: &Batch, bucket: Bucket, limits: &CaptureLimits) -> Result<(), CaptureError> {
    let sizes = [
        ("requests", batch.requests().len() as u64, bucket.num_requests),
        ("rows", u64::from(batch.num_rows()), bucket.num_rows),
        ("KV tokens in one request", u64::from(batch.max_kv_len()), limits.max_kv_len),
        ("pool pages", u64::from(batch.pool().num_pages), limits.num_pool_pages),
    ];
    if let Some((what, got, limit)) = sizes.into_iter().find(|(_, got, limit)| *got > u64::from(*limit)) {
        return Err(CaptureError::OverBucket { what, got, limit: u64::from(limit) });
    }
    if batch.slot_mapping().is_some() != limits.appends {
        return Err(CaptureError::AppendMismatch { captured_appends: limits.appends });
    }
    Ok(())
}

/// The batch's slots, with padding up to the rows of the call.
fn padded_slots(batch: &Batch, rows: usize) -> Vec<Slot> {
    let mut slots = batch.slot_mapping().unwrap_or_default().to_vec();
    slots.resize(rows, Slot::PADDING);
    slots
}

/// Writes the rows of the batch's requests, and the padding rows where they are this batch's to write.
fn write(batch: &Batch, output: &OracleOutput, mut out: HostTensorMut<'_>, mut lse: Option<&mut [Lse]>) {
    let padding = batch.num_used_rows() as usize..output.num_rows;
    let padding = if batch.writes_padding() { padding } else { 0..0 };
    let requests = batch.requests().iter().flat_map(|r| r.q_start as usize..(r.q_start + r.q_len) as usize);
    for row in requests.chain(padding) {
        for head in 0..output.num_qo_heads {
            let state = row * output.num_qo_heads + head;
            let values = &output.out[state * output.head_dim_vo..][..output.head_dim_vo];
            out.write(row, head, &values.iter().map(|&x| narrow(x)).collect::<Vec<_>>());
            if let Some(lse) = lse.as_mut() {
                lse[state] = Lse::from_ln(narrow(output.lse[state]));
            }
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is the point")]
const fn narrow(x: f64) -> f32 {
    x as f32
}

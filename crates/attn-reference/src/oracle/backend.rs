//! Owns [`OracleBackend`]: the oracle behind the backend trait, with every capability and no speed.
//! Invariants: it keeps copies of the prepared batches and nothing else, so every result is that of
//! [`attend`](super::attend) for the batch of the step. Its plans are for show: nothing is split.

use std::sync::Arc;

use attn_metadata::plan::{Plan, PlanConfig, PlanReport};
use attn_metadata::{
    AttentionBackend, BackendConfig, BackendEntry, Batch, BatchLimits, Bucket, Capabilities, CaptureError,
    CaptureLimits, DimRule, FeatureSet, HeadShape, Host, Io, KeptBatch, Layer, Lse, ModelSpec, PLAIN, PlanGroup,
    PoolShape, PrepareError, Prepared, Role, RunError, SizeRule, Steps, check_batch, check_io,
};
use kvpool::{Dtype, HostKv, HostTensor, HostTensorMut, KvDtype};

use super::attend::{OracleOutput, attend};

const NAME: &str = "oracle";

/// The registry row of the oracle: chosen by name alone.
#[must_use]
pub fn entry() -> BackendEntry<Host> {
    BackendEntry {
        name: NAME,
        summary: "float64 from the formulas; slow, for checking",
        role: Role::Oracle,
        capabilities: |_| Ok(capabilities()),
        create: |config| Ok(Box::new(OracleBackend::new(config))),
    }
}

/// Everything, for plain layers.
#[must_use]
pub fn capabilities() -> Capabilities {
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

/// Attention of one layer for a batch over a cache, in f64: [`attend`], or what another family has in its place.
pub type Attend = fn(&Batch, &Layer, &HostTensor<'_>, &HostKv) -> OracleOutput;

/// The oracle as a backend.
#[derive(Debug)]
pub struct OracleBackend {
    name: &'static str,
    attend: Attend,
    model: Arc<ModelSpec>,
    limits: BatchLimits,
    /// What a step may take.
    memory_bytes: Option<u64>,
    capabilities: Capabilities,
    steps: Steps<KeptBatch>,
}

impl OracleBackend {
    /// An oracle for a model. It can run every model.
    #[must_use]
    pub fn new(config: &BackendConfig<Host>) -> Self {
        Self::with_attend(config, NAME, capabilities(), attend)
    }

    /// An oracle for other layers than plain ones: `attend` is called for those that `capabilities` allow, side branches
    /// excepted.
    #[must_use]
    pub fn with_attend(
        config: &BackendConfig<Host>,
        name: &'static str,
        capabilities: Capabilities,
        attend: Attend,
    ) -> Self {
        let pool = PoolShape { num_pages: 0, page_size: config.model.page_size() };
        Self {
            name,
            attend,
            model: Arc::clone(&config.model),
            limits: config.limits,
            memory_bytes: config.device.memory_bytes,
            capabilities,
            steps: Steps::new(KeptBatch::empty(pool, 0)),
        }
    }
}

impl AttentionBackend<Host> for OracleBackend {
    fn name(&self) -> &'static str {
        self.name
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn model(&self) -> &ModelSpec {
        &self.model
    }

    fn prepare_metadata(&mut self, batch: &Batch) -> Result<Prepared, PrepareError> {
        check_batch(self.name, batch, &self.model, &self.limits, &self.capabilities)?;
        check_memory(batch, &self.model, self.memory_bytes)?;
        self.steps.prepare(batch, |kept| {
            kept.keep(batch, batch.num_rows());
            Ok(())
        })
    }

    fn forward(&mut self, step: &Prepared, layer: usize, io: Io<'_, Host>) -> Result<(), RunError> {
        let kept = self.steps.get(step)?;
        let batch = kept.batch();
        check_io(&self.model, step, layer, &io)?;
        let spec = &self.model.layers()[layer];
        let Io { q, mut kv, out, lse, .. } = io;
        kv.append(kept.slots(), layer)?;
        let output = (self.attend)(batch, spec, &q, kv.cache());
        write(batch, &output, out, lse);
        Ok(())
    }

    fn explain(&self, step: &Prepared) -> Result<PlanReport, RunError> {
        let batch = self.steps.get(step)?.batch();
        let plan = |group: &attn_metadata::PlanGroup| {
            let mut plan = Plan::new(PlanConfig::UNCUT, *group);
            plan.update(batch);
            plan
        };
        let plans: Vec<_> = self.model.groups().iter().map(plan).collect();
        let mut report = PlanReport::new(self.name, &self.model, batch, &plans, None);
        for (group, plan) in report.groups.iter_mut().zip(&plans) {
            group.workspace_bytes = group_bytes(batch, plan.group());
        }
        Ok(report)
    }

    fn init_capture_graph(&mut self, limits: &CaptureLimits) -> Result<(), CaptureError> {
        self.steps.init_capture(limits)
    }

    fn prepare_for_capture(&mut self, bucket: Bucket) -> Result<Prepared, CaptureError> {
        let page_size = self.model.page_size();
        self.steps.capture(bucket, |limits| {
            let pool = PoolShape { num_pages: limits.num_pool_pages, page_size };
            Ok(KeptBatch::empty(pool, bucket.num_rows))
        })
    }

    fn prepare_for_replay(&mut self, step: &mut Prepared, batch: &Batch) -> Result<(), CaptureError> {
        let Self { name, steps, model, capabilities, memory_bytes, .. } = self;
        steps.replay(step, batch, |kept, bucket| {
            check_batch(name, batch, model, &BatchLimits::NONE, capabilities)?;
            check_memory(batch, model, *memory_bytes)?;
            kept.keep(batch, bucket.num_rows);
            Ok(())
        })
    }
}

fn check_memory(batch: &Batch, model: &ModelSpec, limit: Option<u64>) -> Result<(), PrepareError> {
    let bytes = needed_bytes(batch, model);
    if limit.is_some_and(|limit| bytes > limit) {
        return Err(PrepareError::OutOfMemory { what: "its float64 copies", bytes });
    }
    Ok(())
}

/// Bytes that a call takes, for whichever layer takes most.
fn needed_bytes(batch: &Batch, model: &ModelSpec) -> u64 {
    model.groups().iter().map(|group| group_bytes(batch, group)).max().unwrap_or(0)
}

/// Bytes that a call takes for a layer of a group: what it gives, and the keys and values of a head of the longest request.
fn group_bytes(batch: &Batch, group: &PlanGroup) -> u64 {
    let HeadShape { num_qo_heads, head_dim_qk, head_dim_vo, .. } = group.heads;
    // Output, LSE, three bounds, a count.
    let state_bytes = 8 * (u64::from(head_dim_vo) + 5);
    let states = u64::from(batch.num_rows()) * u64::from(num_qo_heads);
    // Two vectors with their headers, in tables that double and are copied as they grow; a position, a score, a weight.
    let token_bytes =
        8 * (u64::from(head_dim_qk) + u64::from(head_dim_vo)) + 2 * (3 * size_of::<Vec<f64>>() as u64 + 16) + 3 * 16;
    let kv_bytes = u64::from(batch.max_kv_len()) * token_bytes;
    states.saturating_mul(state_bytes).saturating_add(kv_bytes)
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

//! Owns [`CudaBackend`]: steps, captured steps, tables and workspace; the trait's verbs.

use std::any::Any;
use std::sync::Arc;

use attn_metadata::plan::PlanReport;
use attn_metadata::{
    AttentionBackend, BackendConfig, BackendEntry, Batch, BatchLimits, Bucket, Capabilities, CaptureError,
    CaptureLimits, CreateError, DimRule, Feature, Io, Kv, ModelSpec, PLAIN, PoolShape, PrepareError, Prepared, Reason,
    Role, RunError, SizeRule, Steps, check_batch, check_io, check_store,
};
use kvpool::{Dtype, KvDtype};

use crate::device::{DeviceBuffer, DeviceError, SideStream, Staging, Tail};
use crate::entry::{self, Families, HEAD_DIM_UNIT, Limits, MAX_HEAD_DIM, kernels_of, kv_dtypes_for};
use crate::kernel_set::{KernelSet, LayerConstants};
use crate::launches::LayerCall;
use crate::policy::{GroupPolicy, Invariance, MAX_STRICT_KV_LEN, capture_limits};
use crate::reports::report;
use crate::room::Room;
use crate::space::{Cuda, CudaDevice};
use crate::spans;
use crate::step::{CudaStep, WorkspaceView};
use crate::tables::{self, Contents, Sizes};
use crate::windows::require_positions;

/// Its name in the registry.
pub(crate) const NAME: &str = "cuda";
/// Name of the backend without kernels for one GPU alone.
pub(crate) const PORTABLE_NAME: &str = "cuda-portable";
/// Name of the backend that uses the kernel for any shape alone.
pub(crate) const PLAIN_NAME: &str = "cuda-plain";

/// Name of the backend that chooses from some kernels.
pub(crate) const fn name_of(families: Families) -> &'static str {
    match families {
        Families::All => NAME,
        Families::Portable => PORTABLE_NAME,
        Families::Plain => PLAIN_NAME,
    }
}
/// Name of the backend whose rows do not depend on how a prompt was cut.
pub(crate) const STRICT_NAME: &str = "cuda-strict";
/// Name of the backend that cuts requests by the whole batch.
pub(crate) const FREE_NAME: &str = "cuda-free";

/// Bytes of `claim` of `kernels/params.h`.
pub(crate) const CLAIM_BYTES: usize = 8;

/// The registry's row for the backend with every kernel.
#[must_use]
pub const fn entry() -> BackendEntry<Cuda> {
    BackendEntry {
        name: NAME,
        summary: "tensor-core kernels for NVIDIA GPUs from compute capability 8.0 on",
        role: Role::Auto,
        capabilities: available,
        create: |config| Ok(Box::new(CudaBackend::new(config)?)),
    }
}

/// The registry's row for the backend without kernels for one GPU alone: to compare with.
#[must_use]
pub const fn portable_entry() -> BackendEntry<Cuda> {
    BackendEntry {
        name: PORTABLE_NAME,
        summary: "as cuda, without the kernels that Hopper alone runs: to compare with",
        role: Role::ByName,
        capabilities: available,
        create: |config| Ok(Box::new(CudaBackend::with_families(config, Families::Portable)?)),
    }
}

/// The registry's row for the backend that uses the kernel for any shape alone: slow, to compare with.
#[must_use]
pub const fn plain_entry() -> BackendEntry<Cuda> {
    BackendEntry {
        name: PLAIN_NAME,
        summary: "one warp a query row, key by key: slow, to compare with",
        role: Role::ByName,
        capabilities: available,
        create: |config| Ok(Box::new(CudaBackend::with_families(config, Families::Plain)?)),
    }
}

/// The registry's row for the backend whose rows have the same bits prefilled, in chunks, after a prefix and decoded.
#[must_use]
pub const fn strict_entry() -> BackendEntry<Cuda> {
    BackendEntry {
        name: STRICT_NAME,
        summary: "as cuda, a row's bits do not depend on how its prompt was cut or decoded; without windows and sinks",
        role: Role::ByName,
        capabilities: |device| available_keeping(device, Invariance::Row),
        create: |config| Ok(Box::new(CudaBackend::strict(config)?)),
    }
}

/// The registry's row for the backend that gives up batch invariance: chunks as the whole batch wants them.
#[must_use]
pub const fn free_entry() -> BackendEntry<Cuda> {
    BackendEntry {
        name: FREE_NAME,
        summary: "as cuda, requests cut by what else is in the batch: fewer partial states, bits that depend on it",
        role: Role::ByName,
        capabilities: |device| available_keeping(device, Invariance::None),
        create: |config| Ok(Box::new(CudaBackend::free(config)?)),
    }
}

fn available_keeping(device: &CudaDevice, keeps: Invariance) -> Result<Capabilities, Reason> {
    let mut capabilities = available(device)?;
    capabilities.features.set(Feature::BatchInvariant, keeps != Invariance::None);
    // Tiles of KV begin where a tile of queries begins to see, and a sink's rounding depends on whether its row is split.
    for feature in [Feature::Window, Feature::Sinks] {
        capabilities.features.set(feature, keeps != Invariance::Row);
    }
    Ok(capabilities)
}

fn available(device: &CudaDevice) -> Result<Capabilities, Reason> {
    let (major, minor) = device.device.properties().capability;
    if major < 8 {
        let why = format!("the GPU has compute capability {major}.{minor}, the kernels need 8.0 or newer");
        return Err(Reason::Unavailable { why });
    }
    Ok(capabilities())
}

/// What the kernels can do on any GPU that they run on.
pub(crate) fn capabilities() -> Capabilities {
    let widths = || SizeRule::MultipleOf { unit: HEAD_DIM_UNIT, up_to: MAX_HEAD_DIM };
    let stored = |kv: &KvDtype| Dtype::ALL.into_iter().any(|q| kv_dtypes_for(q).contains(kv));
    Capabilities {
        families: vec![PLAIN],
        q_dtypes: Dtype::ALL.to_vec(),
        kv_dtypes: KvDtype::ALL.into_iter().filter(stored).collect(),
        head_dims: DimRule::Independent { qk: widths(), vo: widths() },
        group_sizes: SizeRule::UpTo(u32::MAX),
        page_sizes: SizeRule::UpTo(u32::MAX),
        features: entry::features(),
    }
}

/// Paged attention on one NVIDIA GPU: any group and page size, every feature of the waist.
///
/// A request's result depends on nothing but the request: not on the batch, padding, capture or the GPU's number of
/// multiprocessors ([`free`](Self::free) gives that up). Requests of few query tokens run on another kernel than long
/// ones, which rounds differently ([`strict`](Self::strict) has one kernel for all).
///
/// All work goes to the device's stream; `forward` returns when it has been given, not when it is done.
#[derive(Debug)]
pub struct CudaBackend {
    name: &'static str,
    model: Arc<ModelSpec>,
    limits: BatchLimits,
    capabilities: Capabilities,
    device: CudaDevice,
    kernels: Arc<KernelSet>,
    layers: Vec<LayerConstants>,
    /// One for each group of the model.
    policies: Vec<GroupPolicy>,
    steps: Steps<CudaStep>,
    /// Where the next step is planned, so that a refusal leaves the live ones alone.
    next: CudaStep,
    staging: Staging,
    /// Where blocks of the two attention kernels claim what they compute; each leaves zeros.
    claims: Arc<DeviceBuffer>,
    /// Where decoding runs beside prefill; `None`: no group's parts ever run at once.
    side: Option<SideStream>,
    /// Partial states of uncaptured steps; grows.
    workspace: Option<Arc<DeviceBuffer>>,
    /// Partial states of captured steps, all of them; made with the limits.
    captured_workspace: Option<Arc<DeviceBuffer>>,
    /// Where partial states are counted, of uncaptured steps and of captured ones, as for the states: zeros between layers.
    counters: Option<Arc<DeviceBuffer>>,
    captured_counters: Option<Arc<DeviceBuffer>>,
}

impl CudaBackend {
    /// A backend for a model. Loads the kernels that it needs.
    ///
    /// # Errors
    /// [`CreateError::Unsupported`] with every reason, [`CreateError::Environment`] where the device fails.
    pub fn new(config: &BackendConfig<Cuda>) -> Result<Self, CreateError> {
        Self::with_families(config, Families::All)
    }

    /// As [`new`](Self::new) with a choice of kernels.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_families(config: &BackendConfig<Cuda>, families: Families) -> Result<Self, CreateError> {
        Self::make(config, name_of(families), families, Invariance::Batch)
    }

    /// As [`new`](Self::new), and a row's bits depend on nothing but the row and the KV that it sees: the same when its
    /// prompt is computed whole, in chunks of any length, after a prefix that was in the cache, or token by token.
    ///
    /// One kernel does all requests, in chunks of 8,192 KV tokens, so decoding is slower where there are few such chunks, and
    /// with fp8. Windows and sinks are refused, and requests of more than 262,144 KV tokens.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn strict(config: &BackendConfig<Cuda>) -> Result<Self, CreateError> {
        Self::make(config, STRICT_NAME, Families::All, Invariance::Row)
    }

    /// As [`new`](Self::new), but how a request is cut depends on the whole batch, for balance with few partial states;
    /// so do its bits. [`Capabilities`] say so: [`Feature::BatchInvariant`] is missing.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn free(config: &BackendConfig<Cuda>) -> Result<Self, CreateError> {
        Self::make(config, FREE_NAME, Families::All, Invariance::None)
    }

    fn make(
        config: &BackendConfig<Cuda>,
        name: &'static str,
        families: Families,
        keeps: Invariance,
    ) -> Result<Self, CreateError> {
        let unsupported = |reasons| CreateError::Unsupported { backend: name, reasons };
        let capabilities = available_keeping(&config.device, keeps).map_err(|reason| unsupported(vec![reason]))?;
        capabilities.supports_model(&config.model).map_err(unsupported)?;
        let properties = config.device.device.properties();
        let limits = Limits { capability: properties.capability, shared_bytes: properties.max_shared_bytes };
        let model = &config.model;
        let chosen: Result<Vec<_>, _> =
            model.layers().iter().map(|layer| kernels_of(model, layer, &limits, families)).collect();
        let mut chosen = chosen.map_err(unsupported)?;
        let mut batch_limits = config.limits;
        if keeps == Invariance::Row {
            chosen.iter_mut().for_each(|kernels| kernels.decode = None);
            batch_limits.max_kv_len = batch_limits.max_kv_len.min(MAX_STRICT_KV_LEN);
        }
        let failed = |source: DeviceError| CreateError::Environment { backend: name, source: Box::new(source) };
        let (kernels, device) = (KernelSet::default(), &config.device.device);
        for kernels_of_layer in &chosen {
            kernels.load(device, kernels_of_layer, config.device.is_checked).map_err(failed)?;
        }
        let constants = model.layers().iter().zip(&chosen).map(|(l, k)| LayerConstants::new(device, l, *k));
        let layers = constants.collect::<Result<Vec<_>, _>>().map_err(failed)?;
        let claims = DeviceBuffer::zeroed(device, 2 * CLAIM_BYTES, "claims").map_err(failed)?;
        let policies = GroupPolicy::of_model(model, &chosen, properties, keeps);
        let may_be_at_once = policies.iter().any(GroupPolicy::may_be_at_once);
        let side = may_be_at_once.then(|| SideStream::new(device)).transpose().map_err(failed)?;
        let pool = PoolShape { num_pages: 0, page_size: model.page_size() };
        let step = || CudaStep::new(policies.iter().map(|policy| policy.plan(pool)).collect());
        Ok(Self {
            name,
            model: Arc::clone(model),
            limits: batch_limits,
            capabilities,
            kernels: Arc::new(kernels),
            layers,
            steps: Steps::new(step()),
            next: step(),
            policies,
            staging: Staging::new(device),
            claims: Arc::new(claims),
            side,
            device: config.device.clone(),
            workspace: None,
            captured_workspace: None,
            counters: None,
            captured_counters: None,
        })
    }

    /// The device.
    #[must_use]
    pub const fn device(&self) -> &CudaDevice {
        &self.device
    }

    /// What a recording of [`forward`](AttentionBackend::forward) with this step uses, besides the caller's tensors:
    /// give it to [`Graph::record`](crate::device::Graph::record).
    ///
    /// Whoever holds it keeps the tables of an uncaptured step as they are: later steps get others. Those of a captured one
    /// are replaced by [`prepare_for_replay`](AttentionBackend::prepare_for_replay).
    ///
    /// # Errors
    /// [`RunError::StalePlan`].
    pub fn keeps(&self, step: &Prepared) -> Result<Vec<Arc<dyn Any + Send + Sync>>, RunError> {
        let planned = self.steps.get(step)?;
        let mut keeps: Vec<Arc<dyn Any + Send + Sync>> =
            vec![Arc::clone(&self.kernels) as _, Arc::clone(&self.claims) as _];
        let buffers = [&planned.tables, &planned.workspace_buffer, &planned.counters].into_iter().flatten();
        keeps.extend(buffers.map(|buffer| Arc::clone(buffer) as Arc<dyn Any + Send + Sync>));
        for layer in &self.layers {
            let constants = [&layer.sinks, &layer.alibi_slopes].into_iter().flatten();
            keeps.extend(constants.map(|buffer| Arc::clone(buffer) as Arc<dyn Any + Send + Sync>));
        }
        Ok(keeps)
    }

    /// Number of a live step's plan, distinct for every captured one.
    pub(crate) fn step_id(&self, step: &Prepared) -> Result<u64, RunError> {
        self.steps.get(step).map(|planned| planned.id)
    }

    /// Plans a batch on the host, into `next`.
    fn plan(&mut self, batch: &Batch, num_rows: u32) -> Result<(), PrepareError> {
        check_batch(self.name, batch, &self.model, &self.limits, &self.capabilities)?;
        require_positions(&self.model, batch, self.limits.max_kv_len)?;
        let next = &mut self.next;
        next.plans.iter_mut().for_each(|plan| plan.cut(batch));
        next.num_rows = num_rows;
        next.has_mask = batch.custom_mask().is_some();
        next.num_kv_indices = i32::try_from(batch.kv_indices().len()).unwrap_or(i32::MAX);
        // Rows of partial states are counted in 31 bits on the device, and must fit there. Each chunk of a split request
        // has one, so chunks are refused as well before the plan has a range for each.
        for (plan, group) in next.plans.iter().zip(self.model.groups()) {
            let rows = plan.num_partial_rows();
            let bytes = workspace_bytes(rows, group.heads.head_dim_vo);
            if i32::try_from(rows).is_err() || bytes > self.device.device.properties().memory_bytes {
                return Err(PrepareError::OutOfMemory { what: "partial states", bytes });
            }
        }
        next.plans.iter_mut().for_each(tables::GroupPlan::share_out);
        Ok(())
    }

    /// Makes room for the tables and partial states of `next`, and sends the tables.
    fn send(&mut self, batch: &Batch) -> Result<(), PrepareError> {
        let Self { next, model, device, workspace, counters, policies, staging, name, .. } = self;
        let sizes = Sizes {
            num_slots: if batch.slot_mapping().is_some() { next.num_rows as usize } else { 0 },
            mask_bytes: batch.custom_mask().map_or(0, |mask| mask.bytes().len()),
            num_kv_indices: batch.kv_indices().len(),
        };
        next.offsets.update(next.plans.iter().map(tables::GroupPlan::sizes), sizes);
        let room = |what| Room { backend: name, device: &device.device, what };
        // Tables that a graph was recorded with are left to it: a replay attends to what they say.
        next.tables.take_if(|tables| Arc::strong_count(tables) > 1);
        room("a step's tables").grow(&mut next.tables, next.offsets.len as u64, DeviceBuffer::new)?;
        let rows = next.plans.iter().map(tables::GroupPlan::num_partial_rows);
        let needs = rows.zip(model.groups()).map(|(rows, group)| workspace_bytes(rows, group.heads.head_dim_vo));
        room("partial states").grow(workspace, needs.max().unwrap_or(0), DeviceBuffer::new)?;
        next.workspace_buffer.clone_from(workspace);
        let bytes = next.plans.iter().map(tables::GroupPlan::counter_bytes).max().unwrap_or(0);
        room("counters of partial states").grow(counters, bytes, DeviceBuffer::zeroed)?;
        next.counters.clone_from(counters);
        let has_slots = batch.slot_mapping().is_some();
        let contents = Contents { batch, num_rows: next.num_rows, has_slots };
        send_tables(name, staging, next, contents)?;
        next.place(|index, plan| {
            let (rows, width) = (plan.num_partial_rows(), model.groups()[index].heads.head_dim_vo);
            let view = workspace.as_ref().map(|buffer| WorkspaceView::carve(buffer, rows, width));
            (policies[index].eager_grids(plan, contents), view.unwrap_or_default())
        });
        Ok(())
    }

    /// Writes new KV to the step's slots and attends to nothing: the first half of
    /// [`forward`](AttentionBackend::forward), for programs that attend elsewhere or later.
    ///
    /// # Errors
    /// [`RunError`], as `forward`.
    pub fn store(&self, step: &Prepared, layer: usize, kv: &Kv<'_, Cuda>) -> Result<(), RunError> {
        self.steps.get(step)?;
        check_store(&self.model, step, layer, kv)?;
        self.call(step, layer, kv)?.store_new(kv).map_err(self.environment(layer))
    }

    /// What the launches of a layer need; its tensors were checked, but for their alignment.
    fn call<'a>(&'a self, step: &Prepared, layer: usize, kv: &'a Kv<'_, Cuda>) -> Result<LayerCall<'a>, RunError> {
        let (failed, device) = (self.environment(layer), &self.device.device);
        kv.cache().require_usable(device).map_err(&failed)?;
        if let Kv::Append { k, v, .. } = kv {
            k.require_usable("k", device).map_err(&failed)?;
            v.as_ref().map_or(Ok(()), |v| v.require_usable("v", device)).map_err(&failed)?;
        }
        let check = if self.device.is_checked { self.device.device.trap_address() } else { Ok(0) };
        Ok(LayerCall {
            device,
            kernels: &self.kernels,
            model: &self.model,
            layer: &self.model.layers()[layer],
            max_kv_len: self.limits.max_kv_len,
            constants: &self.layers[layer],
            step: self.steps.get(step)?,
            group: self.model.group_of(layer).expect("the layer was checked"),
            cache: kv.cache(),
            claims: &self.claims,
            side: self.side.as_ref(),
            check: check.map_err(&failed)?,
        })
    }

    fn environment(&self, layer: usize) -> impl Fn(DeviceError) -> RunError + use<> {
        let backend = self.name;
        move |source| RunError::Environment { backend, layer, source: Box::new(source) }
    }
}

fn workspace_bytes(num_rows: u64, head_dim_vo: u32) -> u64 {
    attn_metadata::plan::WorkspaceLayout::new(num_rows, head_dim_vo).total_bytes()
}

/// Writes a step's tables and gives copies of what its batch uses of them to the stream: mostly one.
fn send_tables(
    backend: &'static str,
    staging: &mut Staging,
    step: &CudaStep,
    contents: Contents<'_>,
) -> Result<(), PrepareError> {
    let Some(target) = &step.tables else { return Ok(()) };
    let (ids, at) = (contents.batch.shared_kv_indices(), step.offsets.kv_indices);
    let tail = Some(Tail { ids: &ids, at });
    let used = spans::used(&step.offsets, &step.plans, contents);
    let sent = staging.send(at, used, tail, target, |bytes| tables::write(bytes, &step.offsets, &step.plans, contents));
    sent.map_err(|error| PrepareError::Environment { backend, why: error.to_string() })
}

impl AttentionBackend<Cuda> for CudaBackend {
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
        self.plan(batch, batch.num_rows())?;
        self.send(batch)?;
        let Self { steps, next, .. } = self;
        steps.prepare(batch, |step| {
            std::mem::swap(step, next);
            Ok(())
        })
    }

    fn forward(&mut self, step: &Prepared, layer: usize, io: Io<'_, Cuda>) -> Result<(), RunError> {
        self.steps.get(step)?;
        check_io(&self.model, step, layer, &io)?;
        let (failed, device) = (self.environment(layer), &self.device.device);
        let Io { q, kv, out, lse, .. } = io;
        q.require_usable("q", device).map_err(&failed)?;
        out.require_usable("out", device).map_err(&failed)?;
        lse.as_ref().map_or(Ok(()), |lse| lse.require_usable("lse", device)).map_err(&failed)?;
        let call = self.call(step, layer, &kv)?;
        call.store_new(&kv).map_err(&failed)?;
        call.attend(q, &out, lse.as_ref()).map_err(&failed)
    }

    fn explain(&self, step: &Prepared) -> Result<PlanReport, RunError> {
        let planned = self.steps.get(step)?;
        Ok(report(self.device.device.properties(), &self.model, &self.policies, &planned.plans))
    }

    fn init_capture_graph(&mut self, limits: &CaptureLimits) -> Result<(), CaptureError> {
        limits.validate()?;
        let limits = &capture_limits(limits, &self.limits);
        let room = |what| Room { backend: self.name, device: &self.device.device, what };
        let groups = self.policies.iter().zip(self.model.groups());
        let bytes = |(policy, group): (&GroupPolicy, &attn_metadata::PlanGroup)| {
            let rows = limits.buckets.iter().map(|bucket| policy.partial_row_bound(group, limits, *bucket)).max();
            workspace_bytes(rows.unwrap_or(0), group.heads.head_dim_vo)
        };
        let bytes = groups.map(bytes).max().unwrap_or(0);
        let (mut workspace, mut counters) = (None, None);
        room("partial states of captured steps").grow(&mut workspace, bytes, DeviceBuffer::new)?;
        let groups = self.policies.iter().zip(self.model.groups());
        let bytes = |(policy, group): (&GroupPolicy, &attn_metadata::PlanGroup)| {
            let of_bucket = |bucket: &Bucket| policy.size_bound(group, limits, *bucket).counter_bytes(&group.heads);
            limits.buckets.iter().map(of_bucket).max().unwrap_or(0)
        };
        let bytes = groups.map(bytes).max().unwrap_or(0);
        room("counters of captured steps").grow(&mut counters, bytes, DeviceBuffer::zeroed)?;
        self.steps.init_capture(limits)?;
        self.captured_workspace = workspace;
        self.captured_counters = counters;
        Ok(())
    }

    fn prepare_for_capture(&mut self, bucket: Bucket) -> Result<Prepared, CaptureError> {
        let Self { steps, policies, model, device, captured_workspace, captured_counters, staging, name, .. } = self;
        steps.capture(bucket, |limits| {
            let pool = PoolShape { num_pages: limits.num_pool_pages, page_size: model.page_size() };
            let mut step = CudaStep::new(policies.iter().map(|policy| policy.plan(pool)).collect());
            let groups = policies.iter().zip(model.groups());
            let sizes = Sizes {
                num_slots: if limits.appends { bucket.num_rows as usize } else { 0 },
                mask_bytes: 0,
                num_kv_indices: kv_index_bound(limits, bucket, model),
            };
            step.num_rows = bucket.num_rows;
            step.num_kv_indices = i32::try_from(sizes.num_kv_indices).unwrap_or(i32::MAX);
            step.offsets.update(groups.map(|(policy, group)| policy.size_bound(group, limits, bucket)), sizes);
            let room = Room { backend: name, device: &device.device, what: "tables of a captured step" };
            room.grow(&mut step.tables, step.offsets.len as u64, DeviceBuffer::new)?;
            step.workspace_buffer.clone_from(captured_workspace);
            step.counters.clone_from(captured_counters);
            let batch = Batch::empty(pool);
            step.plans.iter_mut().for_each(|plan| plan.update(&batch));
            let contents = Contents { batch: &batch, num_rows: bucket.num_rows, has_slots: limits.appends };
            send_tables(name, staging, &step, contents)?;
            step.place(|index, _| {
                let (policy, group) = (&policies[index], &model.groups()[index]);
                let rows = policy.partial_row_bound(group, limits, bucket);
                let view = captured_workspace.as_ref();
                let view = view.map(|buffer| WorkspaceView::carve(buffer, rows, group.heads.head_dim_vo));
                (policy.captured_grids(group, limits, bucket), view.unwrap_or_default())
            });
            Ok(step)
        })
    }

    fn prepare_for_replay(&mut self, step: &mut Prepared, batch: &Batch) -> Result<(), CaptureError> {
        if batch.custom_mask().is_some() {
            let feature = Feature::CustomMask;
            return Err(PrepareError::Unsupported { backend: self.name, feature }.into());
        }
        if let Some(bucket) = step.bucket() {
            let (got, limit) = (batch.max_q_len(), self.policies.iter().map(|p| p.max_q_len(bucket)).min());
            let limit = limit.unwrap_or(u32::MAX);
            if got > limit {
                let what = "query tokens in one request";
                return Err(CaptureError::OverBucket { what, got: got.into(), limit: limit.into() });
            }
        }
        self.plan(batch, step.num_rows())?;
        let Self { steps, next, staging, name, .. } = self;
        steps.replay(step, batch, |planned, _| {
            std::mem::swap(&mut planned.plans, &mut next.plans);
            let has_slots = batch.slot_mapping().is_some();
            let contents = Contents { batch, num_rows: planned.num_rows, has_slots };
            if let Err(error) = send_tables(name, staging, planned, contents) {
                std::mem::swap(&mut planned.plans, &mut next.plans);
                return Err(error.into());
            }
            Ok(())
        })
    }
}

/// Entries of the page table of any batch that fits a bucket.
fn kv_index_bound(limits: &CaptureLimits, bucket: Bucket, model: &ModelSpec) -> usize {
    let pages = limits.max_kv_len.div_ceil(model.page_size().get());
    bucket.num_requests as usize * pages as usize
}

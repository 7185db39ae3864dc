//! Owns [`CpuBackend`]: steps, captured steps, threads and memory; the trait's verbs. The work is in `layer.rs`.

use std::sync::Arc;

use attn_metadata::plan::{Chunking, CutBy, Plan, PlanConfig, PlanReport, Sharing};
use attn_metadata::{
    AttentionBackend, BackendConfig, BackendEntry, Batch, BatchLimits, Bucket, Capabilities, CaptureError,
    CaptureLimits, CreateError, DimRule, FeatureSet, Host, HostDevice, Io, KeptBatch, ModelSpec, PLAIN, PlanGroup,
    PoolShape, PrepareError, Prepared, Reason, Role, RunError, SizeRule, Steps, check_batch, check_io,
};
use kvpool::{Dtype, KvDtype};
use rayon::ThreadPool;

use super::isa::Isa;
use super::layer::LayerCall;
use super::output::Output;
use super::schedule::Schedule;
use super::scratch::{Dims, RowStates, Scratch};
use super::threads::start_threads;
use super::unit::{CHUNK_LEN, UNIT_ROWS};

/// Its name in the registry.
const NAME: &str = "cpu";

/// Widest head vector.
const MAX_HEAD_DIM: u32 = 640;

/// Requests with more query tokens than this are not split: their tiles and heads keep the workers busy.
const MAX_SPLIT_Q_LEN: u32 = 16;

/// The registry's row for this backend.
#[must_use]
pub const fn entry() -> BackendEntry<Host> {
    BackendEntry {
        name: NAME,
        summary: "blocked online softmax on AVX-512, AVX2 or portable vectors",
        role: Role::Auto,
        capabilities: available,
        create,
    }
}

#[expect(clippy::unnecessary_wraps, reason = "the registry's signature")]
fn available(_: &HostDevice) -> Result<Capabilities, Reason> {
    Ok(capabilities())
}

fn create(config: &BackendConfig<Host>) -> Result<attn_metadata::BoxedBackend<Host>, CreateError> {
    Ok(Box::new(CpuBackend::new(config)?))
}

fn capabilities() -> Capabilities {
    Capabilities {
        families: vec![PLAIN],
        q_dtypes: Dtype::ALL.to_vec(),
        kv_dtypes: KvDtype::ALL.to_vec(),
        head_dims: DimRule::Independent { qk: SizeRule::UpTo(MAX_HEAD_DIM), vo: SizeRule::UpTo(MAX_HEAD_DIM) },
        group_sizes: SizeRule::UpTo(u32::MAX),
        page_sizes: SizeRule::UpTo(u32::MAX),
        features: FeatureSet::all(),
    }
}

/// A planned batch.
struct Step {
    kept: KeptBatch,
    /// One for each plan group of the model.
    plans: Vec<Plan>,
    /// One for each plan.
    schedules: Vec<Schedule>,
}

impl Step {
    fn new(model: &ModelSpec, num_workers: u32) -> Step {
        let pool = PoolShape { num_pages: 0, page_size: model.page_size() };
        let plan = |group: &PlanGroup| Plan::new(plan_config(group, num_workers), *group);
        let plans: Vec<Plan> = model.groups().iter().map(plan).collect();
        let schedules = plans.iter().map(|_| Schedule::default()).collect();
        Step { kept: KeptBatch::empty(pool, 0), plans, schedules }
    }

    /// Plans a batch. [`schedule`](Self::schedule) must follow.
    fn plan(&mut self, batch: &Batch, num_rows: u32) {
        self.kept.keep(batch, num_rows);
        self.plans.iter_mut().for_each(|plan| plan.update(self.kept.batch()));
    }

    /// Puts the planned units in order: memory in proportion to their number.
    fn schedule(&mut self) {
        for (plan, schedule) in self.plans.iter().zip(&mut self.schedules) {
            schedule.update(plan, plan.ranges().len());
        }
    }
}

fn plan_config(group: &PlanGroup, num_workers: u32) -> PlanConfig {
    let narrow = |x: usize| u32::try_from(x).expect("a small constant");
    let chunk_len = narrow(CHUNK_LEN);
    PlanConfig {
        tile_len: (narrow(UNIT_ROWS) / group.heads.group_size()).max(1),
        chunking: Chunking { by: CutBy::Request, chunk_len, shortest: chunk_len, max_q_len: MAX_SPLIT_Q_LEN },
        num_workers,
        sharing: Sharing::Even,
        unit_overhead: 64,
    }
}

fn dims(isa: Isa, plan: &Plan) -> Dims {
    let heads = plan.group().heads;
    Dims::new(isa, heads.head_dim_qk as usize, heads.head_dim_vo as usize)
}

/// Bytes of a plan's partial states.
fn partial_bytes(isa: Isa, plan: &Plan) -> u64 {
    RowStates::bytes(plan.num_partial_rows(), dims(isa, plan).vo_padded)
}

/// Paged attention on the CPU. Any head width up to 640, any group and page size, every feature of the waist.
///
/// A row's result depends on nothing but its own query and keys: not on the batch, the number of threads, chunked
/// prefill, prefix hits or whether it was prefilled or decoded. It does depend on the instruction set.
///
/// It has threads of its own. Do not call [`forward`](AttentionBackend::forward) from inside another rayon pool's job:
/// the waiting thread may take up more such jobs on its stack.
pub struct CpuBackend {
    model: Arc<ModelSpec>,
    limits: BatchLimits,
    /// What a step may take.
    memory_bytes: Option<u64>,
    capabilities: Capabilities,
    isa: Isa,
    pool: Arc<ThreadPool>,
    workers: Vec<Scratch>,
    partials: RowStates,
    steps: Steps<Step>,
    /// Where the next step is planned, so that a refusal leaves the live ones alone.
    next: Step,
}

impl std::fmt::Debug for CpuBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CpuBackend")
            .field("isa", &self.isa)
            .field("num_threads", &self.workers.len())
            .finish_non_exhaustive()
    }
}

impl CpuBackend {
    /// A backend for a model, with its own threads and the widest instructions of the machine.
    ///
    /// # Errors
    /// [`CreateError::Unsupported`] with every reason, [`CreateError::Environment`] where threads cannot be started.
    pub fn new(config: &BackendConfig<Host>) -> Result<CpuBackend, CreateError> {
        CpuBackend::with_isa(config, Isa::detect())
    }

    /// As [`CpuBackend::new`] with a chosen instruction set, for tests and comparisons.
    ///
    /// # Errors
    /// As [`CpuBackend::new`].
    pub fn with_isa(config: &BackendConfig<Host>, isa: Isa) -> Result<CpuBackend, CreateError> {
        let pool = start_threads(config.device.num_threads, NAME)
            .map_err(|source| CreateError::Environment { backend: NAME, source: Box::new(source) })?;
        CpuBackend::with_pool(config, isa, Arc::new(pool))
    }

    /// As [`CpuBackend::with_isa`] on threads that others use too, one after the other: for a backend that has several
    /// of these inside. The number of threads in the configuration does not count.
    ///
    /// # Errors
    /// [`CreateError::Unsupported`] with every reason.
    pub fn with_pool(config: &BackendConfig<Host>, isa: Isa, pool: Arc<ThreadPool>) -> Result<CpuBackend, CreateError> {
        let capabilities = capabilities();
        let unsupported = |reasons| CreateError::Unsupported { backend: NAME, reasons };
        capabilities.supports_model(&config.model).map_err(unsupported)?;
        let num_workers = pool.current_num_threads();
        let mut workers: Vec<Scratch> = (0..num_workers).map(|_| Scratch::new()).collect();
        for group in config.model.groups() {
            let dims = Dims::new(isa, group.heads.head_dim_qk as usize, group.heads.head_dim_vo as usize);
            workers.iter_mut().for_each(|scratch| scratch.grow(isa, dims));
        }
        let num_workers = u32::try_from(num_workers).expect("far fewer threads than 2^32");
        Ok(CpuBackend {
            steps: Steps::new(Step::new(&config.model, num_workers)),
            next: Step::new(&config.model, num_workers),
            model: Arc::clone(&config.model),
            limits: config.limits,
            memory_bytes: config.device.memory_bytes,
            capabilities,
            isa,
            pool,
            workers,
            partials: RowStates::default(),
        })
    }

    /// The instruction set in use.
    #[must_use]
    pub const fn isa(&self) -> Isa {
        self.isa
    }

    /// Its threads.
    #[must_use]
    pub const fn pool(&self) -> &Arc<ThreadPool> {
        &self.pool
    }

    fn num_workers(&self) -> u32 {
        u32::try_from(self.workers.len()).expect("far fewer threads than 2^32")
    }

    /// Plans a batch into `next` and makes room for its partial states.
    fn plan(&mut self, batch: &Batch, num_rows: u32) -> Result<(), PrepareError> {
        check_batch(NAME, batch, &self.model, &self.limits, &self.capabilities)?;
        self.next.plan(batch, num_rows);
        self.make_room()?;
        self.next.schedule();
        Ok(())
    }

    /// Makes room for the partial states and the units of the plans in `next`, within what a step may take.
    fn make_room(&mut self) -> Result<(), PrepareError> {
        let Step { plans, schedules, .. } = &mut self.next;
        let partial_bytes = plans.iter().map(|plan| partial_bytes(self.isa, plan)).max().unwrap_or(0);
        let unit_bytes = plans.iter().map(|plan| Schedule::bytes(plan, self.workers.len()));
        let unit_bytes = unit_bytes.fold(0, u64::saturating_add);
        let bytes = partial_bytes.saturating_add(unit_bytes);
        let out_of_memory = PrepareError::OutOfMemory { what: "its plan and partial states", bytes };
        if self.memory_bytes.is_some_and(|limit| bytes > limit) {
            return Err(out_of_memory);
        }
        for (plan, schedule) in plans.iter().zip(schedules) {
            let rows = usize::try_from(plan.num_partial_rows()).unwrap_or(usize::MAX);
            let width = dims(self.isa, plan).vo_padded;
            if !schedule.make_room(plan, self.workers.len()) || !self.partials.make_room(rows, width) {
                return Err(out_of_memory);
            }
        }
        Ok(())
    }
}

impl AttentionBackend<Host> for CpuBackend {
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
        self.plan(batch, batch.num_rows())?;
        let Self { steps, next, .. } = self;
        steps.prepare(batch, |step| {
            std::mem::swap(step, next);
            Ok(())
        })
    }

    fn forward(&mut self, step: &Prepared, layer: usize, mut io: Io<'_, Host>) -> Result<(), RunError> {
        let planned = self.steps.get(step)?;
        check_io(&self.model, step, layer, &io)?;
        let (kept, batch) = (&planned.kept, planned.kept.batch());
        io.kv.append(kept.slots(), layer)?;
        let group = self.model.group_of(layer).expect("the layer was checked");
        let output = Output::new(&mut io.out, io.lse);
        if batch.writes_padding() {
            (batch.num_used_rows() as usize..kept.num_rows()).for_each(|row| output.clear_row(row));
        }
        let call = LayerCall {
            isa: self.isa,
            batch,
            plan: &planned.plans[group],
            schedule: &planned.schedules[group],
            layer: &self.model.layers()[layer],
            q: io.q,
            cache: io.kv.cache(),
            output,
        };
        let (workers, partials) = (&mut self.workers, &mut self.partials);
        self.pool.install(|| call.run(workers, partials));
        Ok(())
    }

    fn explain(&self, step: &Prepared) -> Result<PlanReport, RunError> {
        let planned = self.steps.get(step)?;
        let mut report = PlanReport::new(NAME, &self.model, planned.kept.batch(), &planned.plans, None);
        // Workers take units off a common list, costliest first, and not the plan's ranges.
        for ((group, plan), schedule) in report.groups.iter_mut().zip(&planned.plans).zip(&planned.schedules) {
            group.imbalance = schedule.imbalance(self.workers.len());
            group.workspace_bytes = partial_bytes(self.isa, plan);
        }
        Ok(report)
    }

    fn init_capture_graph(&mut self, limits: &CaptureLimits) -> Result<(), CaptureError> {
        self.steps.init_capture(limits)
    }

    fn prepare_for_capture(&mut self, bucket: Bucket) -> Result<Prepared, CaptureError> {
        let (model, num_workers) = (Arc::clone(&self.model), self.num_workers());
        self.steps.capture(bucket, |limits| {
            let mut step = Step::new(&model, num_workers);
            let pool = PoolShape { num_pages: limits.num_pool_pages, page_size: model.page_size() };
            step.plan(&Batch::empty(pool), bucket.num_rows);
            step.schedule();
            Ok(step)
        })
    }

    fn prepare_for_replay(&mut self, step: &mut Prepared, batch: &Batch) -> Result<(), CaptureError> {
        self.plan(batch, step.num_rows())?;
        let Self { steps, next, .. } = self;
        steps.replay(step, batch, |planned, _| {
            std::mem::swap(planned, next);
            Ok(())
        })
    }
}

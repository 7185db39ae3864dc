//! Owns [`SparseBackend`]: the fast stages behind the backend trait.
//!
//! A call stores new KV, scores and selects where the layer has an index of its own, attends, and computes the index
//! branch's own output where it has one: that is ordinary attention over every visible token, and runs on the dense
//! CPU backend.

use std::sync::Arc;

use attn_metadata::plan::PlanReport;
use attn_metadata::{
    AttentionBackend, BackendConfig, BackendEntry, Batch, BatchLimits, BoxedBackend, Bucket, Capabilities,
    CaptureError, CaptureLimits, CreateError, DimRule, Feature, HeadShape, Host, Io, Kv, Layer, LayerParams, Lse,
    ModelSpec, PoolShape, PrepareError, Prepared, Role, RunError, Side, SizeRule, Steps, SubBatch, check_batch,
    check_io,
};
use attn_reference::cpu::tiles::Workers;
use attn_reference::cpu::{CpuBackend, Isa, entry as dense_entry};
use kvpool::{Dtype, HostTensor, HostTensorMut, KvDtype};

use super::layers::{SparseLayer, sparse_layers};
use super::step::{NotSelected, Numbered};
use crate::cpu::{BlockIndex, BlockIndexInput, BlockSelect, SparseAttend};
use crate::family::SPARSE;
use crate::params::Limits;
use crate::pipeline::Pipeline;
use crate::selection::Selection;
use crate::stage::{Attend, AttendInput, AttendOutput, Offer, Refusal, StageError, Step};
use crate::store::{NewRows, store};
use crate::table::{PageTableAttend, TableLayer};

/// How the third stage is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// Block-sparse attention.
    Blocks,
    /// Dense attention over a sparse page table.
    PageTable,
}

impl Form {
    const fn name(self) -> &'static str {
        match self {
            Self::Blocks => "sparse",
            Self::PageTable => "sparse-pages",
        }
    }

    const fn limits(self) -> &'static Limits {
        match self {
            Self::Blocks => &Limits::CPU,
            Self::PageTable => &Limits::PAGE_TABLE,
        }
    }
}

/// The registry's row for block-sparse attention.
#[must_use]
pub const fn entry() -> BackendEntry<Host> {
    BackendEntry {
        name: Form::Blocks.name(),
        summary: "block-sparse: scores blocks of keys, attends to the best of them",
        role: Role::Auto,
        capabilities: |_| Ok(capabilities()),
        create: |config| Ok(Box::new(SparseBackend::new(config)?)),
    }
}

/// The registry's row for dense attention over a sparse page table: chosen by name alone.
#[must_use]
pub const fn page_table_entry() -> BackendEntry<Host> {
    BackendEntry {
        name: Form::PageTable.name(),
        summary: "block-sparse through the dense CPU backend, one KV head",
        role: Role::ByName,
        capabilities: |_| Ok(capabilities()),
        create: |config| Ok(Box::new(SparseBackend::with_page_table(config)?)),
    }
}

fn capabilities() -> Capabilities {
    let dims = SizeRule::UpTo(Limits::CPU.max_dim);
    let features = [Feature::Lse, Feature::Extend, Feature::Graphs, Feature::ValuesInKeys, Feature::BatchInvariant];
    Capabilities {
        families: vec![SPARSE],
        q_dtypes: Dtype::ALL.to_vec(),
        kv_dtypes: KvDtype::ALL.to_vec(),
        head_dims: DimRule::Independent { qk: dims.clone(), vo: dims },
        group_sizes: SizeRule::UpTo(u32::MAX),
        page_sizes: SizeRule::UpTo(u32::MAX),
        features: features.into_iter().collect(),
    }
}

/// The third stage in one of its forms.
#[derive(Debug)]
enum AnyAttend {
    Blocks(SparseAttend),
    PageTable(Box<PageTableAttend>),
}

impl Attend for AnyAttend {
    fn accepts(&self, offer: &Offer) -> Result<(), Vec<Refusal>> {
        match self {
            Self::Blocks(attend) => attend.accepts(offer),
            Self::PageTable(attend) => attend.accepts(offer),
        }
    }

    fn attend(
        &mut self,
        step: &mut Step<'_>,
        input: &AttendInput<'_>,
        selection: &Selection,
        output: AttendOutput<'_>,
    ) -> Result<(), StageError> {
        match self {
            Self::Blocks(attend) => attend.attend(step, input, selection, output),
            Self::PageTable(attend) => attend.attend(step, input, selection, output),
        }
    }
}

/// What a layer runs on.
type Stages = Pipeline<BlockIndex, BlockSelect, AnyAttend>;

/// The selection of a layer, and the batch that it was made for.
#[derive(Debug)]
struct Selected {
    serial: u64,
    selection: Selection,
}

/// Block-sparse attention on the CPU.
///
/// A row's result depends on nothing but its own query and keys, the index's included: not on the batch, the number of
/// threads, chunked prefill or prefix hits.
pub struct SparseBackend {
    form: Form,
    model: Arc<ModelSpec>,
    limits: BatchLimits,
    capabilities: Capabilities,
    workers: Workers,
    layers: Vec<SparseLayer>,
    /// Layers that are alike share theirs.
    stages: Vec<Stages>,
    stages_of_layer: Vec<usize>,
    /// One for each layer with a selection of its own.
    selected: Vec<Option<Selected>>,
    side: Option<SideAttention>,
    steps: Steps<Numbered>,
    /// Where the next step is planned, so that a refusal leaves the live ones alone.
    next: Numbered,
}

impl std::fmt::Debug for SparseBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SparseBackend")
            .field("form", &self.form)
            .field("workers", &self.workers)
            .finish_non_exhaustive()
    }
}

impl SparseBackend {
    /// A block-sparse backend for a model, all of whose layers are block-sparse.
    ///
    /// # Errors
    /// [`CreateError::Unsupported`] with every reason, [`CreateError::Environment`] where threads cannot be started.
    pub fn new(config: &BackendConfig<Host>) -> Result<Self, CreateError> {
        Self::make(config, Form::Blocks)
    }

    /// As [`new`](Self::new), attending through the dense CPU backend over a sparse page table. For one KV head.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_page_table(config: &BackendConfig<Host>) -> Result<Self, CreateError> {
        Self::make(config, Form::PageTable)
    }

    fn make(config: &BackendConfig<Host>, form: Form) -> Result<Self, CreateError> {
        let (model, backend) = (&config.model, form.name());
        let capabilities = capabilities();
        let checked = capabilities.supports_model(model);
        checked.map_err(|reasons| CreateError::Unsupported { backend, reasons })?;
        let layers = sparse_layers(backend, model, form.limits())?;
        let (mut stages, mut stages_of_layer, mut kinds) = (Vec::new(), Vec::new(), Vec::new());
        for (sparse, layer) in layers.iter().zip(model.layers()) {
            let kind = (sparse.params, layer.heads(), layer.sm_scale(), layer.params().values_in_keys);
            let known = kinds.iter().position(|known| *known == kind);
            stages_of_layer.push(known.unwrap_or(kinds.len()));
            if known.is_none() {
                kinds.push(kind);
                stages.push(make_stages(config, form, sparse, layer)?);
            }
        }
        let workers = Workers::new(Isa::detect(), config.device.num_threads, "sparse")
            .map_err(|source| CreateError::Environment { backend, source: Box::new(source) })?;
        let pool = PoolShape { num_pages: 0, page_size: model.page_size() };
        Ok(Self {
            form,
            model: Arc::clone(model),
            limits: config.limits,
            capabilities,
            workers,
            selected: layers.iter().map(|_| None).collect(),
            side: SideAttention::new(config, &layers)?,
            layers,
            stages,
            stages_of_layer,
            steps: Steps::new(Numbered::empty(pool, 0)),
            next: Numbered::empty(pool, 0),
        })
    }

    /// Which blocks each row of a step attends to in a layer, once [`forward`](AttentionBackend::forward) has run it.
    ///
    /// # Errors
    /// [`RunError::StalePlan`], [`RunError::NoSuchLayer`].
    pub fn selection(&self, step: &Prepared, layer: usize) -> Result<Option<&Selection>, RunError> {
        let serial = self.steps.get(step)?.serial;
        let num_layers = self.layers.len();
        let sparse = self.layers.get(layer).ok_or(RunError::NoSuchLayer { got: layer, num_layers })?;
        let found = self.selected[sparse.source].as_ref().filter(|selected| selected.serial == serial);
        Ok(found.map(|selected| &selected.selection))
    }

    fn plan(&mut self, batch: &Batch, num_rows: u32) -> Result<(), PrepareError> {
        check_batch(self.form.name(), batch, &self.model, &self.limits, &self.capabilities)?;
        self.next.keep(batch, num_rows);
        Ok(())
    }
}

fn make_stages(
    config: &BackendConfig<Host>,
    form: Form,
    sparse: &SparseLayer,
    layer: &Layer,
) -> Result<Stages, CreateError> {
    let (heads, model) = (layer.heads(), &config.model);
    let attend = match form {
        Form::Blocks => AnyAttend::Blocks(SparseAttend::new(heads)),
        Form::PageTable => {
            let layer = TableLayer {
                heads,
                sm_scale: layer.sm_scale(),
                values_in_keys: layer.params().values_in_keys,
                q_dtype: model.q_dtype(),
                kv_dtype: model.kv_dtype(),
                page_size: model.page_size(),
            };
            AnyAttend::PageTable(Box::new(PageTableAttend::new(&dense_entry(), &layer, &config.device)?))
        }
    };
    let index = BlockIndex::new(sparse.params);
    let select = BlockSelect::new(&sparse.params, &heads);
    let pipeline = Pipeline::new(index, select, attend, model.page_size(), heads.num_kv_heads);
    let refused = |refusals: Vec<Refusal>| CreateError::Environment {
        backend: form.name(),
        source: Box::new(StageError::Refused(refusals)),
    };
    pipeline.map_err(refused)
}

impl AttentionBackend<Host> for SparseBackend {
    fn name(&self) -> &'static str {
        self.form.name()
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
        let kept = self.steps.get(step)?;
        check_io(&self.model, step, layer, &io)?;
        let sparse = self.layers[layer];
        let missing = || {
            let error = NotSelected { layer, source_layer: sparse.source };
            RunError::Environment { backend: self.form.name(), layer, source: Box::new(error) }
        };
        let is_there = self.selected[sparse.source].as_ref().is_some_and(|selected| selected.serial == kept.serial);
        if !sparse.is_own(layer) && !is_there {
            return Err(missing());
        }
        if let Some(mut main) = NewRows::of(&mut io.kv) {
            let mut side = io.side.as_mut().and_then(|side| NewRows::of(&mut side.kv));
            store(kept.slots(), &mut main, side.as_mut()).map_err(|source| RunError::Append { layer, source })?;
        }
        let backend = self.form.name();
        let failed = |error: StageError| RunError::Environment { backend, layer, source: Box::new(error) };
        let mut cx = Step { batch: kept.batch(), num_rows: kept.num_rows(), workers: &mut self.workers };
        let pipeline = &mut self.stages[self.stages_of_layer[layer]];
        if let Some(side) = io.side.as_ref().filter(|_| sparse.is_own(layer)) {
            let new = || Selected { serial: 0, selection: pipeline.new_selection() };
            let selected = self.selected[layer].get_or_insert_with(new);
            // Not the batch's until all of it is selected.
            selected.serial = 0;
            let mut input = BlockIndexInput { q: side.q, cache: side.kv.cache() };
            pipeline.select(&mut cx, &mut input, &mut selected.selection).map_err(failed)?;
            selected.serial = kept.serial;
        }
        let selected = self.selected[sparse.source].as_ref().expect("selected above, or checked");
        let sm_scale = self.model.layers()[layer].sm_scale();
        let Io { q, kv, side, mut out, mut lse } = io;
        clear_padding(kept, &mut out, lse.as_deref_mut());
        let input = AttendInput { q, cache: kv.cache(), sm_scale };
        let output = AttendOutput { out, lse };
        pipeline.attend(&mut cx, &input, &selected.selection, output).map_err(failed)?;
        match (&mut self.side, side) {
            (Some(attention), Some(Side { q, kv, out: Some(mut out) })) => {
                clear_padding(kept, &mut out, None);
                let q = first_rows(&q, kept.batch().num_rows() as usize);
                let out = first_rows_mut(&mut out, kept.batch().num_rows() as usize);
                let io = Io { q, kv: Kv::Attend { cache: kv.cache() }, side: None, out, lse: None };
                attention.run(backend, layer, kept, io)
            }
            _ => Ok(()),
        }
    }

    fn explain(&self, step: &Prepared) -> Result<PlanReport, RunError> {
        Ok(self.steps.get(step)?.report(self.form.name(), &self.model))
    }

    fn init_capture_graph(&mut self, limits: &CaptureLimits) -> Result<(), CaptureError> {
        self.steps.init_capture(limits)
    }

    fn prepare_for_capture(&mut self, bucket: Bucket) -> Result<Prepared, CaptureError> {
        let page_size = self.model.page_size();
        self.steps.capture(bucket, |limits| {
            let pool = PoolShape { num_pages: limits.num_pool_pages, page_size };
            Ok(Numbered::empty(pool, bucket.num_rows))
        })
    }

    fn prepare_for_replay(&mut self, step: &mut Prepared, batch: &Batch) -> Result<(), CaptureError> {
        self.plan(batch, step.num_rows())?;
        let Self { steps, next, .. } = self;
        steps.replay(step, batch, |kept, _| {
            std::mem::swap(kept, next);
            Ok(())
        })
    }
}

/// Writes zeros and an empty LSE to the padding rows, where they are the batch's to write.
fn clear_padding(kept: &Numbered, out: &mut HostTensorMut<'_>, mut lse: Option<&mut [Lse]>) {
    if !kept.batch().writes_padding() {
        return;
    }
    let heads = out.heads();
    for row in kept.batch().num_used_rows() as usize..kept.num_rows() {
        out.fill_row(row, 0.0);
        if let Some(lse) = lse.as_deref_mut() {
            lse[row * heads..(row + 1) * heads].fill(Lse::EMPTY);
        }
    }
}

/// The first rows of a tensor.
fn first_rows<'a>(tensor: &HostTensor<'a>, rows: usize) -> HostTensor<'a> {
    let shape = [rows, tensor.heads(), tensor.dim()];
    let part = HostTensor::strided(tensor.data(), shape, tensor.row_stride(), tensor.head_stride());
    part.expect("rows of a valid view are a valid view")
}

fn first_rows_mut<'a>(tensor: &'a mut HostTensorMut<'_>, rows: usize) -> HostTensorMut<'a> {
    let shape = [rows, tensor.heads(), tensor.dim()];
    let (row_stride, head_stride) = (tensor.row_stride(), tensor.head_stride());
    let part = HostTensorMut::strided(tensor.data_mut(), shape, row_stride, head_stride);
    part.expect("rows of a valid view are a valid view")
}

/// The index branches' own outputs, on a dense backend.
struct SideAttention {
    dense: BoxedBackend<Host>,
    /// Place of a layer's branch in the dense backend's model.
    place: Vec<Option<usize>>,
    batch: Batch,
    /// The ticket for the batch of a serial.
    prepared: Option<(u64, Prepared)>,
}

impl SideAttention {
    /// `None` where no layer has index values.
    fn new(config: &BackendConfig<Host>, layers: &[SparseLayer]) -> Result<Option<Self>, CreateError> {
        let (mut place, mut branches) = (Vec::new(), Vec::new());
        for (index, sparse) in layers.iter().enumerate() {
            let has_output = sparse.is_own(index) && sparse.params.has_index_value;
            place.push(has_output.then_some(branches.len()));
            if has_output {
                let heads = HeadShape::new(sparse.params.num_index_heads, 1, sparse.params.index_dim);
                let params = LayerParams { sm_scale: sparse.params.index_scale, ..LayerParams::causal(heads) };
                branches.push(Layer::new(params).expect("checked with the layer"));
            }
        }
        if branches.is_empty() {
            return Ok(None);
        }
        let model = &config.model;
        let model = ModelSpec::new(branches, model.q_dtype(), model.side_dtype(), model.page_size());
        let model = Arc::new(model.expect("there is a branch"));
        let pool = PoolShape { num_pages: 0, page_size: model.page_size() };
        let config = BackendConfig { model, limits: BatchLimits::NONE, device: config.device };
        let dense = Box::new(CpuBackend::new(&config)?);
        Ok(Some(Self { dense, place, batch: Batch::empty(pool), prepared: None }))
    }

    fn run(&mut self, backend: &'static str, layer: usize, kept: &Numbered, io: Io<'_, Host>) -> Result<(), RunError> {
        let Some(place) = self.place[layer] else { return Ok(()) };
        let ticket = match self.prepared.take() {
            Some((serial, ticket)) if serial == kept.serial => ticket,
            _ => {
                // It appends nothing and leaves padding alone: both are done by now.
                kept.batch().select_into(&mut self.batch, SubBatch::Later, |_| true);
                let prepared = self.dense.prepare_metadata(&self.batch);
                prepared.map_err(|error| RunError::Environment { backend, layer, source: Box::new(error) })?
            }
        };
        let result = self.dense.forward(&ticket, place, io);
        self.prepared = Some((kept.serial, ticket));
        result
    }
}

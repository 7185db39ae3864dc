//! Owns [`MlaBackend`]: the trait's verbs over the absorbed and the expanded form, and plain layers beside them.

use std::sync::Arc;

use attn_metadata::plan::PlanReport;
use attn_metadata::{
    AttentionBackend, BackendConfig, BackendEntry, Batch, BatchLimits, BoxedBackend, Bucket, Capabilities,
    CaptureError, CaptureLimits, CreateError, Host, HostDevice, Io, Lse, ModelSpec, PLAIN, PoolShape, PrepareError,
    Prepared, Reason, Role, RunError, Steps, check_batch, check_io,
};
use attn_reference::cpu::{self, CpuBackend, Isa, start_threads};
use kvpool::{HostKv, HostTensor, HostTensorMut};
use rayon::ThreadPool;

use crate::absorbed::Absorbed;
use crate::expanded::{Expanded, ExpandedCall};
use crate::project::Projections;
use crate::step::{Chooser, Step};
use crate::{FAMILY, Form, MlaFamily, MlaWidths};

/// Its name in the registry.
pub(crate) const NAME: &str = "mla";

/// The registry's row for this backend.
#[must_use]
pub const fn entry() -> BackendEntry<Host> {
    BackendEntry {
        name: NAME,
        summary: "latent attention on the CPU: absorbed decode, expanded prefill",
        role: Role::Auto,
        capabilities: available,
        create,
    }
}

fn available(device: &HostDevice) -> Result<Capabilities, Reason> {
    let plain = (cpu::entry().capabilities)(device)?;
    Ok(Capabilities { families: vec![PLAIN, FAMILY], ..plain })
}

fn create(config: &BackendConfig<Host>) -> Result<BoxedBackend<Host>, CreateError> {
    Ok(Box::new(MlaBackend::new(config)?))
}

/// A latent layer.
struct LatentLayer {
    /// Its place among the latent layers.
    index: usize,
    widths: MlaWidths,
    projections: Projections,
    /// `None` where its features rule the form out.
    expanded: Option<Expanded>,
}

/// A layer of the model.
enum Part {
    /// Latent, with weights.
    Latent(Box<LatentLayer>),
    /// Plain: its place among the plain layers.
    Plain(usize),
}

/// What is planned for a batch.
struct Live {
    step: Step,
    /// The plain layers' ticket.
    plain: Option<Prepared>,
    /// Distinguishes steps.
    number: u64,
}

/// Latent attention on the CPU. Layers of the family [`FAMILY`] run absorbed or expanded, request by request, as
/// [`CostModel`](crate::CostModel) says; plain layers (absorbed ones over a latent cache, say) run as on the CPU backend.
///
/// A request's result depends on nothing but the request: not on the batch or the number of threads. The two forms round
/// differently, so prefilling and decoding a token agree to rounding, not to the bit.
pub struct MlaBackend {
    model: Arc<ModelSpec>,
    limits: BatchLimits,
    capabilities: Capabilities,
    layers: Vec<Part>,
    chooser: Chooser,
    absorbed: Option<Absorbed>,
    plain: Option<CpuBackend>,
    steps: Steps<Live>,
    /// Where the next step is planned, so that a refusal leaves the live ones alone.
    next: Live,
    /// The step that `absorbed` has a plan for.
    planned: u64,
    num_steps: u64,
}

impl std::fmt::Debug for MlaBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MlaBackend").field("num_layers", &self.layers.len()).finish_non_exhaustive()
    }
}

impl MlaBackend {
    /// A backend for a model, with its own threads and the widest instructions of the machine. It packs the weights of
    /// the latent layers, which takes three times their memory.
    ///
    /// # Errors
    /// [`CreateError::Unsupported`] with every reason, [`CreateError::Environment`] where threads cannot be started.
    pub fn new(config: &BackendConfig<Host>) -> Result<MlaBackend, CreateError> {
        MlaBackend::with_form(config, Isa::detect(), None)
    }

    /// As [`MlaBackend::new`] with a chosen instruction set and, where given, one form for every request that can have it,
    /// for tests and comparisons.
    ///
    /// # Errors
    /// As [`MlaBackend::new`].
    pub fn with_form(config: &BackendConfig<Host>, isa: Isa, form: Option<Form>) -> Result<MlaBackend, CreateError> {
        let unsupported = |reasons| CreateError::Unsupported { backend: NAME, reasons };
        let capabilities = available(&config.device).map_err(|reason| unsupported(vec![reason]))?;
        capabilities.supports_model(&config.model).map_err(unsupported)?;
        let pool = start_threads(config.device.num_threads, NAME)
            .map_err(|source| CreateError::Environment { backend: NAME, source: Box::new(source) })?;
        let pool = Arc::new(pool);
        let model = Arc::clone(&config.model);
        let is_latent = |layer: &usize| model.layers()[*layer].family_as::<MlaFamily>().is_some();
        let (latent, plain): (Vec<usize>, Vec<usize>) = (0..model.layers().len()).partition(is_latent);
        let named = |error| rename(error);
        let mut layers: Vec<Option<Part>> = model.layers().iter().map(|_| None).collect();
        for (index, &layer) in plain.iter().enumerate() {
            layers[layer] = Some(Part::Plain(index));
        }
        for (index, &layer) in latent.iter().enumerate() {
            let part = latent_layer(&model, layer, index, isa, &pool).map_err(named)?;
            layers[layer] = Some(Part::Latent(Box::new(part)));
        }
        let specs: Vec<_> = latent.iter().map(|&layer| model.layers()[layer].clone()).collect();
        let absorbed = match specs.is_empty() {
            true => None,
            false => Some(Absorbed::new(&specs, config, isa, Arc::clone(&pool)).map_err(named)?),
        };
        let plain = match plain.is_empty() {
            true => None,
            false => Some(plain_backend(config, &plain, isa, &pool).map_err(named)?),
        };
        let empty = PoolShape { num_pages: 0, page_size: model.page_size() };
        let live = || Live { step: Step::new(empty), plain: None, number: 0 };
        Ok(MlaBackend {
            limits: config.limits,
            capabilities,
            layers: layers.into_iter().flatten().collect(),
            chooser: Chooser::new(specs.iter(), model.kv_dtype(), form),
            absorbed,
            plain,
            steps: Steps::new(live()),
            next: live(),
            planned: 0,
            num_steps: 0,
            model,
        })
    }

    /// Plans the latent part of a batch into `next`.
    fn plan(&mut self, batch: &Batch, num_rows: u32) -> Result<(), PrepareError> {
        check_batch(NAME, batch, &self.model, &self.limits, &self.capabilities)?;
        self.num_steps += 1;
        self.next.number = self.num_steps;
        self.next.step.set(batch, num_rows, &self.chooser);
        if let Some(absorbed) = &mut self.absorbed {
            absorbed.prepare(&self.next.step.absorbed)?;
            self.planned = self.next.number;
        }
        Ok(())
    }
}

/// What a part refuses, this backend refuses.
fn rename(error: CreateError) -> CreateError {
    match error {
        CreateError::Unsupported { reasons, .. } => CreateError::Unsupported { backend: NAME, reasons },
        other => other,
    }
}

fn latent_layer(
    model: &ModelSpec,
    layer: usize,
    index: usize,
    isa: Isa,
    pool: &Arc<ThreadPool>,
) -> Result<LatentLayer, CreateError> {
    let spec = &model.layers()[layer];
    let weights = spec.family_as::<MlaFamily>().expect("a latent layer").weights();
    let is_bare = spec.window_left().is_none()
        && spec.softcap().is_none()
        && spec.sinks().is_none()
        && spec.alibi_slopes().is_none();
    let expanded = if is_bare { Some(Expanded::new(spec, isa, Arc::clone(pool))?) } else { None };
    let projections = pool.install(|| Projections::new(isa, weights));
    Ok(LatentLayer { index, widths: weights.widths(), projections, expanded })
}

fn plain_backend(
    config: &BackendConfig<Host>,
    layers: &[usize],
    isa: Isa,
    pool: &Arc<ThreadPool>,
) -> Result<CpuBackend, CreateError> {
    let model = Arc::new(config.model.subset(layers).expect("there are plain layers"));
    CpuBackend::with_pool(&BackendConfig { model, ..config.clone() }, isa, Arc::clone(pool))
}

impl AttentionBackend<Host> for MlaBackend {
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
        self.next.plain = self.plain.as_mut().map(|plain| plain.prepare_metadata(batch)).transpose()?;
        let Self { steps, next, .. } = self;
        steps.prepare(batch, |live| {
            std::mem::swap(live, next);
            Ok(())
        })
    }

    fn forward(&mut self, step: &Prepared, layer: usize, mut io: Io<'_, Host>) -> Result<(), RunError> {
        let Self { model, layers, absorbed, plain, steps, planned, .. } = self;
        let live = steps.get(step)?;
        check_io(model, step, layer, &io)?;
        let latent = match &mut layers[layer] {
            Part::Latent(latent) => latent,
            Part::Plain(index) => {
                let plain = plain.as_mut().expect("there are plain layers");
                return plain.forward(live.plain.as_ref().expect("plain layers are planned"), *index, io);
            }
        };
        io.kv.append(live.step.kept.slots(), layer)?;
        let cache = io.kv.cache();
        let absorbed = absorbed.as_mut().expect("there are latent layers");
        if *planned != live.number {
            let failed = |error| RunError::Environment { backend: NAME, layer, source: Box::new(error) };
            absorbed.prepare(&live.step.absorbed).map_err(failed)?;
            *planned = live.number;
        }
        run(&live.step, layer, latent, absorbed, io.q, cache, &mut Results { out: io.out, lse: io.lse })
    }

    fn explain(&self, step: &Prepared) -> Result<PlanReport, RunError> {
        let live = self.steps.get(step)?;
        let plain = self.plain.as_ref().zip(live.plain.as_ref());
        let mut report = match plain {
            Some((plain, prepared)) => plain.explain(prepared)?,
            None => PlanReport { groups: Vec::new(), notes: Vec::new() },
        };
        if self.planned == live.number {
            self.absorbed.as_ref().and_then(Absorbed::explain).into_iter().for_each(|latent| report.absorb(latent));
        } else if !live.step.runs.is_empty() {
            let note = "absorbed requests are planned anew when this step runs: another one was planned since";
            report.notes.push(note.to_owned());
        }
        report.groups.iter_mut().for_each(|group| group.backend = NAME);
        if self.absorbed.is_some() {
            report.notes.extend(live.step.notes(&self.chooser));
        }
        Ok(report)
    }

    fn init_capture_graph(&mut self, limits: &CaptureLimits) -> Result<(), CaptureError> {
        limits.validate()?;
        if let Some(plain) = &mut self.plain {
            plain.init_capture_graph(limits)?;
        }
        self.steps.init_capture(limits)
    }

    fn prepare_for_capture(&mut self, bucket: Bucket) -> Result<Prepared, CaptureError> {
        let Self { model, steps, chooser, plain, num_steps, .. } = self;
        let page_size = model.page_size();
        steps.capture(bucket, |limits| {
            let empty = PoolShape { num_pages: limits.num_pool_pages, page_size };
            let plain = plain.as_mut().map(|plain| plain.prepare_for_capture(bucket)).transpose()?;
            *num_steps += 1;
            let mut live = Live { step: Step::new(empty), plain, number: *num_steps };
            live.step.set(&Batch::empty(empty), bucket.num_rows, chooser);
            Ok(live)
        })
    }

    fn prepare_for_replay(&mut self, step: &mut Prepared, batch: &Batch) -> Result<(), CaptureError> {
        self.plan(batch, step.num_rows())?;
        let Self { steps, next, plain, .. } = self;
        steps.replay(step, batch, |live, _| {
            if let Some((plain, prepared)) = plain.as_mut().zip(live.plain.as_mut()) {
                plain.prepare_for_replay(prepared, batch)?;
            }
            std::mem::swap(&mut live.step, &mut next.step);
            live.number = next.number;
            Ok(())
        })
    }
}

/// Where a call's results go.
struct Results<'a> {
    out: HostTensorMut<'a>,
    lse: Option<&'a mut [Lse]>,
}

impl Results<'_> {
    fn write(&mut self, row: usize, head: usize, values: &[f32], lse: Lse) {
        self.out.write(row, head, values);
        let num_heads = self.out.heads();
        if let Some(all) = self.lse.as_mut() {
            all[row * num_heads + head] = lse;
        }
    }

    fn clear(&mut self, row: usize) {
        self.out.fill_row(row, 0.0);
        let num_heads = self.out.heads();
        if let Some(all) = self.lse.as_mut() {
            all[row * num_heads..(row + 1) * num_heads].fill(Lse::EMPTY);
        }
    }
}

/// Attends for all requests of a step in their forms.
fn run(
    step: &Step,
    layer: usize,
    latent: &mut LatentLayer,
    absorbed: &mut Absorbed,
    q: HostTensor<'_>,
    cache: &HostKv,
    results: &mut Results<'_>,
) -> Result<(), RunError> {
    let LatentLayer { index, widths, projections, expanded } = latent;
    let (num_heads, value) = (projections.heads.len(), widths.value() as usize);
    let batch = step.kept.batch();
    if batch.writes_padding() {
        (batch.num_used_rows() as usize..step.kept.num_rows()).for_each(|row| results.clear(row));
    }
    if !step.runs.is_empty() {
        let rows = absorbed.forward(step, *index, (projections, *widths), q, cache)?;
        for row in step.runs.iter().cloned().flatten() {
            for head in 0..num_heads {
                let values = &rows.outputs[(head * rows.num_rows + row) * value..][..value];
                results.write(row, head, values, rows.lse[row * num_heads + head]);
            }
        }
    }
    for &place in &step.expanded {
        let request = &batch.requests()[place];
        let expanded = expanded.as_mut().expect("only layers that can be expanded are");
        let call = ExpandedCall { batch, request, layer, projections, q, cache };
        let rows = expanded.forward(&call)?;
        for row in 0..request.q_len as usize {
            for head in 0..num_heads {
                let state = row * num_heads + head;
                let values = &rows.outputs[state * value..][..value];
                results.write(request.q_start as usize + row, head, values, rows.lse[state]);
            }
        }
    }
    Ok(())
}

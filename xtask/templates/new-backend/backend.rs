//! The backend: it delegates to the CPU backend, verb by verb, until it does its own work.

use attn_metadata::plan::PlanReport;
use attn_metadata::{
    AttentionBackend, BackendConfig, BackendEntry, Batch, BoxedBackend, Bucket, Capabilities, CaptureError,
    CaptureLimits, CreateError, Host, HostDevice, Io, ModelSpec, PrepareError, Prepared, Reason, Role, RunError,
};
use attn_reference::cpu;
use attn_reference::cpu::CpuBackend;

/// Its name in the registry.
const NAME: &str = "template";

/// The registry's row for this backend.
#[must_use]
pub const fn entry() -> BackendEntry<Host> {
    BackendEntry {
        name: NAME,
        summary: "delegates to the CPU backend",
        // Chosen by name alone until it is better than what `auto` takes now.
        role: Role::ByName,
        capabilities: available,
        create,
    }
}

/// What it can do on this machine; where it cannot run, the reason and what to do.
fn available(device: &HostDevice) -> Result<Capabilities, Reason> {
    (cpu::entry().capabilities)(device)
}

fn create(config: &BackendConfig<Host>) -> Result<BoxedBackend<Host>, CreateError> {
    Ok(Box::new(TemplateBackend::new(config)?))
}

/// The attention backend `template`.
#[derive(Debug)]
pub struct TemplateBackend {
    inner: CpuBackend,
}

impl TemplateBackend {
    /// A backend for a model.
    ///
    /// # Errors
    /// [`CreateError`] where the model or this machine is not supported.
    pub fn new(config: &BackendConfig<Host>) -> Result<Self, CreateError> {
        Ok(Self { inner: CpuBackend::new(config)? })
    }
}

impl AttentionBackend<Host> for TemplateBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn model(&self) -> &ModelSpec {
        self.inner.model()
    }

    // Once a step. A backend of its own starts with `attn_metadata::check_batch`, plans with `attn_metadata::plan`
    // and keeps the plan in an `attn_metadata::Steps`, which gives the ticket.
    fn prepare_metadata(&mut self, batch: &Batch) -> Result<Prepared, PrepareError> {
        self.inner.prepare_metadata(batch)
    }

    // Once a layer. A backend of its own starts with `Steps::get` and `attn_metadata::check_io`, appends the new KV
    // and then attends.
    fn forward(&mut self, step: &Prepared, layer: usize, io: Io<'_, Host>) -> Result<(), RunError> {
        self.inner.forward(step, layer, io)
    }

    fn explain(&self, step: &Prepared) -> Result<PlanReport, RunError> {
        let mut report = self.inner.explain(step)?;
        report.groups.iter_mut().for_each(|group| group.backend = NAME);
        Ok(report)
    }

    fn init_capture_graph(&mut self, limits: &CaptureLimits) -> Result<(), CaptureError> {
        self.inner.init_capture_graph(limits)
    }

    fn prepare_for_capture(&mut self, bucket: Bucket) -> Result<Prepared, CaptureError> {
        self.inner.prepare_for_capture(bucket)
    }

    fn prepare_for_replay(&mut self, step: &mut Prepared, batch: &Batch) -> Result<(), CaptureError> {
        self.inner.prepare_for_replay(step, batch)
    }
}

//! Owns [`CudaOnHost`]: the CUDA backend for tensors and pages in main memory. Copies in, runs, copies out.
//!
//! For programs whose other layers run on the CPU, for replaying single problems, and for the conformance suite. A call
//! takes the whole cache to the device and, where it appends, back; so it is exact and not fast. Captured steps run as
//! graphs: the first call of a layer records one over buffers of its own, all calls replay it.

use std::sync::OnceLock;

use attn_metadata::plan::PlanReport;
use attn_metadata::{
    AttentionBackend, BackendConfig, BackendEntry, Batch, Bucket, Capabilities, CaptureError, CaptureLimits,
    CreateError, Host, HostDevice, Io, Kv, ModelSpec, PrepareError, Prepared, Reason, Role, RunError, check_io,
};
use kvpool::HostTensor;

use crate::backend::{CudaBackend, FREE_NAME, NAME, PLAIN_NAME, PORTABLE_NAME, STRICT_NAME, name_of};
use crate::device::{Captured, CudaLseMut, CudaTensor, CudaTensorMut, Device, DeviceBuffer, DeviceError, Graph};
use crate::entry::Families;
use crate::mirror::{CacheMirror, pack, packed_bytes, unpack};
use crate::space::{Cuda, CudaDevice};

/// The registry's row for the CUDA backend over main memory.
#[must_use]
pub const fn host_entry() -> BackendEntry<Host> {
    BackendEntry {
        name: NAME,
        summary: "attention on an NVIDIA GPU; tensors and pages are copied there and back",
        role: Role::ByName,
        capabilities: available,
        create: |config| Ok(Box::new(CudaOnHost::new(config)?)),
    }
}

/// The same without the kernels that one GPU alone runs.
#[must_use]
pub const fn host_portable_entry() -> BackendEntry<Host> {
    BackendEntry {
        name: PORTABLE_NAME,
        summary: "as cuda, without the kernels that Hopper alone runs: to compare with",
        role: Role::ByName,
        capabilities: available,
        create: |config| Ok(Box::new(CudaOnHost::with_families(config, Families::Portable)?)),
    }
}

/// The same with the kernel for any shape alone.
#[must_use]
pub const fn host_plain_entry() -> BackendEntry<Host> {
    BackendEntry {
        name: PLAIN_NAME,
        summary: "as cuda, one warp a query row, key by key: slow, to compare with",
        role: Role::ByName,
        capabilities: available,
        create: |config| Ok(Box::new(CudaOnHost::with_families(config, Families::Plain)?)),
    }
}

/// The same with rows that do not depend on how a prompt was cut.
#[must_use]
pub const fn host_strict_entry() -> BackendEntry<Host> {
    BackendEntry {
        name: STRICT_NAME,
        summary: "as cuda, a row's bits do not depend on how its prompt was cut or decoded; without windows and sinks",
        role: Role::ByName,
        capabilities: |_| available_in(&crate::backend::strict_entry()),
        create: |config| Ok(Box::new(CudaOnHost::strict(config)?)),
    }
}

/// The same with requests cut by what else is in the batch.
#[must_use]
pub const fn host_free_entry() -> BackendEntry<Host> {
    BackendEntry {
        name: FREE_NAME,
        summary: "as cuda, requests cut by what else is in the batch: fewer partial states, bits that depend on it",
        role: Role::ByName,
        capabilities: |_| available_in(&crate::backend::free_entry()),
        create: |config| Ok(Box::new(CudaOnHost::free(config)?)),
    }
}

fn available(_: &HostDevice) -> Result<Capabilities, Reason> {
    available_in(&crate::backend::entry())
}

fn available_in(entry: &BackendEntry<Cuda>) -> Result<Capabilities, Reason> {
    let device = first_gpu().map_err(|error| Reason::Unavailable { why: error.to_string() })?;
    (entry.capabilities)(&device.into())
}

/// The first GPU, opened once a process.
fn first_gpu() -> Result<Device, DeviceError> {
    static FIRST: OnceLock<Result<Device, DeviceError>> = OnceLock::new();
    FIRST.get_or_init(|| Device::open(0)).clone()
}

/// The CUDA backend over main memory, see the module.
#[derive(Debug)]
pub struct CudaOnHost {
    recordings: Vec<Recording>,
    inner: CudaBackend,
}

/// A layer of a captured step. The graph is dropped before the buffers that it uses.
#[derive(Debug)]
struct Recording {
    graph: Graph,
    buffers: Buffers,
    step: u64,
    layer: usize,
}

/// Device copies of a call's tensors.
#[derive(Debug)]
struct Buffers {
    q: DeviceBuffer,
    /// New keys, and new values where there are any of their own.
    new: Option<(DeviceBuffer, Option<DeviceBuffer>)>,
    out: DeviceBuffer,
    lse: Option<DeviceBuffer>,
    cache: CacheMirror,
}

/// A call of the backend inside a recording may fail either way.
enum Failure {
    Device(DeviceError),
    Run(RunError),
}

impl From<DeviceError> for Failure {
    fn from(error: DeviceError) -> Self {
        Self::Device(error)
    }
}

impl CudaOnHost {
    /// A backend on the first GPU, with a stream of its own.
    ///
    /// # Errors
    /// [`CreateError::Unsupported`] with what the machine lacks, and as [`CudaBackend::new`].
    pub fn new(config: &BackendConfig<Host>) -> Result<Self, CreateError> {
        Self::with_families(config, Families::All)
    }

    /// As [`new`](Self::new) with a choice of kernels.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_families(config: &BackendConfig<Host>, families: Families) -> Result<Self, CreateError> {
        Self::on(config, name_of(families), false, |config| CudaBackend::with_families(config, families))
    }

    /// As [`new`](Self::new), with rows that do not depend on how a prompt was cut: see [`CudaBackend::strict`].
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn strict(config: &BackendConfig<Host>) -> Result<Self, CreateError> {
        Self::on(config, STRICT_NAME, false, CudaBackend::strict)
    }

    /// As [`new`](Self::new), but how a request is cut depends on the whole batch: see [`CudaBackend::free`].
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn free(config: &BackendConfig<Host>) -> Result<Self, CreateError> {
        Self::on(config, FREE_NAME, false, CudaBackend::free)
    }

    /// As [`new`](Self::new) with kernels that check their tables on the device.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn checked(config: &BackendConfig<Host>) -> Result<Self, CreateError> {
        Self::on(config, NAME, true, CudaBackend::new)
    }

    fn on(
        config: &BackendConfig<Host>,
        backend: &'static str,
        is_checked: bool,
        make: impl FnOnce(&BackendConfig<Cuda>) -> Result<CudaBackend, CreateError>,
    ) -> Result<Self, CreateError> {
        let missing = |error: DeviceError| CreateError::Unsupported {
            backend,
            reasons: vec![Reason::Unavailable { why: error.to_string() }],
        };
        let device = first_gpu().and_then(|device| device.fork()).map_err(missing)?;
        let device = CudaDevice { device, is_checked };
        let config = BackendConfig { model: config.model.clone(), limits: config.limits, device };
        Ok(Self { recordings: Vec::new(), inner: make(&config)? })
    }

    fn device(&self) -> &Device {
        &self.inner.device().device
    }

    /// Runs one call with copies that live for the call.
    fn run(&mut self, step: &Prepared, layer: usize, buffers: &mut Buffers) -> Result<(), RunError> {
        let model = self.inner.model();
        let heads = model.layers().get(layer).map(attn_metadata::Layer::heads);
        let heads = heads.ok_or(RunError::NoSuchLayer { got: layer, num_layers: model.layers().len() })?;
        let (rows, dtype) = (step.num_rows() as usize, model.q_dtype());
        let qo = |dim: u32| [rows, heads.num_qo_heads as usize, dim as usize];
        let kv = |dim: u32| [rows, heads.num_kv_heads as usize, dim as usize];
        let backend = self.inner.name();
        let wrong = |source| RunError::Environment { backend, layer, source: Box::new(source) };
        let tensor = |buffer, shape| CudaTensor::packed(buffer, 0, dtype, shape).map_err(wrong);
        let Buffers { q, new, out, lse, cache } = buffers;
        let io: Io<'_, Cuda> = Io {
            q: tensor(q, qo(heads.head_dim_qk))?,
            kv: match new {
                Some((k, v)) => Kv::Append {
                    k: tensor(k, kv(heads.head_dim_qk))?,
                    v: v.as_ref().map(|v| tensor(v, kv(heads.head_dim_vo))).transpose()?,
                    cache: cache.kv_mut(),
                },
                None => Kv::Attend { cache: cache.kv() },
            },
            side: None,
            out: CudaTensorMut::packed(out, 0, dtype, qo(heads.head_dim_vo)).map_err(wrong)?,
            lse: match lse {
                Some(buffer) => Some(CudaLseMut::new(buffer, 0, rows * heads.num_qo_heads as usize).map_err(wrong)?),
                None => None,
            },
        };
        self.inner.forward(step, layer, io)
    }

    /// Records one layer of a captured step over buffers of its own.
    fn record(&mut self, step: &Prepared, layer: usize, mut buffers: Buffers) -> Result<Recording, RunError> {
        let (id, keeps) = (self.inner.step_id(step)?, self.inner.keeps(step)?);
        let device = self.device().clone();
        let recorded = Graph::record(&device, keeps, || self.run(step, layer, &mut buffers).map_err(Failure::Run));
        match recorded {
            Ok(Captured { graph, .. }) => Ok(Recording { graph, buffers, step: id, layer }),
            Err(Failure::Run(error)) => Err(error),
            Err(Failure::Device(source)) => {
                Err(RunError::Environment { backend: self.inner.name(), layer, source: Box::new(source) })
            }
        }
    }

    fn forward_captured(&mut self, step: &Prepared, layer: usize, io: &mut Io<'_, Host>) -> Result<(), RunError> {
        let (id, backend) = (self.inner.step_id(step)?, self.inner.name());
        let failed = |source: DeviceError| RunError::Environment { backend, layer, source: Box::new(source) };
        let is_this = |r: &Recording| r.step == id && r.layer == layer && r.buffers.fits(io);
        let index = match self.recordings.iter().position(is_this) {
            Some(index) => index,
            None => {
                self.recordings.retain(|r| r.step != id || r.layer != layer);
                let buffers = Buffers::new(self.device(), io).map_err(failed)?;
                let recording = self.record(step, layer, buffers)?;
                self.recordings.push(recording);
                self.recordings.len() - 1
            }
        };
        let Recording { graph, buffers, .. } = &mut self.recordings[index];
        buffers.upload(io).map_err(failed)?;
        graph.replay().map_err(failed)?;
        buffers.download(io).map_err(failed)
    }
}

impl Buffers {
    /// Room for copies of a call's tensors, of anything: see [`upload`](Self::upload).
    fn new(device: &Device, io: &Io<'_, Host>) -> Result<Self, DeviceError> {
        let room = |bytes| DeviceBuffer::new(device, bytes, "a call's tensors");
        let of = |tensor: &HostTensor<'_>| room(packed_bytes(tensor));
        Ok(Self {
            q: of(&io.q)?,
            new: match &io.kv {
                Kv::Append { k, v, .. } => Some((of(k)?, v.as_ref().map(of).transpose()?)),
                Kv::Attend { .. } => None,
            },
            out: of(&io.out.as_ref())?,
            lse: io.lse.as_ref().map(|lse| room(size_of_val(&**lse))).transpose()?,
            cache: CacheMirror::new(device, io.kv.cache())?,
        })
    }

    /// Whether a call's tensors have these sizes.
    fn fits(&self, io: &Io<'_, Host>) -> bool {
        let appends = matches!(io.kv, Kv::Append { .. });
        appends == self.new.is_some() && io.lse.is_some() == self.lse.is_some() && self.cache.fits(io.kv.cache())
    }

    fn upload(&mut self, io: &Io<'_, Host>) -> Result<(), DeviceError> {
        self.q.upload(0, &pack(&io.q))?;
        if let (Some((to_k, to_v)), Kv::Append { k, v, .. }) = (&mut self.new, &io.kv) {
            to_k.upload(0, &pack(k))?;
            if let (Some(to_v), Some(v)) = (to_v, v) {
                to_v.upload(0, &pack(v))?;
            }
        }
        // Rows that belong to nobody here, in a sub-batch, come back as they went.
        self.out.upload(0, &pack(&io.out.as_ref()))?;
        if let (Some(to), Some(lse)) = (&mut self.lse, &io.lse) {
            let values: Vec<f32> = lse.iter().map(|lse| lse.ln()).collect();
            to.upload(0, bytemuck::cast_slice(&values))?;
        }
        self.cache.upload(io.kv.cache())
    }

    fn download(&self, io: &mut Io<'_, Host>) -> Result<(), DeviceError> {
        let mut bytes = vec![0; self.out.len()];
        self.out.download(0, &mut bytes)?;
        unpack(&bytes, &mut io.out);
        if let (Some(from), Some(lse)) = (&self.lse, &mut io.lse) {
            let mut values = vec![0f32; lse.len()];
            from.download(0, bytemuck::cast_slice_mut(&mut values))?;
            lse.iter_mut().zip(values).for_each(|(to, value)| *to = attn_metadata::Lse::from_ln(value));
        }
        match &mut io.kv {
            Kv::Append { cache, .. } => self.cache.download(cache),
            Kv::Attend { .. } => Ok(()),
        }
    }
}

impl AttentionBackend<Host> for CudaOnHost {
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
        self.inner.prepare_metadata(batch)
    }

    fn forward(&mut self, step: &Prepared, layer: usize, mut io: Io<'_, Host>) -> Result<(), RunError> {
        self.inner.step_id(step)?;
        check_io(self.inner.model(), step, layer, &io)?;
        if step.bucket().is_some() {
            return self.forward_captured(step, layer, &mut io);
        }
        let backend = self.inner.name();
        let failed = |source: DeviceError| RunError::Environment { backend, layer, source: Box::new(source) };
        let mut buffers = Buffers::new(self.device(), &io).map_err(failed)?;
        buffers.upload(&io).map_err(failed)?;
        self.run(step, layer, &mut buffers)?;
        buffers.download(&mut io).map_err(failed)
    }

    fn explain(&self, step: &Prepared) -> Result<PlanReport, RunError> {
        self.inner.explain(step)
    }

    fn init_capture_graph(&mut self, limits: &CaptureLimits) -> Result<(), CaptureError> {
        self.inner.init_capture_graph(limits)?;
        self.recordings.clear();
        Ok(())
    }

    fn prepare_for_capture(&mut self, bucket: Bucket) -> Result<Prepared, CaptureError> {
        self.inner.prepare_for_capture(bucket)
    }

    fn prepare_for_replay(&mut self, step: &mut Prepared, batch: &Batch) -> Result<(), CaptureError> {
        self.inner.prepare_for_replay(step, batch)
    }
}

//! Measures workloads on an NVIDIA GPU: one call in a graph, the second-level cache flushed before each replay, the
//! time between two events.
//!
//! Tensors are copies of one run of random elements (`noise`), so that a workload of gigabytes is made in a moment.

mod call;
mod check;
mod copies;
mod environment;
mod noise;

use std::error::Error;
use std::time::Instant;

use attn_cuda::device::{Device, DeviceBuffer, DeviceError, Graph};
use attn_cuda::{CudaBackend, CudaDevice};
use attn_metadata::{AttentionBackend, Prepared};
use kvpool::{Dtype, KvFormat};

pub use environment::GpuEnvironment;

use self::call::Call;
use self::copies::Merge;
use self::noise::{Noise, RUN_ELEMENTS};
use super::ceilings::Ceilings;
use super::measure::{Measured, median};
use super::problem::parts_of;
use super::results::{ResultRow, Results};
use super::work::Work;
use super::workload::{Workload, WorkloadKind};
use crate::report::error_chain;

/// Replays that are timed.
const REPS: usize = 31;
/// Plans that are timed.
const PLAN_REPS: usize = 11;
/// Times that it is planned before.
const PLAN_WARM_UPS: usize = 8;
/// Bytes written before each replay: several times the cache.
const FLUSH_BYTES: usize = 256 << 20;
/// Bytes copied to measure the copy rate.
const COPY_BYTES: usize = 1 << 30;
/// Bytes that a small copy moves, read and written together.
const SMALL_COPY_BYTES: usize = 64 << 20;
/// Seed of the random elements.
const SEED: u64 = 1;

/// A backend for NVIDIA GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GpuBackend {
    /// `cuda`.
    #[default]
    Fast,
    /// `cuda-portable`: the kernels for every GPU.
    Portable,
    /// `cuda-plain`: the kernel for any shape does everything.
    Plain,
    /// `cuda-strict`: a row's bits do not depend on how its prompt was cut.
    Strict,
    /// `cuda-free`: requests are cut by what else is in the batch.
    Free,
}

impl GpuBackend {
    /// Its name in the registry.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fast => "cuda",
            Self::Portable => "cuda-portable",
            Self::Plain => "cuda-plain",
            Self::Strict => "cuda-strict",
            Self::Free => "cuda-free",
        }
    }

    /// The backend of a name.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        [Self::Fast, Self::Portable, Self::Plain, Self::Strict, Self::Free].into_iter().find(|kind| kind.name() == name)
    }
}

/// How workloads are measured.
#[derive(Clone, Debug)]
pub struct GpuOptions {
    /// The backend.
    pub backend: GpuBackend,
    /// Whether attention is measured on `cuda-free` and `cuda-strict` too, for what promises cost.
    pub with_schedules: bool,
    /// Rates that others measured in the same run: reading memory, multiplying matrices.
    pub ceilings: Option<Ceilings>,
    /// The command, for the record.
    pub command: String,
}

/// Figures of a call, and the kernels that ran where it attends.
type Figures = (Measured, Option<String>);
type AnyError = Box<dyn Error + Send + Sync>;

/// Measures workloads one after the other. `progress` is told what is being done.
///
/// # Errors
/// [`DeviceError`] where there is no GPU; a workload that cannot be run is a row that says why.
pub fn measure_on_gpu(
    workloads: &[Workload],
    options: &GpuOptions,
    progress: &mut dyn FnMut(&str),
) -> Result<Results, DeviceError> {
    let device = CudaDevice::open(0)?;
    progress("the copy rate");
    let flush = DeviceBuffer::new(&device.device, FLUSH_BYTES, "flushing the cache")?;
    let mut session = Session { device, flush, noise: Vec::new() };
    let mut gpu = GpuEnvironment::of(&session.device.device, &options.command)?;
    gpu.copy_gbs = copy_gbs(&session.device.device)?;
    let small = session.small_copy_gbs()?;
    gpu.copy_64mb_gbs = Some(small);
    let ceilings = Ceilings { copy_gbs: Some(gpu.copy_gbs), ..options.ceilings.unwrap_or_default() };
    let mut results = Results { ceilings: Some(ceilings), gpu: Some(gpu), ..Results::default() };
    for workload in workloads {
        progress(&workload.name);
        let mut kinds = vec![options.backend];
        if options.with_schedules && workload.is_attention() {
            kinds.push(GpuBackend::Free);
            // Which has no windows.
            kinds.extend((workload.window == 0).then_some(GpuBackend::Strict));
        }
        let name = options.backend.name();
        match session.measure(workload, &kinds) {
            Ok(figures) if workload.is_attention() => {
                let row = |(kind, (figures, kernels)): (&GpuBackend, Figures)| {
                    let row = ResultRow::measured(&workload.name, kind.name(), &figures, Some(&ceilings));
                    ResultRow { kernels, ..row }
                };
                let mut rows: Vec<ResultRow> = kinds.iter().zip(figures).map(row).collect();
                if let [ours, others @ ..] = &mut rows[..] {
                    for other in others {
                        other.ratio = other.ms.zip(ours.ms).map(|(theirs, ours)| theirs / ours);
                    }
                }
                results.results.append(&mut rows);
            }
            Ok(figures) => {
                results.results.extend(figures.iter().map(|(f, _)| ResultRow::moved(&workload.name, name, f, small)));
            }
            Err(error) => results.results.push(ResultRow::skipped(&workload.name, name, error_chain(&*error))),
        }
    }
    Ok(results)
}

#[expect(clippy::cast_precision_loss, reason = "a rate for people")]
fn copy_gbs(device: &Device) -> Result<f64, DeviceError> {
    let from = DeviceBuffer::zeroed(device, COPY_BYTES, "the copy rate")?;
    let mut to = DeviceBuffer::new(device, COPY_BYTES, "the copy rate")?;
    let mut best = f64::INFINITY;
    for _ in 0..8 {
        let timer = device.start_timer()?;
        to.copy_from(0, &from, 0, COPY_BYTES)?;
        best = best.min(timer.stop()?);
    }
    Ok(2.0 * COPY_BYTES as f64 / best / 1e6)
}

/// What one call took.
struct Timed {
    ms: f64,
    plan_us: f64,
    predicted_ms: Option<f64>,
    kernels: String,
}

/// The device with what all workloads share.
struct Session {
    device: CudaDevice,
    flush: DeviceBuffer,
    noise: Vec<Noise>,
}

impl Session {
    /// Figures of a workload on each of some backends, over the same tensors.
    fn measure(&mut self, workload: &Workload, kinds: &[GpuBackend]) -> Result<Vec<Figures>, AnyError> {
        let parts = parts_of(workload)?;
        let queries = self.noise_of(activation_format(parts.dtype))?;
        if workload.kind == WorkloadKind::Merge {
            return Ok(vec![(self.merge(workload, queries)?, None)]);
        }
        let stored = self.noise_of(parts.format)?;
        let mut call = Call::new(&self.device, workload, [&self.noise[queries], &self.noise[stored]])?;
        if workload.kind == WorkloadKind::Store {
            let Timed { ms, plan_us, .. } = self.call(&mut call, kinds[0], true)?;
            let work = Work { bytes: copies::store_bytes(&call), ..Work::default() };
            let rel_err = copies::store_error(&call, &self.noise[queries])?;
            return Ok(vec![(Measured { ms, plan_us, predicted_ms: None, work, rel_err }, None)]);
        }
        let mut attend = |kind: &GpuBackend| {
            let Timed { ms, plan_us, predicted_ms, kernels } = self.call(&mut call, *kind, false)?;
            let rel_err = check::relative_error(&call, [&self.noise[queries], &self.noise[stored]])?;
            Ok((Measured { ms, plan_us, predicted_ms, work: call.work(), rel_err }, Some(kernels)))
        };
        kinds.iter().map(&mut attend).collect()
    }

    /// Times of a call and of its plan, and what the plan predicts.
    fn call(&mut self, call: &mut Call, kind: GpuBackend, stores_alone: bool) -> Result<Timed, AnyError> {
        call.spoil()?;
        let mut backend = call.backend(&self.device, kind)?;
        let (step, plan_us) = self.plan(call, &mut backend)?;
        let graph = call.record(&self.device, &mut backend, &step, stores_alone)?;
        let report = backend.explain(&step)?;
        let predicted_ms = report.predicted_s().map(|seconds| seconds * 1e3);
        Ok(Timed { ms: self.timed(graph)?, plan_us, predicted_ms, kernels: report.kernels() })
    }

    fn merge(&mut self, workload: &Workload, queries: usize) -> Result<Measured, AnyError> {
        let mut merge = Merge::new(&self.device, workload, &self.noise[queries])?;
        let graph = merge.record(&self.device)?;
        let ms = self.timed(graph)?;
        let work = Work { bytes: merge.bytes(), ..Work::default() };
        Ok(Measured { ms, plan_us: 0.0, predicted_ms: None, work, rel_err: merge.error(&self.noise[queries])? })
    }

    /// Plans several times, each time a batch that was filled anew; the median in microseconds.
    fn plan(&self, call: &mut Call, backend: &mut CudaBackend) -> Result<(Prepared, f64), AnyError> {
        let mut times = Vec::new();
        // The first ones allocate: tables lie in several buffers in turn, here and in the backend.
        let mut step = backend.prepare_metadata(&call.batch)?;
        for _ in 0..PLAN_WARM_UPS {
            call.refill()?;
            step = backend.prepare_metadata(&call.batch)?;
        }
        for _ in 0..PLAN_REPS {
            call.refill()?;
            self.device.device.synchronize()?;
            let started = Instant::now();
            step = backend.prepare_metadata(&call.batch)?;
            times.push(started.elapsed().as_secs_f64() * 1e6);
        }
        self.device.device.synchronize()?;
        Ok((step, median(&mut times)))
    }

    /// Median milliseconds of a replay over a cold cache. The graph goes before the tensors that it uses.
    fn timed(&mut self, mut graph: Graph) -> Result<f64, DeviceError> {
        let mut times = Vec::new();
        for rep in 0..=REPS {
            self.flush.fill(u8::try_from(rep).unwrap_or(0))?;
            let timer = self.device.device.start_timer()?;
            graph.replay()?;
            times.push(timer.stop()?);
        }
        Ok(median(&mut times[1..].to_vec()))
    }

    #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
    fn small_copy_gbs(&mut self) -> Result<f64, DeviceError> {
        let (graph, _buffers) = copies::record_copy(&self.device.device, SMALL_COPY_BYTES)?;
        Ok(SMALL_COPY_BYTES as f64 / self.timed(graph)? / 1e6)
    }

    /// The place of the random elements of a format; makes them where this is their first use.
    fn noise_of(&mut self, format: KvFormat) -> Result<usize, DeviceError> {
        if let Some(place) = self.noise.iter().position(|noise| noise.dtype() == format.dtype()) {
            return Ok(place);
        }
        self.noise.push(Noise::new(&self.device.device, format, SEED, RUN_ELEMENTS)?);
        Ok(self.noise.len() - 1)
    }
}

const fn activation_format(dtype: Dtype) -> KvFormat {
    match dtype {
        Dtype::F32 => KvFormat::F32,
        Dtype::F16 => KvFormat::F16,
        Dtype::Bf16 => KvFormat::Bf16,
    }
}

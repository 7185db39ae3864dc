//! Measures workloads on an NVIDIA GPU: one call in a graph, the second-level cache flushed before each replay, the
//! time between two events.

use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

use attn_cuda::device::{CudaKv, CudaTensor, CudaTensorMut, Device, DeviceBuffer, DeviceError, Graph, probe};
use attn_cuda::{Cuda, CudaBackend, CudaDevice};
use attn_metadata::{AttentionBackend, BackendConfig, HostDevice, Io, Kv};
use kvpool::HostSlice;
use serde::{Deserialize, Serialize};

use super::measure::{Measured, median};
use super::problem::problem_of;
use super::results::{ResultRow, Results};
use super::truth::{SampleRows, relative_error};
use super::work::Work;
use super::workload::Workload;
use crate::doctor;
use crate::replay::{Activation, Elements, Outcome, Problem};
use crate::report::error_chain;

/// Replays that are timed.
const REPS: usize = 31;
/// Plans that are timed.
const PLAN_REPS: usize = 5;
/// Bytes written before each replay: several times the cache.
const FLUSH_BYTES: usize = 256 << 20;
/// Bytes copied to measure the copy rate.
const COPY_BYTES: usize = 1 << 30;
/// Rows of the longest request that are checked.
const CHECKED_ROWS: u32 = 16;

/// The GPU of a run, and what it can do.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuEnvironment {
    /// Its name.
    pub name: String,
    /// Compute capability.
    pub capability: String,
    /// Multiprocessors.
    pub num_sms: u32,
    /// CUDA version that the driver is for.
    pub driver: String,
    /// Bytes read and written by a copy on the device, in GB/s, the best of several.
    pub copy_gbs: f64,
}

type AnyError = Box<dyn Error + Send + Sync>;

/// Measures workloads one after the other. `progress` is told what is being done.
///
/// # Errors
/// [`DeviceError`] where there is no GPU; a workload that cannot be run is a row that says why.
pub fn measure_on_gpu(
    workloads: &[Workload],
    is_plain: bool,
    progress: &mut dyn FnMut(&str),
) -> Result<Results, DeviceError> {
    let device = CudaDevice::open(0)?;
    let system = if is_plain { "cuda-plain" } else { "cuda" };
    progress("the copy rate");
    let gpu = environment(&device.device)?;
    let mut results = Results { gpu: Some(gpu), ..Results::default() };
    for workload in workloads {
        progress(&workload.name);
        let row = match one(workload, &device, is_plain) {
            Ok(figures) => ResultRow::measured(&workload.name, system, &figures, None),
            Err(error) => ResultRow::skipped(&workload.name, system, error_chain(&*error)),
        };
        results.results.push(row);
    }
    Ok(results)
}

fn environment(device: &Device) -> Result<GpuEnvironment, DeviceError> {
    let version = probe()?.cuda_version;
    let properties = device.properties();
    let (major, minor) = properties.capability;
    Ok(GpuEnvironment {
        name: properties.name.clone(),
        capability: format!("{major}.{minor}"),
        num_sms: properties.num_sms,
        driver: format!("CUDA {}.{}", version / 1000, version % 1000 / 10),
        copy_gbs: copy_gbs(device)?,
    })
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

fn one(workload: &Workload, device: &CudaDevice, is_plain: bool) -> Result<Measured, AnyError> {
    if workload.kind == "mla" {
        return Err("kind mla: the CUDA backend runs plain attention".into());
    }
    let problem = problem_of(workload, 0, doctor::available_memory_bytes())?;
    let gpu = &device.device;
    let mut cache = CudaKv::from_host(gpu, &problem.cache)?;
    let q = upload(gpu, &problem.q)?;
    let new_kv = match &problem.new_kv {
        Some(new) => Some((upload(gpu, &new.k)?, new.v.as_ref().map(|v| upload(gpu, v)).transpose()?)),
        None => None,
    };
    let mut outcome = problem.outcome();
    let mut out = upload(gpu, &outcome.out)?;
    let host = problem.config(HostDevice::default());
    let config = BackendConfig::<Cuda> { model: Arc::clone(&host.model), limits: host.limits, device: device.clone() };
    let mut backend = if is_plain { CudaBackend::plain(&config)? } else { CudaBackend::new(&config)? };
    let mut plans = Vec::new();
    for _ in 0..PLAN_REPS {
        let started = Instant::now();
        let _ = backend.prepare_metadata(&problem.batch)?;
        plans.push(started.elapsed().as_secs_f64() * 1e6);
        gpu.synchronize()?;
    }
    let step = backend.prepare_metadata(&problem.batch)?;
    gpu.synchronize()?;
    let keeps = backend.keeps(&step)?;
    let recorded = Graph::record(gpu, keeps, || -> Result<(), AnyError> {
        let kv = match &new_kv {
            Some((k, v)) => {
                let view = |buffer, like: &Activation| CudaTensor::packed(buffer, 0, like.dtype(), like.shape());
                let new = problem.new_kv.as_ref().ok_or("no new KV")?;
                let v = v.as_ref().zip(new.v.as_ref()).map(|(buffer, like)| view(buffer, like)).transpose()?;
                Kv::Append { cache: &mut cache, k: view(k, &new.k)?, v }
            }
            None => Kv::Attend { cache: &cache },
        };
        let q = CudaTensor::packed(&q, 0, problem.q.dtype(), problem.q.shape())?;
        let out = CudaTensorMut::packed(&mut out, 0, problem.q.dtype(), outcome.out.shape())?;
        Ok(backend.forward(&step, 0, Io { q, kv, side: None, out, lse: None })?)
    });
    let ms = timed(gpu, recorded?.graph)?;
    outcome.out = download(&out, &outcome.out)?;
    let (plan_us, work) = (median(&mut plans), Work::of(&problem));
    Ok(Measured { ms, plan_us, work, rel_err: error_of(&problem, &outcome) })
}

/// Median milliseconds of a replay over a cold cache. The graph goes before the tensors that it uses.
fn timed(gpu: &Device, mut graph: Graph) -> Result<f64, AnyError> {
    let mut flush = DeviceBuffer::new(gpu, FLUSH_BYTES, "flushing the cache")?;
    let mut times = Vec::new();
    for rep in 0..=REPS {
        flush.fill(u8::try_from(rep)?)?;
        let timer = gpu.start_timer()?;
        graph.replay()?;
        times.push(timer.stop()?);
    }
    Ok(median(&mut times[1..].to_vec()))
}

fn error_of(problem: &Problem, outcome: &Outcome) -> f64 {
    let requests = problem.batch.requests().iter().enumerate();
    let longest = requests.filter(|(_, r)| r.q_len > 0).max_by_key(|(_, r)| r.kv_len);
    let sample = SampleRows { request: longest.map_or(0, |(index, _)| index), head: 0, max_rows: CHECKED_ROWS };
    relative_error(problem, outcome, sample).unwrap_or(0.0)
}

fn upload(gpu: &Device, tensor: &Activation) -> Result<DeviceBuffer, DeviceError> {
    let view = tensor.view();
    let bytes: &[u8] = match view.data() {
        HostSlice::F32(data) => bytemuck::must_cast_slice(data),
        HostSlice::F16(data) => bytemuck::must_cast_slice(data),
        HostSlice::Bf16(data) => bytemuck::must_cast_slice(data),
    };
    DeviceBuffer::from_bytes(gpu, bytes, "tensors")
}

fn download(buffer: &DeviceBuffer, like: &Activation) -> Result<Activation, AnyError> {
    let mut bytes = vec![0; buffer.len()];
    buffer.download(0, &mut bytes)?;
    let elements = Elements::from_bytes(like.dtype(), &bytes);
    Activation::new(elements, like.shape()).ok_or_else(|| "the result has another size".into())
}

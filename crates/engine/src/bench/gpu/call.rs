//! One attention call of a workload on the device: its tensors, its recording, and the check of what it wrote.

use std::sync::Arc;

use attn_cuda::device::{CudaKv, CudaTensor, CudaTensorMut, DeviceBuffer, DeviceError, Graph};
use attn_cuda::{Cuda, CudaBackend, CudaDevice, Families};
use attn_metadata::{AttentionBackend, BackendConfig, Batch, BatchLimits, Io, Kv, Layer, ModelSpec, Prepared};
use kvpool::{Dtype, KvFormat, KvLayout, Values};
use rand::SeedableRng;
use rand::rngs::StdRng;

use super::super::problem::{Parts, Tables, parts_of};
use super::super::work::Work;
use super::super::workload::Workload;
use super::noise::Noise;
use super::{AnyError, GpuBackend};

/// Where queries, and new keys and values, begin among the random elements: odd, so that none is a row of the cache.
pub(super) const Q_FIRST: usize = 12_345_677;
pub(super) const NEW_K_FIRST: usize = 23_456_789;
pub(super) const NEW_V_FIRST: usize = 34_567_891;

/// The call's tensors, filled.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) layer: Layer,
    pub(super) batch: Batch,
    tables: Tables,
    is_append: bool,
    pub(super) dtype: Dtype,
    pub(super) cache: CudaKv,
    q: DeviceBuffer,
    /// New keys, and new values where there are any of their own; where the call appends.
    new: Option<(DeviceBuffer, Option<DeviceBuffer>)>,
    pub(super) out: DeviceBuffer,
}

impl Call {
    /// Makes the tensors: pages in random order, random elements. `like`: elements of the dtypes of q and of the cache.
    pub(super) fn new(device: &CudaDevice, workload: &Workload, like: [&Noise; 2]) -> Result<Self, AnyError> {
        let Parts { layer, dtype, format, pool } = parts_of(workload)?;
        let tables = Tables::new(workload, pool, &mut StdRng::seed_from_u64(0));
        let batch = tables.batch(workload.append)?;
        let (gpu, [queries, stored]) = (&device.device, like);
        let mut cache = CudaKv::for_spec(gpu, layer.kv(), pool.num_pages, pool.page_size, KvLayout::Nhd, format)?;
        stored.fill_pages(&mut cache)?;
        let rows = batch.num_rows() as usize;
        let tensor = |heads: u32, dim: u32, first: usize| -> Result<DeviceBuffer, AnyError> {
            let bytes = rows * heads as usize * dim as usize * dtype.size_bytes();
            let mut buffer = DeviceBuffer::new(gpu, bytes, "tensors")?;
            queries.fill(&mut buffer, first)?;
            Ok(buffer)
        };
        let (heads, spec) = (layer.heads(), layer.kv());
        let q = tensor(heads.num_qo_heads, heads.head_dim_qk, Q_FIRST)?;
        let new = if workload.append {
            let k = tensor(spec.num_kv_heads, spec.head_dim_k, NEW_K_FIRST)?;
            let own = matches!(spec.values, Values::Own(_));
            let v = own.then(|| tensor(spec.num_kv_heads, spec.values.head_dim(), NEW_V_FIRST)).transpose()?;
            Some((k, v))
        } else {
            None
        };
        let out_bytes = rows * heads.num_qo_heads as usize * heads.head_dim_vo as usize * dtype.size_bytes();
        let out = DeviceBuffer::new(gpu, out_bytes, "tensors")?;
        Ok(Self { layer, batch, tables, is_append: workload.append, dtype, cache, q, new, out })
    }

    /// Overwrites the output with NaN, which it is in every dtype: what is not written shows.
    pub(super) fn spoil(&mut self) -> Result<(), DeviceError> {
        self.out.fill(0xff)
    }

    /// Fills the batch anew, as an engine does every step.
    pub(super) fn refill(&mut self) -> Result<(), AnyError> {
        Ok(self.batch.set(&self.tables.raw(self.is_append))?)
    }

    pub(super) fn format(&self) -> KvFormat {
        self.cache.format()
    }

    pub(super) fn work(&self) -> Work {
        Work::of_call(&self.layer, &self.batch, self.dtype, self.format().dtype())
    }

    /// A backend for it.
    pub(super) fn backend(&self, device: &CudaDevice, kind: GpuBackend) -> Result<CudaBackend, AnyError> {
        let (dtype, page_size) = (self.format().dtype(), self.batch.page_size());
        let model = Arc::new(ModelSpec::new(vec![self.layer.clone()], self.dtype, dtype, page_size)?);
        let limits = BatchLimits {
            max_rows: self.batch.num_rows(),
            max_requests: u32::try_from(self.batch.requests().len())?,
            max_kv_len: self.batch.max_kv_len(),
        };
        let config = BackendConfig::<Cuda> { model, limits, device: device.clone() };
        Ok(match kind {
            GpuBackend::Fast => CudaBackend::new(&config)?,
            GpuBackend::Portable => CudaBackend::with_families(&config, Families::Portable)?,
            GpuBackend::Plain => CudaBackend::with_families(&config, Families::Plain)?,
            GpuBackend::Strict => CudaBackend::strict(&config)?,
            GpuBackend::Free => CudaBackend::free(&config)?,
        })
    }

    /// Records the call as a graph: everything that it launches. `stores_alone`: nothing attends.
    pub(super) fn record(
        &mut self,
        device: &CudaDevice,
        backend: &mut CudaBackend,
        step: &Prepared,
        stores_alone: bool,
    ) -> Result<Graph, AnyError> {
        let (heads, spec, dtype) = (self.layer.heads(), self.layer.kv(), self.dtype);
        let rows = self.batch.num_rows() as usize;
        let Self { cache, q, new, out, .. } = self;
        let recorded = Graph::record(&device.device, backend.keeps(step)?, || -> Result<(), AnyError> {
            let shape = |heads: u32, dim: u32| [rows, heads as usize, dim as usize];
            let view = |buffer, shape| CudaTensor::packed(buffer, 0, dtype, shape);
            let kv: Kv<'_, Cuda> = match new {
                Some((k, v)) => Kv::Append {
                    cache,
                    k: view(k, shape(spec.num_kv_heads, spec.head_dim_k))?,
                    v: v.as_ref().map(|v| view(v, shape(spec.num_kv_heads, spec.values.head_dim()))).transpose()?,
                },
                None => Kv::Attend { cache: &*cache },
            };
            if stores_alone {
                return Ok(backend.store(step, 0, &kv)?);
            }
            let q = view(q, shape(heads.num_qo_heads, heads.head_dim_qk))?;
            let out = CudaTensorMut::packed(out, 0, dtype, shape(heads.num_qo_heads, heads.head_dim_vo))?;
            Ok(backend.forward(step, 0, Io { q, kv, side: None, out, lse: None })?)
        });
        Ok(recorded?.graph)
    }
}

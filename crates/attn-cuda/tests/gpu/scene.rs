//! A problem of the suite on the device itself, without the copies of the backend for main memory.

use std::ops::Range;
use std::sync::Arc;

use attn_conformance::Case;
use attn_conformance::harness::{Activation, Problem};
use attn_cuda::device::{
    Captured, CudaKv, CudaLseMut, CudaTensor, CudaTensorMut, Device, DeviceBuffer, DeviceError, Graph,
};
use attn_cuda::{Cuda, CudaBackend, CudaDevice, Families};
use attn_metadata::{
    AttentionBackend, BackendConfig, Batch, BatchLimits, CreateError, Io, Kv, PoolShape, Prepared, RawBatch, RunError,
};
use kvpool::{KvLayout, PageId, Slot};

/// What is in every byte of an output before a call.
const POISON: u8 = 0xab;

/// Tensors of a problem on a device, with a backend.
pub struct Scene {
    pub backend: CudaBackend,
    pub cache: CudaKv,
    pub batch: Batch,
    problem: Problem,
    device: CudaDevice,
    q: DeviceBuffer,
    k: DeviceBuffer,
    v: DeviceBuffer,
    out: DeviceBuffer,
    lse: DeviceBuffer,
}

/// The bytes that a call wrote.
#[derive(Debug, PartialEq, Eq)]
pub struct Written {
    pub out: Vec<u8>,
    pub lse: Vec<u8>,
}

impl Written {
    /// Some rows of it.
    pub fn rows(&self, rows: Range<usize>, case: &Case) -> Self {
        let heads = case.heads;
        let part = |bytes: &[u8], row: usize| bytes[rows.start * row..rows.end * row].to_vec();
        let num_heads = heads.num_qo_heads as usize;
        Self {
            out: part(&self.out, num_heads * heads.head_dim_vo as usize * case.q_dtype.size_bytes()),
            lse: part(&self.lse, num_heads * size_of::<f32>()),
        }
    }
}

/// Where the pages of a problem are put.
#[derive(Clone, Copy)]
pub struct Place {
    pub layout: KvLayout,
    /// Pages before the problem's first one.
    pub first_page: u32,
    pub families: Families,
}

impl Place {
    pub const fn low(layout: KvLayout) -> Self {
        Self { layout, first_page: 0, families: Families::All }
    }
}

impl Scene {
    /// Puts a problem of packed tensors on a device.
    pub fn new(device: CudaDevice, problem: Problem, place: Place) -> Result<Self, DeviceError> {
        Self::with_backend(device, problem, place, |config| CudaBackend::with_families(config, place.families))
    }

    /// As [`new`](Self::new), on a backend of one's own.
    pub fn with_backend(
        device: CudaDevice,
        problem: Problem,
        place: Place,
        make: impl FnOnce(&BackendConfig<Cuda>) -> Result<CudaBackend, CreateError>,
    ) -> Result<Self, DeviceError> {
        let gpu = &device.device;
        let heads = problem.case.heads;
        let batch = moved_batch(&problem, place.first_page);
        let limits = BatchLimits { max_rows: 1 << 16, max_requests: 1 << 10, max_kv_len: 1 << 20 };
        let model = problem.case.model(vec![problem.layer()]);
        let config = BackendConfig::<Cuda> { model: Arc::clone(&model), limits, device: device.clone() };
        let backend = make(&config).unwrap();
        let rows = problem.tables.num_rows * heads.num_qo_heads as usize;
        let size = problem.case.q_dtype.size_bytes();
        let v = problem.v.as_ref().map_or(Vec::new(), bytes_of);
        Ok(Self {
            cache: moved_cache(gpu, &problem, place)?,
            q: DeviceBuffer::from_bytes(gpu, &bytes_of(&problem.q), "q")?,
            k: DeviceBuffer::from_bytes(gpu, &bytes_of(&problem.k), "k")?,
            v: DeviceBuffer::from_bytes(gpu, &v, "v")?,
            out: DeviceBuffer::new(gpu, rows * heads.head_dim_vo as usize * size, "out")?,
            lse: DeviceBuffer::new(gpu, rows * size_of::<f32>(), "lse")?,
            backend,
            batch,
            problem,
            device,
        })
    }

    /// Plans the batch.
    pub fn prepare(&mut self) -> Prepared {
        self.backend.prepare_metadata(&self.batch).unwrap()
    }

    /// One call over poisoned outputs.
    pub fn run(&mut self, step: &Prepared) -> Written {
        self.poison();
        self.forward(step).unwrap();
        self.written()
    }

    /// What the batch gives, which is the same for every one of so many eager runs and as many replays of a recorded one.
    pub fn run_repeatedly(&mut self, num_runs: usize) -> Written {
        let step = self.prepare();
        let first = self.run(&step);
        for run in 0..num_runs {
            assert!(self.run(&step) == first, "eager run {run} of {} differs", self.problem.case);
        }
        let mut graph = self.record(&step);
        for run in 0..num_runs {
            self.poison();
            graph.replay().unwrap();
            assert!(self.written() == first, "replay {run} of {} differs", self.problem.case);
        }
        first
    }

    /// Rows of the only request in a step of their own, which sees the tokens up to the last of them, over poisoned
    /// outputs. The problem appends nothing.
    pub fn run_rows(&mut self, rows: Range<usize>) -> Written {
        let raw = self.problem.raw();
        let request = self.problem.case.requests[0];
        let kv_len = (request.kv_len - request.q_len) as usize + rows.end;
        let page_size = self.problem.pool.page_size.get() as usize;
        let num_pages = kv_len.div_ceil(page_size);
        let int = |x: usize| i32::try_from(x).unwrap();
        let part = RawBatch {
            num_rows: rows.len(),
            qo_indptr: &[0, int(rows.len())],
            kv_indptr: &[0, int(num_pages)],
            kv_indices: &raw.kv_indices[..num_pages],
            kv_last_page_len: &[int(kv_len - (num_pages - 1) * page_size)],
            slot_mapping: None,
            custom_mask: None,
        };
        let step = self.backend.prepare_metadata(&Batch::from_raw(self.problem.pool, &part).unwrap()).unwrap();
        self.poison();
        self.forward_rows(&step, rows.clone()).unwrap();
        self.written().rows(0..rows.len(), &self.problem.case)
    }

    /// Gives the call to the stream.
    pub fn forward(&mut self, step: &Prepared) -> Result<(), RunError> {
        self.forward_rows(step, 0..self.problem.tables.num_rows)
    }

    /// Gives the call for some rows of q to the stream; outputs begin with theirs.
    fn forward_rows(&mut self, step: &Prepared, range: Range<usize>) -> Result<(), RunError> {
        let Self { backend, cache, problem, q, k, v, out, lse, .. } = self;
        let (heads, dtype, rows) = (problem.case.heads, problem.case.q_dtype, range.len());
        let shape = |heads: u32, dim: u32| [rows, heads as usize, dim as usize];
        let at = |[_, heads, dim]: [usize; 3]| range.start * heads * dim * dtype.size_bytes();
        let view = |buffer, shape| CudaTensor::packed(buffer, at(shape), dtype, shape).unwrap();
        let kv: Kv<'_, Cuda> = if problem.case.append {
            let k = view(k, shape(heads.num_kv_heads, heads.head_dim_qk));
            Kv::Append { cache, k, v: Some(view(v, shape(heads.num_kv_heads, heads.head_dim_vo))) }
        } else {
            Kv::Attend { cache: &*cache }
        };
        let out = CudaTensorMut::packed(out, 0, dtype, shape(heads.num_qo_heads, heads.head_dim_vo)).unwrap();
        let lse = CudaLseMut::new(lse, 0, rows * heads.num_qo_heads as usize).unwrap();
        let q = view(q, shape(heads.num_qo_heads, heads.head_dim_qk));
        backend.forward(step, 0, Io { q, kv, side: None, out, lse: Some(lse) })
    }

    /// Records the call.
    pub fn record(&mut self, step: &Prepared) -> Graph {
        enum Failure {
            Device(DeviceError),
            Run(RunError),
        }
        impl From<DeviceError> for Failure {
            fn from(error: DeviceError) -> Self {
                Self::Device(error)
            }
        }
        let (device, keeps) = (self.device.device.clone(), self.backend.keeps(step).unwrap());
        match Graph::record(&device, keeps, || self.forward(step).map_err(Failure::Run)) {
            Ok(Captured { graph, .. }) => graph,
            Err(Failure::Device(error)) => panic!("{error}"),
            Err(Failure::Run(error)) => panic!("{error}"),
        }
    }

    pub fn poison(&mut self) {
        self.out.fill(POISON).unwrap();
        self.lse.fill(POISON).unwrap();
    }

    pub fn written(&self) -> Written {
        Written { out: all_bytes(&self.out), lse: all_bytes(&self.lse) }
    }

    /// The bytes of a page of K and of V.
    pub fn page(&self, page: u32) -> [Vec<u8>; 2] {
        let page = PageId::new(page).unwrap();
        let size = self.cache.format().dtype().element_bytes();
        let buffer = self.cache.buffer().unwrap();
        [self.cache.k(), self.cache.v()].map(|plane| {
            let mut bytes = vec![0; page_elements(&self.problem, plane.head_dim) * size];
            buffer.download(plane.element(page, 0, 0) * size, &mut bytes).unwrap();
            bytes
        })
    }

    /// Pages of the problem.
    pub fn num_pages(&self) -> u32 {
        self.problem.pool.num_pages
    }
}

/// A whole buffer.
pub fn all_bytes(buffer: &DeviceBuffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.len()];
    buffer.download(0, &mut bytes).unwrap();
    bytes
}

/// The bytes of a packed tensor.
pub fn bytes_of(tensor: &Activation) -> Vec<u8> {
    let size = tensor.dtype().size_bytes();
    tensor.bits().iter().flat_map(|bits| bits.to_le_bytes()[..size].to_vec()).collect()
}

fn page_elements(problem: &Problem, head_dim: usize) -> usize {
    problem.pool.page_size.get() as usize * problem.case.heads.num_kv_heads as usize * head_dim
}

/// The batch with every page `first_page` further on.
fn moved_batch(problem: &Problem, first_page: u32) -> Batch {
    let raw = problem.raw();
    let pool = PoolShape { num_pages: first_page + problem.pool.num_pages, ..problem.pool };
    let kv_indices: Vec<i32> = raw.kv_indices.iter().map(|page| page + first_page.cast_signed()).collect();
    let shift = first_page.cast_signed() * problem.pool.page_size.get().cast_signed();
    let move_slot = |slot: &Slot| if *slot == Slot::PADDING { *slot } else { Slot::from_raw(slot.raw() + shift) };
    let slots: Option<Vec<Slot>> = raw.slot_mapping.map(|slots| slots.iter().map(move_slot).collect());
    Batch::from_raw(pool, &RawBatch { kv_indices: &kv_indices, slot_mapping: slots.as_deref(), ..raw }).unwrap()
}

/// The problem's pages, `first_page` further on, in a pool of zeros.
fn moved_cache(gpu: &Device, problem: &Problem, place: Place) -> Result<CudaKv, DeviceError> {
    let host = &problem.cache;
    let shape = kvpool::KvShape { num_pages: place.first_page + problem.pool.num_pages, ..host.shape() };
    let cache = CudaKv::new(gpu, shape, place.layout, host.format());
    let mut cache = cache.map_err(|error| match error {
        attn_cuda::device::CudaKvError::Device(error) => error,
        error => panic!("{error}"),
    })?;
    let size = host.format().dtype().element_bytes();
    let bytes = host.buffer().as_slice().as_bytes();
    let planes = [(host.k().layout, cache.k()), (host.v().layout, cache.v())];
    for (from, to) in planes {
        let len = page_elements(problem, to.head_dim) * size;
        for page in 0..problem.pool.num_pages {
            let at = |plane: &kvpool::KvPlaneLayout, page| plane.element(PageId::new(page).unwrap(), 0, 0) * size;
            let (from, to) = (at(&from, page), at(&to, place.first_page + page));
            cache.upload(to, &bytes[from..from + len])?;
        }
    }
    Ok(cache)
}

//! Kernels that only move data: storing new KV, and merging states; and what a plain copy of as many bytes takes.

use attn_cuda::device::{CudaLse, CudaLseMut, CudaTensor, CudaTensorMut, Device, DeviceBuffer, DeviceError, Graph};
use attn_cuda::{CudaDevice, StateMerge, States, StatesMut};
use kvpool::{Dtype, KvFormat, KvPlaneLayout, Slot, Values};

use super::super::problem::{Parts, parts_of};
use super::super::workload::Workload;
use super::AnyError;
use super::call::{Call, NEW_K_FIRST, NEW_V_FIRST};
use super::check::stored;
use super::noise::Noise;
use crate::replay::{Activation, Elements};

/// Rows that are checked, evenly spread.
const CHECKED_ROWS: usize = 16;
/// Seed of the LSEs.
const LSE_SEED: u64 = 2;

/// Bytes that a store reads and writes.
pub(super) fn store_bytes(call: &Call) -> u64 {
    let spec = call.layer.kv();
    let own = if let Values::Own(width) = spec.values { width } else { 0 };
    let elements = u64::from(call.batch.num_rows()) * u64::from(spec.num_kv_heads) * u64::from(spec.head_dim_k + own);
    elements * (call.dtype.size_bytes() + call.format().dtype().element_bytes()) as u64
}

/// Relative error of what a store wrote on some rows, against what storing means: 0 where every byte is right.
pub(super) fn store_error(call: &Call, queries: &Noise) -> Result<f64, AnyError> {
    let slots = call.batch.slot_mapping().ok_or("the workload appends nothing")?;
    let spec = call.layer.kv();
    let planes =
        [(call.cache.k(), NEW_K_FIRST, spec.head_dim_k), (call.cache.v(), NEW_V_FIRST, spec.values.head_dim())];
    let num_planes = if matches!(spec.values, Values::Own(_)) { 2 } else { 1 };
    let (mut error, mut norm) = (0.0, 0.0);
    for row in (0..slots.len()).step_by(slots.len().div_ceil(CHECKED_ROWS)) {
        for (plane, first, width) in &planes[..num_planes] {
            for head in 0..spec.num_kv_heads {
                let got = stored_vector(call, plane, slots[row], head)?;
                let begin = first + (row * spec.num_kv_heads as usize + head as usize) * *width as usize;
                for (got, index) in got.into_iter().zip(begin..) {
                    let expected = stored(queries.value(index), call);
                    error += (got - expected).powi(2);
                    norm += expected.powi(2);
                }
            }
        }
    }
    Ok(finite((error / norm).sqrt()))
}

/// A vector of the cache, as real values.
fn stored_vector(call: &Call, plane: &KvPlaneLayout, slot: Slot, head: u32) -> Result<Vec<f64>, AnyError> {
    let page_size = call.batch.page_size();
    let place = slot.page(page_size).zip(slot.offset(page_size));
    let (page, offset) = place.ok_or("a row without a slot")?;
    let (dtype, scale) = (call.format().dtype(), f64::from(call.format().k_scale()));
    let size = dtype.element_bytes();
    let mut bytes = vec![0; plane.head_dim * size];
    let buffer = call.cache.buffer().ok_or("a cache has its own memory")?;
    buffer.download(plane.element(page, offset, head) * size, &mut bytes)?;
    let float = |dtype| Elements::from_bytes(dtype, &bytes);
    let values = match call.format() {
        KvFormat::F32 => to_f64(float(Dtype::F32)),
        KvFormat::F16 => to_f64(float(Dtype::F16)),
        KvFormat::Bf16 => to_f64(float(Dtype::Bf16)),
        _ => Some(bytes.iter().map(|&code| f64::from(kvpool::fp8_e4m3_to_f32(code)) * scale).collect()),
    };
    values.ok_or_else(|| "a vector of another length".into())
}

fn to_f64(elements: Elements) -> Option<Vec<f64>> {
    let len = elements.as_slice().len();
    let activation = Activation::new(elements, [1, 1, len])?;
    let mut values = vec![0.0f32; len];
    activation.view().read(0, 0, &mut values);
    Some(values.into_iter().map(f64::from).collect())
}

/// A merge of states: `states` one after the other, `[states, rows, heads, dim]`.
#[derive(Debug)]
pub(super) struct Merge {
    dtype: Dtype,
    num_states: usize,
    shape: [usize; 3],
    states: DeviceBuffer,
    lses: DeviceBuffer,
    out: DeviceBuffer,
    lse: DeviceBuffer,
    lse_noise: Noise,
}

impl Merge {
    pub(super) fn new(device: &CudaDevice, workload: &Workload, queries: &Noise) -> Result<Self, AnyError> {
        let Parts { layer, dtype, .. } = parts_of(workload)?;
        let gpu = &device.device;
        let rows: u64 = workload.q_lens.iter().map(|&n| u64::from(n)).sum();
        let (rows, num_states) = (usize::try_from(rows)?, workload.states as usize);
        let heads = layer.heads();
        let shape = [rows, heads.num_qo_heads as usize, heads.head_dim_vo as usize];
        let (elements, lses) = (shape.iter().product::<usize>(), shape[0] * shape[1]);
        let mut states = DeviceBuffer::new(gpu, num_states * elements * dtype.size_bytes(), "states")?;
        queries.fill(&mut states, 0)?;
        let lse_noise = Noise::new(gpu, KvFormat::F32, LSE_SEED, num_states * lses)?;
        let mut all_lses = DeviceBuffer::new(gpu, num_states * lses * size_of::<f32>(), "LSEs")?;
        lse_noise.fill(&mut all_lses, 0)?;
        let out = DeviceBuffer::new(gpu, elements * dtype.size_bytes(), "a merged state")?;
        let lse = DeviceBuffer::new(gpu, lses * size_of::<f32>(), "merged LSEs")?;
        Ok(Self { dtype, num_states, shape, states, lses: all_lses, out, lse, lse_noise })
    }

    /// Bytes that it reads and writes.
    pub(super) fn bytes(&self) -> u64 {
        ((self.num_states + 1) * (self.out.len() + self.lse.len())) as u64
    }

    pub(super) fn record(&mut self, device: &CudaDevice) -> Result<Graph, AnyError> {
        let merge = StateMerge::new(device, self.dtype)?;
        let [rows, heads, dim] = self.shape;
        let Self { dtype, num_states, states, lses, out, lse, .. } = self;
        let recorded = Graph::record(&device.device, Vec::new(), || -> Result<(), AnyError> {
            let all = States {
                out: CudaTensor::packed(states, 0, *dtype, [*num_states * rows, heads, dim])?,
                lse: CudaLse::new(lses, 0, *num_states * rows * heads)?,
            };
            let out = CudaTensorMut::packed(out, 0, *dtype, [rows, heads, dim])?;
            let mut into = StatesMut { out, lse: Some(CudaLseMut::new(lse, 0, rows * heads)?) };
            Ok(merge.stacked(all, *num_states, &mut into)?)
        });
        Ok(recorded?.graph)
    }

    /// Relative error of some rows against merging in float64.
    pub(super) fn error(&self, queries: &Noise) -> Result<f64, AnyError> {
        let [rows, heads, dim] = self.shape;
        let row_bytes = heads * dim * self.dtype.size_bytes();
        let (mut error, mut norm) = (0.0, 0.0);
        for row in (0..rows).step_by(rows.div_ceil(CHECKED_ROWS)) {
            let mut bytes = vec![0; row_bytes];
            self.out.download(row * row_bytes, &mut bytes)?;
            let got = to_f64(Elements::from_bytes(self.dtype, &bytes)).ok_or("a row of another length")?;
            for (head, got) in got.chunks_exact(dim).enumerate() {
                let lse = |state: usize| f64::from(self.lse_noise.value((state * rows + row) * heads + head));
                let weights: Vec<f64> = (0..self.num_states).map(|state| lse(state).exp()).collect();
                let sum: f64 = weights.iter().sum();
                for (column, got) in got.iter().enumerate() {
                    let at = |state: usize| ((state * rows + row) * heads + head) * dim + column;
                    let terms = weights.iter().enumerate().map(|(state, w)| w * f64::from(queries.value(at(state))));
                    let expected = terms.sum::<f64>() / sum;
                    error += (got - expected).powi(2);
                    norm += expected.powi(2);
                }
            }
        }
        Ok(finite((error / norm).sqrt()))
    }
}

/// A NaN must not pass for a small error.
fn finite(error: f64) -> f64 {
    if error.is_nan() { f64::INFINITY } else { error }
}

/// A copy on the device, recorded: half of `bytes` is read, half is written.
pub(super) fn record_copy(gpu: &Device, bytes: usize) -> Result<(Graph, [DeviceBuffer; 2]), DeviceError> {
    let from = DeviceBuffer::zeroed(gpu, bytes / 2, "the copy rate")?;
    let mut to = DeviceBuffer::new(gpu, bytes / 2, "the copy rate")?;
    let recorded = Graph::record(gpu, Vec::new(), || to.copy_from(0, &from, 0, bytes / 2))?;
    Ok((recorded.graph, [from, to]))
}

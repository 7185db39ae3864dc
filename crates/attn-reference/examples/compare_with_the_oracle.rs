//! Decodes a ragged batch with a sliding window and sinks on the CPU backend, and sees how far it is from float64.

#![allow(clippy::print_stdout)]

use std::sync::Arc;

use attn_metadata::{
    AttentionBackend as _, BackendConfig, Batch, BatchLimits, HeadShape, Host, HostDevice, Io, Kv, Layer, LayerParams,
    ModelSpec, PoolShape, RawBatch,
};
use attn_reference::cpu::CpuBackend;
use attn_reference::verify::VerifyBackend;
use kvpool::{Dtype, HostKv, HostTensor, HostTensorMut, KvDtype, KvFormat, KvLayout, KvShape, PageSize, Slot};

const HEADS: HeadShape = HeadShape::new(8, 2, 64);

/// Numbers in -1..1 that look random.
fn noise(len: usize) -> Vec<f32> {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f32::from(u16::try_from(state >> 16).expect("16 bits")) / 32768.0 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let page_size = PageSize::new(16)?;
    let params = LayerParams { window_left: Some(100), sinks: Some(vec![0.5; 8]), ..LayerParams::causal(HEADS) };
    let model = Arc::new(ModelSpec::new(vec![Layer::new(params)?], Dtype::F32, KvDtype::F32, page_size)?);
    let config = BackendConfig::<Host> { model, limits: BatchLimits::NONE, device: HostDevice::default() };

    // Three requests decode one token each, on 40, 250 and 3 KV tokens; their pages are anywhere in the pool.
    let num_pages = 32;
    let kv_indices: Vec<i32> = (0..20).map(|i| (i * 7 + 3) % 32).collect();
    let raw = RawBatch {
        num_rows: 3,
        qo_indptr: &[0, 1, 2, 3],
        kv_indptr: &[0, 3, 19, 20],
        kv_indices: &kv_indices,
        kv_last_page_len: &[8, 10, 3],
        slot_mapping: None,
        custom_mask: None,
    };
    let batch = Batch::from_raw(PoolShape { num_pages, page_size }, &raw)?;

    let shape = KvShape { num_pages, page_size, num_kv_heads: 2, head_dim_k: 64, head_dim_v: 64 };
    let mut cache = HostKv::new(shape, KvLayout::Nhd, KvFormat::F32)?;
    let slots: Vec<Slot> = (0..num_pages * 16).map(|slot| Slot::from_raw(slot.cast_signed())).collect();
    let kv = noise(slots.len() * 2 * 64);
    let rows = HostTensor::packed(&kv[..], [slots.len(), 2, 64])?;
    cache.append(&slots, &rows, Some(&rows))?;

    let mut backend = VerifyBackend::new(Box::new(CpuBackend::new(&config)?), 1);
    let step = backend.prepare_metadata(&batch)?;
    print!("{}", backend.explain(&step)?);
    let (q, mut out) = (noise(3 * 8 * 64), vec![0f32; 3 * 8 * 64]);
    let io = Io {
        q: HostTensor::packed(&q[..], [3, 8, 64])?,
        kv: Kv::Attend { cache: &cache },
        side: None,
        out: HostTensorMut::packed(&mut out[..], [3, 8, 64])?,
        lse: None,
    };
    backend.forward(&step, 0, io)?;
    let report = backend.handle().report();
    let (_, errors) = report.worst().ok_or("nothing was compared")?;
    println!("{} output vectors, worst relative error {:.1e}", errors.num_vectors, errors.max_rel);
    assert!(errors.max_rel < 1e-5 && errors.num_anomalies == 0);
    Ok(())
}

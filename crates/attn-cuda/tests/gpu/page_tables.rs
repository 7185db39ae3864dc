//! Large page tables, which the device reads where the batch has them: each step's is the one that it was prepared with,
//! also where batches are filled anew while the stream is far behind.

use std::sync::Arc;

use attn_conformance::Rng;
use attn_cuda::device::DeviceBuffer;
use attn_cuda::{Cuda, CudaBackend, CudaDevice};
use attn_metadata::{
    AttentionBackend, BackendConfig, Batch, BatchLimits, HeadShape, Layer, LayerParams, ModelSpec, PoolShape, RawBatch,
};
use kvpool::{Dtype, KvDtype, PageSize};

use crate::support;

/// Pages of the one request: more than what is copied in any case.
const NUM_PAGES: usize = 40_000;
const NUM_STEPS: usize = 24;
/// Bytes that keep the stream busy while batches are filled.
const BUSY_BYTES: usize = 256 << 20;

fn fill(batch: &mut Batch, pages: &[i32]) {
    let raw = RawBatch {
        num_rows: 1,
        qo_indptr: &[0, 1],
        kv_indptr: &[0, i32::try_from(pages.len()).unwrap()],
        kv_indices: pages,
        kv_last_page_len: &[1],
        slot_mapping: None,
        custom_mask: None,
    };
    batch.set(&raw).unwrap();
}

#[test]
fn every_step_has_the_page_table_that_it_was_prepared_with() {
    if !support::has_gpu() {
        return;
    }
    let device = CudaDevice::open(0).unwrap();
    let page_size = PageSize::new(1).unwrap();
    let layer = Layer::new(LayerParams::causal(HeadShape::new(4, 2, 64))).unwrap();
    let model = Arc::new(ModelSpec::new(vec![layer], Dtype::Bf16, KvDtype::Bf16, page_size).unwrap());
    let config = BackendConfig::<Cuda> { model, limits: BatchLimits::NONE, device: device.clone() };
    let mut backend = CudaBackend::new(&config).unwrap();
    let mut batch = Batch::empty(PoolShape { num_pages: u32::try_from(NUM_PAGES).unwrap(), page_size });
    let gpu = &device.device;
    let mut busy = DeviceBuffer::new(gpu, BUSY_BYTES, "keeping the stream busy").unwrap();
    let mut rng = Rng::new(&[7]);
    let (mut seen, mut num_reused) = (Vec::new(), 0);
    for step in 0..NUM_STEPS {
        // Fewer pages now and then; a rotation is as good as a shuffle.
        let mut pages: Vec<i32> = (0..i32::try_from(NUM_PAGES - step % 3).unwrap()).collect();
        pages.rotate_left(rng.below(NUM_PAGES - 2));
        fill(&mut batch, &pages);
        num_reused += usize::from(batch.shared_kv_indices().companion().is_some());
        for _ in 0..step % 4 {
            busy.fill(1).unwrap();
        }
        let prepared = backend.prepare_metadata(&batch).unwrap();
        let keeps = backend.keeps(&prepared).unwrap();
        let buffers = keeps.into_iter().filter_map(|keep| keep.downcast::<DeviceBuffer>().ok());
        let tables = buffers.into_iter().find(|buffer| buffer.len() > 4 * pages.len()).expect("the tables are kept");
        // In stream order: what the kernels of this step would read.
        let mut copy = DeviceBuffer::new(gpu, tables.len(), "a copy of the tables").unwrap();
        copy.copy_from(0, &tables, 0, tables.len()).unwrap();
        seen.push((pages, copy));
    }
    for (step, (pages, copy)) in seen.iter().enumerate() {
        let mut bytes = vec![0; copy.len()];
        copy.download(0, &mut bytes).unwrap();
        let wanted: Vec<u8> = pages.iter().flat_map(|page| page.to_le_bytes()).collect();
        let is_there = bytes.windows(wanted.len()).step_by(256).any(|window| window == wanted);
        assert!(is_there, "the tables of step {step} lack its page table");
    }
    assert!(num_reused > 0, "no batch was filled in memory that the device reads");
    support::keep("page-tables", &serde_json::json!({"steps": NUM_STEPS, "read in place": num_reused}));
}

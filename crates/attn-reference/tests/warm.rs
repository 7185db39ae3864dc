//! A warm step of the CPU backend does not allocate: planning, appending and attending, over batches that shrink and
//! grow below the largest one seen.

#![allow(clippy::unwrap_used)]

use std::alloc::System;
use std::sync::Arc;

use attn_metadata::{
    AttentionBackend as _, BackendConfig, Batch, BatchLimits, HeadShape, Host, HostDevice, Io, Kv, Layer, LayerParams,
    Lse, ModelSpec, PoolShape, RawBatch,
};
use attn_reference::cpu::CpuBackend;
use kvpool::{Dtype, HostKv, HostTensor, HostTensorMut, KvDtype, KvFormat, KvLayout, KvShape, PagePool, PageSize};
use page_table::{PageTable, SeqId, StepTables};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const HEADS: HeadShape = HeadShape::new(8, 2, 64);
const NUM_PAGES: u32 = 512;
const MAX_ROWS: usize = 600;

struct Engine {
    table: PageTable,
    tables: StepTables,
    batch: Batch,
    backend: CpuBackend,
    cache: HostKv,
    buffers: [Vec<f32>; 3],
    out: Vec<f32>,
    lse: Vec<Lse>,
}

fn backend(num_threads: usize, page_size: PageSize) -> CpuBackend {
    let layer = |window_left| Layer::new(LayerParams { window_left, ..LayerParams::causal(HEADS) }).unwrap();
    let layers = vec![layer(None), layer(Some(100))];
    let model = Arc::new(ModelSpec::new(layers, Dtype::F32, KvDtype::F32, page_size).unwrap());
    let device = HostDevice::with_threads(num_threads);
    CpuBackend::new(&BackendConfig::<Host> { model, limits: BatchLimits::NONE, device }).unwrap()
}

impl Engine {
    fn new(num_threads: usize) -> Self {
        let page_size = PageSize::new(16).unwrap();
        let shape = KvShape { num_pages: NUM_PAGES, page_size, num_kv_heads: 2, head_dim_k: 64, head_dim_v: 64 };
        Self {
            table: PageTable::new(PagePool::new(NUM_PAGES, page_size).unwrap()),
            tables: StepTables::default(),
            batch: Batch::empty(PoolShape { num_pages: NUM_PAGES, page_size }),
            backend: backend(num_threads, page_size),
            cache: HostKv::new(shape, KvLayout::Nhd, KvFormat::F32).unwrap(),
            buffers: [512, 128, 128].map(|width| vec![0.5; MAX_ROWS * width]),
            out: vec![0.0; MAX_ROWS * 512],
            lse: vec![Lse::EMPTY; MAX_ROWS * 8],
        }
    }

    /// Everything that a step does after its pages were taken.
    fn step(&mut self, requests: &[(SeqId, usize)]) {
        self.table.step_tables(requests, &mut self.tables).unwrap();
        self.batch.set(&RawBatch::from_tables(&self.tables)).unwrap();
        let step = self.backend.prepare_metadata(&self.batch).unwrap();
        let rows = step.num_rows() as usize;
        let [q, k, v] = &self.buffers;
        for layer in 0..2 {
            let io = Io {
                q: HostTensor::packed(&q[..rows * 512], [rows, 8, 64]).unwrap(),
                kv: Kv::Append {
                    cache: &mut self.cache,
                    k: HostTensor::packed(&k[..rows * 128], [rows, 2, 64]).unwrap(),
                    v: Some(HostTensor::packed(&v[..rows * 128], [rows, 2, 64]).unwrap()),
                },
                side: None,
                out: HostTensorMut::packed(&mut self.out[..rows * 512], [rows, 8, 64]).unwrap(),
                lse: Some(&mut self.lse[..rows * 8]),
            };
            self.backend.forward(&step, layer, io).unwrap();
        }
    }
}

/// Allocations and reallocations of 30 warm steps: prefill, mixed, decode.
fn allocations_of_warm_steps(num_threads: usize) -> usize {
    let mut engine = Engine::new(num_threads);
    let seqs: Vec<SeqId> = (0..4).map(|_| engine.table.create().unwrap()).collect();
    for (&seq, len) in seqs.iter().zip([3000, 40, 500, 7]) {
        let _ = engine.table.append(seq, len).unwrap();
    }
    let prefill = [(seqs[0], 1), (seqs[2], 500), (seqs[3], 7)];
    let mixed = [(seqs[0], 1), (seqs[1], 20), (seqs[3], 1)];
    let decode = seqs.iter().map(|&seq| (seq, 1)).collect::<Vec<_>>();
    let steps: [&[(SeqId, usize)]; 3] = [&prefill, &mixed, &decode];
    // Plans are made in two places in turn, so that a refused one leaves the live one alone: two rounds warm both.
    (0..2).for_each(|_| steps.iter().for_each(|step| engine.step(step)));
    let region = Region::new(ALLOCATOR);
    (0..10).for_each(|_| steps.iter().for_each(|step| engine.step(step)));
    let change = region.change();
    change.allocations + change.reallocations
}

// One test, so that no other test allocates meanwhile. What the test harness's own thread allocates is counted too, so one
// of some attempts must do.
#[test]
fn warm_steps_do_not_allocate() {
    for num_threads in [1, 2] {
        // The thread pool's queue of jobs takes a block for every few dozen of them; a step of two layers makes two.
        let is_warm = (0..10).any(|_| allocations_of_warm_steps(num_threads) <= 2);
        assert!(is_warm, "more than 2 allocations in 30 steps on {num_threads} threads");
    }
}

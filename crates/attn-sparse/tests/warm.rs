//! A warm step of the sparse backend does not allocate: planning, storing, scoring, selecting, attending.
#![allow(clippy::unwrap_used)]

use std::alloc::System;
use std::sync::Arc;

use attn_metadata::{
    AttentionBackend as _, BackendConfig, Batch, BatchLimits, HeadShape, Host, HostDevice, Io, Kv, Lse, ModelSpec,
    PoolShape, RawBatch, Side,
};
use attn_sparse::{BlockParams, SparseBackend, SparseFamily, SparseParams};
use kvpool::{Dtype, HostKv, HostTensor, HostTensorMut, KvDtype, KvFormat, KvLayout, PagePool, PageSize};
use page_table::{PageTable, SeqId, StepTables};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const HEADS: HeadShape = HeadShape::new(8, 2, 32);
const NUM_PAGES: u32 = 512;
const MAX_ROWS: usize = 600;
const BLOCKS: BlockParams = BlockParams { block_size: 64, topk: 3, init_blocks: 1, local_blocks: 1 };

struct Engine {
    table: PageTable,
    tables: StepTables,
    batch: Batch,
    backend: SparseBackend,
    cache: HostKv,
    index_cache: HostKv,
    q: Vec<f32>,
    k: Vec<f32>,
    out: Vec<f32>,
    index_out: Vec<f32>,
    lse: Vec<Lse>,
}

impl Engine {
    fn new(num_threads: usize) -> Self {
        let page_size = PageSize::new(16).unwrap();
        let params = SparseParams { has_index_value: true, ..SparseParams::new(BLOCKS, 4, 16) };
        let layer = SparseFamily::new(params, &HEADS).unwrap().layer(HEADS).unwrap();
        let new_cache = |spec| HostKv::for_spec(spec, NUM_PAGES, page_size, KvLayout::Nhd, KvFormat::F32).unwrap();
        let (cache, index_cache) = (new_cache(layer.kv()), new_cache(layer.side().unwrap().kv));
        let model = Arc::new(ModelSpec::new(vec![layer], Dtype::F32, KvDtype::F32, page_size).unwrap());
        let device = HostDevice::with_threads(num_threads);
        let config = BackendConfig::<Host> { model, limits: BatchLimits::NONE, device };
        Self {
            table: PageTable::new(PagePool::new(NUM_PAGES, page_size).unwrap()),
            tables: StepTables::default(),
            batch: Batch::empty(PoolShape { num_pages: NUM_PAGES, page_size }),
            backend: SparseBackend::new(&config).unwrap(),
            cache,
            index_cache,
            q: vec![0.5; MAX_ROWS * 256],
            k: vec![0.25; MAX_ROWS * 64],
            out: vec![0.0; MAX_ROWS * 256],
            index_out: vec![0.0; MAX_ROWS * 64],
            lse: vec![Lse::EMPTY; MAX_ROWS * 8],
        }
    }

    /// Everything that a step does after its pages were taken.
    fn step(&mut self, requests: &[(SeqId, usize)]) {
        self.table.step_tables(requests, &mut self.tables).unwrap();
        self.batch.set(&RawBatch::from_tables(&self.tables)).unwrap();
        let step = self.backend.prepare_metadata(&self.batch).unwrap();
        let rows = step.num_rows() as usize;
        let new =
            |heads: usize, dim: usize| HostTensor::packed(&self.k[..rows * heads * dim], [rows, heads, dim]).unwrap();
        let side = Side {
            q: new(4, 16),
            kv: Kv::Append { cache: &mut self.index_cache, k: new(1, 16), v: Some(new(1, 16)) },
            out: Some(HostTensorMut::packed(&mut self.index_out[..rows * 64], [rows, 4, 16]).unwrap()),
        };
        let io = Io {
            q: HostTensor::packed(&self.q[..rows * 256], [rows, 8, 32]).unwrap(),
            kv: Kv::Append { cache: &mut self.cache, k: new(2, 32), v: Some(new(2, 32)) },
            side: Some(side),
            out: HostTensorMut::packed(&mut self.out[..rows * 256], [rows, 8, 32]).unwrap(),
            lse: Some(&mut self.lse[..rows * 8]),
        };
        self.backend.forward(&step, 0, io).unwrap();
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
    let one = [(seqs[0], 1)];
    let steps: [&[(SeqId, usize)]; 4] = [&prefill, &mixed, &decode, &one];
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
        // The thread pools' queues of jobs take a block for every few dozen of them; a step makes up to four.
        let is_warm = (0..10).any(|_| allocations_of_warm_steps(num_threads) <= 6);
        assert!(is_warm, "more than 6 allocations in 40 steps on {num_threads} threads");
    }
}

//! The same call a hundred times, eagerly and replayed, while another stream keeps the GPU busy: the same bits.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use attn_conformance::case::{RequestShape, Sinks};
use attn_conformance::harness::Problem;
use attn_conformance::{Case, Rng};
use attn_cuda::CudaDevice;
use attn_cuda::device::{Device, DeviceBuffer};
use attn_metadata::HeadShape;
use kvpool::{Dtype, KvDtype, KvLayout};

use crate::scene::{Place, Scene};
use crate::support;

const NUM_RUNS: usize = 100;
/// Bytes that the other stream writes and copies at most.
const BUSY_BYTES: usize = 64 << 20;

/// Fills and copies of random sizes with random pauses, until told to stop; returns how many.
fn keep_busy(device: &Device, is_done: &AtomicBool) -> usize {
    let mut rng = Rng::new(&[5]);
    let from = DeviceBuffer::zeroed(device, BUSY_BYTES, "the other stream").unwrap();
    let mut to = DeviceBuffer::zeroed(device, BUSY_BYTES, "the other stream").unwrap();
    let mut rounds = 0;
    while !is_done.load(Ordering::Relaxed) {
        for _ in 0..1 + rng.below(8) {
            let len = 1 + rng.below(BUSY_BYTES);
            to.copy_from(0, &from, 0, len).unwrap();
        }
        to.fill(7).unwrap();
        device.synchronize().unwrap();
        std::thread::sleep(Duration::from_micros(rng.below(200) as u64));
        rounds += 1;
    }
    rounds
}

fn cases() -> Vec<Case> {
    let request = |q_len, kv_len| RequestShape { q_len, kv_len };
    let mixed = vec![request(1, 5), request(1, 5000), request(4, 2100), request(90, 1300), request(300, 300)];
    let base = Case { requests: mixed, heads: HeadShape::new(8, 2, 128), append: false, ..Case::default() };
    let of = |q_dtype, kv_dtype| Case { q_dtype, kv_dtype, ..base.clone() };
    vec![
        of(Dtype::Bf16, KvDtype::Bf16),
        Case { softcap: Some(30.0), sinks: Sinks::Mixed, window: Some(700), ..of(Dtype::F16, KvDtype::Fp8E4m3) },
        of(Dtype::F32, KvDtype::F32),
        Case { page_size: 1, ..of(Dtype::Bf16, KvDtype::Bf16) },
    ]
}

fn check(case: &Case, device: &CudaDevice) {
    let mut scene = Scene::new(device.clone(), Problem::new(case), Place::low(KvLayout::Nhd)).unwrap();
    scene.run_repeatedly(NUM_RUNS);
}

#[test]
fn a_hundred_runs_beside_a_busy_stream_are_the_same_bits() {
    if !support::has_gpu() {
        return;
    }
    let device = CudaDevice::open(0).unwrap();
    let (other, is_done) = (device.device.fork().unwrap(), AtomicBool::new(false));
    let rounds = std::thread::scope(|scope| {
        let busy = scope.spawn(|| keep_busy(&other, &is_done));
        // Told to stop whatever becomes of the checks: the scope waits for the thread.
        let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            cases().iter().for_each(|case| check(case, &device));
        }));
        is_done.store(true, Ordering::Relaxed);
        let rounds = busy.join().unwrap();
        if let Err(panic) = checked {
            std::panic::resume_unwind(panic);
        }
        rounds
    });
    assert!(rounds > 0, "the other stream did nothing");
    support::keep("reruns", &serde_json::json!({"runs": NUM_RUNS, "replays": NUM_RUNS, "rounds of the other": rounds}));
}

#[test]
fn a_graph_of_an_uncaptured_step_keeps_the_tables_of_its_step() {
    if !support::has_gpu() {
        return;
    }
    let case = Case { requests: vec![RequestShape { q_len: 90, kv_len: 1300 }], ..cases().swap_remove(0) };
    let device = CudaDevice::open(0).unwrap();
    let mut scene = Scene::new(device, Problem::new(&case), Place::low(KvLayout::Nhd)).unwrap();
    let step = scene.prepare();
    let first = scene.run(&step);
    let mut graph = scene.record(&step);
    // Steps take turns in two places, so the tables of the first would be overwritten.
    for rows in [0..7, 7..30, 30..31] {
        scene.run_rows(rows);
    }
    scene.poison();
    graph.replay().unwrap();
    assert!(scene.written() == first, "the replay read tables of a later step");
}

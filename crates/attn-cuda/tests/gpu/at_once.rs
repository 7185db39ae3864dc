//! Decoding and prefill at once: the same bits as apart, eagerly and replayed, right after new KV is stored.

use attn_conformance::Case;
use attn_conformance::case::{RequestShape, Sinks};
use attn_conformance::harness::{Build, Problem};
use attn_cuda::CudaDevice;
use attn_metadata::{AttentionBackend, HeadShape};
use kvpool::{Dtype, KvDtype, KvLayout};

use crate::scene::{Place, Scene, Written};
use crate::support;

const NUM_RUNS: usize = 20;
/// Requests that prefill; those after them decode.
const NUM_PREFILLS: usize = 2;

/// Enough of both that running them at once pays on GPUs whose rates are known.
fn cases() -> Vec<Case> {
    let request = |q_len, kv_len| RequestShape { q_len, kv_len };
    let mut requests = vec![request(520, 2100), request(700, 2600)];
    requests.extend((0..16).map(|i| request(1, 2500 + 20 * i)));
    requests.push(request(4, 1000));
    // None of these is split, so nothing is merged.
    let mut short = requests[..NUM_PREFILLS].to_vec();
    short.extend((0..100).map(|i| request(1, 900 + i)));
    let base = Case { requests, heads: HeadShape::new(32, 8, 128), append: true, padding_rows: 3, ..Case::default() };
    vec![
        Case { q_dtype: Dtype::Bf16, kv_dtype: KvDtype::Bf16, ..base.clone() },
        Case { q_dtype: Dtype::Bf16, kv_dtype: KvDtype::Bf16, requests: short, ..base.clone() },
        Case { q_dtype: Dtype::F16, kv_dtype: KvDtype::F16, softcap: Some(30.0), sinks: Sinks::Mixed, ..base },
    ]
}

/// What some of the requests give in a batch of their own.
fn apart(case: &Case, members: std::ops::Range<usize>, device: &CudaDevice) -> Written {
    let min_pages = Problem::new(case).pool.num_pages;
    let build = Build { members: members.collect(), min_pages, ..Build::of(case) };
    let case = Case { padding_rows: 0, ..case.clone() };
    let problem = Problem::build(&case, build);
    let mut scene = Scene::new(device.clone(), problem, Place::low(KvLayout::Nhd)).unwrap();
    let step = scene.prepare();
    let notes = scene.backend.explain(&step).unwrap().notes;
    assert!(notes.is_empty(), "one kind of requests has nothing to run at once with: {notes:?}");
    scene.run(&step)
}

fn check(case: &Case, device: &CudaDevice) {
    let mut scene = Scene::new(device.clone(), Problem::new(case), Place::low(KvLayout::Nhd)).unwrap();
    let step = scene.prepare();
    let notes = scene.backend.explain(&step).unwrap().notes;
    // Elsewhere the rates of the kernels are not known: then this compares batches that run one part after the other.
    if device.device.properties().name.starts_with("NVIDIA H200") {
        assert!(notes.iter().any(|note| note.contains("at once")), "{notes:?}");
    }
    let num_prefill_rows = case.requests[..NUM_PREFILLS].iter().map(|r| r.q_len as usize).sum::<usize>();
    let num_rows = case.requests.iter().map(|r| r.q_len as usize).sum::<usize>();
    let want = [apart(case, 0..NUM_PREFILLS, device), apart(case, NUM_PREFILLS..case.requests.len(), device)];
    let demand = |got: &Written, what: &str| {
        for (rows, want) in [0..num_prefill_rows, num_prefill_rows..num_rows].into_iter().zip(&want) {
            assert!(got.rows(rows.clone(), case) == *want, "{case}: rows {rows:?}, {what}");
        }
    };
    for run in 0..NUM_RUNS {
        demand(&scene.run(&step), &format!("eager run {run}"));
    }
    let mut graph = scene.record(&step);
    for run in 0..NUM_RUNS {
        scene.poison();
        graph.replay().unwrap();
        demand(&scene.written(), &format!("replay {run}"));
    }
}

#[test]
fn parts_at_once_have_the_bits_that_they_have_apart() {
    if support::has_gpu() {
        let device = CudaDevice::open(0).unwrap();
        cases().iter().for_each(|case| check(case, &device));
    }
}

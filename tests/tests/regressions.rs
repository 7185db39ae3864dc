//! Bugs that were found once, each as the case that showed it: symptom, cause, date. The list only grows.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use attn_conformance::host;
use attn_metadata::{
    BackendConfig, BackendEntry, Batch, BatchLimits, BoxedBackend, Bucket, CaptureError, CaptureLimits, CreateError,
    HeadShape, Host, HostDevice, HybridBackend, Io, Kv, Layer, LayerParams, LayerRouter, Lse, ModelSpec, PoolShape,
    PrepareError, RawBatch, RunError,
};
use attn_reference::{cpu, oracle};
use kvpool::{Dtype, HostKv, HostTensor, HostTensorMut, KvDtype, KvFormat, KvLayout, KvShape, PageSize, Slot};

fn hybrid(config: &BackendConfig<Host>) -> Result<BoxedBackend<Host>, CreateError> {
    let (extend, decode) = ((cpu::entry().create)(config)?, (oracle::entry().create)(config)?);
    Ok(Box::new(HybridBackend::new(extend, decode, config.limits, 1)?))
}

fn check(name: &str, line: &str) {
    let result = host::run_case(name, line, &hybrid);
    assert!(result.is_ok(), "{name}: {result:?}\n  {line}");
}

/// 2026-11-29. Symptom: after a batch that was refused, the step before it was stale. Cause: the extend part had
/// planned its share before the decode part refused its own.
#[test]
fn a_hybrid_keeps_its_step_when_its_second_part_refuses() {
    check(
        "refused batches",
        "q/kv=1/41,1/30 heads=12/3 dim=128/128 page=2 layout=hnd causal=true append=false seed=13559835",
    );
}

/// 2026-11-29. Symptom: a batch of more requests than the limit was taken. Cause: each part compared the limit with
/// its own share of the requests.
#[test]
fn a_hybrid_counts_the_requests_of_both_parts() {
    check(
        "refused batches",
        "q/kv=0/64,1/41,1/30 heads=3/1 table=top shared=true causal=false append=true seed=16644865",
    );
}

/// What a backend gives for two decoding rows of one head, over 1,500 keys (two chunks) whose content is 1, but for a
/// NaN in key 1,400 of the second request where `poison` says so.
fn decode_two(entry: BackendEntry<Host>, q: [f32; 2], poison: bool) -> ([f32; 2], [f32; 2]) {
    let page_size = PageSize::new(1500).unwrap();
    let layer = Layer::new(LayerParams { sm_scale: 1.0, ..LayerParams::causal(HeadShape::new(1, 1, 1)) }).unwrap();
    let model = Arc::new(ModelSpec::new(vec![layer], Dtype::F32, KvDtype::F32, page_size).unwrap());
    let device = HostDevice::with_threads(1);
    let mut backend = (entry.create)(&BackendConfig { model, limits: BatchLimits::NONE, device }).unwrap();
    let shape = KvShape { num_pages: 2, page_size, num_kv_heads: 1, head_dim_k: 1, head_dim_v: 1 };
    let mut cache = HostKv::new(shape, KvLayout::Nhd, KvFormat::F32).unwrap();
    let slots: Vec<Slot> = (0..3000).map(Slot::from_raw).collect();
    let (mut keys, values) = (vec![1.0f32; 3000], vec![1.0f32; 3000]);
    keys[2900] = if poison { f32::NAN } else { 1.0 };
    let tensor = |data| HostTensor::packed(data, [3000, 1, 1]).unwrap();
    cache.append(&slots, &tensor(&keys[..]), Some(&tensor(&values[..]))).unwrap();
    let raw = RawBatch {
        num_rows: 2,
        qo_indptr: &[0, 1, 2],
        kv_indptr: &[0, 1, 2],
        kv_indices: &[0, 1],
        kv_last_page_len: &[1500, 1500],
        slot_mapping: None,
        custom_mask: None,
    };
    let step =
        backend.prepare_metadata(&Batch::from_raw(PoolShape { num_pages: 2, page_size }, &raw).unwrap()).unwrap();
    let (mut out, mut lse) = ([0.0f32; 2], [Lse::EMPTY; 2]);
    let io = Io {
        q: HostTensor::packed(&q[..], [2, 1, 1]).unwrap(),
        kv: Kv::Attend { cache: &cache },
        side: None,
        out: HostTensorMut::packed(&mut out[..], [2, 1, 1]).unwrap(),
        lse: Some(&mut lse[..]),
    };
    backend.forward(&step, 0, io).unwrap();
    (out, lse.map(Lse::ln))
}

/// 2026-11-29. Symptom: a row whose query is NaN had an LSE of −inf, so a merge would drop it without a word. Cause: a
/// maximum that ignores NaN made it look like a row that sees nothing.
#[test]
fn a_nan_that_a_row_sees_is_its_output_and_its_lse() {
    for entry in [cpu::entry(), oracle::entry()] {
        let (expected, expected_lse) = decode_two(entry, [0.5, 0.5], false);
        for (q, poison) in [([0.5, f32::NAN], false), ([0.5, 0.5], true)] {
            let (out, lse) = decode_two(entry, q, poison);
            assert_eq!((out[0], lse[0]), (expected[0], expected_lse[0]), "{}: the other row", entry.name);
            assert!(out[1].is_nan() && lse[1].is_nan(), "{}: {out:?} {lse:?}", entry.name);
        }
    }
}

/// A batch of one request with one query token over the first `kv_len` tokens of the first page, of 4,096.
fn one_of(kv_len: i32) -> Batch {
    let raw = RawBatch {
        num_rows: 1,
        qo_indptr: &[0, 1],
        kv_indptr: &[0, 1],
        kv_indices: &[0],
        kv_last_page_len: &[kv_len],
        slot_mapping: None,
        custom_mask: None,
    };
    let pool = PoolShape { num_pages: 1, page_size: PageSize::new(4096).unwrap() };
    Batch::from_raw(pool, &raw).unwrap()
}

/// A backend for a model of one layer, the parts of which may take so many bytes a step.
fn with_memory(entry: &BackendEntry<Host>, layers: Vec<Layer>, memory_bytes: Option<u64>) -> BoxedBackend<Host> {
    let page_size = PageSize::new(4096).unwrap();
    let model = Arc::new(ModelSpec::new(layers, Dtype::F32, KvDtype::F32, page_size).unwrap());
    let device = HostDevice { memory_bytes, ..HostDevice::with_threads(1) };
    (entry.create)(&BackendConfig { model, limits: BatchLimits::NONE, device }).unwrap()
}

/// 2026-11-30. Symptom: after a replay that the second part refused, a step extended the new batch and decoded the old
/// one, without an error; so did layers of a router. Cause: the first part had taken the new batch, and the ticket stayed
/// valid. And the oracle did not heed its memory in replays.
#[test]
fn a_captured_step_is_stale_after_a_replay_that_one_part_alone_took() {
    let layer = || Layer::new(LayerParams::causal(HeadShape::new(2, 1, 16))).unwrap();
    let part = |memory| with_memory(&oracle::entry(), vec![layer()], memory);
    // What the oracle takes for 100 tokens, but not for 4,096.
    let limit = Some(100 << 10);
    let hybrid = HybridBackend::new(part(None), part(limit), BatchLimits::NONE, 1).unwrap();
    let model = Arc::new(
        ModelSpec::new(vec![layer(), layer()], Dtype::F32, KvDtype::F32, PageSize::new(4096).unwrap()).unwrap(),
    );
    let parts = vec![(part(None), vec![0]), (part(limit), vec![1])];
    let router = LayerRouter::new(model, BatchLimits::NONE, parts).unwrap();
    let alone = part(limit);
    let backends: [(BoxedBackend<Host>, bool); 3] =
        [(Box::new(hybrid), true), (Box::new(router), true), (alone, false)];
    for (mut backend, is_stale) in backends {
        let bucket = Bucket::decode(1);
        let limits = CaptureLimits { buckets: vec![bucket], max_kv_len: 4096, num_pool_pages: 1, appends: false };
        backend.init_capture_graph(&limits).unwrap();
        let mut step = backend.prepare_for_capture(bucket).unwrap();
        backend.prepare_for_replay(&mut step, &one_of(100)).unwrap();
        assert!(backend.explain(&step).is_ok());
        let error = backend.prepare_for_replay(&mut step, &one_of(4096)).unwrap_err();
        assert!(matches!(error, CaptureError::Prepare(PrepareError::OutOfMemory { .. })), "{error}");
        let stale = matches!(backend.explain(&step), Err(RunError::StalePlan { .. }));
        assert_eq!(stale, is_stale, "{}", backend.name());
    }
}

/// 2026-11-30. Symptom: a panic in a step that was live when a larger batch was refused. Cause: the room for partial states
/// was given up before as much as the refused batch needs was asked for.
#[test]
fn a_split_step_runs_after_a_batch_that_no_memory_holds() {
    const HEADS: usize = 1024;
    let page_size = PageSize::new(1 << 18).unwrap();
    let layer = Layer::new(LayerParams::causal(HeadShape::new(1024, 1, 512))).unwrap();
    let model = Arc::new(ModelSpec::new(vec![layer], Dtype::F32, KvDtype::F32, page_size).unwrap());
    let config = BackendConfig { model, limits: BatchLimits::NONE, device: HostDevice::with_threads(1) };
    let mut backend = (cpu::entry().create)(&config).unwrap();
    let pool = PoolShape { num_pages: 1, page_size };
    let requests = |n: i32, q_len: i32, kv_len: i32| {
        let offsets: Vec<i32> = (0..=n).collect();
        let (zeros, lens) = (vec![0; offsets.len() - 1], vec![kv_len; offsets.len() - 1]);
        let raw = RawBatch {
            num_rows: usize::try_from(n * q_len).unwrap(),
            qo_indptr: &offsets.iter().map(|i| i * q_len).collect::<Vec<_>>(),
            kv_indptr: &offsets,
            kv_indices: &zeros,
            kv_last_page_len: &lens,
            slot_mapping: None,
            custom_mask: None,
        };
        Batch::from_raw(pool, &raw).unwrap()
    };
    let step = backend.prepare_metadata(&requests(1, 1, 2500)).unwrap();
    assert!(backend.explain(&step).unwrap().groups[0].num_split_tiles > 0);
    // Partial states of more bytes than there are addresses: 2^19 rows of 1,024 heads in 256 chunks of 2 KiB.
    let error = backend.prepare_metadata(&requests(1 << 15, 16, 1 << 18)).unwrap_err();
    assert!(matches!(error, PrepareError::OutOfMemory { bytes, .. } if bytes > 1 << 47), "{error}");
    let shape = KvShape { num_pages: 1, page_size, num_kv_heads: 1, head_dim_k: 512, head_dim_v: 512 };
    let cache = HostKv::new(shape, KvLayout::Nhd, KvFormat::F32).unwrap();
    let (q, mut out) = (vec![1.0f32; HEADS * 512], vec![1.0f32; HEADS * 512]);
    let io = Io {
        q: HostTensor::packed(&q[..], [1, HEADS, 512]).unwrap(),
        kv: Kv::Attend { cache: &cache },
        side: None,
        out: HostTensorMut::packed(&mut out[..], [1, HEADS, 512]).unwrap(),
        lse: None,
    };
    backend.forward(&step, 0, io).unwrap();
    assert!(out.iter().all(|&x| x == 0.0), "values of zeros");
}

//! Bugs that were found once, each as the case that showed it: symptom, cause, date. The list only grows.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use attn_conformance::host;
use attn_metadata::{
    BackendConfig, BackendEntry, Batch, BatchLimits, BoxedBackend, CreateError, HeadShape, Host, HostDevice,
    HybridBackend, Io, Kv, Layer, LayerParams, Lse, ModelSpec, PoolShape, RawBatch,
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

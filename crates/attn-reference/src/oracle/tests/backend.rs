//! The oracle behind the trait: stamps, capture and the rows it writes.

use std::sync::Arc;

use attn_metadata::{
    AttentionBackend, BackendConfig, BatchLimits, Bucket, CaptureError, CaptureLimits, Host, HostDevice, Io, Kv, Layer,
    Lse, ModelSpec, RunError, SubBatch,
};
use kvpool::{Dtype, HostTensorMut, KvDtype, PageSize};

use super::super::OracleBackend;
use super::{Problem, plain};

fn problem() -> Problem {
    Problem::random(plain(2, 1, 4), &[(2, 5), (1, 3)], 11)
}

fn backend(limits: BatchLimits) -> OracleBackend {
    let layers = vec![Layer::new(plain(2, 1, 4)).unwrap()];
    let model = ModelSpec::new(layers, Dtype::F32, KvDtype::F32, PageSize::new(3).unwrap()).unwrap();
    let config: BackendConfig<Host> = BackendConfig { model: Arc::new(model), limits, device: HostDevice::default() };
    OracleBackend::new(&config)
}

fn forward(
    backend: &mut OracleBackend,
    step: &attn_metadata::Prepared,
    problem: &Problem,
    out: &mut [f32],
    lse: &mut [Lse],
) -> Result<(), RunError> {
    let cache = problem.cache(&problem.batch());
    let out = HostTensorMut::packed(out, [3, 2, 4]).unwrap();
    let kv = Kv::Attend { cache: &cache };
    backend.forward(step, 0, Io { q: problem.q(), kv, side: None, out, lse: Some(lse) })
}

#[test]
fn a_step_is_stale_once_another_was_prepared() {
    let (problem, mut backend) = (problem(), backend(BatchLimits::NONE));
    let old = backend.prepare_metadata(&problem.batch()).unwrap();
    let new = backend.prepare_metadata(&problem.batch()).unwrap();
    let (mut out, mut lse) = ([7.0; 24], [Lse::from_ln(7.0); 6]);
    let error = forward(&mut backend, &old, &problem, &mut out, &mut lse).unwrap_err();
    assert!(matches!(error, RunError::StalePlan { .. }));
    assert_eq!(out, [7.0; 24]);
    forward(&mut backend, &new, &problem, &mut out, &mut lse).unwrap();
    assert!(backend.explain(&new).is_ok() && backend.explain(&old).is_err());
}

#[test]
fn a_sub_batch_writes_the_rows_of_its_requests_alone() {
    let (problem, mut backend) = (problem(), backend(BatchLimits::NONE));
    let batch = problem.batch();
    let mut second = batch.clone();
    batch.select_into(&mut second, SubBatch::Later, |r| r.q_len == 1);
    let step = backend.prepare_metadata(&second).unwrap();
    let (mut out, mut lse) = ([7.0; 24], [Lse::from_ln(7.0); 6]);
    forward(&mut backend, &step, &problem, &mut out, &mut lse).unwrap();
    assert_eq!(out[..16], [7.0; 16]);
    assert!(out[16..].iter().all(|x| *x != 7.0));
    assert_eq!(lse[..4], [Lse::from_ln(7.0); 4]);
}

#[test]
fn a_captured_step_is_padding_until_its_first_replay() {
    let (problem, mut backend) = (problem(), backend(BatchLimits::NONE));
    let bucket = Bucket { num_requests: 4, num_rows: 3 };
    assert!(matches!(backend.prepare_for_capture(bucket), Err(CaptureError::NotInitialised)));
    let limits = CaptureLimits { buckets: vec![bucket], max_kv_len: 5, num_pool_pages: 3, appends: false };
    backend.init_capture_graph(&limits).unwrap();
    let unknown = backend.prepare_for_capture(Bucket::decode(1));
    assert!(matches!(unknown, Err(CaptureError::UnknownBucket { .. })));
    let mut step = backend.prepare_for_capture(bucket).unwrap();
    let (mut out, mut lse) = ([7.0; 24], [Lse::from_ln(7.0); 6]);
    forward(&mut backend, &step, &problem, &mut out, &mut lse).unwrap();
    assert_eq!((out, lse), ([0.0; 24], [Lse::EMPTY; 6]));
    backend.prepare_for_replay(&mut step, &problem.batch()).unwrap();
    forward(&mut backend, &step, &problem, &mut out, &mut lse).unwrap();
    let (replayed, eager) = (out, backend.prepare_metadata(&problem.batch()).unwrap());
    forward(&mut backend, &eager, &problem, &mut out, &mut lse).unwrap();
    assert_eq!(replayed, out);
    // New limits make it stale.
    backend.init_capture_graph(&limits).unwrap();
    assert!(matches!(backend.prepare_for_replay(&mut step, &problem.batch()), Err(CaptureError::Stale(_))));
}

#[test]
fn a_replay_beyond_the_bucket_is_refused() {
    let (problem, mut backend) = (problem(), backend(BatchLimits::NONE));
    let bucket = Bucket { num_requests: 1, num_rows: 3 };
    let limits = CaptureLimits { buckets: vec![bucket], max_kv_len: 5, num_pool_pages: 3, appends: false };
    backend.init_capture_graph(&limits).unwrap();
    let mut step = backend.prepare_for_capture(bucket).unwrap();
    let refused = backend.prepare_for_replay(&mut step, &problem.batch());
    assert!(matches!(refused, Err(CaptureError::OverBucket { what: "requests", got: 2, limit: 1 })));
}

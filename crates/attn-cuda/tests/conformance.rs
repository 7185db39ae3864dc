//! The conformance suite on the CUDA backend, where there is a GPU; elsewhere the refusal says what is missing.
//!
//! `ATTN_REQUIRE_GPU=1` turns a missing GPU into a failure.

#![allow(clippy::print_stderr, clippy::unwrap_used, reason = "a test says why it did nothing")]

use std::sync::Arc;

use attn_conformance::{Suite, host};
use attn_cuda::device::probe;
use attn_metadata::{
    BackendConfig, BatchLimits, CreateError, HeadShape, Host, HostDevice, Layer, LayerParams, ModelSpec,
};
use kvpool::{Dtype, KvDtype, PageSize};

/// Whether there is a GPU; where there is none, backends must say so.
fn has_gpu() -> bool {
    match probe() {
        Ok(_) => true,
        Err(error) => {
            assert!(std::env::var_os("ATTN_REQUIRE_GPU").is_none(), "a GPU is required: {error}");
            let refused = (attn_cuda::host_entry().create)(&config()).err().expect("there is no GPU");
            let CreateError::Unsupported { reasons, .. } = refused else { panic!("{refused}") };
            assert_eq!(reasons.len(), 1);
            assert_eq!(reasons[0].to_string(), error.to_string());
            eprintln!("skipped: {error}");
            false
        }
    }
}

fn config() -> BackendConfig<Host> {
    let layer = Layer::new(LayerParams::causal(HeadShape::new(4, 2, 64))).unwrap();
    let page_size = PageSize::new(16).unwrap();
    let model = Arc::new(ModelSpec::new(vec![layer], Dtype::Bf16, KvDtype::Bf16, page_size).unwrap());
    BackendConfig { model, limits: BatchLimits::NONE, device: HostDevice::default() }
}

/// More cases than for others: pairs of dtypes that have no kernel are drawn too, and refused.
const SUITE: Suite = Suite { num_oracle_cases: 900, num_check_cases: 24, floor: 600, ..Suite::standard().sequential() };
const SMOKE: Suite = Suite { num_oracle_cases: 120, num_check_cases: 5, floor: 60, ..Suite::standard().sequential() };

#[test]
fn the_cuda_backend_passes_the_suite() {
    if has_gpu() {
        host::run(&SUITE, attn_cuda::host_entry().create).assert_passed();
    }
}

#[test]
fn the_plain_kernels_pass_the_suite() {
    if has_gpu() {
        host::run(&SMOKE, attn_cuda::host_plain_entry().create).assert_passed();
    }
}

#[test]
fn the_checked_kernels_pass_the_suite() {
    if has_gpu() {
        let checked = |config: &BackendConfig<Host>| {
            let backend = attn_cuda::CudaOnHost::checked(config)?;
            Ok(Box::new(backend) as attn_metadata::BoxedBackend<Host>)
        };
        host::run(&SMOKE, checked).assert_passed();
    }
}

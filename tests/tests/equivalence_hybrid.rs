//! Pairs of different backends by phase: whatever extends and whatever decodes, the pair is a backend like any other.
//! Partial states of one merge with those of the other, and batches that mix both phases are right.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use attn_conformance::{Suite, host};
use attn_metadata::{
    BackendConfig, BackendEntry, BatchLimits, BoxedBackend, CreateError, HeadShape, Host, HostDevice, HybridBackend,
    Layer, LayerParams, ModelSpec,
};
use attn_reference::{cpu, oracle};
use kvpool::{Dtype, KvDtype, PageSize};

fn pair(extend: BackendEntry<Host>, decode: BackendEntry<Host>) {
    let create = move |config: &BackendConfig<Host>| -> Result<BoxedBackend<Host>, CreateError> {
        Ok(Box::new(HybridBackend::new((extend.create)(config)?, (decode.create)(config)?, config.limits, 1)?))
    };
    let suite = Suite { num_oracle_cases: 60, num_check_cases: 5, floor: 150, ..Suite::standard() };
    host::run(&suite, create).assert_passed();
}

#[test]
fn the_cpu_backend_extends_and_the_oracle_decodes() {
    pair(cpu::entry(), oracle::entry());
}

#[test]
fn the_oracle_extends_and_the_cpu_backend_decodes() {
    pair(oracle::entry(), cpu::entry());
}

#[test]
fn parts_of_different_models_are_refused() {
    let config = |page_size| {
        let layer = Layer::new(LayerParams::causal(HeadShape::new(2, 1, 8))).unwrap();
        let page_size = PageSize::new(page_size).unwrap();
        let model = ModelSpec::new(vec![layer], Dtype::F32, KvDtype::F32, page_size).unwrap();
        let device = HostDevice::with_threads(1);
        BackendConfig { model: Arc::new(model), limits: BatchLimits::NONE, device }
    };
    let create = |page_size| (oracle::entry().create)(&config(page_size)).unwrap();
    let pair = |a, b| HybridBackend::new(create(a), create(b), BatchLimits::NONE, 1);
    assert!(pair(16, 16).is_ok());
    assert!(matches!(pair(16, 8), Err(CreateError::DifferentModels { extend: "oracle", decode: "oracle" })));
}

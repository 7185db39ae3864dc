//! Models whose layers run on different backends: the router is a backend like any other, and the registry finds one
//! for each layer.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use attn_conformance::{Suite, host};
use attn_metadata::{
    BackendConfig, BackendEntry, BatchLimits, BoxedBackend, Capabilities, CreateError, DimRule, HeadShape, Host,
    HostDevice, Layer, LayerParams, LayerRouter, ModelSpec, Reason, Registry, SelectError,
};
use attn_reference::{cpu, oracle};
use kvpool::{Dtype, KvDtype, PageSize};

/// Even layers on one backend, odd ones on another.
fn alternate(
    even: BackendEntry<Host>,
    odd: BackendEntry<Host>,
) -> impl Fn(&BackendConfig<Host>) -> Result<BoxedBackend<Host>, CreateError> + Sync {
    move |config| {
        let layers = |rest: usize| -> Vec<usize> { (rest..config.model.layers().len()).step_by(2).collect() };
        let mut parts = Vec::new();
        for (entry, layers) in [(even, layers(0)), (odd, layers(1))].into_iter().filter(|(_, l)| !l.is_empty()) {
            let model = Arc::new(config.model.subset(&layers).unwrap());
            let config = BackendConfig { model, limits: config.limits, device: config.device };
            parts.push(((entry.create)(&config)?, layers));
        }
        Ok(Box::new(LayerRouter::new(Arc::clone(&config.model), config.limits, parts)?))
    }
}

#[test]
fn layers_on_two_backends_pass_the_suite() {
    let suite = Suite { num_oracle_cases: 30, num_check_cases: 5, floor: 100, ..Suite::standard() };
    host::run(&suite, alternate(cpu::entry(), cpu::entry())).assert_passed();
}

fn only(dim: u32) -> Capabilities {
    let plain = (cpu::entry().capabilities)(&HostDevice::default()).unwrap();
    Capabilities { head_dims: DimRule::Pairs(vec![(dim, dim)]), ..plain }
}

fn narrow(_: &HostDevice) -> Result<Capabilities, Reason> {
    Ok(only(16))
}

fn wide(_: &HostDevice) -> Result<Capabilities, Reason> {
    Ok(only(64))
}

fn registry() -> Registry<Host> {
    let entry = |name, capabilities| BackendEntry { name, capabilities, ..cpu::entry() };
    let narrow = entry("narrow", narrow as fn(&HostDevice) -> _);
    Registry::new(vec![narrow, entry("wide", wide), oracle::entry()])
}

fn config(dims: &[u32]) -> BackendConfig<Host> {
    let layer = |&dim| Layer::new(LayerParams::causal(HeadShape::new(2, 1, dim))).unwrap();
    let page_size = PageSize::new(16).unwrap();
    let model = ModelSpec::new(dims.iter().map(layer).collect(), Dtype::F32, KvDtype::F32, page_size).unwrap();
    BackendConfig { model: Arc::new(model), limits: BatchLimits::NONE, device: HostDevice::with_threads(1) }
}

#[test]
fn auto_finds_a_backend_for_each_layer_where_none_runs_them_all() {
    let (backend, selection) = registry().create("auto", &config(&[16, 64, 64, 16])).unwrap();
    assert_eq!(backend.name(), "router");
    assert_eq!(selection.extend.of_layers(), ["narrow", "wide", "wide", "narrow"]);
    assert_eq!(selection.to_string().lines().next(), Some("narrow (2 layers) + wide (2 layers)"));
    let (backend, selection) = registry().create("auto", &config(&[64, 64])).unwrap();
    assert_eq!((backend.name(), &*selection.extend.to_string()), ("cpu", "wide"));
    assert!(selection.to_string().contains("not narrow: head dims qk 64, vo 64 are not supported"), "{selection}");
}

#[test]
fn each_layer_takes_the_first_named_backend_that_can_run_it() {
    let of_layers = |choice: &str, dims: &[u32]| {
        let selection = registry().select(choice, &config(dims).model, &HostDevice::default());
        selection.map(|s| (s.extend.of_layers().to_vec(), s.decode.of_layers().to_vec()))
    };
    let (extend, decode) = of_layers("wide+oracle,oracle", &[16, 64]).unwrap();
    assert_eq!((extend, decode), (vec!["oracle", "wide"], vec!["oracle", "oracle"]));
    let error = of_layers("wide+narrow", &[16, 80]).unwrap_err();
    assert!(matches!(&error, SelectError::NoneFitsLayer { layer: 1, rejected } if rejected.len() == 2), "{error}");
    assert!(matches!(of_layers("auto", &[80]), Err(SelectError::NoneFits { .. })));
    for malformed in ["wide+", "+", "", "auto+wide", "wide,", "a,b,c"] {
        assert!(matches!(of_layers(malformed, &[64]), Err(SelectError::Malformed { .. })), "{malformed:?}");
    }
    assert!(matches!(of_layers("wide+nobody", &[64]), Err(SelectError::Unknown { .. })));
}

#[test]
fn a_layer_of_no_part_or_of_two_or_of_another_model_is_refused() {
    let whole = config(&[16, 64, 64]);
    let part = |layers: &[usize]| {
        let model = Arc::new(whole.model.subset(layers).unwrap());
        (oracle::entry().create)(&BackendConfig { model, ..config(&[16]) }).unwrap()
    };
    let route = |parts| LayerRouter::new(Arc::clone(&whole.model), BatchLimits::NONE, parts).map(|_| ());
    assert!(route(vec![(part(&[1, 2]), vec![1, 2]), (part(&[0]), vec![0])]).is_ok());
    let refused = [
        (vec![(part(&[0, 1]), vec![0, 1])], 2),
        (vec![(part(&[0, 1]), vec![0, 1]), (part(&[1, 2]), vec![1, 2])], 1),
        (vec![(part(&[0, 1]), vec![1, 0]), (part(&[2]), vec![2])], 1),
        (vec![(part(&[0, 1, 2]), vec![0, 1, 2, 3])], 3),
    ];
    for (parts, expected) in refused {
        let error = route(parts).unwrap_err();
        assert!(matches!(error, CreateError::RoutedLayer { layer, .. } if layer == expected), "{error}");
    }
}

//! What a result may not depend on: the run, the neighbours, the workers, the layer before, a hybrid. All exact.

use attn_metadata::{AttentionBackend, Feature, Host, HostDevice, HybridBackend, LayerParams};
use kvpool::{Dtype, KvDtype};

use super::context::{Context, roomy, with_queries};
use super::large::few_heads;
use super::{Check, check};
use crate::case::{Case, RequestShape};
use crate::harness::{Build, Problem, Run, Stop, same_rows};
use crate::rng::Rng;

pub(super) const RERUN: Check =
    check("rerun", "20 runs, of one backend and of fresh ones: the same bits", with_queries, rerun);

pub(super) const ALONE: Check =
    check("alone", "a request alone, in any batch, at any place, beside NaN: the same bits", with_neighbours, alone);

pub(super) const THREADS: Check =
    check("threads", "any number of workers, also over KV that is split: the same bits", with_split, threads);

pub(super) const LAYERS: Check = check(
    "layers",
    "one plan run over the layers of a model is, layer by layer, what a fresh plan gives",
    with_queries,
    layers,
);

pub(super) const HYBRID: Check =
    check("hybrid", "the backend paired with itself by phase: the same bits", with_neighbours, hybrid);

fn rerun(context: &Context<'_>, case: &Case) -> Result<f64, Stop> {
    let problem = Problem::new(case);
    let mut backend = context.backend(case)?;
    let first = crate::harness::run(&problem, &mut *backend)?;
    let step = crate::harness::prepare(&mut *backend, &problem.batch())?;
    for index in 1..15 {
        first
            .same(&format!("run {index} of one step"), &crate::harness::forward(&problem, &mut *backend, &step, 0)?)?;
    }
    for index in 15..20 {
        first.same(&format!("fresh backend, run {index}"), &context.run(&problem)?)?;
    }
    Ok(0.0)
}

/// At least three requests with queries, of one and of several tokens where the backend extends.
fn with_neighbours(case: &mut Case, rng: &mut Rng) {
    with_queries(case, rng);
    case.requests.truncate(6);
    let most = if case.requests.iter().any(|r| r.q_len > 1) { 5 } else { 1 };
    case.requests.push(RequestShape { q_len: most, kv_len: 70 + most });
    case.requests.push(RequestShape { q_len: 1, kv_len: 200 });
    case.requests.push(RequestShape { q_len: 1, kv_len: 1 });
}

/// Checks of what only batch-invariant backends promise stop here for others.
fn require_invariance(backend: &dyn AttentionBackend<Host>) -> Result<(), Stop> {
    let promises = backend.capabilities().features.contains(Feature::BatchInvariant);
    if promises { Ok(()) } else { Err(Stop::Skipped("not batch invariant".to_owned())) }
}

fn alone(context: &Context<'_>, case: &Case) -> Result<f64, Stop> {
    let mut backend = context.backend(case)?;
    require_invariance(&*backend)?;
    let mut run = |build: Build| {
        let problem = Problem::build(case, build);
        crate::harness::run(&problem, &mut *backend).map(|run| (problem, run))
    };
    let whole = run(Build::of(case))?;
    let count = case.requests.len();
    for member in 0..count {
        same_member("alone", member, &whole, &run(Build { members: vec![member], ..Build::of(case) })?)?;
    }
    let backwards: Vec<usize> = (0..count).rev().collect();
    let turned = run(Build { members: backwards, ..Build::of(case) })?;
    let less = run(Build { members: (0..count).step_by(2).collect(), ..Build::of(case) })?;
    for (what, other) in [("in reverse order", &turned), ("with fewer neighbours", &less)] {
        for &member in &other.0.build.members {
            same_member(what, member, &whole, other)?;
        }
    }
    let poisoned = run(Build { nan_member: Some(count / 2), ..Build::of(case) })?;
    (0..count).filter(|m| *m != count / 2).try_for_each(|m| same_member("beside NaN", m, &whole, &poisoned))?;
    Ok(0.0)
}

fn same_member(what: &str, member: usize, a: &(Problem, Run), b: &(Problem, Run)) -> Result<(), Stop> {
    let rows = |(problem, _): &(Problem, Run)| {
        let place = problem.build.members.iter().position(|m| *m == member).expect("a member of both");
        problem.rows_of(place)
    };
    let (rows_a, rows_b) = (rows(a), rows(b));
    same_rows(&format!("request {member} {what}"), (&a.1, rows_a.start), (&b.1, rows_b.start), rows_a.len())
}

/// A request whose KV backends split among workers.
fn with_split(case: &mut Case, rng: &mut Rng) {
    with_queries(case, rng);
    few_heads(case, 4);
    // A window would leave too few keys to split, and outputs of 16 bits hide in which order the parts were added.
    case.window = None;
    if rng.below(2) == 0 {
        (case.q_dtype, case.kv_dtype) = (Dtype::F32, KvDtype::F32);
    }
    case.requests.truncate(6);
    case.requests.push(RequestShape { q_len: 1, kv_len: 2100 });
}

fn threads(context: &Context<'_>, case: &Case) -> Result<f64, Stop> {
    require_invariance(&*context.backend(case)?)?;
    let problem = Problem::new(case);
    let first = context.run(&problem)?;
    for num_threads in [Some(1), Some(2), Some(3), Some(7), None] {
        let device = HostDevice { num_threads, ..HostDevice::default() };
        let mut backend = context.backend_with(&case.model(vec![case.layer()]), roomy(case), device)?;
        first.same(&format!("{num_threads:?} threads"), &crate::harness::run(&problem, &mut *backend)?)?;
    }
    Ok(0.0)
}

/// The case's layer, one of another scale and window, and the first again.
fn layers(context: &Context<'_>, case: &Case) -> Result<f64, Stop> {
    let base = case.layer_params();
    let window_left = base.window_left.map(|w| w / 2);
    let other = LayerParams { sm_scale: 0.5 * base.sm_scale, window_left, ..base };
    let other = attn_metadata::Layer::new(other).map_err(|error| Stop::failed(error.to_string()))?;
    let layers = vec![case.layer(), other, case.layer()];
    let problem = Problem::new(case);
    let mut backend = context.backend_of(case, layers.clone())?;
    let step = crate::harness::prepare(&mut *backend, &problem.batch())?;
    let mut over_layers = Vec::new();
    for layer in 0..layers.len() {
        over_layers.push(crate::harness::forward(&problem, &mut *backend, &step, layer)?);
    }
    for (index, layer) in layers.into_iter().enumerate() {
        let mut fresh = context.backend_of(case, vec![layer])?;
        let fresh = crate::harness::run(&problem, &mut *fresh)?;
        fresh.same(&format!("layer {index} of a model"), &over_layers[index])?;
    }
    over_layers[0].same("the same layer later", &over_layers[2])?;
    Ok(0.0)
}

fn hybrid(context: &Context<'_>, case: &Case) -> Result<f64, Stop> {
    require_invariance(&*context.backend(case)?)?;
    let problem = Problem::new(case);
    let plain = context.run(&problem)?;
    for max_decode_q_len in [1, 4] {
        let pair = HybridBackend::new(context.backend(case)?, context.backend(case)?, roomy(case), max_decode_q_len);
        let mut pair = pair.map_err(|error| Stop::failed(error.to_string()))?;
        let run = crate::harness::run(&problem, &mut pair)?;
        plain.same(&format!("hybrid, decode up to {max_decode_q_len} tokens"), &run)?;
        same_cache(&plain, &run)?;
    }
    Ok(0.0)
}

/// The caches after two runs are the same bytes.
pub(super) fn same_cache(a: &Run, b: &Run) -> Result<(), Stop> {
    let bytes = |run: &Run| {
        [&run.cache, &run.side_cache].map(|kv| kv.as_ref().map(|kv| kv.buffer().as_slice().as_bytes().to_vec()))
    };
    if bytes(a) == bytes(b) { Ok(()) } else { Err(Stop::failed("the caches differ after the step")) }
}

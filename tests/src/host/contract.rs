//! The contract of the trait: stale steps, refused batches, refused calls. Refusals are named and change nothing.

use attn_metadata::{
    AttentionBackend, BatchLimits, Host, Io, Kv, Lse, PrepareError, Prepared, RunError, Side, SideSpec,
};
use kvpool::{Dtype, HostKv, KvLayout, KvShape, KvSpec, PageSize, Values};

use super::context::{Context, with_queries};
use super::{Check, check};
use crate::case::{Case, RequestShape};
use crate::harness::{
    Activation, Problem, Run, SideProblem, Stop, Strides, canary, forward, kv_of, prepare, run, side_output,
};
use crate::rng::Rng;

pub(super) const STALE: Check = check(
    "stale plans",
    "a step of an earlier batch or of another backend is refused, nothing is written",
    with_queries,
    stale,
);

pub(super) const REFUSED_BATCH: Check = check(
    "refused batches",
    "limits are exact; a refused batch leaves the step before it valid",
    with_two,
    refused_batch,
);

pub(super) const REFUSED_CALL: Check =
    check("refused calls", "tensors that do not fit are named, and nothing is written", with_queries, refused_call);

fn stale(context: &Context<'_>, case: &Case) -> Result<f64, Stop> {
    let problem = Problem::new(case);
    let (mut backend, mut other) = (context.backend(case)?, context.backend(case)?);
    let first = prepare(&mut *backend, &problem.batch())?;
    forward(&problem, &mut *backend, &first, 0)?;
    let second = prepare(&mut *backend, &problem.batch())?;
    // The other backend has prepared as many steps, so that numbers alone do not tell its step from ours.
    prepare(&mut *other, &problem.batch())?;
    let foreign = prepare(&mut *other, &problem.batch())?;
    for (what, step) in [("an earlier batch", &first), ("another backend", &foreign)] {
        let result = attempt(&problem, &mut *backend, step, |_| {})?;
        if !matches!(result, Err(RunError::StalePlan { .. })) {
            return Err(Stop::failed(format!("a step of {what}: {result:?}")));
        }
        if !matches!(backend.explain(step), Err(RunError::StalePlan { .. })) {
            return Err(Stop::failed(format!("a step of {what} was explained")));
        }
    }
    forward(&problem, &mut *backend, &second, 0)?;
    backend.explain(&second).map_err(|error| Stop::error("explain", &error))?;
    Ok(0.0)
}

fn with_two(case: &mut Case, rng: &mut Rng) {
    with_queries(case, rng);
    case.requests.truncate(6);
    case.requests.push(RequestShape { q_len: 1, kv_len: 30 });
}

fn refused_batch(context: &Context<'_>, case: &Case) -> Result<f64, Stop> {
    let limits = BatchLimits {
        max_rows: case.num_used_rows() + case.padding_rows,
        max_requests: u32::try_from(case.requests.len()).expect("small"),
        max_kv_len: case.max_kv_len(),
    };
    let mut backend = context.backend_with(&case.model(vec![case.layer()]), limits, context.suite().device)?;
    let problem = Problem::new(case);
    let step = prepare(&mut *backend, &problem.batch())?;
    let plain = forward(&problem, &mut *backend, &step, 0)?;
    let mut longer = case.clone();
    longer.requests[0].kv_len += case.max_kv_len() + 1;
    let mut more = case.clone();
    more.requests.push(RequestShape { q_len: 0, kv_len: 1 });
    let rows = Case { padding_rows: case.padding_rows + 1, ..case.clone() };
    let larger_page = Case { page_size: case.page_size + 1, family: None, ..case.clone() };
    let smaller_page = Case { page_size: (case.page_size - 1).max(1), family: None, ..case.clone() };
    let batches = [("KV tokens", longer), ("requests", more), ("rows", rows), ("page size", larger_page)];
    let smaller = (case.page_size > 1).then_some(("page size, from below", smaller_page));
    for (what, larger) in batches.into_iter().chain(smaller) {
        let result = backend.prepare_metadata(&Problem::new(&larger).batch());
        if !matches!(result, Err(PrepareError::OverLimit { .. } | PrepareError::PageSize { .. })) {
            return Err(Stop::failed(format!("a batch beyond the limit of {what}: {result:?}")));
        }
        plain.same(&format!("after a batch with too many {what}"), &forward(&problem, &mut *backend, &step, 0)?)?;
    }
    Ok(0.0)
}

/// What is wrong with a call, by name.
type Edit = (&'static str, fn(&mut Wrong));

/// One thing that is wrong with a call.
#[derive(Clone, Copy, Debug, Default)]
struct Wrong {
    layer: usize,
    q_rows: usize,
    out_dim: usize,
    dtype: bool,
    lse_len: usize,
    append: bool,
    cache: Option<fn(&mut KvShape)>,
    /// v is given where none is wanted, or not given where one is.
    v: bool,
    /// A side branch is given where none is wanted, or not given where one is.
    side: bool,
}

/// What is wrong with a cache, by name.
type CacheEdit = (&'static str, fn(&mut KvShape));

/// Caches that are not the layer's.
const CACHES: &[CacheEdit] = &[
    ("few pages", |shape| shape.num_pages -= 1),
    ("larger pages", |shape| shape.page_size = PageSize::new(shape.page_size.get() + 1).expect("small")),
    ("more KV heads", |shape| shape.num_kv_heads += 1),
    ("wider keys", |shape| shape.head_dim_k += 1),
    ("other values", |shape| shape.head_dim_v = if shape.head_dim_v > 1 { shape.head_dim_v - 1 } else { 2 }),
];

fn refused_call(context: &Context<'_>, case: &Case) -> Result<f64, Stop> {
    let problem = Problem::new(case);
    let mut backend = context.backend(case)?;
    let plain: Run = run(&problem, &mut *backend)?;
    let step = prepare(&mut *backend, &problem.batch())?;
    let edits: [Edit; 8] = [
        ("layer", |w| w.layer = 1),
        ("rows of q", |w| w.q_rows = 1),
        ("width of out", |w| w.out_dim = 1),
        ("dtype of q", |w| w.dtype = true),
        ("length of the LSE", |w| w.lse_len = 1),
        ("append", |w| w.append = true),
        ("presence of v", |w| w.v = true),
        ("presence of the side branch", |w| w.side = true),
    ];
    let is_possible = |what: &str| what != "presence of v" || case.append;
    for (what, edit) in edits.into_iter().filter(|(what, _)| is_possible(what)) {
        let result = attempt(&problem, &mut *backend, &step, edit)?;
        let named = matches!(
            (what, &result),
            ("layer", Err(RunError::NoSuchLayer { .. }))
                | ("rows of q" | "width of out", Err(RunError::Shape { .. }))
                | ("dtype of q", Err(RunError::Dtype { .. }))
                | ("length of the LSE", Err(RunError::LseLen { .. } | RunError::NoLse { .. }))
                | ("append", Err(RunError::AppendMismatch { .. }))
                | (
                    "presence of v" | "presence of the side branch",
                    Err(RunError::Missing { .. } | RunError::Unwanted { .. })
                )
        );
        if !named {
            return Err(Stop::failed(format!("a call with a wrong {what}: {result:?}")));
        }
    }
    for (what, edit) in CACHES.iter().filter(|(what, _)| *what != "few pages" || problem.pool.num_pages > 1) {
        let result = attempt(&problem, &mut *backend, &step, |w| w.cache = Some(*edit))?;
        if !matches!(result, Err(RunError::Cache { .. } | RunError::CacheSpec { .. })) {
            return Err(Stop::failed(format!("a call with a cache of {what}: {result:?}")));
        }
    }
    plain.same("after refused calls", &forward(&problem, &mut *backend, &step, 0)?)?;
    Ok(0.0)
}

/// A call with something wrong about it; a failure where it wrote anything all the same.
fn attempt(
    problem: &Problem,
    backend: &mut dyn AttentionBackend<Host>,
    step: &Prepared,
    edit: impl FnOnce(&mut Wrong),
) -> Result<Result<(), RunError>, Stop> {
    let mut wrong = Wrong::default();
    edit(&mut wrong);
    let [rows, heads, dim_qk] = problem.q.shape();
    let dtype = problem.case.q_dtype;
    let q_dtype = if wrong.dtype { other_dtype(dtype) } else { dtype };
    let q = Activation::poisoned(q_dtype, [rows + wrong.q_rows, heads, dim_qk], Strides::Packed);
    let is_q_plain = wrong.q_rows == 0 && !wrong.dtype;
    let dim = problem.case.heads.head_dim_vo as usize + wrong.out_dim;
    let mut out = Activation::poisoned(dtype, [rows, heads, dim], Strides::Packed);
    let mut lse = vec![Lse::from_ln(f32::from_bits(canary(Dtype::F32))); rows * heads + wrong.lse_len];
    let wants_lse = wrong.lse_len > 0;
    let sound = match wrong.cache {
        Some(edit) => {
            let mut shape = problem.cache.shape();
            edit(&mut shape);
            let KvShape { num_pages, page_size, num_kv_heads, head_dim_k, head_dim_v } = shape;
            let values = match problem.cache.spec().values {
                Values::Own(_) => Values::Own(head_dim_v),
                Values::InKeys(_) => Values::InKeys(head_dim_v.min(head_dim_k)),
                Values::None => Values::Own(1),
            };
            let spec = KvSpec { num_kv_heads, head_dim_k, values };
            let made = HostKv::for_spec(spec, num_pages, page_size, KvLayout::Nhd, problem.case.format());
            made.expect("caches of a case are small")
        }
        None => problem.cache.clone(),
    };
    let mut cache = sound.clone();
    let kv = if problem.case.append == wrong.append {
        Kv::Attend { cache: &sound }
    } else {
        let v = if wrong.v == problem.v.is_some() { None } else { Some(problem.v.as_ref().unwrap_or(&problem.k)) };
        Kv::Append { cache: &mut cache, k: problem.k.view(), v: v.map(Activation::view) }
    };
    let mut branch = Branch::new(problem);
    let side = if wrong.side == problem.side.is_some() { None } else { Some(branch.io(problem)) };
    let q = if is_q_plain { problem.q.view() } else { q.view() };
    let io = Io { q, kv, side, out: out.view_mut(), lse: wants_lse.then_some(&mut lse[..]) };
    let result = backend.forward(step, wrong.layer, io);
    let untouched = out.bits().iter().all(|&bits| bits == canary(dtype))
        && out.broken_guard().is_none()
        && lse.iter().all(|lse| lse.ln().to_bits() == canary(Dtype::F32))
        && cache.buffer().as_slice().as_bytes() == sound.buffer().as_slice().as_bytes();
    if result.is_err() && !untouched {
        return Err(Stop::failed(format!("a refused call wrote something ({wrong:?})")));
    }
    Ok(result)
}

/// The side branch of a call, where the layer has one, or one that it has no use for.
struct Branch {
    side: SideProblem,
    out: Option<Activation>,
}

impl Branch {
    fn new(problem: &Problem) -> Self {
        let heads = problem.case.heads;
        let (num_heads, head_dim) = (heads.num_qo_heads, heads.head_dim_qk);
        let spec = SideSpec { num_heads, head_dim, kv: problem.cache.spec(), out_dim: None };
        let Problem { cache, q, k, v, .. } = problem.clone();
        let side = problem.side.clone().unwrap_or(SideProblem { spec, cache, q, k, v });
        let out = side_output(problem, &side);
        Self { side, out }
    }

    fn io(&mut self, problem: &Problem) -> Side<'_, Host> {
        let Self { side: SideProblem { cache, q, k, v, .. }, out } = self;
        let kv = kv_of(problem, cache, k, v.as_ref());
        Side { q: q.view(), kv, out: out.as_mut().map(Activation::view_mut) }
    }
}

const fn other_dtype(dtype: Dtype) -> Dtype {
    match dtype {
        Dtype::F32 => Dtype::Bf16,
        Dtype::F16 | Dtype::Bf16 => Dtype::F32,
    }
}

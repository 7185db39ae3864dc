//! One problem in several steps or shapes, within tolerances: chunks, page sizes, the two halves of the KV merged.

use attn_metadata::{Feature, Lse, merge_state};
use kvpool::Dtype;

use super::context::{Context, with_queries};
use super::{Check, check};
use crate::case::{Case, RequestShape, Sinks};
use crate::harness::{Build, Problem, Run, Stop, run, value};
use crate::rng::Rng;

pub(super) const CHUNKS: Check = check(
    "chunks",
    "extending in chunks of 1, 7, page, page + 1 gives the outputs of one shot, and the same cache",
    with_chunks,
    chunks,
);

pub(super) const PAGE_SIZES: Check =
    check("page sizes", "pages of 1 to 256 tokens give the outputs of the oracle for each", with_pages, page_sizes);

pub(super) const MERGE: Check = check(
    "merge",
    "partial states over two halves of the KV merge to the whole; merging with an empty half changes no bit",
    with_halves,
    merge,
);

fn with_chunks(case: &mut Case, rng: &mut Rng) {
    let extends = case.requests.iter().any(|r| r.q_len > 1);
    let cached = rng.pick(&[0, 1, 5, case.page_size]);
    let q_len = if extends { 17 + case.page_size.min(20) } else { 1 };
    case.requests = vec![RequestShape { q_len, kv_len: cached + q_len }];
    (case.append, case.causal, case.custom, case.padding_rows, case.shared) = (true, true, false, 0, false);
}

fn chunks(context: &Context<'_>, case: &Case) -> Result<f64, Stop> {
    let whole = Problem::new(case);
    let mut backend = context.backend(case)?;
    let one_shot = run(&whole, &mut *backend)?;
    let mut worst = context.compare(&whole, &one_shot)?;
    for chunk_len in [1, 7, case.page_size, case.page_size + 1] {
        let joined = in_chunks(&whole, chunk_len, &mut *backend)?;
        let named = |stop| match stop {
            Stop::Failed(why) => Stop::failed(format!("chunks of {chunk_len}: {why}")),
            other => other,
        };
        worst = worst.max(context.compare(&whole, &joined).map_err(named)?);
        super::determinism::same_cache(&one_shot, &joined).map_err(named)?;
    }
    Ok(worst)
}

/// Runs a problem of one request in chunks, over one cache, and puts the outputs together.
fn in_chunks(
    whole: &Problem,
    chunk_len: u32,
    backend: &mut dyn attn_metadata::AttentionBackend<attn_metadata::Host>,
) -> Result<Run, Stop> {
    let RequestShape { q_len, kv_len } = whole.case.requests[0];
    let mut joined: Option<Run> = None;
    let mut done = 0;
    while done < q_len {
        let part = chunk_len.min(q_len - done);
        let kv_len = kv_len - q_len + done + part;
        let case = Case { requests: vec![RequestShape { q_len: part, kv_len }], ..whole.case.clone() };
        // The same pages: the pool of the whole, of which the chunk uses the first ones.
        let mut problem = Problem::build(&case, Build { min_pages: whole.pool.num_pages, ..Build::of(&case) });
        reuse_pages(&mut problem, whole);
        problem.cache = joined.as_ref().and_then(|run| run.cache.clone()).unwrap_or_else(|| whole.cache.clone());
        let run = run(&problem, backend)?;
        joined = Some(match joined.take() {
            None => run,
            Some(before) => append_rows(before, run),
        });
        done += part;
    }
    joined.ok_or_else(|| Stop::Skipped("no queries".to_owned()))
}

/// Gives a shorter problem of the same request the page ids of the whole.
fn reuse_pages(problem: &mut Problem, whole: &Problem) {
    let count = problem.tables.kv_indices.len();
    problem.tables.kv_indices.copy_from_slice(&whole.tables.kv_indices[..count]);
    problem.pool = whole.pool;
    let request = problem.case.requests[0];
    let skipped = problem.case.cached_len(&request) - whole.case.cached_len(&whole.case.requests[0]);
    let slots = whole.tables.slots.as_ref().map(|slots| slots[skipped as usize..][..request.q_len as usize].to_vec());
    problem.tables.slots = slots;
}

fn append_rows(before: Run, after: Run) -> Run {
    let [rows, heads, dim] = before.shape;
    let lse = before.lse.zip(after.lse).map(|(a, b)| [a, b].concat());
    Run { shape: [rows + after.shape[0], heads, dim], out: [before.out, after.out].concat(), lse, ..after }
}

fn with_pages(case: &mut Case, rng: &mut Rng) {
    with_queries(case, rng);
    case.requests.truncate(3);
    case.shared = false;
}

fn page_sizes(context: &Context<'_>, case: &Case) -> Result<f64, Stop> {
    let mut worst: Option<f64> = None;
    for page_size in [1, 2, 3, 16, 61, 64, 256] {
        let case = Case { page_size, ..case.clone() };
        let problem = Problem::new(&case);
        match context.run(&problem) {
            Ok(run) => worst = Some(worst.unwrap_or(0.0).max(context.compare(&problem, &run)?)),
            Err(Stop::Refused(_)) => {}
            Err(stop) => return Err(stop),
        }
    }
    worst.ok_or_else(|| Stop::Refused("no page size is supported".to_owned()))
}

/// Partial states need all keys visible wherever the KV is cut: full attention, nothing that depends on positions.
fn with_halves(case: &mut Case, rng: &mut Rng) {
    with_queries(case, rng);
    case.requests.retain(|r| r.q_len > 0);
    case.requests.truncate(4);
    case.requests.iter_mut().for_each(|r| r.kv_len = r.kv_len.max(2));
    let decode = case.requests.iter().all(|r| r.q_len == 1);
    (case.causal, case.window, case.custom, case.alibi) = (decode, None, false, false);
    (case.sinks, case.append, case.shared) = (Sinks::None, false, false);
}

fn merge(context: &Context<'_>, case: &Case) -> Result<f64, Stop> {
    let mut backend = context.backend(case)?;
    if !backend.capabilities().features.contains(Feature::Lse) {
        return Err(Stop::Refused("no LSE".to_owned()));
    }
    let whole = Problem::new(case);
    let cut = |request: &RequestShape| request.kv_len / 2;
    let part = |lengths: Vec<RequestShape>, first: Vec<u32>| parts(case, &whole, lengths, &first);
    let shapes = |len: &dyn Fn(&RequestShape) -> u32| {
        case.requests.iter().map(|r| RequestShape { q_len: r.q_len, kv_len: len(r) }).collect::<Vec<_>>()
    };
    let zeros = vec![0; case.requests.len()];
    let first = run(&part(shapes(&cut), zeros.clone()), &mut *backend)?;
    let second = part(shapes(&|r| r.kv_len - cut(r)), case.requests.iter().map(cut).collect());
    let second = run(&second, &mut *backend)?;
    let empty = run(&part(shapes(&|_| 0), zeros), &mut *backend)?;
    let merged = merged(&first, &second)?;
    for (what, a, b) in [("with an empty state", &first, &empty), ("into an empty state", &empty, &first)] {
        first.same(what, &self::merged(a, b)?)?;
    }
    context.compare(&whole, &merged)
}

/// The problem over a part of each request's KV, with the queries of the whole.
fn parts(case: &Case, whole: &Problem, requests: Vec<RequestShape>, first: &[u32]) -> Problem {
    let case = Case { requests, ..case.clone() };
    let mut problem = Problem::build(&case, Build { first_positions: first.to_vec(), ..Build::of(&case) });
    problem.q = whole.q.clone();
    problem
}

fn merged(a: &Run, b: &Run) -> Result<Run, Stop> {
    let dim = a.shape[2];
    let lse = |run: &Run| -> Vec<Lse> {
        run.lse.iter().flatten().map(|&bits| Lse::from_ln(value(Dtype::F32, bits))).collect()
    };
    let (mut out, mut out_lse) = (a.out_values(), lse(a));
    let merged = merge_state(&mut out, &mut out_lse, &b.out_values(), &lse(b), dim);
    merged.map_err(|error| Stop::failed(error.to_string()))?;
    let bits = |x: f32| match a.dtype {
        Dtype::F32 => x.to_bits(),
        Dtype::F16 => half::f16::from_f32(x).to_bits().into(),
        Dtype::Bf16 => half::bf16::from_f32(x).to_bits().into(),
    };
    let out = out.into_iter().map(bits).collect();
    let lse = Some(out_lse.iter().map(|lse| lse.ln().to_bits()).collect());
    Ok(Run { dtype: a.dtype, shape: a.shape, out, lse, cache: None, side_out: None, side_cache: None })
}

//! The capture and replay hooks. On the host there is nothing to record: calling `forward` again with the captured
//! step is the replay.

use attn_metadata::{AttentionBackend, Batch, Bucket, CaptureError, CaptureLimits, Feature, Host, Prepared};

use super::context::{Context, with_queries};
use super::determinism::same_cache;
use super::{Check, check};
use crate::case::Case;
use crate::harness::{Build, Problem, Run, Stop, forward, prepare, same_rows};
use crate::rng::Rng;

pub(super) const REPLAY: Check = check(
    "replay",
    "a captured step is padding until its first replay; then, with fewer requests than the bucket, the eager bits",
    with_bucket,
    replay,
);

pub(super) const LIMITS: Check = check(
    "capture limits",
    "what does not fit the bucket is refused and the step keeps its batch; new limits make it stale",
    with_bucket,
    limits,
);

/// Rows added to make the bucket.
const EXTRA_ROWS: u32 = 5;

fn with_bucket(case: &mut Case, rng: &mut Rng) {
    with_queries(case, rng);
    (case.custom, case.padding_rows) = (false, 0);
    case.requests.truncate(8);
    with_queries(case, rng);
}

/// The same step three times: as it is, padded to a bucket, and the first half of its requests, all over one pool.
struct Captured {
    eager: Problem,
    padded: Problem,
    half: Problem,
    limits: CaptureLimits,
    bucket: Bucket,
}

fn captured(case: &Case) -> Captured {
    let padded = Case { padding_rows: EXTRA_ROWS, ..case.clone() };
    let pages = Problem::new(case).pool.num_pages + 3;
    let build = |case: &Case, count: usize| {
        Problem::build(case, Build { min_pages: pages, members: (0..count).collect(), ..Build::of(case) })
    };
    let count = case.requests.len();
    let bucket =
        Bucket { num_requests: u32::try_from(count).expect("small") + 2, num_rows: case.num_used_rows() + EXTRA_ROWS };
    let small = Bucket { num_requests: 1, num_rows: 1 };
    let limits = CaptureLimits {
        buckets: vec![bucket, small],
        max_kv_len: case.max_kv_len().max(1),
        num_pool_pages: pages,
        appends: case.append,
    };
    Captured {
        eager: build(case, count),
        padded: build(&padded, count),
        half: build(case, count.div_ceil(2)),
        limits,
        bucket,
    }
}

fn start(backend: &mut dyn AttentionBackend<Host>, captured: &Captured) -> Result<Prepared, Stop> {
    if !backend.capabilities().features.contains(Feature::Graphs) {
        return Err(Stop::Refused("no graphs".to_owned()));
    }
    backend.init_capture_graph(&captured.limits).map_err(|error| Stop::error("init_capture_graph", &error))?;
    let step = backend.prepare_for_capture(captured.bucket);
    step.map_err(|error| Stop::error("prepare_for_capture", &error))
}

fn replay_with(backend: &mut dyn AttentionBackend<Host>, step: &mut Prepared, batch: &Batch) -> Result<(), Stop> {
    backend.prepare_for_replay(step, batch).map_err(|error| Stop::error("prepare_for_replay", &error))
}

fn replay(context: &Context<'_>, case: &Case) -> Result<f64, Stop> {
    let captured = captured(case);
    let Captured { eager, padded, half, .. } = &captured;
    let mut backend = context.backend(case)?;
    let eager_run = crate::harness::run(eager, &mut *backend)?;
    let half_run = crate::harness::run(half, &mut *backend)?;
    let eager_step = prepare(&mut *backend, &eager.batch())?;
    let mut step = start(&mut *backend, &captured)?;
    // The tensors of the padded problem under a step that stands for padding alone.
    check_all_padding(&forward(padded, &mut *backend, &step, 0)?, padded)?;
    for round in 0..2 {
        replay_with(&mut *backend, &mut step, &eager.batch())?;
        let run = forward(padded, &mut *backend, &step, 0)?;
        let what = format!("replay of {} requests, round {round}", eager.build.members.len());
        same_rows(&what, (&eager_run, 0), (&run, 0), eager.num_used_rows())?;
        same_cache(&eager_run, &run)?;
        // Fewer requests: their rows are the same, the rest is padding.
        replay_with(&mut *backend, &mut step, &half.batch())?;
        let run = forward(&with_rows_of(half, padded), &mut *backend, &step, 0)?;
        same_rows("replay of half of the requests", (&half_run, 0), (&run, 0), half.num_used_rows())?;
    }
    // The eager step is still the backend's current one.
    eager_run.same("eager step after replays", &forward(eager, &mut *backend, &eager_step, 0)?)?;
    Ok(0.0)
}

/// A problem of fewer requests whose tensors have as many rows as a larger one's.
fn with_rows_of(half: &Problem, padded: &Problem) -> Problem {
    let rows = padded.tables.num_rows - half.num_used_rows();
    let case = Case { padding_rows: u32::try_from(rows).expect("small"), ..half.case.clone() };
    Problem::build(&case, half.build.clone())
}

fn check_all_padding(run: &Run, problem: &Problem) -> Result<(), Stop> {
    let empty = f32::NEG_INFINITY.to_bits();
    let written = run.out.iter().any(|&bits| bits != 0) || run.lse.iter().flatten().any(|&bits| bits != empty);
    let before = problem.cache.buffer().as_slice().as_bytes();
    let appended = run.cache.as_ref().is_some_and(|cache| cache.buffer().as_slice().as_bytes() != before);
    if written || appended {
        return Err(Stop::failed("a captured step that was not replayed yet does more than to write padding"));
    }
    Ok(())
}

fn limits(context: &Context<'_>, case: &Case) -> Result<f64, Stop> {
    let captured = captured(case);
    let Captured { eager, padded, .. } = &captured;
    let mut backend = context.backend(case)?;
    let eager_run = crate::harness::run(eager, &mut *backend)?;
    let eager_step = prepare(&mut *backend, &eager.batch())?;
    let mut step = start(&mut *backend, &captured)?;
    replay_with(&mut *backend, &mut step, &eager.batch())?;
    refuse_batches(&mut *backend, &mut step, &captured)?;
    let run = forward(padded, &mut *backend, &step, 0)?;
    same_rows("after refused replays", (&eager_run, 0), (&run, 0), eager.num_used_rows())?;
    let mut eager_step = eager_step;
    match backend.prepare_for_replay(&mut eager_step, &eager.batch()) {
        Err(CaptureError::NotCaptured) => {}
        other => return Err(Stop::failed(format!("an eager step was replayed: {other:?}"))),
    }
    match backend.prepare_for_capture(Bucket { num_requests: 1, num_rows: 9999 }) {
        Err(CaptureError::UnknownBucket { .. }) => {}
        other => return Err(Stop::failed(format!("a bucket that was not declared was captured: {other:?}"))),
    }
    backend.init_capture_graph(&captured.limits).map_err(|error| Stop::error("second init", &error))?;
    if forward(padded, &mut *backend, &step, 0).is_ok() || backend.prepare_for_replay(&mut step, &eager.batch()).is_ok()
    {
        return Err(Stop::failed("a captured step survived new capture limits"));
    }
    Ok(0.0)
}

/// Batches that do not fit: too many rows, too many requests, a longer KV, a larger pool, other pages, the other kind of append.
fn refuse_batches(
    backend: &mut dyn AttentionBackend<Host>,
    step: &mut Prepared,
    captured: &Captured,
) -> Result<(), Stop> {
    let case = &captured.eager.case;
    let mut longer = case.clone();
    longer.requests[0].kv_len += case.max_kv_len() + 1;
    let mut more = case.clone();
    more.requests.extend(vec![crate::case::RequestShape { q_len: 0, kv_len: 1 }; 3]);
    let other = Case { append: !case.append, shared: false, ..case.clone() };
    let appends_too_much = other.validate().is_err();
    let pages = captured.limits.num_pool_pages;
    let batches = [
        ("rows", Some(Case { padding_rows: EXTRA_ROWS + 1, ..case.clone() }), 0),
        ("requests", Some(more), 0),
        ("KV tokens", Some(longer), 0),
        ("pages", Some(case.clone()), pages + 1),
        (
            "tokens in a page",
            Some(Case { page_size: case.page_size + 1, shared: false, family: None, ..case.clone() }),
            0,
        ),
        ("append", (!appends_too_much).then_some(other), 0),
    ];
    for (what, case, min_pages) in batches.into_iter().filter_map(|(what, case, pages)| Some((what, case?, pages))) {
        let batch = Problem::build(&case, Build { min_pages, ..Build::of(&case) }).batch();
        match backend.prepare_for_replay(step, &batch) {
            Err(CaptureError::OverBucket { .. } | CaptureError::AppendMismatch { .. } | CaptureError::Prepare(_)) => {}
            other => return Err(Stop::failed(format!("a replay that does not fit in {what}: {other:?}"))),
        }
    }
    Ok(())
}

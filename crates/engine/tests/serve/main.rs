//! The step loop: what comes out of a request does not depend on pages, chunks, neighbours, preemption or failures.

#![allow(clippy::unwrap_used, clippy::cast_precision_loss)]

mod stream;
mod toy;

use attn_metadata::HostDevice;
use engine::sample::SamplingParams;
use engine::serve::{
    Completion, Event, FinishReason, RequestId, RequestSpec, SchedulerConfig, Session, SessionConfig, SubmitError,
};
use kvpool::{ExtraKey, FailurePlan, KvFormat, PageSize, PrefixConfig};
use toy::Toy;

fn config(page_size: u32, num_pages: u32) -> SessionConfig {
    SessionConfig {
        page_size: PageSize::new(page_size).unwrap(),
        num_pages,
        kv_format: KvFormat::F32,
        scheduler: SchedulerConfig::default(),
        backend: "auto".to_owned(),
        device: HostDevice::with_threads(2),
        prefix_cache: None,
        verify_every: 0,
    }
}

fn specs(n: u32) -> Vec<RequestSpec> {
    let spec = |i: u32| RequestSpec {
        prompt: (0..3 + i * 7).map(|t| (t * 13 + i * 5) % 61).collect(),
        max_new_tokens: 10 + i as usize,
        stop_tokens: vec![],
        sampling: SamplingParams::GREEDY,
        extra: ExtraKey::default(),
    };
    (0..n).map(spec).collect()
}

fn drain(session: &mut Session) -> Vec<Completion> {
    let mut completions: Vec<_> = std::iter::from_fn(|| session.take_completion()).collect();
    completions.sort_by_key(|c| c.id);
    completions
}

fn audit(session: &mut Session) {
    session.table().audit().unwrap();
    if let Some(prefix) = session.prefix_cache() {
        prefix.audit().unwrap();
    }
}

/// Runs requests to their end, auditing after every step; returns what came out in the order of submission.
fn run(config: &SessionConfig, specs: &[RequestSpec]) -> (Vec<Completion>, Session) {
    let mut model = Toy::new(Some(20));
    let mut session = Session::new(&model, config).unwrap();
    for spec in specs {
        session.submit(spec.clone()).unwrap();
    }
    while session.step(&mut model, &mut |_| {}).unwrap() {
        audit(&mut session);
    }
    assert!(session.is_idle());
    let counts = session.table().pool().counts();
    assert_eq!(counts.free + counts.evictable, counts.total, "an idle session holds no page");
    (drain(&mut session), session)
}

fn tokens(completions: &[Completion]) -> Vec<Vec<u32>> {
    completions.iter().map(|c| c.tokens.clone()).collect()
}

#[test]
fn tokens_do_not_depend_on_pages_chunks_budgets_or_the_pair_of_backends() {
    let specs = specs(6);
    let (expected, _) = run(&config(16, 100), &specs);
    assert!(expected.iter().zip(&specs).all(|(c, s)| c.tokens.len() == s.max_new_tokens));
    assert!(expected.iter().all(|c| c.reason == FinishReason::Length));
    let distinct: std::collections::HashSet<_> = expected.iter().flat_map(|c| &c.tokens).collect();
    assert!(distinct.len() > 6, "the model says something: {distinct:?}");
    for (page_size, num_pages) in [(1, 600), (3, 300), (64, 20)] {
        for (extend_chunk, max_step_tokens, max_running) in [(usize::MAX, 2048, 256), (5, 2048, 256), (7, 9, 2)] {
            let scheduler = SchedulerConfig { max_running, max_step_tokens, extend_chunk };
            let config = SessionConfig { scheduler, ..config(page_size, num_pages) };
            assert_eq!(tokens(&run(&config, &specs).0), tokens(&expected), "{config:?}");
        }
    }
    for backend in ["cpu", "cpu,cpu", "oracle", "cpu,oracle", "oracle,cpu"] {
        let config = SessionConfig { backend: backend.to_owned(), ..config(16, 100) };
        assert_eq!(tokens(&run(&config, &specs).0), tokens(&expected), "{backend}");
    }
}

#[test]
fn a_small_pool_preempts_and_everybody_still_gets_the_same_tokens() {
    let specs = specs(6);
    let (expected, _) = run(&config(4, 200), &specs);
    // The longest request alone needs 13 pages.
    for num_pages in [13, 14, 17, 25] {
        let (got, session) = run(&config(4, num_pages), &specs);
        assert_eq!(tokens(&got), tokens(&expected), "{num_pages} pages");
        assert!(session.stats().max_pages <= num_pages as usize);
    }
    let (got, session) = run(&config(4, 17), &specs);
    assert!(session.stats().num_preemptions > 0);
    let reported: u32 = got.iter().map(|c| c.num_preemptions).sum();
    assert_eq!(u64::from(reported), session.stats().num_preemptions);
    assert_eq!(got[0].num_preemptions, 0, "the oldest request never gives its pages back");
}

#[test]
fn cancelling_frees_pages_and_leaves_the_others_alone() {
    let specs = specs(6);
    let (expected, _) = run(&config(4, 200), &specs);
    let mut model = Toy::new(Some(20));
    let mut session = Session::new(&model, &config(4, 200)).unwrap();
    let ids: Vec<RequestId> = specs.iter().map(|s| session.submit(s.clone()).unwrap()).collect();
    for _ in 0..4 {
        assert!(session.step(&mut model, &mut |_| {}).unwrap());
    }
    for id in ids.iter().skip(1).step_by(2) {
        assert!(session.cancel(*id));
        assert!(!session.cancel(*id), "it has ended");
        session.table().audit().unwrap();
    }
    session.run_to_end(&mut model, &mut |_| {}).unwrap();
    let got = drain(&mut session);
    for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
        if i % 2 == 0 {
            assert_eq!(got.tokens, expected.tokens);
        } else {
            assert_eq!(got.reason, FinishReason::Cancelled);
            assert_eq!(got.tokens[..], expected.tokens[..4]);
        }
    }
    assert_eq!(session.table().pool().counts().free, 200);
    assert_eq!(session.stats().num_cancelled, 3);
}

#[test]
fn the_callback_hears_once_how_each_request_ended_however_it_did() {
    let mut model = Toy::new(Some(20));
    let mut session = Session::new(&model, &config(4, 200)).unwrap();
    let ids: Vec<RequestId> = specs(4).into_iter().map(|spec| session.submit(spec).unwrap()).collect();
    let mut heard = Vec::new();
    let mut hear = |event| {
        if let Event::Finished { id, reason } = event {
            heard.push((id, reason));
        }
    };
    // One that never ran, one that runs, and, once nothing else is left, one that no work follows.
    assert!(session.cancel(ids[1]));
    assert!(session.step(&mut model, &mut hear).unwrap());
    assert!(session.cancel(ids[2]));
    session.run_to_end(&mut model, &mut hear).unwrap();
    let last = session.submit(specs(1).remove(0)).unwrap();
    assert!(session.cancel(last));
    assert!(!session.step(&mut model, &mut hear).unwrap());
    let told: Vec<_> = drain(&mut session).iter().map(|c| (c.id, c.reason)).collect();
    heard.sort_by_key(|(id, _)| *id);
    assert_eq!(heard, told);
    let cancelled: Vec<_> = told.iter().filter(|(_, reason)| *reason == FinishReason::Cancelled).map(|c| c.0).collect();
    assert_eq!(cancelled, [ids[1], ids[2], last]);
}

#[test]
fn every_single_failure_of_the_pool_leaves_a_step_that_can_be_tried_again() {
    let specs = specs(4);
    let (expected, _) = run(&config(1, 240), &specs);
    for nth in 0.. {
        let mut model = Toy::new(Some(20));
        let mut session = Session::new(&model, &config(1, 240)).unwrap();
        for spec in &specs {
            session.submit(spec.clone()).unwrap();
        }
        session.table().pool().set_failure_plan(Some(FailurePlan::nth(nth)));
        let mut num_failures = 0;
        loop {
            match session.step(&mut model, &mut |_| {}) {
                Ok(true) => {}
                Ok(false) => break,
                Err(_) => num_failures += 1,
            }
            session.table().audit().unwrap();
        }
        assert_eq!(tokens(&drain(&mut session)), tokens(&expected), "failure {nth}");
        if num_failures == 0 {
            assert!(nth > 10, "only {nth} places take pages");
            return;
        }
        assert_eq!(num_failures, 1);
    }
}

#[test]
fn a_failing_model_leaves_a_step_that_can_be_tried_again() {
    let specs = specs(4);
    let (expected, _) = run(&config(4, 60), &specs);
    for nth in 0..12 {
        let mut model = Toy::new(Some(20));
        let mut session = Session::new(&model, &config(4, 60)).unwrap();
        for spec in &specs {
            session.submit(spec.clone()).unwrap();
        }
        model.fail_in = Some(nth);
        let error = session.run_to_end(&mut model, &mut |_| {}).unwrap_err();
        assert_eq!(error.to_string(), "a matrix product failed");
        session.table().audit().unwrap();
        model.fail_in = None;
        session.run_to_end(&mut model, &mut |_| {}).unwrap();
        assert_eq!(tokens(&drain(&mut session)), tokens(&expected), "failure {nth}");
    }
}

#[test]
fn events_tell_the_same_story_as_completions() {
    let mut model = Toy::new(None);
    let mut session = Session::new(&model, &config(4, 60)).unwrap();
    let mut spec = specs(1).remove(0);
    session.submit(spec.clone()).unwrap();
    let mut events = Vec::new();
    session.run_to_end(&mut model, &mut |e| events.push(e)).unwrap();
    let whole = session.take_completion().unwrap();
    let told: Vec<u32> =
        events.iter().filter_map(|e| if let Event::Token { token, .. } = e { Some(*token) } else { None }).collect();
    assert_eq!(told, whole.tokens);
    assert!(matches!(events.last(), Some(Event::Finished { reason: FinishReason::Length, .. })));
    // A stop token ends the next one early; it is part of the result.
    spec.stop_tokens = vec![whole.tokens[3]];
    let first = whole.tokens.iter().position(|t| *t == whole.tokens[3]).unwrap();
    session.submit(spec).unwrap();
    session.run_to_end(&mut model, &mut |_| {}).unwrap();
    let stopped = session.take_completion().unwrap();
    assert_eq!((stopped.reason, stopped.tokens.len()), (FinishReason::Stop, first + 1));
}

#[test]
fn a_seed_decides_a_sampled_request_whatever_its_neighbours() {
    let sampling = SamplingParams { temperature: 1.5, top_k: Some(20), top_p: 0.95, seed: 11 };
    let spec = RequestSpec { sampling, ..specs(2).remove(1) };
    let (alone, _) = run(&config(4, 100), std::slice::from_ref(&spec));
    let mut batch = specs(4);
    batch.insert(2, spec);
    let (together, _) = run(&config(4, 300), &batch);
    assert_eq!(together[2].tokens, alone[0].tokens);
    assert!(together[2].margins.iter().any(|m| *m < 0.0), "at this temperature some draws are not the largest logit");
}

#[test]
fn bad_requests_are_refused_with_the_values() {
    let model = Toy::new(None);
    let mut session = Session::new(&model, &config(4, 10)).unwrap();
    let good = specs(1).remove(0);
    let mut check = |edit: &dyn Fn(&mut RequestSpec), expected: &str| {
        let mut spec = good.clone();
        edit(&mut spec);
        let error: SubmitError = session.submit(spec).unwrap_err();
        assert_eq!(error.to_string(), expected);
    };
    check(&|s| s.prompt.clear(), "the prompt is empty, at least one token is needed");
    check(&|s| s.max_new_tokens = 0, "max_new_tokens is 0, at least 1 is needed");
    check(&|s| s.prompt[1] = 61, "token 61 at position 1 of the prompt is not in 0..61");
    check(&|s| s.max_new_tokens = 2046, "3 prompt tokens and 2046 new ones exceed the model's 2048 positions");
    check(
        &|s| s.max_new_tokens = 39,
        "the request needs 11 pages, the pool has 10; ask for fewer tokens or make a larger pool",
    );
    check(&|s| s.sampling.temperature = f32::NAN, "temperature is NaN, expected a finite number that is 0 or more");
    assert!(session.is_idle());
}

#[test]
fn verify_mode_changes_nothing_and_finds_small_errors() {
    let specs = specs(4);
    let (expected, plain) = run(&config(4, 100), &specs);
    let (got, session) = run(&SessionConfig { verify_every: 3, ..config(4, 100) }, &specs);
    assert_eq!(got, expected);
    assert!(plain.verify_report().is_none());
    let report = session.verify_report().unwrap();
    assert_eq!(
        (report.num_steps, report.num_sampled),
        (session.stats().num_steps, session.stats().num_steps.div_ceil(3))
    );
    assert_eq!((report.layers.len(), report.num_anomalies()), (2, 0));
    let (_, worst) = report.worst().unwrap();
    assert!(worst.num_vectors > 100 && worst.max_rel > 0.0 && worst.max_rel < 1e-5, "{worst:?}");
}

fn cached(page_size: u32, num_pages: u32) -> SessionConfig {
    SessionConfig { prefix_cache: Some(PrefixConfig::default()), ..config(page_size, num_pages) }
}

#[test]
fn the_prefix_cache_changes_no_token() {
    // Each request three times: the second and third find what the first left.
    let specs: Vec<_> = specs(6).into_iter().flat_map(|spec| [spec.clone(), spec.clone(), spec]).collect();
    let (expected, plain) = run(&config(4, 600), &specs);
    for num_pages in [600, 40, 20, 14] {
        for extend_chunk in [usize::MAX, 5] {
            let scheduler = SchedulerConfig { extend_chunk, ..SchedulerConfig::default() };
            let (got, session) = run(&SessionConfig { scheduler, ..cached(4, num_pages) }, &specs);
            assert_eq!(tokens(&got), tokens(&expected), "{num_pages} pages, chunks of {extend_chunk}");
            let prefix = session.metrics().prefix.unwrap();
            // The first prompt has no whole page; of the others the second and third find one.
            assert!(prefix.hits >= 10, "{prefix:?}");
            let num_starts = specs.len() as u64 + session.stats().num_preemptions;
            assert_eq!(prefix.lookups, num_starts, "waiting is not counted as a lookup");
            assert!(session.stats().prefill_tokens < plain.stats().prefill_tokens);
            assert!(num_pages >= 600 || prefix.evicted_pages > 0, "{prefix:?}");
        }
    }
}

#[test]
fn a_shared_system_prompt_is_computed_once() {
    let system: Vec<u32> = (0..1000).map(|i| (i * 7 + i / 9) % 61).collect();
    let specs: Vec<_> = (0..64u32)
        .map(|i| {
            let prompt = system.iter().copied().chain([i % 61, (i + 1) % 61, (i * 3) % 61]).collect();
            RequestSpec { prompt, max_new_tokens: 3, ..specs(1).remove(0) }
        })
        .collect();
    let (expected, plain) = run(&config(8, 9000), &specs);
    let (got, session) = run(&cached(8, 9000), &specs);
    assert_eq!(tokens(&got), tokens(&expected));
    // 1,000 tokens are 125 whole pages; everybody computes the three tokens of their own.
    assert_eq!(session.stats().prefill_tokens, 1000 + 64 * 3);
    assert_eq!(plain.stats().prefill_tokens, 64 * 1003);
}

#[test]
fn requests_of_different_salts_share_nothing() {
    let spec = specs(4).remove(3);
    let salted = RequestSpec { extra: ExtraKey { salt: Some([1; 32]), ..ExtraKey::default() }, ..spec.clone() };
    let (got, session) = run(&cached(4, 200), &[spec.clone(), salted.clone(), spec, salted]);
    assert_eq!(session.metrics().prefix.unwrap().hits, 2);
    assert!(got.iter().all(|c| c.tokens == got[0].tokens));
}

#[test]
fn failures_and_cancellations_leave_the_cache_sound() {
    let specs = specs(5);
    let (expected, _) = run(&config(4, 200), &specs);
    for nth in 0..60 {
        let mut model = Toy::new(Some(20));
        let mut session = Session::new(&model, &cached(4, 16)).unwrap();
        let ids: Vec<_> = specs.iter().map(|s| session.submit(s.clone()).unwrap()).collect();
        session.table().pool().set_failure_plan(Some(FailurePlan::nth(nth)));
        model.fail_in = Some(usize::try_from(nth).unwrap() / 2 + 3);
        let mut steps = 0;
        loop {
            match session.step(&mut model, &mut |_| {}) {
                Ok(true) => {}
                Ok(false) => break,
                Err(_) => model.fail_in = None,
            }
            audit(&mut session);
            steps += 1;
            if steps == 7 {
                session.cancel(ids[2]);
                audit(&mut session);
            }
        }
        for (i, (got, expected)) in drain(&mut session).iter().zip(&expected).enumerate() {
            let whole = if i == 2 { got.tokens.len() } else { expected.tokens.len() };
            assert_eq!(got.tokens, expected.tokens[..whole], "failure {nth}, request {i}");
        }
    }
}

#[test]
fn requests_are_never_lost_when_somebody_else_holds_the_pages() {
    for config in [config(4, 20), cached(4, 20)] {
        let mut model = Toy::new(None);
        let mut session = Session::new(&model, &config).unwrap();
        session.submit(specs(1).remove(0)).unwrap();
        let outside = session.table().pool().lease(20).unwrap();
        let error = session.run_to_end(&mut model, &mut |_| {}).unwrap_err();
        let expected = "1 requests wait, and 0 of 20 pages can be had; leases outside the session hold the rest";
        assert_eq!(error.to_string(), expected);
        drop(outside);
        session.run_to_end(&mut model, &mut |_| {}).unwrap();
        assert_eq!(session.take_completion().unwrap().reason, FinishReason::Length);
    }
}

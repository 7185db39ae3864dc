//! Logits of models of random weights: the same whole, in chunks, after prefix hits, token by token, preempted.
#![cfg(feature = "model")]
#![allow(clippy::unwrap_used, reason = "a test may")]

use std::collections::BTreeMap;

use attn_metadata::HostDevice;
use engine::model::random::RandomModel;
use engine::sample::SamplingParams;
use engine::serve::{Event, RequestId, RequestSpec, SchedulerConfig, Session, SessionConfig};
use kvpool::{ExtraKey, KvFormat, PageSize, PrefixConfig};

const NUM_NEW: usize = 12;

/// Tokens and logits of each request.
type Said = BTreeMap<RequestId, Vec<(u32, f32)>>;

fn config(page_size: u32, num_pages: u32) -> SessionConfig {
    SessionConfig {
        page_size: PageSize::new(page_size).unwrap(),
        num_pages,
        kv_format: KvFormat::F32,
        scheduler: SchedulerConfig { max_running: 8, max_step_tokens: 4096, extend_chunk: usize::MAX },
        backend: "auto".to_owned(),
        device: HostDevice::with_threads(2),
        prefix_cache: None,
        verify_every: 0,
    }
}

/// Requests beyond the three blocks of 64 tokens that a row may take; two begin alike.
fn specs() -> Vec<RequestSpec> {
    let spec = |(len, salt): (u32, u32)| RequestSpec {
        prompt: (0..len).map(|t| (t * 37 + t / 7 + if t > 300 { salt } else { 0 }) % 256).collect(),
        max_new_tokens: NUM_NEW,
        stop_tokens: vec![],
        sampling: SamplingParams::GREEDY,
        extra: ExtraKey::default(),
    };
    [(450, 0), (380, 3), (70, 0), (520, 5)].map(spec).to_vec()
}

fn run(kind: RandomModel, config: &SessionConfig, rounds: usize) -> (Said, Session) {
    let mut model = kind.make(3).unwrap();
    let mut session = Session::new(&*model, config).unwrap();
    let mut said = Said::new();
    for _ in 0..rounds {
        said.clear();
        specs().into_iter().for_each(|spec| {
            session.submit(spec).unwrap();
        });
        let mut heard = |event: Event| {
            if let Event::Token { id, token, logit, .. } = event {
                said.entry(id).or_default().push((token, logit));
            }
        };
        while session.step(&mut *model, &mut heard).unwrap() {}
        session.table().audit().unwrap();
    }
    (said, session)
}

fn assert_same(expected: &Said, got: &Said, what: &str) {
    let pairs = expected.values().zip(got.values()).enumerate();
    assert_eq!(expected.len(), got.len(), "{what}");
    for (request, (expected, got)) in pairs {
        assert_eq!(got.len(), NUM_NEW, "{what}: request {request}");
        for (place, ((token, logit), (got_token, got_logit))) in expected.iter().zip(got).enumerate() {
            let is_same = token == got_token && (logit - got_logit).abs() <= 1e-5;
            assert!(is_same, "{what}: request {request}, token {place}: {got_token} {got_logit}, was {token} {logit}");
        }
    }
}

fn check(kind: RandomModel) {
    let (expected, _) = run(kind, &config(16, 200), 1);
    let distinct: std::collections::BTreeSet<u32> = expected.values().flatten().map(|(token, _)| *token).collect();
    assert!(distinct.len() > 4, "the model says something: {distinct:?}");
    for (page_size, num_pages) in [(1, 1600), (16, 200), (64, 60)] {
        for chunk in [usize::MAX, 100, 1] {
            let scheduler = SchedulerConfig { max_running: 8, max_step_tokens: 4096, extend_chunk: chunk };
            let config = SessionConfig { scheduler, ..config(page_size, num_pages) };
            assert_same(&expected, &run(kind, &config, 1).0, &format!("pages of {page_size}, chunks of {chunk}"));
        }
        let cached = SessionConfig { prefix_cache: Some(PrefixConfig::default()), ..config(page_size, num_pages) };
        let (again, session) = run(kind, &cached, 2);
        assert_same(&expected, &again, &format!("pages of {page_size}, after prefix hits"));
        // The second round finds its prompts, all but a page's rest and a token of each.
        let computed = usize::try_from(session.stats().prefill_tokens).unwrap();
        assert!(computed < 1420 + 4 * 64, "{computed} tokens computed in two rounds of 1,420");
    }
    // The first two prompts fit, what they grow to does not.
    for (page_size, num_pages) in [(1, 835), (16, 53)] {
        let (got, session) = run(kind, &config(page_size, num_pages), 1);
        assert_same(&expected, &got, &format!("{num_pages} pages of {page_size}"));
        assert!(session.stats().num_preemptions > 0, "{num_pages} pages of {page_size} are enough for all");
    }
    let verified = SessionConfig { verify_every: 4, ..config(16, 200) };
    let (got, session) = run(kind, &verified, 1);
    assert_same(&expected, &got, "verified");
    let report = session.verify_report().unwrap();
    assert!(report.num_sampled > 0 && report.num_anomalies() == 0);
    assert!(report.layers.iter().all(|layer| layer.num_vectors > 0), "each layer has an oracle: {report:?}");
    assert!(report.worst().unwrap().1.max_rel < 1e-4, "{:?}", report.worst());
}

#[test]
fn a_hybrid_of_dense_and_block_sparse_layers() {
    check(RandomModel::Minimax);
}

#[test]
fn latent_layers_behind_a_dense_one() {
    check(RandomModel::Mla);
}

//! A request has the same bits alone, in fifty random batches, at every bucket, eager and replayed.

use attn_conformance::case::{RequestShape, Sinks};
use attn_conformance::harness::{Build, Problem, Run, forward, run, same_rows};
use attn_conformance::{Case, Rng};
use attn_metadata::{
    AttentionBackend, BackendConfig, Batch, BatchLimits, Bucket, CaptureLimits, HeadShape, Host, HostDevice, RawBatch,
};
use kvpool::{Dtype, KvDtype};

use crate::support;

const NUM_BATCHES: usize = 50;
/// Requests that batches are drawn from.
const NUM_REQUESTS: usize = 24;

/// A case and the buckets that its steps are captured for.
struct Family {
    case: Case,
    buckets: Vec<Bucket>,
}

/// Decoding alone, with buckets of one row a request; and requests of every kind together.
fn families() -> Vec<Family> {
    let mut rng = Rng::new(&[41]);
    let mut lengths = |q_lens: &[u32]| -> Vec<RequestShape> {
        let request = |_| {
            let q_len = rng.pick(q_lens);
            let cached = [rng.below(40), rng.below(600), 1100 + rng.below(600)][rng.below(3)];
            RequestShape { q_len, kv_len: q_len + u32::try_from(cached).unwrap() }
        };
        (0..NUM_REQUESTS).map(request).collect()
    };
    let (decoding, mixed) = (lengths(&[1]), lengths(&[1, 1, 2, 5, 17, 64, 130]));
    let long = lengths(&[1, 17, 300, 500]);
    let base = Case { heads: HeadShape::new(4, 2, 64), append: false, ..Case::default() };
    let bucket = |num_requests, num_rows| Bucket { num_requests, num_rows };
    let decode_buckets: Vec<Bucket> = [1, 2, 4, 8, 16, 24, 32].map(|n| bucket(n, n)).to_vec();
    let mixed_buckets = vec![bucket(1, 160), bucket(4, 320), bucket(12, 800), bucket(24, 3200)];
    let of = |requests: &[RequestShape], q_dtype, kv_dtype| Case {
        requests: requests.to_vec(),
        q_dtype,
        kv_dtype,
        ..base.clone()
    };
    let decode = of(&decoding, Dtype::Bf16, KvDtype::Bf16);
    let general = Case { softcap: Some(20.0), sinks: Sinks::Mixed, window: Some(600), ..decode.clone() };
    vec![
        Family { case: decode, buckets: decode_buckets.clone() },
        Family { case: general, buckets: decode_buckets },
        Family { case: of(&mixed, Dtype::Bf16, KvDtype::Bf16), buckets: mixed_buckets.clone() },
        Family { case: of(&mixed, Dtype::F16, KvDtype::Fp8E4m3), buckets: mixed_buckets },
        // Long requests in small pages.
        Family {
            case: Case { page_size: 3, ..of(&long, Dtype::Bf16, KvDtype::Bf16) },
            buckets: vec![bucket(1, 520), bucket(4, 1300), bucket(24, 6000)],
        },
    ]
}

/// What each request gives alone, and how to compare.
struct Alone {
    case: Case,
    num_pages: u32,
    runs: Vec<Run>,
}

impl Alone {
    fn new(case: &Case, backend: &mut dyn AttentionBackend<Host>) -> Self {
        let mut alone = Self { case: case.clone(), num_pages: Problem::new(case).pool.num_pages, runs: Vec::new() };
        let one = |member| run(&alone.problem(vec![member], 0), backend).unwrap();
        alone.runs = (0..case.requests.len()).map(one).collect();
        alone
    }

    /// Some of the requests, with padding rows, in a pool of one size.
    fn problem(&self, members: Vec<usize>, padding_rows: u32) -> Problem {
        let case = Case { padding_rows, ..self.case.clone() };
        Problem::build(&case, Build { members, min_pages: self.num_pages, ..Build::of(&case) })
    }

    fn demand(&self, what: &str, problem: &Problem, got: &Run) {
        for (place, &member) in problem.build.members.iter().enumerate() {
            let rows = problem.rows_of(place);
            let what = format!("request {member} of {}, {what}", self.case);
            same_rows(&what, (&self.runs[member], 0), (got, rows.start), rows.len()).unwrap();
        }
    }

    fn num_rows(&self, members: &[usize]) -> u32 {
        members.iter().map(|&member| self.case.requests[member].q_len).sum()
    }
}

fn config(case: &Case) -> BackendConfig<Host> {
    let limits = BatchLimits { max_rows: 1 << 14, max_requests: 64, max_kv_len: 1 << 14 };
    BackendConfig { model: case.model(vec![case.layer()]), limits, device: HostDevice::default() }
}

/// Requests that fit a bucket, at least one, in random order.
fn draw(alone: &Alone, bucket: Bucket, rng: &mut Rng) -> Vec<usize> {
    let mut order: Vec<usize> = (0..alone.case.requests.len()).collect();
    rng.shuffle(&mut order);
    let wanted = 1 + rng.below(bucket.num_requests as usize);
    let mut members = Vec::new();
    for member in order {
        members.push(member);
        if members.len() > wanted || alone.num_rows(&members) > bucket.num_rows {
            members.pop();
        }
    }
    members
}

/// Runs a family's batches on a backend; how many were replayed.
fn check(family: &Family, backend: &mut dyn AttentionBackend<Host>, num_batches: usize, rng: &mut Rng) -> usize {
    let alone = Alone::new(&family.case, backend);
    let num_all = u32::try_from(family.case.requests.len()).unwrap();
    let any = Bucket { num_requests: num_all, num_rows: u32::MAX };
    for batch in 0..num_batches {
        let problem = alone.problem(draw(&alone, any, rng), u32::try_from(rng.below(4)).unwrap());
        alone.demand(&format!("eager batch {batch}"), &problem, &run(&problem, backend).unwrap());
    }
    let limits = CaptureLimits {
        buckets: family.buckets.clone(),
        max_kv_len: family.case.max_kv_len(),
        num_pool_pages: alone.num_pages,
        appends: false,
    };
    backend.init_capture_graph(&limits).unwrap();
    let mut num_replayed = 0;
    for &bucket in &family.buckets {
        let mut step = backend.prepare_for_capture(bucket).unwrap();
        for replay in 0..num_batches.div_ceil(family.buckets.len()) {
            let members = draw(&alone, bucket, rng);
            let num_rows = alone.num_rows(&members);
            let problem = alone.problem(members, bucket.num_rows - num_rows);
            let used = RawBatch { num_rows: num_rows as usize, ..problem.raw() };
            let batch = Batch::from_raw(problem.pool, &used).unwrap();
            backend.prepare_for_replay(&mut step, &batch).unwrap();
            let got = forward(&problem, backend, &step, 0).unwrap();
            alone.demand(&format!("{bucket:?}, replay {replay}"), &problem, &got);
            num_replayed += 1;
        }
    }
    num_replayed
}

fn check_family(place: usize) {
    if support::has_gpu() {
        let family = &families()[place];
        let mut backend = (attn_cuda::host_entry().create)(&config(&family.case)).unwrap();
        let replayed = check(family, &mut *backend, NUM_BATCHES, &mut Rng::new(&[42, place as u64]));
        let figures = serde_json::json!({"eager batches": NUM_BATCHES, "replayed batches": replayed});
        support::keep(&format!("alone-{place}"), &figures);
    }
}

#[test]
fn a_decoding_request_has_the_same_bits_in_every_batch_and_bucket() {
    check_family(0);
}

#[test]
fn a_decoding_request_with_softcap_sinks_and_window_has_the_same_bits_in_every_batch_and_bucket() {
    check_family(1);
}

#[test]
fn a_request_of_any_kind_has_the_same_bits_in_every_batch_and_bucket() {
    check_family(2);
}

#[test]
fn a_request_over_fp8_has_the_same_bits_in_every_batch_and_bucket() {
    check_family(3);
}

#[test]
fn a_long_request_in_small_pages_has_the_same_bits_in_every_batch_and_bucket() {
    check_family(4);
}

/// Tiles of long prompts are cut short where they do not fill a last round of the multiprocessors: alone they are not,
/// two of these and 8 heads are (on 132 multiprocessors), and so are all three.
#[test]
fn prompts_have_the_same_bits_where_tiles_are_cut_for_a_last_round() {
    if !support::has_gpu() {
        return;
    }
    let request = |q_len| RequestShape { q_len, kv_len: q_len + 1850 };
    let case = Case {
        requests: [432, 401, 420].map(request).to_vec(),
        heads: HeadShape::new(32, 8, 128),
        q_dtype: Dtype::Bf16,
        kv_dtype: KvDtype::Bf16,
        append: false,
        ..Case::default()
    };
    let mut backend = (attn_cuda::host_entry().create)(&config(&case)).unwrap();
    let alone = Alone::new(&case, &mut *backend);
    for members in [vec![0, 1], vec![2, 0], vec![1, 2, 0]] {
        let problem = alone.problem(members, 0);
        alone.demand("beside other prompts", &problem, &run(&problem, &mut *backend).unwrap());
    }
}

#[test]
fn the_check_itself_is_sound_on_the_cpu_backend() {
    for place in [0, 2] {
        let Family { case, buckets } = families().swap_remove(place);
        let family = Family { case: Case { requests: case.requests[..5].to_vec(), ..case }, buckets };
        let mut backend = (attn_reference::cpu::entry().create)(&config(&family.case)).unwrap();
        let replayed = check(&family, &mut *backend, 2, &mut Rng::new(&[43]));
        assert_eq!(replayed, family.buckets.len());
    }
}

#[test]
fn there_is_a_test_for_each_family() {
    assert_eq!(families().len(), 5);
}

#[test]
fn every_bucket_holds_some_request() {
    for family in families() {
        family.case.validate().unwrap();
        for bucket in &family.buckets {
            assert!(family.case.requests.iter().any(|r| r.q_len <= bucket.num_rows), "{bucket:?}");
        }
    }
}

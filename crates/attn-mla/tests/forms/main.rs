//! Absorbed and expanded attention are one: the oracle's expanded form against an absorbed one in f64, and both forms
//! of the backend against the oracle, over head counts, pages, lengths and formats.

#![allow(clippy::unwrap_used, clippy::cast_possible_wrap, reason = "a test may")]
#![allow(unreachable_pub, missing_docs, reason = "a test has no outside")]

mod problem;

use attn_metadata::{AttentionBackend as _, Bucket, CaptureLimits, LayerParams, Reason};
use attn_mla::{Form, MlaBackend, MlaFamily, MlaWidths, oracle};
use attn_reference::oracle::OracleOutput;
use kvpool::KvFormat;
use problem::{Case, Problem, fp8};

const HEADS: [u32; 5] = [1, 16, 17, 64, 128];
const PAGES: [u32; 3] = [1, 16, 64];

fn exact(problem: &Problem) -> OracleOutput {
    oracle::attend(&problem.batch, &problem.layer, &problem.queries(), &problem.cache)
}

/// The absorbed form in f64, from the formulas: for each row the absorbed query, the softmax over latent rows, and the
/// output projected back. Written for this test.
fn absorbed(problem: &Problem) -> (Vec<f64>, Vec<f64>) {
    let family: &MlaFamily = problem.layer.family_as().unwrap();
    let (widths, weights) = (problem.case.widths, family.weights());
    let (latent, nope, value) = (widths.latent() as usize, widths.nope() as usize, widths.value() as usize);
    let (q, num_heads) = (problem.queries(), problem.case.num_heads);
    let (mut outs, mut lses) = (Vec::new(), Vec::new());
    for (index, request) in problem.batch.requests().iter().enumerate() {
        let rows: Vec<Vec<f32>> = (0..request.kv_len).map(|position| problem.row(index, position)).collect();
        for row in 0..request.q_len {
            for head in 0..num_heads {
                let element = |d: usize| f64::from(q.get((request.q_start + row) as usize, head as usize, d));
                let keys = weights.key_rows(head);
                let mut query: Vec<f64> = (0..latent)
                    .map(|c| (0..nope).map(|i| element(i) * f64::from(keys[i * latent + c])).sum())
                    .collect();
                query.extend((nope..widths.query() as usize).map(element));
                let sees = |key: usize| !problem.case.causal || key as i64 <= request.position(row);
                let visible: Vec<&Vec<f32>> =
                    rows.iter().enumerate().filter(|(key, _)| sees(*key)).map(|r| r.1).collect();
                let dot = |row: &&Vec<f32>| query.iter().zip(row.iter()).map(|(q, r)| q * f64::from(*r)).sum::<f64>();
                let scores: Vec<f64> =
                    visible.iter().map(|row| dot(row) * f64::from(problem.layer.sm_scale())).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
                let mut mean = vec![0.0; latent];
                for (score, row) in scores.iter().zip(&visible) {
                    let p = (score - max).exp() / sum;
                    mean.iter_mut().zip(row.iter()).for_each(|(mean, x)| *mean += p * f64::from(*x));
                }
                let up = |i: usize| {
                    let row = &weights.value_rows(head)[i * latent..(i + 1) * latent];
                    row.iter().zip(&mean).map(|(w, m)| f64::from(*w) * m).sum::<f64>()
                };
                outs.extend((0..value).map(up));
                lses.push(if scores.is_empty() { f64::NEG_INFINITY } else { max + sum.ln() });
            }
        }
    }
    (outs, lses)
}

/// Lengths across edges of pages, of the CPU backend's tiles and of its chunks, with empty ones between.
fn requests(q_len: usize) -> Vec<(usize, usize)> {
    let kv_lens = [q_len, 15, 16, 17, 63, 65, 127, 128, 129, 0];
    let mut requests: Vec<(usize, usize)> = kv_lens.into_iter().map(|kv_len| (q_len, kv_len)).collect();
    requests.insert(3, (0, 40));
    requests
}

/// Every head count with every page size and every number of new tokens.
fn grid() -> impl Iterator<Item = (u32, u32, usize)> {
    let pages = |num_heads| PAGES.into_iter().map(move |page_size| (num_heads, page_size));
    let q_lens = |(num_heads, page_size)| [1, 2, 5].into_iter().map(move |q_len| (num_heads, page_size, q_len));
    HEADS.into_iter().flat_map(pages).flat_map(q_lens)
}

#[test]
fn in_f64_absorbed_equals_expanded() {
    for (num_heads, page_size, q_len) in grid() {
        for causal in [true, false] {
            let kv_lens = [17, 0, 33, 4];
            let requests: Vec<(usize, usize)> = kv_lens.into_iter().map(|kv_len| (q_len, kv_len)).collect();
            let problem = Problem::new(&Case { page_size, causal, ..Case::new(num_heads, &requests) });
            let (expanded, (out, lse)) = (exact(&problem), absorbed(&problem));
            let close = |a: &f64, b: &f64| (a - b).abs() <= 1e-12 * (1.0 + a.abs()) || a == b;
            assert!(out.iter().zip(&expanded.out).all(|(a, b)| close(a, b)), "{:?}", problem.case);
            assert!(lse.iter().zip(&expanded.lse).all(|(a, b)| close(a, b)), "{:?}", problem.case);
        }
    }
    let problem = Problem::new(&Case { widths: MlaWidths::DEEPSEEK, ..Case::new(2, &[(2, 9)]) });
    let (expanded, (out, _)) = (exact(&problem), absorbed(&problem));
    assert!(out.iter().zip(&expanded.out).all(|(a, b)| (a - b).abs() <= 1e-12 * (1.0 + a.abs())));
}

/// The backend in both forms against the oracle, to 1e-5 of the largest value that a row sees.
fn check(case: &Case) {
    let problem = Problem::new(case);
    let exact = exact(&problem);
    for form in [Form::Absorbed, Form::Expanded] {
        let (out, lse) = problem.run(Some(form), 2);
        assert_close(&format!("{form}, {case:?}"), &problem, &exact, &out, &lse);
    }
}

fn assert_close(what: &str, problem: &Problem, exact: &OracleOutput, out: &[f32], lse: &[f32]) {
    let width = exact.head_dim_vo;
    assert_eq!(out.len(), exact.out.len());
    for (state, got) in out.chunks_exact(width).enumerate() {
        let want = &exact.out[state * width..][..width];
        let bound = 1e-5 * exact.value_bound[state].max(1.0);
        for (got, want) in got.iter().zip(want) {
            assert!((f64::from(*got) - want).abs() <= bound, "{what}: state {state}, {got} for {want}");
        }
        let (got, want) = (f64::from(lse[state]), exact.lse[state]);
        let bound = 1e-5 * (1.0 + exact.score_bound[state]);
        assert!(got == want || (got - want).abs() <= bound, "{what}: LSE of state {state} is {got}, not {want}");
    }
    let used = problem.batch.num_used_rows() as usize * problem.case.num_heads as usize;
    assert!(out[used * width..].iter().all(|x| x.to_bits() == 0), "{what}: padding rows are zeros");
}

#[test]
fn both_forms_agree_with_the_oracle() {
    for (num_heads, page_size, q_len) in grid() {
        check(&Case { page_size, ..Case::new(num_heads, &requests(q_len)) });
    }
    check(&Case { causal: false, ..Case::new(16, &requests(2)) });
}

#[test]
fn real_widths_agree_with_the_oracle() {
    let widths = MlaWidths::DEEPSEEK;
    check(&Case { widths, page_size: 64, ..Case::new(16, &[(1, 130), (2, 65), (0, 3), (1, 0)]) });
    for format in [KvFormat::Fp8Latent, KvFormat::Bf16] {
        check(&Case { widths, format, page_size: 64, ..Case::new(2, &[(1, 70), (5, 17)]) });
    }
}

#[test]
fn every_format_agrees_with_the_oracle_over_what_it_stores() {
    let widths = MlaWidths::new(256, 16, 24, 20).unwrap();
    for format in [KvFormat::F32, KvFormat::F16, KvFormat::Bf16, fp8(), KvFormat::Fp8Latent] {
        for page_size in PAGES {
            check(&Case { widths, format, page_size, ..Case::new(17, &[(1, 130), (5, 66), (2, 1), (3, 0)]) });
        }
    }
    // Without RoPE, and with one block of latent values.
    let bare = MlaWidths::new(128, 0, 8, 8).unwrap();
    check(&Case { widths: bare, format: KvFormat::Fp8Latent, ..Case::new(4, &[(2, 40)]) });
}

#[test]
fn prefixes_longer_than_a_chunk_and_queries_longer_than_a_block() {
    let widths = MlaWidths::new(24, 4, 8, 8).unwrap();
    for (q_len, kv_len) in [(1, 2049), (5, 2050), (300, 2200), (600, 600), (257, 4100), (3, 2048), (9, 4)] {
        check(&Case { widths, ..Case::new(2, &[(q_len, kv_len), (1, 20)]) });
    }
    check(&Case { widths, causal: false, ..Case::new(2, &[(300, 2100)]) });
}

#[test]
fn the_cheaper_form_is_taken_request_by_request_and_explained() {
    let case =
        Case { widths: MlaWidths::new(64, 8, 16, 16).unwrap(), ..Case::new(16, &[(1, 300), (400, 400), (2, 90)]) };
    let problem = Problem::new(&case);
    let exact = exact(&problem);
    let mut backend = MlaBackend::new(&problem.config(2)).unwrap();
    let (out, lse) = problem.run_on(&mut backend);
    assert_close("mixed", &problem, &exact, &out, &lse);
    let step = backend.prepare_metadata(&problem.batch).unwrap();
    let report = backend.explain(&step).unwrap();
    let forms: Vec<bool> = report.notes.iter().map(|note| note.contains(": expanded, ")).collect();
    assert_eq!(forms, [false, true, false], "{report}");
    assert!(report.notes[0].contains("request 0: q 1, kv 300: absorbed, "), "{report}");
    assert!(report.to_string().contains("expanded would be"), "{report}");
    // Each request has the bits that its form gives it alone.
    let (absorbed, _) = problem.run(Some(Form::Absorbed), 1);
    let (expanded, _) = problem.run(Some(Form::Expanded), 1);
    let row = 16 * 16;
    assert_eq!(out[..row], absorbed[..row]);
    assert_eq!(out[row..401 * row], expanded[row..401 * row]);
    assert_eq!(out[401 * row..], absorbed[401 * row..]);
}

#[test]
fn a_live_step_is_explained_after_another_one_was_planned() {
    let problem = Problem::new(&Case::new(16, &[(1, 300)]));
    let mut backend = MlaBackend::new(&problem.config(1)).unwrap();
    let (bucket, pool) = (Bucket::decode(2), problem.batch.pool());
    let appends = problem.batch.slot_mapping().is_some();
    let limits = CaptureLimits { buckets: vec![bucket], max_kv_len: 512, num_pool_pages: pool.num_pages, appends };
    backend.init_capture_graph(&limits).unwrap();
    let mut captured = backend.prepare_for_capture(bucket).unwrap();
    let step = backend.prepare_metadata(&problem.batch).unwrap();
    assert_eq!(backend.explain(&step).unwrap().groups.len(), 1);
    backend.prepare_for_replay(&mut captured, &problem.batch).unwrap();
    let report = backend.explain(&step).unwrap();
    let is_said = report.notes.iter().any(|note| note.contains("planned anew when this step runs"));
    assert!(report.groups.is_empty() && is_said, "{report}");
}

#[test]
fn features_that_rule_the_expanded_form_out_run_absorbed() {
    let case = Case::new(8, &[(300, 300), (1, 40)]);
    type Edit = fn(LayerParams) -> LayerParams;
    let edits: [(&str, Edit); 4] = [
        ("a window", |params| LayerParams { window_left: Some(20), ..params }),
        ("a softcap", |params| LayerParams { softcap: Some(4.0), ..params }),
        ("sinks", |params| LayerParams { sinks: Some(vec![0.5; 8]), ..params }),
        ("ALiBi", |params| LayerParams { alibi_slopes: Some(vec![-0.01; 8]), ..params }),
    ];
    for (what, edit) in edits {
        let problem = Problem::with_params(&case, edit);
        let mut backend = MlaBackend::new(&problem.config(2)).unwrap();
        let (out, lse) = problem.run_on(&mut backend);
        assert_close(what, &problem, &exact(&problem), &out, &lse);
        let step = backend.prepare_metadata(&problem.batch).unwrap();
        let report = backend.explain(&step).unwrap();
        assert!(report.notes[0].ends_with(&format!("; {what} rules out expanded")), "{report}");
    }
}

#[test]
fn rows_wider_than_the_kernels_are_refused_with_the_reason() {
    let widths = MlaWidths::new(640, 64, 128, 128).unwrap();
    let problem = Problem::new(&Case { widths, ..Case::new(1, &[(1, 1)]) });
    match MlaBackend::new(&problem.config(1)).unwrap_err() {
        attn_metadata::CreateError::Unsupported { backend: "mla", reasons } => {
            assert!(matches!(reasons[..], [Reason::HeadDim { .. }]), "{reasons:?}");
        }
        other => panic!("{other}"),
    }
}

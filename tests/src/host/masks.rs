//! Which keys a row attends to, exactly: probes with one-hot values, and changes in the future.

use attn_metadata::Feature;

use super::context::{Context, with_queries};
use super::{Check, check};
use crate::case::{Case, Data, RequestShape, Sinks};
use crate::harness::{Build, Problem, Stop, mask_shows, same_rows};
use crate::rng::Rng;

pub(super) const WINDOW_PROBE: Check = check(
    "window probe",
    "the set of keys that each row attends to is that of the window, for 0, 1, page − 1, page, page + 1, all",
    with_window,
    probe,
);

pub(super) const MASK_PROBE: Check =
    check("mask probe", "the set of keys is that of causality, window and custom mask together", with_mask, probe);

pub(super) const FUTURE: Check = check(
    "future",
    "changing the keys and values after a row's position changes nothing in the row",
    with_future,
    future,
);

/// Everything but the mask out of the way: V one-hot, q = 0, as many keys as V has columns.
fn plain_probe(case: &mut Case, rng: &mut Rng, decode: bool) {
    case.data = Data::Probe;
    case.values_in_keys = false;
    (case.alibi, case.sinks) = (false, Sinks::None);
    let width = case.heads.head_dim_vo;
    case.page_size = case.page_size.min(width.div_ceil(2));
    let mut request = |longest: u32| {
        let kv_len = 1 + u32::try_from(rng.below(width as usize)).expect("widths have 32 bits");
        let q_len = if decode { 1 } else { 1 + u32::try_from(rng.below(longest as usize)).expect("small") };
        RequestShape { q_len: q_len.min(kv_len), kv_len }
    };
    case.requests = vec![request(3), request(width), RequestShape { q_len: 1, kv_len: width }];
}

fn with_window(case: &mut Case, rng: &mut Rng) {
    let decode = rng.below(3) == 0 || !case.requests.iter().any(|r| r.q_len > 1);
    plain_probe(case, rng, decode);
    case.custom = false;
    let page = case.page_size;
    case.window = Some(rng.pick(&[0, 1, page - 1, page, page + 1, case.heads.head_dim_vo, u32::MAX]));
}

fn with_mask(case: &mut Case, rng: &mut Rng) {
    let decode = !case.requests.iter().any(|r| r.q_len > 1);
    plain_probe(case, rng, decode);
    case.custom = true;
}

fn probe(context: &Context<'_>, case: &Case) -> Result<f64, Stop> {
    let mut backend = context.backend(case)?;
    if case.custom && !backend.capabilities().features.contains(Feature::CustomMask) {
        return Err(Stop::Skipped("no custom masks".to_owned()));
    }
    let problem = Problem::new(case);
    let run = crate::harness::run(&problem, &mut *backend)?;
    let values = run.out_values();
    let [_, heads, dim] = run.shape;
    for (place, &member) in problem.build.members.iter().enumerate() {
        let RequestShape { q_len, kv_len } = case.requests[member];
        for (row, in_request) in problem.rows_of(place).zip(0..q_len) {
            let expected: Vec<u32> = (0..kv_len).filter(|&key| sees(case, member, in_request, key)).collect();
            for head in 0..heads {
                let out = &values[(row * heads + head) * dim..][..dim];
                check_set(row, head, &expected, out)?;
            }
        }
    }
    Ok(0.0)
}

/// The definition, in integers that cannot wrap.
fn sees(case: &Case, member: usize, row: u32, key: u32) -> bool {
    let RequestShape { q_len, kv_len } = case.requests[member];
    let back = i64::from(kv_len) - i64::from(q_len) + i64::from(row) - i64::from(key); // how far the key lies behind
    let in_time = !case.causal || back >= 0;
    let in_window = case.window.is_none_or(|window| back <= i64::from(window));
    in_time && in_window && (!case.custom || mask_shows(case, member, row, key))
}

fn check_set(row: usize, head: usize, expected: &[u32], out: &[f32]) -> Result<(), Stop> {
    let got: Vec<u32> = (0..).zip(out).filter(|(_, x)| **x != 0.0).map(|(key, _)| key).collect();
    if got != expected {
        let missing: Vec<_> = expected.iter().filter(|key| !got.contains(key)).take(4).collect();
        let extra: Vec<_> = got.iter().filter(|key| !expected.contains(key)).take(4).collect();
        return Err(Stop::failed(format!(
            "row {row}, head {head}: does not attend to {missing:?}, attends to {extra:?}"
        )));
    }
    // A 1 is stored within 1/16 of itself, whatever the format.
    let weight = 1.0 / f64::from(u32::try_from(expected.len()).expect("small"));
    match out.iter().find(|x| **x != 0.0 && (f64::from(**x) - weight).abs() > 0.08 * weight) {
        Some(x) => Err(Stop::failed(format!("row {row}, head {head}: a key of {} counts {x}", expected.len()))),
        None => Ok(()),
    }
}

fn with_future(case: &mut Case, rng: &mut Rng) {
    with_queries(case, rng);
    (case.causal, case.custom, case.shared) = (true, false, false);
    if case.data == Data::Probe {
        case.data = Data::Normal;
    }
    if let Some(longest) = case.requests.iter_mut().max_by_key(|r| r.q_len) {
        longest.kv_len = longest.kv_len.max(longest.q_len);
    }
}

fn future(context: &Context<'_>, case: &Case) -> Result<f64, Stop> {
    let mut backend = context.backend(case)?;
    let plain = crate::harness::run(&Problem::new(case), &mut *backend)?;
    let member = (0..case.requests.len()).max_by_key(|&m| case.requests[m].q_len).unwrap_or(0);
    let RequestShape { q_len, kv_len } = case.requests[member];
    for rows_kept in [1, q_len / 3, q_len / 2, q_len.saturating_sub(1)] {
        let Some(last) = (kv_len + rows_kept).checked_sub(q_len + 1).filter(|_| rows_kept > 0) else { continue };
        let build = Build { edit_after: Some((member, last)), ..Build::of(case) };
        let problem = Problem::build(case, build);
        let edited = crate::harness::run(&problem, &mut *backend)?;
        let what = format!("keys of request {member} after position {last} were changed");
        let start = problem.rows_of(member).start;
        same_rows(&what, (&plain, 0), (&edited, 0), start + rows_kept as usize)?;
    }
    Ok(0.0)
}

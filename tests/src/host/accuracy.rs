//! Checks against the oracle within tolerances.

use super::context::{Context, as_drawn, with_queries};
use super::{Check, check};
use crate::case::{Case, Data, RequestShape, Sinks};
use crate::harness::{Problem, Stop};
use crate::rng::Rng;

pub(super) const ORACLE: Check =
    check("oracle", "outputs and LSEs are the oracle's within the tolerances", as_drawn, against_oracle);

pub(super) const EMPTY_ROWS: Check = check(
    "empty rows",
    "rows that see nothing are exactly O = 0, LSE = −inf, wherever their request is in the batch",
    with_empty_rows,
    against_oracle,
);

pub(super) const HUGE_LOGITS: Check = check(
    "huge logits",
    "logits of ±1e5 neither overflow nor lose to a finite stand-in for −inf",
    with_huge,
    against_oracle,
);

pub(super) fn against_oracle(context: &Context<'_>, case: &Case) -> Result<f64, Stop> {
    let problem = Problem::new(case);
    // The backend first, on buffers that nobody else has touched.
    let run = context.run(&problem)?;
    context.compare(&problem, &run)
}

/// No keys, fewer keys than queries, no queries: at the front, in the middle and at the end.
fn with_empty_rows(case: &mut Case, rng: &mut Rng) {
    with_queries(case, rng);
    let most = if case.requests.iter().any(|r| r.q_len > 1) { 3 } else { 1 };
    (case.append, case.shared) = (false, false);
    let mut empty = [
        RequestShape { q_len: 1, kv_len: 0 },
        RequestShape { q_len: most, kv_len: most - 1 },
        RequestShape { q_len: 0, kv_len: 5 },
        RequestShape { q_len: 0, kv_len: 0 },
    ];
    rng.shuffle(&mut empty);
    case.requests.truncate(4);
    case.requests.insert(0, empty[0]);
    case.requests.insert(1 + rng.below(case.requests.len()), empty[1]);
    case.requests.push(empty[2]);
    case.requests.push(empty[3]);
    if rng.below(8) == 0 {
        case.requests = empty.to_vec();
    }
}

fn with_huge(case: &mut Case, rng: &mut Rng) {
    with_queries(case, rng);
    case.data = Data::Huge;
    case.softcap = None;
    if rng.below(2) == 0 {
        case.sinks = Sinks::None;
    }
}

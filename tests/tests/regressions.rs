//! Bugs that were found once, each as the case that showed it: symptom, cause, date. The list only grows.

use attn_conformance::host;
use attn_metadata::{BackendConfig, BoxedBackend, CreateError, Host, HybridBackend};
use attn_reference::{cpu, oracle};

fn hybrid(config: &BackendConfig<Host>) -> Result<BoxedBackend<Host>, CreateError> {
    let (extend, decode) = ((cpu::entry().create)(config)?, (oracle::entry().create)(config)?);
    Ok(Box::new(HybridBackend::new(extend, decode, config.limits, 1)?))
}

fn check(name: &str, line: &str) {
    let result = host::run_case(name, line, &hybrid);
    assert!(result.is_ok(), "{name}: {result:?}\n  {line}");
}

/// 2026-11-29. Symptom: after a batch that was refused, the step before it was stale. Cause: the extend part had
/// planned its share before the decode part refused its own.
#[test]
fn a_hybrid_keeps_its_step_when_its_second_part_refuses() {
    check(
        "refused batches",
        "q/kv=1/41,1/30 heads=12/3 dim=128/128 page=2 layout=hnd causal=true append=false seed=13559835",
    );
}

/// 2026-11-29. Symptom: a batch of more requests than the limit was taken. Cause: each part compared the limit with
/// its own share of the requests.
#[test]
fn a_hybrid_counts_the_requests_of_both_parts() {
    check(
        "refused batches",
        "q/kv=0/64,1/41,1/30 heads=3/1 table=top shared=true causal=false append=true seed=16644865",
    );
}

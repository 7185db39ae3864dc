//! Two hundred random problems against the float64 oracle, from another seed than the suite's.

use attn_conformance::{Suite, host};

use crate::support;

/// Problems that must pass; about four in ten are drawn for pairs of dtypes that have kernels.
const NUM_PASSED: usize = 200;
const SUITE: Suite = Suite { seed: 2026, num_oracle_cases: 700, floor: NUM_PASSED, ..Suite::standard().sequential() };

#[test]
fn two_hundred_random_problems_agree_with_the_oracle() {
    if !support::has_gpu() {
        return;
    }
    let oracle: Vec<host::Check> = host::CHECKS.iter().filter(|check| check.name == "oracle").copied().collect();
    assert_eq!(oracle.len(), 1);
    support::demand("problems", &host::run_checks(&SUITE, &oracle, &attn_cuda::host_entry().create));
}

//! The conformance suite on the CUDA backend, where there is a GPU; elsewhere the refusal says what is missing.

mod support;

use attn_conformance::{Suite, host};

/// More cases than for others: pairs of dtypes that have no kernel are drawn too, and refused.
const SUITE: Suite = Suite { num_oracle_cases: 900, num_check_cases: 24, floor: 600, ..Suite::standard().sequential() };
const SMOKE: Suite = Suite { num_oracle_cases: 120, num_check_cases: 5, floor: 60, ..Suite::standard().sequential() };

#[test]
fn the_cuda_backend_passes_the_suite() {
    if support::has_gpu() {
        support::demand("conformance-cuda", &host::run(&SUITE, attn_cuda::host_entry().create));
    }
}

/// Where the GPU has kernels of its own, those that it shares with others are tested apart.
#[test]
fn the_portable_kernels_pass_the_suite() {
    if support::has_gpu() {
        support::demand("conformance-portable", &host::run(&SUITE, attn_cuda::host_portable_entry().create));
    }
}

#[test]
fn the_plain_kernels_pass_the_suite() {
    if support::has_gpu() {
        support::demand("conformance-plain", &host::run(&SMOKE, attn_cuda::host_plain_entry().create));
    }
}

#[test]
fn cut_by_the_whole_batch_it_passes_all_but_invariance() {
    if support::has_gpu() {
        support::demand("conformance-free", &host::run(&SMOKE, attn_cuda::host_free_entry().create));
    }
}

#[test]
fn the_strict_backend_passes_the_suite() {
    if support::has_gpu() {
        support::demand("conformance-strict", &host::run(&SMOKE, attn_cuda::host_strict_entry().create));
    }
}

#[test]
fn the_checked_kernels_pass_the_suite() {
    if support::has_gpu() {
        support::demand("conformance-checked", &host::run(&SMOKE, support::create_checked));
    }
}

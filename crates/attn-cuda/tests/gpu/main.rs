//! What the conformance suite does not look at, where there is a GPU; without one each test says so and passes.
#![allow(unreachable_pub, clippy::unwrap_used, clippy::print_stderr, clippy::print_stdout, reason = "tests")]

#[path = "../support/mod.rs"]
mod support;

mod alone;
mod at_once;
mod big_pool;
mod every_kernel;
mod merges;
mod page_sizes;
mod page_tables;
mod problems;
mod reruns;
mod scene;
mod strict;
mod traps;

//! Bytes as a program over a page table and a prefix cache, with the model and the checks of the page table's tests.

#![no_main]

// The tests panic through `unwrap` where something does not hold; so does this target.
#[path = "../../crates/page-table/tests/prefix_model/check.rs"]
mod check;
#[path = "../../crates/page-table/tests/prefix_model/content.rs"]
mod content;
#[path = "../../crates/page-table/tests/prefix_model/model.rs"]
mod model;
#[path = "../../crates/page-table/tests/prefix_model/run.rs"]
mod run;

use arbitrary::Arbitrary;
use kvpool::{EvictionPolicy, FailurePlan};
use libfuzzer_sys::fuzz_target;
use run::{Op, Run, Setup};

/// Longer programs say little more and cost much.
const MAX_OPS: usize = 400;

#[derive(Arbitrary, Debug)]
struct Program {
    page_size: u8,
    policy: u8,
    is_hash_constant: bool,
    host_tier: u8,
    /// The taking of pages that fails; where there is none, the program itself makes some fail.
    failure: Option<u8>,
    ops: Vec<Op>,
}

fuzz_target!(|program: Program| {
    let policies = [EvictionPolicy::Lru, EvictionPolicy::Lfu, EvictionPolicy::Priority { half_life: 4 }];
    let mut run = Run::new(Setup {
        page_size: u32::from(program.page_size % 4) + 1,
        policy: policies[usize::from(program.policy) % policies.len()],
        is_hash_constant: program.is_hash_constant,
        num_host_pages: [0, 0, 7, 100][usize::from(program.host_tier) % 4],
    });
    if let Some(nth) = program.failure {
        run.set_failure_plan(FailurePlan::nth(u64::from(nth)));
    }
    for op in program.ops.into_iter().take(MAX_OPS) {
        run.step(op);
        run.check();
    }
    let _ = run.has_failed();
    run.drain();
});

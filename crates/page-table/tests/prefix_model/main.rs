//! Random programs over a page table and a prefix cache together: start (match and adopt), append, fork, insert (and move
//! to the shared pages), truncate, finish, cancel, lock, evict, offload, restore, fences, resets, failing leases. After
//! every operation both audits pass, every sequence reads back its own content tags, and the cache is what a naive model
//! says, page for page.
//!
//! A million operations with fixed seeds, and short programs that shrink.

#![allow(clippy::unwrap_used, clippy::print_stdout)] // in helpers; clippy knows only #[test] functions

mod check;
mod content;
mod model;
mod run;

use kvpool::{EvictionPolicy, FailurePlan, PageHash, hash_page};
use proptest::prelude::*;

use run::{Op, Run, Setup};

const LRU: Setup = Setup { page_size: 4, policy: EvictionPolicy::Lru, is_hash_constant: false, num_host_pages: 0 };
const NUM_OPS: usize = if cfg!(miri) { 300 } else { 170_000 };
/// Operations of one program; then everything is drained and the next one starts.
const PROGRAM_OPS: usize = 2_000;

/// The same numbers on every machine.
fn random_op(state: &mut u64) -> Op {
    *state += 1;
    let [a, b, c, d, e, ..] = hash_page(PageHash(*state), &[0]).0.to_le_bytes();
    (a, u16::from_le_bytes([b, c]), u16::from_le_bytes([d, e]))
}

/// Programs of all page sizes that make up `NUM_OPS` operations.
fn run_programs(seed: u64, setup: Setup) {
    let mut state = seed << 32;
    for (program, page_size) in (0..NUM_OPS.div_ceil(PROGRAM_OPS)).zip([1, 2, 3, 4].into_iter().cycle()) {
        let mut run = Run::new(Setup { page_size, ..setup });
        let first = state;
        for at in 0..PROGRAM_OPS.min(NUM_OPS) {
            let op = random_op(&mut state);
            let step = std::panic::AssertUnwindSafe(|| {
                run.step(op);
                run.check();
            });
            if let Err(panic) = std::panic::catch_unwind(step) {
                println!("seed {seed}, program {program} from {first}, page size {page_size}, operation {at}: {op:?}");
                std::panic::resume_unwind(panic);
            }
        }
        run.drain();
    }
}

#[test]
fn programs_under_lru() {
    run_programs(1, LRU);
}

#[test]
fn programs_under_lfu() {
    run_programs(2, Setup { policy: EvictionPolicy::Lfu, ..LRU });
}

#[test]
fn programs_under_priorities_that_decay() {
    run_programs(3, Setup { policy: EvictionPolicy::Priority { half_life: 16 }, ..LRU });
}

#[test]
fn programs_whose_hashes_all_collide() {
    run_programs(4, Setup { is_hash_constant: true, ..LRU });
}

#[test]
fn programs_with_a_small_host_tier() {
    run_programs(5, Setup { num_host_pages: 10, ..LRU });
}

#[test]
fn programs_with_a_large_host_tier() {
    run_programs(6, Setup { num_host_pages: 400, is_hash_constant: true, ..LRU });
}

/// Every taking of pages of a program fails once, in a run of its own.
#[test]
fn each_lease_of_a_program_may_fail() {
    for setup in [LRU, Setup { num_host_pages: 30, ..LRU }] {
        let mut num_failures = 0;
        for n in 0.. {
            let mut run = Run::new(setup);
            run.set_failure_plan(FailurePlan::nth(n));
            let mut state = 77 << 32;
            for _ in 0..150 {
                let (which, a, b) = random_op(&mut state);
                run.step((if which % 32 == 31 { 0 } else { which }, a, b));
                run.check();
            }
            let has_fired = run.has_failed();
            run.drain();
            if !has_fired {
                break;
            }
            num_failures += 1;
        }
        assert!(num_failures > 30, "{num_failures} failures");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 300 }))]

    #[test]
    fn short_programs_agree_with_the_model(
        page_size in 1u32..5,
        policy in prop::sample::select(vec![
            EvictionPolicy::Lru, EvictionPolicy::Lfu, EvictionPolicy::Priority { half_life: 4 },
        ]),
        is_hash_constant in any::<bool>(),
        num_host_pages in prop::sample::select(vec![0u32, 0, 7, 100]),
        program in prop::collection::vec(any::<Op>(), 1..80),
    ) {
        let mut run = Run::new(Setup { page_size, policy, is_hash_constant, num_host_pages });
        for op in program {
            run.step(op);
            run.check();
        }
        run.drain();
    }
}

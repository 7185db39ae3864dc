//! Contracts of the pool that a random program does not aim at: failure of the Nth lease, fences in every order,
//! foreign leases, limits, threads.

#![allow(clippy::unwrap_used)] // in helpers; clippy knows only #[test] functions

use kvpool::{FailurePlan, Lease, ManualFence, PageId, PagePool, PageSize, PoolCounts, PoolError, ShapeError};

fn pool(num_pages: u32) -> PagePool {
    PagePool::new(num_pages, PageSize::new(16).unwrap()).unwrap()
}

fn ids(lease: &Lease) -> Vec<u32> {
    lease.pages().iter().map(|page| page.raw()).collect()
}

#[test]
fn the_lowest_free_page_is_leased_first() {
    let pool = pool(8);
    let (a, b) = (pool.lease(3).unwrap(), pool.lease(2).unwrap());
    assert_eq!((ids(&a), ids(&b)), (vec![0, 1, 2], vec![3, 4]));
    drop(a);
    assert_eq!(ids(&pool.lease(4).unwrap()), [0, 1, 2, 5]);
}

#[test]
fn exhaustion_says_what_was_needed_and_changes_nothing() {
    let pool = pool(8);
    let held = pool.lease(3).unwrap();
    let fence = ManualFence::new();
    pool.lease(2).unwrap().release_after(fence.clone());
    let before = pool.audit().unwrap();
    let error = pool.lease_batch(&[1, 2, 1]).unwrap_err();
    assert_eq!(error, PoolError::Exhausted { needed: 4, free: 3, fenced: 2 });
    assert_eq!(error.to_string(), "4 pages needed, 3 free, 2 waiting for a fence");
    assert_eq!(pool.audit().unwrap(), before);
    assert_eq!(pool.lease_batch(&[usize::MAX, 1]).unwrap_err(), PoolError::CountOverflow);
    fence.pass();
    let batch = pool.lease_batch(&[1, 0, 3]).unwrap();
    assert_eq!(batch.iter().map(ids).collect::<Vec<_>>(), [vec![3], vec![], vec![4, 5, 6]]);
    assert_eq!(ids(&held), [0, 1, 2]);
}

/// Takes pages in every way; on error nothing may have changed.
fn scenario(pool: &PagePool, held: &mut Vec<Lease>, stage: &mut usize) -> Result<(), PoolError> {
    while *stage < 5 {
        match *stage {
            0 => held.push(pool.lease(2)?),
            1 => held.extend(pool.lease_batch(&[1, 2])?),
            2 => held[0].extend(2)?,
            3 => {
                let shared = held[0].share(0..1)?;
                let copy = held[0].make_private(0)?;
                assert!(copy.is_some());
                held.push(shared);
            }
            _ => held.push(pool.lease(1)?),
        }
        *stage += 1;
    }
    Ok(())
}

#[test]
fn each_taking_of_pages_may_fail_once_and_its_retry_succeeds() {
    let mut undisturbed = Vec::new();
    scenario(&pool(16), &mut undisturbed, &mut 0).unwrap();
    let mut num_failures = 0;
    for n in 0.. {
        let pool = pool(16);
        let (mut held, mut stage) = (Vec::new(), 0);
        pool.set_failure_plan(Some(FailurePlan::nth(n)));
        let first = scenario(&pool, &mut held, &mut stage);
        let audit = pool.audit().unwrap();
        assert_eq!(audit.num_lease_entries, held.iter().map(Lease::len).sum::<usize>());
        if !pool.failure_plan().is_some_and(|plan| plan.has_fired()) {
            assert_eq!(first, Ok(()));
            break;
        }
        assert!(matches!(first, Err(PoolError::Exhausted { .. })));
        scenario(&pool, &mut held, &mut stage).unwrap();
        assert_eq!(held.iter().map(ids).collect::<Vec<_>>(), undisturbed.iter().map(ids).collect::<Vec<_>>());
        num_failures += 1;
    }
    assert_eq!(num_failures, 5);
}

#[test]
fn fences_may_pass_in_any_order() {
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let pool = pool(6);
        let fences = [(); 3].map(|()| ManualFence::new());
        for (lease, fence) in pool.lease_batch(&[2, 2, 2]).unwrap().into_iter().zip(&fences) {
            lease.release_after(fence.clone());
        }
        assert_eq!(pool.lease(1).unwrap_err(), PoolError::Exhausted { needed: 1, free: 0, fenced: 6 });
        let mut held = Vec::new();
        for which in order {
            fences[which].pass();
            held.push(pool.lease(2).unwrap());
            let first = 2 * u32::try_from(which).unwrap();
            assert_eq!(held.last().map(ids), Some(vec![first, first + 1]));
            assert!(pool.lease(1).is_err());
            pool.audit().unwrap();
        }
    }
}

#[test]
fn a_shared_page_is_reusable_only_when_lease_and_fence_are_done() {
    let pool = pool(1);
    let fence = ManualFence::new();
    let kept = pool.lease(1).unwrap();
    kept.share_all().release_after(fence.clone());
    // The released sharer may still read: the page is not private and, once dropped, not free.
    assert_eq!(kept.num_holders(0), Ok(2));
    drop(kept);
    assert_eq!(pool.counts(), PoolCounts { fenced: 1, total: 1, ..PoolCounts::default() });
    assert!(pool.lease(1).is_err());
    fence.pass();
    assert!(pool.lease(1).is_ok());
}

#[test]
fn the_source_of_a_copy_outlives_its_other_holders() {
    let pool = pool(3);
    let mut a = pool.lease(1).unwrap();
    let b = a.share_all();
    let copy = a.make_private(0).unwrap().unwrap();
    drop(b);
    assert_eq!(ids(&pool.lease(1).unwrap()), [2]); // page 0 waits for the copy
    let fence = ManualFence::new();
    copy.release_after(fence.clone());
    assert_eq!(ids(&pool.lease(1).unwrap()), [2]);
    fence.pass();
    assert_eq!(ids(&pool.lease(1).unwrap()), [0]);
    assert!(a.make_private(0).unwrap().is_none());
}

#[test]
fn a_foreign_lease_is_refused_and_keeps_its_pages() {
    let (ours, theirs) = (pool(4), pool(4));
    let (mut a, mut b) = (ours.lease(1).unwrap(), theirs.lease(2).unwrap());
    assert_eq!(a.append(&mut b), Err(PoolError::ForeignLease));
    assert_eq!(a.replace_from(0, &mut b).unwrap_err(), PoolError::ForeignLease);
    assert_eq!((ids(&a), ids(&b)), (vec![0], vec![0, 1]));
    assert!(ours.owns(&a) && !ours.owns(&b));
    ours.audit().unwrap();
    theirs.audit().unwrap();
}

#[test]
fn indices_beyond_a_lease_are_refused() {
    let pool = pool(4);
    let mut lease = pool.lease(2).unwrap();
    let beyond = PoolError::BeyondLease { index: 3, len: 2 };
    assert_eq!(lease.truncate(3), Err(beyond));
    assert_eq!(lease.split_off(3).unwrap_err(), beyond);
    assert_eq!(lease.share(1..3).unwrap_err(), beyond);
    #[allow(clippy::reversed_empty_ranges)]
    let reversed = lease.share(2..1).unwrap_err();
    assert_eq!(reversed, PoolError::ReversedRange { start: 2, end: 1 });
    assert_eq!(lease.num_holders(2), Err(PoolError::BeyondLease { index: 2, len: 2 }));
    let mut empty = pool.lease(0).unwrap();
    assert_eq!(lease.replace_from(0, &mut empty).unwrap_err(), PoolError::BeyondLease { index: 0, len: 0 });
    assert_eq!(ids(&lease), [0, 1]);
}

#[test]
fn a_pool_ends_where_slots_leave_i32() {
    let wide = PageSize::new(1 << 30).unwrap();
    assert!(PagePool::new(1, wide).is_ok());
    let error = PagePool::new(2, wide).unwrap_err();
    assert_eq!(error, ShapeError::TooManySlots { num_pages: 2, page_size: 1 << 30, max: i32::MAX as u64 });
    assert_eq!(PagePool::new(0, wide).unwrap_err(), ShapeError::Zero { what: "num_pages" });
}

#[test]
fn a_lease_outlives_every_handle_to_its_pool() {
    let lease = pool(4).lease(2).unwrap();
    let pool = lease.pool().clone();
    drop(lease);
    assert_eq!(pool.counts().free, 4);
}

#[test]
fn threads_share_a_pool_without_losing_a_page() {
    let pool = pool(64);
    let rounds = if cfg!(miri) { 10 } else { 2000 };
    std::thread::scope(|scope| {
        for thread in 0..4usize {
            let pool = &pool;
            scope.spawn(move || {
                let mut held = Vec::new();
                for round in 0..rounds {
                    let Ok(lease) = pool.lease(1 + (round + thread) % 7) else {
                        held.clear();
                        continue;
                    };
                    if round % 3 == 0 {
                        let fence = ManualFence::new();
                        lease.share_all().release_after(fence.clone());
                        fence.pass();
                    }
                    held.push(lease);
                    if round % 5 == 0 {
                        drop(held.remove(0));
                        pool.audit().unwrap();
                    }
                }
            });
        }
    });
    pool.reap();
    assert_eq!(pool.audit().unwrap().counts.free, 64);
    assert_eq!(pool.lease(64).unwrap().pages().first(), PageId::new(0).as_ref());
}

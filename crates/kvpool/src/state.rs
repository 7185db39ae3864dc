//! Owns the accounting of a pool, behind its lock: free pages, holders per page, live leases, pending fences, and which
//! pages the prefix cache has.
//! Invariants, which [`State::audit`] recomputes: every page is free, leased or fenced, and in one of these only; a
//! page's holders are the live leases and pending fences that list it; the counters equal what a walk finds.
//! Does not check what callers pass; the lease and the pool do that before they come here.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::failure::FailurePlan;
use crate::fence::Fence;
use crate::idle::IdleList;
use crate::ids::PageId;
use crate::pool::{PoolCounts, PoolError};

/// How often a page is held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Holders {
    /// Entries of live leases.
    pub(crate) leases: u32,
    /// Entries of releases whose fence is pending.
    pub(crate) fences: u32,
    /// Whether one of the leases is that of the prefix cache.
    pub(crate) is_cached: bool,
}

impl Holders {
    pub(crate) const fn total(self) -> u32 {
        self.leases + self.fences
    }

    /// Whether the prefix cache holds the page, and nobody else.
    pub(crate) const fn is_idle(self) -> bool {
        matches!(self, Holders { leases: 1, fences: 0, is_cached: true })
    }

    /// This page's share of the counters, `total` aside.
    pub(crate) fn count_into(self, counts: &mut PoolCounts) {
        match self {
            Holders { leases: 0, fences: 0, .. } => counts.free += 1,
            Holders { leases: 0, .. } => counts.fenced += 1,
            Holders { leases, .. } => {
                counts.leased += 1;
                counts.shared += usize::from(leases > 1);
                counts.evictable += usize::from(self.is_idle());
            }
        }
    }

    fn count_out_of(self, counts: &mut PoolCounts) {
        let mut mine = PoolCounts::default();
        self.count_into(&mut mine);
        counts.free -= mine.free;
        counts.fenced -= mine.fenced;
        counts.leased -= mine.leased;
        counts.shared -= mine.shared;
        counts.evictable -= mine.evictable;
    }
}

/// Pages that wait for a fence.
#[derive(Debug)]
pub(crate) struct Pending {
    pub(crate) fence: Box<dyn Fence>,
    pub(crate) pages: Vec<PageId>,
}

#[derive(Debug)]
pub(crate) struct State {
    /// Lowest id first.
    pub(crate) free: BinaryHeap<Reverse<PageId>>,
    pub(crate) holders: Vec<Holders>,
    /// The pages of every live lease, by its key; `None` where the key is unused.
    pub(crate) leases: Vec<Option<Vec<PageId>>>,
    pub(crate) unused_keys: Vec<usize>,
    pub(crate) pending: Vec<Pending>,
    pub(crate) counts: PoolCounts,
    pub(crate) failure_plan: Option<FailurePlan>,
    /// Pages that became idle since the prefix cache last asked; `None` where the pool has no prefix cache.
    pub(crate) idle: Option<IdleList>,
}

impl State {
    pub(crate) fn new(num_pages: u32) -> State {
        let total = num_pages as usize;
        State {
            free: (0..num_pages).filter_map(PageId::new).map(Reverse).collect(),
            holders: vec![Holders::default(); total],
            leases: Vec::new(),
            unused_keys: Vec::new(),
            pending: Vec::new(),
            counts: PoolCounts { free: total, total, ..PoolCounts::default() },
            failure_plan: None,
            idle: None,
        }
    }

    /// Takes the `num_pages` lowest free pages for a lease, appended to `pages`; nothing changes on error but that
    /// passed fences are reaped.
    pub(crate) fn take(&mut self, num_pages: usize, pages: &mut Vec<PageId>) -> Result<(), PoolError> {
        if num_pages == 0 {
            return Ok(());
        }
        self.reap();
        if self.is_planned_failure() {
            let PoolCounts { free, fenced, .. } = self.counts;
            return Err(PoolError::Exhausted { needed: num_pages, free, fenced });
        }
        self.take_unplanned(num_pages, pages)
    }

    /// As [`State::take`], without a look at the fences and at the failure plan.
    pub(crate) fn take_unplanned(&mut self, num_pages: usize, pages: &mut Vec<PageId>) -> Result<(), PoolError> {
        let PoolCounts { free, fenced, .. } = self.counts;
        if num_pages > free {
            return Err(PoolError::Exhausted { needed: num_pages, free, fenced });
        }
        pages.reserve(num_pages);
        for _ in 0..num_pages {
            let Reverse(page) = self.free.pop().expect("the free counter equals the length of the free list");
            assert_eq!(self.holders[page.index()], Holders::default(), "holders of the free page {page}");
            self.hold(page);
            pages.push(page);
        }
        Ok(())
    }

    /// Counts a taking of pages; whether the plan makes it fail.
    pub(crate) fn is_planned_failure(&mut self) -> bool {
        self.failure_plan.as_mut().is_some_and(FailurePlan::strikes)
    }

    /// Notes whether one of the page's leases is that of the prefix cache.
    pub(crate) fn set_cached(&mut self, page: PageId, is_cached: bool) {
        self.change(page, |holders| holders.is_cached = is_cached);
    }

    /// One more lease entry for the page.
    pub(crate) fn hold(&mut self, page: PageId) {
        self.change(page, |holders| {
            holders.leases = holders.leases.checked_add(1).expect("fewer than 2^32 leases hold one page");
        });
    }

    /// One lease entry less for the page; it is free where that was the last holder.
    pub(crate) fn release(&mut self, page: PageId) {
        self.change(page, |holders| {
            holders.leases = holders.leases.checked_sub(1).expect("a lease returns only pages that it holds");
        });
    }

    /// Moves the lease entries of `pages` to the fence.
    pub(crate) fn release_after(&mut self, pages: Vec<PageId>, fence: Box<dyn Fence>) {
        for page in &pages {
            self.change(*page, |holders| {
                holders.leases = holders.leases.checked_sub(1).expect("a lease returns only pages that it holds");
                holders.fences = holders.fences.checked_add(1).expect("fewer than 2^32 fences hold one page");
            });
        }
        self.pending.push(Pending { fence, pages });
    }

    /// Returns the pages whose fences have passed.
    pub(crate) fn reap(&mut self) {
        let mut at = 0;
        while at < self.pending.len() {
            if !self.pending[at].fence.has_passed() {
                at += 1;
                continue;
            }
            for page in self.pending.swap_remove(at).pages {
                self.change(page, |holders| {
                    holders.fences = holders.fences.checked_sub(1).expect("a fence returns only pages that it holds");
                });
            }
        }
    }

    /// Lists the pages of a new lease; the holders were counted before.
    pub(crate) fn register(&mut self, pages: &[PageId]) -> usize {
        let entry = Some(pages.to_vec());
        match self.unused_keys.pop() {
            Some(key) => {
                self.leases[key] = entry;
                key
            }
            None => {
                self.leases.push(entry);
                self.leases.len() - 1
            }
        }
    }

    /// Forgets a lease; its holders are given back by the caller.
    pub(crate) fn unregister(&mut self, key: usize) {
        self.leases[key].take().expect("a live lease is registered");
        self.unused_keys.push(key);
    }

    /// The listed pages of a live lease.
    pub(crate) fn listed(&mut self, key: usize) -> &mut Vec<PageId> {
        self.leases[key].as_mut().expect("a live lease is registered")
    }

    fn change(&mut self, page: PageId, change: impl FnOnce(&mut Holders)) {
        let holders = &mut self.holders[page.index()];
        let before = *holders;
        before.count_out_of(&mut self.counts);
        change(holders);
        let after = *holders;
        after.count_into(&mut self.counts);
        if after.total() == 0 && before.total() > 0 {
            self.free.push(Reverse(page));
        }
        if after.is_idle()
            && !before.is_idle()
            && let Some(idle) = &mut self.idle
        {
            idle.push(page);
        }
    }
}

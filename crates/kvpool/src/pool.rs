//! Owns [`PagePool`], the handle to a pool of page ids, its counters and its errors.
//! Invariants: the lowest free page is leased first, so a run is repeatable; exhaustion changes nothing; a page whose
//! fence is pending is never leased. Does not own bytes: page `i` names page `i` of every layer's storage.
//!
//! A [`crate::PrefixCache`] sits on top: it holds a [`Lease`] for each cached run of pages and gives out shares of it.
//! The pool marks its pages and counts those that nobody else holds; nothing here knows a key or a token.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::audit::{AuditError, PoolAudit};
use crate::error::ShapeError;
use crate::failure::FailurePlan;
use crate::ids::{PageId, PageSize};
use crate::lease::Lease;
use crate::state::State;

/// Pages by state. `free + leased + fenced = total`; `shared` and `evictable` are parts of `leased`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolCounts {
    /// Pages that can be leased now.
    pub free: usize,
    /// Pages that at least one lease holds.
    pub leased: usize,
    /// Pages that more than one lease holds.
    pub shared: usize,
    /// Pages that a [`crate::PrefixCache`] holds and nobody else, fences included: it can give them up at once.
    pub evictable: usize,
    /// Pages that no lease holds and whose fence was pending when the pool last looked.
    pub fenced: usize,
    /// All pages.
    pub total: usize,
}

/// A request to the pool that was refused; the pool and the leases are as before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// There are not enough free pages.
    #[error("{needed} pages needed, {free} free, {fenced} waiting for a fence")]
    Exhausted {
        /// Pages that the whole call needs.
        needed: usize,
        /// Pages that are free.
        free: usize,
        /// Pages that will be free when their fences have passed.
        fenced: usize,
    },
    /// The two leases are of different pools.
    #[error("the lease belongs to another pool")]
    ForeignLease,
    /// A range or index is beyond the pages of the lease.
    #[error("page index {index} is beyond the lease of {len} pages")]
    BeyondLease {
        /// The index, or the end of the range.
        index: usize,
        /// Pages of the lease.
        len: usize,
    },
    /// A range ends before it starts.
    #[error("the range of pages {start}..{end} ends before it starts")]
    ReversedRange {
        /// Start of the range.
        start: usize,
        /// End of the range.
        end: usize,
    },
    /// The sum of the counts of a batch overflows.
    #[error("the batch asks for more pages than a machine can count")]
    CountOverflow,
}

/// A handle to a pool of page ids; clones are handles to the same pool.
#[derive(Debug, Clone)]
pub struct PagePool {
    pub(crate) shared: Arc<Shared>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) state: Mutex<State>,
    num_pages: u32,
    page_size: PageSize,
}

impl PagePool {
    /// A pool of the pages `0..num_pages`, all free.
    ///
    /// # Errors
    /// [`ShapeError::Zero`] for no pages, [`ShapeError::TooManySlots`] beyond `i32::MAX` slots.
    pub fn new(num_pages: u32, page_size: PageSize) -> Result<PagePool, ShapeError> {
        if num_pages == 0 {
            return Err(ShapeError::Zero { what: "num_pages" });
        }
        let max = u64::from(i32::MAX.unsigned_abs());
        if u64::from(num_pages) * u64::from(page_size.get()) > max {
            let (num_pages, page_size) = (num_pages.into(), page_size.get());
            return Err(ShapeError::TooManySlots { num_pages, page_size, max });
        }
        let state = Mutex::new(State::new(num_pages));
        Ok(PagePool { shared: Arc::new(Shared { state, num_pages, page_size }) })
    }

    /// Tokens per page.
    #[must_use]
    pub fn page_size(&self) -> PageSize {
        self.shared.page_size
    }

    /// All pages, free or not.
    #[must_use]
    pub fn num_pages(&self) -> u32 {
        self.shared.num_pages
    }

    /// Leases the `num_pages` lowest free pages, ascending. 0 pages are an empty lease and always succeed.
    ///
    /// # Errors
    /// [`PoolError::Exhausted`]; nothing was taken.
    pub fn lease(&self, num_pages: usize) -> Result<Lease, PoolError> {
        let mut pages = Vec::new();
        let key = {
            let mut state = self.shared.state.lock();
            state.take(num_pages, &mut pages)?;
            state.register(&pages)
        };
        Ok(Lease::from_registered(self.clone(), key, pages))
    }

    /// Leases for several owners at once: all or none. Lease `i` has `counts[i]` pages; the first gets the lowest ids.
    ///
    /// # Errors
    /// [`PoolError::Exhausted`] with the sum as `needed`, [`PoolError::CountOverflow`]; nothing was taken.
    pub fn lease_batch(&self, counts: &[usize]) -> Result<Vec<Lease>, PoolError> {
        let total = counts.iter().try_fold(0usize, |sum, count| sum.checked_add(*count));
        let mut all = self.lease(total.ok_or(PoolError::CountOverflow)?)?;
        let mut leases = Vec::with_capacity(counts.len());
        for count in counts.iter().rev() {
            leases.push(all.split_off(all.len() - count)?);
        }
        leases.reverse();
        Ok(leases)
    }

    /// Takes pages whose taking was counted and admitted before.
    pub(crate) fn lease_unplanned(&self, num_pages: usize) -> Result<Lease, PoolError> {
        let mut pages = Vec::new();
        let key = {
            let mut state = self.shared.state.lock();
            state.take_unplanned(num_pages, &mut pages)?;
            state.register(&pages)
        };
        Ok(Lease::from_registered(self.clone(), key, pages))
    }

    /// One more lease of pages that are held already.
    pub(crate) fn share(&self, pages: Vec<PageId>) -> Lease {
        let mut state = self.shared.state.lock();
        pages.iter().for_each(|page| state.hold(*page));
        let key = state.register(&pages);
        drop(state);
        Lease::from_registered(self.clone(), key, pages)
    }

    /// Whether the lease is of this pool.
    #[must_use]
    pub fn owns(&self, lease: &Lease) -> bool {
        Arc::ptr_eq(&self.shared, &lease.pool().shared)
    }

    /// Returns the pages whose fences have passed. Every call that takes pages does this first.
    pub fn reap(&self) {
        self.shared.state.lock().reap();
    }

    /// Pages by state, as of the last look at the fences.
    #[must_use]
    pub fn counts(&self) -> PoolCounts {
        self.shared.state.lock().counts
    }

    /// Recomputes all accounting by walking the free list, the live leases and the pending fences.
    ///
    /// Takes time in proportion to all pages; for tests and for checks at leisure.
    ///
    /// # Errors
    /// The first contradiction found, which is a bug of this crate.
    pub fn audit(&self) -> Result<PoolAudit, AuditError> {
        self.shared.state.lock().audit()
    }

    /// Makes a future taking of pages fail, for tests; `None` takes the plan back.
    pub fn set_failure_plan(&self, plan: Option<FailurePlan>) {
        self.shared.state.lock().failure_plan = plan;
    }

    /// The plan that was set, and by [`FailurePlan::has_fired`] whether it was met.
    #[must_use]
    pub fn failure_plan(&self) -> Option<FailurePlan> {
        self.shared.state.lock().failure_plan
    }
}

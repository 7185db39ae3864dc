//! Owns the audit of a pool: [`PoolAudit`], what a walk over the whole structure found, and [`AuditError`], the first
//! contradiction. Invariant: it reads the lists, not the counters, and then compares both.
//! Does not repair anything.

use std::cmp::Reverse;

use crate::ids::PageId;
use crate::pool::PoolCounts;
use crate::state::{Holders, State};

/// What an audit found by walking the structure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolAudit {
    /// Pages by state.
    pub counts: PoolCounts,
    /// Live leases, empty ones included.
    pub num_leases: usize,
    /// Entries of all live leases; a page counts once for each lease that holds it.
    pub num_lease_entries: usize,
    /// Releases whose fence is pending, as of the last look.
    pub num_pending: usize,
}

/// A contradiction in the accounting of a pool: a bug.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AuditError {
    /// A lease, a fence or the free list names a page that the pool does not have.
    #[error("page {page} is beyond the pool of {num_pages} pages")]
    UnknownPage {
        /// The page.
        page: PageId,
        /// Pages of the pool.
        num_pages: usize,
    },
    /// The free list names a page twice.
    #[error("page {page} is twice in the free list")]
    FreeTwice {
        /// The page.
        page: PageId,
    },
    /// A page is free and held.
    #[error("page {page} is free, and {leases} leases and {fences} fences hold it")]
    FreeAndHeld {
        /// The page.
        page: PageId,
        /// Lease entries.
        leases: u32,
        /// Fence entries.
        fences: u32,
    },
    /// A page is neither free nor held.
    #[error("page {page} is neither free nor held")]
    Lost {
        /// The page.
        page: PageId,
    },
    /// The recorded holders of a page are not those that list it.
    #[error(
        "page {page} is listed by {leases} leases and {fences} fences, recorded are {recorded_leases} and {recorded_fences}"
    )]
    Holders {
        /// The page.
        page: PageId,
        /// Lease entries found.
        leases: u32,
        /// Lease entries recorded.
        recorded_leases: u32,
        /// Fence entries found.
        fences: u32,
        /// Fence entries recorded.
        recorded_fences: u32,
    },
    /// A page is marked as the prefix cache's, and no lease holds it.
    #[error("page {page} is marked as cached, and no lease holds it")]
    CachedNotHeld {
        /// The page.
        page: PageId,
    },
    /// The counters are not what the walk found.
    #[error("the counters say {recorded:?}, the walk found {found:?}")]
    Counts {
        /// The counters.
        recorded: PoolCounts,
        /// What the walk found.
        found: PoolCounts,
    },
}

impl State {
    pub(crate) fn audit(&self) -> Result<PoolAudit, AuditError> {
        let found = self.listed_holders()?;
        let is_free = self.listed_free()?;
        let mut counts = PoolCounts { total: self.holders.len(), ..PoolCounts::default() };
        for (page, ((found, recorded), is_free)) in
            (0..).map_while(PageId::new).zip(found.iter().zip(&self.holders).zip(is_free))
        {
            // Whose a lease is stands in no list here: the audit of the prefix cache compares that with its tree.
            let found = Holders { is_cached: recorded.is_cached, ..*found };
            let Holders { leases, fences, is_cached } = found;
            if found != *recorded {
                let Holders { leases: recorded_leases, fences: recorded_fences, .. } = *recorded;
                return Err(AuditError::Holders { page, leases, recorded_leases, fences, recorded_fences });
            }
            if is_cached && leases == 0 {
                return Err(AuditError::CachedNotHeld { page });
            }
            match (is_free, found.total()) {
                (true, 1..) => return Err(AuditError::FreeAndHeld { page, leases, fences }),
                (false, 0) => return Err(AuditError::Lost { page }),
                (true, 0) | (false, 1..) => found.count_into(&mut counts),
            }
        }
        if counts != self.counts {
            return Err(AuditError::Counts { recorded: self.counts, found: counts });
        }
        Ok(PoolAudit {
            counts,
            num_leases: self.leases.iter().flatten().count(),
            num_lease_entries: self.leases.iter().flatten().map(Vec::len).sum(),
            num_pending: self.pending.len(),
        })
    }

    /// Holders of every page, counted from the lists of the leases and the fences.
    fn listed_holders(&self) -> Result<Vec<Holders>, AuditError> {
        let num_pages = self.holders.len();
        let mut found = vec![Holders::default(); num_pages];
        for page in self.leases.iter().flatten().flatten() {
            let holders = found.get_mut(page.index()).ok_or(AuditError::UnknownPage { page: *page, num_pages })?;
            holders.leases += 1;
        }
        for page in self.pending.iter().flat_map(|pending| &pending.pages) {
            let holders = found.get_mut(page.index()).ok_or(AuditError::UnknownPage { page: *page, num_pages })?;
            holders.fences += 1;
        }
        Ok(found)
    }

    /// Whether the free list names each page.
    fn listed_free(&self) -> Result<Vec<bool>, AuditError> {
        let num_pages = self.holders.len();
        let mut is_free = vec![false; num_pages];
        for Reverse(page) in &self.free {
            let seen = is_free.get_mut(page.index()).ok_or(AuditError::UnknownPage { page: *page, num_pages })?;
            if std::mem::replace(seen, true) {
                return Err(AuditError::FreeTwice { page: *page });
            }
        }
        Ok(is_free)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(id: u32) -> PageId {
        PageId::new(id).unwrap()
    }

    /// Four pages: 0 and 1 leased (1 twice), 2 and 3 free.
    fn sound() -> State {
        let mut state = State::new(4);
        let mut pages = Vec::new();
        state.take(2, &mut pages).unwrap();
        state.register(&pages);
        state.hold(page(1));
        state.register(&[page(1)]);
        state
    }

    fn broken(damage: impl FnOnce(&mut State)) -> AuditError {
        let mut state = sound();
        state.audit().unwrap();
        damage(&mut state);
        state.audit().unwrap_err()
    }

    #[test]
    fn a_sound_pool_passes_with_its_true_counts() {
        let audit = sound().audit().unwrap();
        assert_eq!(audit.counts, PoolCounts { free: 2, leased: 2, shared: 1, total: 4, ..PoolCounts::default() });
        assert_eq!((audit.num_leases, audit.num_lease_entries, audit.num_pending), (2, 3, 0));
    }

    #[test]
    fn every_contradiction_is_found() {
        let twice = broken(|state| state.free.push(Reverse(page(3))));
        assert_eq!(twice, AuditError::FreeTwice { page: page(3) });
        let held = broken(|state| state.free.push(Reverse(page(1))));
        assert_eq!(held, AuditError::FreeAndHeld { page: page(1), leases: 2, fences: 0 });
        let lost = broken(|state| assert!(state.free.pop().is_some()));
        assert_eq!(lost, AuditError::Lost { page: page(2) });
        let leaked = broken(|state| state.unregister(1));
        assert!(matches!(leaked, AuditError::Holders { leases: 1, recorded_leases: 2, .. }));
        let unknown = broken(|state| state.listed(0).push(page(4)));
        assert_eq!(unknown, AuditError::UnknownPage { page: page(4), num_pages: 4 });
        let marked = broken(|state| state.set_cached(page(2), true));
        assert_eq!(marked, AuditError::CachedNotHeld { page: page(2) });
        let miscounted = broken(|state| state.counts.shared = 0);
        assert!(matches!(miscounted, AuditError::Counts { .. }));
    }
}

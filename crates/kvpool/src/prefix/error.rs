//! Owns [`PrefixError`], the refusals of a prefix cache. A refused call changed nothing.

use crate::ids::PageId;

/// A call to a prefix cache that was refused; the cache, the pool and the leases are as before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PrefixError {
    /// Not enough pages are free or can be made free; nothing was evicted.
    #[error("{needed} pages needed: {free} free, {evictable} evictable, {locked} in use, {fenced} waiting for a fence")]
    Exhausted {
        /// Pages that the whole call needs.
        needed: usize,
        /// Pages that are free.
        free: usize,
        /// Pages that only the cache holds.
        evictable: usize,
        /// Pages that somebody else holds.
        locked: usize,
        /// Pages that will be free when their fences have passed.
        fenced: usize,
    },
    /// The lease is of another pool.
    #[error("the lease belongs to another pool")]
    ForeignLease,
    /// The lease has fewer pages than the key has whole ones.
    #[error("the key has {needed} whole pages of tokens, the lease has {pages} pages")]
    LeaseTooShort {
        /// Whole pages of the key.
        needed: usize,
        /// Pages of the lease.
        pages: usize,
    },
    /// The new part of the lease has a page twice.
    #[error("the lease has page {page} twice")]
    PageTwice {
        /// The page.
        page: PageId,
    },
    /// A page is in the cache already, for other tokens.
    #[error("page {page} is cached for other tokens")]
    PageCached {
        /// The page.
        page: PageId,
    },
    /// The pool has a prefix cache already.
    #[error("the pool has a prefix cache already")]
    SecondCache,
}

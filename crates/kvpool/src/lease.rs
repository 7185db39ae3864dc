//! Owns [`Lease`], the right to use pages, and [`CopyOnWrite`], the right to read a page until it is copied.
//! Invariants: a lease returns its pages exactly once, when it is dropped or released; its list equals the pool's
//! record of it; a page that others hold too is written only after [`Lease::make_private`].
//! Does not copy bytes and does not know what its pages hold.

use std::mem;
use std::ops::Range;

use parking_lot::MutexGuard;

use crate::fence::Fence;
use crate::ids::PageId;
use crate::pool::{PagePool, PoolError};
use crate::state::State;

/// Pages of a pool that are held until this is dropped. Not `Clone`: [`Lease::share`] counts another holder.
#[derive(Debug)]
#[must_use = "dropping a lease returns its pages"]
pub struct Lease {
    pool: PagePool,
    key: usize,
    pages: Vec<PageId>,
}

/// A page that was replaced because others hold it: copy `from` to `to` before `to` is read or written.
///
/// It keeps `from` from being reused. Drop it when the copy is done, or hand it to [`CopyOnWrite::release_after`] when
/// the copy was enqueued on a device.
#[derive(Debug)]
#[must_use = "the page `to` holds nothing until it was copied"]
pub struct CopyOnWrite {
    /// The page to copy, whole.
    pub from: PageId,
    /// The page that takes its place, held by the lease that was made private.
    pub to: PageId,
    source: Lease,
}

impl CopyOnWrite {
    /// Keeps `from` from being reused until the fence has passed.
    pub fn release_after(self, fence: impl Fence + 'static) {
        self.source.release_after(fence);
    }
}

impl Lease {
    /// The holders of `pages` were counted and the lease registered before.
    pub(crate) fn from_registered(pool: PagePool, key: usize, pages: Vec<PageId>) -> Lease {
        Lease { pool, key, pages }
    }

    /// The pages, in the order of leasing.
    #[must_use]
    pub fn pages(&self) -> &[PageId] {
        &self.pages
    }

    /// Number of pages.
    #[must_use]
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// Whether no page is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// The pool of the pages.
    #[must_use]
    pub fn pool(&self) -> &PagePool {
        &self.pool
    }

    /// How many leases and pending fences hold page `index`, this lease included; above 1 it must not be written.
    ///
    /// 1 is final until this lease shares the page; more than 1 may become less at any time.
    ///
    /// # Errors
    /// [`PoolError::BeyondLease`].
    pub fn num_holders(&self, index: usize) -> Result<u32, PoolError> {
        let page = self.page(index)?;
        let mut state = self.state();
        if state.holders[page.index()].fences > 0 {
            state.reap();
        }
        Ok(state.holders[page.index()].total())
    }

    /// A second lease of the pages `range` of this one.
    ///
    /// # Errors
    /// [`PoolError::BeyondLease`], [`PoolError::ReversedRange`].
    pub fn share(&self, range: Range<usize>) -> Result<Lease, PoolError> {
        let Range { start, end } = range;
        if start > end {
            return Err(PoolError::ReversedRange { start, end });
        }
        let pages = self.pages.get(range).ok_or(PoolError::BeyondLease { index: end, len: self.len() })?.to_vec();
        let mut state = self.state();
        pages.iter().for_each(|page| state.hold(*page));
        let key = state.register(&pages);
        drop(state);
        Ok(Lease { pool: self.pool.clone(), key, pages })
    }

    /// A second lease of all pages of this one.
    pub fn share_all(&self) -> Lease {
        self.share(0..self.len()).expect("the whole range lies in the lease")
    }

    /// Leases `num_pages` more pages, behind the others.
    ///
    /// # Errors
    /// [`PoolError::Exhausted`]; nothing was taken.
    pub fn extend(&mut self, num_pages: usize) -> Result<(), PoolError> {
        let old_len = self.len();
        let mut state = self.pool.shared.state.lock();
        state.take(num_pages, &mut self.pages)?;
        state.listed(self.key).extend_from_slice(&self.pages[old_len..]);
        Ok(())
    }

    /// Returns all pages from index `len` on at once. Where work on them may be in flight, release
    /// [`Lease::split_off`] after a fence instead.
    ///
    /// # Errors
    /// [`PoolError::BeyondLease`] where the lease is shorter.
    pub fn truncate(&mut self, len: usize) -> Result<(), PoolError> {
        drop(self.split_off(len)?);
        Ok(())
    }

    /// Cuts the lease in two: this one keeps the pages before index `at`, the new one has the others.
    ///
    /// # Errors
    /// [`PoolError::BeyondLease`] where `at` is more than the number of pages.
    pub fn split_off(&mut self, at: usize) -> Result<Lease, PoolError> {
        self.require(at)?;
        let pages = self.pages.split_off(at);
        let mut state = self.pool.shared.state.lock();
        state.listed(self.key).truncate(at);
        let key = state.register(&pages);
        drop(state);
        Ok(Lease { pool: self.pool.clone(), key, pages })
    }

    /// Moves all pages of `other` behind the pages of this lease; `other` stays, empty.
    ///
    /// # Errors
    /// [`PoolError::ForeignLease`]; nothing was moved.
    pub fn append(&mut self, other: &mut Lease) -> Result<(), PoolError> {
        self.append_from(other, 0)
    }

    /// Moves the pages of `other` from index `at` on behind the pages of this lease.
    ///
    /// # Errors
    /// [`PoolError::ForeignLease`], [`PoolError::BeyondLease`]; nothing was moved.
    pub fn append_from(&mut self, other: &mut Lease, at: usize) -> Result<(), PoolError> {
        self.require_same_pool(other)?;
        other.require(at)?;
        let old_len = self.len();
        self.pages.extend(other.pages.drain(at..));
        let mut state = self.pool.shared.state.lock();
        state.listed(other.key).truncate(at);
        state.listed(self.key).extend_from_slice(&self.pages[old_len..]);
        Ok(())
    }

    /// Makes page `index` this lease's own, so that it may be written: where others hold it too (other leases, or a
    /// pending fence), a new page takes its place and the caller copies the bytes. `None` where it is private already.
    ///
    /// # Errors
    /// [`PoolError::BeyondLease`], [`PoolError::Exhausted`]; nothing was changed.
    pub fn make_private(&mut self, index: usize) -> Result<Option<CopyOnWrite>, PoolError> {
        if self.num_holders(index)? == 1 {
            return Ok(None);
        }
        let mut spare = self.pool.lease(1)?;
        self.replace_from(index, &mut spare).map(Some)
    }

    /// Puts the last page of `spare` in the place of page `index`, whether that is private or not; the caller copies
    /// the bytes. So a batch can take all its pages first and then cannot fail.
    ///
    /// # Errors
    /// [`PoolError::ForeignLease`], [`PoolError::BeyondLease`] (of this lease, or of an empty `spare`); nothing was
    /// changed.
    pub fn replace_from(&mut self, index: usize, spare: &mut Lease) -> Result<CopyOnWrite, PoolError> {
        self.require_same_pool(spare)?;
        let from = self.page(index)?;
        let to = spare.pages.pop().ok_or(PoolError::BeyondLease { index: 0, len: 0 })?;
        self.pages[index] = to;
        let mut state = self.pool.shared.state.lock();
        state.listed(spare.key).pop();
        state.listed(self.key)[index] = to;
        let key = state.register(&[from]);
        drop(state);
        let source = Lease { pool: self.pool.clone(), key, pages: vec![from] };
        Ok(CopyOnWrite { from, to, source })
    }

    /// Returns the pages once the fence has passed; until then no call gets them. A page that another lease holds
    /// stays with that lease, and is not free before the fence has passed either.
    pub fn release_after(mut self, fence: impl Fence + 'static) {
        let pages = mem::take(&mut self.pages);
        let mut state = self.state();
        state.listed(self.key).clear();
        if !pages.is_empty() {
            state.release_after(pages, Box::new(fence));
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.pool.shared.state.lock()
    }

    fn page(&self, index: usize) -> Result<PageId, PoolError> {
        self.pages.get(index).copied().ok_or(PoolError::BeyondLease { index, len: self.len() })
    }

    fn require(&self, end: usize) -> Result<(), PoolError> {
        if end > self.len() { Err(PoolError::BeyondLease { index: end, len: self.len() }) } else { Ok(()) }
    }

    fn require_same_pool(&self, other: &Lease) -> Result<(), PoolError> {
        if self.pool.owns(other) { Ok(()) } else { Err(PoolError::ForeignLease) }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut state = self.pool.shared.state.lock();
        assert_eq!(state.listed(self.key), &self.pages, "the record of a lease and its list");
        state.unregister(self.key);
        self.pages.iter().for_each(|page| state.release(*page));
    }
}

//! Owns [`PageTable`]: for each sequence its length and its pages.
//! Invariants: a sequence of `n` tokens holds exactly `pages_for(n)` pages, all of this table's pool; a page that others
//! hold too is never written, it is replaced first (see `append.rs`). Errors leave everything as it was.
//! Does not own bytes and does not know what the tokens are.

use kvpool::{Fence, Lease, PageId, PagePool, PoolError, Slot};

use crate::append::{AppendOutcome, Appends};
use crate::error::{AdoptError, TableError};
use crate::seq::{Registry, SeqId};

/// The most tokens of a sequence: positions and lengths fit an `i32`.
pub(crate) const MAX_LEN: usize = i32::MAX.unsigned_abs() as usize;

/// One sequence.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) lease: Lease,
    pub(crate) len: usize,
    /// The last batch that named it, to find a name that comes twice.
    pub(crate) batch: u64,
}

/// The sequences of an engine and the pages that they hold.
#[derive(Debug)]
pub struct PageTable {
    pub(crate) pool: PagePool,
    pub(crate) sequences: Registry<Sequence>,
    pub(crate) appends: Appends,
}

impl PageTable {
    /// A table without sequences; its pages come from `pool`, which others may use too.
    #[must_use]
    pub const fn new(pool: PagePool) -> PageTable {
        PageTable { pool, sequences: Registry::new(), appends: Appends::new() }
    }

    /// The pool.
    #[must_use]
    pub const fn pool(&self) -> &PagePool {
        &self.pool
    }

    /// A sequence without tokens and pages.
    ///
    /// # Errors
    /// None today; the pool may refuse an empty lease one day.
    pub fn create(&mut self) -> Result<SeqId, TableError> {
        let lease = self.pool.lease(0)?;
        Ok(self.sequences.insert(Sequence { lease, len: 0, batch: 0 }))
    }

    /// Makes room for `num_tokens` more tokens of one sequence, see [`PageTable::append_batch`].
    ///
    /// # Errors
    /// As [`PageTable::append_batch`].
    pub fn append(&mut self, seq: SeqId, num_tokens: usize) -> Result<AppendOutcome, TableError> {
        self.append_batch(&[(seq, num_tokens)])
    }

    /// Shortens a sequence to `len` tokens and returns the pages behind at once.
    ///
    /// # Errors
    /// [`TableError::UnknownSequence`], [`TableError::BeyondSequence`] where it is shorter.
    pub fn truncate(&mut self, seq: SeqId, len: usize) -> Result<(), TableError> {
        drop(self.cut(seq, len)?);
        Ok(())
    }

    /// Shortens a sequence to `len` tokens; the pages behind are reusable once the fence has passed.
    ///
    /// # Errors
    /// As [`PageTable::truncate`].
    pub fn truncate_after(&mut self, seq: SeqId, len: usize, fence: impl Fence + 'static) -> Result<(), TableError> {
        self.cut(seq, len)?.release_after(fence);
        Ok(())
    }

    /// A second sequence with the same tokens, which shares all pages, a partial last one included.
    ///
    /// # Errors
    /// [`TableError::UnknownSequence`].
    pub fn fork(&mut self, seq: SeqId) -> Result<SeqId, TableError> {
        let parent = self.sequence(seq)?;
        let (lease, len) = (parent.lease.share_all(), parent.len);
        Ok(self.sequences.insert(Sequence { lease, len, batch: 0 }))
    }

    /// A sequence whose first `len` tokens are in the pages of `lease` already, as after a hit in a prefix cache.
    ///
    /// # Errors
    /// [`AdoptError`], which holds the lease: it is of another pool, or has not the pages that `len` tokens need, or
    /// `len` is beyond `i32::MAX`.
    pub fn adopt(&mut self, lease: Lease, len: usize) -> Result<SeqId, AdoptError> {
        let (needed, pages) = (self.pool.page_size().pages_for(len), lease.len());
        if !self.pool.owns(&lease) {
            return Err(AdoptError::new(PoolError::ForeignLease.into(), lease));
        }
        if len > MAX_LEN {
            return Err(AdoptError::new(TableError::AdoptTooLong { len, max: MAX_LEN }, lease));
        }
        if needed != pages {
            return Err(AdoptError::new(TableError::PageCount { len, needed, pages }, lease));
        }
        Ok(self.sequences.insert(Sequence { lease, len, batch: 0 }))
    }

    /// Moves a sequence to other pages with the same content: those of `prefix` take the place of its first ones, as
    /// after an insert into a prefix cache that had some of them already. The lease of the replaced pages comes back:
    /// drop it, or release it after a fence where work in flight may still read them.
    ///
    /// Tables that were built before name the replaced pages; build them again.
    ///
    /// # Errors
    /// [`AdoptError`], which holds the lease: it is of another pool, the sequence is unknown
    /// ([`TableError::UnknownSequence`]), or it has fewer whole pages than the lease has pages
    /// ([`TableError::PrefixTooLong`]). Nothing was changed.
    pub fn replace_prefix(&mut self, seq: SeqId, mut prefix: Lease) -> Result<Lease, AdoptError> {
        if !self.pool.owns(&prefix) {
            return Err(AdoptError::new(PoolError::ForeignLease.into(), prefix));
        }
        let page_size = self.pool.page_size().get() as usize;
        let Some(sequence) = self.sequences.get_mut(seq) else {
            return Err(AdoptError::new(TableError::UnknownSequence { seq }, prefix));
        };
        let (whole_pages, pages) = (sequence.len / page_size, prefix.len());
        if pages > whole_pages {
            return Err(AdoptError::new(TableError::PrefixTooLong { seq, whole_pages, pages }, prefix));
        }
        prefix.append_from(&mut sequence.lease, pages).expect("the sequence has at least the pages of the prefix");
        Ok(std::mem::replace(&mut sequence.lease, prefix))
    }

    /// Forgets a sequence and returns its pages at once.
    ///
    /// # Errors
    /// [`TableError::UnknownSequence`].
    pub fn release(&mut self, seq: SeqId) -> Result<(), TableError> {
        drop(self.take(seq)?);
        Ok(())
    }

    /// Forgets a sequence; its pages are reusable once the fence has passed.
    ///
    /// # Errors
    /// [`TableError::UnknownSequence`].
    pub fn release_after(&mut self, seq: SeqId, fence: impl Fence + 'static) -> Result<(), TableError> {
        self.take(seq)?.release_after(fence);
        Ok(())
    }

    /// Tokens of a sequence, those of the last append included.
    ///
    /// # Errors
    /// [`TableError::UnknownSequence`].
    pub fn len(&self, seq: SeqId) -> Result<usize, TableError> {
        self.sequence(seq).map(|sequence| sequence.len)
    }

    /// Number of sequences.
    #[must_use]
    pub fn num_sequences(&self) -> usize {
        self.sequences.iter().count()
    }

    /// Pages of a sequence, in the order of its tokens.
    ///
    /// # Errors
    /// [`TableError::UnknownSequence`].
    pub fn pages(&self, seq: SeqId) -> Result<&[PageId], TableError> {
        self.sequence(seq).map(|sequence| sequence.lease.pages())
    }

    /// The lease of a sequence, to share its pages with a prefix cache.
    ///
    /// # Errors
    /// [`TableError::UnknownSequence`].
    pub fn lease(&self, seq: SeqId) -> Result<&Lease, TableError> {
        self.sequence(seq).map(|sequence| &sequence.lease)
    }

    /// Where the token at `position` of a sequence lies.
    ///
    /// # Errors
    /// [`TableError::UnknownSequence`], [`TableError::BeyondSequence`].
    pub fn slot(&self, seq: SeqId, position: usize) -> Result<Slot, TableError> {
        let sequence = self.sequence(seq)?;
        let len = sequence.len;
        if position >= len {
            return Err(TableError::BeyondSequence { seq, what: "position", value: position, len });
        }
        Ok(self.slot_of(sequence, position))
    }

    pub(crate) fn sequence(&self, seq: SeqId) -> Result<&Sequence, TableError> {
        self.sequences.get(seq).ok_or(TableError::UnknownSequence { seq })
    }

    /// The slot of a position that was checked.
    pub(crate) fn slot_of(&self, sequence: &Sequence, position: usize) -> Slot {
        let page_size = self.pool.page_size();
        let tokens = page_size.get() as usize;
        let offset = u32::try_from(position % tokens).expect("a rest is smaller than its u32 divisor");
        let page = sequence.lease.pages()[position / tokens];
        Slot::new(page, offset, page_size).expect("all slots of a pool fit an i32")
    }

    /// Shortens a sequence; the pages behind come back as a lease.
    fn cut(&mut self, seq: SeqId, new_len: usize) -> Result<Lease, TableError> {
        let page_size = self.pool.page_size();
        let Sequence { lease, len, .. } = self.sequences.get_mut(seq).ok_or(TableError::UnknownSequence { seq })?;
        if new_len > *len {
            return Err(TableError::BeyondSequence { seq, what: "length", value: new_len, len: *len });
        }
        let behind = lease.split_off(page_size.pages_for(new_len))?;
        *len = new_len;
        Ok(behind)
    }

    fn take(&mut self, seq: SeqId) -> Result<Lease, TableError> {
        self.sequences.remove(seq).map(|sequence| sequence.lease).ok_or(TableError::UnknownSequence { seq })
    }
}

//! Owns the append of a batch: which pages it needs, which shared partial pages it must replace, all or none.
//! Invariants: everything is checked and all pages are leased before the first sequence changes; after that nothing can
//! fail. A page that is written by this append is held by no one else.
//! Does not copy bytes: the caller does, from [`AppendOutcome::copies`].

use kvpool::{CopyOnWrite, PageId};

use crate::error::TableError;
use crate::seq::SeqId;
use crate::table::{MAX_LEN, PageTable};

/// What the caller has to do after an append and before the new tokens' KV is written.
#[derive(Debug, Default)]
#[must_use = "the pages in `copies` hold nothing until they are copied"]
pub struct AppendOutcome {
    /// Pages to copy in every layer, in the order of the batch. Each keeps its source from being reused: drop it when
    /// the copy is done, or hand it a fence.
    pub copies: Vec<CopyOnWrite>,
}

/// What an append needs of one row.
#[derive(Debug, Clone, Copy)]
struct Row {
    new_len: usize,
    new_pages: usize,
    is_copied: bool,
}

/// A row that writes into a page which others hold.
#[derive(Debug, Clone, Copy)]
struct SharedTail {
    page: PageId,
    row: usize,
    num_holders: usize,
}

/// Scratch of [`PageTable::append_batch`], kept so that a warm table allocates nothing for it.
#[derive(Debug)]
pub(crate) struct Appends {
    batch: u64,
    rows: Vec<Row>,
    shared_tails: Vec<SharedTail>,
}

impl Appends {
    pub(crate) const fn new() -> Appends {
        Appends { batch: 0, rows: Vec::new(), shared_tails: Vec::new() }
    }
}

impl PageTable {
    /// Makes room for `num_tokens` more tokens of each sequence, all or none: takes pages, and replaces a last page that
    /// is partly filled and held by others too (where all its holders append in this batch, the last keeps it).
    ///
    /// Copy what [`AppendOutcome::copies`] lists before the new tokens' KV is written. 0 tokens change nothing.
    ///
    /// # Errors
    /// [`TableError::UnknownSequence`], [`TableError::RepeatedSequence`], [`TableError::TooLong`], and
    /// [`TableError::Pool`] with the pages that the whole batch needs; no sequence was changed.
    pub fn append_batch(&mut self, requests: &[(SeqId, usize)]) -> Result<AppendOutcome, TableError> {
        self.plan_rows(requests)?;
        self.decide_copies();
        let needed = self.appends.rows.iter().map(|row| row.new_pages + usize::from(row.is_copied)).sum();
        let mut outcome = AppendOutcome::default();
        if needed == 0 {
            self.set_lengths(requests);
            return Ok(outcome);
        }
        let mut spare = self.pool.lease(needed)?;
        // Backwards, because pages are cheapest to take from the end: so the first row gets the lowest ids.
        for ((seq, _), row) in requests.iter().zip(&self.appends.rows).rev() {
            if row.new_pages == 0 && !row.is_copied {
                continue;
            }
            let sequence = self.sequences.get_mut(*seq).expect("the plan found every sequence");
            let (num_pages, at) = (sequence.lease.len(), spare.len() - row.new_pages);
            sequence.lease.append_from(&mut spare, at).expect("the spare pages are of the table's pool");
            if row.is_copied {
                let copy = sequence.lease.replace_from(num_pages - 1, &mut spare);
                outcome.copies.push(copy.expect("the plan leased a page for every copy"));
            }
        }
        assert!(spare.is_empty(), "{} pages were leased and not used", spare.len());
        outcome.copies.reverse();
        self.set_lengths(requests);
        Ok(outcome)
    }

    /// Checks every row and counts its pages.
    fn plan_rows(&mut self, requests: &[(SeqId, usize)]) -> Result<(), TableError> {
        let page_size = self.pool.page_size();
        let Appends { batch, rows, shared_tails } = &mut self.appends;
        *batch += 1;
        rows.clear();
        shared_tails.clear();
        for (row, (seq, added)) in requests.iter().copied().enumerate() {
            let sequence = self.sequences.get_mut(seq).ok_or(TableError::UnknownSequence { seq })?;
            if std::mem::replace(&mut sequence.batch, *batch) == *batch {
                return Err(TableError::RepeatedSequence { seq, row });
            }
            let len = sequence.len;
            let new_len = len.checked_add(added).filter(|new_len| *new_len <= MAX_LEN);
            let new_len = new_len.ok_or(TableError::TooLong { seq, len, added, max: MAX_LEN })?;
            let num_pages = sequence.lease.len();
            rows.push(Row { new_len, new_pages: page_size.pages_for(new_len) - num_pages, is_copied: false });
            let is_partial = len % page_size.get() as usize != 0;
            if added > 0 && is_partial {
                let num_holders = sequence.lease.num_holders(num_pages - 1)? as usize;
                if num_holders > 1 {
                    let page = sequence.lease.pages()[num_pages - 1];
                    shared_tails.push(SharedTail { page, row, num_holders });
                }
            }
        }
        Ok(())
    }

    /// Every row with a shared tail gets a page of its own; only where the rows of this batch are all the holders, the
    /// last one keeps the page.
    fn decide_copies(&mut self) {
        let Appends { rows, shared_tails, .. } = &mut self.appends;
        shared_tails.sort_unstable_by_key(|tail| (tail.page, tail.row));
        for tails in shared_tails.chunk_by(|a, b| a.page == b.page) {
            let num_holders = tails.iter().map(|tail| tail.num_holders).min().unwrap_or(0);
            let num_copies = if num_holders > tails.len() { tails.len() } else { tails.len() - 1 };
            for tail in &tails[..num_copies] {
                rows[tail.row].is_copied = true;
            }
        }
    }

    fn set_lengths(&mut self, requests: &[(SeqId, usize)]) {
        for ((seq, _), row) in requests.iter().zip(&self.appends.rows) {
            self.sequences.get_mut(*seq).expect("the plan found every sequence").len = row.new_len;
        }
    }
}

//! Owns the audit of a table: [`TableAudit`] and [`TableAuditError`], the first contradiction.
//! Invariant: it looks at every sequence and every page, and audits the pool too. Does not repair anything.

use std::collections::HashSet;

use kvpool::{AuditError, PageId, PoolAudit};

use crate::seq::SeqId;
use crate::table::PageTable;

/// What an audit found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableAudit {
    /// Live sequences.
    pub num_sequences: usize,
    /// Tokens of all sequences; shared ones count for each.
    pub num_tokens: usize,
    /// Pages of all sequences; shared ones count for each.
    pub num_entries: usize,
    /// The pool, whose leases may also be of others.
    pub pool: PoolAudit,
}

/// A contradiction in a table: a bug, or a lease with a page twice that was adopted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TableAuditError {
    /// The pool's accounting is wrong.
    #[error("the pool's accounting is wrong")]
    Pool(#[from] AuditError),
    /// A sequence has not the pages that its length needs.
    #[error("sequence {seq} of {len} tokens needs {needed} pages and has {pages}")]
    PageCount {
        /// The sequence.
        seq: SeqId,
        /// Its tokens.
        len: usize,
        /// Pages that they need.
        needed: usize,
        /// Pages that it has.
        pages: usize,
    },
    /// A sequence has a page twice.
    #[error("sequence {seq} has page {page} twice")]
    PageTwice {
        /// The sequence.
        seq: SeqId,
        /// The page.
        page: PageId,
    },
    /// A sequence has pages of another pool.
    #[error("sequence {seq} has pages of another pool")]
    ForeignLease {
        /// The sequence.
        seq: SeqId,
    },
    /// The pool lists fewer entries than the sequences have.
    #[error("the sequences have {entries} pages, the pool's leases list {listed}")]
    Unlisted {
        /// Pages of all sequences.
        entries: usize,
        /// Entries of all leases of the pool.
        listed: usize,
    },
}

impl PageTable {
    /// Recomputes the table's and the pool's accounting from their structures. For tests and checks at leisure.
    ///
    /// # Errors
    /// The first contradiction found.
    pub fn audit(&self) -> Result<TableAudit, TableAuditError> {
        let pool = self.pool.audit()?;
        let mut audit = TableAudit { num_sequences: 0, num_tokens: 0, num_entries: 0, pool };
        let mut seen = HashSet::new();
        for (seq, sequence) in self.sequences.iter() {
            let (len, pages) = (sequence.len, sequence.lease.pages());
            let needed = self.pool.page_size().pages_for(len);
            if needed != pages.len() {
                return Err(TableAuditError::PageCount { seq, len, needed, pages: pages.len() });
            }
            if !self.pool.owns(&sequence.lease) {
                return Err(TableAuditError::ForeignLease { seq });
            }
            seen.clear();
            if let Some(page) = pages.iter().copied().find(|page| !seen.insert(*page)) {
                return Err(TableAuditError::PageTwice { seq, page });
            }
            audit.num_sequences += 1;
            audit.num_tokens += len;
            audit.num_entries += pages.len();
        }
        if audit.num_entries > pool.num_lease_entries {
            let (entries, listed) = (audit.num_entries, pool.num_lease_entries);
            return Err(TableAuditError::Unlisted { entries, listed });
        }
        Ok(audit)
    }
}

#[cfg(test)]
mod tests {
    use kvpool::{PagePool, PageSize};

    use super::*;

    #[test]
    fn every_contradiction_is_found() {
        let pool = || PagePool::new(8, PageSize::new(4).unwrap()).unwrap();
        let mut table = PageTable::new(pool());
        let seq = table.create().unwrap();
        let _ = table.append(seq, 5).unwrap();
        let audit = table.audit().unwrap();
        assert_eq!((audit.num_sequences, audit.num_tokens, audit.num_entries), (1, 5, 2));

        table.sequences.get_mut(seq).unwrap().len = 4;
        assert_eq!(table.audit(), Err(TableAuditError::PageCount { seq, len: 4, needed: 1, pages: 2 }));

        let sequence = table.sequences.get_mut(seq).unwrap();
        sequence.len = 5;
        let own = std::mem::replace(&mut sequence.lease, pool().lease(2).unwrap());
        assert_eq!(table.audit(), Err(TableAuditError::ForeignLease { seq }));

        let mut twice = own.share(0..1).unwrap();
        twice.append(&mut own.share(0..1).unwrap()).unwrap();
        let page = own.pages()[0];
        table.sequences.get_mut(seq).unwrap().lease = twice;
        assert_eq!(table.audit(), Err(TableAuditError::PageTwice { seq, page }));
    }
}

//! The rules of a batch, one variant each.

use std::fmt;

use thiserror::Error;

/// A broken rule, with the request or row and the values.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Violation {
    /// A table has the wrong number of entries.
    #[error("{table} has {got} entries, {expected} are needed")]
    TableLen {
        /// Which table.
        table: &'static str,
        /// Entries needed.
        expected: usize,
        /// Entries given.
        got: usize,
    },
    /// An offset table is empty; one of no requests is `[0]`.
    #[error("{table} is empty, it needs one entry more than there are requests")]
    IndptrEmpty {
        /// Which table.
        table: &'static str,
    },
    /// An offset table does not start at 0.
    #[error("{table} starts at {got}, it must start at 0")]
    IndptrStart {
        /// Which table.
        table: &'static str,
        /// First entry.
        got: i32,
    },
    /// An offset table decreases.
    #[error("{table} falls from {from} to {to} (request {request})")]
    IndptrDecreasing {
        /// Which table.
        table: &'static str,
        /// The request.
        request: usize,
        /// Its begin.
        from: i32,
        /// Its end.
        to: i32,
    },
    /// The last query offset is beyond the rows of q.
    #[error("qo_indptr ends at {got}, q has {num_rows} rows")]
    RowsExceeded {
        /// Last entry.
        got: i32,
        /// Rows of q.
        num_rows: usize,
    },
    /// The last page offset is not the number of page ids.
    #[error("kv_indptr ends at {got}, kv_indices has {num_indices} entries")]
    PagesMismatch {
        /// Last entry.
        got: i32,
        /// Entries of `kv_indices`.
        num_indices: usize,
    },
    /// A page id is not of the pool.
    #[error("page id {got} is not in 0..{num_pages} (request {request}, page {index})")]
    PageOutOfRange {
        /// The request.
        request: usize,
        /// Which of its pages.
        index: usize,
        /// The id.
        got: i32,
        /// Pages of the pool.
        num_pages: u32,
    },
    /// A request has pages, but its last page's length is not in 1..=page size.
    #[error("kv_last_page_len {got} is not in 1..={page_size} (request {request})")]
    LastPageLen {
        /// The request.
        request: usize,
        /// The length.
        got: i32,
        /// Tokens in a page.
        page_size: u32,
    },
    /// A request has no pages, but its last page's length is not 0.
    #[error("kv_last_page_len is {got}, but there is no page, so it must be 0 (request {request})")]
    LastPageOfNothing {
        /// The request.
        request: usize,
        /// The length.
        got: i32,
    },
    /// A request's KV is longer than 32-bit tables can say.
    #[error("{num_pages} pages of {page_size} tokens exceed 2^31 - 1 tokens (request {request})")]
    KvTooLong {
        /// The request.
        request: usize,
        /// Its pages.
        num_pages: u32,
        /// Tokens in a page.
        page_size: u32,
    },
    /// There are more rows than 32-bit tables can say.
    #[error("{num_rows} rows exceed 2^31 - 1")]
    TooManyRows {
        /// Rows of q.
        num_rows: usize,
    },
    /// The pool has more slots than 32-bit slot ids can say.
    #[error("a pool of {num_pages} pages of {page_size} tokens exceeds 2^31 - 1 slots")]
    PoolTooLarge {
        /// Pages of the pool.
        num_pages: u32,
        /// Tokens in a page.
        page_size: u32,
    },
    /// A step that appends needs room for every new token in the KV.
    #[error("{q_len} tokens are appended, but kv_len {kv_len} does not hold them (request {request})")]
    AppendExceedsKv {
        /// The request.
        request: usize,
        /// Its new tokens.
        q_len: u32,
        /// Its KV tokens, the new ones included.
        kv_len: u32,
    },
    /// A slot is not of the pool.
    #[error("slot {got} is not in 0..{num_slots} (row {row}); {} skips a row", kvpool::Slot::PADDING.raw())]
    SlotOutOfRange {
        /// The row of q.
        row: usize,
        /// The slot.
        got: i32,
        /// Slots of the pool.
        num_slots: u64,
    },
    /// A new token's slot is not where the page table has its position, so attention would not see it.
    #[error("slot {got} of row {row} is not slot {expected}, where its page table has this token (request {request})")]
    SlotMismatch {
        /// The request.
        request: usize,
        /// The row of q.
        row: usize,
        /// The slot given.
        got: i32,
        /// The slot of the token's position.
        expected: i64,
    },
    /// Two rows write one slot.
    #[error("slot {slot} is written by row {first} and by row {row}")]
    SlotDuplicate {
        /// The later row.
        row: usize,
        /// The earlier row.
        first: usize,
        /// The slot.
        slot: i32,
    },
    /// A padding row would write KV.
    #[error("row {row} is padding, but its slot is {got}; padding rows take {}", kvpool::Slot::PADDING.raw())]
    PaddingWrites {
        /// The row of q.
        row: usize,
        /// The slot.
        got: i32,
    },
    /// The custom mask has the wrong number of bytes.
    #[error("custom_mask has {got} bytes, {expected} are needed")]
    MaskLen {
        /// Bytes needed.
        expected: usize,
        /// Bytes given.
        got: usize,
    },
}

/// A batch that breaks rules.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub struct BatchError {
    violations: Vec<Violation>,
    num_more: usize,
}

impl BatchError {
    /// At most this many violations are kept; the rest is counted.
    pub const KEPT: usize = 64;

    pub(super) const fn new() -> Self {
        Self { violations: Vec::new(), num_more: 0 }
    }

    pub(super) fn push(&mut self, violation: Violation) {
        if self.violations.len() < Self::KEPT {
            self.violations.push(violation);
        } else {
            self.num_more += 1;
        }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.violations.is_empty()
    }

    /// The broken rules, in the order of the tables; never empty.
    #[must_use]
    pub fn violations(&self) -> &[Violation] {
        &self.violations
    }

    /// Broken rules beyond those kept.
    #[must_use]
    pub const fn num_more(&self) -> usize {
        self.num_more
    }
}

impl fmt::Display for BatchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = 3.min(self.violations.len());
        for (i, violation) in self.violations[..shown].iter().enumerate() {
            let separator = if i == 0 { "" } else { "; " };
            write!(f, "{separator}{violation}")?;
        }
        match self.violations.len() - shown + self.num_more {
            0 => Ok(()),
            more => write!(f, "; and {more} more"),
        }
    }
}

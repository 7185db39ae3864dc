//! Owns the refusals of the table ([`TableError`], [`AdoptError`]) and of the step's tables ([`StepError`]).
//! Every variant names the sequence or row and carries the values; a refused call changed nothing.

use kvpool::{Lease, PoolError};

use crate::seq::SeqId;

/// A call to the table that was refused; the table and its pool are as before.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TableError {
    /// The sequence was released, or never was of this table.
    #[error("sequence {seq} is not in this table")]
    UnknownSequence {
        /// The sequence.
        seq: SeqId,
    },
    /// A batch names a sequence twice.
    #[error("sequence {seq} is twice in the batch, the second time in row {row}")]
    RepeatedSequence {
        /// The sequence.
        seq: SeqId,
        /// Row of the second naming.
        row: usize,
    },
    /// The sequence would be longer than an `i32` counts.
    #[error("sequence {seq} of {len} tokens cannot take {added} more, the most is {max} tokens")]
    TooLong {
        /// The sequence.
        seq: SeqId,
        /// Its tokens.
        len: usize,
        /// Tokens that were to be added.
        added: usize,
        /// The largest length, inclusive.
        max: usize,
    },
    /// The tokens of an adopted lease are more than an `i32` counts.
    #[error("a sequence of {len} tokens cannot be, the most is {max} tokens")]
    AdoptTooLong {
        /// Tokens of the lease.
        len: usize,
        /// The largest length, inclusive.
        max: usize,
    },
    /// A length or position beyond the tokens of the sequence.
    #[error("{what} {value} is beyond the {len} tokens of sequence {seq}")]
    BeyondSequence {
        /// The sequence.
        seq: SeqId,
        /// What was given: a length or a position.
        what: &'static str,
        /// Its value, in tokens.
        value: usize,
        /// Tokens of the sequence.
        len: usize,
    },
    /// A sequence of this length has another number of pages.
    #[error("{len} tokens need {needed} pages, the lease has {pages}")]
    PageCount {
        /// Tokens of the sequence.
        len: usize,
        /// Pages that they need.
        needed: usize,
        /// Pages of the lease.
        pages: usize,
    },
    /// A prefix is to replace pages that are not whole, or that the sequence does not have.
    #[error("sequence {seq} has {whole_pages} whole pages, a prefix of {pages} pages cannot replace them")]
    PrefixTooLong {
        /// The sequence.
        seq: SeqId,
        /// Pages that its tokens fill.
        whole_pages: usize,
        /// Pages of the prefix.
        pages: usize,
    },
    /// The pool refused: exhausted, or the lease of another pool.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// A lease that did not become a sequence's. It is still held, by this error; [`AdoptError::into_lease`] gives it back.
#[derive(Debug, thiserror::Error)]
#[error("the lease cannot become a sequence's")]
pub struct AdoptError {
    source: TableError,
    lease: Lease,
}

impl AdoptError {
    pub(crate) const fn new(source: TableError, lease: Lease) -> AdoptError {
        AdoptError { source, lease }
    }

    /// Why it was refused.
    #[must_use]
    pub const fn reason(&self) -> &TableError {
        &self.source
    }

    /// The lease, as it was.
    pub fn into_lease(self) -> Lease {
        self.lease
    }
}

/// Tables of a step that cannot be built; the output is as before.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StepError {
    /// The sequence was released, or never was of this table.
    #[error("sequence {seq} of row {row} is not in this table")]
    UnknownSequence {
        /// Row of the request.
        row: usize,
        /// The sequence.
        seq: SeqId,
    },
    /// A request has more query tokens than its sequence has tokens: were they appended?
    #[error("row {row} has q_len {q_len}, sequence {seq} has {kv_len} tokens after the append")]
    QueryTooLong {
        /// Row of the request.
        row: usize,
        /// The sequence.
        seq: SeqId,
        /// Query tokens of the request.
        q_len: usize,
        /// Tokens of the sequence.
        kv_len: usize,
    },
    /// A running sum leaves `i32`.
    #[error("the sum of {what} leaves i32 in row {row}")]
    Overflow {
        /// What is summed.
        what: &'static str,
        /// Row in which the sum is too large.
        row: usize,
    },
    /// A row of a rectangular table is narrower than its sequence.
    #[error("row {row} has {pages} pages, the table is {width} wide")]
    RowTooNarrow {
        /// Row of the sequence.
        row: usize,
        /// Pages of the sequence.
        pages: usize,
        /// Width of the table, in pages.
        width: usize,
    },
    /// A rectangular table has more entries than an `i32` counts.
    #[error("a table of {rows} rows x {width} pages has more than {max} entries")]
    TableTooLarge {
        /// Rows.
        rows: usize,
        /// Width in pages.
        width: usize,
        /// The largest number of entries, inclusive.
        max: usize,
    },
}

//! Owns the tables of one step: [`StepTables`] in CSR form, [`RectTable`], and how they are built from a [`PageTable`].
//! Invariants: lengths count the tokens appended this step; all sums fit `i32`; an error leaves the output as it was; a
//! `StepTables` that was large enough once is filled without an allocation.
//! Does not validate what others put into the fields, and does not know attention.

use kvpool::{PageId, Slot};

use crate::error::StepError;
use crate::granularity::CsrRef;
use crate::seq::SeqId;
use crate::table::{MAX_LEN, PageTable, Sequence};

/// The tables of one step over `n` requests; keep it and build into it every step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepTables {
    /// Offsets of the requests' query tokens, `[n + 1]`, from 0.
    pub qo_indptr: Vec<i32>,
    /// Offsets of the requests' **pages** in `kv_indices`, `[n + 1]`, from 0.
    pub kv_indptr: Vec<i32>,
    /// Page ids, `[kv_indptr[n]]`.
    pub kv_indices: Vec<i32>,
    /// Tokens in the last page, `[n]`, `1..=page_size`; 0 only where a request has no KV.
    pub kv_last_page_len: Vec<i32>,
    /// Where each query token's K and V go, `[qo_indptr[n]]`.
    pub slot_mapping: Vec<Slot>,
}

impl StepTables {
    /// Empty tables of no request.
    #[must_use]
    pub fn new() -> StepTables {
        StepTables::default()
    }

    /// Number of requests.
    #[must_use]
    pub fn num_requests(&self) -> usize {
        self.kv_last_page_len.len()
    }

    /// For each request the row of its last query token in the packed batch; `None` where it has no query token.
    pub fn last_indices(&self) -> impl Iterator<Item = Option<usize>> {
        self.qo_indptr.windows(2).map(|ends| if ends[1] > ends[0] { usize::try_from(ends[1] - 1).ok() } else { None })
    }

    /// The three page tables, to convert or upload.
    #[must_use]
    pub fn csr(&self) -> CsrRef<'_> {
        let StepTables { kv_indptr, kv_indices, kv_last_page_len, .. } = self;
        CsrRef { kv_indptr, kv_indices, kv_last_page_len }
    }

    /// The slots as `i32`, to upload; padding is −1.
    #[must_use]
    pub fn raw_slot_mapping(&self) -> &[i32] {
        bytemuck::must_cast_slice(&self.slot_mapping)
    }

    fn clear(&mut self) {
        let StepTables { qo_indptr, kv_indptr, kv_indices, kv_last_page_len, slot_mapping } = self;
        [qo_indptr, kv_indptr, kv_indices, kv_last_page_len].into_iter().for_each(Vec::clear);
        slot_mapping.clear();
    }
}

/// A page table with one row of equal width for each sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RectTable {
    /// Number of sequences.
    pub rows: usize,
    /// Entries of a row, in pages.
    pub width: usize,
    /// Page ids, `[rows, width]`; behind a sequence's pages [`RectTable::TAIL`].
    pub entries: Vec<i32>,
}

impl RectTable {
    /// The entry behind a sequence's pages. It must never be read; no pool has such a page, so that a reader that does
    /// is found out (0 would be a page of somebody else).
    pub const TAIL: i32 = i32::MAX;

    /// The entries of a sequence's row, tail included.
    ///
    /// # Panics
    /// Where `row` is not below `rows`.
    #[must_use]
    pub fn row(&self, row: usize) -> &[i32] {
        assert!(row < self.rows, "row {row} of a table of {} rows", self.rows);
        &self.entries[row * self.width..(row + 1) * self.width]
    }
}

impl PageTable {
    /// Builds the tables of a step **after** its append: request `i` is a sequence and its `q_len`, the number of its
    /// last tokens that are computed in this step (0 is legal).
    ///
    /// A sequence may come twice (that its slots would then come twice is the planner's to judge).
    ///
    /// # Errors
    /// [`StepError::UnknownSequence`], [`StepError::QueryTooLong`], [`StepError::Overflow`]; `out` is as before.
    pub fn step_tables(&self, requests: &[(SeqId, usize)], out: &mut StepTables) -> Result<(), StepError> {
        self.check_step(requests)?;
        out.clear();
        out.qo_indptr.push(0);
        out.kv_indptr.push(0);
        for (seq, q_len) in requests {
            let sequence = self.sequences.get(*seq).expect("the check found every sequence");
            let first = sequence.len - q_len;
            out.slot_mapping.extend((first..sequence.len).map(|position| self.slot_of(sequence, position)));
            out.kv_indices.extend(sequence.lease.pages().iter().copied().map(PageId::as_i32));
            out.qo_indptr.push(checked_i32(out.slot_mapping.len()));
            out.kv_indptr.push(checked_i32(out.kv_indices.len()));
            out.kv_last_page_len.push(self.pool.page_size().last_page_len(sequence.len).cast_signed());
        }
        Ok(())
    }

    /// A table with a row for each sequence, `width` pages wide, or as wide as the longest needs.
    ///
    /// # Errors
    /// [`StepError::UnknownSequence`], [`StepError::RowTooNarrow`], [`StepError::TableTooLarge`] beyond `i32::MAX`
    /// entries.
    pub fn rectangular(&self, sequences: &[SeqId], width: Option<usize>) -> Result<RectTable, StepError> {
        let rows = sequences.len();
        let mut needed = 0;
        for (row, seq) in sequences.iter().enumerate() {
            let pages = self.row_sequence(row, *seq)?.lease.len();
            if let Some(width) = width.filter(|width| pages > *width) {
                return Err(StepError::RowTooNarrow { row, pages, width });
            }
            needed = needed.max(pages);
        }
        let width = width.unwrap_or(needed);
        let too_large = StepError::TableTooLarge { rows, width, max: MAX_LEN };
        let len = rows.checked_mul(width).filter(|len| *len <= MAX_LEN).ok_or(too_large)?;
        let mut entries = Vec::with_capacity(len);
        for (row, seq) in sequences.iter().enumerate() {
            let sequence = self.row_sequence(row, *seq)?;
            entries.extend(sequence.lease.pages().iter().copied().map(PageId::as_i32));
            entries.resize((row + 1) * width, RectTable::TAIL);
        }
        Ok(RectTable { rows, width, entries })
    }

    fn check_step(&self, requests: &[(SeqId, usize)]) -> Result<(), StepError> {
        let (mut num_tokens, mut num_pages) = (0usize, 0usize);
        for (row, (seq, q_len)) in requests.iter().copied().enumerate() {
            let sequence = self.row_sequence(row, seq)?;
            let kv_len = sequence.len;
            if q_len > kv_len {
                return Err(StepError::QueryTooLong { row, seq, q_len, kv_len });
            }
            num_tokens += q_len;
            num_pages += sequence.lease.len();
            for (what, sum) in [("query tokens", num_tokens), ("pages", num_pages)] {
                if sum > MAX_LEN {
                    return Err(StepError::Overflow { what, row });
                }
            }
        }
        Ok(())
    }

    fn row_sequence(&self, row: usize, seq: SeqId) -> Result<&Sequence, StepError> {
        self.sequences.get(seq).ok_or(StepError::UnknownSequence { row, seq })
    }
}

fn checked_i32(sum: usize) -> i32 {
    i32::try_from(sum).expect("the check bounded every sum")
}

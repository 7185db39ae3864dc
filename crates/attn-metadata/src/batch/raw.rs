//! The raw tables of a batch, as an engine or a file gives them: unchecked.

use kvpool::{PageSize, Slot};
use page_table::StepTables;

/// The pool that a batch's page ids and slots refer to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolShape {
    /// Pages in the pool; ids are below it.
    pub num_pages: u32,
    /// Tokens in a page.
    pub page_size: PageSize,
}

impl PoolShape {
    /// Slots in the pool: pages × page size.
    #[must_use]
    pub fn num_slots(&self) -> u64 {
        u64::from(self.num_pages) * u64::from(self.page_size.get())
    }
}

/// Tables of `n` requests, unchecked. What they mean: [`conventions`](crate::conventions).
#[derive(Clone, Copy, Debug)]
pub struct RawBatch<'a> {
    /// Rows of q, padding rows included; at least `qo_indptr[n]`.
    pub num_rows: usize,
    /// Token offsets of the requests' queries, `[n + 1]`.
    pub qo_indptr: &'a [i32],
    /// **Page** offsets of the requests' KV, `[n + 1]`.
    pub kv_indptr: &'a [i32],
    /// Page ids, `[kv_indptr[n]]`.
    pub kv_indices: &'a [i32],
    /// Tokens in each request's last page, `[n]`: 1 to page size, 0 where the request has no page.
    pub kv_last_page_len: &'a [i32],
    /// Where each row's new KV goes, `[num_rows]`; [`Slot::PADDING`] skips a row; `None`: nothing is appended.
    pub slot_mapping: Option<&'a [Slot]>,
    /// One bit for each (query, key) of each request, `q_len × kv_len` bits a request, rows first, requests one
    /// after the other without gaps, least significant bit first; 1 is visible. [`mask_bytes`](crate::mask_bytes)
    /// long.
    pub custom_mask: Option<&'a [u8]>,
}

impl<'a> RawBatch<'a> {
    /// The tables that the page table wrote for a step, without padding rows, appending its new tokens.
    #[must_use]
    pub fn from_tables(tables: &'a StepTables) -> Self {
        Self {
            num_rows: tables.slot_mapping.len(),
            qo_indptr: &tables.qo_indptr,
            kv_indptr: &tables.kv_indptr,
            kv_indices: &tables.kv_indices,
            kv_last_page_len: &tables.kv_last_page_len,
            slot_mapping: Some(&tables.slot_mapping),
            custom_mask: None,
        }
    }
}

//! One step's batch: which rows of q belong to which request, where each request's KV is, where new KV goes.
//!
//! A [`Batch`] is filled from raw tables ([`RawBatch`]) and validated as a whole: every broken rule is reported, and
//! after an error the batch is what it was before. Filling reuses memory, so a warm batch does not allocate.
//! Backends trust a `Batch`; they never see unchecked tables.

mod kept;
mod mask;
mod raw;
mod select;
mod shared;
mod validate;
mod violation;

pub use kept::KeptBatch;
pub use mask::{PackedMask, mask_bytes};
pub use raw::{PoolShape, RawBatch};
pub use select::SubBatch;
pub use shared::KvIndices;
pub use violation::{BatchError, Violation};

use kvpool::{PageId, PageSize, Slot};

use shared::SharedTable;
use validate::{Checked, Validator};

/// One request of a batch. Half-open ranges over the batch's tables; all checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// First row of q (and of out).
    pub q_start: u32,
    /// Query tokens in this step; may be 0.
    pub q_len: u32,
    /// Visible KV tokens, those appended in this step included; may be 0 or less than `q_len`.
    pub kv_len: u32,
    /// First entry in [`Batch::kv_indices`].
    pub pages_start: u32,
    /// Pages: `kv_len` rounded up to pages.
    pub num_pages: u32,
    /// First bit in the custom mask.
    pub mask_start: u64,
}

impl Request {
    /// Position of query `row` (`0..q_len`); negative where the row comes before the first key.
    #[must_use]
    pub fn position(&self, row: u32) -> i64 {
        i64::from(self.kv_len) - i64::from(self.q_len) + i64::from(row)
    }
}

/// A validated batch.
#[derive(Clone, Debug)]
pub struct Batch {
    pool: PoolShape,
    num_rows: u32,
    num_used_rows: u32,
    writes_padding: bool,
    requests: Vec<Request>,
    kv_indices: SharedTable<i32>,
    appends: bool,
    slots: Vec<Slot>,
    has_mask: bool,
    mask: SharedTable<u8>,
    validator: Validator,
}

impl Batch {
    /// An empty batch over a pool: no request, no row.
    #[must_use]
    pub fn empty(pool: PoolShape) -> Self {
        Self {
            pool,
            num_rows: 0,
            num_used_rows: 0,
            writes_padding: true,
            requests: Vec::new(),
            kv_indices: SharedTable::default(),
            appends: false,
            slots: Vec::new(),
            has_mask: false,
            mask: SharedTable::default(),
            validator: Validator::default(),
        }
    }

    /// A batch from raw tables. Engines that build one a step keep a batch and call [`set`](Self::set).
    ///
    /// # Errors
    /// Broken rules, see [`Violation`]: those of requests and slots where the offset tables are sound, those of how slots
    /// match the page table where all else is.
    pub fn from_raw(pool: PoolShape, raw: &RawBatch<'_>) -> Result<Self, BatchError> {
        let mut batch = Self::empty(pool);
        batch.set(raw)?;
        Ok(batch)
    }

    /// Replaces the contents from raw tables, in one pass over them. Reuses memory.
    ///
    /// # Errors
    /// As [`from_raw`](Self::from_raw); the batch is then unchanged.
    pub fn set(&mut self, raw: &RawBatch<'_>) -> Result<(), BatchError> {
        let Checked { num_rows, num_used_rows } = self.validator.check(raw, self.pool)?;
        self.num_rows = num_rows;
        self.num_used_rows = num_used_rows;
        self.writes_padding = true;
        self.requests.clear();
        self.requests.extend_from_slice(self.validator.requests());
        self.kv_indices.fill(raw.kv_indices);
        self.appends = raw.slot_mapping.is_some();
        refill(&mut self.slots, raw.slot_mapping.unwrap_or_default());
        self.has_mask = raw.custom_mask.is_some();
        self.mask.fill(raw.custom_mask.unwrap_or_default());
        Ok(())
    }

    /// The pool whose pages the tables name.
    #[must_use]
    pub const fn pool(&self) -> PoolShape {
        self.pool
    }

    /// Tokens in a page.
    #[must_use]
    pub const fn page_size(&self) -> PageSize {
        self.pool.page_size
    }

    /// Rows of q and of out, padding rows included.
    #[must_use]
    pub const fn num_rows(&self) -> u32 {
        self.num_rows
    }

    /// Rows before the padding: those of requests. In a sub-batch, rows of other requests count too.
    #[must_use]
    pub const fn num_used_rows(&self) -> u32 {
        self.num_used_rows
    }

    /// Whether whoever runs this batch writes zeros to the padding rows. False for all but one of a batch's
    /// sub-batches.
    #[must_use]
    pub const fn writes_padding(&self) -> bool {
        self.writes_padding
    }

    /// The requests, in batch order.
    #[must_use]
    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// Page ids of all requests, in request order.
    #[must_use]
    pub fn kv_indices(&self) -> &[i32] {
        self.kv_indices.get()
    }

    /// The same, to be held longer than the batch stays as it is.
    #[must_use]
    pub fn shared_kv_indices(&self) -> KvIndices {
        KvIndices::of(&self.kv_indices)
    }

    /// Page ids of one request: `kv_len` rounded up to pages.
    ///
    /// # Panics
    /// If the request is not of this batch.
    #[must_use]
    pub fn pages(&self, request: &Request) -> &[i32] {
        &self.kv_indices()[request.pages_start as usize..][..request.num_pages as usize]
    }

    /// The page that holds a KV position of a request.
    ///
    /// # Panics
    /// If the request is not of this batch or the position is not below its `kv_len`.
    #[must_use]
    pub fn page_of(&self, request: &Request, position: u32) -> PageId {
        let page = self.pages(request)[(position / self.page_size().get()) as usize];
        PageId::from_i32(page).expect("page ids were validated")
    }

    /// Where the new tokens' KV goes, one slot a row (padding rows hold the sentinel); `None` where nothing is
    /// appended.
    #[must_use]
    pub fn slot_mapping(&self) -> Option<&[Slot]> {
        self.appends.then_some(&self.slots)
    }

    /// The custom mask, if there is one.
    #[must_use]
    pub fn custom_mask(&self) -> Option<PackedMask<'_>> {
        self.has_mask.then_some(PackedMask::new(self.mask.get()))
    }

    /// Row of each request's last query token; `None` for a request without queries.
    pub fn last_rows(&self) -> impl Iterator<Item = Option<u32>> {
        self.requests.iter().map(|r| r.q_len.checked_sub(1).map(|last| r.q_start + last))
    }

    /// Longest `q_len` of the batch, 0 for an empty one.
    #[must_use]
    pub fn max_q_len(&self) -> u32 {
        self.requests.iter().map(|r| r.q_len).max().unwrap_or(0)
    }

    /// Longest `kv_len` of the batch, 0 for an empty one.
    #[must_use]
    pub fn max_kv_len(&self) -> u32 {
        self.requests.iter().map(|r| r.kv_len).max().unwrap_or(0)
    }
}

/// Replaces the contents of a vector, keeping its memory.
fn refill<T: Copy>(into: &mut Vec<T>, from: &[T]) {
    into.clear();
    into.extend_from_slice(from);
}

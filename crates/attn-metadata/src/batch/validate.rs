//! The one place where raw tables are checked: one pass over them, every broken rule reported that can be looked at:
//! requests only over sound offset tables, how slots match the page table only where all else is sound.
//!
//! Reads nothing that the tables do not reference, indexes nothing unchecked, and never panics, whatever the input.
//! Keeps its scratch, so that checking a warm batch does not allocate.

use kvpool::Slot;

use super::{BatchError, PoolShape, RawBatch, Request, Violation, mask_bytes};

const MAX: usize = i32::MAX as usize;

/// What a check found besides the requests.
pub(super) struct Checked {
    pub(super) num_rows: u32,
    pub(super) num_used_rows: u32,
}

/// Scratch of the check.
#[derive(Clone, Debug, Default)]
pub(super) struct Validator {
    requests: Vec<Request>,
    slots_by_row: Vec<(i32, u32)>,
}

impl Validator {
    /// The requests found by the last successful check.
    pub(super) fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// Checks the tables against the rules.
    pub(super) fn check(&mut self, raw: &RawBatch<'_>, pool: PoolShape) -> Result<Checked, BatchError> {
        let mut errors = BatchError::new();
        if pool.num_slots() > MAX as u64 {
            let (num_pages, page_size) = (pool.num_pages, pool.page_size.get());
            errors.push(Violation::PoolTooLarge { num_pages, page_size });
        }
        if raw.num_rows > MAX {
            errors.push(Violation::TooManyRows { num_rows: raw.num_rows });
        }
        check_indptr("qo_indptr", raw.qo_indptr, &mut errors);
        check_indptr("kv_indptr", raw.kv_indptr, &mut errors);
        check_lengths(raw, &mut errors);
        // Requests can be walked only over sound offset tables.
        if !errors.is_empty() {
            return Err(errors);
        }
        self.walk_requests(raw, pool, &mut errors);
        self.check_mask(raw, &mut errors);
        if let Some(slots) = raw.slot_mapping {
            self.check_slots(slots, raw, pool, &mut errors);
        }
        if !errors.is_empty() {
            return Err(errors);
        }
        let num_used_rows = raw.qo_indptr.last().map_or(0, |&rows| rows.unsigned_abs());
        Ok(Checked { num_rows: u32::try_from(raw.num_rows).expect("checked above"), num_used_rows })
    }

    fn walk_requests(&mut self, raw: &RawBatch<'_>, pool: PoolShape, errors: &mut BatchError) {
        self.requests.clear();
        let mut mask_start = 0u64;
        let offsets = raw.qo_indptr.windows(2).zip(raw.kv_indptr.windows(2));
        for (request, ((q, kv), &last)) in offsets.zip(raw.kv_last_page_len).enumerate() {
            let found = Request {
                q_start: q[0].unsigned_abs(),
                q_len: q[1].abs_diff(q[0]),
                kv_len: kv_len(request, kv[1].abs_diff(kv[0]), last, pool, errors),
                pages_start: kv[0].unsigned_abs(),
                num_pages: kv[1].abs_diff(kv[0]),
                mask_start,
            };
            // Beyond 2^64 bits the mask's length cannot match, which is reported as such.
            mask_start = mask_start.saturating_add(u64::from(found.q_len) * u64::from(found.kv_len));
            check_pages(request, &found, raw.kv_indices, pool, errors);
            if raw.slot_mapping.is_some() && found.q_len > found.kv_len {
                let Request { q_len, kv_len, .. } = found;
                errors.push(Violation::AppendExceedsKv { request, q_len, kv_len });
            }
            self.requests.push(found);
        }
    }

    fn check_mask(&self, raw: &RawBatch<'_>, errors: &mut BatchError) {
        let Some(mask) = raw.custom_mask else { return };
        let expected = mask_bytes(self.requests.iter().map(|r| (r.q_len, r.kv_len))).unwrap_or(usize::MAX);
        if mask.len() != expected {
            errors.push(Violation::MaskLen { expected, got: mask.len() });
        }
    }

    /// Slots must be of the pool, where the page table has their tokens, and written once.
    fn check_slots(&mut self, slots: &[Slot], raw: &RawBatch<'_>, pool: PoolShape, errors: &mut BatchError) {
        self.slots_by_row.clear();
        let num_slots = pool.num_slots();
        for (row, slot) in slots.iter().enumerate().filter(|(_, s)| !s.is_padding()) {
            match slot.index() {
                Some(index) if (index as u64) < num_slots => {
                    self.slots_by_row.push((slot.raw(), u32::try_from(row).expect("rows were checked")));
                }
                _ => errors.push(Violation::SlotOutOfRange { row, got: slot.raw(), num_slots }),
            }
        }
        if !errors.is_empty() {
            return;
        }
        for (request, found) in self.requests.iter().enumerate() {
            check_request_slots(request, found, slots, raw.kv_indices, pool, errors);
        }
        let used = self.requests.last().map_or(0, |r| (r.q_start + r.q_len) as usize);
        for (row, slot) in slots.iter().enumerate().skip(used).filter(|(_, s)| !s.is_padding()) {
            errors.push(Violation::PaddingWrites { row, got: slot.raw() });
        }
        self.check_duplicates(errors);
    }

    fn check_duplicates(&mut self, errors: &mut BatchError) {
        self.slots_by_row.sort_unstable();
        for pair in self.slots_by_row.windows(2) {
            let [(slot, first), (next, row)] = *pair else { continue };
            if slot == next {
                errors.push(Violation::SlotDuplicate { row: row as usize, first: first as usize, slot });
            }
        }
    }
}

fn check_indptr(table: &'static str, indptr: &[i32], errors: &mut BatchError) {
    match indptr.first() {
        None => errors.push(Violation::IndptrEmpty { table }),
        Some(0) => {}
        Some(&got) => errors.push(Violation::IndptrStart { table, got }),
    }
    for (request, pair) in indptr.windows(2).enumerate() {
        let (from, to) = (pair[0], pair[1]);
        if to < from {
            errors.push(Violation::IndptrDecreasing { table, request, from, to });
        }
    }
}

fn check_lengths(raw: &RawBatch<'_>, errors: &mut BatchError) {
    let mut expect = |table, expected, got| {
        if expected != got {
            errors.push(Violation::TableLen { table, expected, got });
        }
    };
    let num_requests = raw.qo_indptr.len().saturating_sub(1);
    expect("kv_indptr", raw.qo_indptr.len(), raw.kv_indptr.len());
    expect("kv_last_page_len", num_requests, raw.kv_last_page_len.len());
    if let Some(slots) = raw.slot_mapping {
        expect("slot_mapping", raw.num_rows, slots.len());
    }
    if let Some(&got) = raw.qo_indptr.last()
        && usize::try_from(got).is_ok_and(|used| used > raw.num_rows)
    {
        errors.push(Violation::RowsExceeded { got, num_rows: raw.num_rows });
    }
    if let Some(&got) = raw.kv_indptr.last()
        && usize::try_from(got) != Ok(raw.kv_indices.len())
    {
        errors.push(Violation::PagesMismatch { got, num_indices: raw.kv_indices.len() });
    }
}

/// `kv_len` of a request, or 0 with the reason why it has none.
fn kv_len(request: usize, num_pages: u32, last: i32, pool: PoolShape, errors: &mut BatchError) -> u32 {
    let page_size = pool.page_size.get();
    if num_pages == 0 {
        if last != 0 {
            errors.push(Violation::LastPageOfNothing { request, got: last });
        }
        return 0;
    }
    let Some(last) = u32::try_from(last).ok().filter(|l| (1..=page_size).contains(l)) else {
        errors.push(Violation::LastPageLen { request, got: last, page_size });
        return 0;
    };
    let len = u64::from(num_pages - 1) * u64::from(page_size) + u64::from(last);
    match u32::try_from(len) {
        Ok(len) if len as usize <= MAX => len,
        _ => {
            errors.push(Violation::KvTooLong { request, num_pages, page_size });
            0
        }
    }
}

fn check_pages(request: usize, found: &Request, kv_indices: &[i32], pool: PoolShape, errors: &mut BatchError) {
    let pages = &kv_indices[found.pages_start as usize..][..found.num_pages as usize];
    // Almost all batches are sound: one maximum without branches, which vectorises. Negative ids are the largest here.
    let largest = pages.iter().fold(0, |max, page| max.max(page.cast_unsigned()));
    if pages.is_empty() || largest < pool.num_pages {
        return;
    }
    for (index, &got) in pages.iter().enumerate().filter(|(_, page)| page.cast_unsigned() >= pool.num_pages) {
        errors.push(Violation::PageOutOfRange { request, index, got, num_pages: pool.num_pages });
    }
}

/// Each new token's slot must be the one that its page table gives for its position.
fn check_request_slots(
    request: usize,
    found: &Request,
    slots: &[Slot],
    kv_indices: &[i32],
    pool: PoolShape,
    errors: &mut BatchError,
) {
    let page_size = pool.page_size.get();
    let pages = &kv_indices[found.pages_start as usize..][..found.num_pages as usize];
    let first_position = found.kv_len - found.q_len;
    for row_in_request in 0..found.q_len {
        let row = (found.q_start + row_in_request) as usize;
        let slot = slots[row];
        if slot.is_padding() {
            continue;
        }
        let position = first_position + row_in_request;
        let page = i64::from(pages[(position / page_size) as usize]);
        let expected = page * i64::from(page_size) + i64::from(position % page_size);
        if i64::from(slot.raw()) != expected {
            errors.push(Violation::SlotMismatch { request, row, got: slot.raw(), expected });
        }
    }
}

//! Every rule of a batch is reached by a test, all broken rules are reported at once, and a refused batch leaves the
//! previous one as it was.

#![allow(clippy::unwrap_used)]

use attn_metadata::{Batch, BatchError, PoolShape, RawBatch, Violation, mask_bytes};
use kvpool::{PageSize, Slot};

/// Owned raw tables: two requests over a pool of 10 pages of 4 tokens. Request 0 has 2 queries on 6 KV tokens (pages
/// 7, 3), request 1 has 1 query on 4 KV tokens (page 5); one padding row.
#[derive(Clone)]
struct Tables {
    num_pages: u32,
    page_size: u32,
    num_rows: usize,
    qo_indptr: Vec<i32>,
    kv_indptr: Vec<i32>,
    kv_indices: Vec<i32>,
    kv_last_page_len: Vec<i32>,
    slots: Option<Vec<i32>>,
    mask: Option<Vec<u8>>,
}

fn good() -> Tables {
    Tables {
        num_pages: 10,
        page_size: 4,
        num_rows: 4,
        qo_indptr: vec![0, 2, 3],
        kv_indptr: vec![0, 2, 3],
        kv_indices: vec![7, 3, 5],
        kv_last_page_len: vec![2, 4],
        slots: Some(vec![12, 13, 23, -1]),
        mask: Some(vec![0xff; 2]),
    }
}

impl Tables {
    fn pool(&self) -> PoolShape {
        PoolShape { num_pages: self.num_pages, page_size: PageSize::new(self.page_size).unwrap() }
    }

    fn build(&self) -> Result<Batch, BatchError> {
        let mut batch = Batch::empty(self.pool());
        self.fill(&mut batch).map(|()| batch)
    }

    fn fill(&self, batch: &mut Batch) -> Result<(), BatchError> {
        let slots: Option<Vec<Slot>> = self.slots.as_ref().map(|s| s.iter().map(|&raw| Slot::from_raw(raw)).collect());
        batch.set(&RawBatch {
            num_rows: self.num_rows,
            qo_indptr: &self.qo_indptr,
            kv_indptr: &self.kv_indptr,
            kv_indices: &self.kv_indices,
            kv_last_page_len: &self.kv_last_page_len,
            slot_mapping: slots.as_deref(),
            custom_mask: self.mask.as_deref(),
        })
    }
}

/// Breaks the good tables and expects just these violations.
fn check(edit: impl FnOnce(&mut Tables), expected: &[Violation]) {
    let mut tables = good();
    edit(&mut tables);
    let error = tables.build().expect_err("the edit breaks a rule");
    assert_eq!(error.violations(), expected, "{error}");
}

#[test]
fn good_tables_give_the_geometry() {
    let batch = good().build().unwrap();
    assert_eq!((batch.num_rows(), batch.num_used_rows()), (4, 3));
    let facts: Vec<_> = batch.requests().iter().map(|r| (r.q_start, r.q_len, r.kv_len, r.mask_start)).collect();
    assert_eq!(facts, [(0, 2, 6, 0), (2, 1, 4, 12)]);
    assert_eq!(batch.last_rows().collect::<Vec<_>>(), [Some(1), Some(2)]);
    let first = batch.requests()[0];
    assert_eq!(batch.pages(&first), [7, 3]);
    assert_eq!(batch.page_of(&first, 5).raw(), 3);
    assert_eq!((first.position(0), first.position(1)), (4, 5));
    assert!(batch.custom_mask().unwrap().is_visible(&batch.requests()[1], 0, 3));
}

#[test]
fn table_lengths() {
    let len = |table, expected, got| Violation::TableLen { table, expected, got };
    check(
        |t| {
            t.kv_indptr.push(3);
        },
        &[len("kv_indptr", 3, 4)],
    );
    check(
        |t| {
            t.kv_last_page_len.pop();
        },
        &[len("kv_last_page_len", 2, 1)],
    );
    check(|t| t.slots = Some(vec![12, 13, 23]), &[len("slot_mapping", 4, 3)]);
    check(
        |t| {
            t.qo_indptr.clear();
            t.kv_indptr.clear();
            t.kv_last_page_len.clear();
            t.kv_indices.clear();
        },
        &[Violation::IndptrEmpty { table: "qo_indptr" }, Violation::IndptrEmpty { table: "kv_indptr" }],
    );
}

#[test]
fn offset_tables() {
    check(|t| t.qo_indptr[0] = 1, &[Violation::IndptrStart { table: "qo_indptr", got: 1 }]);
    check(|t| t.kv_indptr[0] = -1, &[Violation::IndptrStart { table: "kv_indptr", got: -1 }]);
    let falls = Violation::IndptrDecreasing { table: "qo_indptr", request: 1, from: 4, to: 3 };
    check(|t| t.qo_indptr[1] = 4, &[falls]);
    check(|t| t.qo_indptr[2] = 5, &[Violation::RowsExceeded { got: 5, num_rows: 4 }]);
    check(|t| t.kv_indptr[2] = 2, &[Violation::PagesMismatch { got: 2, num_indices: 3 }]);
    check(|t| t.kv_indptr[2] = i32::MAX, &[Violation::PagesMismatch { got: i32::MAX, num_indices: 3 }]);
}

#[test]
fn pages() {
    for got in [-1, 10, i32::MAX, i32::MIN] {
        let expected = Violation::PageOutOfRange { request: 0, index: 1, got, num_pages: 10 };
        check(
            |t| {
                t.kv_indices[1] = got;
                t.slots = None;
            },
            &[expected],
        );
    }
    for got in [0, 5, -1, i32::MIN, i32::MAX] {
        let expected = Violation::LastPageLen { request: 1, got, page_size: 4 };
        check(
            |t| {
                t.kv_last_page_len[1] = got;
                t.slots = None;
                t.mask = None;
            },
            &[expected],
        );
    }
    check(
        |t| {
            t.kv_indptr = vec![0, 3, 3];
            t.slots = None;
            t.mask = None;
        },
        &[Violation::LastPageOfNothing { request: 1, got: 4 }],
    );
}

#[test]
fn limits_of_32_bits() {
    let too_large = Violation::PoolTooLarge { num_pages: 1 << 30, page_size: 4 };
    check(|t| t.num_pages = 1 << 30, &[too_large]);
    check(
        |t| {
            t.num_rows = 1 << 31;
            t.slots = None;
        },
        &[Violation::TooManyRows { num_rows: 1 << 31 }],
    );
    // 3 pages of 2^30 tokens hold more than 2^31 - 1 tokens, though the pool of one page does not.
    check(
        |t| {
            *t = Tables {
                num_pages: 1,
                page_size: 1 << 30,
                num_rows: 0,
                qo_indptr: vec![0, 0],
                kv_indptr: vec![0, 3],
                kv_indices: vec![0; 3],
                kv_last_page_len: vec![1],
                slots: None,
                mask: None,
            }
        },
        &[Violation::KvTooLong { request: 0, num_pages: 3, page_size: 1 << 30 }],
    );
}

#[test]
fn appends() {
    let exceeds = Violation::AppendExceedsKv { request: 1, q_len: 5, kv_len: 4 };
    check(
        |t| {
            t.num_rows = 7;
            t.qo_indptr[2] = 7;
            t.slots = Some(vec![12, 13, -1, 20, 21, 22, 23]);
            t.mask = None;
        },
        &[exceeds],
    );
    for got in [-2, 40, i32::MAX, i32::MIN] {
        let expected = Violation::SlotOutOfRange { row: 2, got, num_slots: 40 };
        check(|t| t.slots.as_mut().unwrap()[2] = got, &[expected]);
    }
    let mismatch = Violation::SlotMismatch { request: 0, row: 1, got: 14, expected: 13 };
    check(|t| t.slots.as_mut().unwrap()[1] = 14, &[mismatch]);
    check(|t| t.slots.as_mut().unwrap()[3] = 0, &[Violation::PaddingWrites { row: 3, got: 0 }]);
    // Two requests share a page and both append to its last slot.
    check(
        |t| {
            t.kv_indices = vec![7, 5, 5];
            t.kv_last_page_len = vec![4, 4];
            t.slots = Some(vec![22, 23, 23, -1]);
            t.mask = None;
        },
        &[Violation::SlotDuplicate { row: 2, first: 1, slot: 23 }],
    );
}

#[test]
fn a_skipped_slot_is_legal_within_a_request() {
    let mut tables = good();
    tables.slots = Some(vec![-1, 13, -1, -1]);
    assert!(tables.build().is_ok());
}

#[test]
fn masks() {
    for got in [0, 1, 3] {
        check(|t| t.mask = Some(vec![0; got]), &[Violation::MaskLen { expected: 2, got }]);
    }
    assert_eq!(mask_bytes([(u32::MAX, u32::MAX), (u32::MAX, u32::MAX)]), None);
}

#[test]
fn queries_without_keys_are_legal_where_nothing_is_appended() {
    let mut tables = good();
    tables.slots = None;
    tables.mask = None;
    tables.kv_indptr = vec![0, 0, 1];
    tables.kv_indices = vec![5];
    tables.kv_last_page_len = vec![0, 1];
    tables.qo_indptr = vec![0, 2, 4];
    let batch = tables.build().unwrap();
    assert_eq!(batch.requests()[0].kv_len, 0);
    assert_eq!(batch.requests()[1].position(0), -1);
}

#[test]
fn every_violation_is_reported_and_the_batch_is_unchanged() {
    let mut batch = good().build().unwrap();
    let before = (batch.requests().to_vec(), batch.kv_indices().to_vec(), batch.num_rows());
    let mut bad = good();
    bad.kv_indices = vec![-1, 99, 5];
    bad.kv_last_page_len = vec![2, 9];
    bad.mask = None;
    bad.slots = None;
    let error = bad.fill(&mut batch).unwrap_err();
    assert_eq!(error.violations().len(), 3, "{error}");
    assert_eq!((batch.requests().to_vec(), batch.kv_indices().to_vec(), batch.num_rows()), before);
    assert_eq!(batch.slot_mapping().unwrap().len(), 4);
}

#[test]
fn a_flood_of_violations_is_bounded_and_counted() {
    let mut tables = good();
    tables.kv_indices = vec![-1; 500];
    tables.kv_indptr = vec![0, 499, 500];
    tables.slots = None;
    tables.mask = None;
    let error = tables.build().unwrap_err();
    assert_eq!(error.violations().len(), BatchError::KEPT);
    assert_eq!(error.num_more(), 500 - BatchError::KEPT);
    assert!(error.to_string().ends_with("; and 497 more"), "{error}");
}

#[test]
fn an_empty_batch_is_legal() {
    let mut tables = good();
    tables.qo_indptr = vec![0];
    tables.kv_indptr = vec![0];
    tables.kv_indices.clear();
    tables.kv_last_page_len.clear();
    tables.slots = Some(vec![-1; 4]);
    tables.mask = Some(vec![]);
    let batch = tables.build().unwrap();
    assert_eq!((batch.requests().len(), batch.num_rows(), batch.num_used_rows()), (0, 4, 0));
}

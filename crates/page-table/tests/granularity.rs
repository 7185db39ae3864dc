//! The conversion of page sizes is a bijection that keeps every token's slot, and refuses each broken rule by name.

#![allow(clippy::unwrap_used)] // in helpers; clippy knows only #[test] functions

use kvpool::{PageId, PageSize, Slot};
use page_table::{ConvertError, CsrRef, CsrTables, PageGranularity};
use proptest::prelude::*;

fn granularity(pool: u32, kernel: u32) -> PageGranularity {
    PageGranularity::new(PageSize::new(pool).unwrap(), PageSize::new(kernel).unwrap()).unwrap()
}

/// The slot of every token of every row.
fn slots(tables: CsrRef<'_>, page_size: PageSize) -> Vec<Vec<Slot>> {
    let size = page_size.get() as usize;
    let at = |i: usize| usize::try_from(tables.kv_indptr[i]).unwrap();
    (0..tables.kv_last_page_len.len())
        .map(|row| {
            let pages = &tables.kv_indices[at(row)..at(row + 1)];
            let last = usize::try_from(tables.kv_last_page_len[row]).unwrap();
            let len = (pages.len() * size + last).saturating_sub(size);
            let slot = |position: usize| {
                let page = PageId::from_i32(pages[position / size]).unwrap();
                Slot::new(page, u32::try_from(position % size).unwrap(), page_size).unwrap()
            };
            (0..len).map(slot).collect()
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 8 } else { 1000 }))]

    #[test]
    fn converting_there_and_back_is_the_identity_and_keeps_slots(
        kernel in 1u32..9,
        ratio in 1u32..9,
        rows in prop::collection::vec((prop::collection::vec(0i32..1000, 0..6), 1i32..80), 0..6),
    ) {
        let granularity = granularity(kernel * ratio, kernel);
        let mut tables = CsrTables { kv_indptr: vec![0], ..CsrTables::default() };
        for (pages, last) in rows {
            let size = (kernel * ratio).cast_signed();
            tables.kv_last_page_len.push(if pages.is_empty() { 0 } else { (last - 1) % size + 1 });
            tables.kv_indices.extend(pages);
            tables.kv_indptr.push(i32::try_from(tables.kv_indices.len()).unwrap());
        }
        let (mut converted, mut back) = (CsrTables::default(), CsrTables::default());
        granularity.to_kernel(tables.as_ref(), &mut converted).unwrap();
        prop_assert_eq!(
            slots(tables.as_ref(), granularity.pool_page_size()),
            slots(converted.as_ref(), granularity.kernel_page_size())
        );
        granularity.to_pool(converted.as_ref(), &mut back).unwrap();
        prop_assert_eq!(back, tables);
    }

    #[test]
    fn page_ids_convert_there_and_back(kernel in 1u32..9, ratio in 1u32..9, id in 0u32..=i32::MAX.unsigned_abs()) {
        let granularity = granularity(kernel * ratio, kernel);
        let id = PageId::new(id).unwrap();
        let (page, part) = granularity.pool_page(id);
        prop_assert_eq!(granularity.kernel_page(page, part), Ok(id));
    }

    #[test]
    fn arbitrary_arrays_never_panic(
        kv_indptr in prop::collection::vec(prop_oneof![-2i32..6, any::<i32>()], 0..5),
        kv_indices in prop::collection::vec(prop_oneof![-2i32..9, any::<i32>()], 0..6),
        kv_last_page_len in prop::collection::vec(prop_oneof![-2i32..9, any::<i32>()], 0..5),
    ) {
        let tables = CsrRef { kv_indptr: &kv_indptr, kv_indices: &kv_indices, kv_last_page_len: &kv_last_page_len };
        let mut out = CsrTables::default();
        let to_kernel = granularity(4, 2).to_kernel(tables, &mut out);
        prop_assert_eq!(to_kernel.is_err(), out.kv_indptr.is_empty());
        let to_pool = granularity(4, 2).to_pool(tables, &mut out);
        prop_assert_eq!(to_pool.is_err(), out.kv_indptr.is_empty());
    }
}

#[test]
fn each_broken_rule_has_its_own_error() {
    let check = |kv_indptr: &[i32], kv_indices: &[i32], kv_last_page_len: &[i32], expected: ConvertError| {
        let tables = CsrRef { kv_indptr, kv_indices, kv_last_page_len };
        let mut out = CsrTables { kv_indptr: vec![7], kv_indices: vec![7], kv_last_page_len: vec![7] };
        assert_eq!(granularity(4, 2).to_kernel(tables, &mut out), Err(expected));
        assert_eq!(out, CsrTables::default());
    };
    let page_size = PageSize::new(4).unwrap();
    check(&[], &[], &[], ConvertError::RowCount { indptr: 0, rows: 0 });
    check(&[0, 1], &[5], &[1, 1], ConvertError::RowCount { indptr: 2, rows: 2 });
    check(&[1, 1], &[5], &[1], ConvertError::IndptrStart { first: 1 });
    check(&[0, 2], &[5], &[1], ConvertError::IndptrEnd { last: 2, num_indices: 1 });
    check(&[0, -1], &[5], &[1], ConvertError::IndptrEnd { last: -1, num_indices: 1 });
    let order = |row, start, end, num_indices| ConvertError::IndptrOrder { row, start, end, num_indices };
    check(&[0, 2, 1, 2], &[5, 6], &[1, 1, 1], order(1, 2, 1, 2));
    check(&[0, 3, 2], &[5, 6], &[1, 1], order(0, 0, 3, 2));
    check(&[0, -1, 2], &[5, 6], &[1, 1], order(0, 0, -1, 2));
    check(&[0, 1, 2], &[5, -6], &[1, 1], ConvertError::NegativePage { row: 1, page: -6 });
    for got in [0, -1, 5, i32::MAX] {
        check(&[0, 1], &[5], &[got], ConvertError::LastPageLen { row: 0, got, pages: 1, page_size });
    }
    check(&[0, 0], &[], &[1], ConvertError::LastPageLen { row: 0, got: 1, pages: 0, page_size });
    let page = PageId::new(1 << 30).unwrap();
    check(&[0, 1], &[1 << 30], &[1], ConvertError::PageIdOverflow { page, ratio: 2 });
}

#[test]
fn kernel_pages_out_of_order_are_refused() {
    let check = |kv_indices: &[i32], got, expected| {
        let kv_indptr = [0, i32::try_from(kv_indices.len()).unwrap()];
        let tables = CsrRef { kv_indptr: &kv_indptr, kv_indices, kv_last_page_len: &[1] };
        let [got, expected] = [got, expected].map(|id| PageId::new(id).unwrap());
        let error = granularity(6, 2).to_pool(tables, &mut CsrTables::default()).unwrap_err();
        assert_eq!(error, ConvertError::NotAligned { row: 0, got, expected });
    };
    check(&[7, 8], 7, 6);
    check(&[6, 8], 8, 7);
    check(&[6, 7, 8, 10], 10, 9);
}

#[test]
fn sizes_that_do_not_tile_and_ids_beyond_i32_are_refused() {
    let (sixteen, three) = (PageSize::new(16).unwrap(), PageSize::new(3).unwrap());
    let error = PageGranularity::new(sixteen, three).unwrap_err();
    assert_eq!(error, ConvertError::NotADivisor { kernel: three, pool: sixteen });
    assert_eq!(error.to_string(), "kernel pages of 3 tokens do not divide pool pages of 16 tokens");
    assert!(PageGranularity::new(three, sixteen).is_err());
    let granularity = granularity(64, 16);
    let last = PageId::new(i32::MAX.unsigned_abs() / 4).unwrap();
    assert_eq!(granularity.kernel_page(last, 3).map(PageId::as_i32), Ok(i32::MAX));
    assert_eq!(granularity.kernel_page(last, 4), Err(ConvertError::PartOutOfRange { part: 4, ratio: 4 }));
    let page = PageId::new(last.raw() + 1).unwrap();
    assert_eq!(granularity.kernel_page(page, 0), Err(ConvertError::PageIdOverflow { page, ratio: 4 }));
}

//! Contracts of the table that a random program does not aim at: refusals, failure of the Nth lease, copies on write
//! inside one batch, limits.

#![allow(clippy::unwrap_used)] // in helpers; clippy knows only #[test] functions

use kvpool::{CopyOnWrite, FailurePlan, ManualFence, PagePool, PageSize, PoolError};
use page_table::{PageTable, RectTable, SeqId, StepError, StepTables, TableError};

fn table(num_pages: u32, page_size: u32) -> PageTable {
    PageTable::new(PagePool::new(num_pages, PageSize::new(page_size).unwrap()).unwrap())
}

fn with_tokens(table: &mut PageTable, num_tokens: usize) -> SeqId {
    let seq = table.create().unwrap();
    assert!(table.append(seq, num_tokens).unwrap().copies.is_empty());
    seq
}

fn ids(table: &PageTable, seq: SeqId) -> Vec<u32> {
    table.pages(seq).unwrap().iter().map(|page| page.raw()).collect()
}

fn pairs(copies: &[CopyOnWrite]) -> Vec<(u32, u32)> {
    copies.iter().map(|copy| (copy.from.raw(), copy.to.raw())).collect()
}

#[test]
fn a_batch_takes_the_lowest_pages_in_the_order_of_its_rows() {
    let mut table = table(16, 4);
    let [a, b, c] = [(); 3].map(|()| table.create().unwrap());
    let _ = table.append_batch(&[(a, 5), (b, 0), (c, 9)]).unwrap();
    assert_eq!((ids(&table, a), ids(&table, b), ids(&table, c)), (vec![0, 1], vec![], vec![2, 3, 4]));
    let _ = table.append_batch(&[(b, 1), (a, 4)]).unwrap();
    assert_eq!((ids(&table, a), ids(&table, b)), (vec![0, 1, 6], vec![5]));
}

#[test]
fn a_shared_partial_page_is_copied_by_all_but_its_last_holder() {
    let mut table = table(16, 4);
    let a = with_tokens(&mut table, 6);
    let (b, c) = (table.fork(a).unwrap(), table.fork(a).unwrap());
    let outcome = table.append_batch(&[(c, 1), (a, 1), (b, 1)]).unwrap();
    assert_eq!(pairs(&outcome.copies), [(1, 2), (1, 3)]);
    assert_eq!((ids(&table, a), ids(&table, b), ids(&table, c)), (vec![0, 3], vec![0, 1], vec![0, 2]));
    drop(outcome);
    table.audit().unwrap();
    assert!(table.append_batch(&[(a, 1), (b, 1), (c, 1)]).unwrap().copies.is_empty());
}

#[test]
fn a_holder_outside_the_batch_keeps_its_page() {
    let mut table = table(16, 4);
    let a = with_tokens(&mut table, 6);
    let (b, c) = (table.fork(a).unwrap(), table.fork(a).unwrap());
    let outcome = table.append_batch(&[(a, 1), (b, 9)]).unwrap();
    assert_eq!(pairs(&outcome.copies), [(1, 2), (1, 3)]);
    assert_eq!((ids(&table, b), ids(&table, c)), (vec![0, 3, 4, 5], vec![0, 1]));
}

#[test]
fn a_shared_full_page_is_not_copied() {
    let mut table = table(16, 4);
    let a = with_tokens(&mut table, 8);
    let b = table.fork(a).unwrap();
    assert!(table.append_batch(&[(a, 1), (b, 1)]).unwrap().copies.is_empty());
    // Shortened into the shared page, it has to be.
    table.truncate(b, 7).unwrap();
    assert_eq!(pairs(&table.append(b, 1).unwrap().copies), [(1, 3)]);
}

#[test]
fn the_source_of_a_copy_is_not_reused_before_the_copy_is_done() {
    let mut table = table(3, 4);
    let a = with_tokens(&mut table, 2);
    let b = table.fork(a).unwrap();
    let outcome = table.append(b, 1).unwrap();
    table.release(a).unwrap();
    let c = table.create().unwrap();
    assert!(table.append(c, 8).is_err()); // pages 0 and 2 would do, but 0 is still to be copied
    let fence = ManualFence::new();
    outcome.copies.into_iter().for_each(|copy| copy.release_after(fence.clone()));
    let error = table.append(c, 8).unwrap_err();
    assert_eq!(error, TableError::Pool(PoolError::Exhausted { needed: 2, free: 1, fenced: 1 }));
    fence.pass();
    let _ = table.append(c, 8).unwrap();
    assert_eq!(ids(&table, c), [0, 2]);
}

#[test]
fn a_refused_batch_changes_no_row() {
    let mut table = table(4, 4);
    let (a, b, gone) = (with_tokens(&mut table, 3), with_tokens(&mut table, 4), table.create().unwrap());
    table.release(gone).unwrap();
    let before = table.audit().unwrap();
    let mut refused = |batch: &[(SeqId, usize)]| {
        let error = table.append_batch(batch).unwrap_err();
        assert_eq!(table.audit().unwrap(), before);
        assert_eq!((table.len(a), table.len(b)), (Ok(3), Ok(4)));
        error
    };
    let error = refused(&[(a, 1), (b, 9)]);
    assert_eq!(error, TableError::Pool(PoolError::Exhausted { needed: 3, free: 2, fenced: 0 }));
    assert_eq!(refused(&[(a, 1), (gone, 1)]), TableError::UnknownSequence { seq: gone });
    assert_eq!(refused(&[(a, 1), (b, 1), (a, 0)]), TableError::RepeatedSequence { seq: a, row: 2 });
    let max = i32::MAX as usize;
    for added in [max - 2, usize::MAX] {
        assert_eq!(refused(&[(b, 1), (a, added)]), TableError::TooLong { seq: a, len: 3, added, max });
    }
    assert!(matches!(refused(&[(b, 1), (a, max - 3)]), TableError::Pool(PoolError::Exhausted { .. })));
}

/// Runs stages that take pages; an error must leave the stage to be run again.
fn scenario(table: &mut PageTable, seqs: &mut Vec<SeqId>, stage: &mut usize) -> Result<(), TableError> {
    while *stage < 6 {
        match *stage {
            0 => seqs.push(table.create()?),
            1 => drop(table.append(seqs[0], 6)?),
            2 => seqs.push(table.fork(seqs[0])?),
            3 => drop(table.append(seqs[1], 1)?),
            4 => seqs.push(table.create()?),
            _ => drop(table.append_batch(&[(seqs[0], 3), (seqs[1], 9), (seqs[2], 4)])?),
        }
        *stage += 1;
    }
    Ok(())
}

#[test]
fn each_lease_may_fail_once_and_its_retry_succeeds() {
    let mut undisturbed = table(16, 4);
    let mut seqs = Vec::new();
    scenario(&mut undisturbed, &mut seqs, &mut 0).unwrap();
    for n in 0.. {
        let mut table = table(16, 4);
        let (mut again, mut stage) = (Vec::new(), 0);
        table.pool().set_failure_plan(Some(FailurePlan::nth(n)));
        let first = scenario(&mut table, &mut again, &mut stage);
        if !table.pool().failure_plan().is_some_and(|plan| plan.has_fired()) {
            assert_eq!((first, n), (Ok(()), 3)); // three appends take pages
            break;
        }
        assert!(matches!(first, Err(TableError::Pool(PoolError::Exhausted { .. }))));
        table.audit().unwrap();
        scenario(&mut table, &mut again, &mut stage).unwrap();
        for (seq, again) in seqs.iter().zip(&again) {
            assert_eq!(ids(&undisturbed, *seq), ids(&table, *again));
        }
        again.iter().for_each(|seq| table.release(*seq).unwrap());
        assert_eq!(table.audit().unwrap().pool.counts.free, 16);
    }
}

#[test]
fn a_lease_that_does_not_fit_is_given_back() {
    let mut table = table(8, 4);
    let foreign = PagePool::new(8, PageSize::new(4).unwrap()).unwrap().lease(1).unwrap();
    let error = table.adopt(foreign, 3).unwrap_err();
    assert_eq!(error.reason(), &TableError::Pool(PoolError::ForeignLease));
    assert_eq!(error.into_lease().len(), 1);
    for (pages, len) in [(2, 4), (2, 9), (0, 1), (1, 0), (1, usize::MAX)] {
        let lease = table.pool().lease(pages).unwrap();
        let lease = table.adopt(lease, len).unwrap_err().into_lease();
        assert_eq!((lease.len(), table.num_sequences()), (pages, 0));
    }
    let lease = table.pool().lease(2).unwrap();
    let seq = table.adopt(lease, 5).unwrap();
    assert_eq!((table.len(seq), ids(&table, seq)), (Ok(5), vec![0, 1]));
}

#[test]
fn a_stale_sequence_is_refused_by_every_call() {
    let mut table = table(8, 4);
    let seq = with_tokens(&mut table, 5);
    table.release(seq).unwrap();
    let other = with_tokens(&mut table, 2);
    let unknown = TableError::UnknownSequence { seq };
    assert_eq!(table.release(seq), Err(unknown.clone()));
    assert_eq!(table.release_after(seq, ManualFence::new()), Err(unknown.clone()));
    assert_eq!(table.truncate(seq, 0), Err(unknown.clone()));
    assert_eq!(table.truncate_after(seq, 0, ManualFence::new()), Err(unknown.clone()));
    assert_eq!(table.fork(seq), Err(unknown.clone()));
    assert_eq!(table.append(seq, 1).unwrap_err(), unknown);
    assert_eq!(table.slot(seq, 0), Err(unknown.clone()));
    assert_eq!(table.pages(seq), Err(unknown.clone()));
    assert_eq!(table.lease(seq).unwrap_err(), unknown);
    let error = table.step_tables(&[(other, 1), (seq, 0)], &mut StepTables::new()).unwrap_err();
    assert_eq!(error, StepError::UnknownSequence { row: 1, seq });
    assert_eq!(table.rectangular(&[seq], None).unwrap_err(), StepError::UnknownSequence { row: 0, seq });
    assert_eq!(table.audit().unwrap().num_sequences, 1);
}

#[test]
fn a_mixed_batch_has_the_tables_of_the_convention() {
    // Page size 1: a prefills 6, b hits 4 and computes 3, c holds 8 and decodes 1, d is idle.
    let mut table = table(64, 1);
    let (donor, c) = (with_tokens(&mut table, 4), with_tokens(&mut table, 8));
    let prefix = table.lease(donor).unwrap().share_all();
    let b = table.adopt(prefix, 4).unwrap();
    let (a, d) = (table.create().unwrap(), table.create().unwrap());
    let _ = table.append_batch(&[(a, 6), (b, 3), (c, 1), (d, 0)]).unwrap();
    let mut tables = StepTables::new();
    table.step_tables(&[(a, 6), (b, 3), (c, 1), (d, 0)], &mut tables).unwrap();
    assert_eq!(tables.qo_indptr, [0, 6, 9, 10, 10]);
    assert_eq!(tables.kv_indptr, [0, 6, 13, 22, 22]);
    let pages: Vec<i32> = (12..18).chain(0..4).chain(18..21).chain(4..12).chain([21]).collect();
    assert_eq!(tables.kv_indices, pages);
    assert_eq!(tables.kv_last_page_len, [1, 1, 1, 0]);
    assert_eq!(tables.raw_slot_mapping(), [12, 13, 14, 15, 16, 17, 18, 19, 20, 21]);
    assert_eq!(tables.last_indices().collect::<Vec<_>>(), [Some(5), Some(8), Some(9), None]);
    let rect = table.rectangular(&[b, d], Some(8)).unwrap();
    assert_eq!(rect.row(0), [0, 1, 2, 3, 18, 19, 20, RectTable::TAIL]);
    assert_eq!(rect.row(1), [RectTable::TAIL; 8]);
    assert_eq!(table.rectangular(&[b, c], None).unwrap().width, 9);
    assert_eq!(table.rectangular(&[], None).unwrap().entries, []);
    let error = table.rectangular(&[b, c], Some(8)).unwrap_err();
    assert_eq!(error, StepError::RowTooNarrow { row: 1, pages: 9, width: 8 });
}

#[test]
fn warm_tables_are_built_in_place_and_an_error_leaves_them() {
    let mut table = table(64, 4);
    let (a, b) = (with_tokens(&mut table, 50), with_tokens(&mut table, 9));
    let mut tables = StepTables::new();
    table.step_tables(&[(a, 50), (b, 9)], &mut tables).unwrap();
    let (before, pointers) = (tables.clone(), (tables.kv_indices.as_ptr(), tables.slot_mapping.as_ptr()));
    let error = table.step_tables(&[(b, 1), (a, 51)], &mut tables).unwrap_err();
    assert_eq!(error, StepError::QueryTooLong { row: 1, seq: a, q_len: 51, kv_len: 50 });
    assert_eq!(tables, before);
    table.step_tables(&[(b, 1), (a, 1)], &mut tables).unwrap();
    assert_eq!(tables.num_requests(), 2);
    assert_eq!((tables.kv_indices.as_ptr(), tables.slot_mapping.as_ptr()), pointers);
}

#[test]
fn sums_and_lengths_end_at_i32_max() {
    let mut wide = table(1, 1 << 30);
    let a = with_tokens(&mut wide, 1 << 30);
    let b = wide.fork(a).unwrap();
    let error = wide.append(a, 1 << 30).unwrap_err();
    assert_eq!(error, TableError::TooLong { seq: a, len: 1 << 30, added: 1 << 30, max: i32::MAX as usize });
    let last = wide.slot(a, (1 << 30) - 1).unwrap();
    assert_eq!(last.raw(), (1 << 30) - 1);
    let mut tables = StepTables::new();
    let error = wide.step_tables(&[(a, 1 << 30), (b, 1 << 30)], &mut tables).unwrap_err();
    assert_eq!(error, StepError::Overflow { what: "query tokens", row: 1 });

    let mut many = table(1 << 16, 1);
    let seq = with_tokens(&mut many, 1 << 16);
    let error = many.step_tables(&vec![(seq, 0); 1 << 15], &mut tables).unwrap_err();
    assert_eq!(error, StepError::Overflow { what: "pages", row: (1 << 15) - 1 });
    let error = many.rectangular(&[seq, seq], Some(1 << 30)).unwrap_err();
    assert_eq!(error, StepError::TableTooLarge { rows: 2, width: 1 << 30, max: i32::MAX as usize });
    assert!(many.rectangular(&[seq, seq], Some(usize::MAX)).is_err());
}

#[test]
fn a_sequence_moves_to_a_shared_prefix_whole_or_not_at_all() {
    let mut table = table(16, 4);
    let (first, second) = (with_tokens(&mut table, 8), with_tokens(&mut table, 11));
    let shared = table.lease(first).unwrap().share_all();
    let replaced = table.replace_prefix(second, shared).unwrap();
    assert_eq!((ids(&table, second), table.len(second)), (vec![0, 1, 4], Ok(11)));
    assert_eq!(replaced.pages().iter().map(|page| page.raw()).collect::<Vec<_>>(), [2, 3]);
    let fence = ManualFence::new();
    replaced.release_after(fence.clone());
    assert_eq!(table.pool().counts().fenced, 2);
    fence.pass();
    table.pool().reap();
    assert_eq!(table.audit().unwrap().pool.counts.free, 13);

    // The last page of `second` is not whole, so it is not to be replaced.
    let too_long = table.lease(second).unwrap().share_all();
    let error = table.replace_prefix(second, too_long).unwrap_err();
    assert_eq!(*error.reason(), TableError::PrefixTooLong { seq: second, whole_pages: 2, pages: 3 });
    drop(error);
    let foreign = PagePool::new(4, PageSize::new(4).unwrap()).unwrap().lease(1).unwrap();
    let error = table.replace_prefix(second, foreign).unwrap_err();
    assert_eq!(*error.reason(), TableError::Pool(PoolError::ForeignLease));
    assert_eq!(error.into_lease().len(), 1);
    table.release(first).unwrap();
    let lease = table.lease(second).unwrap().share(0..1).unwrap();
    let error = table.replace_prefix(first, lease).unwrap_err();
    assert_eq!(*error.reason(), TableError::UnknownSequence { seq: first });
    assert_eq!(ids(&table, second), [0, 1, 4]);
}

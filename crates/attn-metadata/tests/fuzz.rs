//! Random bytes as raw tables: building a batch returns `Ok` or `Err`, never panics, and what is accepted holds.

#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicUsize, Ordering};

use attn_metadata::{Batch, PoolShape, RawBatch};
use kvpool::{PageSize, Slot};
use proptest::prelude::*;

static ACCEPTED: AtomicUsize = AtomicUsize::new(0);

#[test]
fn random_tables_never_panic() {
    build_from_random_tables();
    // The generator must reach what lies behind the checks too.
    let accepted = ACCEPTED.load(Ordering::Relaxed);
    assert!((2_000..90_000).contains(&accepted), "{accepted} of 100000 accepted");
}

/// Numbers that are often in range, so that deep checks are reached, and often at the edges.
fn entry() -> impl Strategy<Value = i32> {
    prop_oneof![
        8 => 0..6i32,
        2 => -2..40i32,
        1 => any::<i32>(),
        1 => prop_oneof![Just(i32::MIN), Just(i32::MAX), Just(i32::MAX - 1)],
    ]
}

fn table(max_len: usize) -> impl Strategy<Value = Vec<i32>> {
    prop::collection::vec(entry(), 0..max_len)
}

/// Offsets that mostly are sound.
fn indptr() -> impl Strategy<Value = Vec<i32>> {
    let sound = prop::collection::vec(0..4i32, 0..6).prop_map(|lens| {
        let mut offsets = vec![0];
        offsets.extend(lens.iter().scan(0, |sum, len| {
            *sum += len;
            Some(*sum)
        }));
        offsets
    });
    prop_oneof![6 => sound, 1 => table(8)]
}

fn check(batch: &Batch, pool: PoolShape) {
    for request in batch.requests() {
        assert_eq!(request.num_pages, request.kv_len.div_ceil(pool.page_size.get()));
        assert!(batch.pages(request).iter().all(|&p| u32::try_from(p).unwrap() < pool.num_pages));
        assert!(request.q_start + request.q_len <= batch.num_used_rows());
        if request.kv_len > 0 {
            let _ = batch.page_of(request, request.kv_len - 1);
        }
        if let Some(mask) = batch.custom_mask()
            && request.q_len > 0
            && request.kv_len > 0
        {
            let _ = mask.is_visible(request, request.q_len - 1, request.kv_len - 1);
        }
    }
    assert!(batch.num_used_rows() <= batch.num_rows());
    if let Some(slots) = batch.slot_mapping() {
        assert_eq!(slots.len(), batch.num_rows() as usize);
        let mut used: Vec<_> = slots.iter().filter_map(|s| s.index()).collect();
        assert!(used.iter().all(|&s| (s as u64) < pool.num_slots()));
        used.sort_unstable();
        assert!(used.windows(2).all(|w| w[0] < w[1]));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100_000, failure_persistence: None, ..ProptestConfig::default() })]

    fn build_from_random_tables(
        pool in (prop_oneof![4 => 0..12u32, 1 => any::<u32>()], prop_oneof![4 => 1..5u32, 1 => 1..=u32::MAX]),
        num_rows in prop_oneof![6 => 0..20usize, 1 => any::<usize>()],
        qo_indptr in indptr(),
        kv_indptr in indptr(),
        kv_indices in table(16),
        kv_last_page_len in table(6),
        slots in prop::option::of(table(20)),
        custom_mask in prop::option::of(prop::collection::vec(any::<u8>(), 0..8)),
        fit in 0..4u32,
    ) {
        let Ok(page_size) = PageSize::new(pool.1) else { return Ok(()) };
        let pool = PoolShape { num_pages: pool.0, page_size };
        let (mut kv_indptr, mut kv_indices, mut last, mut num_rows) = (kv_indptr, kv_indices, kv_last_page_len, num_rows);
        let mut slots: Option<Vec<Slot>> = slots.map(|s| s.into_iter().map(Slot::from_raw).collect());
        // The higher, the more fits together, so that ever later checks are what fails, if anything.
        if fit >= 1 {
            let end = |t: &Vec<i32>| t.last().copied().and_then(|e| usize::try_from(e).ok()).unwrap_or(0).min(64);
            kv_indptr.resize(qo_indptr.len(), kv_indptr.last().copied().unwrap_or(0));
            kv_indices.resize(end(&kv_indptr), 1);
            last.resize(qo_indptr.len().saturating_sub(1), 1);
            num_rows = end(&qo_indptr) + num_rows % 3;
            if let Some(slots) = &mut slots {
                slots.resize(num_rows, Slot::PADDING);
            }
        }
        if fit >= 2 {
            kv_indices.iter_mut().for_each(|page| *page = page.rem_euclid(12));
            for (last, pages) in last.iter_mut().zip(kv_indptr.windows(2)) {
                *last = if pages[0] == pages[1] { 0 } else { last.rem_euclid(pool.page_size.get().min(9).cast_signed()) + 1 };
            }
        }
        if fit >= 3 {
            slots.iter_mut().flatten().for_each(|slot| *slot = Slot::PADDING);
        }
        let custom_mask = custom_mask.filter(|_| fit < 3 || num_rows % 2 == 0);
        let raw = RawBatch {
            num_rows,
            qo_indptr: &qo_indptr,
            kv_indptr: &kv_indptr,
            kv_indices: &kv_indices,
            kv_last_page_len: &last,
            slot_mapping: slots.as_deref(),
            custom_mask: custom_mask.as_deref(),
        };
        match Batch::from_raw(pool, &raw) {
            Ok(batch) => {
                check(&batch, pool);
                ACCEPTED.fetch_add(1, Ordering::Relaxed);
            }
            Err(error) => prop_assert!(!error.violations().is_empty() && !error.to_string().is_empty()),
        }
    }
}

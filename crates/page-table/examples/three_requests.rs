//! One step over a prefill, a request with a shared prefix, and a decode.
//!
//! `cargo run -p page-table --example three_requests`

use kvpool::{PagePool, PageSize};
use page_table::{PageTable, StepTables};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut table = PageTable::new(PagePool::new(64, PageSize::new(4)?)?);

    // Earlier steps: a finished prompt of 6 tokens, and a request that holds 8.
    let (donor, decoding) = (table.create()?, table.create()?);
    drop(table.append_batch(&[(donor, 6), (decoding, 8)])?);

    // This step. The second request starts from the donor's 6 tokens, so its partial page is copied on write.
    let (prefill, sharing) = (table.create()?, table.fork(donor)?);
    let requests = [(prefill, 6), (sharing, 3), (decoding, 1)];
    let outcome = table.append_batch(&requests)?;
    for copy in &outcome.copies {
        assert_eq!((copy.from.raw(), copy.to.raw()), (1, 6)); // copy_page of every layer goes here
    }
    drop(outcome);

    let mut tables = StepTables::new();
    table.step_tables(&requests, &mut tables)?;
    assert_eq!(tables.qo_indptr, [0, 6, 9, 10]);
    assert_eq!(tables.kv_indptr, [0, 2, 5, 8]);
    assert_eq!(tables.kv_indices, [4, 5, 0, 6, 7, 2, 3, 8]);
    assert_eq!(tables.kv_last_page_len, [2, 1, 1]);
    assert_eq!(tables.raw_slot_mapping(), [16, 17, 18, 19, 20, 21, 26, 27, 28, 32]);
    assert_eq!(tables.last_indices().collect::<Vec<_>>(), [Some(5), Some(8), Some(9)]);

    for (seq, _) in requests {
        table.release(seq)?;
    }
    table.release(donor)?;
    assert_eq!(table.audit()?.pool.counts.free, 64);
    Ok(())
}

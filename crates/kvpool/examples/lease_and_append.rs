//! Leases pages, writes two tokens, shares them, and copies on write.
//!
//! `cargo run -p kvpool --example lease_and_append`

use kvpool::{HostKv, HostTensor, KvFormat, KvLayout, KvPageShape, KvScales, PagePool, PageSize, Slot};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let page_size = PageSize::new(4)?;
    let page = KvPageShape { page_size, num_kv_heads: 1, head_dim_k: 2, head_dim_v: 2 };
    let pool = PagePool::new(8, page_size)?;
    let format = KvFormat::Fp8E4m3(KvScales::new(0.5, 2.0)?);
    let mut layer = HostKv::new(page.with_pages(pool.num_pages())?, KvLayout::Nhd, format)?;

    // A request of two tokens; a third row is padding.
    let mut lease = pool.lease(page_size.pages_for(2))?;
    let slot = |lease: &kvpool::Lease, offset| Slot::new(lease.pages()[0], offset, page_size).ok_or("beyond i32");
    let slots = [slot(&lease, 0)?, slot(&lease, 1)?, Slot::PADDING];
    let values = [1.0f32, 2.0, 3.0, 4.0, 9.0, 9.0];
    let rows = HostTensor::packed(&values[..], [3, 1, 2])?;
    layer.append(&slots, &rows, Some(&rows))?;

    // A second holder of the page; before the first writes on, it gets a page of its own.
    let shared = lease.share_all();
    if let Some(copy) = lease.make_private(0)? {
        layer.copy_page(copy.from, copy.to)?;
    }
    let mut out = [0.0; 2];
    layer.read_k(slot(&lease, 1)?, 0, &mut out);
    assert_eq!(out, [3.0, 4.0]);
    assert_ne!(lease.pages(), shared.pages());

    drop((lease, shared));
    assert_eq!(pool.audit()?.counts.free, 8);
    Ok(())
}

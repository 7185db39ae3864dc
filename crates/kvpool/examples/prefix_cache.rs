//! Two requests with one system prompt: the second finds its pages, and both share them; then the pool runs short.
//!
//! `cargo run -p kvpool --example prefix_cache`

use kvpool::{PagePool, PageSize, PrefixCache, PrefixConfig, PrefixKey};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let pool = PagePool::new(8, PageSize::new(4)?)?;
    let mut cache = PrefixCache::new(pool, PrefixConfig::default())?;
    let system = [11, 12, 13, 14, 15, 16, 17, 18];

    // The first request finds nothing, computes its 10 tokens into pages of its own, and leaves the two whole ones.
    let first = [&system[..], &[21, 22]].concat();
    assert_eq!(cache.match_prefix(&PrefixKey::new(&first)).num_tokens, 0);
    let lease = cache.lease(3)?;
    let inserted = cache.insert(&PrefixKey::new(&first), &lease)?;
    assert_eq!((inserted.num_new_pages, inserted.num_duplicates), (2, 0));
    drop((inserted, lease));

    // The second finds 8 of its 13 tokens. While it lives, their pages are not evicted.
    let second = [&system[..], &[31, 32, 33, 34, 35]].concat();
    let found = cache.match_prefix(&PrefixKey::new(&second));
    assert_eq!(found.num_tokens, 8);
    let mut lease = found.lease;
    lease.append(&mut cache.lease(2)?)?;
    drop(cache.insert(&PrefixKey::new(&second), &lease)?);
    let size = cache.size_info();
    assert_eq!((size.free, size.evictable, size.locked), (4, 0, 4));

    // Once it is done, all that is cached can make room: the end of the longest-unused run first.
    drop(lease);
    let large = cache.lease(6)?;
    assert_eq!((large.len(), cache.peek(&PrefixKey::new(&second))), (6, 8));
    assert_eq!(cache.counters().evicted_pages, 1);
    cache.audit()?;
    Ok(())
}

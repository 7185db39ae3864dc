//! What the prefix cache itself costs: rounds of match, lease, insert and free over a full pool, timed one by one.
//!
//! `cargo run --release -p kvpool --example prefix_throughput -- [PAGES] [ROUNDS]`
#![allow(clippy::print_stdout)] // it reports to people

use std::time::Instant;

use kvpool::{EvictionPolicy, PageHash, PagePool, PageSize, PrefixCache, PrefixConfig, PrefixKey, hash_page};

/// A prompt: a system prompt of 16 pages that one in 64 share, then pages of its own.
const SHARED_PAGES: usize = 16;
const OWN_PAGES: usize = 48;
const PAGE_TOKENS: usize = 16;

fn prompt(number: u64) -> Vec<u32> {
    let system = number % 64;
    let token = |seed: u64, at: usize| {
        let [a, b, c, ..] = hash_page(PageHash(seed ^ ((at as u64) << 32)), &[]).0.to_le_bytes();
        u32::from_le_bytes([a, b, c, 0])
    };
    let shared = (0..SHARED_PAGES * PAGE_TOKENS).map(|at| token(system, at));
    shared.chain((0..OWN_PAGES * PAGE_TOKENS + 1).map(|at| token(1_000_000 + number, at))).collect()
}

/// Times of one operation in nanoseconds.
#[derive(Default)]
struct Times(Vec<u64>);

impl Times {
    fn time<T>(&mut self, operation: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = operation();
        self.0.push(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
        result
    }

    fn report(&mut self, what: &str, pages: usize) {
        self.0.sort_unstable();
        let at = |permille: usize| self.0[(self.0.len() - 1) * permille / 1000] as f64 / 1000.0;
        let mean = self.0.iter().sum::<u64>() as f64 / self.0.len() as f64;
        let (p50, p99, p999) = (at(500), at(990), at(999));
        let per_page = mean / pages as f64;
        println!("{what:<28} {p50:>9.1} {p99:>9.1} {p999:>9.1} {:>9.1} {per_page:>12.0}", at(1000));
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1).map(|argument| argument.parse::<u64>());
    let num_pages = u32::try_from(arguments.next().transpose()?.unwrap_or(1_000_000))?;
    let num_rounds = arguments.next().transpose()?.unwrap_or(40_000);
    let page_size = PageSize::new(u32::try_from(PAGE_TOKENS)?)?;
    let config = PrefixConfig { policy: EvictionPolicy::Lru, ..PrefixConfig::default() };
    let mut cache = PrefixCache::new(PagePool::new(num_pages, page_size)?, config)?;
    let [mut hits, mut takes, mut inserts, mut frees] = [(); 4].map(|()| Times::default());
    let num_warm = u64::from(num_pages) / OWN_PAGES as u64 + 1000;
    let start = Instant::now();
    for number in 0..num_warm + num_rounds {
        let tokens = prompt(number);
        let key = PrefixKey::new(&tokens);
        let found = hits.time(|| cache.match_prefix(&key));
        let mut lease = found.lease;
        let num_missing = SHARED_PAGES + OWN_PAGES - lease.len();
        let mut rest = takes.time(|| cache.lease(num_missing))?;
        lease.append(&mut rest)?;
        drop(inserts.time(|| cache.insert(&key, &lease))?);
        frees.time(|| drop((lease, rest)));
        if number == num_warm {
            [&mut hits, &mut takes, &mut inserts, &mut frees].into_iter().for_each(|times| times.0.clear());
        }
    }
    let (size, counters) = (cache.size_info(), cache.counters());
    println!("{num_pages} pages of {PAGE_TOKENS} tokens, {} cached in {} runs", size.cached, size.num_nodes);
    println!(
        "{num_rounds} rounds, {} pages evicted, {:.1} s in all",
        counters.evicted_pages,
        start.elapsed().as_secs_f64()
    );
    println!("{:<28} {:>9} {:>9} {:>9} {:>9} {:>12}", "microseconds", "p50", "p99", "p99.9", "max", "ns per page");
    hits.report("match 16 of 64 pages", SHARED_PAGES);
    takes.report("evict and lease 48 pages", OWN_PAGES);
    inserts.report("insert 64 pages, 48 new", SHARED_PAGES + OWN_PAGES);
    frees.report("free 64 pages", SHARED_PAGES + OWN_PAGES);
    Ok(())
}

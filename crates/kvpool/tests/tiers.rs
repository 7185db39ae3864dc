//! The host tier over host layers: what is evicted keeps its bytes and comes back with them, in every layer.

#![allow(clippy::unwrap_used)] // in helpers; clippy knows only #[test] functions

use kvpool::{
    CopyPageError, HostKv, HostLayers, HostTensor, KvFormat, KvLayout, KvPageShape, Lease, PageId, PagePool, PageSize,
    PrefixCache, PrefixConfig, PrefixKey, Slot, TieredCache,
};

const PAGE: usize = 2;
const NUM_LAYERS: u8 = 3;

struct Engine {
    cache: TieredCache,
    device: Vec<HostKv>,
    host: Vec<HostKv>,
}

fn layers(num_pages: u32, layout: KvLayout) -> Vec<HostKv> {
    let page = KvPageShape { page_size: PageSize::new(2).unwrap(), num_kv_heads: 2, head_dim_k: 1, head_dim_v: 3 };
    let layer = HostKv::new(page.with_pages(num_pages).unwrap(), layout, KvFormat::F32).unwrap();
    (0..NUM_LAYERS).map(|_| layer.clone()).collect()
}

impl Engine {
    fn new(num_pages: u32, num_host_pages: u32) -> Engine {
        let pool = PagePool::new(num_pages, PageSize::new(2).unwrap()).unwrap();
        let cache = PrefixCache::new(pool, PrefixConfig::default()).unwrap();
        let cache = TieredCache::new(cache, num_host_pages).unwrap();
        let (device, host) = (layers(num_pages, KvLayout::Nhd), layers(num_host_pages, KvLayout::Hnd));
        Engine { cache, device, host }
    }

    /// Runs a prompt: returns the pages and how many tokens were found.
    fn run(&mut self, tokens: &[u32]) -> (Lease, usize) {
        let mut tier = HostLayers { device: &mut self.device, host: &mut self.host };
        let key = PrefixKey::new(tokens);
        let found = self.cache.match_prefix(&key, &mut tier);
        let num_found = found.num_tokens;
        let mut lease = found.lease;
        let mut rest = self.cache.lease(tokens.len().div_ceil(PAGE) - lease.len(), &mut tier).unwrap();
        lease.append(&mut rest).unwrap();
        self.check(&lease, &tokens[..num_found]);
        for (position, token) in tokens.iter().enumerate().skip(num_found) {
            for (layer, kv) in (0u8..).zip(&mut self.device) {
                let [k, v] = [1.0, -1.0].map(|sign| sign * value(*token, layer));
                let (k, v) = ([k, k + 0.5], [v, v, v, v, v, v - 0.5]);
                let k = HostTensor::packed(&k[..], [1, 2, 1]).unwrap();
                kv.append(&[slot(&lease, position)], &k, Some(&HostTensor::packed(&v[..], [1, 2, 3]).unwrap()))
                    .unwrap();
            }
        }
        let inserted = self.cache.insert(&key, &lease, 0).unwrap();
        assert_eq!(inserted.num_duplicates, 0);
        self.cache.audit().unwrap();
        (lease, num_found)
    }

    fn check(&self, lease: &Lease, tokens: &[u32]) {
        for (position, token) in tokens.iter().enumerate() {
            for (layer, kv) in (0u8..).zip(&self.device) {
                let (mut k, mut v) = ([0.0], [0.0; 3]);
                kv.read_k(slot(lease, position), 1, &mut k);
                kv.read_v(slot(lease, position), 1, &mut v);
                let expected = value(*token, layer);
                assert_eq!((k[0], v[2]), (expected + 0.5, -expected - 0.5), "token {position} of layer {layer}");
            }
        }
    }
}

fn value(token: u32, layer: u8) -> f32 {
    f32::from(u16::try_from(token).unwrap()) + f32::from(layer) * 1000.0
}

fn slot(lease: &Lease, position: usize) -> Slot {
    let offset = u32::try_from(position % PAGE).unwrap();
    Slot::new(lease.pages()[position / PAGE], offset, PageSize::new(2).unwrap()).unwrap()
}

fn prompt(label: u32) -> Vec<u32> {
    [1, 2, 3, 4].into_iter().chain((0..5).map(|at| label * 10 + at)).collect()
}

#[test]
fn evicted_pages_come_back_with_their_bytes() {
    let mut engine = Engine::new(6, 32);
    for label in 1..6 {
        let (_, num_found) = engine.run(&prompt(label));
        assert_eq!(num_found, if label == 1 { 0 } else { 4 });
    }
    for label in (1..6).cycle().take(20) {
        let (_, num_found) = engine.run(&prompt(label));
        assert_eq!(num_found, 8, "prompt {label}");
    }
    let counters = *engine.cache.tier_counters();
    assert!(counters.restored_pages >= 30, "{counters:?}");
    assert_eq!((counters.refused_pages, counters.failed_offloads, counters.failed_restores), (0, 0, 0));
    assert_eq!(counters.offloaded_pages, 12, "each page is copied to the host once");
}

/// Who holds the end of a cached run alone (behind a window, say) leaves its first pages to be given up, and with them all
/// that hangs on them.
#[test]
fn inner_pages_move_to_the_host_too() {
    let mut engine = Engine::new(8, 32);
    // Pages 2 and 3 of 4 whole ones are held on; 0 and 1 are common to both prompts.
    let _held = [1, 2].map(|label| engine.run(&prompt(label)).0.share(2..4).unwrap());
    let (_, num_found) = engine.run(&[7, 8, 9, 10, 11, 12, 13, 14]);
    assert_eq!(num_found, 0);
    let counters = *engine.cache.tier_counters();
    assert_eq!((counters.offloaded_pages, counters.refused_pages), (6, 0), "both prompts are on the host, whole");
}

#[test]
fn both_tiers_have_one_clock() {
    let mut engine = Engine::new(6, 5);
    engine.cache.advance_clock(u64::MAX);
    for label in (1..6).cycle().take(20) {
        drop(engine.run(&prompt(label)));
    }
    assert!(engine.cache.host().counters().evicted_pages > 0);
}

#[test]
fn a_full_tier_gives_up_its_own_pages() {
    let mut engine = Engine::new(6, 5);
    for label in (1..6).cycle().take(40) {
        let (lease, num_found) = engine.run(&prompt(label));
        assert!(num_found == 0 || num_found >= 4);
        assert_eq!(lease.len(), 5);
    }
    assert!(engine.cache.host().counters().evicted_pages > 0);
}

#[test]
fn a_copy_that_fails_costs_the_content_and_nothing_else() {
    let mut engine = Engine::new(6, 32);
    drop(engine.run(&prompt(1)));
    let host = std::mem::take(&mut engine.host);
    drop(engine.run(&prompt(2)));
    drop(engine.run(&prompt(3)));
    assert!(engine.cache.tier_counters().failed_offloads > 0);
    assert_eq!(engine.cache.tier_counters().offloaded_pages, 0);
    engine.host = host;
    assert_eq!(engine.run(&prompt(4)).1, 4);
    drop(engine.run(&prompt(5)));
    engine.host.clear();
    assert_eq!(engine.run(&prompt(3)).1, 4);
    assert!(engine.cache.tier_counters().failed_restores > 0);
    engine.cache.reset();
    assert_eq!(engine.cache.audit().unwrap().map(|audit| audit.size.cached), [0, 0]);
}

#[test]
fn only_like_pages_are_copied_between_caches() {
    let page = |id| PageId::new(id).unwrap();
    let (mut nhd, hnd) = (layers(2, KvLayout::Nhd).remove(0), layers(3, KvLayout::Hnd).remove(0));
    assert_eq!(nhd.copy_page_from(&hnd, page(2), page(1)), Ok(()));
    let beyond = nhd.copy_page_from(&hnd, page(3), page(1)).unwrap_err();
    assert_eq!(beyond, CopyPageError::PageOutOfRange { page: page(3), num_pages: 3 });
    let beyond = nhd.copy_page_from(&hnd, page(1), page(2)).unwrap_err();
    assert_eq!(beyond, CopyPageError::PageOutOfRange { page: page(2), num_pages: 2 });
    let half = HostKv::new(hnd.shape(), KvLayout::Hnd, KvFormat::F16).unwrap();
    assert_eq!(nhd.copy_page_from(&half, page(0), page(0)), Err(CopyPageError::OtherPages));
}

//! Contracts of the prefix cache that a random program does not aim at: the order of eviction under each policy, what a
//! match may and may not do, refusals, fences, events, resets.

#![allow(clippy::unwrap_used)] // in helpers; clippy knows only #[test] functions

use std::collections::BTreeSet;

use kvpool::{
    EvictionPolicy, ExtraKey, FailurePlan, Lease, ManualFence, PageHash, PagePool, PageSize, PrefixCache, PrefixConfig,
    PrefixError, PrefixEvent, PrefixKey,
};

const PAGE: usize = 4;

fn cache(num_pages: u32, policy: EvictionPolicy) -> PrefixCache {
    let pool = PagePool::new(num_pages, PageSize::new(4).unwrap()).unwrap();
    PrefixCache::new(pool, PrefixConfig { policy, max_events: 1000, ..PrefixConfig::default() }).unwrap()
}

/// `num_pages` whole pages of tokens that start with `label`; two labels share no page.
fn tokens(label: u32, num_pages: usize) -> Vec<u32> {
    (0..num_pages * PAGE).map(|at| label * 1000 + u32::try_from(at).unwrap()).collect()
}

fn ids(lease: &Lease) -> Vec<u32> {
    lease.pages().iter().map(|page| page.raw()).collect()
}

/// Computes and inserts a prompt, and lets it go.
fn store(cache: &mut PrefixCache, tokens: &[u32], priority: u8) {
    let key = PrefixKey::new(tokens);
    let lease = cache.lease(tokens.len() / PAGE).unwrap();
    drop(cache.insert_with_priority(&key, &lease, priority).unwrap());
    drop(lease);
    cache.audit().unwrap();
}

/// Whole pages that are cached, by a key with one token more.
fn cached_pages(cache: &PrefixCache, tokens: &[u32]) -> usize {
    let longer = [tokens, &[u32::MAX]].concat();
    cache.peek(&PrefixKey::new(&longer)) / PAGE
}

#[test]
fn a_match_finds_the_longest_prefix_and_leaves_a_token_to_compute() {
    let mut cache = cache(16, EvictionPolicy::Lru);
    let prompt = tokens(1, 3);
    store(&mut cache, &prompt, 0);
    let found = cache.match_prefix(&PrefixKey::new(&prompt));
    assert_eq!((found.num_tokens, ids(&found.lease)), (8, vec![0, 1]));
    for (len, expected) in [(0, 0), (1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)] {
        assert_eq!(cache.peek(&PrefixKey::new(&prompt[..len])), expected, "{len} tokens");
    }
    let longer = [&prompt[..], &[7, 7]].concat();
    assert_eq!(cache.match_prefix(&PrefixKey::new(&longer)).num_tokens, 12);
    let mut other = longer;
    other[6] += 1;
    assert_eq!(cache.match_prefix(&PrefixKey::new(&other)).num_tokens, 4);
    let counters = *cache.counters();
    assert_eq!((counters.lookups, counters.hits, counters.lookup_tokens, counters.hit_tokens), (3, 3, 40, 24));
}

#[test]
fn a_match_splits_nothing() {
    let mut cache = cache(16, EvictionPolicy::Lru);
    let prompt = tokens(1, 4);
    store(&mut cache, &prompt, 0);
    let before = cache.size_info();
    assert_eq!((before.num_nodes, before.evictable), (1, 4));
    let found = cache.match_prefix(&PrefixKey::new(&prompt[..9]));
    let size = cache.size_info();
    assert_eq!((size.num_nodes, size.evictable, size.locked), (1, 2, 2));
    assert_eq!(cache.evict(9), 2, "the part of the run behind the match is not locked");
    drop(found);
    assert_eq!(cached_pages(&cache, &prompt), 2);
    cache.audit().unwrap();
}

#[test]
fn an_insert_splits_where_it_leaves_and_hands_duplicates_back() {
    let mut cache = cache(16, EvictionPolicy::Lru);
    let first = tokens(1, 3);
    store(&mut cache, &first, 0);
    let second = [&first[..8], &tokens(2, 2)[..]].concat();
    let own = cache.lease(4).unwrap();
    assert_eq!(ids(&own), [3, 4, 5, 6]);
    let inserted = cache.insert(&PrefixKey::new(&second), &own).unwrap();
    assert_eq!((inserted.num_cached_tokens, inserted.num_new_pages, inserted.num_duplicates), (8, 2, 2));
    assert_eq!(ids(&inserted.lease), [0, 1, 5, 6]);
    assert_eq!(cache.size_info().num_nodes, 3);
    drop(own);
    assert_eq!(cache.pool().counts().free, 16 - 5);
    drop(inserted);
    cache.audit().unwrap();
    assert_eq!((cached_pages(&cache, &first), cached_pages(&cache, &second)), (3, 4));
}

#[test]
fn a_growing_request_stays_one_run() {
    let mut cache = cache(16, EvictionPolicy::Lru);
    let prompt = tokens(1, 5);
    let mut own = cache.lease(1).unwrap();
    for num_pages in 1..=5 {
        let inserted =
            cache.insert(&PrefixKey::new(&prompt[..num_pages * PAGE + 3 * usize::from(num_pages < 5)]), &own);
        assert_eq!(inserted.unwrap().num_new_pages, 1);
        assert_eq!(cache.size_info().num_nodes, 1);
        own.extend(1).unwrap();
    }
    cache.audit().unwrap();
}

#[test]
fn the_least_recently_used_leaf_goes_first_and_from_its_end() {
    let mut cache = cache(8, EvictionPolicy::Lru);
    let (a, b, c) = (tokens(1, 3), tokens(2, 2), tokens(3, 3));
    for prompt in [&a, &b, &c] {
        store(&mut cache, prompt, 0);
    }
    drop(cache.match_prefix(&PrefixKey::new(&a)));
    let mut held = vec![cache.lease(1).unwrap()];
    assert_eq!([&a, &b, &c].map(|prompt| cached_pages(&cache, prompt)), [3, 1, 3]);
    held.push(cache.lease(2).unwrap());
    assert_eq!([&a, &b, &c].map(|prompt| cached_pages(&cache, prompt)), [3, 0, 2]);
    held.push(cache.lease(3).unwrap());
    assert_eq!([&a, &b, &c].map(|prompt| cached_pages(&cache, prompt)), [2, 0, 0]);
    cache.audit().unwrap();
}

#[test]
fn a_run_that_others_hang_on_outlives_them() {
    let mut cache = cache(8, EvictionPolicy::Lru);
    let system = tokens(1, 2);
    store(&mut cache, &system, 0);
    let users: Vec<_> = (2..4).map(|label| [&system[..], &tokens(label, 2)[..]].concat()).collect();
    for user in &users {
        let found = cache.match_prefix(&PrefixKey::new(user));
        let mut lease = found.lease;
        lease.append(&mut cache.lease(2).unwrap()).unwrap();
        drop(cache.insert(&PrefixKey::new(user), &lease).unwrap());
    }
    let pages_of = |cache: &PrefixCache| users.iter().map(|user| cached_pages(cache, user)).collect::<Vec<_>>();
    assert_eq!(cache.evict(3), 3);
    assert_eq!(pages_of(&cache), [2, 3]);
    assert_eq!(cache.evict(1), 1);
    assert_eq!(pages_of(&cache), [2, 2]);
    assert_eq!(cache.evict(9), 2);
    assert_eq!(cache.size_info().num_nodes, 0);
    assert_eq!(cache.audit().unwrap().num_roots, 0);
}

#[test]
fn what_was_matched_more_often_stays_under_lfu() {
    let mut cache = cache(8, EvictionPolicy::Lfu);
    let (a, b) = (tokens(1, 2), tokens(2, 2));
    store(&mut cache, &a, 0);
    store(&mut cache, &b, 0);
    for prompt in [&a, &a, &b] {
        drop(cache.match_prefix(&PrefixKey::new(prompt)));
    }
    assert_eq!(cache.evict(2), 2);
    assert_eq!([&a, &b].map(|prompt| cached_pages(&cache, prompt)), [2, 0]);
}

#[test]
fn a_priority_keeps_pages_until_it_has_decayed() {
    let evicted_first = |ticks| {
        let mut cache = cache(8, EvictionPolicy::Priority { half_life: 100 });
        let (precious, plain) = (tokens(1, 2), tokens(2, 2));
        store(&mut cache, &precious, 3);
        cache.advance_clock(ticks);
        store(&mut cache, &plain, 0);
        cache.evict(2);
        [&precious, &plain].map(|prompt| cached_pages(&cache, prompt))
    };
    assert_eq!(evicted_first(290), [2, 0]);
    assert_eq!(evicted_first(310), [0, 2]);
}

#[test]
fn exhaustion_says_where_the_pages_are_and_evicts_nothing() {
    let mut cache = cache(8, EvictionPolicy::Lru);
    store(&mut cache, &tokens(1, 3), 0);
    let held = cache.lease(2).unwrap();
    let fence = ManualFence::new();
    cache.lease(1).unwrap().release_after(fence.clone());
    let before = cache.audit().unwrap();
    let error = PrefixError::Exhausted { needed: 6, free: 2, evictable: 3, locked: 2, fenced: 1 };
    assert_eq!(cache.lease(6).unwrap_err(), error);
    assert_eq!(cache.make_room(6).unwrap_err(), error);
    assert_eq!(error.to_string(), "6 pages needed: 2 free, 3 evictable, 2 in use, 1 waiting for a fence");
    assert_eq!(cache.audit().unwrap(), before);
    assert_eq!(cache.lease(5).unwrap().len(), 5);
    fence.pass();
    drop(held);
    assert_eq!(cache.lease(8).unwrap().len(), 8);
}

#[test]
fn a_planned_failure_evicts_nothing_and_its_retry_succeeds() {
    let mut cache = cache(4, EvictionPolicy::Lru);
    let prompt = tokens(1, 3);
    store(&mut cache, &prompt, 0);
    for n in 0..2 {
        cache.pool().set_failure_plan(Some(FailurePlan::nth(n)));
        for _ in 0..n {
            drop(cache.lease(1).unwrap());
        }
        let before = cache.audit().unwrap();
        assert!(matches!(cache.lease(2), Err(PrefixError::Exhausted { needed: 2, free: 1, evictable: 3, .. })));
        assert_eq!(cache.audit().unwrap(), before);
    }
    assert_eq!(cache.lease(2).unwrap().len(), 2);
    assert_eq!(cached_pages(&cache, &prompt), 2);
}

#[test]
fn a_page_whose_fence_is_pending_is_not_evicted() {
    let mut cache = cache(4, EvictionPolicy::Lru);
    let prompt = tokens(1, 2);
    let lease = cache.lease(2).unwrap();
    drop(cache.insert(&PrefixKey::new(&prompt), &lease).unwrap());
    let fence = ManualFence::new();
    lease.release_after(fence.clone());
    assert_eq!(cache.evict(2), 0);
    assert_eq!(cache.size_info().locked, 2);
    cache.audit().unwrap();
    fence.pass();
    assert_eq!(cache.lease(4).unwrap().len(), 4);
}

#[test]
fn idle_pages_above_held_ones_can_be_had() {
    let mut cache = cache(6, EvictionPolicy::Lru);
    let prompt = tokens(1, 4);
    let fork = [&prompt[..8], &tokens(2, 1)[..]].concat();
    let lease = cache.lease(4).unwrap();
    drop(cache.insert(&PrefixKey::new(&prompt), &lease).unwrap());
    let mut own = cache.match_prefix(&PrefixKey::new(&fork)).lease;
    own.extend(1).unwrap();
    drop(cache.insert(&PrefixKey::new(&fork), &own).unwrap());
    drop(own);
    // A sliding window lets go of the first pages and keeps the last one.
    let window = lease.share(3..4).unwrap();
    drop(lease);
    let size = cache.size_info();
    assert_eq!((size.free, size.evictable, size.locked), (1, 4, 1));
    cache.audit().unwrap();
    assert_eq!(cache.lease(5).unwrap().len(), 5);
    assert_eq!(cache.counters().forgotten_pages, 1);
    assert_eq!((cached_pages(&cache, &prompt), cached_pages(&cache, &fork)), (0, 0));
    assert_eq!(ids(&window), [3]);
    cache.audit().unwrap();
}

#[test]
fn keys_of_different_adapters_salts_and_contents_share_nothing() {
    let mut cache = cache(32, EvictionPolicy::Lru);
    let prompt = tokens(1, 2);
    let extras = [
        ExtraKey::default(),
        ExtraKey { adapter: Some(7), ..ExtraKey::default() },
        ExtraKey { salt: Some([7; 32]), ..ExtraKey::default() },
        ExtraKey { modality: Some([7; 32]), ..ExtraKey::default() },
    ];
    for extra in extras {
        let key = PrefixKey { tokens: &prompt, extra };
        assert_eq!(cache.peek(&key), 0);
        let lease = cache.lease(2).unwrap();
        assert_eq!(cache.insert(&key, &lease).unwrap().num_duplicates, 0);
    }
    assert_eq!(cache.audit().unwrap().num_roots, 4);
    assert_eq!(cache.evict(8), 8);
    assert_eq!(cache.audit().unwrap().num_roots, 0);
}

#[test]
fn wrong_inserts_are_refused_and_change_nothing() {
    let mut cache = cache(8, EvictionPolicy::Lru);
    let prompt = tokens(1, 2);
    let lease = cache.lease(2).unwrap();
    drop(cache.insert(&PrefixKey::new(&prompt), &lease).unwrap());
    let before = cache.audit().unwrap();
    let long = tokens(1, 3);
    let short = cache.insert(&PrefixKey::new(&long), &lease).unwrap_err();
    assert_eq!(short, PrefixError::LeaseTooShort { needed: 3, pages: 2 });
    let cached = cache.insert(&PrefixKey::new(&tokens(2, 2)), &lease).unwrap_err();
    assert_eq!(cached, PrefixError::PageCached { page: lease.pages()[0] });
    let mut twice = cache.lease(1).unwrap();
    twice.append(&mut twice.share_all()).unwrap();
    let refused = cache.insert(&PrefixKey::new(&tokens(2, 2)), &twice).unwrap_err();
    assert_eq!(refused, PrefixError::PageTwice { page: twice.pages()[0] });
    drop(twice);
    let foreign = PagePool::new(8, PageSize::new(4).unwrap()).unwrap().lease(2).unwrap();
    assert_eq!(cache.insert(&PrefixKey::new(&prompt), &foreign).unwrap_err(), PrefixError::ForeignLease);
    assert_eq!(cache.audit().unwrap(), before);
    let second = PrefixCache::new(cache.pool().clone(), PrefixConfig::default());
    assert_eq!(second.unwrap_err(), PrefixError::SecondCache);
}

#[test]
fn a_reset_forgets_all_and_takes_nothing_from_others() {
    let mut cache = cache(8, EvictionPolicy::Lru);
    let (a, b) = (tokens(1, 2), tokens(2, 2));
    store(&mut cache, &a, 0);
    store(&mut cache, &b, 0);
    let found = cache.match_prefix(&PrefixKey::new(&a));
    cache.reset();
    assert_eq!((cached_pages(&cache, &a), cached_pages(&cache, &b)), (0, 0));
    assert_eq!((found.num_tokens, cache.audit().unwrap().size.free), (4, 7));
    store(&mut cache, &b, 0);
    assert_eq!(cached_pages(&cache, &b), 2);
    let pool = cache.pool().clone();
    drop((cache, found));
    assert_eq!(pool.audit().unwrap().counts.free, 8);
    assert!(PrefixCache::new(pool, PrefixConfig::default()).is_ok());
}

/// What a router makes of events.
fn replay(known: &mut BTreeSet<PageHash>, events: &[PrefixEvent]) {
    for event in events {
        match event {
            PrefixEvent::Stored { parent, pages, .. } => {
                assert!(parent.is_none_or(|parent| known.contains(&parent)));
                pages.iter().for_each(|page| assert!(known.insert(*page)));
            }
            PrefixEvent::Removed { pages } => pages.iter().for_each(|page| assert!(known.remove(page))),
            PrefixEvent::Cleared => known.clear(),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn replayed_events_are_what_is_cached() {
    let mut cache = cache(16, EvictionPolicy::Lru);
    let mut known = BTreeSet::new();
    let system = tokens(1, 2);
    let prompts: Vec<_> = (2..9).map(|label| [&system[..], &tokens(label, 3)[..]].concat()).collect();
    for (turn, prompt) in prompts.iter().enumerate() {
        let mut lease = cache.match_prefix(&PrefixKey::new(prompt)).lease;
        lease.append(&mut cache.lease(5 - lease.len()).unwrap()).unwrap();
        drop(cache.insert(&PrefixKey::new(prompt), &lease).unwrap());
        if turn == 4 {
            cache.reset();
        }
        let batch = cache.drain_events();
        assert_eq!(batch.num_lost, 0);
        replay(&mut known, &batch.events);
        let mut fresh = BTreeSet::new();
        replay(&mut fresh, &cache.snapshot());
        assert_eq!(known, fresh);
        let hashes = cache.config().page_hashes(&PrefixKey::new(prompt), cache.pool().page_size());
        let num_known = hashes.iter().take_while(|hash| known.contains(hash)).count();
        assert_eq!(num_known, cached_pages(&cache, prompt));
    }
    assert!(cache.counters().evicted_pages > 0);
}

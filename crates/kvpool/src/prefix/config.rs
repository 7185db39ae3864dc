//! Owns the choices of a prefix cache: [`EvictionPolicy`], [`PrefixConfig`], and how a run's use becomes a rank.
//! Invariant: a rank depends on the run's use alone and never falls while the run lives, so a queue may hold an old one:
//! it is too low, never too high. There is no wall clock: time is the cache's own count.

use crate::ids::PageSize;
use crate::prefix::key::{PageHash, PrefixKey, hash_page};

/// The hash of a page behind the run that the parent stands for, as [`hash_page`].
pub type PageHashFn = fn(parent: PageHash, tokens: &[u32]) -> PageHash;

/// Which run is given up first, of those that no other hangs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum EvictionPolicy {
    /// The one whose last use is longest ago.
    Lru,
    /// The one that was matched least often; of these, the least recently used.
    Lfu,
    /// The one worth least, where a run of priority `p` that was last used `t` ticks ago is worth `2^(p − t/half_life)`:
    /// each level of priority makes up for `half_life` ticks without use. A half-life of 0 is [`EvictionPolicy::Lru`].
    Priority {
        /// Ticks in which a run loses half its worth. A tick is a match or an insert, or what
        /// [`crate::PrefixCache::advance_clock`] adds.
        half_life: u64,
    },
}

/// The choices of a prefix cache.
#[derive(Debug, Clone, Copy)]
pub struct PrefixConfig {
    /// Which run is given up first.
    pub policy: EvictionPolicy,
    /// Parent of the first page's hash. A random one keeps clients from choosing tokens that collide; caches whose
    /// events go to one router need the same.
    pub seed: u64,
    /// Events kept until they are drained; beyond that the oldest are lost, and counted. 0: no events.
    pub max_events: usize,
    /// The hash function. Any one is correct; a poor one is slow.
    pub hash_page: PageHashFn,
}

impl Default for PrefixConfig {
    /// LRU, seed 0, no events, [`hash_page`].
    fn default() -> PrefixConfig {
        PrefixConfig { policy: EvictionPolicy::Lru, seed: 0, max_events: 0, hash_page }
    }
}

impl PrefixConfig {
    /// The hashes of all whole pages of a key, as the events of a cache with these choices name them: what a router
    /// needs to know which cache has a prefix.
    #[must_use]
    pub fn page_hashes(&self, key: &PrefixKey<'_>, page_size: PageSize) -> Vec<PageHash> {
        let mut parent = key.extra.root_hash(self.seed, self.hash_page);
        let pages = key.tokens.chunks_exact(page_size.get() as usize);
        let next = |page| {
            parent = (self.hash_page)(parent, page);
            parent
        };
        pages.map(next).collect()
    }
}

/// How a run was used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Usage {
    /// Tick of the last match or insert.
    pub(crate) last_use: u64,
    /// Matches.
    pub(crate) num_hits: u64,
    pub(crate) priority: u8,
}

/// The lowest goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank(u64, u64);

impl EvictionPolicy {
    /// Of two leaves the ranks differ: both were last used at different ticks, or one would be above the other.
    pub(crate) fn rank(self, usage: &Usage) -> Rank {
        let worth = match self {
            EvictionPolicy::Lru => 0,
            EvictionPolicy::Lfu => usage.num_hits,
            // The logarithm of the worth, times the half-life, plus the time now, which is the same for all.
            EvictionPolicy::Priority { half_life } => {
                half_life.saturating_mul(usage.priority.into()).saturating_add(usage.last_use)
            }
        };
        Rank(worth, usage.last_use)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_priority_makes_up_for_that_many_half_lives() {
        let rank = |priority, last_use| {
            EvictionPolicy::Priority { half_life: 10 }.rank(&Usage { last_use, num_hits: 9, priority })
        };
        assert!(rank(2, 100) > rank(0, 119));
        assert!(rank(2, 100) < rank(0, 121));
        assert!(rank(1, 5) > rank(0, 14));
        assert!(rank(u8::MAX, u64::MAX) > rank(0, u64::MAX - 1));
    }

    #[test]
    fn frequency_goes_before_recency_only_where_asked() {
        let rank = |policy: EvictionPolicy, num_hits, last_use| policy.rank(&Usage { last_use, num_hits, priority: 0 });
        assert!(rank(EvictionPolicy::Lfu, 2, 1) > rank(EvictionPolicy::Lfu, 1, 9));
        assert!(rank(EvictionPolicy::Lfu, 1, 2) > rank(EvictionPolicy::Lfu, 1, 1));
        assert!(rank(EvictionPolicy::Lru, 2, 1) < rank(EvictionPolicy::Lru, 1, 9));
    }
}

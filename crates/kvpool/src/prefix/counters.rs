//! Owns what a prefix cache counts ([`PrefixCounters`], [`TierCounters`]) and where all pages are ([`SizeInfo`]).
//! Counters only rise. Nothing here decides anything.

use crate::pool::PoolCounts;

/// What happened since the cache was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PrefixCounters {
    /// Matches.
    pub lookups: u64,
    /// Matches that found at least one page.
    pub hits: u64,
    /// Tokens of all keys that were matched.
    pub lookup_tokens: u64,
    /// Tokens that were found.
    pub hit_tokens: u64,
    /// Inserts that were not refused.
    pub inserts: u64,
    /// Pages that became part of the cache.
    pub inserted_pages: u64,
    /// Pages of inserts that the cache had already, as other pages: they were handed back.
    pub duplicate_pages: u64,
    /// Pages that were given up and became free.
    pub evicted_pages: u64,
    /// Pages that were forgotten while others held them, because a page above them was given up.
    pub forgotten_pages: u64,
    /// Resets.
    pub resets: u64,
}

/// What happened between the two tiers since the cache was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TierCounters {
    /// Pages that were copied to the host.
    pub offloaded_pages: u64,
    /// Pages that were copied back.
    pub restored_pages: u64,
    /// Pages that were given up without a copy, because the host had no room.
    pub refused_pages: u64,
    /// Copies to the host that failed; the pages were given up without.
    pub failed_offloads: u64,
    /// Copies back that failed; the match ended before these pages.
    pub failed_restores: u64,
}

/// Where the pages of the pool are: `free + evictable + locked + fenced = total`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SizeInfo {
    /// Pages that can be leased now.
    pub free: usize,
    /// Pages that the cache alone holds: an eviction makes them free.
    pub evictable: usize,
    /// Pages that somebody else holds, cached or not.
    pub locked: usize,
    /// Pages that only a pending fence holds.
    pub fenced: usize,
    /// All pages.
    pub total: usize,
    /// Pages of the cache, a part of `evictable + locked`.
    pub cached: usize,
    /// Runs of the cache.
    pub num_nodes: usize,
}

impl SizeInfo {
    pub(crate) fn new(counts: PoolCounts, cached: usize, num_nodes: usize) -> SizeInfo {
        let PoolCounts { free, leased, evictable, fenced, total, .. } = counts;
        SizeInfo { free, evictable, locked: leased - evictable, fenced, total, cached, num_nodes }
    }
}

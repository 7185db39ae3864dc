//! Owns the second tier: [`TieredCache`], a prefix cache of device pages above one of host pages, and [`HostTier`], what
//! moves the bytes between them.
//! Invariants: a page that is given up is in the host tier before it is free, or was refused and counted; a restored page
//! is matched only after its copy succeeded. The host tier is a prefix cache itself, with the whole path of each run in
//! it, so it has the same order of eviction, the same locks and the same audit. Does not own bytes.

use crate::error::ShapeError;
use crate::ids::PageId;
use crate::lease::Lease;
use crate::pool::PagePool;
use crate::prefix::audit::{PrefixAudit, PrefixAuditError};
use crate::prefix::cache::{Inserted, PrefixCache, PrefixMatch};
use crate::prefix::config::PrefixConfig;
use crate::prefix::counters::TierCounters;
use crate::prefix::error::PrefixError;
use crate::prefix::key::PrefixKey;
use crate::prefix::node::NodeId;
use crate::prefix::tree::Tree;

/// A page to copy, whole, in every layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageCopy {
    /// The page to read.
    pub from: PageId,
    /// The page to write.
    pub to: PageId,
}

/// Moves the bytes of pages between the device and the host.
///
/// When a call returns, its copies are done, or they are ordered before every later use of the pages that it read and
/// wrote (as on a stream that all work goes through).
pub trait HostTier {
    /// Why a copy failed.
    type Error: std::error::Error;

    /// Copies device pages (`from`) to host pages (`to`).
    ///
    /// # Errors
    /// The copies failed; what the host pages hold does not matter.
    fn offload(&mut self, copies: &[PageCopy]) -> Result<(), Self::Error>;

    /// Copies host pages (`from`) to device pages (`to`).
    ///
    /// # Errors
    /// The copies failed; what the device pages hold does not matter.
    fn restore(&mut self, copies: &[PageCopy]) -> Result<(), Self::Error>;
}

/// A prefix cache whose evicted pages move to host memory, and come back when they are matched.
///
/// A copy that fails costs the pages' content and is counted, nothing else: the tokens are computed again.
#[derive(Debug)]
pub struct TieredCache {
    device: PrefixCache,
    host: PrefixCache,
    counters: TierCounters,
}

impl TieredCache {
    /// A tier of `num_host_pages` pages below a cache, with the same choices; it has no events.
    ///
    /// # Errors
    /// [`ShapeError`] where there cannot be a pool of that many pages.
    pub fn new(device: PrefixCache, num_host_pages: u32) -> Result<TieredCache, ShapeError> {
        let pool = PagePool::new(num_host_pages, device.pool().page_size())?;
        let config = PrefixConfig { max_events: 0, ..*device.config() };
        let host = PrefixCache::new(pool, config).expect("a new pool has no prefix cache");
        Ok(TieredCache { device, host, counters: TierCounters::default() })
    }

    /// The cache of device pages, to read.
    #[must_use]
    pub const fn device(&self) -> &PrefixCache {
        &self.device
    }

    /// The cache of device pages. What is evicted through it does not move to the host, and its clock alone advances.
    pub const fn device_mut(&mut self) -> &mut PrefixCache {
        &mut self.device
    }

    /// The cache of host pages, to read.
    #[must_use]
    pub const fn host(&self) -> &PrefixCache {
        &self.host
    }

    /// What happened between the tiers.
    #[must_use]
    pub const fn tier_counters(&self) -> &TierCounters {
        &self.counters
    }

    /// As [`PrefixCache::match_prefix`]; pages that only the host has are brought back, as many as there is room for.
    /// They take pages that are free or evictable, and count as a hit of [`TieredCache::tier_counters`] only.
    pub fn match_prefix(&mut self, key: &PrefixKey<'_>, tier: &mut impl HostTier) -> PrefixMatch {
        let found = self.device.match_prefix(key);
        let page_tokens = self.device.tree.page_tokens();
        let max_pages = key.tokens.len().saturating_sub(1) / page_tokens;
        let num_found = found.lease.len();
        let (on_host, priority) = self.host.hold(key, max_pages);
        let size = self.device.size_info();
        let num_restored = on_host.len().saturating_sub(num_found).min(size.free + size.evictable);
        if num_restored == 0 {
            return found;
        }
        let Ok(restored) = self.lease(num_restored, tier) else { return found };
        if tier.restore(&copies(&on_host.pages()[num_found..], restored.pages())).is_err() {
            self.counters.failed_restores += num_restored as u64;
            return found;
        }
        self.counters.restored_pages += num_restored as u64;
        let num_tokens = (num_found + num_restored) * page_tokens;
        let key = PrefixKey { tokens: &key.tokens[..num_tokens], extra: key.extra };
        let all = join(found.lease, restored);
        let inserted = self.device.insert_with_priority(&key, &all, priority);
        PrefixMatch { num_tokens, lease: inserted.expect("restored pages are new and behind those found").lease }
    }

    /// As [`PrefixCache::insert_with_priority`].
    ///
    /// # Errors
    /// As [`PrefixCache::insert_with_priority`].
    pub fn insert(&mut self, key: &PrefixKey<'_>, lease: &Lease, priority: u8) -> Result<Inserted, PrefixError> {
        self.device.insert_with_priority(key, lease, priority)
    }

    /// As [`PrefixCache::lease`]; what is evicted moves to the host.
    ///
    /// # Errors
    /// As [`PrefixCache::lease`].
    pub fn lease(&mut self, num_pages: usize, tier: &mut impl HostTier) -> Result<Lease, PrefixError> {
        let TieredCache { device, host, counters } = self;
        device.lease_with(num_pages, &mut |tree, node| offload(tree, node, host, counters, tier))
    }

    /// As [`PrefixCache::make_room`]; what is evicted moves to the host.
    ///
    /// # Errors
    /// As [`PrefixCache::make_room`].
    pub fn make_room(&mut self, num_pages: usize, tier: &mut impl HostTier) -> Result<(), PrefixError> {
        let TieredCache { device, host, counters } = self;
        device.make_room_with(num_pages, false, &mut |tree, node| offload(tree, node, host, counters, tier))
    }

    /// As [`PrefixCache::advance_clock`], in both tiers.
    pub const fn advance_clock(&mut self, ticks: u64) {
        self.device.advance_clock(ticks);
        self.host.advance_clock(ticks);
    }

    /// Forgets everything in both tiers.
    pub fn reset(&mut self) {
        self.device.reset();
        self.host.reset();
    }

    /// Audits both tiers, the device first.
    ///
    /// # Errors
    /// The first contradiction found.
    pub fn audit(&self) -> Result<[PrefixAudit; 2], PrefixAuditError> {
        Ok([self.device.audit()?, self.host.audit()?])
    }
}

/// Brings everything up to a node's end to the host that is not there, as far as there is room.
fn offload(tree: &Tree, node: NodeId, host: &mut PrefixCache, counters: &mut TierCounters, tier: &mut impl HostTier) {
    let (extra, tokens, pages) = tree.path_to(node);
    let priority = tree[node].run().usage.priority;
    let (held, _) = host.hold(&PrefixKey { tokens: &tokens, extra }, pages.len());
    let size = host.size_info();
    let (num_held, num_missing) = (held.len(), pages.len() - held.len());
    let num_copied = num_missing.min(size.free + size.evictable);
    counters.refused_pages += (num_missing - num_copied) as u64;
    if num_copied == 0 {
        return;
    }
    let spare = host.lease(num_copied).expect("the host tier has one user, and the room was counted");
    if tier.offload(&copies(&pages[num_held..num_held + num_copied], spare.pages())).is_err() {
        counters.failed_offloads += num_copied as u64;
        return;
    }
    counters.offloaded_pages += num_copied as u64;
    let all = join(held, spare);
    let key = PrefixKey { tokens: &tokens[..all.len() * tree.page_tokens()], extra };
    let inserted = host.insert_with_priority(&key, &all, priority);
    drop(inserted.expect("spare pages are new and behind those held"));
}

fn copies(from: &[PageId], to: &[PageId]) -> Vec<PageCopy> {
    from.iter().zip(to).map(|(from, to)| PageCopy { from: *from, to: *to }).collect()
}

fn join(mut first: Lease, mut second: Lease) -> Lease {
    first.append(&mut second).expect("both leases are of one pool");
    first
}

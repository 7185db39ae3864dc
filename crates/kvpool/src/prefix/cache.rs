//! Owns [`PrefixCache`]: matching a request's tokens, and inserting a sequence's pages.
//! Invariants: the cache holds one lease entry for every page of the tree, and the pool has exactly these pages marked;
//! a page that anybody else holds is locked, so a lease is the lock and there is no other. Cached pages are whole and
//! never written. Does not copy bytes; evictions are in `evict.rs`.

use crate::idle::IdleList;
use crate::lease::Lease;
use crate::pool::PagePool;
use crate::prefix::config::{PrefixConfig, Usage};
use crate::prefix::counters::{PrefixCounters, SizeInfo};
use crate::prefix::error::PrefixError;
use crate::prefix::event::{EventBatch, EventLog, PrefixEvent};
use crate::prefix::evict::Victims;
use crate::prefix::key::{PageHash, PrefixKey};
use crate::prefix::node::{Kind, NodeId, Run};
use crate::prefix::tree::{Step, Tree};

/// The pages that a match found.
#[derive(Debug)]
#[must_use = "dropping a match unlocks its pages"]
pub struct PrefixMatch {
    /// Tokens whose KV is in the pages: whole pages, and fewer than the key has.
    pub num_tokens: usize,
    /// The pages, in the order of the tokens. While this lives they are not evicted; it may become a sequence's lease.
    pub lease: Lease,
}

/// What a match would find and lock.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PrefixPreview {
    /// Tokens whose KV is cached: whole pages, and fewer than the key has.
    pub num_tokens: usize,
    /// Pages among these that only the cache holds. A match locks them: so many fewer can be evicted then.
    pub num_evictable_pages: usize,
}

/// What an insert did.
#[derive(Debug)]
#[must_use = "the sequence should move to the pages of `lease`, so that its duplicates are freed"]
pub struct Inserted {
    /// Tokens that were cached before.
    pub num_cached_tokens: usize,
    /// Pages that the cache took in.
    pub num_new_pages: usize,
    /// Pages of the sequence that the cache has as other pages.
    pub num_duplicates: usize,
    /// The cached pages of all whole pages of the key, in order: they take the place of the sequence's own.
    pub lease: Lease,
}

/// Pages that hold the KV of tokens seen before, over a pool that may have other users too.
///
/// It belongs to one thread, the scheduler's; leases of its pages may be dropped anywhere.
#[derive(Debug)]
pub struct PrefixCache {
    pub(crate) pool: PagePool,
    pub(crate) tree: Tree,
    pub(crate) victims: Victims,
    pub(crate) counters: PrefixCounters,
    pub(crate) events: EventLog,
    pub(crate) num_cached: usize,
    pub(crate) num_nodes: usize,
    /// Ticks.
    now: u64,
    path: Vec<Step>,
}

impl PrefixCache {
    /// An empty cache over the pages of a pool.
    ///
    /// # Errors
    /// [`PrefixError::SecondCache`] where the pool has one.
    pub fn new(pool: PagePool, config: PrefixConfig) -> Result<PrefixCache, PrefixError> {
        let num_pages = pool.num_pages() as usize;
        let mut state = pool.shared.state.lock();
        if state.idle.is_some() {
            return Err(PrefixError::SecondCache);
        }
        state.idle = Some(IdleList::new(num_pages));
        drop(state);
        let tree = Tree::new(num_pages, pool.page_size().get() as usize, config);
        let (counters, events) = (PrefixCounters::default(), EventLog::new(config.max_events));
        let victims = Victims::new(num_pages);
        Ok(PrefixCache { pool, tree, victims, counters, events, num_cached: 0, num_nodes: 0, now: 0, path: Vec::new() })
    }

    /// The pool.
    #[must_use]
    pub const fn pool(&self) -> &PagePool {
        &self.pool
    }

    /// The choices that the cache was made with.
    #[must_use]
    pub const fn config(&self) -> &PrefixConfig {
        &self.tree.config
    }

    /// Finds the pages of the longest cached prefix, and locks them.
    ///
    /// At least one token is left to compute: a key of `n` tokens matches at most `(n − 1) / page_size` pages. The
    /// runs on the way count as used; nothing else changes.
    pub fn match_prefix(&mut self, key: &PrefixKey<'_>) -> PrefixMatch {
        let max_pages = key.tokens.len().saturating_sub(1) / self.tree.page_tokens();
        let (lease, _) = self.hold(key, max_pages);
        let num_tokens = lease.len() * self.tree.page_tokens();
        self.counters.lookups += 1;
        self.counters.hits += u64::from(num_tokens > 0);
        self.counters.lookup_tokens += key.tokens.len() as u64;
        self.counters.hit_tokens += num_tokens as u64;
        PrefixMatch { num_tokens, lease }
    }

    /// The number of tokens that [`PrefixCache::match_prefix`] would find, without counting as a use: for a scheduler
    /// that compares requests.
    #[must_use]
    pub fn peek(&self, key: &PrefixKey<'_>) -> usize {
        let max_pages = key.tokens.len().saturating_sub(1) / self.tree.page_tokens();
        self.tree.descend(key, max_pages, &mut Vec::new()) * self.tree.page_tokens()
    }

    /// What [`PrefixCache::match_prefix`] would find and lock, without counting as a use: for a scheduler that asks
    /// whether there is room for a request.
    #[must_use]
    pub fn preview(&self, key: &PrefixKey<'_>) -> PrefixPreview {
        let max_pages = key.tokens.len().saturating_sub(1) / self.tree.page_tokens();
        let mut path = Vec::new();
        let num_tokens = self.tree.descend(key, max_pages, &mut path) * self.tree.page_tokens();
        let mut state = self.pool.shared.state.lock();
        state.reap();
        let pages = path.iter().flat_map(|step| &self.tree[step.node].pages()[..step.num_pages]);
        let num_evictable_pages = pages.filter(|page| state.holders[page.index()].is_idle()).count();
        PrefixPreview { num_tokens, num_evictable_pages }
    }

    /// Shares the whole pages of a sequence with the cache, see [`PrefixCache::insert_with_priority`]; priority 0.
    ///
    /// # Errors
    /// As [`PrefixCache::insert_with_priority`].
    pub fn insert(&mut self, key: &PrefixKey<'_>, lease: &Lease) -> Result<Inserted, PrefixError> {
        self.insert_with_priority(key, lease, 0)
    }

    /// Shares the whole pages of a sequence with the cache: page `i` of `lease` holds the KV of tokens
    /// `i * page_size..(i + 1) * page_size`. Tokens of a last partial page are left out.
    ///
    /// Where the cache has some of them as other pages, it keeps its own; let the sequence move to
    /// [`Inserted::lease`], and its duplicates are freed. Every run on the way has at least this priority from now on.
    ///
    /// # Errors
    /// [`PrefixError::ForeignLease`], [`PrefixError::LeaseTooShort`], [`PrefixError::PageTwice`],
    /// [`PrefixError::PageCached`]; nothing was changed.
    pub fn insert_with_priority(
        &mut self,
        key: &PrefixKey<'_>,
        lease: &Lease,
        priority: u8,
    ) -> Result<Inserted, PrefixError> {
        let num_pages = key.tokens.len() / self.tree.page_tokens();
        if !self.pool.owns(lease) {
            return Err(PrefixError::ForeignLease);
        }
        if lease.len() < num_pages {
            return Err(PrefixError::LeaseTooShort { needed: num_pages, pages: lease.len() });
        }
        let mut path = std::mem::take(&mut self.path);
        let found = self.tree.descend(key, num_pages, &mut path);
        let is_new = self.tree.require_new(&lease.pages()[found..num_pages]);
        let inserted = is_new.map(|()| self.insert_behind(&mut path, found, key, lease, priority));
        self.path = path;
        inserted
    }

    /// Makes the runs on the way to a key's pages used, and locks the pages. Also returns the last run's priority.
    pub(crate) fn hold(&mut self, key: &PrefixKey<'_>, max_pages: usize) -> (Lease, u8) {
        let mut path = std::mem::take(&mut self.path);
        let found = self.tree.descend(key, max_pages, &mut path);
        self.tick();
        let (mut pages, mut priority) = (Vec::with_capacity(found), 0);
        for step in &path {
            let run = self.tree[step.node].run_mut();
            run.usage.last_use = self.now;
            run.usage.num_hits += 1;
            priority = run.usage.priority;
            pages.extend_from_slice(&run.lease.pages()[..step.num_pages]);
        }
        self.path = path;
        (self.pool.share(pages), priority)
    }

    /// Inserts what was checked: `path` leads to the first `found` pages, the others are new.
    fn insert_behind(
        &mut self,
        path: &mut [Step],
        found: usize,
        key: &PrefixKey<'_>,
        lease: &Lease,
        priority: u8,
    ) -> Inserted {
        let num_pages = key.tokens.len() / self.tree.page_tokens();
        let mut pages = Vec::with_capacity(num_pages);
        for step in path.iter() {
            pages.extend_from_slice(&self.tree[step.node].pages()[..step.num_pages]);
        }
        let num_duplicates = pages.iter().zip(lease.pages()).filter(|(ours, theirs)| ours != theirs).count();
        pages.extend_from_slice(&lease.pages()[found..num_pages]);
        if let Some(last) = path.last_mut()
            && found < num_pages
            && last.num_pages < self.tree[last.node].pages().len()
        {
            last.node = self.tree.split(last.node, last.num_pages);
            self.num_nodes += 1;
        }
        self.tick();
        for step in path.iter() {
            let usage = &mut self.tree[step.node].run_mut().usage;
            *usage = Usage { last_use: self.now, priority: priority.max(usage.priority), ..*usage };
        }
        if found < num_pages {
            let parent = path.last().map_or_else(|| self.tree.root(&key.extra), |last| last.node);
            let lease = lease.share(found..num_pages).expect("the lease has all whole pages of the key");
            self.take_in(parent, key, found, lease, priority);
        }
        self.drain_idle(); // here too, so that an eviction does not find all of it at once
        self.counters.inserts += 1;
        self.counters.duplicate_pages += num_duplicates as u64;
        let num_cached_tokens = found * self.tree.page_tokens();
        Inserted { num_cached_tokens, num_new_pages: num_pages - found, num_duplicates, lease: self.pool.share(pages) }
    }

    /// Puts the pages of `lease` into the tree, behind the `found` pages that end with `parent`.
    fn take_in(&mut self, parent: NodeId, key: &PrefixKey<'_>, found: usize, lease: Lease, priority: u8) {
        let (page_tokens, hash_page) = (self.tree.page_tokens(), self.tree.config.hash_page);
        let tokens = key.tokens[found * page_tokens..(found + lease.len()) * page_tokens].to_vec();
        let parent_hash = self.tree[parent].end_hash();
        let hashes: Vec<PageHash> = tokens
            .chunks_exact(page_tokens)
            .scan(parent_hash, |hash, page| {
                *hash = hash_page(*hash, page);
                Some(*hash)
            })
            .collect();
        self.events.push(|| PrefixEvent::Stored {
            extra: key.extra,
            parent: (found > 0).then_some(parent_hash),
            pages: hashes.clone(),
        });
        self.mark(&lease);
        self.num_cached += lease.len();
        self.counters.inserted_pages += lease.len() as u64;
        let usage = Usage { last_use: self.now, num_hits: 0, priority };
        let run = Run { tokens, hashes, lease, usage };
        // The run of a request that is being computed grows at its end; a run that was matched keeps its own counts.
        if self.tree[parent].is_leaf() && self.tree[parent].run().usage == usage {
            self.tree.extend(parent, run);
        } else {
            self.num_nodes += 1;
            self.tree.attach(parent, run);
        }
    }

    /// Tells the pool that the cache has the pages of the lease.
    fn mark(&self, lease: &Lease) {
        let mut state = self.pool.shared.state.lock();
        lease.pages().iter().for_each(|page| state.set_cached(*page, true));
    }

    /// Tells the pool that the cache gives up the pages of the lease. Returns how many nobody else holds.
    pub(crate) fn unmark(&self, lease: &Lease) -> usize {
        let mut state = self.pool.shared.state.lock();
        let mut num_idle = 0;
        for page in lease.pages() {
            num_idle += usize::from(state.holders[page.index()].is_idle());
            state.set_cached(*page, false);
        }
        num_idle
    }

    /// Where all pages are. Looks at the fences first.
    #[must_use]
    pub fn size_info(&self) -> SizeInfo {
        let mut state = self.pool.shared.state.lock();
        state.reap();
        SizeInfo::new(state.counts, self.num_cached, self.num_nodes)
    }

    /// What happened since the cache was made.
    #[must_use]
    pub const fn counters(&self) -> &PrefixCounters {
        &self.counters
    }

    /// A use is a tick of the clock, which ends where it saturates.
    const fn tick(&mut self) {
        self.advance_clock(1);
    }

    /// Lets `ticks` pass, for a policy with decay: milliseconds, say, so that a half-life is a time.
    pub const fn advance_clock(&mut self, ticks: u64) {
        self.now = self.now.saturating_add(ticks);
    }

    /// The events since the last call.
    pub fn drain_events(&mut self) -> EventBatch {
        self.events.drain()
    }

    /// What is cached, as the events that would store it into an empty cache; parents first.
    #[must_use]
    pub fn snapshot(&self) -> Vec<PrefixEvent> {
        let mut events = Vec::with_capacity(self.num_nodes);
        let mut roots: Vec<_> = self.tree.roots.iter().collect();
        roots.sort_unstable_by_key(|(_, root)| **root);
        for (extra, root) in roots {
            for node in self.tree.below(*root) {
                let parent = self.tree[node].parent.filter(|parent| parent != root);
                let parent = parent.map(|parent| self.tree[parent].end_hash());
                events.push(PrefixEvent::Stored { extra: *extra, parent, pages: self.tree[node].run().hashes.clone() });
            }
        }
        events
    }

    /// Forgets everything, as after new weights: nothing can be matched any more. Pages that others hold stay theirs.
    pub fn reset(&mut self) {
        for node in self.tree.clear() {
            if let Kind::Run(run) = node.kind {
                self.unmark(&run.lease);
            }
        }
        self.victims.clear();
        (self.num_cached, self.num_nodes) = (0, 0);
        self.counters.resets += 1;
        self.events.push(|| PrefixEvent::Cleared);
    }
}

impl Drop for PrefixCache {
    fn drop(&mut self) {
        self.reset();
        self.pool.shared.state.lock().idle = None;
    }
}

//! Owns making room: which pages are given up, in which order, and [`Victims`], the candidates.
//! Invariants: a lease succeeds where free and evictable pages together suffice, and evicts nothing where they do not.
//! Runs go leaf first, in the order of the policy, from their end, and no further than needed. Every idle page is a
//! candidate: it is the end of a queued leaf, or listed as an inner page, or not yet drained from the pool's list.
//! A run's turn costs O(log n); an inner page goes only when no leaf is left to give up.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::idle::IdleList;
use crate::ids::PageId;
use crate::lease::Lease;
use crate::pool::PoolCounts;
use crate::prefix::cache::PrefixCache;
use crate::prefix::config::Rank;
use crate::prefix::error::PrefixError;
use crate::prefix::event::PrefixEvent;
use crate::prefix::node::NodeId;
use crate::prefix::tree::Tree;

/// What is told of a run before its pages from some index on are given up.
pub(crate) type OnEvict<'a> = &'a mut dyn FnMut(&Tree, NodeId);

/// Candidates for eviction.
#[derive(Debug)]
pub(crate) struct Victims {
    /// At most one entry for each node, by the rank that it had; the lowest first.
    pub(crate) queue: BinaryHeap<Reverse<(Rank, NodeId)>>,
    /// Pages that were not the end of a leaf when they became idle. Where one is idle and the queue is empty, somebody
    /// holds a page below it.
    pub(crate) inner: IdleList,
    drained: Vec<PageId>,
}

impl Victims {
    pub(crate) fn new(num_pages: usize) -> Victims {
        Victims { queue: BinaryHeap::new(), inner: IdleList::new(num_pages), drained: Vec::new() }
    }

    pub(crate) fn clear(&mut self) {
        self.queue.clear();
        self.inner.clear();
    }
}

impl PrefixCache {
    /// Leases pages, and evicts what is needed for that.
    ///
    /// # Errors
    /// [`PrefixError::Exhausted`] where free and evictable pages do not suffice; nothing was evicted.
    pub fn lease(&mut self, num_pages: usize) -> Result<Lease, PrefixError> {
        self.lease_with(num_pages, &mut |_, _| {})
    }

    /// Evicts until `num_pages` pages are free: before a call that takes pages from the pool itself.
    ///
    /// # Errors
    /// [`PrefixError::Exhausted`] where free and evictable pages do not suffice; nothing was evicted.
    pub fn make_room(&mut self, num_pages: usize) -> Result<(), PrefixError> {
        self.make_room_with(num_pages, false, &mut |_, _| {})
    }

    /// Evicts `num_pages` pages, or all that can be. Returns how many became free; that may be more, where nothing is
    /// left but pages with others below them.
    pub fn evict(&mut self, num_pages: usize) -> usize {
        self.evict_with(num_pages, &mut |_, _| {})
    }

    pub(crate) fn lease_with(&mut self, num_pages: usize, on_evict: OnEvict<'_>) -> Result<Lease, PrefixError> {
        let mut may_fail = num_pages > 0;
        loop {
            self.make_room_with(num_pages, may_fail, on_evict)?;
            match self.pool.lease_unplanned(num_pages) {
                Ok(lease) => return Ok(lease),
                // Another user of the pool was faster.
                Err(_) => may_fail = false,
            }
        }
    }

    pub(crate) fn make_room_with(
        &mut self,
        num_pages: usize,
        may_fail: bool,
        on_evict: OnEvict<'_>,
    ) -> Result<(), PrefixError> {
        let mut state = self.pool.shared.state.lock();
        state.reap();
        let is_planned_failure = may_fail && state.is_planned_failure();
        let PoolCounts { free, evictable, leased, fenced, .. } = state.counts;
        drop(state);
        if is_planned_failure || num_pages > free + evictable {
            return Err(PrefixError::Exhausted {
                needed: num_pages,
                free,
                evictable,
                locked: leased - evictable,
                fenced,
            });
        }
        if num_pages > free {
            self.evict_with(num_pages - free, on_evict);
        }
        Ok(())
    }

    pub(crate) fn evict_with(&mut self, num_pages: usize, on_evict: OnEvict<'_>) -> usize {
        self.drain_idle();
        let mut num_freed = 0;
        while num_freed < num_pages {
            if let Some(node) = self.next_leaf() {
                num_freed += self.give_up_end(node, num_pages - num_freed, on_evict);
            } else if let Some(page) = self.victims.inner.pop() {
                num_freed += self.give_up_from(page, on_evict);
            } else {
                break;
            }
        }
        self.counters.evicted_pages += num_freed as u64;
        num_freed
    }

    /// Makes candidates of the pages that became idle.
    pub(crate) fn drain_idle(&mut self) {
        let mut drained = std::mem::take(&mut self.victims.drained);
        let mut state = self.pool.shared.state.lock();
        state.reap();
        if let Some(idle) = &mut state.idle {
            idle.drain_into(&mut drained);
        }
        drop(state);
        for page in drained.drain(..) {
            let Some(node) = self.tree.owner(page) else { continue };
            self.enqueue(node);
            if !self.tree[node].is_leaf() || self.tree[node].pages().last() != Some(&page) {
                self.victims.inner.push(page);
            }
        }
        self.victims.drained = drained;
    }

    /// Queues a node where it is a leaf whose last page is idle.
    fn enqueue(&mut self, id: NodeId) {
        let node = &self.tree[id];
        if !node.is_queued && node.is_leaf() && self.num_idle_at_end(id, 1) == 1 {
            let rank = self.tree.config.policy.rank(&node.run().usage);
            self.victims.queue.push(Reverse((rank, id)));
            self.tree[id].is_queued = true;
        }
    }

    /// Takes the leaf that goes first out of the queue. Entries that are out of date are put right on the way; each was
    /// paid for when it was queued, and a rank is out of date once for a use.
    fn next_leaf(&mut self) -> Option<NodeId> {
        while let Some(Reverse((rank, id))) = self.victims.queue.pop() {
            self.tree[id].is_queued = false;
            let node = &self.tree[id];
            if !node.is_leaf() || self.num_idle_at_end(id, 1) == 0 {
                continue;
            }
            if self.tree.config.policy.rank(&node.run().usage) == rank {
                return Some(id);
            }
            self.enqueue(id);
        }
        None
    }

    /// Idle pages at the end of a run, at most `max`.
    fn num_idle_at_end(&self, node: NodeId, max: usize) -> usize {
        let state = self.pool.shared.state.lock();
        let pages = self.tree[node].pages().iter().rev().take(max);
        pages.take_while(|page| state.holders[page.index()].is_idle()).count()
    }

    /// Gives up at most `max` idle pages at the end of a leaf.
    fn give_up_end(&mut self, node: NodeId, max: usize, on_evict: OnEvict<'_>) -> usize {
        let num_pages = self.num_idle_at_end(node, max);
        on_evict(&self.tree, node);
        let from = self.tree[node].pages().len() - num_pages;
        let (num_freed, next) = self.forget(node, from);
        if let Some(next) = next {
            self.enqueue(next);
        }
        num_freed
    }

    /// Gives up an inner page that is idle and all that hangs on it; pages that others hold are theirs alone then.
    fn give_up_from(&mut self, page: PageId, on_evict: OnEvict<'_>) -> usize {
        let Some(node) = self.tree.owner(page) else { return 0 };
        if !self.pool.shared.state.lock().holders[page.index()].is_idle() {
            return 0;
        }
        let num_cached = self.num_cached;
        let mut num_freed = 0;
        let below = self.tree.below(node);
        // Of a leaf the whole path is told, which is all runs that are given up.
        let leaves = [node].into_iter().chain(below.iter().copied()).filter(|node| self.tree[*node].is_leaf());
        leaves.for_each(|leaf| on_evict(&self.tree, leaf));
        for below in below.into_iter().rev() {
            num_freed += self.forget(below, 0).0;
        }
        let from = self.tree[node].pages().iter().position(|other| *other == page);
        let (rest, next) = self.forget(node, from.expect("the owner of a page has it"));
        num_freed += rest;
        self.counters.forgotten_pages += (num_cached - self.num_cached - num_freed) as u64;
        if let Some(next) = next {
            self.enqueue(next);
        }
        num_freed
    }

    /// Takes the pages of a run from an index on out of the cache. Returns how many became free, and the node that ends
    /// where they were: what is left of this one, or its parent.
    fn forget(&mut self, node: NodeId, from: usize) -> (usize, Option<NodeId>) {
        let (run, parent) = self.tree.cut(node, from);
        let num_freed = self.unmark(&run.lease);
        self.num_cached -= run.lease.len();
        self.num_nodes -= usize::from(from == 0);
        self.events.push(|| PrefixEvent::Removed { pages: run.hashes });
        (num_freed, if from > 0 { Some(node) } else { parent })
    }
}

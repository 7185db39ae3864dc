//! Owns the audit of a prefix cache: [`PrefixAudit`], what a walk over the tree found, and [`PrefixAuditError`], the
//! first contradiction. Invariant: everything is recomputed from the tree and the pool's lists and then compared with
//! counters, marks, index and queue. Does not repair anything.

use crate::audit::{AuditError, PoolAudit};
use crate::ids::PageId;
use crate::prefix::cache::PrefixCache;
use crate::prefix::counters::SizeInfo;
use crate::prefix::node::{Kind, NodeId};
use crate::state::State;

/// What an audit found by walking the structure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefixAudit {
    /// The pool.
    pub pool: PoolAudit,
    /// Where all pages are; `free + evictable + locked + fenced = total` was checked.
    pub size: SizeInfo,
    /// Different extra keys.
    pub num_roots: usize,
}

/// A contradiction in a prefix cache: a bug.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PrefixAuditError {
    /// The pool's accounting is wrong.
    #[error("the pool's accounting is wrong")]
    Pool(#[from] AuditError),
    /// A node breaks a rule.
    #[error("node {node}: {rule}")]
    Node {
        /// Number of the node.
        node: usize,
        /// The rule.
        rule: &'static str,
    },
    /// A page breaks a rule.
    #[error("page {page}: {rule}")]
    Page {
        /// The page.
        page: PageId,
        /// The rule.
        rule: &'static str,
    },
    /// A counter is not what the walk found.
    #[error("{what} is recorded as {recorded}, the walk found {found}")]
    Count {
        /// What is counted.
        what: &'static str,
        /// The counter.
        recorded: usize,
        /// What the walk found.
        found: usize,
    },
}

impl PrefixCache {
    /// Recomputes the accounting of the cache and its pool by walking the tree and the pool's lists.
    ///
    /// Takes time in proportion to all pages; for tests and for checks at leisure.
    ///
    /// # Errors
    /// The first contradiction found, which is a bug of this crate.
    pub fn audit(&self) -> Result<PrefixAudit, PrefixAuditError> {
        let state = self.pool.shared.state.lock();
        let pool = state.audit()?;
        let mut num_places = vec![0u32; pool.counts.total];
        let (mut num_reached, mut num_queued) = (0, 0);
        for (extra, root) in &self.tree.roots {
            let node = &self.tree[*root];
            let is_root = matches!(&node.kind, Kind::Root { extra: own, .. } if own == extra);
            require_node(*root, is_root && node.parent.is_none(), "the root of another key")?;
            require_node(*root, node.first_child.is_some(), "a root without children")?;
            for id in self.tree.below(*root) {
                self.audit_run(id, &state)?;
                self.tree[id].pages().iter().for_each(|page| num_places[page.index()] += 1);
                num_reached += 1;
                num_queued += usize::from(self.tree[id].is_queued);
            }
        }
        let num_evictable = self.audit_pages(&state, &num_places)?;
        let num_cached = num_places.iter().filter(|places| **places > 0).count();
        require_count("nodes", self.num_nodes, num_reached)?;
        require_count("nodes and roots", self.tree.nodes().count(), num_reached + self.tree.roots.len())?;
        require_count("cached pages", self.num_cached, num_cached)?;
        require_count("evictable pages", pool.counts.evictable, num_evictable)?;
        require_count("entries of the queue", self.victims.queue.len(), num_queued)?;
        let size = SizeInfo::new(pool.counts, num_cached, num_reached);
        let sum = size.free + size.evictable + size.locked + size.fenced;
        require_count("all pages", size.total, sum)?;
        Ok(PrefixAudit { pool, size, num_roots: self.tree.roots.len() })
    }

    /// One run: its parts agree with each other, with its parent, its siblings and the index.
    fn audit_run(&self, id: NodeId, state: &State) -> Result<(), PrefixAuditError> {
        let node = &self.tree[id];
        let (run, pages) = (node.run(), node.pages());
        let page_tokens = self.tree.page_tokens();
        require_node(id, !pages.is_empty(), "a run without pages")?;
        require_node(id, run.hashes.len() == pages.len(), "another number of hashes than of pages")?;
        require_node(id, run.tokens.len() == pages.len() * page_tokens, "another number of tokens than of slots")?;
        let is_owner = pages.iter().all(|page| self.tree.owner(*page) == Some(id));
        require_node(id, is_owner, "a page that is recorded elsewhere")?;
        let parent = node.parent.expect("a node below a root has a parent");
        let mut hash = self.tree[parent].end_hash();
        for (page, recorded) in run.tokens.chunks_exact(page_tokens).zip(&run.hashes) {
            hash = (self.tree.config.hash_page)(hash, page);
            require_node(id, hash == *recorded, "a hash of other tokens")?;
        }
        let found = self.tree.child(parent, &run.tokens[..page_tokens]);
        require_node(id, found == Some(id), "not found by its first page: not in the index, or like a sibling")?;
        let is_end_idle = pages.last().is_some_and(|page| state.holders[page.index()].is_idle());
        let is_candidate = node.is_queued || pages.last().is_some_and(|page| is_pending(state, *page));
        require_node(id, !(node.is_leaf() && is_end_idle) || is_candidate, "an idle leaf that is no candidate")
    }

    /// Every page: its place in the tree, its mark in the pool, its entry as a candidate. Returns the idle pages.
    fn audit_pages(&self, state: &State, num_places: &[u32]) -> Result<usize, PrefixAuditError> {
        let mut num_idle = 0;
        for (page, (places, holders)) in (0..).map_while(PageId::new).zip(num_places.iter().zip(&state.holders)) {
            let require = |holds, rule| if holds { Ok(()) } else { Err(PrefixAuditError::Page { page, rule }) };
            require(*places <= 1, "it is twice in the tree")?;
            require(holders.is_cached == (*places == 1), "its mark is not whether it is in the tree")?;
            let owner = self.tree.owner(page);
            require(owner.is_some() == (*places == 1), "its recorded node does not have it")?;
            if let Some(owner) = owner.filter(|_| holders.is_idle()) {
                let node = &self.tree[owner];
                let is_end_of_queued = node.is_queued && node.pages().last() == Some(&page);
                let is_candidate = is_end_of_queued || self.victims.inner.contains(page) || is_pending(state, page);
                require(is_candidate, "it is idle and no candidate for eviction")?;
            }
            // Not by `is_idle`, which the pool counts with: the cache's entry is the only one of any kind.
            num_idle += usize::from(*places == 1 && holders.total() == 1);
        }
        Ok(num_idle)
    }
}

fn is_pending(state: &State, page: PageId) -> bool {
    state.idle.as_ref().is_some_and(|idle| idle.contains(page))
}

fn require_node(id: NodeId, holds: bool, rule: &'static str) -> Result<(), PrefixAuditError> {
    if holds { Ok(()) } else { Err(PrefixAuditError::Node { node: id.index(), rule }) }
}

fn require_count(what: &'static str, recorded: usize, found: usize) -> Result<(), PrefixAuditError> {
    if recorded == found { Ok(()) } else { Err(PrefixAuditError::Count { what, recorded, found }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::PageSize;
    use crate::pool::PagePool;
    use crate::prefix::config::PrefixConfig;
    use crate::prefix::key::{PageHash, PrefixKey};

    /// Two runs of two pages below one of one page, all idle.
    fn sound() -> PrefixCache {
        let pool = PagePool::new(8, PageSize::new(2).unwrap()).unwrap();
        let mut cache = PrefixCache::new(pool, PrefixConfig::default()).unwrap();
        for tokens in [[1, 1, 2, 2, 3, 3], [1, 1, 4, 4, 5, 5]] {
            let lease = cache.lease(3).unwrap();
            drop(cache.insert(&PrefixKey::new(&tokens), &lease).unwrap());
        }
        cache.drain_idle();
        cache
    }

    fn broken(damage: impl FnOnce(&mut PrefixCache, NodeId)) -> String {
        let mut cache = sound();
        cache.audit().unwrap();
        let leaf = cache.tree.nodes().find(|(_, node)| node.is_leaf()).map(|(id, _)| id).unwrap();
        damage(&mut cache, leaf);
        let error = cache.audit().unwrap_err().to_string();
        std::mem::forget(cache); // it is not fit to be dropped
        error
    }

    #[test]
    fn every_contradiction_is_found() {
        let is_found = |error: String, what: &str| assert!(error.contains(what), "{error} and not {what}");
        is_found(broken(|cache, leaf| cache.tree[leaf].run_mut().tokens[0] += 1), "a hash of other tokens");
        is_found(broken(|cache, leaf| cache.tree[leaf].run_mut().hashes[1] = PageHash(0)), "a hash of other tokens");
        is_found(broken(|cache, leaf| cache.tree[leaf].run_mut().hashes.truncate(1)), "another number of hashes");
        is_found(broken(|cache, leaf| cache.tree[leaf].run_mut().tokens.truncate(3)), "another number of tokens");
        is_found(broken(|cache, leaf| cache.tree[leaf].is_queued = false), "no candidate");
        is_found(broken(|cache, _| cache.victims.inner.clear()), "it is idle and no candidate");
        is_found(broken(|cache, _| cache.victims.queue.clear()), "entries of the queue is recorded as 0");
        is_found(broken(|cache, _| cache.num_nodes += 1), "nodes is recorded as 4");
        is_found(broken(|cache, _| cache.num_cached -= 1), "cached pages is recorded as 4");
        is_found(
            broken(|cache, leaf| {
                cache.unmark(&cache.tree[leaf].run().lease);
            }),
            "its mark",
        );
        is_found(broken(|cache, leaf| drop(cache.tree.cut(leaf, 1))), "the pool's accounting");
        is_found(broken(|cache, _| cache.tree.roots.clear()), "its mark is not");
    }
}

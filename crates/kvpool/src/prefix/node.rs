//! Owns [`Node`], a run of whole pages in the tree, and its name [`NodeId`].
//! Invariant: a run has at least one page, and for each page its tokens, its hash and an entry of the lease; the root of
//! an extra key has none. Does not know how nodes hang together; the tree does.

use std::num::NonZeroU32;

use crate::ids::PageId;
use crate::lease::Lease;
use crate::prefix::config::Usage;
use crate::prefix::key::{ExtraKey, PageHash};

/// A node of the tree. Used again after the node is gone, so it must not be kept that long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct NodeId(NonZeroU32);

impl NodeId {
    /// The node at an index of the tree's list.
    pub(crate) fn from_index(index: usize) -> NodeId {
        let number = u32::try_from(index + 1).ok().and_then(NonZeroU32::new);
        NodeId(number.expect("there are no more nodes than pages and their roots"))
    }

    /// The name of no node.
    pub(crate) const fn pending() -> NodeId {
        NodeId(NonZeroU32::MAX)
    }

    pub(crate) const fn index(self) -> usize {
        self.0.get() as usize - 1
    }
}

/// What a node is.
#[derive(Debug)]
pub(crate) enum Kind {
    /// The root of all runs with this extra key, and the parent hash of their first pages.
    Root { extra: ExtraKey, hash: PageHash },
    /// A run of pages behind its parent's.
    Run(Run),
}

/// A run of pages.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) tokens: Vec<u32>,
    /// One for each page.
    pub(crate) hashes: Vec<PageHash>,
    pub(crate) lease: Lease,
    pub(crate) usage: Usage,
}

#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) kind: Kind,
    /// `None` for a root.
    pub(crate) parent: Option<NodeId>,
    pub(crate) first_child: Option<NodeId>,
    pub(crate) next_sibling: Option<NodeId>,
    pub(crate) previous_sibling: Option<NodeId>,
    /// The next node whose first page has the same hash.
    pub(crate) next_alike: Option<NodeId>,
    /// Whether the eviction queue has an entry for it.
    pub(crate) is_queued: bool,
}

impl Node {
    pub(crate) fn new(kind: Kind) -> Node {
        let (parent, first_child, next_sibling, previous_sibling, next_alike) = (None, None, None, None, None);
        Node { kind, parent, first_child, next_sibling, previous_sibling, next_alike, is_queued: false }
    }

    /// The run; roots have none.
    pub(crate) fn run(&self) -> &Run {
        match &self.kind {
            Kind::Run(run) => run,
            Kind::Root { .. } => unreachable!("a root was taken for a run"),
        }
    }

    pub(crate) fn run_mut(&mut self) -> &mut Run {
        match &mut self.kind {
            Kind::Run(run) => run,
            Kind::Root { .. } => unreachable!("a root was taken for a run"),
        }
    }

    /// The hash of everything up to the node's end: the parent of its children's first pages.
    pub(crate) fn end_hash(&self) -> PageHash {
        match &self.kind {
            Kind::Root { hash, .. } => *hash,
            Kind::Run(run) => *run.hashes.last().expect("a run has at least one page"),
        }
    }

    pub(crate) fn pages(&self) -> &[PageId] {
        match &self.kind {
            Kind::Root { .. } => &[],
            Kind::Run(run) => run.lease.pages(),
        }
    }

    /// A run that no other hangs on.
    pub(crate) const fn is_leaf(&self) -> bool {
        self.first_child.is_none() && self.parent.is_some()
    }
}

impl Run {
    /// Cuts the run in two at a page; the lower part comes back.
    pub(crate) fn split_off(&mut self, at: usize, page_tokens: usize) -> Run {
        Run {
            tokens: self.tokens.split_off(at * page_tokens),
            hashes: self.hashes.split_off(at),
            lease: self.lease.split_off(at).expect("a run is cut inside"),
            usage: self.usage,
        }
    }

    /// Moves another run behind this one.
    pub(crate) fn append(&mut self, mut other: Run) {
        self.tokens.append(&mut other.tokens);
        self.hashes.append(&mut other.hashes);
        self.lease.append(&mut other.lease).expect("all runs are of the cache's pool");
    }
}

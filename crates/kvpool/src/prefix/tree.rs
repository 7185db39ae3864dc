//! Owns the radix tree: which run follows which, which node has a page, and finding a key's pages.
//! Invariants: siblings differ in their first page; a root has a child; every page has at most one place. Children are
//! found by the chained hash of their first page, then compared by parent and by tokens. Looking changes nothing: a run
//! is split only by an insert that leaves it. Does not know policies, counters or events, and does not recurse.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::mem;
use std::ops::{Index, IndexMut};

use crate::ids::PageId;
use crate::prefix::config::PrefixConfig;
use crate::prefix::error::PrefixError;
use crate::prefix::key::{ExtraKey, PageHash, PrefixKey};
use crate::prefix::node::{Kind, Node, NodeId, Run};

/// One node of a path, and how many of its pages belong to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) node: NodeId,
    pub(crate) num_pages: usize,
}

/// A page hash is mixed already.
#[derive(Debug, Default)]
pub(crate) struct Unchanged(u64);

impl Hasher for Unchanged {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("the index is keyed by words");
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = word;
    }
}

#[derive(Debug)]
pub(crate) struct Tree {
    nodes: Vec<Option<Node>>,
    unused: Vec<NodeId>,
    pub(crate) roots: HashMap<ExtraKey, NodeId>,
    /// By the hash of the first page: the first of the nodes that are alike.
    index: HashMap<PageHash, NodeId, BuildHasherDefault<Unchanged>>,
    /// The node of each page.
    owners: Vec<Option<NodeId>>,
    page_tokens: usize,
    pub(crate) config: PrefixConfig,
}

impl Index<NodeId> for Tree {
    type Output = Node;

    fn index(&self, id: NodeId) -> &Node {
        self.nodes[id.index()].as_ref().expect("a node that is linked is there")
    }
}

impl IndexMut<NodeId> for Tree {
    fn index_mut(&mut self, id: NodeId) -> &mut Node {
        self.nodes[id.index()].as_mut().expect("a node that is linked is there")
    }
}

impl Tree {
    pub(crate) fn new(num_pages: usize, page_tokens: usize, config: PrefixConfig) -> Tree {
        let (nodes, unused, roots, index) = (Vec::new(), Vec::new(), HashMap::new(), HashMap::default());
        Tree { nodes, unused, roots, index, owners: vec![None; num_pages], page_tokens, config }
    }

    pub(crate) const fn page_tokens(&self) -> usize {
        self.page_tokens
    }

    /// The node that has the page.
    pub(crate) fn owner(&self, page: PageId) -> Option<NodeId> {
        self.owners[page.index()]
    }

    /// All nodes, roots included, in the order of their list.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = (NodeId, &Node)> {
        let entries = self.nodes.iter().enumerate();
        entries.filter_map(|(index, node)| node.as_ref().map(|node| (NodeId::from_index(index), node)))
    }

    /// Refuses pages that have a place in the tree, or are twice in the list.
    pub(crate) fn require_new(&mut self, pages: &[PageId]) -> Result<(), PrefixError> {
        let pending = NodeId::pending();
        let mut result = Ok(());
        let mut num_seen = 0;
        for page in pages {
            let page = *page;
            match self.owners[page.index()].replace(pending) {
                None => num_seen += 1,
                Some(owner) => {
                    self.owners[page.index()] = Some(owner);
                    let is_twice = owner == pending;
                    result =
                        Err(if is_twice { PrefixError::PageTwice { page } } else { PrefixError::PageCached { page } });
                    break;
                }
            }
        }
        pages[..num_seen].iter().for_each(|page| self.owners[page.index()] = None);
        result
    }

    /// Walks down along a key, at most `max_pages` whole pages; the way is put in `path`. Returns the pages found.
    pub(crate) fn descend(&self, key: &PrefixKey<'_>, max_pages: usize, path: &mut Vec<Step>) -> usize {
        path.clear();
        let mut found = 0;
        let mut at = self.roots.get(&key.extra).copied();
        while let Some(parent) = at.filter(|_| found < max_pages) {
            let rest = &key.tokens[found * self.page_tokens..max_pages * self.page_tokens];
            let Some(node) = self.child(parent, &rest[..self.page_tokens]) else { break };
            let run = self[node].run();
            let num_pages = self.num_common_pages(&run.tokens, rest);
            path.push(Step { node, num_pages });
            found += num_pages;
            at = (num_pages == run.hashes.len()).then_some(node);
        }
        found
    }

    fn num_common_pages(&self, a: &[u32], b: &[u32]) -> usize {
        if b.starts_with(a) {
            return a.len() / self.page_tokens;
        }
        let pages = a.chunks_exact(self.page_tokens).zip(b.chunks_exact(self.page_tokens));
        pages.take_while(|(a, b)| a == b).count()
    }

    /// The child whose run starts with this page.
    pub(crate) fn child(&self, parent: NodeId, page: &[u32]) -> Option<NodeId> {
        let hash = (self.config.hash_page)(self[parent].end_hash(), page);
        let mut at = self.index.get(&hash).copied();
        while let Some(id) = at {
            let node = &self[id];
            if node.parent == Some(parent) && node.run().tokens.starts_with(page) {
                return Some(id);
            }
            at = node.next_alike;
        }
        None
    }

    /// The root of an extra key, made where there is none.
    pub(crate) fn root(&mut self, extra: &ExtraKey) -> NodeId {
        if let Some(root) = self.roots.get(extra) {
            return *root;
        }
        let hash = extra.root_hash(self.config.seed, self.config.hash_page);
        let root = self.put(Node::new(Kind::Root { extra: *extra, hash }));
        self.roots.insert(*extra, root);
        root
    }

    /// Hangs a run under a node; no child of it starts with the same page.
    pub(crate) fn attach(&mut self, parent: NodeId, run: Run) -> NodeId {
        let node = self.put(Node::new(Kind::Run(run)));
        self.own(node, 0);
        self.link(node, parent);
        node
    }

    /// Moves a run behind the run of a leaf.
    pub(crate) fn extend(&mut self, leaf: NodeId, run: Run) {
        let old_len = self[leaf].pages().len();
        self[leaf].run_mut().append(run);
        self.own(leaf, old_len);
    }

    /// Cuts a node at a page inside its run: the upper part becomes a new node, its parent, which is returned.
    pub(crate) fn split(&mut self, node: NodeId, at: usize) -> NodeId {
        let parent = self[node].parent.expect("only runs are split");
        self.unlink(node);
        let page_tokens = self.page_tokens;
        let run = self[node].run_mut();
        let lower = run.split_off(at, page_tokens);
        let upper = mem::replace(run, lower);
        let upper = self.attach(parent, upper);
        self.link(node, upper);
        upper
    }

    /// Takes the pages of a run from index `from` on out of the tree. Of `from` 0 the node goes too: it is a leaf then,
    /// and a root that has no other child goes with it. Also returned is the parent of a node that went.
    pub(crate) fn cut(&mut self, node: NodeId, from: usize) -> (Run, Option<NodeId>) {
        for page in &self.nodes[node.index()].as_ref().expect("a node that is cut is there").pages()[from..] {
            self.owners[page.index()] = None;
        }
        if from > 0 {
            let page_tokens = self.page_tokens;
            return (self[node].run_mut().split_off(from, page_tokens), None);
        }
        assert!(self[node].is_leaf(), "node {node:?} goes and has children");
        let parent = self.unlink(node);
        let Kind::Run(run) = self.take(node).kind else { unreachable!("a root was taken for a run") };
        if let Kind::Root { extra, .. } = self[parent].kind
            && self[parent].first_child.is_none()
        {
            self.roots.remove(&extra);
            self.take(parent);
            return (run, None);
        }
        (run, Some(parent))
    }

    /// The nodes below a node, parents first.
    pub(crate) fn below(&self, node: NodeId) -> Vec<NodeId> {
        let mut below: Vec<NodeId> = self.children(node).collect();
        let mut at = 0;
        while let Some(node) = below.get(at).copied() {
            below.extend(self.children(node));
            at += 1;
        }
        below
    }

    pub(crate) fn children(&self, node: NodeId) -> impl Iterator<Item = NodeId> {
        std::iter::successors(self[node].first_child, |child| self[*child].next_sibling)
    }

    /// Extra key, tokens and pages from the first token to a node's end.
    pub(crate) fn path_to(&self, node: NodeId) -> (ExtraKey, Vec<u32>, Vec<PageId>) {
        let mut nodes = Vec::new();
        let mut at = node;
        let extra = loop {
            match &self[at].kind {
                Kind::Root { extra, .. } => break *extra,
                Kind::Run(_) => nodes.push(at),
            }
            at = self[at].parent.expect("a run has a parent");
        };
        let (mut tokens, mut pages) = (Vec::new(), Vec::new());
        for node in nodes.into_iter().rev() {
            tokens.extend_from_slice(&self[node].run().tokens);
            pages.extend_from_slice(self[node].pages());
        }
        (extra, tokens, pages)
    }

    /// Forgets everything; the nodes come back.
    pub(crate) fn clear(&mut self) -> Vec<Node> {
        self.unused.clear();
        self.roots.clear();
        self.index.clear();
        self.owners.fill(None);
        self.nodes.drain(..).flatten().collect()
    }

    fn own(&mut self, node: NodeId, from: usize) {
        for page in &self.nodes[node.index()].as_ref().expect("a node that owns is there").pages()[from..] {
            self.owners[page.index()] = Some(node);
        }
    }

    fn link(&mut self, node: NodeId, parent: NodeId) {
        let next = self[parent].first_child.replace(node);
        if let Some(next) = next {
            self[next].previous_sibling = Some(node);
        }
        let alike = self.index.insert(self[node].run().hashes[0], node);
        let linked = &mut self[node];
        (linked.parent, linked.next_sibling, linked.next_alike) = (Some(parent), next, alike);
    }

    /// Takes a node out of its parent's children and out of the index; returns the parent.
    fn unlink(&mut self, node: NodeId) -> NodeId {
        let hash = self[node].run().hashes[0];
        let unlinked = &mut self[node];
        let parent = unlinked.parent.take().expect("only runs are unlinked");
        let (previous, next) = (unlinked.previous_sibling.take(), unlinked.next_sibling.take());
        let alike = unlinked.next_alike.take();
        match previous {
            Some(previous) => self[previous].next_sibling = next,
            None => self[parent].first_child = next,
        }
        if let Some(next) = next {
            self[next].previous_sibling = previous;
        }
        let first = self.index.get(&hash).copied().expect("a linked node is in the index");
        if first != node {
            let mut others = std::iter::successors(Some(first), |at| self[*at].next_alike);
            let before = others.find(|at| self[*at].next_alike == Some(node)).expect("a linked node is in the index");
            self[before].next_alike = alike;
        } else if let Some(alike) = alike {
            self.index.insert(hash, alike);
        } else {
            self.index.remove(&hash);
        }
        parent
    }

    fn put(&mut self, node: Node) -> NodeId {
        if let Some(id) = self.unused.pop() {
            self.nodes[id.index()] = Some(node);
            return id;
        }
        self.nodes.push(Some(node));
        NodeId::from_index(self.nodes.len() - 1)
    }

    fn take(&mut self, id: NodeId) -> Node {
        self.unused.push(id);
        self.nodes[id.index()].take().expect("a node that is taken is there")
    }
}

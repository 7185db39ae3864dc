//! The naive twin of the prefix cache: a list of runs, each with its whole path, searched from one end to the other.

use kvpool::{EvictionPolicy, ExtraKey, PageId};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Usage {
    last_use: u64,
    num_hits: u64,
    priority: u8,
}

#[derive(Debug, Clone)]
struct Node {
    extra: ExtraKey,
    /// All tokens up to the end of the run.
    path: Vec<u32>,
    /// Pages before the run.
    start: usize,
    pages: Vec<PageId>,
    usage: Usage,
}

#[derive(Debug)]
pub(crate) struct Model {
    nodes: Vec<Node>,
    page: usize,
    policy: EvictionPolicy,
    now: u64,
}

/// What an eviction freed, and whether it stopped at idle pages that have held ones below them.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Evicted {
    pub(crate) num_freed: usize,
    pub(crate) is_stuck: bool,
}

impl Model {
    pub(crate) const fn new(page: usize, policy: EvictionPolicy) -> Model {
        Model { nodes: Vec::new(), page, policy, now: 0 }
    }

    pub(crate) fn clear(&mut self) {
        self.nodes.clear();
    }

    pub(crate) fn pages(&self) -> impl Iterator<Item = PageId> {
        self.nodes.iter().flat_map(|node| node.pages.iter().copied())
    }

    pub(crate) fn num_nodes(&self) -> usize {
        self.nodes.len()
    }

    /// Extra key and tokens of every leaf.
    pub(crate) fn leaf_paths(&self) -> impl Iterator<Item = (ExtraKey, &[u32])> {
        let leaves = self.nodes.iter().filter(|node| self.is_leaf(node));
        leaves.map(|node| (node.extra, node.path.as_slice()))
    }

    fn is_leaf(&self, node: &Node) -> bool {
        let end = node.start + node.pages.len();
        let is_child =
            |other: &Node| other.start == end && other.extra == node.extra && other.path.starts_with(&node.path);
        !self.nodes.iter().any(is_child)
    }

    /// Nodes on the way to at most `max_pages` pages of a key, with the pages that belong to it.
    fn path(&self, extra: ExtraKey, tokens: &[u32], max_pages: usize) -> Vec<(usize, usize)> {
        let mut path = Vec::new();
        let mut found = 0;
        loop {
            let next = self.nodes.iter().enumerate().find_map(|(at, node)| {
                let common =
                    node.path.chunks(self.page).zip(tokens.chunks(self.page)).take_while(|(a, b)| a == b).count();
                let common = common.min(max_pages);
                (node.extra == extra && node.start == found && common > found).then(|| (at, common - found))
            });
            let Some((at, num_pages)) = next else { return path };
            path.push((at, num_pages));
            found += num_pages;
            if num_pages < self.nodes[at].pages.len() {
                return path;
            }
        }
    }

    fn path_pages(&self, path: &[(usize, usize)]) -> Vec<PageId> {
        path.iter().flat_map(|(at, num_pages)| self.nodes[*at].pages[..*num_pages].to_vec()).collect()
    }

    pub(crate) fn peek(&self, extra: ExtraKey, tokens: &[u32]) -> Vec<PageId> {
        self.path_pages(&self.path(extra, tokens, tokens.len().saturating_sub(1) / self.page))
    }

    pub(crate) fn match_prefix(&mut self, extra: ExtraKey, tokens: &[u32]) -> Vec<PageId> {
        let path = self.path(extra, tokens, tokens.len().saturating_sub(1) / self.page);
        self.now += 1;
        for (at, _) in &path {
            let usage = &mut self.nodes[*at].usage;
            (usage.last_use, usage.num_hits) = (self.now, usage.num_hits + 1);
        }
        self.path_pages(&path)
    }

    /// Returns the pages of all whole pages of the key.
    pub(crate) fn insert(&mut self, extra: ExtraKey, tokens: &[u32], own: &[PageId], priority: u8) -> Vec<PageId> {
        let num_pages = tokens.len() / self.page;
        let mut path = self.path(extra, tokens, num_pages);
        let mut pages = self.path_pages(&path);
        let found = pages.len();
        if let Some((at, taken)) = path.last_mut()
            && found < num_pages
            && *taken < self.nodes[*at].pages.len()
        {
            let mut upper = self.nodes[*at].clone();
            upper.pages.truncate(*taken);
            upper.path.truncate(found * self.page);
            self.nodes[*at].start = found;
            self.nodes[*at].pages.drain(..*taken);
            self.nodes.push(upper);
            *at = self.nodes.len() - 1;
        }
        self.now += 1;
        for (at, _) in &path {
            let usage = &mut self.nodes[*at].usage;
            *usage = Usage { last_use: self.now, priority: usage.priority.max(priority), ..*usage };
        }
        if found < num_pages {
            let usage = Usage { last_use: self.now, num_hits: 0, priority };
            let new = own[found..num_pages].to_vec();
            pages.extend_from_slice(&new);
            let whole = tokens[..num_pages * self.page].to_vec();
            match path.last().filter(|(at, _)| self.is_leaf(&self.nodes[*at]) && self.nodes[*at].usage == usage) {
                Some((at, _)) => {
                    self.nodes[*at].pages.extend(new);
                    self.nodes[*at].path = whole;
                }
                None => self.nodes.push(Node { extra, path: whole, start: found, pages: new, usage }),
            }
        }
        pages
    }

    fn rank(&self, usage: &Usage) -> (f64, u64) {
        let worth = match self.policy {
            EvictionPolicy::Lfu => u32::try_from(usage.num_hits).unwrap().into(),
            // The worth as the documentation has it, at this time.
            EvictionPolicy::Priority { half_life } => {
                let age = f64::from(u32::try_from(self.now - usage.last_use).unwrap());
                (f64::from(usage.priority) - age / f64::from(u32::try_from(half_life).unwrap())).exp2()
            }
            _ => 0.0,
        };
        (worth, usage.last_use)
    }

    /// Gives up `num_pages` pages, leaf first.
    pub(crate) fn evict(&mut self, num_pages: usize, is_idle: impl Fn(PageId) -> bool) -> Evicted {
        let mut num_freed = 0;
        while num_freed < num_pages {
            let candidates = self
                .nodes
                .iter()
                .enumerate()
                .filter(|(_, node)| node.pages.last().is_some_and(|page| is_idle(*page)) && self.is_leaf(node));
            let ranked = candidates.map(|(at, node)| (self.rank(&node.usage), at));
            let Some((_, at)) = ranked.min_by(|a, b| a.partial_cmp(b).unwrap()) else { break };
            let node = &mut self.nodes[at];
            while num_freed < num_pages && node.pages.last().is_some_and(|page| is_idle(*page)) {
                node.pages.pop();
                node.path.truncate((node.start + node.pages.len()) * self.page);
                num_freed += 1;
            }
            if node.pages.is_empty() {
                self.nodes.swap_remove(at);
            }
        }
        let is_stuck = num_freed < num_pages && self.pages().any(is_idle);
        Evicted { num_freed, is_stuck }
    }
}

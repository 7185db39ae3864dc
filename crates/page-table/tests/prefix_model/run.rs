//! One run: a page table, a prefix cache, the bytes as content tags, and the model beside them.
//!
//! Every slot has a tag that stands for the extra key and all tokens up to its own; so a sequence that reads a foreign,
//! stale or wrongly shared page reads a wrong tag.

use std::collections::HashMap;

use kvpool::{
    EvictionPolicy, ExtraKey, FailurePlan, Lease, ManualFence, PageHash, PageId, PagePool, PageSize, PoolError,
    PrefixCache, PrefixConfig, PrefixError, Slot, TieredCache, hash_page,
};
use page_table::{AppendOutcome, PageTable, SeqId, TableError};

use crate::content::{Kept, TagTier, Text};
use crate::model::Model;

pub(crate) const NUM_PAGES: u32 = 40;
const MAX_SEQUENCES: usize = 6;

/// What a run is about.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setup {
    pub(crate) page_size: u32,
    pub(crate) policy: EvictionPolicy,
    /// All hashes are the same.
    pub(crate) is_hash_constant: bool,
    /// Evicted pages go to a tier of this many pages; the model does not know it and is left out.
    pub(crate) num_host_pages: u32,
}

/// An operation: which one, and two numbers that are taken modulo what is there.
pub(crate) type Op = (u8, u16, u16);

pub(crate) struct Run {
    pub(crate) table: PageTable,
    pub(crate) cache: TieredCache,
    pub(crate) model: Option<Model>,
    pub(crate) page: usize,
    pub(crate) tags: Vec<u64>,
    pub(crate) host_tags: Vec<u64>,
    pub(crate) num_calls: u32,
    pub(crate) sequences: Vec<(SeqId, Text)>,
    pub(crate) kept: Vec<Kept>,
    pub(crate) texts: Vec<Text>,
    pub(crate) num_steps: usize,
    is_plan_given: bool,
}

/// The tier of a run, borrowed beside its cache.
macro_rules! tier {
    ($run:ident) => {
        TagTier { page: $run.page, device: &mut $run.tags, host: &mut $run.host_tags, num_calls: &mut $run.num_calls }
    };
}

impl Run {
    pub(crate) fn new(setup: Setup) -> Run {
        let page = setup.page_size as usize;
        let pool = PagePool::new(NUM_PAGES, PageSize::new(setup.page_size).unwrap()).unwrap();
        let hash_page = if setup.is_hash_constant { |_, _: &[u32]| PageHash(0) } else { hash_page };
        let config = PrefixConfig { policy: setup.policy, max_events: 64, hash_page, ..PrefixConfig::default() };
        let device = PrefixCache::new(pool.clone(), config).unwrap();
        let cache = TieredCache::new(device, setup.num_host_pages.max(1)).unwrap();
        let model = (setup.num_host_pages == 0).then(|| Model::new(page, setup.policy));
        let (tags, host_tags) = (vec![0; NUM_PAGES as usize * page], vec![0; setup.num_host_pages as usize * page]);
        let (sequences, kept, texts) = (Vec::new(), Vec::new(), Vec::new());
        let table = PageTable::new(pool);
        Run {
            table,
            cache,
            model,
            page,
            tags,
            host_tags,
            num_calls: 0,
            sequences,
            kept,
            texts,
            num_steps: 0,
            is_plan_given: false,
        }
    }

    /// Makes one taking of pages fail; the program itself makes none fail then.
    pub(crate) fn set_failure_plan(&mut self, plan: FailurePlan) {
        self.table.pool().set_failure_plan(Some(plan));
        self.is_plan_given = true;
    }

    /// Whether the plan was met.
    pub(crate) fn has_failed(&self) -> bool {
        self.table.pool().failure_plan().is_none()
    }

    pub(crate) fn step(&mut self, (which, a, b): Op) {
        let (a, b) = (usize::from(a), usize::from(b));
        self.num_steps += 1;
        let live = self.sequences.len();
        match which % 32 {
            0..=7 if live < MAX_SEQUENCES => self.start(a, b),
            8..=13 if live > 0 => self.append(a % live, b % 9),
            14 if live > 0 && live < MAX_SEQUENCES => self.fork(a % live),
            15..=19 if live > 0 => self.insert(a % live, b),
            20 if live > 0 => self.truncate(a % live, b),
            21..=24 if live > 0 => self.finish(a % live, b),
            25 => self.pass_fence(a),
            26 => self.lock(a, b),
            27 | 28 => self.unlock(a),
            29 => self.evict(a % 8),
            30 => self.take_raw(a % 12),
            31 if a.is_multiple_of(64) => self.reset(),
            _ if self.is_plan_given => {}
            _ => self.table.pool().set_failure_plan(Some(FailurePlan::nth(b as u64 % 4))),
        }
    }

    /// A text that shares a random part with an earlier one.
    fn text(&mut self, a: usize, b: usize) -> Text {
        let salt = (a % 5 == 4).then_some([1; 32]);
        let extra = ExtraKey { adapter: (a % 7 > 4).then_some(a as u64 % 2), salt, modality: None };
        let mut tokens = Vec::new();
        if let Some(earlier) = (!self.texts.is_empty()).then(|| &self.texts[b % self.texts.len()]) {
            tokens.extend_from_slice(&earlier.tokens[..(a * 7 + b) % (earlier.tokens.len() + 1)]);
        }
        let num_new = 1 + (a ^ b) % (5 * self.page);
        tokens.extend((0..num_new).map(|at| u32::try_from((b >> (at % 11)) & 1).unwrap()));
        tokens.truncate(9 * self.page + 1);
        let text = Text::new(extra, &tokens);
        if self.texts.len() < 32 {
            self.texts.push(text.clone());
        } else {
            self.texts[a % 32] = text.clone();
        }
        text
    }

    fn start(&mut self, a: usize, b: usize) {
        let text = self.text(a, b);
        let lease = self.match_prefix(&text);
        let num_tokens = lease.len() * self.page;
        let seq = self.table.adopt(lease, num_tokens).unwrap();
        self.sequences.push((seq, Text::new(text.extra, &text.tokens[..num_tokens])));
        let (at, rest) = (self.sequences.len() - 1, &text.tokens[num_tokens..]);
        if !self.append_tokens(at, rest) {
            let (seq, _) = self.sequences.remove(at); // cancelled before it ran
            self.table.release(seq).unwrap();
        }
    }

    fn match_prefix(&mut self, text: &Text) -> Lease {
        let key = text.key();
        let Some(model) = &mut self.model else {
            let at_least = self.cache.device().peek(&key);
            let found = self.cache.match_prefix(&key, &mut tier!(self));
            assert!(found.num_tokens >= at_least && found.num_tokens < text.tokens.len());
            self.check_tags(found.lease.pages(), &text.tags[..found.num_tokens]);
            return found.lease;
        };
        let expected = model.peek(text.extra, &text.tokens);
        assert_eq!(self.cache.device().peek(&key), expected.len() * self.page);
        let preview = self.cache.device().preview(&key);
        let evictable = self.cache.device().size_info().evictable;
        let found = self.cache.device_mut().match_prefix(&key);
        assert_eq!(found.lease.pages(), expected);
        let num_locked = evictable - self.cache.device().size_info().evictable;
        assert_eq!((preview.num_tokens, preview.num_evictable_pages), (found.num_tokens, num_locked));
        assert_eq!(model.match_prefix(text.extra, &text.tokens), expected);
        found.lease
    }

    fn append(&mut self, i: usize, num_tokens: usize) {
        let tokens: Vec<u32> = (0..num_tokens).map(|at| u32::from((self.num_steps + at).is_multiple_of(2))).collect();
        self.append_tokens(i, &tokens);
    }

    /// Asks the table; where the pool is exhausted, lets the cache make room and asks again.
    fn append_tokens(&mut self, i: usize, tokens: &[u32]) -> bool {
        let seq = self.sequences[i].0;
        match self.table.append(seq, tokens.len()) {
            Ok(outcome) => self.write(i, tokens, &outcome),
            Err(TableError::Pool(PoolError::Exhausted { needed, .. })) => {
                self.forget_failure();
                if !self.make_room(needed) {
                    return false;
                }
                let outcome = self.table.append(seq, tokens.len()).or_else(|_| {
                    assert!(self.forget_failure());
                    self.table.append(seq, tokens.len())
                });
                self.write(i, tokens, &outcome.unwrap());
            }
            Err(other) => panic!("{other}"),
        }
        true
    }

    fn write(&mut self, i: usize, tokens: &[u32], outcome: &AppendOutcome) {
        for copy in &outcome.copies {
            let (from, to) = (copy.from.index() * self.page, copy.to.index() * self.page);
            self.tags.copy_within(from..from + self.page, to);
        }
        for token in tokens {
            let (seq, text) = &mut self.sequences[i];
            let slot = self.table.slot(*seq, text.tokens.len()).unwrap();
            text.push(*token);
            self.tags[slot.index().unwrap()] = *text.tags.last().unwrap();
        }
    }

    /// Whether there is room now.
    fn make_room(&mut self, num_pages: usize) -> bool {
        let before = self.cache.device().size_info();
        let got = if self.model.is_some() {
            self.cache.device_mut().make_room(num_pages)
        } else {
            self.cache.make_room(num_pages, &mut tier!(self))
        };
        let is_enough = num_pages <= before.free + before.evictable;
        assert_eq!(got.is_ok(), is_enough, "{num_pages} of {before:?}: {got:?}");
        if is_enough && num_pages > before.free {
            self.follow_eviction(num_pages - before.free);
        } else {
            assert_eq!(self.cache.device().size_info(), before);
        }
        is_enough
    }

    /// Lets the model evict too. Where it finds no leaf any more, the cache gave up inner pages: both start afresh.
    fn follow_eviction(&mut self, num_pages: usize) -> Option<usize> {
        let holders = self.holders();
        let evicted = self.model.as_mut()?.evict(num_pages, |page| !holders.contains_key(&page));
        if evicted.is_stuck {
            self.reset();
            return None;
        }
        Some(evicted.num_freed)
    }

    fn evict(&mut self, num_pages: usize) {
        if self.model.is_none() {
            let before = self.cache.device().size_info();
            assert!(self.make_room((before.free + num_pages).min(before.free + before.evictable)));
            return;
        }
        let before = self.cache.device().size_info();
        let num_freed = self.cache.device_mut().evict(num_pages);
        assert!(num_freed >= num_pages.min(before.evictable));
        if let Some(expected) = self.follow_eviction(num_pages) {
            assert_eq!(num_freed, expected);
        }
    }

    /// How often a page is held by anything but the cache.
    pub(crate) fn holders(&self) -> HashMap<PageId, usize> {
        let mut holders = HashMap::new();
        let in_sequences = self.sequences.iter().flat_map(|(seq, _)| self.table.pages(*seq).unwrap());
        let in_kept = self.kept.iter().filter(|kept| !kept.is_over()).flat_map(|kept| &kept.pages);
        for page in in_sequences.chain(in_kept) {
            *holders.entry(*page).or_insert(0) += 1;
        }
        holders
    }

    fn fork(&mut self, i: usize) {
        let (seq, text) = self.sequences[i].clone();
        let fork = self.table.fork(seq).unwrap();
        self.sequences.push((fork, text));
    }

    fn insert(&mut self, i: usize, b: usize) {
        let (seq, text) = self.sequences[i].clone();
        let priority = u8::try_from(b % 4 / 2).unwrap();
        let own = self.table.pages(seq).unwrap().to_vec();
        let lease = self.table.lease(seq).unwrap();
        let inserted = match self.cache.insert(&text.key(), lease, priority) {
            Ok(inserted) => inserted,
            Err(error) => return self.check_refused(error, &text, &own),
        };
        let num_duplicates = inserted.lease.pages().iter().zip(&own).filter(|(a, b)| a != b).count();
        assert_eq!(num_duplicates, inserted.num_duplicates);
        self.check_tags(inserted.lease.pages(), &text.tags[..inserted.lease.len() * self.page]);
        if let Some(model) = &mut self.model {
            let expected = model.insert(text.extra, &text.tokens, &own, priority);
            assert_eq!(inserted.lease.pages(), expected);
        }
        if b % 16 == 15 {
            return; // an engine that does not move
        }
        let replaced = self.table.replace_prefix(seq, inserted.lease).unwrap();
        if b % 8 == 3 {
            let tags = replaced.pages().to_vec();
            self.release_after(replaced, &tags, &text, 0);
        }
    }

    /// A sequence that did not move has duplicates of its own before pages that are cached elsewhere in the tree.
    fn check_refused(&self, error: PrefixError, text: &Text, own: &[PageId]) {
        let PrefixError::PageCached { page } = error else { panic!("{error} for {text:?}") };
        assert!(own.contains(&page));
        if let Some(model) = &self.model {
            assert!(model.pages().any(|cached| cached == page));
        }
    }

    fn truncate(&mut self, i: usize, b: usize) {
        let (seq, text) = self.sequences[i].clone();
        let len = b % (text.tokens.len() + 1);
        let page_size = self.table.pool().page_size();
        let first = page_size.pages_for(len);
        let behind = self.table.pages(seq).unwrap()[first..].to_vec();
        if b.is_multiple_of(3) {
            let fence = self.keep_for_fence(&behind, &text, first);
            self.table.truncate_after(seq, len, fence).unwrap();
        } else {
            self.table.truncate(seq, len).unwrap();
        }
        self.sequences[i].1.truncate(len);
    }

    /// Ends a sequence: most are inserted first, the others were cancelled.
    fn finish(&mut self, i: usize, b: usize) {
        if !b.is_multiple_of(4) {
            self.insert(i, b);
        }
        let (seq, text) = self.sequences.remove(i);
        let pages = self.table.pages(seq).unwrap().to_vec();
        if b % 5 == 4 {
            let fence = self.keep_for_fence(&pages, &text, 0);
            self.table.release_after(seq, fence).unwrap();
        } else if b % 11 == 10 && !pages.is_empty() {
            // A sliding window: the last page is held on.
            let lease = self.table.lease(seq).unwrap().share(pages.len() - 1..pages.len()).unwrap();
            self.keep(Some(lease), None, &pages[pages.len() - 1..], &text, pages.len() - 1);
            self.table.release(seq).unwrap();
        } else {
            self.table.release(seq).unwrap();
        }
    }

    fn release_after(&mut self, lease: Lease, pages: &[PageId], text: &Text, first: usize) {
        let fence = self.keep_for_fence(pages, text, first);
        lease.release_after(fence);
    }

    fn keep_for_fence(&mut self, pages: &[PageId], text: &Text, first: usize) -> ManualFence {
        let fence = ManualFence::new();
        self.keep(None, Some(fence.clone()), pages, text, first);
        fence
    }

    /// Watches the tags of `pages`, which are the pages of a text from page `first` on.
    fn keep(&mut self, lease: Option<Lease>, fence: Option<ManualFence>, pages: &[PageId], text: &Text, first: usize) {
        let page_size = self.table.pool().page_size();
        let slots =
            pages.iter().flat_map(|page| (0..page_size.get()).map(|at| Slot::new(*page, at, page_size).unwrap()));
        let tags = slots.zip(text.tags[(first * self.page).min(text.tags.len())..].iter().copied()).collect();
        self.kept.push(Kept { lease, fence, pages: pages.to_vec(), tags });
    }

    fn pass_fence(&mut self, a: usize) {
        let mut fences = self.kept.iter().filter_map(|kept| kept.fence.as_ref());
        let num_fences = fences.clone().count();
        if let Some(fence) = (num_fences > 0).then(|| fences.nth(a % num_fences)).flatten() {
            fence.pass();
        }
        self.kept.retain(|kept| !kept.is_over());
    }

    fn lock(&mut self, a: usize, b: usize) {
        if self.kept.len() > 3 || self.texts.is_empty() {
            return;
        }
        let text = self.texts[(a + b) % self.texts.len()].clone();
        let lease = self.match_prefix(&text);
        let pages = lease.pages().to_vec();
        self.keep(Some(lease), None, &pages, &text, 0);
    }

    fn unlock(&mut self, a: usize) {
        let locked: Vec<_> = (0..self.kept.len()).filter(|at| self.kept[*at].lease.is_some()).collect();
        if !locked.is_empty() {
            self.kept.swap_remove(locked[a % locked.len()]);
        }
    }

    /// Takes pages through the cache and writes nonsense to them.
    fn take_raw(&mut self, num_pages: usize) {
        let before = self.cache.device().size_info();
        let got = if self.model.is_some() {
            self.cache.device_mut().lease(num_pages)
        } else {
            self.cache.lease(num_pages, &mut tier!(self))
        };
        let has_failed = self.forget_failure();
        let Ok(lease) = got else {
            assert!(has_failed || num_pages > before.free + before.evictable);
            assert_eq!(self.cache.device().size_info(), before);
            return;
        };
        for page in lease.pages() {
            self.tags[page.index() * self.page..(page.index() + 1) * self.page].fill(u64::MAX);
        }
        if num_pages > before.free {
            drop(lease);
            self.follow_eviction(num_pages - before.free);
        }
    }

    /// Takes a plan back that was met.
    fn forget_failure(&self) -> bool {
        let has_failed = self.table.pool().failure_plan().is_some_and(|plan| plan.has_fired());
        if has_failed {
            self.table.pool().set_failure_plan(None);
        }
        has_failed
    }

    fn reset(&mut self) {
        self.cache.reset();
        if let Some(model) = &mut self.model {
            model.clear();
        }
    }
}

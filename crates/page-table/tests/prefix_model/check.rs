//! What must hold after every operation of a run.

use kvpool::{PageId, PrefixKey};

use crate::run::{NUM_PAGES, Run};

impl Run {
    /// Both audits, every tag that somebody may read, and where all pages are.
    pub(crate) fn check(&mut self) {
        self.table.audit().unwrap();
        self.cache.audit().unwrap();
        for (seq, text) in &self.sequences {
            assert_eq!(self.table.len(*seq), Ok(text.tokens.len()));
            self.check_tags(self.table.pages(*seq).unwrap(), &text.tags);
        }
        for kept in self.kept.iter().filter(|kept| !kept.is_over()) {
            kept.tags.iter().for_each(|(slot, tag)| assert_eq!(self.tags[slot.index().unwrap()], *tag, "slot {slot}"));
        }
        self.check_sizes();
        if self.num_steps.is_multiple_of(16) {
            self.check_contents();
        }
        drop(self.cache.device_mut().drain_events());
    }

    /// The pages hold these tags, in order.
    pub(crate) fn check_tags(&self, pages: &[PageId], tags: &[u64]) {
        assert_eq!(pages.len(), tags.len().div_ceil(self.page));
        for (page, tags) in pages.iter().zip(tags.chunks(self.page)) {
            let start = page.index() * self.page;
            assert_eq!(&self.tags[start..start + tags.len()], tags, "page {page}");
        }
    }

    /// Free, evictable, locked and fenced pages, from the lists of holders.
    fn check_sizes(&self) {
        let Some(model) = &self.model else { return };
        let size = self.cache.device().size_info();
        let holders = self.holders();
        let evictable = model.pages().filter(|page| !holders.contains_key(page)).count();
        let num_cached = model.pages().count();
        assert_eq!((size.cached, size.evictable, size.num_nodes), (num_cached, evictable, model.num_nodes()));
        let in_use = holders.len() + evictable;
        assert_eq!(size.free, NUM_PAGES as usize - in_use);
        assert_eq!(size.locked + size.fenced, holders.len());
    }

    /// Every leaf of the model can be found; with the equal number of pages that makes both the same.
    fn check_contents(&self) {
        let Some(model) = &self.model else { return };
        for (extra, path) in model.leaf_paths() {
            let longer = [path, &[9]].concat();
            assert_eq!(self.cache.device().peek(&PrefixKey { tokens: &longer, extra }), path.len());
        }
    }

    /// Ends everything: then all pages are free.
    pub(crate) fn drain(mut self) {
        for (seq, _) in std::mem::take(&mut self.sequences) {
            self.table.release(seq).unwrap();
        }
        self.kept.iter().filter_map(|kept| kept.fence.as_ref()).for_each(|fence| fence.pass());
        self.kept.clear();
        let size = self.cache.device().size_info();
        assert_eq!((size.free + size.evictable, size.evictable), (NUM_PAGES as usize, size.cached));
        assert_eq!(self.cache.device_mut().evict(usize::MAX), size.cached);
        let audit = self.cache.audit().unwrap()[0];
        assert_eq!((audit.size.free, audit.size.num_nodes, audit.num_roots), (NUM_PAGES as usize, 0, 0));
        assert_eq!((audit.pool.num_leases, audit.pool.num_pending), (0, 0));
    }
}

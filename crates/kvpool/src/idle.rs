//! Owns [`IdleList`]: pages that became idle, that is held by the prefix cache alone, since the cache last asked.
//! Invariant: a page is listed at most once, so the list is never longer than the pool. A listed page may have been
//! taken up again since; whoever drains the list looks at the page itself.

use crate::ids::PageId;

/// Pages that became idle, oldest first.
#[derive(Debug)]
pub(crate) struct IdleList {
    pages: Vec<PageId>,
    is_listed: Vec<bool>,
}

impl IdleList {
    pub(crate) fn new(num_pages: usize) -> IdleList {
        IdleList { pages: Vec::new(), is_listed: vec![false; num_pages] }
    }

    pub(crate) fn push(&mut self, page: PageId) {
        if !std::mem::replace(&mut self.is_listed[page.index()], true) {
            self.pages.push(page);
        }
    }

    /// Moves all pages behind those of `target`.
    pub(crate) fn drain_into(&mut self, target: &mut Vec<PageId>) {
        for page in &self.pages {
            self.is_listed[page.index()] = false;
        }
        target.append(&mut self.pages);
    }

    /// The last page, taken off.
    pub(crate) fn pop(&mut self) -> Option<PageId> {
        let page = self.pages.pop()?;
        self.is_listed[page.index()] = false;
        Some(page)
    }

    pub(crate) fn contains(&self, page: PageId) -> bool {
        self.is_listed[page.index()]
    }

    pub(crate) fn clear(&mut self) {
        while self.pop().is_some() {}
    }
}

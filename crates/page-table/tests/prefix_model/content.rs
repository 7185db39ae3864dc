//! What the pages of a run hold: content tags, what they stand for, and the tier that moves them.

use kvpool::{ExtraKey, Fence, HostTier, Lease, ManualFence, PageCopy, PageHash, PageId, PrefixKey, Slot, hash_page};

/// A request's key, and the tag of each of its tokens: of the extra key and all tokens up to this one.
#[derive(Debug, Clone)]
pub(crate) struct Text {
    pub(crate) extra: ExtraKey,
    pub(crate) tokens: Vec<u32>,
    pub(crate) tags: Vec<u64>,
}

impl Text {
    pub(crate) fn new(extra: ExtraKey, tokens: &[u32]) -> Text {
        let mut text = Text { extra, tokens: Vec::new(), tags: Vec::new() };
        tokens.iter().for_each(|token| text.push(*token));
        text
    }

    pub(crate) fn push(&mut self, token: u32) {
        let start = self.extra.adapter.unwrap_or(99) + 1000 * u64::from(self.extra.salt.is_some());
        let last = self.tags.last().copied().unwrap_or(start);
        self.tags.push(hash_page(PageHash(last), &[token, 0x5eed]).0);
        self.tokens.push(token);
    }

    pub(crate) fn truncate(&mut self, len: usize) {
        self.tokens.truncate(len);
        self.tags.truncate(len);
    }

    pub(crate) fn key(&self) -> PrefixKey<'_> {
        PrefixKey { tokens: &self.tokens, extra: self.extra }
    }
}

/// Pages that must keep what they hold, for as long as the lease or the fence lives.
pub(crate) struct Kept {
    pub(crate) lease: Option<Lease>,
    pub(crate) fence: Option<ManualFence>,
    pub(crate) pages: Vec<PageId>,
    pub(crate) tags: Vec<(Slot, u64)>,
}

/// Tags by slot, on both sides.
pub(crate) struct TagTier<'a> {
    pub(crate) page: usize,
    pub(crate) device: &'a mut [u64],
    pub(crate) host: &'a mut [u64],
    /// Every so many calls fail.
    pub(crate) num_calls: &'a mut u32,
}

#[derive(Debug, thiserror::Error)]
#[error("the link is down")]
pub(crate) struct LinkDown;

fn copy_tags(page: usize, from: &[u64], to: &mut [u64], copies: &[PageCopy]) {
    for copy in copies {
        let (source, target) = (copy.from.index() * page, copy.to.index() * page);
        to[target..target + page].copy_from_slice(&from[source..source + page]);
    }
}

impl HostTier for TagTier<'_> {
    type Error = LinkDown;

    fn offload(&mut self, copies: &[PageCopy]) -> Result<(), LinkDown> {
        *self.num_calls += 1;
        copy_tags(self.page, self.device, self.host, copies);
        if self.num_calls.is_multiple_of(7) { Err(LinkDown) } else { Ok(()) }
    }

    fn restore(&mut self, copies: &[PageCopy]) -> Result<(), LinkDown> {
        *self.num_calls += 1;
        if self.num_calls.is_multiple_of(7) {
            return Err(LinkDown);
        }
        copy_tags(self.page, self.host, self.device, copies);
        Ok(())
    }
}

impl Kept {
    pub(crate) fn is_over(&self) -> bool {
        self.fence.as_ref().is_some_and(Fence::has_passed)
    }
}

//! A session's pages: sequences in the page table, and what ended or paused requests left in the prefix cache.
//!
//! Invariant: a job's `seq` holds pages for just its `computed` tokens between steps, and pages that it shares with
//! the cache hold whole pages that nobody writes again.

use kvpool::{PagePool, PrefixCache, PrefixConfig, PrefixKey, PrefixPreview};
use page_table::{AppendOutcome, PageTable, SeqId};

use super::error::{ServeError, StepError};
use super::job::Job;

/// The page table and, where there is one, the prefix cache.
#[derive(Debug)]
pub(super) struct KvPages {
    pub(super) table: PageTable,
    pub(super) prefix: Option<PrefixCache>,
}

impl KvPages {
    pub(super) fn new(pool: PagePool, prefix: Option<PrefixConfig>) -> Result<Self, ServeError> {
        let prefix = prefix.map(|config| PrefixCache::new(pool.clone(), config)).transpose()?;
        Ok(Self { table: PageTable::new(pool), prefix })
    }

    /// Pages that can be taken: free ones, and those that only the cache holds.
    pub(super) fn available(&self) -> usize {
        match &self.prefix {
            Some(prefix) => {
                let size = prefix.size_info();
                size.free + size.evictable
            }
            None => self.table.pool().counts().free,
        }
    }

    /// What the cache has of a waiting job's tokens.
    pub(super) fn preview(&self, job: &Job) -> PrefixPreview {
        self.prefix.as_ref().map_or_else(PrefixPreview::default, |prefix| prefix.preview(&key(job, job.tokens.len())))
    }

    /// Whether an older job is about to compute pages that a waiting one could share, beyond the tokens that it finds
    /// now.
    pub(super) fn will_be_shared(&self, older: &Job, job: &Job, num_cached_tokens: usize) -> bool {
        if self.prefix.is_none() || older.extra != job.extra {
            return false;
        }
        let page_size = self.table.pool().page_size().get() as usize;
        // One page more than is there already must be the same; of most pairs the lengths alone say no.
        let least = (older.computed.max(num_cached_tokens) / page_size + 1) * page_size;
        // The last token of a prompt is always computed.
        let candidate = job.tokens[..job.tokens.len() - 1].get(..least);
        candidate.is_some_and(|candidate| older.tokens.starts_with(candidate))
    }

    /// Gives a waiting job the cached pages of its first tokens.
    pub(super) fn start(&mut self, job: &mut Job) {
        let Some(prefix) = &mut self.prefix else { return };
        let found = prefix.match_prefix(&key(job, job.tokens.len()));
        if found.num_tokens > 0 {
            let seq = self.table.adopt(found.lease, found.num_tokens);
            job.seq = Some(seq.expect("a match has whole pages of the table's pool"));
            job.computed = found.num_tokens;
        }
    }

    /// Takes the pages of all appends, all or none.
    pub(super) fn append(&mut self, appends: &[(SeqId, usize)], num_pages: usize) -> Result<AppendOutcome, StepError> {
        if let Some(prefix) = &mut self.prefix {
            prefix.make_room(num_pages)?;
        }
        Ok(self.table.append_batch(appends)?)
    }

    /// Shares what a running job has computed, and moves it to the cached pages where the cache has its own.
    pub(super) fn share(&mut self, job: &Job) {
        let (Some(prefix), Some(seq)) = (&mut self.prefix, job.seq) else { return };
        let lease = self.table.lease(seq).expect("a job's sequence is live");
        let inserted = prefix.insert(&key(job, job.computed), lease).expect("a sequence's pages hold its own tokens");
        if inserted.num_duplicates > 0 {
            // The replaced pages are free at once: on the host no work is in flight between steps.
            drop(self.table.replace_prefix(seq, inserted.lease).expect("the cache has no more than the sequence"));
        }
    }

    /// Takes a job's pages away; what it has computed stays in the cache until somebody needs the room.
    pub(super) fn release(&mut self, job: &mut Job) {
        if let (Some(prefix), Some(seq)) = (&mut self.prefix, job.seq) {
            let lease = self.table.lease(seq).expect("a job's sequence is live");
            let inserted = prefix.insert(&key(job, job.computed), lease);
            drop(inserted.expect("a sequence's pages hold its own tokens"));
        }
        self.forget(job);
    }

    /// Takes a job's pages away without sharing anything.
    pub(super) fn forget(&mut self, job: &mut Job) {
        if let Some(seq) = job.seq.take() {
            self.table.release(seq).expect("a job's sequence is live");
        }
        job.computed = 0;
    }
}

fn key(job: &Job, len: usize) -> PrefixKey<'_> {
    PrefixKey { tokens: &job.tokens[..len], extra: job.extra }
}

//! Who computes how many tokens in a step: decoding first, then prompts in age order, then new requests.
//!
//! Invariants: requests run in the order of submission, and only the youngest ones ever give their pages back, so the
//! oldest always advances and there is no livelock; nobody is admitted past an older waiting request, so there is no
//! starvation. Pages are counted, not taken: the session takes them for all requests of a step at once. Evictable pages
//! of the prefix cache count as free.

use std::collections::VecDeque;

use kvpool::PageSize;

use super::job::Job;
use super::pages::KvPages;

/// Limits of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Requests that hold pages at once, ≥ 1.
    pub max_running: usize,
    /// Tokens of a step, ≥ 1.
    pub max_step_tokens: usize,
    /// Prompt tokens of one request in one step, ≥ 1.
    pub extend_chunk: usize,
}

impl Default for SchedulerConfig {
    /// 256 requests, 2,048 tokens, whole prompts where they fit.
    fn default() -> Self {
        Self { max_running: 256, max_step_tokens: 2048, extend_chunk: usize::MAX }
    }
}

/// A share of a step: the `index`-th running request computes `q_len` tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Share {
    pub(super) index: usize,
    pub(super) q_len: usize,
}

/// Requests that wait and requests that run, both in the order of submission.
#[derive(Debug)]
pub(super) struct Scheduler {
    config: SchedulerConfig,
    page_size: PageSize,
    pub(super) waiting: VecDeque<Job>,
    pub(super) running: Vec<Job>,
    /// The step decided last.
    pub(super) shares: Vec<Share>,
}

impl Scheduler {
    pub(super) fn new(config: SchedulerConfig, page_size: PageSize) -> Self {
        Self { config, page_size, waiting: VecDeque::new(), running: Vec::new(), shares: Vec::new() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// Decides the next step. Jobs that had to give their pages back wait again and are reported.
    pub(super) fn plan(&mut self, pages: &mut KvPages, mut preempted: impl FnMut(&Job)) {
        self.shares.clear();
        let mut free = pages.available();
        let num_decoding = self.running.iter().filter(|job| job.decodes()).count();
        let mut decode_budget = num_decoding.min(self.config.max_step_tokens);
        let mut extend_budget = self.config.max_step_tokens - decode_budget;
        let mut has_preempted = false;
        let mut index = 0;
        while index < self.running.len() {
            let decodes = self.running[index].decodes();
            let budget = if decodes { &mut decode_budget } else { &mut extend_budget };
            let wanted = if decodes { 1.min(*budget) } else { self.chunk(&self.running[index], *budget) };
            let mut q_len = self.fitting(self.running[index].computed, wanted, free);
            while wanted > 0 && q_len == 0 {
                has_preempted = true;
                let youngest = self.running.len() - 1;
                preempted(&self.running[youngest]);
                self.preempt_youngest(pages);
                free = pages.available() - self.num_pages();
                if youngest == index {
                    return;
                }
                q_len = self.fitting(self.running[index].computed, wanted, free);
            }
            if q_len > 0 {
                *budget -= q_len;
                free -= self.pages_for(&self.running[index], q_len);
                self.shares.push(Share { index, q_len });
            }
            index += 1;
        }
        if !has_preempted {
            self.admit(pages, extend_budget);
        }
    }

    /// Starts waiting requests, oldest first, while there is room for all that they have to compute; one that is
    /// alone starts anyway. One whose first tokens an older request is just computing waits for that.
    fn admit(&mut self, pages: &mut KvPages, mut budget: usize) {
        let mut claimed = self.num_pages();
        while self.running.len() < self.config.max_running && budget > 0 {
            let Some(job) = self.waiting.front() else { return };
            let is_alone = self.running.is_empty();
            let cached = pages.preview(job);
            // Cached pages that it will hold are no longer there to be evicted.
            let free = pages.available().saturating_sub(cached.num_evictable_pages + claimed);
            let needed = self.page_size.pages_for(job.tokens.len()) - self.page_size.pages_for(cached.num_tokens);
            let wanted = (job.tokens.len() - cached.num_tokens).min(self.config.extend_chunk).min(budget);
            let q_len = self.fitting(cached.num_tokens, wanted, free);
            let has_no_room = q_len == 0 || (needed > free && !is_alone);
            if has_no_room || self.running.iter().any(|older| pages.will_be_shared(older, job, cached.num_tokens)) {
                return;
            }
            let mut job = self.waiting.pop_front().expect("looked at above");
            pages.start(&mut job);
            assert_eq!(job.computed, cached.num_tokens, "a match finds what the preview said");
            budget -= q_len;
            // Pages for the rest of the prompt stay claimed, so that the next one does not take them.
            claimed += needed;
            self.shares.push(Share { index: self.running.len(), q_len });
            self.running.push(job);
        }
    }

    fn preempt_youngest(&mut self, pages: &mut KvPages) {
        let mut job = self.running.pop().expect("the caller looks at a running job");
        pages.release(&mut job);
        job.num_preemptions += 1;
        self.waiting.push_front(job);
    }

    fn chunk(&self, job: &Job, budget: usize) -> usize {
        job.remaining().min(self.config.extend_chunk).min(budget)
    }

    /// At most `wanted` tokens behind those computed, as many as the free pages hold.
    fn fitting(&self, computed: usize, wanted: usize, free: usize) -> usize {
        let held = self.page_size.pages_for(computed);
        let room = (held + free).saturating_mul(self.page_size.get() as usize) - computed;
        wanted.min(room)
    }

    fn pages_for(&self, job: &Job, q_len: usize) -> usize {
        self.page_size.pages_for(job.computed + q_len) - self.page_size.pages_for(job.computed)
    }

    /// Pages that the step's shares take.
    pub(super) fn num_pages(&self) -> usize {
        self.shares.iter().map(|s| self.pages_for(&self.running[s.index], s.q_len)).sum()
    }
}

//! A session: requests, pages, caches and a backend; [`Session::step`] runs one batch through a model.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use attn_metadata::{BackendConfig, BatchLimits, BoxedBackend, Host, HostDevice, ModelSpec, PoolShape, Selection};
use attn_reference::verify::{VerifyBackend, VerifyHandle, VerifyReport};
use kvpool::{Dtype, KvFormat, PagePool, PageSize, PrefixCache, PrefixConfig};
use page_table::PageTable;

use super::caches::LayerCaches;
use super::error::{ServeError, StepError, SubmitError};
use super::job::Job;
use super::metrics::{Metrics, PrefixMetrics, StepTimes};
use super::pages::KvPages;
use super::request::{Completion, Event, FinishReason, RequestId, RequestSpec};
use super::scheduler::{Scheduler, SchedulerConfig};
use super::stats::Stats;
use super::step::StepBuffers;
use crate::backends::{create_backend, create_oracle};
use crate::lm::LanguageModel;
use crate::sample::Sampler;

/// How a session is made.
#[derive(Clone, Debug)]
pub struct SessionConfig {
    /// Tokens in a page.
    pub page_size: PageSize,
    /// Pages of the pool, over all requests.
    pub num_pages: u32,
    /// How KV is stored.
    pub kv_format: KvFormat,
    /// Limits of a step.
    pub scheduler: SchedulerConfig,
    /// The attention backend: a name, a pair `"prefill,decode"`, or `"auto"`.
    pub backend: String,
    /// Threads of the backend.
    pub device: HostDevice,
    /// The prefix cache; `None`: every request computes all its tokens.
    pub prefix_cache: Option<PrefixConfig>,
    /// Compares the first step and every n-th after it with the oracle; 0: never.
    pub verify_every: u64,
}

/// Requests over one model, one pool and one backend.
pub struct Session {
    vocab_size: usize,
    max_len: usize,
    pub(super) backend: BoxedBackend<Host>,
    selection: Selection,
    verify: Option<VerifyHandle>,
    pub(super) pages: KvPages,
    pub(super) caches: Vec<LayerCaches>,
    pub(super) scheduler: Scheduler,
    next_id: u64,
    /// Requests that were cancelled since the last step: its callback is yet to hear of them.
    pub(super) cancelled: Vec<RequestId>,
    pub(super) completions: VecDeque<Completion>,
    pub(super) stats: Stats,
    pub(super) step_times: StepTimes,
    pub(super) step: StepBuffers,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("backend", &self.backend.name())
            .field("running", &self.scheduler.running.len())
            .field("waiting", &self.scheduler.waiting.len())
            .field("stats", &self.stats)
            .finish_non_exhaustive()
    }
}

impl Session {
    /// Makes pools and caches for a model and chooses its backend.
    ///
    /// # Errors
    /// [`ServeError`].
    pub fn new(model: &dyn LanguageModel, config: &SessionConfig) -> Result<Self, ServeError> {
        let SchedulerConfig { max_running, max_step_tokens, extend_chunk } = config.scheduler;
        let sizes =
            [("max_running", max_running), ("max_step_tokens", max_step_tokens), ("extend_chunk", extend_chunk)];
        if let Some((field, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return Err(ServeError::Zero { field });
        }
        let pool = PagePool::new(config.num_pages, config.page_size)?;
        let kv_dtype = config.kv_format.dtype();
        let spec = ModelSpec::new(model.layers().to_vec(), Dtype::F32, kv_dtype, config.page_size)?;
        let caches = LayerCaches::for_model(&spec, config.num_pages, config.kv_format)?;
        let backend = BackendConfig { model: Arc::new(spec), limits: BatchLimits::NONE, device: config.device };
        let (chosen, selection) = create_backend(&config.backend, &backend)?;
        let (backend, verify) = shadow(chosen, &backend, config.verify_every)?;
        let shape = PoolShape { num_pages: config.num_pages, page_size: config.page_size };
        Ok(Self {
            vocab_size: model.vocab_size(),
            max_len: model.max_len(),
            backend,
            selection,
            verify,
            pages: KvPages::new(pool, config.prefix_cache)?,
            caches,
            scheduler: Scheduler::new(config.scheduler, config.page_size),
            next_id: 0,
            cancelled: Vec::new(),
            completions: VecDeque::new(),
            stats: Stats::default(),
            step_times: StepTimes::default(),
            step: StepBuffers::new(shape),
        })
    }

    /// What was chosen as backend, and why not others.
    #[must_use]
    pub const fn selection(&self) -> &Selection {
        &self.selection
    }

    /// Errors against the oracle so far, where steps are compared with it.
    #[must_use]
    pub fn verify_report(&self) -> Option<VerifyReport> {
        self.verify.as_ref().map(VerifyHandle::report)
    }

    /// What the session looks like now.
    #[must_use]
    pub fn metrics(&self) -> Metrics {
        let pages = self.pages.table.pool().counts();
        Metrics {
            num_waiting: self.scheduler.waiting.len(),
            num_running: self.scheduler.running.len(),
            free_pages: pages.free,
            available_pages: self.pages.available(),
            total_pages: pages.total,
            stats: self.stats,
            step_times: self.step_times.clone(),
            prefix: self.pages.prefix.as_ref().map(PrefixMetrics::new),
        }
    }

    /// Counters so far.
    #[must_use]
    pub const fn stats(&self) -> &Stats {
        &self.stats
    }

    /// The page table: sequences and pool, for audits and metrics.
    #[must_use]
    pub const fn table(&self) -> &PageTable {
        &self.pages.table
    }

    /// The prefix cache, where there is one: for audits and events.
    pub fn prefix_cache(&mut self) -> Option<&mut PrefixCache> {
        self.pages.prefix.as_mut()
    }

    /// Whether every request has ended.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.scheduler.is_empty()
    }

    /// Adds a request; it waits for the next step.
    ///
    /// # Errors
    /// [`SubmitError`]; nothing is changed then.
    pub fn submit(&mut self, spec: RequestSpec) -> Result<RequestId, SubmitError> {
        self.enqueue(spec, None)
    }

    /// Adds a request as [`submit`](Self::submit) does, with a channel of its own: its events go there too, as they
    /// happen, so that another thread can follow this one request. The channel never blocks a step, and ends after
    /// [`Event::Finished`].
    ///
    /// Who drops the receiver has lost interest: the request is cancelled when its next token finds nobody there.
    ///
    /// # Errors
    /// [`SubmitError`]; nothing is changed then.
    pub fn stream(&mut self, spec: RequestSpec) -> Result<(RequestId, Receiver<Event>), SubmitError> {
        let (sender, receiver) = channel();
        Ok((self.enqueue(spec, Some(sender))?, receiver))
    }

    fn enqueue(&mut self, spec: RequestSpec, channel: Option<Sender<Event>>) -> Result<RequestId, SubmitError> {
        self.check(&spec)?;
        let sampler = Sampler::new(spec.sampling)?;
        let id = RequestId(self.next_id);
        self.next_id += 1;
        // What decoding appends has its place now, so that a step need not allocate for it: little beside its KV.
        let (prompt_len, mut tokens) = (spec.prompt.len(), spec.prompt);
        tokens.reserve_exact(spec.max_new_tokens);
        self.scheduler.waiting.push_back(Job {
            id,
            prompt_len,
            tokens,
            extra: spec.extra,
            max_new_tokens: spec.max_new_tokens,
            stop_tokens: spec.stop_tokens,
            sampler,
            margins: Vec::with_capacity(spec.max_new_tokens),
            seq: None,
            computed: 0,
            num_preemptions: 0,
            channel,
        });
        Ok(id)
    }

    /// Ends a request now; its pages are free at once. False where it has already ended.
    ///
    /// Its own channel hears of it at once, the callback of [`step`](Self::step) when the next step begins.
    pub fn cancel(&mut self, id: RequestId) -> bool {
        let Scheduler { waiting, running, .. } = &mut self.scheduler;
        let job = match running.iter().position(|job| job.id == id) {
            Some(index) => Some(running.remove(index)),
            None => waiting.iter().position(|job| job.id == id).and_then(|index| waiting.remove(index)),
        };
        let Some(mut job) = job else { return false };
        self.pages.release(&mut job);
        self.stats.num_cancelled += 1;
        self.cancelled.push(id);
        self.completions.push_back(job.complete(FinishReason::Cancelled));
        true
    }

    /// The next request that has ended, in the order of ending.
    pub fn take_completion(&mut self) -> Option<Completion> {
        self.completions.pop_front()
    }

    /// Steps until every request has ended.
    ///
    /// # Errors
    /// [`StepError`] of the first step that fails.
    pub fn run_to_end(
        &mut self,
        model: &mut dyn LanguageModel,
        on_event: &mut dyn FnMut(Event),
    ) -> Result<(), StepError> {
        while self.step(model, on_event)? {}
        Ok(())
    }

    fn check(&self, spec: &RequestSpec) -> Result<(), SubmitError> {
        let RequestSpec { prompt, max_new_tokens, .. } = spec;
        let (prompt_len, max_new_tokens) = (prompt.len(), *max_new_tokens);
        if prompt_len == 0 {
            return Err(SubmitError::EmptyPrompt);
        }
        if max_new_tokens == 0 {
            return Err(SubmitError::NothingToGenerate);
        }
        let vocab_size = self.vocab_size;
        if let Some(position) = prompt.iter().position(|&t| t as usize >= vocab_size) {
            return Err(SubmitError::UnknownToken { position, token: prompt[position], vocab_size });
        }
        let len = prompt_len.saturating_add(max_new_tokens);
        if len > self.max_len {
            return Err(SubmitError::TooLong { prompt_len, max_new_tokens, max_len: self.max_len });
        }
        // The last generated token's KV is never needed.
        let pool = self.step.batch.pool();
        let needed = pool.page_size.pages_for(len - 1);
        if needed > pool.num_pages as usize {
            return Err(SubmitError::PoolTooSmall { needed, total: pool.num_pages as usize });
        }
        Ok(())
    }
}

/// Puts the oracles behind a backend, where steps are to be compared.
fn shadow(
    backend: BoxedBackend<Host>,
    config: &BackendConfig<Host>,
    every: u64,
) -> Result<(BoxedBackend<Host>, Option<VerifyHandle>), ServeError> {
    if every == 0 {
        return Ok((backend, None));
    }
    let mut backend = VerifyBackend::new(backend, every);
    if config.model.layers().iter().any(|layer| layer.family().is_some()) {
        backend = backend.with_families(create_oracle(config)?);
    }
    let handle = backend.handle();
    Ok((Box::new(backend), Some(handle)))
}

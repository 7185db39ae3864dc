//! A session: requests, pages, caches and a backend; [`Session::step`] runs one batch through a model.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use attn_metadata::{
    AttentionBackend, BackendConfig, Batch, BatchLimits, BoxedBackend, Host, HostDevice, ModelSpec, PoolShape,
    RawBatch, Selection,
};
use kvpool::{Dtype, HostKv, KvFormat, KvLayout, KvShape, PagePool, PageSize};
use page_table::{PageTable, SeqId, StepTables};

use super::attention::PagedAttention;
use super::error::{ServeError, StepError, SubmitError};
use super::job::Job;
use super::model::{LanguageModel, ModelInput};
use super::request::{Completion, Event, FinishReason, RequestId, RequestSpec};
use super::scheduler::{Pages, Scheduler, SchedulerConfig, Share};
use super::stats::Stats;
use crate::backends::create_backend;
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
}

/// Requests over one model, one pool and one backend.
pub struct Session {
    vocab_size: usize,
    max_len: usize,
    backend: BoxedBackend<Host>,
    selection: Selection,
    table: PageTable,
    caches: Vec<HostKv>,
    scheduler: Scheduler,
    next_id: u64,
    completions: VecDeque<Completion>,
    stats: Stats,
    step: StepBuffers,
}

/// What a step fills; kept, so that a warm step does not allocate.
#[derive(Debug)]
struct StepBuffers {
    appends: Vec<(SeqId, usize)>,
    tables: StepTables,
    batch: Batch,
    tokens: Vec<u32>,
    positions: Vec<u32>,
    logit_rows: Vec<usize>,
    logits: Vec<f32>,
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
        let caches = make_caches(model, config)?;
        let kv_dtype = config.kv_format.dtype();
        let spec = ModelSpec::new(model.layers().to_vec(), Dtype::F32, kv_dtype, config.page_size)?;
        let backend =
            BackendConfig { model: Arc::new(spec), limits: BatchLimits::NONE, device: config.device };
        let (backend, selection) = create_backend(&config.backend, &backend)?;
        let shape = PoolShape { num_pages: config.num_pages, page_size: config.page_size };
        Ok(Self {
            vocab_size: model.vocab_size(),
            max_len: model.max_len(),
            backend,
            selection,
            table: PageTable::new(pool),
            caches,
            scheduler: Scheduler::new(config.scheduler, config.page_size),
            next_id: 0,
            completions: VecDeque::new(),
            stats: Stats::default(),
            step: StepBuffers::new(shape),
        })
    }

    /// What was chosen as backend, and why not others.
    #[must_use]
    pub const fn selection(&self) -> &Selection {
        &self.selection
    }

    /// Counters so far.
    #[must_use]
    pub const fn stats(&self) -> &Stats {
        &self.stats
    }

    /// The page table: sequences and pool, for audits and metrics.
    #[must_use]
    pub const fn table(&self) -> &PageTable {
        &self.table
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
        self.check(&spec)?;
        let sampler = Sampler::new(spec.sampling)?;
        let id = RequestId(self.next_id);
        self.next_id += 1;
        self.scheduler.waiting.push_back(Job {
            id,
            prompt_len: spec.prompt.len(),
            tokens: spec.prompt,
            max_new_tokens: spec.max_new_tokens,
            stop_tokens: spec.stop_tokens,
            sampler,
            margins: Vec::new(),
            seq: None,
            computed: 0,
            num_preemptions: 0,
        });
        Ok(id)
    }

    /// Ends a request now; its pages are free at once. False where it has already ended.
    pub fn cancel(&mut self, id: RequestId) -> bool {
        let Scheduler { waiting, running, .. } = &mut self.scheduler;
        let job = match running.iter().position(|job| job.id == id) {
            Some(index) => Some(running.remove(index)),
            None => waiting.iter().position(|job| job.id == id).and_then(|index| waiting.remove(index)),
        };
        let Some(mut job) = job else { return false };
        TablePages(&mut self.table).release(&mut job);
        self.completions.push_back(job.complete(FinishReason::Cancelled));
        true
    }

    /// The next request that has ended, in the order of ending.
    pub fn take_completion(&mut self) -> Option<Completion> {
        self.completions.pop_front()
    }

    /// Runs one step: every scheduled request computes its share, and those whose tokens are all computed get a new
    /// one. Returns false where there is nothing to do.
    ///
    /// # Errors
    /// [`StepError`]; the step can be tried again.
    pub fn step(&mut self, model: &mut dyn LanguageModel, on_event: &mut dyn FnMut(Event)) -> Result<bool, StepError> {
        let begin = Instant::now();
        let Self { scheduler, table, stats, .. } = self;
        scheduler.plan(&mut TablePages(table), |id| {
            stats.num_preemptions += 1;
            on_event(Event::Preempted { id });
        });
        if self.scheduler.shares().is_empty() {
            return Ok(false);
        }
        self.take_pages()?;
        let result = self.run(model, begin);
        match result.and_then(|()| self.sample(on_event)) {
            Ok(()) => Ok(true),
            Err(error) => {
                self.give_pages_back();
                Err(error)
            }
        }
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

    /// Takes the pages of all shares, all or none, and copies pages that were shared.
    fn take_pages(&mut self) -> Result<(), StepError> {
        let Self { scheduler, table, caches, step, .. } = self;
        step.appends.clear();
        for Share { index, q_len } in scheduler.shares.iter().copied() {
            let job = &mut scheduler.running[index];
            let seq = *job.seq.get_or_insert_with(|| table.create());
            step.appends.push((seq, q_len));
        }
        let outcome = table.append_batch(&step.appends)?;
        for copy in outcome.copies() {
            for cache in caches.iter_mut() {
                cache.copy_page(copy.from, copy.to).expect("pages of the pool are pages of its caches");
            }
        }
        Ok(())
    }

    /// Undoes [`take_pages`](Self::take_pages).
    fn give_pages_back(&mut self) {
        for Share { index, .. } in self.scheduler.shares.iter().copied() {
            let job = &self.scheduler.running[index];
            let seq = job.seq.expect("a job with a share has a sequence");
            self.table.truncate(seq, job.computed).expect("its sequence was longer");
        }
    }

    fn run(&mut self, model: &mut dyn LanguageModel, begin: Instant) -> Result<(), StepError> {
        let Self { scheduler, table, step, backend, caches, stats, .. } = self;
        table.step_tables(&step.appends, &mut step.tables)?;
        step.batch.set(&RawBatch::from_tables(&step.tables))?;
        step.gather(scheduler);
        let prepared = backend.prepare_metadata(&step.batch)?;
        let planned = Instant::now();
        let mut attention =
            PagedAttention { backend: &mut **backend, step: &prepared, caches, time: Duration::ZERO };
        let input =
            ModelInput { tokens: &step.tokens, positions: &step.positions, logit_rows: &step.logit_rows };
        model.forward(input, &mut attention, &mut step.logits)?;
        stats.attention_time += attention.time;
        stats.host_time += planned - begin;
        stats.model_time += planned.elapsed();
        Ok(())
    }

    /// Chooses a token for each request whose tokens are all computed, then counts the step as done.
    fn sample(&mut self, on_event: &mut dyn FnMut(Event)) -> Result<(), StepError> {
        let Self { scheduler, step, stats, vocab_size, .. } = self;
        let mut choices = Vec::with_capacity(step.logit_rows.len());
        let mut rows = step.logits.chunks_exact(*vocab_size);
        for share in scheduler.shares.iter().copied() {
            let job = &mut scheduler.running[share.index];
            if share.q_len == job.remaining() {
                let row = rows.next().expect("a row of logits for each request that asked");
                // A failed draw must not have advanced the others' generators either.
                let mut sampler = job.sampler.clone();
                let choice = sampler.sample(row).map_err(|source| StepError::Sample { id: job.id, source })?;
                choices.push((share.index, sampler, choice));
            }
        }
        for Share { index, q_len } in scheduler.shares.iter().copied() {
            let job = &mut scheduler.running[index];
            let counter = if job.decodes() { &mut stats.decode_tokens } else { &mut stats.prefill_tokens };
            *counter += q_len as u64;
            job.computed += q_len;
        }
        stats.num_steps += 1;
        stats.max_step_requests = stats.max_step_requests.max(scheduler.shares.len());
        stats.max_pages = stats.max_pages.max(self.table.pool().counts().leased);
        stats.generated_tokens += choices.len() as u64;
        let mut ended = Vec::new();
        for (index, sampler, choice) in choices {
            let job = &mut scheduler.running[index];
            job.sampler = sampler;
            let (id, place) = (job.id, job.num_generated());
            let (token, logit, margin) = (choice.token, choice.logit, choice.margin);
            on_event(Event::Token { id, index: place, token, logit, margin });
            ended.extend(job.push(token, margin).map(|reason| (index, reason)));
        }
        self.finish(&ended, on_event);
        Ok(())
    }

    /// Ends running requests, given by ascending index.
    fn finish(&mut self, ended: &[(usize, FinishReason)], on_event: &mut dyn FnMut(Event)) {
        for &(index, reason) in ended.iter().rev() {
            let mut job = self.scheduler.running.remove(index);
            TablePages(&mut self.table).release(&mut job);
            self.completions.push_back(job.complete(reason));
        }
        let first = self.completions.len() - ended.len();
        self.completions.make_contiguous()[first..].reverse();
        for completion in self.completions.iter().skip(first) {
            on_event(Event::Finished { id: completion.id, reason: completion.reason });
        }
    }
}

impl StepBuffers {
    fn new(pool: PoolShape) -> Self {
        Self {
            appends: Vec::new(),
            tables: StepTables::default(),
            batch: Batch::empty(pool),
            tokens: Vec::new(),
            positions: Vec::new(),
            logit_rows: Vec::new(),
            logits: Vec::new(),
        }
    }

    /// Tokens, positions and logit rows of the scheduled shares.
    fn gather(&mut self, scheduler: &Scheduler) {
        self.tokens.clear();
        self.positions.clear();
        self.logit_rows.clear();
        for Share { index, q_len } in scheduler.shares().iter().copied() {
            let job = &scheduler.running[index];
            let range = job.computed..job.computed + q_len;
            self.tokens.extend_from_slice(&job.tokens[range.clone()]);
            self.positions.extend(range.clone().map(|p| u32::try_from(p).expect("below the model's max_len")));
            if range.end == job.tokens.len() {
                self.logit_rows.push(self.tokens.len() - 1);
            }
        }
    }
}

/// The scheduler's view of the page table.
struct TablePages<'a>(&'a mut PageTable);

impl Pages for TablePages<'_> {
    fn free(&self) -> usize {
        self.0.pool().counts().free
    }

    fn release(&mut self, job: &mut Job) {
        if let Some(seq) = job.seq.take() {
            self.0.release(seq).expect("a job's sequence is live");
        }
    }
}

fn make_caches(model: &dyn LanguageModel, config: &SessionConfig) -> Result<Vec<HostKv>, ServeError> {
    let cache = |layer: &attn_metadata::Layer| {
        let heads = layer.heads();
        let shape = KvShape {
            num_pages: config.num_pages,
            page_size: config.page_size,
            num_kv_heads: heads.num_kv_heads,
            head_dim_k: heads.head_dim_qk,
            head_dim_v: heads.head_dim_vo,
        };
        Ok(HostKv::new(shape, KvLayout::Nhd, config.kv_format)?)
    };
    model.layers().iter().map(cache).collect()
}

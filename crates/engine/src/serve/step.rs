//! One step of a session: take pages, plan, run the model, choose tokens; or undo it all.

use std::time::{Duration, Instant};

use attn_metadata::{Batch, PoolShape, RawBatch};
use page_table::{SeqId, StepTables};

use super::attention::PagedAttention;
use super::error::StepError;
use super::request::{Event, FinishReason};
use super::scheduler::{Scheduler, Share};
use super::session::Session;
use crate::lm::{LanguageModel, Logits, ModelInput};
use crate::sample::{Choice, Sampler};

/// What a step fills; kept, so that a warm step does not allocate.
#[derive(Debug)]
pub(super) struct StepBuffers {
    appends: Vec<(SeqId, usize)>,
    tables: StepTables,
    pub(super) batch: Batch,
    tokens: Vec<u32>,
    positions: Vec<u32>,
    logit_rows: Vec<usize>,
    /// The running request of each logit row, ascending.
    sampled: Vec<usize>,
    /// Chosen tokens by running request.
    choices: Vec<(usize, Choice)>,
    /// Running requests that end with this step, ascending.
    ended: Vec<(usize, FinishReason)>,
}

impl Session {
    /// Runs one step: every scheduled request computes its share, and those whose tokens are all computed get a new
    /// one. Returns false where there is nothing to do.
    ///
    /// The callback hears every event of every request, those cancelled since the last step first.
    ///
    /// # Errors
    /// [`StepError`]; the step can be tried again.
    pub fn step(&mut self, model: &mut dyn LanguageModel, on_event: &mut dyn FnMut(Event)) -> Result<bool, StepError> {
        let begin = Instant::now();
        let Self { scheduler, pages, stats, cancelled, .. } = self;
        cancelled.drain(..).for_each(|id| on_event(Event::Finished { id, reason: FinishReason::Cancelled }));
        scheduler.plan(pages, |job| {
            stats.num_preemptions += 1;
            let event = Event::Preempted { id: job.id };
            job.tell(event);
            on_event(event);
        });
        if self.scheduler.shares.is_empty() {
            return self.check_idle().map(|()| false);
        }
        self.take_pages()?;
        let logits = self.run(model, begin);
        match logits.and_then(|logits| self.sample(&logits, on_event)) {
            Ok(()) => {
                self.step_times.add(begin.elapsed());
                Ok(true)
            }
            Err(error) => {
                self.give_pages_back();
                Err(error)
            }
        }
    }

    /// A step without shares is the end, unless requests wait in vain.
    fn check_idle(&self) -> Result<(), StepError> {
        if self.scheduler.is_empty() {
            return Ok(());
        }
        let num_waiting = self.scheduler.waiting.len() + self.scheduler.running.len();
        let (available, total) = (self.pages.available(), self.pages.table.pool().counts().total);
        Err(StepError::Stalled { num_waiting, available, total })
    }

    /// Takes the pages of all shares, all or none, and copies pages that were shared.
    fn take_pages(&mut self) -> Result<(), StepError> {
        let Self { scheduler, pages, caches, step, .. } = self;
        step.appends.clear();
        for Share { index, q_len } in scheduler.shares.iter().copied() {
            let job = &mut scheduler.running[index];
            let seq = match job.seq {
                Some(seq) => seq,
                None => *job.seq.insert(pages.table.create()?),
            };
            step.appends.push((seq, q_len));
        }
        let outcome = pages.append(&step.appends, scheduler.num_pages())?;
        for copy in outcome.copies {
            caches.iter_mut().for_each(|layer| layer.copy_page(copy.from, copy.to));
        }
        Ok(())
    }

    /// Undoes [`take_pages`](Self::take_pages).
    fn give_pages_back(&mut self) {
        for Share { index, .. } in self.scheduler.shares.iter().copied() {
            let job = &self.scheduler.running[index];
            let seq = job.seq.expect("a job with a share has a sequence");
            self.pages.table.truncate(seq, job.computed).expect("its sequence was longer");
        }
    }

    fn run(&mut self, model: &mut dyn LanguageModel, begin: Instant) -> Result<Logits, StepError> {
        let Self { scheduler, pages, step, backend, caches, stats, .. } = self;
        pages.table.step_tables(&step.appends, &mut step.tables)?;
        step.batch.set(&RawBatch::from_tables(&step.tables))?;
        step.gather(scheduler);
        let prepared = backend.prepare_metadata(&step.batch)?;
        let planned = Instant::now();
        let mut attention = PagedAttention { backend: &mut **backend, step: &prepared, caches, time: Duration::ZERO };
        let input = ModelInput { tokens: &step.tokens, positions: &step.positions, logit_rows: &step.logit_rows };
        let logits = model.forward(input, &mut attention)?;
        stats.attention_time += attention.time;
        stats.host_time += planned - begin;
        stats.model_time += planned.elapsed();
        Ok(logits)
    }

    /// Chooses a token for each request whose tokens are all computed, then counts the step as done.
    fn sample(&mut self, logits: &Logits, on_event: &mut dyn FnMut(Event)) -> Result<(), StepError> {
        let Self { scheduler, pages, step, stats, .. } = self;
        let rows = logits.rows();
        // A draw that fails must not leave other requests' generators advanced.
        for (&index, row) in step.sampled.iter().zip(rows.clone()) {
            let id = scheduler.running[index].id;
            Sampler::check(row).map_err(|source| StepError::Sample { id, source })?;
        }
        step.choices.clear();
        for (&index, row) in step.sampled.iter().zip(rows) {
            let choice = scheduler.running[index].sampler.sample(row);
            step.choices.push((index, choice.expect("the logits were checked")));
        }
        for Share { index, q_len } in scheduler.shares.iter().copied() {
            let job = &mut scheduler.running[index];
            let decodes = job.decodes();
            let counter = if decodes { &mut stats.decode_tokens } else { &mut stats.prefill_tokens };
            *counter += q_len as u64;
            job.computed += q_len;
            if !decodes {
                pages.share(job);
            }
        }
        stats.num_steps += 1;
        stats.max_step_requests = stats.max_step_requests.max(scheduler.shares.len());
        stats.max_pages = stats.max_pages.max(pages.table.pool().counts().leased);
        stats.generated_tokens += step.choices.len() as u64;
        step.ended.clear();
        for (index, choice) in step.choices.drain(..) {
            let job = &mut scheduler.running[index];
            let Choice { token, logit, margin } = choice;
            let event = Event::Token { id: job.id, index: job.num_generated(), token, logit, margin };
            let is_read = job.tell(event);
            on_event(event);
            let reason = job.push(token, margin).or((!is_read).then_some(FinishReason::Cancelled));
            step.ended.extend(reason.map(|reason| (index, reason)));
        }
        self.finish(on_event);
        Ok(())
    }

    /// Ends the running requests whose last token this step gave.
    fn finish(&mut self, on_event: &mut dyn FnMut(Event)) {
        let Self { scheduler, pages, step, stats, completions, .. } = self;
        let mut ended = step.ended.iter().copied().peekable();
        let mut at = 0;
        let leaving = scheduler.running.extract_if(.., |_| {
            at += 1;
            ended.next_if(|(index, _)| index + 1 == at).is_some()
        });
        for (mut job, (_, reason)) in leaving.zip(&step.ended) {
            pages.release(&mut job);
            stats.num_cancelled += u64::from(*reason == FinishReason::Cancelled);
            on_event(Event::Finished { id: job.id, reason: *reason });
            completions.push_back(job.complete(*reason));
        }
    }
}

impl StepBuffers {
    pub(super) fn new(pool: PoolShape) -> Self {
        Self {
            appends: Vec::new(),
            tables: StepTables::default(),
            batch: Batch::empty(pool),
            tokens: Vec::new(),
            positions: Vec::new(),
            logit_rows: Vec::new(),
            sampled: Vec::new(),
            choices: Vec::new(),
            ended: Vec::new(),
        }
    }

    /// Tokens, positions and logit rows of the scheduled shares.
    fn gather(&mut self, scheduler: &Scheduler) {
        self.tokens.clear();
        self.positions.clear();
        self.logit_rows.clear();
        self.sampled.clear();
        for Share { index, q_len } in scheduler.shares.iter().copied() {
            let job = &scheduler.running[index];
            let range = job.computed..job.computed + q_len;
            self.tokens.extend_from_slice(&job.tokens[range.clone()]);
            self.positions.extend(range.clone().map(|p| u32::try_from(p).expect("below the model's max_len")));
            if range.end == job.tokens.len() {
                self.logit_rows.push(self.tokens.len() - 1);
                self.sampled.push(index);
            }
        }
    }
}

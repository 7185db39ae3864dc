//! A request inside the session: its tokens, how far its KV is computed, its sampler, who listens.

use std::sync::mpsc::Sender;

use kvpool::ExtraKey;
use page_table::SeqId;

use super::request::{Completion, Event, FinishReason, RequestId};
use crate::sample::Sampler;

/// A request that has not ended.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) id: RequestId,
    /// Prompt and generated tokens.
    pub(super) tokens: Vec<u32>,
    pub(super) prompt_len: usize,
    /// What changes its KV besides its tokens.
    pub(super) extra: ExtraKey,
    pub(super) max_new_tokens: usize,
    pub(super) stop_tokens: Vec<u32>,
    pub(super) sampler: Sampler,
    pub(super) margins: Vec<f32>,
    /// Its pages; `None` while it waits.
    pub(super) seq: Option<SeqId>,
    /// Tokens whose KV is in the pages.
    pub(super) computed: usize,
    pub(super) num_preemptions: u32,
    /// Who else is told of its events; gone with the job, so that a reader sees the end.
    pub(super) channel: Option<Sender<Event>>,
}

impl Job {
    /// Tokens whose KV is still to be computed, at least one.
    pub(super) fn remaining(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Whether it computes its newest token only.
    pub(super) fn decodes(&self) -> bool {
        self.remaining() == 1 && self.tokens.len() > self.prompt_len
    }

    pub(super) fn num_generated(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Takes a new token; says whether generation ends with it.
    pub(super) fn push(&mut self, token: u32, margin: f32) -> Option<FinishReason> {
        self.tokens.push(token);
        self.margins.push(margin);
        if self.stop_tokens.contains(&token) {
            Some(FinishReason::Stop)
        } else if self.num_generated() == self.max_new_tokens {
            Some(FinishReason::Length)
        } else {
            None
        }
    }

    /// Sends an event to the request's channel, where it has one. False where nobody is there to read it any more.
    pub(super) fn tell(&self, event: Event) -> bool {
        self.channel.as_ref().is_none_or(|channel| channel.send(event).is_ok())
    }

    /// Ends the job. Its channel is told last of all, and closed.
    pub(super) fn complete(mut self, reason: FinishReason) -> Completion {
        self.tell(Event::Finished { id: self.id, reason });
        let tokens = self.tokens.split_off(self.prompt_len);
        Completion { id: self.id, tokens, margins: self.margins, reason, num_preemptions: self.num_preemptions }
    }
}

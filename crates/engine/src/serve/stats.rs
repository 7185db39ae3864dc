//! Counters of a session.

use std::time::Duration;

use serde::Serialize;

/// What a session has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Stats {
    /// Steps run.
    pub num_steps: u64,
    /// Tokens computed by requests that were not decoding: prompts, and what preemption made compute again.
    pub prefill_tokens: u64,
    /// Tokens computed by decoding requests.
    pub decode_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Requests that gave their pages back.
    pub num_preemptions: u64,
    /// Requests that were cancelled: by the caller, or because nobody read their channel any more.
    pub num_cancelled: u64,
    /// Most requests in one step.
    pub max_step_requests: usize,
    /// Most pages held at once.
    pub max_pages: usize,
    /// Time in scheduling, page tables and planning.
    pub host_time: Duration,
    /// Time in the model, attention included.
    pub model_time: Duration,
    /// Time in attention.
    pub attention_time: Duration,
}

//! Counters of a session.

use std::time::Duration;

use serde::{Serialize, Serializer};

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
    /// Time in scheduling, page tables and planning; as JSON in seconds, like the times below.
    #[serde(rename = "host_time_s", serialize_with = "seconds")]
    pub host_time: Duration,
    /// Time in the model, attention included.
    #[serde(rename = "model_time_s", serialize_with = "seconds")]
    pub model_time: Duration,
    /// Time in attention.
    #[serde(rename = "attention_time_s", serialize_with = "seconds")]
    pub attention_time: Duration,
}

fn seconds<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(time.as_secs_f64())
}

//! Requests as a caller sees them: what is asked, what happens, what came out.

use std::fmt;

use kvpool::ExtraKey;

use crate::sample::SamplingParams;

/// A request of a session; in order of submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub(super) u64);

impl RequestId {
    /// Requests submitted before it.
    #[must_use]
    pub const fn index(self) -> u64 {
        self.0
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request {}", self.0)
    }
}

/// What is asked.
#[derive(Clone, Debug)]
pub struct RequestSpec {
    /// Token ids of the prompt, at least one.
    pub prompt: Vec<u32>,
    /// Tokens to generate at most, at least one.
    pub max_new_tokens: usize,
    /// Generation ends after any of these tokens; it is part of the result.
    pub stop_tokens: Vec<u32>,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// What changes its KV besides its tokens (adapter, salt, other content): requests share pages only where it is
    /// the same.
    pub extra: ExtraKey,
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token was generated.
    Stop,
    /// `max_new_tokens` were generated.
    Length,
    /// It was cancelled.
    Cancelled,
}

/// Something that happened in a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event {
    /// A token was generated.
    Token {
        /// The request.
        id: RequestId,
        /// Place among its generated tokens.
        index: usize,
        /// The token.
        token: u32,
        /// Its logit.
        logit: f32,
        /// Its logit less that of the runner-up.
        margin: f32,
    },
    /// A request gave its pages back and will be computed again when there is room.
    Preempted {
        /// The request.
        id: RequestId,
    },
    /// A request ended; its [`Completion`] can be taken.
    Finished {
        /// The request.
        id: RequestId,
        /// Why.
        reason: FinishReason,
    },
}

/// What came out of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// The request.
    pub id: RequestId,
    /// Generated tokens.
    pub tokens: Vec<u32>,
    /// Margin of each generated token to the runner-up, in logits.
    pub margins: Vec<f32>,
    /// Why it ended.
    pub reason: FinishReason,
    /// How often it gave its pages back.
    pub num_preemptions: u32,
}

//! Errors of a session, by what the caller was doing.

use attn_metadata::{BatchError, ModelSpecError, PrepareError, SelectError};
use kvpool::{FormatError, PrefixError, ShapeError};

use super::request::RequestId;
use crate::lm::ForwardError;
use crate::sample::SampleError;

/// A session that cannot be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// A size is 0.
    #[error("{field} is 0, at least 1 is needed")]
    Zero {
        /// Which size.
        field: &'static str,
    },
    /// The pool or a cache cannot have this shape.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The KV format is not valid.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The model has no layers.
    #[error(transparent)]
    Model(#[from] ModelSpecError),
    /// The prefix cache cannot be made.
    #[error(transparent)]
    Prefix(#[from] PrefixError),
    /// No backend can run it.
    #[error(transparent)]
    Backend(#[from] SelectError),
}

/// A request that is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// There is no token to start from.
    #[error("the prompt is empty, at least one token is needed")]
    EmptyPrompt,
    /// Nothing is to be generated.
    #[error("max_new_tokens is 0, at least 1 is needed")]
    NothingToGenerate,
    /// A token id is not of the model.
    #[error("token {token} at position {position} of the prompt is not in 0..{vocab_size}")]
    UnknownToken {
        /// Where.
        position: usize,
        /// The token id.
        token: u32,
        /// Number of token ids.
        vocab_size: usize,
    },
    /// The model cannot hold the whole sequence.
    #[error("{prompt_len} prompt tokens and {max_new_tokens} new ones exceed the model's {max_len} positions")]
    TooLong {
        /// Tokens of the prompt.
        prompt_len: usize,
        /// Tokens to generate.
        max_new_tokens: usize,
        /// Positions of the model.
        max_len: usize,
    },
    /// The pool cannot hold the whole sequence, even alone.
    #[error("the request needs {needed} pages, the pool has {total}; ask for fewer tokens or make a larger pool")]
    PoolTooSmall {
        /// Pages that it needs at the end.
        needed: usize,
        /// Pages of the pool.
        total: usize,
    },
    /// The sampling parameters are not valid.
    #[error(transparent)]
    Sampling(#[from] SampleError),
}

/// A step that failed. The session is as it was before the step, except that preempted requests stay preempted; the
/// step can be tried again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StepError {
    /// Pages could not be taken.
    #[error("the step's pages could not be taken")]
    Pages(#[from] page_table::TableError),
    /// Pages could not be made free.
    #[error("the step's pages could not be made free")]
    Room(#[from] PrefixError),
    /// Requests wait, and not even one of them can be given a page: somebody outside the session holds them.
    #[error(
        "{num_waiting} requests wait, and {available} of {total} pages can be had; leases outside the session hold the rest"
    )]
    Stalled {
        /// Requests that wait.
        num_waiting: usize,
        /// Pages that can be taken.
        available: usize,
        /// Pages of the pool.
        total: usize,
    },
    /// The step's tables could not be written.
    #[error("the step's tables could not be written")]
    Tables(#[from] page_table::StepError),
    /// The step's tables are not valid.
    #[error("the step's tables are not valid")]
    Batch(#[from] BatchError),
    /// The step could not be planned.
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    /// The model failed.
    #[error(transparent)]
    Model(#[from] ForwardError),
    /// A token could not be chosen.
    #[error("{id}: no token could be chosen")]
    Sample {
        /// The request.
        id: RequestId,
        /// Why.
        source: SampleError,
    },
}

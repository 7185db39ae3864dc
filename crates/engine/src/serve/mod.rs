//! Continuous batching over paged KV: requests come and go, each step mixes those that prefill with those that decode.
//!
//! ```text
//! submit ── Scheduler: who computes how many tokens (pages counted) ── KvPages: cached prefix, append -> slots, tables
//!   ── Batch: validated once ── backend.prepare_metadata ── model.forward, attention once a layer ── sample ── events
//! ```
//!
//! A [`Session`] owns all of it but the model. The model knows no page and the backend no model: they meet in
//! [`LayerAttention`](crate::lm::LayerAttention). Everything is deterministic given the order of the calls.
//!
//! Tokens come three ways: [`Session::step`] calls back for every event of every request, [`Session::stream`] gives a
//! request a channel of its own, and [`Session::take_completion`] has all of a request at its end.

mod attention;
mod caches;
mod error;
mod job;
mod metrics;
mod pages;
mod request;
mod scheduler;
mod session;
mod stats;
mod step;

pub use error::{ServeError, StepError, SubmitError};
pub use metrics::{Metrics, PrefixMetrics, StepTimes};
pub use request::{Completion, Event, FinishReason, RequestId, RequestSpec};
pub use scheduler::SchedulerConfig;
pub use session::{Session, SessionConfig};
pub use stats::Stats;

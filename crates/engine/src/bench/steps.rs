//! Times what a step costs the host outside the model and attention: scheduling, pages, tables, the batch and its plan,
//! sampling and bookkeeping, with the prefix cache on.
//!
//! A real session runs a model that computes nothing and has logits at once; its time is taken off each step's.

use std::time::{Duration, Instant};

use attn_metadata::{HeadShape, HostDevice, Layer, LayerParams};
use kvpool::{ExtraKey, KvFormat, KvScales, PageSize, PrefixConfig};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde::{Deserialize, Serialize};

use crate::lm::{ForwardError, LanguageModel, LayerAttention, Logits, ModelInput};
use crate::sample::SamplingParams;
use crate::serve::{RequestSpec, SchedulerConfig, ServeError, Session, SessionConfig};

const PAGE: u32 = 16;
/// Tokens that all prompts begin with.
const SHARED_LEN: u32 = 1000;
/// Prompts have from this many tokens on, so that requests reach the end of a page in different steps.
const PROMPT_LEN: u32 = 3500;
const MAX_STEP_TOKENS: usize = 1 << 16;
/// Tokens that a request generates where requests come and go: so many steps, until each of them is another one.
const TURN: usize = 256;
/// Planning depends on heads, not on their width; narrow ones keep the memory small that nobody touches.
const HEADS: HeadShape = HeadShape::new(32, 8, 16);
/// Sampling is a step's work too, but that of a real vocabulary is the model's matter.
const VOCAB: usize = 8;

/// Host time of a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepRow {
    /// Requests that run, one query token each.
    pub num_requests: usize,
    /// Whether requests end and others take their place; these find the first tokens of their prompts in the cache,
    /// compute the others, and take the pages of ended ones from it.
    pub has_turnover: bool,
    /// KV tokens of a request on average, after the last step.
    pub kv_len: usize,
    /// Pages given up by the prefix cache in a step, on average.
    pub evicted_pages: f64,
    /// Tokens that a step computes, on average.
    pub step_tokens: f64,
    /// Half of the steps take no longer.
    pub p50_us: f64,
    /// 99 of 100 steps take no longer.
    pub p99_us: f64,
}

/// Times `reps` steps of running requests after a warm-up.
///
/// # Errors
/// [`ServeError`] where no backend fits, or there is no memory.
///
/// # Panics
/// If a request or a step is refused, which would be a fault of this build.
pub fn measure_steps(
    choice: &str,
    device: HostDevice,
    num_requests: usize,
    reps: usize,
    has_turnover: bool,
) -> Result<StepRow, ServeError> {
    let mut model = Blank::new();
    // Where nobody ends, the first ones decode while the last ones are still let in.
    let num_steps_in = num_requests * PROMPT_LEN as usize / MAX_STEP_TOKENS + num_requests.ilog2() as usize + 8;
    let max_new_tokens = if has_turnover { TURN } else { reps + num_steps_in };
    let config = config(choice, device, num_requests, max_new_tokens)?;
    let mut session = Session::new(&model, &config)?;
    let mut prompts = Prompts::new();
    // Where requests come and go, the first ones end one after the other from the beginning.
    let first_len = |i: usize| if has_turnover { 1 + i * TURN / num_requests } else { max_new_tokens };
    for i in 0..num_requests {
        session.submit(prompts.next(first_len(i))).expect("a plain request is accepted");
    }
    let num_warm = if has_turnover { TURN } else { 4 };
    while session.metrics().num_running < num_requests {
        session.step(&mut model, &mut |_| {}).expect("the pool has room");
        refill(&mut session, &mut prompts, num_requests, has_turnover);
    }
    let mut times = Vec::with_capacity(reps);
    let mut before = (0, 0);
    for rep in 0..num_warm + reps {
        if rep == num_warm {
            before = work_of(&session);
        }
        model.time = Duration::ZERO;
        let begin = Instant::now();
        session.step(&mut model, &mut |_| {}).expect("the pool has room");
        let time = begin.elapsed() - model.time;
        if rep >= num_warm {
            times.push(time.as_secs_f64() * 1e6);
        }
        refill(&mut session, &mut prompts, num_requests, has_turnover);
    }
    Ok(row(&session, has_turnover, before, times))
}

#[expect(clippy::cast_precision_loss, reason = "figures for people")]
fn row(session: &Session, has_turnover: bool, before: (u64, u64), mut times: Vec<f64>) -> StepRow {
    times.sort_by(f64::total_cmp);
    let at = |percent: usize| times.get(times.len().saturating_sub(1) * percent / 100).copied().unwrap_or(0.0);
    let (num_running, num_tokens) =
        (session.metrics().num_running, session.table().audit().map_or(0, |audit| audit.num_tokens));
    let (evicted, computed) = work_of(session);
    let a_step = |after: u64, before: u64| (after - before) as f64 / times.len().max(1) as f64;
    StepRow {
        num_requests: num_running,
        has_turnover,
        kv_len: num_tokens / num_running.max(1),
        evicted_pages: a_step(evicted, before.0),
        step_tokens: a_step(computed, before.1),
        p50_us: at(50),
        p99_us: at(99),
    }
}

/// Pages evicted and tokens computed so far.
fn work_of(session: &Session) -> (u64, u64) {
    let metrics = session.metrics();
    let stats = metrics.stats;
    (metrics.prefix.map_or(0, |prefix| prefix.evicted_pages), stats.prefill_tokens + stats.decode_tokens)
}

/// Sends a request for each that has ended.
fn refill(session: &mut Session, prompts: &mut Prompts, num_requests: usize, has_turnover: bool) {
    while session.take_completion().is_some() {}
    if has_turnover {
        let metrics = session.metrics();
        for _ in metrics.num_running + metrics.num_waiting..num_requests {
            session.submit(prompts.next(TURN)).expect("a plain request is accepted");
        }
    }
}

fn config(
    choice: &str,
    device: HostDevice,
    num_requests: usize,
    max_new_tokens: usize,
) -> Result<SessionConfig, ServeError> {
    let page_size = PageSize::new(PAGE)?;
    // Just enough for all of them at their longest, though they share a prefix: the cache holds what is left.
    let longest = PROMPT_LEN as usize + PAGE as usize + max_new_tokens;
    let own = page_size.pages_for(longest) - SHARED_LEN as usize / PAGE as usize;
    let num_pages = u32::try_from(num_requests * (own + 2) + 64).expect("the requests of a bench fit a pool");
    Ok(SessionConfig {
        page_size,
        num_pages,
        kv_format: KvFormat::Fp8E4m3(KvScales::new(1.0, 1.0)?),
        scheduler: SchedulerConfig {
            max_running: num_requests,
            max_step_tokens: MAX_STEP_TOKENS,
            extend_chunk: usize::MAX,
        },
        backend: choice.to_owned(),
        device,
        prefix_cache: Some(PrefixConfig::default()),
        verify_every: 0,
    })
}

/// Prompts that share their first tokens.
struct Prompts {
    rng: StdRng,
    number: u32,
}

impl Prompts {
    fn new() -> Self {
        Self { rng: StdRng::seed_from_u64(5), number: 0 }
    }

    fn next(&mut self, max_new_tokens: usize) -> RequestSpec {
        let own_len = PROMPT_LEN - SHARED_LEN + self.number % PAGE;
        self.number += 1;
        let shared = (0..SHARED_LEN).map(|i| i * i % 7);
        let own = (0..own_len).map(|_| self.rng.random_range(0..8));
        RequestSpec {
            prompt: shared.chain(own).collect(),
            max_new_tokens,
            stop_tokens: vec![],
            sampling: SamplingParams::GREEDY,
            extra: ExtraKey::default(),
        }
    }
}

/// A model that computes nothing and asks for no attention.
struct Blank {
    layers: Vec<Layer>,
    /// Spent in `forward`.
    time: Duration,
}

impl Blank {
    fn new() -> Self {
        Self {
            layers: vec![Layer::new(LayerParams::causal(HEADS)).expect("a plain layer is valid")],
            time: Duration::ZERO,
        }
    }
}

impl LanguageModel for Blank {
    fn layers(&self) -> &[Layer] {
        &self.layers
    }

    fn vocab_size(&self) -> usize {
        VOCAB
    }

    fn max_len(&self) -> usize {
        1 << 20
    }

    fn forward(&mut self, input: ModelInput<'_>, _: &mut dyn LayerAttention) -> Result<Logits, ForwardError> {
        let begin = Instant::now();
        let logits = Logits::new(vec![0.0; input.logit_rows.len() * VOCAB], VOCAB);
        self.time += begin.elapsed();
        Ok(logits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_run_all_the_time_and_share_their_first_pages() {
        let device = HostDevice::with_threads(1);
        let plain = measure_steps("cpu", device, 5, 20, false).unwrap();
        assert_eq!((plain.num_requests, plain.step_tokens, plain.evicted_pages), (5, 5.0, 0.0), "{plain:?}");
        assert!(plain.kv_len > 3500 && plain.p50_us > 0.0 && plain.p99_us >= plain.p50_us, "{plain:?}");
        let turnover = measure_steps("cpu", device, 5, 300, true).unwrap();
        // Each of the five ends once in 256 steps, and the next one computes 2,500 tokens of its own.
        let computed = 5.0 + 5.0 / 256.0 * 2516.0;
        assert!((turnover.step_tokens / computed - 1.0).abs() < 0.3, "{turnover:?}, expected {computed} tokens a step");
        assert!(turnover.evicted_pages > 0.0, "{turnover:?}");
    }
}

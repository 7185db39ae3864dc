//! In which order requests arrive, and which are cancelled: the same for the same seed.

use anyhow::{Context as _, Result};
use clap::Args as ClapArgs;
use engine::lm::LanguageModel;
use engine::serve::{Completion, Event, RequestId, RequestSpec, Session};

use super::failure::Failure;

/// How requests reach the session.
#[derive(Debug, ClapArgs)]
pub struct Traffic {
    /// Send each prompt N times.
    #[arg(long, value_name = "N", default_value_t = 1)]
    repeat: usize,
    /// Send the prompts in a random order, a few in each step; default: all at once, in order.
    #[arg(long, value_name = "SEED")]
    arrival_seed: Option<u64>,
    /// Cancel every N-th request when half of its tokens are there; 0: none.
    #[arg(long, value_name = "N", default_value_t = 0)]
    cancel_every: usize,
}

/// What came out of a request, and the prompt that it was sent for.
pub struct Answer {
    /// Place of the prompt.
    pub prompt: usize,
    /// What came out.
    pub completion: Completion,
}

/// Small and good enough to shuffle: a multiplicative generator.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).expect("31 bits") % bound.max(1)
    }
}

/// A request that was sent.
struct Sent {
    id: RequestId,
    prompt: usize,
    /// Tokens after which it is cancelled, if it is.
    cancel_at: Option<usize>,
    num_tokens: usize,
}

impl Traffic {
    /// Requests that are sent for this many prompts.
    pub const fn num_requests(&self, num_prompts: usize) -> usize {
        num_prompts.saturating_mul(self.repeat)
    }

    /// Sends the requests, one for each prompt and repetition, and runs the session until all have ended. Answers come
    /// in the order of the prompts, repetitions side by side.
    pub fn run(
        &self,
        session: &mut Session,
        model: &mut dyn LanguageModel,
        requests: &[RequestSpec],
        on_event: &mut dyn FnMut(Event),
    ) -> Result<Vec<Answer>> {
        let mut waiting: Vec<usize> = (0..self.repeat).flat_map(|_| 0..requests.len()).collect();
        let mut dice = self.arrival_seed.map(Dice);
        if let Some(dice) = &mut dice {
            (1..waiting.len()).rev().for_each(|i| waiting.swap(i, dice.below(i + 1)));
        }
        waiting.reverse();
        let mut sent: Vec<Sent> = Vec::new();
        loop {
            let arriving = dice.as_mut().map_or(waiting.len(), |dice| dice.below(3)).min(waiting.len());
            for prompt in waiting.split_off(waiting.len() - arriving).into_iter().rev() {
                let spec = &requests[prompt];
                let id = session.submit(spec.clone()).map_err(Failure::input).context(format!("prompt {prompt}"))?;
                let is_cancelled = self.cancel_every != 0 && (sent.len() + 1).is_multiple_of(self.cancel_every);
                let cancel_at = is_cancelled.then(|| (spec.max_new_tokens / 2).max(1));
                sent.push(Sent { id, prompt, cancel_at, num_tokens: 0 });
            }
            let has_worked = step(session, model, &mut sent, on_event)?;
            if !has_worked && waiting.is_empty() {
                break;
            }
        }
        Ok(answers(session, &sent))
    }
}

/// Runs a step, then cancels the requests whose time has come.
fn step(
    session: &mut Session,
    model: &mut dyn LanguageModel,
    sent: &mut [Sent],
    on_event: &mut dyn FnMut(Event),
) -> Result<bool> {
    let mut heard = |event: Event| {
        if let Event::Token { id, .. } = event
            && let Some(request) = sent.iter_mut().find(|request| request.id == id)
        {
            request.num_tokens += 1;
        }
        on_event(event);
    };
    let has_worked = session.step(model, &mut heard).context("a step failed")?;
    for request in sent.iter_mut() {
        if request.cancel_at.is_some_and(|at| request.num_tokens >= at) {
            session.cancel(request.id);
            request.cancel_at = None;
        }
    }
    Ok(has_worked)
}

fn answers(session: &mut Session, sent: &[Sent]) -> Vec<Answer> {
    let completions = std::iter::from_fn(|| session.take_completion());
    let answer = |completion: Completion| {
        let request = sent.iter().find(|request| request.id == completion.id);
        Answer { prompt: request.expect("only sent requests end").prompt, completion }
    };
    let mut answers: Vec<_> = completions.map(answer).collect();
    answers.sort_by_key(|answer| (answer.prompt, answer.completion.id));
    answers
}

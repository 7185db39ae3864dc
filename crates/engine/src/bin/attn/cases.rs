//! Recorded prompts and the tokens that they must give.

use std::path::Path;

use anyhow::{Context as _, Result, bail};
use engine::model::{Model, SpecialTokens};
use engine::serve::{Completion, FinishReason};
use serde::Deserialize;

use super::generate::chat_tokens;
use super::traffic::Answer;
use super::{Failure, Outcome, output};

/// A file of cases.
#[derive(Debug, Deserialize)]
pub struct Cases {
    prompts: Vec<Case>,
}

#[derive(Debug, Deserialize)]
struct Case {
    prompt: String,
    /// Whether the prompt is wrapped in the model's chat template.
    #[serde(default)]
    chat: bool,
    prompt_ids: Vec<u32>,
    generated_ids: Vec<u32>,
    /// Margin of each generated token to the runner-up, in logits.
    margins: Vec<f32>,
}

/// Reads a file of cases.
pub fn read(path: &Path) -> Result<Cases> {
    let name = || path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(Failure::input).with_context(name)?;
    let cases: Cases = serde_json::from_str(&text).map_err(Failure::input).with_context(name)?;
    if cases.prompts.is_empty() {
        bail!(Failure::usage(format!("{}: there are no prompts", path.display())));
    }
    let uneven = |case: &Case| case.generated_ids.is_empty() || case.generated_ids.len() != case.margins.len();
    if let Some(place) = cases.prompts.iter().position(uneven) {
        bail!(Failure::usage(format!("{}: prompt {place} needs generated_ids and a margin for each", path.display())));
    }
    Ok(cases)
}

impl Cases {
    /// Tokens that a prompt must give.
    pub fn num_expected(&self, place: usize) -> usize {
        self.prompts[place].generated_ids.len()
    }

    /// The prompts' tokens; they must be the recorded ones.
    pub fn check_prompts(&self, model: &Model) -> Result<Vec<Vec<u32>>> {
        self.prompts.iter().enumerate().map(|(place, case)| case.tokens(model, place)).collect()
    }

    /// Compares what came out, prompt by prompt; a cancelled request must have the first tokens. Where a token differs
    /// whose recorded margin is at most `min_margin`, it and what follows may be anything.
    pub fn compare(&self, model: &Model, answers: &[Answer], min_margin: f32) -> Result<Outcome> {
        let mut num_failed = 0;
        for (place, case) in self.prompts.iter().enumerate() {
            let of_prompt = answers.iter().filter(|answer| answer.prompt == place).map(|answer| &answer.completion);
            let wrong = of_prompt.clone().find_map(|c| case.first_fault(c, min_margin).map(|position| (c, position)));
            let smallest = case.margins.iter().copied().fold(f32::INFINITY, f32::min);
            match wrong {
                None => {
                    let num_tokens: usize = of_prompt.clone().map(|c| c.tokens.len()).sum();
                    let num_requests = of_prompt.count();
                    output::write(&format!(
                        "ok    prompt {place}: {num_requests} requests, {num_tokens} tokens, smallest margin {smallest:.3}\n"
                    ))?;
                }
                Some((completion, position)) => {
                    num_failed += 1;
                    let difference = case.describe(model, completion, position);
                    let line = format!("FAIL  prompt {place} ({:?}), {}: {difference}\n", case.prompt, completion.id);
                    output::write(&line)?;
                }
            }
        }
        let num_prompts = self.prompts.len();
        output::write(&format!("{} of {num_prompts} prompts match\n", num_prompts - num_failed))?;
        Ok(if num_failed == 0 { Outcome::Success } else { Outcome::CheckFailed })
    }
}

impl Case {
    fn tokens(&self, model: &Model, place: usize) -> Result<Vec<u32>> {
        let tokens = if self.chat {
            chat_tokens(model, None, &self.prompt)?
        } else {
            model.tokenizer.encode(&self.prompt, SpecialTokens::AsText).map_err(Failure::input)?
        };
        if tokens != self.prompt_ids {
            bail!(Failure::check(format!(
                "prompt {place} ({:?}) becomes tokens {tokens:?}, recorded are {:?}: is it the right model?",
                self.prompt, self.prompt_ids
            )));
        }
        Ok(tokens)
    }

    fn first_difference(&self, completion: &Completion) -> Option<usize> {
        let is_cancelled = completion.reason == FinishReason::Cancelled;
        let recorded = if is_cancelled { 0 } else { self.generated_ids.len() };
        let len = recorded.max(completion.tokens.len());
        (0..len).find(|&i| self.generated_ids.get(i) != completion.tokens.get(i))
    }

    /// The first difference, unless it is excused: the recorded token's margin is at most `min_margin`.
    fn first_fault(&self, completion: &Completion, min_margin: f32) -> Option<usize> {
        let is_excused = |position: &usize| self.margins.get(*position).is_some_and(|&margin| margin <= min_margin);
        self.first_difference(completion).filter(|position| min_margin <= 0.0 || !is_excused(position))
    }

    fn describe(&self, model: &Model, completion: &Completion, position: usize) -> String {
        let token = |tokens: &[u32]| match tokens.get(position) {
            Some(&token) => format!("{token} {:?}", model.tokenizer.token_text(token).unwrap_or("?")),
            None => "nothing".to_owned(),
        };
        let margin = |margins: &[f32]| margins.get(position).map_or("none".to_owned(), |m| format!("{m:.3}"));
        format!(
            "token {position} is {} (margin {}), recorded is {} (margin {})",
            token(&completion.tokens),
            margin(&completion.margins),
            token(&self.generated_ids),
            margin(&self.margins)
        )
    }
}

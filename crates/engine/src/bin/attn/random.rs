//! `attn generate --random-model`: requests over a model of random weights. Prompts are bytes, answers token ids.

use std::time::Instant;

use anyhow::Result;
use engine::model::random::RandomModel;
use engine::serve::{Event, Session};

use super::generate::{Args, report, session_config, specs, verify_outcome};
use super::{Failure, Outcome, output};

/// Runs the command for a random model.
pub fn run(args: &Args, kind: RandomModel) -> Result<Outcome> {
    let mut model = kind.make(args.model_seed).map_err(Failure::input)?;
    let prompts: Vec<Vec<u32>> = args.prompt.iter().map(|text| text.bytes().map(u32::from).collect()).collect();
    let requests = specs(args, &[], &prompts, |_| args.max_new_tokens);
    let config = session_config(args, &requests, model.max_len())?;
    let mut session = Session::new(&*model, &config).map_err(Failure::input)?;
    let begin = Instant::now();
    let mut logits = std::collections::BTreeMap::<_, Vec<f32>>::new();
    let answers = args.traffic.run(&mut session, &mut *model, &requests, &mut |event| {
        if let Event::Token { id, logit, .. } = event {
            logits.entry(id).or_default().push(logit);
        }
    })?;
    for answer in &answers {
        let tokens: Vec<String> = answer.completion.tokens.iter().map(u32::to_string).collect();
        let logit = logits.get(&answer.completion.id).and_then(|logits| logits.last()).copied().unwrap_or(0.0);
        output::write(&format!("prompt {}: {} (last logit {logit:.6})\n", answer.prompt, tokens.join(" ")))?;
    }
    report(args, &session, &answers, begin.elapsed())?;
    Ok(session.verify_report().map_or(Outcome::Success, |report| verify_outcome(&report)))
}

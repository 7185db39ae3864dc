//! Every step's logits with attention on one backend, against those with attention on another.

use anyhow::{Context as _, Result};
use attn_metadata::Layer;
use engine::lm::{ForwardError, LanguageModel, LayerAttention, Logits, ModelInput};
use engine::serve::{RequestSpec, Session, SessionConfig};

use super::{Failure, Outcome, output};

/// A step of one request: what went in, and the logits of its last token.
struct Step {
    tokens: Vec<u32>,
    logits: Vec<f32>,
}

/// A model that remembers what it was asked and what it said.
struct Recorder<'a> {
    model: &'a mut dyn LanguageModel,
    steps: Vec<Step>,
}

impl LanguageModel for Recorder<'_> {
    fn layers(&self) -> &[Layer] {
        self.model.layers()
    }

    fn vocab_size(&self) -> usize {
        self.model.vocab_size()
    }

    fn max_len(&self) -> usize {
        self.model.max_len()
    }

    fn forward(&mut self, input: ModelInput<'_>, attention: &mut dyn LayerAttention) -> Result<Logits, ForwardError> {
        let logits = self.model.forward(input, attention)?;
        let rows = logits.rows().flatten().copied().collect();
        self.steps.push(Step { tokens: input.tokens.to_vec(), logits: rows });
        Ok(logits)
    }
}

/// What a comparison found.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Comparison {
    /// Steps whose input was the same, so that their logits can be compared.
    compared: usize,
    /// Steps after the first token that was chosen otherwise.
    left_out: usize,
    /// Largest ‖ours − theirs‖ ÷ ‖theirs‖ of a step.
    worst: f64,
}

/// Runs each request alone on the session's backend and on `other`, and compares the logits of every step, as long as
/// the same tokens are chosen.
pub fn compare(
    model: &mut dyn LanguageModel,
    config: &SessionConfig,
    other: &str,
    requests: &[RequestSpec],
    bound: f64,
) -> Result<Outcome> {
    let theirs = SessionConfig { backend: other.to_owned(), verify_every: 0, ..config.clone() };
    let mut total = Comparison::default();
    for (place, request) in requests.iter().enumerate() {
        let [ours, theirs] = [config, &theirs].map(|config| record(model, config, request));
        let found = compare_steps(&ours?, &theirs?);
        output::write(&format!(
            "prompt {place}: logits of {} steps, relative error {:.1e} at most, {} steps left out\n",
            found.compared, found.worst, found.left_out
        ))?;
        total.compared += found.compared;
        total.left_out += found.left_out;
        total.worst = worse(total.worst, found.worst);
    }
    let is_near = total.compared > 0 && total.worst <= bound;
    output::write(&format!(
        "logits of {} steps on {} against {other}: relative error {:.1e} at most (bound {bound:.0e}), {} steps left \
         out: {}\n",
        total.compared,
        config.backend,
        total.worst,
        total.left_out,
        if is_near { "ok" } else { "WRONG" }
    ))?;
    Ok(if is_near { Outcome::Success } else { Outcome::CheckFailed })
}

fn record(model: &mut dyn LanguageModel, config: &SessionConfig, request: &RequestSpec) -> Result<Vec<Step>> {
    let mut session = Session::new(model, config).map_err(Failure::input)?;
    session.submit(request.clone()).map_err(Failure::input)?;
    let mut recorder = Recorder { model, steps: Vec::new() };
    while session.step(&mut recorder, &mut |_| {}).context("a step failed")? {}
    Ok(recorder.steps)
}

fn compare_steps(ours: &[Step], theirs: &[Step]) -> Comparison {
    let same = ours.iter().zip(theirs).take_while(|(a, b)| a.tokens == b.tokens);
    let errors: Vec<f64> = same.map(|(a, b)| relative_error(&a.logits, &b.logits)).collect();
    let worst = errors.iter().copied().fold(0.0, worse);
    Comparison { compared: errors.len(), left_out: ours.len().max(theirs.len()) - errors.len(), worst }
}

fn relative_error(ours: &[f32], theirs: &[f32]) -> f64 {
    if ours.len() != theirs.len() {
        return f64::INFINITY;
    }
    let pairs = ours.iter().zip(theirs).map(|(&a, &b)| (f64::from(a), f64::from(b)));
    let (error, norm) = pairs.fold((0.0, 0.0), |(e, n), (a, b)| (e + (a - b).powi(2), n + b.powi(2)));
    if error == 0.0 { 0.0 } else { (error / norm).sqrt() }
}

/// The larger one; a NaN is larger than all.
fn worse(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::INFINITY } else { a.max(b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(token: u32, logits: &[f32]) -> Step {
        Step { tokens: vec![token], logits: logits.to_vec() }
    }

    #[test]
    fn steps_are_compared_up_to_the_first_other_token() {
        let theirs = [step(1, &[3.0, 4.0]), step(2, &[3.0, 4.0]), step(3, &[3.0, 4.0])];
        let ours = [step(1, &[3.0, 4.0]), step(2, &[3.0, 4.5]), step(7, &[900.0, 4.0])];
        assert_eq!(compare_steps(&ours, &theirs), Comparison { compared: 2, left_out: 1, worst: 0.1 });
        let ours = [step(1, &[3.0, f32::NAN])];
        assert_eq!(compare_steps(&ours, &theirs), Comparison { compared: 1, left_out: 2, worst: f64::INFINITY });
        let ours = [step(1, &[0.0; 3])];
        assert_eq!(compare_steps(&ours, &theirs).worst, f64::INFINITY);
    }
}

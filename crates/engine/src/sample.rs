//! Choosing a token from logits: greedy, or at a temperature with top-k and top-p.
//!
//! A [`Sampler`] belongs to one request and has its own generator, so a request's tokens depend on
//! its seed and logits and not on what else is in the batch. Ties go to the lowest token id. Draws
//! are reproducible for one version of the `rand` crate.

use std::cmp::Ordering;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

/// How to choose tokens. The filters apply in the order temperature, top-k, top-p.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingParams {
    /// Logits are divided by this, 0 or more; 0 chooses the largest logit always.
    pub temperature: f32,
    /// Only this many of the most probable tokens, at least 1; `None` keeps all.
    pub top_k: Option<usize>,
    /// Only the fewest most probable tokens that have this much of the probability together, in
    /// (0, 1]; 1 keeps all.
    pub top_p: f32,
    /// Seed of the request's generator.
    pub seed: u64,
}

impl SamplingParams {
    /// The largest logit, always.
    pub const GREEDY: Self = Self { temperature: 0.0, top_k: None, top_p: 1.0, seed: 0 };
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self::GREEDY
    }
}

/// Why parameters are refused or no token can be chosen.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SampleError {
    /// Negative, infinite or not a number.
    #[error("temperature is {temperature}, expected a finite number that is 0 or more")]
    Temperature {
        /// The value given.
        temperature: f32,
    },
    /// Zero.
    #[error("top_k is 0, expected at least 1, or none for all tokens")]
    TopK,
    /// Outside (0, 1].
    #[error("top_p is {top_p}, expected more than 0 and at most 1")]
    TopP {
        /// The value given.
        top_p: f32,
    },
    /// A logit is NaN or plus infinity: the model or a kernel has failed.
    #[error("the logit of token {token} is {logit}")]
    Logit {
        /// The token.
        token: usize,
        /// Its logit.
        logit: f32,
    },
    /// No logit, or all are minus infinity.
    #[error("none of the {num_tokens} tokens can be chosen")]
    NoCandidate {
        /// Number of logits given.
        num_tokens: usize,
    },
}

/// A chosen token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// The token.
    pub token: u32,
    /// Its logit, before the temperature.
    pub logit: f32,
    /// Its logit minus the largest of all others: 0 for a tie, negative where the draw fell on
    /// another than the most probable token, infinite without another candidate.
    pub margin: f32,
}

/// Chooses the tokens of one request.
#[derive(Debug)]
pub struct Sampler {
    params: SamplingParams,
    rng: StdRng,
    /// Reused from call to call.
    candidates: Vec<Candidate>,
}

#[derive(Debug, Clone, Copy)]
struct Candidate {
    token: u32,
    logit: f32,
    /// In proportion to the probability.
    weight: f64,
}

impl Sampler {
    /// A sampler with its generator at the seed.
    ///
    /// # Errors
    /// When a parameter is outside its range.
    pub fn new(params: SamplingParams) -> Result<Self, SampleError> {
        let SamplingParams { temperature, top_k, top_p, seed } = params;
        if !temperature.is_finite() || temperature < 0.0 {
            return Err(SampleError::Temperature { temperature });
        }
        if top_k == Some(0) {
            return Err(SampleError::TopK);
        }
        if top_p.is_nan() || top_p <= 0.0 || top_p > 1.0 {
            return Err(SampleError::TopP { top_p });
        }
        Ok(Self { params, rng: StdRng::seed_from_u64(seed), candidates: Vec::new() })
    }

    /// Chooses a token from one row of logits `[vocab_size]`.
    ///
    /// # Errors
    /// When a logit is NaN or plus infinity, or there is no token to choose. The generator has not
    /// advanced then.
    pub fn sample(&mut self, logits: &[f32]) -> Result<Choice, SampleError> {
        let top = two_largest(logits)?;
        if self.params.temperature == 0.0 {
            return Ok(choice(top.token, top.logit, &top));
        }
        self.weigh(logits, top.logit);
        self.filter();
        let candidate = self.draw();
        Ok(choice(candidate.token, candidate.logit, &top))
    }

    /// Whether a token can be chosen from these logits, for callers that must not draw for one request of a batch
    /// when another will fail.
    ///
    /// # Errors
    /// As [`sample`](Self::sample).
    pub fn check(logits: &[f32]) -> Result<(), SampleError> {
        two_largest(logits).map(|_| ())
    }

    fn weigh(&mut self, logits: &[f32], largest: f32) {
        let temperature = f64::from(self.params.temperature);
        let weight = |logit: f32| ((f64::from(logit) - f64::from(largest)) / temperature).exp();
        let all = (0u32..).zip(logits).map(|(token, &logit)| Candidate { token, logit, weight: weight(logit) });
        self.candidates.clear();
        self.candidates.extend(all);
    }

    /// Drops the candidates that top-k and top-p exclude.
    fn filter(&mut self) {
        let SamplingParams { top_k, top_p, .. } = self.params;
        let keeps_all = top_k.is_none_or(|k| k >= self.candidates.len());
        if keeps_all && top_p == 1.0 {
            return;
        }
        if let Some(k) = top_k.filter(|_| !keeps_all) {
            self.candidates.select_nth_unstable_by(k - 1, by_rank);
            self.candidates.truncate(k);
        }
        self.candidates.sort_unstable_by(by_rank);
        if top_p < 1.0 {
            let limit = self.total_weight() * f64::from(top_p);
            let mut sum = 0.0;
            let reaches = |candidate: &Candidate| {
                sum += candidate.weight;
                sum >= limit
            };
            if let Some(last) = self.candidates.iter().position(reaches) {
                self.candidates.truncate(last + 1);
            }
        }
    }

    fn total_weight(&self) -> f64 {
        self.candidates.iter().map(|candidate| candidate.weight).sum()
    }

    fn draw(&mut self) -> Candidate {
        let mut left = self.rng.random::<f64>() * self.total_weight();
        let mut last = None;
        for &candidate in self.candidates.iter().filter(|candidate| candidate.weight > 0.0) {
            if left < candidate.weight {
                return candidate;
            }
            left -= candidate.weight;
            last = Some(candidate);
        }
        // Rounding can leave a rest behind the last one.
        last.expect("the largest logit has weight 1 and no filter drops it")
    }
}

/// The largest logit first, the lowest id among equals.
fn by_rank(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token))
}

struct Top {
    token: u32,
    logit: f32,
    second: f32,
}

fn two_largest(logits: &[f32]) -> Result<Top, SampleError> {
    let mut top = Top { token: 0, logit: f32::NEG_INFINITY, second: f32::NEG_INFINITY };
    for (id, (token, &logit)) in (0u32..).zip(logits.iter().enumerate()) {
        if logit.is_nan() || logit == f32::INFINITY {
            return Err(SampleError::Logit { token, logit });
        }
        if logit > top.logit {
            top = Top { token: id, logit, second: top.logit };
        } else if logit > top.second {
            top.second = logit;
        }
    }
    if top.logit == f32::NEG_INFINITY {
        return Err(SampleError::NoCandidate { num_tokens: logits.len() });
    }
    Ok(top)
}

fn choice(token: u32, logit: f32, top: &Top) -> Choice {
    let best_other = if token == top.token { top.second } else { top.logit };
    Choice { token, logit, margin: logit - best_other }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(temperature: f32, top_k: Option<usize>, top_p: f32) -> SamplingParams {
        SamplingParams { temperature, top_k, top_p, seed: 7 }
    }

    /// How often each token comes up in `num_draws`.
    fn frequencies(params: SamplingParams, logits: &[f32], num_draws: usize) -> Vec<f64> {
        let mut sampler = Sampler::new(params).unwrap();
        let mut counts = vec![0.0; logits.len()];
        for _ in 0..num_draws {
            counts[sampler.sample(logits).unwrap().token as usize] += 1.0 / num_draws as f64;
        }
        counts
    }

    fn assert_near(got: &[f64], expected: &[f64]) {
        for (g, e) in got.iter().zip(expected) {
            assert!((g - e).abs() < 0.015, "{got:?} is not near {expected:?}");
        }
    }

    #[test]
    fn greedy_takes_the_largest_and_the_lowest_id_of_equals() {
        let mut sampler = Sampler::new(SamplingParams::GREEDY).unwrap();
        let choice = sampler.sample(&[1.0, 3.0, 2.5, f32::NEG_INFINITY]).unwrap();
        assert_eq!(choice, Choice { token: 1, logit: 3.0, margin: 0.5 });
        let tie = sampler.sample(&[1.0, 2.0, 2.0]).unwrap();
        assert_eq!(tie, Choice { token: 1, logit: 2.0, margin: 0.0 });
        assert_eq!(sampler.sample(&[-4.0]).unwrap().margin, f32::INFINITY);
    }

    #[test]
    fn draws_follow_the_softmax_at_the_temperature() {
        // Probabilities 0.1, 0.2, 0.3, 0.4 at temperature 2.
        let logits: Vec<f32> = [0.1f32, 0.2, 0.3, 0.4].iter().map(|p| 2.0 * p.ln()).collect();
        assert_near(&frequencies(params(2.0, None, 1.0), &logits, 20_000), &[0.1, 0.2, 0.3, 0.4]);
    }

    #[test]
    fn top_k_and_top_p_keep_the_most_probable() {
        let logits: Vec<f32> = [0.1f32, 0.2, 0.3, 0.4].iter().map(|p| p.ln()).collect();
        let (thirds, sevenths) = ([0.0, 2.0 / 9.0, 3.0 / 9.0, 4.0 / 9.0], [0.0, 0.0, 3.0 / 7.0, 4.0 / 7.0]);
        assert_near(&frequencies(params(1.0, Some(3), 1.0), &logits, 20_000), &thirds);
        assert_near(&frequencies(params(1.0, None, 0.65), &logits, 20_000), &sevenths);
        assert_near(&frequencies(params(1.0, Some(3), 0.7), &logits, 20_000), &sevenths);
        assert_eq!(frequencies(params(1.0, None, 0.01), &logits, 50)[3].round(), 1.0);
        assert_eq!(frequencies(params(1.0, Some(1), 1.0), &logits, 50)[3].round(), 1.0);
        // All equal: the lowest ids stay.
        assert_eq!(frequencies(params(1.0, Some(2), 1.0), &[1.0; 6], 200)[2..], [0.0; 4]);
    }

    #[test]
    fn the_seed_decides_the_draws() {
        let run = |seed| {
            let mut sampler = Sampler::new(SamplingParams { seed, ..params(1.0, None, 0.9) }).unwrap();
            (0..32).map(|_| sampler.sample(&[0.5; 50]).unwrap().token).collect::<Vec<_>>()
        };
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
    }

    #[test]
    fn a_drawn_token_below_the_top_has_a_negative_margin() {
        let mut sampler = Sampler::new(params(1.0, None, 1.0)).unwrap();
        let choices: Vec<Choice> = (0..100).map(|_| sampler.sample(&[1.0, 1.5]).unwrap()).collect();
        assert!(choices.contains(&Choice { token: 0, logit: 1.0, margin: -0.5 }));
        assert!(choices.contains(&Choice { token: 1, logit: 1.5, margin: 0.5 }));
    }

    #[test]
    fn masked_tokens_are_never_drawn() {
        let logits = [f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY];
        assert_eq!(frequencies(params(100.0, Some(3), 1.0), &logits, 100)[1].round(), 1.0);
    }

    #[test]
    fn bad_parameters_and_logits_are_named() {
        for temperature in [-1.0, f32::NAN, f32::INFINITY] {
            let error = Sampler::new(params(temperature, None, 1.0)).unwrap_err();
            assert!(matches!(error, SampleError::Temperature { .. }));
        }
        for top_p in [0.0, -0.5, 1.01, f32::NAN] {
            assert!(matches!(Sampler::new(params(1.0, None, top_p)).unwrap_err(), SampleError::TopP { .. }));
        }
        assert_eq!(Sampler::new(params(1.0, Some(0), 1.0)).unwrap_err(), SampleError::TopK);
        for temperature in [0.0, 1.0] {
            let mut sampler = Sampler::new(params(temperature, None, 1.0)).unwrap();
            let error = sampler.sample(&[0.0, f32::NAN]).unwrap_err();
            assert!(matches!(error, SampleError::Logit { token: 1, .. }));
            assert!(matches!(sampler.sample(&[f32::INFINITY]).unwrap_err(), SampleError::Logit { token: 0, .. }));
            assert_eq!(sampler.sample(&[]).unwrap_err(), SampleError::NoCandidate { num_tokens: 0 });
            let masked = sampler.sample(&[f32::NEG_INFINITY; 2]).unwrap_err();
            assert_eq!(masked, SampleError::NoCandidate { num_tokens: 2 });
        }
    }
}

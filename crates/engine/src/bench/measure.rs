//! Times one problem on one backend: planned once, warmed up, checked, then run again and again.

use std::time::{Duration, Instant};

use attn_metadata::{BoxedBackend, Host, HostDevice, Prepared, RunError};

use super::truth::{SampleRows, relative_error};
use super::work::Work;
use crate::backends::create_backend;
use crate::replay::{Outcome, Problem, ReplayError};

/// Plans are timed this many times.
const PLAN_REPS: usize = 5;
/// Rows that are checked.
const CHECKED_ROWS: u32 = 32;

/// How often a call is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reps {
    /// At least so often.
    pub min: usize,
    /// At most so often.
    pub max: usize,
    /// Until this time has passed.
    pub budget: Duration,
}

/// A problem with its backend, ready to be timed.
#[allow(missing_debug_implementations, reason = "a backend need not be printable")]
pub struct Subject {
    problem: Problem,
    backend: BoxedBackend<Host>,
    name: String,
    step: Prepared,
    outcome: Outcome,
    plan_us: f64,
}

/// Figures of one problem.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// Median time of a call.
    pub ms: f64,
    /// Median time of planning, the batch's validation not included.
    pub plan_us: f64,
    /// Milliseconds that the plan predicts, where the backend knows what its device can do.
    pub predicted_ms: Option<f64>,
    /// Its work.
    pub work: Work,
    /// Relative error against float64 on one head.
    pub rel_err: f64,
}

impl Subject {
    /// Makes the backend, plans and runs once.
    ///
    /// # Errors
    /// [`ReplayError`] where no backend fits or the call fails.
    pub fn new(mut problem: Problem, choice: &str, device: HostDevice) -> Result<Self, ReplayError> {
        let (mut backend, selection) = create_backend(choice, &problem.config(device))?;
        let mut plan_us = Vec::with_capacity(PLAN_REPS);
        let mut step = backend.prepare_metadata(&problem.batch)?;
        for _ in 0..PLAN_REPS {
            let started = Instant::now();
            step = backend.prepare_metadata(&problem.batch)?;
            plan_us.push(started.elapsed().as_secs_f64() * 1e6);
        }
        let mut outcome = problem.outcome();
        problem.forward(backend.as_mut(), &step, &mut outcome)?;
        let name = selection.to_string().lines().next().unwrap_or_default().to_owned();
        Ok(Self { problem, backend, name, step, outcome, plan_us: median(&mut plan_us) })
    }

    /// Who runs it.
    #[must_use]
    pub fn backend(&self) -> &str {
        &self.name
    }

    /// The problem.
    #[must_use]
    pub const fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Times of calls, in ms.
    ///
    /// # Errors
    /// [`RunError`].
    pub fn round(&mut self, reps: Reps) -> Result<Vec<f64>, RunError> {
        let begun = Instant::now();
        let mut times = Vec::with_capacity(reps.max);
        while times.len() < reps.min || (times.len() < reps.max && begun.elapsed() < reps.budget) {
            let started = Instant::now();
            self.problem.forward(self.backend.as_mut(), &self.step, &mut self.outcome)?;
            times.push(started.elapsed().as_secs_f64() * 1e3);
        }
        Ok(times)
    }

    /// The figures that go with a median time.
    #[must_use]
    pub fn measured(&self, ms: f64) -> Measured {
        // The longest request says most.
        let requests = self.problem.batch.requests().iter().enumerate();
        let longest = requests.filter(|(_, r)| r.q_len > 0).max_by_key(|(_, r)| r.kv_len);
        let sample = SampleRows { request: longest.map_or(0, |(index, _)| index), head: 0, max_rows: CHECKED_ROWS };
        let rel_err = relative_error(&self.problem, &self.outcome, sample).unwrap_or(0.0);
        Measured { ms, plan_us: self.plan_us, predicted_ms: None, work: Work::of(&self.problem), rel_err }
    }
}

/// The median; 0 of nothing. Sorts the values.
pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        n if n % 2 == 1 => values[n / 2],
        n => f64::midpoint(values[n / 2 - 1], values[n / 2]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_are_those_of_the_textbook() {
        assert_eq!(median(&mut []), 0.0);
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut [4.0, 1.0, 2.0, 3.0]), 2.5);
    }
}

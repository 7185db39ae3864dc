//! Owns [`Report`]: what ran, what was refused, what failed, check by check; and the rule that too little is not green.

use std::fmt;

use serde::Serialize;

use crate::harness::Stop;

/// Failures that a check keeps; further ones are counted.
const KEPT: usize = 3;

/// The outcome of one check over its cases.
#[derive(Clone, Debug, Default, Serialize)]
pub struct CheckReport {
    /// The check's name.
    pub name: &'static str,
    /// Cases that ran and passed.
    pub passed: usize,
    /// Cases that the backend refused, with reasons.
    pub refused: usize,
    /// Cases that the check does not apply to.
    pub skipped: usize,
    /// Cases that failed.
    pub failed: usize,
    /// Largest fraction of a tolerance that was used; 0 for exact checks.
    pub worst: f64,
    /// Wall time in seconds.
    pub seconds: f64,
    /// The first failures: the case's line and what was wrong.
    pub failures: Vec<(String, String)>,
    /// One of the refusals.
    pub refusal: Option<String>,
}

impl CheckReport {
    pub(crate) fn add(&mut self, case: &str, outcome: Result<f64, Stop>) {
        match outcome {
            Ok(worst) => {
                self.passed += 1;
                self.worst = self.worst.max(worst);
            }
            Err(Stop::Refused(why)) => {
                self.refused += 1;
                self.refusal.get_or_insert(why);
            }
            Err(Stop::Skipped(_)) => self.skipped += 1,
            Err(Stop::Failed(why)) => {
                self.failed += 1;
                if self.failures.len() < KEPT {
                    self.failures.push((case.to_owned(), why));
                }
            }
        }
    }
}

/// The outcome of a run of the suite.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The backend, as it names itself.
    pub backend: String,
    /// Check by check.
    pub checks: Vec<CheckReport>,
    /// Fewest passed cases that count as green.
    pub floor: usize,
    /// Wall time in seconds.
    pub seconds: f64,
}

impl Report {
    /// Cases that passed.
    #[must_use]
    pub fn num_passed(&self) -> usize {
        self.checks.iter().map(|c| c.passed).sum()
    }

    /// Cases that were refused.
    #[must_use]
    pub fn num_refused(&self) -> usize {
        self.checks.iter().map(|c| c.refused).sum()
    }

    /// Cases that failed.
    #[must_use]
    pub fn num_failed(&self) -> usize {
        self.checks.iter().map(|c| c.failed).sum()
    }

    /// Whether nothing failed and enough ran.
    #[must_use]
    pub fn is_green(&self) -> bool {
        self.num_failed() == 0 && self.num_passed() >= self.floor
    }

    /// The report of one check.
    #[must_use]
    pub fn check(&self, name: &str) -> Option<&CheckReport> {
        self.checks.iter().find(|c| c.name == name)
    }

    /// Names of the checks that failed.
    #[must_use]
    pub fn failed_checks(&self) -> Vec<&'static str> {
        self.checks.iter().filter(|c| c.failed > 0).map(|c| c.name).collect()
    }

    /// Panics with the whole report unless it is green.
    ///
    /// # Panics
    /// Where a case failed, or fewer than the floor passed.
    pub fn assert_passed(&self) {
        assert!(self.is_green(), "{self}");
    }
}

impl fmt::Display for CheckReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, passed, refused, skipped, failed, worst, seconds, .. } = self;
        let worst = match (passed, worst) {
            (0, _) => "-".to_owned(),
            (_, 0.0) => "exact".to_owned(),
            _ => format!("{worst:.2}"),
        };
        write!(f, "{name:<18} {passed:>6} {refused:>8} {skipped:>8} {failed:>7} {worst:>10} {seconds:>7.1}s")
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "conformance of {} in {:.1} s", self.backend, self.seconds)?;
        writeln!(f, "{:<18} passed  refused  skipped  failed  worst use     time", "check")?;
        self.checks.iter().try_for_each(|check| writeln!(f, "{check}"))?;
        let (passed, refused, failed) = (self.num_passed(), self.num_refused(), self.num_failed());
        writeln!(f, "{:<18} {passed:>6} {refused:>8} {:>8} {failed:>7}", "all", "")?;
        for check in &self.checks {
            for (case, why) in &check.failures {
                writeln!(f, "\n{}: {why}\n  {case}", check.name)?;
            }
        }
        if passed < self.floor {
            let floor = self.floor;
            writeln!(f, "\nonly {passed} cases passed, {floor} are needed: a suite that hardly ran is not green")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_suite_that_hardly_ran_is_not_green() {
        let mut check = CheckReport { name: "oracle", ..CheckReport::default() };
        check.add("a", Ok(0.5));
        check.add("b", Err(Stop::Refused("no support for sinks".to_owned())));
        let mut report = Report { backend: "x".to_owned(), checks: vec![check], floor: 2, seconds: 0.1 };
        assert!(!report.is_green());
        assert!(report.to_string().contains("only 1 cases passed, 2 are needed"));
        report.floor = 1;
        assert!(report.is_green());
        report.checks[0].add("c", Err(Stop::failed("wrong")));
        assert!(!report.is_green());
        assert_eq!(report.failed_checks(), ["oracle"]);
    }
}

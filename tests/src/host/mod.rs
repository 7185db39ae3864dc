//! Runs the suite on a backend of the host space. Backends of other spaces stand behind an adapter that copies in and
//! out; the cases are small.

mod accuracy;
mod context;
mod contract;
mod determinism;
mod graph;
mod large;
mod masks;
mod memory;
mod partial;
mod sizes;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::Instant;

use attn_metadata::{BackendConfig, BoxedBackend, Capabilities, CreateError, Host};

pub use context::Context;

use crate::case::Case;
use crate::harness::Stop;
use crate::report::{CheckReport, Report};
use crate::rng::Rng;
use crate::sample::{Bounds, Sampler, plain_cases};
use crate::suite::Suite;

/// Makes a backend for a configuration.
pub type Make<'a> = &'a (dyn Fn(&BackendConfig<Host>) -> Result<BoxedBackend<Host>, CreateError> + Sync);

/// One check: a property of backends, tried on cases.
#[derive(Clone, Copy, Debug)]
pub struct Check {
    /// Its name, in reports.
    pub name: &'static str,
    /// What must hold.
    pub what: &'static str,
    /// Brings a drawn case into a form that the check applies to.
    adapt: fn(&mut Case, &mut Rng),
    /// The largest fraction of a tolerance that was used, 0 for exact checks.
    run: fn(&Context<'_>, &Case) -> Result<f64, Stop>,
    /// How many cases, from the numbers of the suite.
    num_cases: fn(&Suite) -> usize,
    /// Fraction of the suite's work for a case.
    work: u64,
    /// Whether it applies to layers of a family: it is exact, or about the contract, and needs no oracle.
    of_families: bool,
}

impl Check {
    const fn of_families(self) -> Self {
        Self { of_families: true, ..self }
    }
}

const fn check(
    name: &'static str,
    what: &'static str,
    adapt: fn(&mut Case, &mut Rng),
    run: fn(&Context<'_>, &Case) -> Result<f64, Stop>,
) -> Check {
    Check { name, what, adapt, run, num_cases: |suite| suite.num_check_cases, work: 4, of_families: false }
}

/// Every check, in the order of the report.
pub const CHECKS: &[Check] = &[
    Check { num_cases: |suite| suite.num_oracle_cases, work: 1, ..accuracy::ORACLE },
    Check { num_cases: |suite| 6 * suite.num_check_cases, work: 16, ..sizes::HEADS },
    accuracy::EMPTY_ROWS,
    accuracy::HUGE_LOGITS,
    Check { num_cases: |suite| suite.num_check_cases.div_ceil(2), ..large::LONG },
    Check { num_cases: |suite| suite.num_check_cases.div_ceil(5), ..large::MANY },
    Check { num_cases: |suite| suite.num_check_cases.div_ceil(2), ..large::MANY_PAGES },
    Check { num_cases: |suite| suite.num_check_cases.div_ceil(4), ..large::WIDE_GROUPS },
    Check { num_cases: |suite| 4 * suite.num_check_cases, ..masks::WINDOW_PROBE },
    masks::MASK_PROBE,
    masks::FUTURE.of_families(),
    memory::PAGES.of_families(),
    memory::POISON.of_families(),
    memory::STRIDES.of_families(),
    memory::APPEND_BYTES.of_families(),
    memory::SCALES,
    determinism::RERUN.of_families(),
    determinism::ALONE.of_families(),
    determinism::THREADS.of_families(),
    determinism::LAYERS.of_families(),
    determinism::HYBRID.of_families(),
    graph::REPLAY.of_families(),
    graph::LIMITS.of_families(),
    contract::STALE.of_families(),
    contract::REFUSED_BATCH.of_families(),
    contract::REFUSED_CALL.of_families(),
    partial::CHUNKS,
    partial::PAGE_SIZES,
    partial::MERGE,
];

/// Runs every check that applies to the suite's layers.
pub fn run<F>(suite: &Suite, make: F) -> Report
where
    F: Fn(&BackendConfig<Host>) -> Result<BoxedBackend<Host>, CreateError> + Sync,
{
    let applies = |check: &&Check| suite.family.is_none() || check.of_families;
    let checks: Vec<Check> = CHECKS.iter().filter(applies).copied().collect();
    run_checks(suite, &checks, &make)
}

/// Runs some checks.
///
/// # Panics
/// Where no backend can be made for any plain case: there is nothing to test then.
#[must_use]
pub fn run_checks(suite: &Suite, checks: &[Check], make: Make<'_>) -> Report {
    let started = Instant::now();
    let (name, capabilities) = discover(suite, make).expect("the backend can be made for some plain decode case");
    let stopped = AtomicBool::new(false);
    let context = Context::new(suite, make);
    let checks = checks.iter().map(|check| run_check(&context, check, &capabilities, &stopped)).collect();
    Report { backend: name, checks, floor: suite.floor, seconds: started.elapsed().as_secs_f64() }
}

/// Runs one check on one case, given as its line.
///
/// # Errors
/// [`Stop`], where it did not pass, and for a line or a name that does not parse.
pub fn run_case(check: &str, line: &str, make: Make<'_>) -> Result<f64, Stop> {
    run_case_of(&Suite::standard(), check, line, make)
}

/// As [`run_case`], for lines of another suite: one of a family, say.
///
/// # Errors
/// As [`run_case`].
pub fn run_case_of(suite: &Suite, check: &str, line: &str, make: Make<'_>) -> Result<f64, Stop> {
    let unknown = || Stop::failed(format!("there is no check {check:?}"));
    let check = CHECKS.iter().find(|c| c.name == check).ok_or_else(unknown)?;
    let case = Case::parse_with(line, suite.family).map_err(|error| Stop::failed(format!("{error}")))?;
    attempt(&Context::new(suite, make), check, &case)
}

/// The capabilities, from the first backend that can be made.
fn discover(suite: &Suite, make: Make<'_>) -> Option<(String, Capabilities)> {
    let context = Context::new(suite, make);
    let backend = plain_cases(suite.family).find_map(|case| context.backend(&case).ok())?;
    Some((backend.name().to_owned(), backend.capabilities().clone()))
}

fn run_check(context: &Context<'_>, check: &Check, capabilities: &Capabilities, stopped: &AtomicBool) -> CheckReport {
    let (suite, started) = (context.suite(), Instant::now());
    let cases = draw_cases(suite, check, capabilities);
    let one = |case: &Case| {
        if stopped.load(Ordering::Relaxed) {
            return None;
        }
        let outcome = attempt(context, check, case);
        let failed = matches!(outcome, Err(Stop::Failed(_)));
        stopped.fetch_or(failed && suite.fail_fast, Ordering::Relaxed);
        Some((case.to_string(), outcome))
    };
    let outcomes = on_threads(&cases, if suite.parallel { num_threads() } else { 1 }, one);
    let seconds = started.elapsed().as_secs_f64();
    let mut report = CheckReport { name: check.name, seconds, ..CheckReport::default() };
    outcomes.into_iter().for_each(|(case, outcome)| report.add(&case, outcome));
    report
}

fn draw_cases(suite: &Suite, check: &Check, capabilities: &Capabilities) -> Vec<Case> {
    let name = check.name.bytes().fold(0u64, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into()));
    let bounds = Bounds { work: suite.work / check.work, candidates: 24 };
    let mut sampler = Sampler::new(capabilities, bounds, Rng::new(&[suite.seed, name])).with_family(suite.family);
    let mut rng = Rng::new(&[suite.seed, name, 1]);
    let mut draw = |_| {
        let mut case = sampler.draw();
        (check.adapt)(&mut case, &mut rng);
        suite.family.iter().for_each(|family| (family.adapt)(&mut case));
        case
    };
    (0..(check.num_cases)(suite)).map(&mut draw).collect()
}

/// Threads for cases: plain ones. In a pool that backends use too, a case that waits for its backend would be given
/// another case to run, on the same stack, and so on.
fn num_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Runs the cases on some threads; outcomes in order of the cases.
fn on_threads<T: Send>(cases: &[Case], num_threads: usize, one: impl Fn(&Case) -> Option<T> + Sync) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(case) = cases.get(index) else { return done };
            done.extend(one(case).map(|outcome| (index, outcome)));
        }
    };
    let mut outcomes = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..num_threads).map(|_| scope.spawn(work)).collect();
        let join = |thread: ScopedJoinHandle<'_, Vec<(usize, T)>>| thread.join().expect("panics of cases are caught");
        threads.into_iter().flat_map(join).collect::<Vec<_>>()
    });
    outcomes.sort_unstable_by_key(|(index, _)| *index);
    outcomes.into_iter().map(|(_, outcome)| outcome).collect()
}

/// A panic is a failure like any other.
fn attempt(context: &Context<'_>, check: &Check, case: &Case) -> Result<f64, Stop> {
    if let Err(why) = case.validate() {
        return Err(Stop::failed(format!("the case is not valid: {why}")));
    }
    let result = catch_unwind(AssertUnwindSafe(|| (check.run)(context, case)));
    result.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
        Err(Stop::failed(format!("it panicked: {text}")))
    })
}

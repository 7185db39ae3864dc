//! The controls of the suite: a small sound backend passes, and each of its planted faults is noticed.
//!
//! A suite that cannot fail proves nothing. Every fault here is a bug that some attention backend has had.

mod fault;
mod kernel;
mod mini;

use attn_conformance::{Suite, host};
use attn_metadata::{BackendConfig, BoxedBackend, CreateError, Host};

use fault::Fault;
use mini::Mini;

fn make(fault: Option<Fault>) -> impl Fn(&BackendConfig<Host>) -> Result<BoxedBackend<Host>, CreateError> + Sync {
    move |config| Ok(Box::new(Mini::new(config, fault)?))
}

#[test]
fn a_sound_backend_passes() {
    let report = host::run(&Suite::standard(), make(None));
    println!("{report}");
    report.assert_passed();
}

#[test]
fn what_a_backend_does_not_promise_is_not_demanded() {
    let free = |config: &BackendConfig<Host>| -> Result<BoxedBackend<Host>, CreateError> {
        Ok(Box::new(Mini::new(config, Some(Fault::BitsDependOnBatch))?.without_invariance()))
    };
    let report = host::run(&Suite::smoke(), free);
    report.assert_passed();
    for name in ["alone", "threads", "hybrid"] {
        let check = report.checks.iter().find(|check| check.name == name).expect("the check is in the report");
        assert_eq!(check.passed, 0, "{name} asks for what was not promised: {report}");
    }
}

#[test]
fn every_planted_fault_is_noticed_by_each_check_that_is_about_it() {
    // Panics of faulty backends are caught by the suite; their messages are not news here.
    std::panic::set_hook(Box::new(|_| {}));
    let suite = Suite { num_oracle_cases: 60, num_check_cases: 8, floor: 1, ..Suite::standard() }.fail_fast();
    let mut missed = Vec::new();
    for (fault, names) in fault::NOTICED_BY {
        for name in *names {
            let check = *host::CHECKS.iter().find(|c| c.name == *name).expect("the table names checks");
            let report = host::run_checks(&suite, &[check], &make(Some(*fault)));
            match report.checks[0].failures.first() {
                Some((_, why)) => println!("{fault:?}, {name}: {why}"),
                None => missed.push((fault, name)),
            }
        }
    }
    let _ = std::panic::take_hook();
    assert!(missed.is_empty(), "not noticed: {missed:?}");
}

#[test]
fn every_fault_and_every_check_is_in_the_table() {
    let missing: Vec<_> = Fault::ALL.iter().filter(|f| !fault::NOTICED_BY.iter().any(|(g, _)| g == *f)).collect();
    assert!(missing.is_empty(), "no check is named for {missing:?}");
    let is_named = |name: &str| fault::NOTICED_BY.iter().any(|(_, names)| names.contains(&name));
    let idle: Vec<_> = host::CHECKS.iter().map(|c| c.name).filter(|name| !is_named(name)).collect();
    assert!(idle.is_empty(), "nothing shows that these can fail: {idle:?}");
}

#[test]
fn a_backend_that_refuses_nearly_everything_is_not_green() {
    let inner = make(None);
    let picky = |config: &BackendConfig<Host>| {
        if config.model.layers()[0].heads().num_qo_heads == 1 {
            return inner(config);
        }
        let reasons = vec![attn_metadata::Reason::Unavailable { why: "one head only".to_owned() }];
        Err(CreateError::Unsupported { backend: "picky", reasons })
    };
    let suite = Suite { num_oracle_cases: 100, num_check_cases: 5, floor: 100, ..Suite::standard() };
    let report = host::run(&suite, picky);
    assert_eq!(report.num_failed(), 0, "{report}");
    assert!(report.num_refused() > 0 && !report.is_green(), "{report}");
}

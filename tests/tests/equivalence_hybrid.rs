//! Pairs of different backends by phase: whatever extends and whatever decodes, the pair is a backend like any other.
//! Partial states of one merge with those of the other, and batches that mix both phases are right.

use attn_conformance::{Suite, host};
use attn_metadata::{BackendConfig, BackendEntry, BoxedBackend, CreateError, Host, HybridBackend};
use attn_reference::{cpu, oracle};

fn pair(extend: BackendEntry<Host>, decode: BackendEntry<Host>) {
    let create = move |config: &BackendConfig<Host>| -> Result<BoxedBackend<Host>, CreateError> {
        Ok(Box::new(HybridBackend::new((extend.create)(config)?, (decode.create)(config)?, config.limits, 1)?))
    };
    let suite = Suite { num_oracle_cases: 60, num_check_cases: 5, floor: 150, ..Suite::standard() };
    host::run(&suite, create).assert_passed();
}

#[test]
fn the_cpu_backend_extends_and_the_oracle_decodes() {
    pair(cpu::entry(), oracle::entry());
}

#[test]
fn the_oracle_extends_and_the_cpu_backend_decodes() {
    pair(oracle::entry(), cpu::entry());
}

//! The CPU backend passes the suite.

use attn_conformance::{Suite, host};

#[test]
fn the_cpu_backend_passes() {
    let report = host::run(&Suite::standard(), attn_reference::cpu::entry().create);
    println!("{report}");
    report.assert_passed();
}

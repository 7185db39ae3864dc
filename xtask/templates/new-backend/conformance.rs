//! The backend passes the conformance suite.

use attn_conformance::{Suite, host};

#[test]
fn the_backend_passes() {
    let report = host::run(&Suite::standard(), attn_template::entry().create);
    println!("{report}");
    report.assert_passed();
}

//! The oracle passes the suite: its exact relations, and (against itself, through the dtypes of out and cache) the
//! tolerances.

use attn_conformance::{Suite, host};

#[test]
fn the_oracle_passes() {
    let report = host::run(&Suite::standard(), attn_reference::oracle::entry().create);
    println!("{report}");
    report.assert_passed();
}

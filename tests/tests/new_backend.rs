//! What `cargo xtask new-backend` writes compiles here, with the workspace's lints, and passes a small suite.
#![allow(unreachable_pub, reason = "the template is the module of a library")]

#[path = "../../xtask/templates/new-backend/backend.rs"]
mod backend;

use attn_conformance::{Suite, host};

#[test]
fn a_new_backend_passes_before_anything_is_changed() {
    let report = host::run(&Suite::smoke(), backend::entry().create);
    println!("{report}");
    report.assert_passed();
}

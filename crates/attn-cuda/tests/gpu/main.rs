//! What the conformance suite does not look at, where there is a GPU; without one each test says so and passes.

#[path = "../support/mod.rs"]
mod support;

mod every_kernel;

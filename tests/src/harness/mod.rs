//! Builds the batch, tables, cache and tensors of a [`Case`](crate::case::Case) in host memory, runs a backend on
//! them, and looks at every byte that it wrote.
//!
//! A fresh output is full of canaries and lies between guards; every run checks that each row of the batch was
//! written, that nothing outside was, and that padding rows are zeros with an LSE of −inf.

mod cache;
mod content;
mod problem;
mod run;
mod tensor;

pub use cache::{expected_after, expected_side_after};
pub(crate) use problem::mask_shows;
pub use problem::{Build, Poison, Problem, SideProblem, Tables};
pub use run::{Run, Stop, forward, run, same_rows};
pub(crate) use run::{kv_of, prepare, side_output};
pub use tensor::{Activation, Strides, canary, value};

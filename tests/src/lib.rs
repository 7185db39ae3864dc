//! The suite that every attention backend passes, as a library.
//!
//! A backend crate has one test:
//!
//! ```
//! use attn_conformance::{Suite, host};
//!
//! let create = attn_reference::oracle::entry().create;
//! host::run(&Suite::smoke(), create).assert_passed();
//! ```
//!
//! The suite draws cases ([`Case`]) from a pool of shapes, within what the backend's capabilities say, and puts each
//! through checks ([`host::CHECKS`]): against the float64 oracle within committed tolerances ([`tolerance`]), by exact
//! relations (bit for bit: pages, poison, neighbours, replay, strides, …), and against the contract of the trait.
//! A failure prints the case as a line; [`host::run_case`] runs that line again.
#![forbid(unsafe_code)]

pub mod case;
pub mod harness;
pub mod host;
pub mod tolerance;

mod report;
mod rng;
mod sample;
mod suite;
mod text;

pub use case::{Case, CaseFamily};
pub use report::{CheckReport, Report};
pub use rng::Rng;
pub use suite::Suite;
pub use text::CaseTextError;

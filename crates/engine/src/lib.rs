//! Attention backends put to work.
//!
//! [`backends`] lists what there is and makes one by name. [`serve`] is the step loop of an engine over it, `model` a
//! runner for models from GGUF files. The rest is what the `attn` command is made of: [`demo`], [`replay`] of single
//! attention problems from files, [`mod@vectors`] of published numbers, [`mod@bench`], [`doctor`], and [`report`], which turns all of that into text.
#![forbid(unsafe_code)]

pub mod aliases;
pub mod backends;
pub mod bench;
pub mod demo;
pub mod doctor;
pub mod lm;
#[cfg(feature = "model")]
pub mod model;
pub mod replay;
pub mod report;
pub mod sample;
pub mod serve;
pub mod vectors;

/// The repository's README, so that its example is compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
pub struct Readme;

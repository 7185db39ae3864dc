//! The `attn` command from outside: what it prints, what it refuses, what it computes.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test may")]
#![allow(unreachable_pub, missing_docs, reason = "a test has no outside")]

mod bench;
mod commands;
mod refusals;
mod replay;
mod replay_mla;
mod replay_random;
mod support;
mod vectors;

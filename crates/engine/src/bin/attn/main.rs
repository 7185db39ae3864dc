//! `attn`: attention backends on the command line.
//!
//! A command returns an [`Outcome`] or an error; an error becomes one line on stderr. Exit code 0: well; 1: a check or
//! a call failed; 2: what was given cannot be used.
#![forbid(unsafe_code)]
#![allow(unreachable_pub, reason = "a binary has no outside")]

mod backends;
mod bench;
mod bench_tables;
#[cfg(feature = "model")]
mod cases;
mod check_vectors;
mod demo;
mod doctor;
mod explain;
mod failure;
#[cfg(feature = "model")]
mod generate;
#[cfg(feature = "model")]
mod logits;
mod output;
#[cfg(feature = "model")]
mod random;
mod replay;
#[cfg(feature = "model")]
mod stream;
#[cfg(feature = "model")]
mod traffic;

use std::process::ExitCode;

use anyhow::Result;
use clap::error::ErrorKind;
use clap::{CommandFactory as _, Parser, Subcommand};

use failure::{Failure, Outcome};

/// Attention backends for LLM inference engines: look, try, check, measure.
#[derive(Debug, Parser)]
#[command(name = "attn", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs a mixed batch (prefill, cached prefix, decode) on every backend and checks it against float64
    Demo(demo::Args),
    /// Lists the backends of this build and what each can do
    Backends(backends::Args),
    /// Says what this machine offers: processor, memory, driver, usable backends
    Doctor(doctor::Args),
    /// Shows how a backend plans a batch, and which backends were rejected why
    Explain(explain::Args),
    /// Runs attention problems from safetensors files and writes the results
    Replay(replay::Args),
    /// Checks block-sparse backends against published numbers
    CheckVectors(check_vectors::Args),
    /// Measures backends, alone or in turns with a peer, and draws charts
    Bench(bench::Args),
    /// Generates text with a GGUF model, or tokens with a model of random weights
    #[cfg(feature = "model")]
    Generate(generate::Args),
    /// Generates text with a GGUF model (not in this build)
    #[cfg(not(feature = "model"))]
    #[command(disable_help_flag = true)]
    Generate {
        /// Ignored
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
        rest: Vec<String>,
    },
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    match run(&cli.command) {
        Ok(outcome) => outcome.into(),
        Err(error) => failure::report(&error),
    }
}

fn run(command: &Command) -> Result<Outcome> {
    match command {
        Command::Demo(args) => demo::run(args),
        Command::Backends(args) => backends::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Explain(args) => explain::run(args),
        Command::Replay(args) => replay::run(args),
        Command::CheckVectors(args) => check_vectors::run(args),
        Command::Bench(args) => bench::run(args),
        #[cfg(feature = "model")]
        Command::Generate(args) => generate::run(args),
        #[cfg(not(feature = "model"))]
        Command::Generate { .. } => {
            Err(Failure::usage("this build has no model runner: rebuild with `--features model`").into())
        }
    }
}

/// Help and version go out as they are; a mistake becomes one line.
fn usage(error: &clap::Error) -> ExitCode {
    use ErrorKind::{DisplayHelp, DisplayHelpOnMissingArgumentOrSubcommand, DisplayVersion};
    if matches!(error.kind(), DisplayHelp | DisplayVersion | DisplayHelpOnMissingArgumentOrSubcommand) {
        // A closed pipe takes no more help.
        let _ = error.print();
        return if error.use_stderr() { Outcome::BadInput.into() } else { Outcome::Success.into() };
    }
    let text = error.to_string();
    let message = text.split("\n\nUsage:").next().unwrap_or_default();
    let message = message.split("\n\nFor more information").next().unwrap_or_default();
    let message = message.trim_start_matches("error: ");
    let named = std::env::args().skip(1).find(|word| !word.starts_with('-')).unwrap_or_default();
    let of_command =
        Cli::command().find_subcommand(&named).map_or(String::new(), |found| format!(" {}", found.get_name()));
    failure::report(&Failure::usage(format!("{message}; see `attn{of_command} --help`")).into())
}

//! The workspace's own commands: `cargo xtask --help` lists them.
//!
//! One file a command, and one for each thing that commands share: the workspace (`workspace`), steps and
//! their table (`step`, `table`), the model file (`model`), the `attn` binary (`attn`), names (`backend_name`).
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command line program talks to its user")]

mod attn;
mod backend_name;
mod check;
mod demo;
mod gpu_bundle;
mod kernels;
mod model;
mod mutate;
mod new_backend;
mod real_model;
mod step;
mod table;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::workspace::Workspace;

/// Checks, demo and scaffolding of the workspace.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// The gate: formatting, lints, documentation and tests
    Check(check::Args),
    /// Compile the CUDA kernels into the images that attn-cuda ships, or compare with them
    Kernels(kernels::Args),
    /// Collect what a machine with a GPU and a driver alone needs to run the GPU tests and measurements
    GpuBundle(gpu_bundle::Args),
    /// The mixed batch on every backend here, then text from a small real model
    Demo(demo::Args),
    /// Print the path of a small model, fetching it where it is missing
    Model {
        /// Which one
        #[arg(default_value = model::SMOLLM2.name, value_parser = [model::SMOLLM2.name, model::GEMMA3.name])]
        name: String,
    },
    /// Compare real models' greedy text with recorded text, over everything that must not change it
    RealModel(real_model::Args),
    /// Plant faults in a copy of the workspace, and demand that the tests notice each
    Mutate(mutate::Args),
    /// Write a crate with a new backend that passes the conformance suite, and register it
    NewBackend(new_backend::Args),
}

fn main() -> ExitCode {
    step::end_with_parent();
    match run(&Cli::parse().task) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs one task; `Ok(false)` where it ran and found something wrong (it has said what).
fn run(task: &Task) -> anyhow::Result<bool> {
    let workspace = Workspace::locate()?;
    match task {
        Task::Check(args) => check::run(&workspace, args),
        Task::Kernels(args) => kernels::run(&workspace, args),
        Task::GpuBundle(args) => gpu_bundle::run(&workspace, args),
        Task::Demo(args) => demo::run(&workspace, args),
        Task::Model { name } => {
            let model = if name == model::GEMMA3.name { &model::GEMMA3 } else { &model::SMOLLM2 };
            println!("{}", model::ensure(&workspace, model)?.display());
            Ok(true)
        }
        Task::RealModel(args) => real_model::run(&workspace, args),
        Task::Mutate(args) => mutate::run(&workspace, args),
        Task::NewBackend(args) => new_backend::run(&workspace, args),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        super::Cli::command().debug_assert();
    }
}

//! `attn demo`: the mixed batch on every backend.

use anyhow::Result;
use engine::backends::host_registry;
use engine::demo::{Demo, Status};

use super::{Failure, Outcome, output};

/// Options of `demo`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<Outcome> {
    let demo = Demo::run(&host_registry()).map_err(anyhow::Error::from_boxed)?;
    if args.json {
        output::write_json(&demo)?;
    } else {
        output::write(&demo.to_text())?;
    }
    if demo.passed() {
        return Ok(Outcome::Success);
    }
    let failed: Vec<&str> = demo.backends.iter().filter(|b| b.status == Status::Failed).map(|b| b.name).collect();
    Err(Failure::check(format!("not exact on this machine: {}", failed.join(", "))).into())
}

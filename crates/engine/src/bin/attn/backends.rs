//! `attn backends`: what each backend can do.

use anyhow::Result;
use attn_metadata::HostDevice;
use engine::backends::host_registry;
use engine::report::{capability_rows, capability_text};

use super::{Outcome, output};

/// Options of `backends`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<Outcome> {
    let rows = capability_rows(&host_registry(), &HostDevice::default());
    if args.json {
        output::write_json(&rows)?;
    } else {
        output::write(&capability_text(&rows))?;
    }
    Ok(Outcome::Success)
}

//! `attn doctor`: what this machine offers.

use anyhow::Result;
use engine::doctor::Findings;

use super::{Outcome, output};

/// Options of `doctor`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<Outcome> {
    let findings = Findings::of_this_machine();
    if args.json {
        output::write_json(&findings)?;
    } else {
        output::write(&findings.to_table().to_text(output::is_terminal()))?;
    }
    Ok(Outcome::Success)
}

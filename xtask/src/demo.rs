//! `cargo xtask demo`: the mixed batch on every backend of this machine, then a real model's text.

use anyhow::{Context, Result};

use crate::workspace::Workspace;
use crate::{attn, model};

/// Options of `demo`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Stop after the mixed batch; nothing is fetched
    #[arg(long)]
    no_model: bool,
    /// What the model is asked
    #[arg(long, default_value = "Explain in two sentences what a KV cache is.")]
    prompt: String,
}

/// Runs the demo; true where every command succeeded.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<bool> {
    let attn = attn::build(workspace)?;
    let shown_and_run = |args: &[&str]| -> Result<bool> {
        eprintln!("\n$ attn {}", args.join(" "));
        let status = attn::command(workspace, &attn, args).status().context("cannot start attn")?;
        Ok(status.success())
    };
    if !shown_and_run(&["demo"])? {
        return Ok(false);
    }
    if args.no_model {
        return Ok(true);
    }
    let model = model::ensure(workspace, &model::SMOLLM2)?;
    let model = workspace.shown(&model).to_string();
    shown_and_run(&["generate", "--chat", "--model", &model, "--prompt", &args.prompt])
}

//! `attn replay`: attention problems from files.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use attn_metadata::HostDevice;
use engine::replay::{ReplayOptions, claim_names, replay};
use engine::report::{chosen, error_chain};

use super::{Failure, Outcome, failure, output};

/// Options of `replay`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The problems: safetensors files
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Attention backend: a name, names "a+b" of which each layer takes the first that can run it, a pair
    /// "prefill,decode" of these, or "auto". Tensors are in main memory: "cuda" copies them to the GPU and back
    #[arg(long, value_name = "NAME", default_value = "auto")]
    attention_backend: String,
    /// Where the results go, each under its problem's file name
    #[arg(long, value_name = "DIR")]
    out_dir: PathBuf,
    /// Write the caches after the step too
    #[arg(long)]
    cache_out: bool,
    /// Worker threads; default: all
    #[arg(long, value_name = "N", value_parser = super::bench::threads)]
    threads: Option<usize>,
}

/// Runs the command: every file, whatever happens to the others.
pub fn run(args: &Args) -> Result<Outcome> {
    let out_dir = || format!("cannot make the directory {} for --out-dir", args.out_dir.display());
    fs::create_dir_all(&args.out_dir).map_err(Failure::input).with_context(out_dir)?;
    let options = ReplayOptions {
        choice: args.attention_backend.clone(),
        device: HostDevice { num_threads: args.threads, ..HostDevice::default() },
        memory_bytes: None,
        out_dir: args.out_dir.clone(),
        cache_out: args.cache_out,
    };
    let bar = output::bar(args.files.len());
    let mut outcome = Outcome::Success;
    for (file, result) in args.files.iter().zip(claim_names(&args.files, &args.out_dir)) {
        bar.set_message(file.display().to_string());
        match result.and_then(|result| replay(file, &result, &options)) {
            Ok(done) => {
                let (backend, ms) = (chosen(&done.selection), done.elapsed.as_secs_f64() * 1e3);
                let line = format!(
                    "{}: {} requests, {} rows, {backend}, {ms:.2} ms -> {}\n",
                    file.display(),
                    done.num_requests,
                    done.num_rows,
                    done.result.display()
                );
                bar.suspend(|| output::write(&line))?;
            }
            Err(error) => {
                bar.suspend(|| failure::say(&format!("{}: {}", file.display(), error_chain(&error))));
                outcome = match outcome {
                    Outcome::BadInput => Outcome::BadInput,
                    _ if error.is_bad_input() => Outcome::BadInput,
                    _ => Outcome::CheckFailed,
                };
            }
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(outcome)
}

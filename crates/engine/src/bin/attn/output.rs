//! Writing to stdout, where a closed pipe is an error like any other and not a panic.

use std::io::{self, IsTerminal as _, Write as _};

use anyhow::{Context as _, Result};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

/// Writes text.
pub fn write(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    let written = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    written.context("cannot write to stdout")
}

/// Writes a line to stderr, beside what was asked for.
pub fn note(text: &str) {
    // Nobody may be listening; the answer goes to stdout all the same.
    let _ = writeln!(io::stderr(), "{text}");
}

/// Writes a value as JSON.
pub fn write_json(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value).context("cannot write JSON")?;
    write(&format!("{text}\n"))
}

/// Whether stdout is a terminal.
pub fn is_terminal() -> bool {
    io::stdout().is_terminal()
}

/// A line that says what is being done; on a terminal only.
pub fn spinner() -> ProgressBar {
    let bar = ProgressBar::new_spinner();
    bar.set_style(ProgressStyle::with_template("{spinner} {elapsed} {msg}").expect("a constant template"));
    bar.enable_steady_tick(std::time::Duration::from_millis(200));
    bar
}

/// A bar of so many steps; on a terminal only.
pub fn bar(len: usize) -> ProgressBar {
    let bar = ProgressBar::new(len as u64);
    bar.set_style(ProgressStyle::with_template("{wide_bar} {pos}/{len} {msg}").expect("a constant template"));
    bar
}

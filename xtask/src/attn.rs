//! Building and calling the `attn` binary.
//!
//! It is built in the development profile, which optimises, and shares every dependency with the tests.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::workspace::Workspace;

/// The command line that builds `attn`. Cargo unites the features of what a call selects: with the whole workspace and
/// a test selected (a small one), dependencies have the features of `cargo test`, and none is compiled twice.
const BUILD: [&str; 6] = ["build", "--workspace", "--bin", "attn", "--test", "layering"];

/// Builds `attn` and returns where it lies.
pub(crate) fn build(workspace: &Workspace) -> Result<PathBuf> {
    let mut command = workspace.cargo();
    command.args(BUILD).args(["--message-format", "json-render-diagnostics"]);
    let output = command.stderr(Stdio::inherit()).output().context("cannot start cargo")?;
    ensure!(output.status.success(), "`cargo {}` failed", BUILD.join(" "));
    executable(&String::from_utf8_lossy(&output.stdout)).context("cargo built attn and named no executable")
}

/// The path of the executable `attn` in cargo's messages, one JSON object a line.
fn executable(messages: &str) -> Option<PathBuf> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut attn = messages.filter(|message| message["target"]["name"] == "attn");
    attn.find_map(|message| message["executable"].as_str().map(PathBuf::from))
}

/// A command that runs `attn` at the root.
pub(crate) fn command(workspace: &Workspace, attn: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(attn);
    command.current_dir(workspace.path("")).args(args).stdin(Stdio::null());
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_executable_is_found_among_other_messages() {
        let messages = concat!(
            "{\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"engine\"},\"executable\":null}\n",
            "{\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"attn\"},\"executable\":\"target/debug/attn\"}\n",
            "{\"reason\":\"build-finished\",\"success\":true}\n",
        );
        assert_eq!(executable(messages), Some(PathBuf::from("target/debug/attn")));
        assert_eq!(executable("not JSON\n{\"reason\":\"build-finished\"}"), None);
    }
}

//! Runs a peer's benchmark: a command that writes its results as JSON to the path given as its last argument.

use std::io;
use std::path::Path;
use std::process::{Command, Stdio};

use thiserror::Error;

use super::results::{ResultRow, Results};

/// A peer that did not give results.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PeerError {
    /// The command is blank.
    #[error("--peer-cmd is empty, give a command that takes the path of its JSON output as the last argument")]
    NoCommand,
    /// The command cannot be started.
    #[error("cannot start {program:?} of --peer-cmd")]
    Start {
        /// The program.
        program: String,
        /// Why not.
        source: io::Error,
    },
    /// The command failed.
    #[error("--peer-cmd ended with {status}: {last_line}")]
    Failed {
        /// How it ended.
        status: String,
        /// The last line that it wrote.
        last_line: String,
    },
    /// Its output cannot be read.
    #[error("--peer-cmd wrote no results")]
    NoOutput(#[source] io::Error),
    /// Its output is no result file.
    #[error("the results of --peer-cmd are not JSON of the form {{\"results\": [...]}}")]
    Json(#[source] serde_json::Error),
}

/// Runs a command once; its words are separated by blanks, `output` becomes the last one.
///
/// # Errors
/// [`PeerError`].
pub fn run_peer(command: &str, output: &Path) -> Result<Vec<ResultRow>, PeerError> {
    let mut words = command.split_whitespace();
    let program = words.next().ok_or(PeerError::NoCommand)?;
    let ran = Command::new(program).args(words).arg(output).stdin(Stdio::null()).output();
    let ran = ran.map_err(|source| PeerError::Start { program: program.to_owned(), source })?;
    if !ran.status.success() {
        let text = String::from_utf8_lossy(&ran.stderr);
        let last_line = text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it wrote no message").to_owned();
        return Err(PeerError::Failed { status: ran.status.to_string(), last_line });
    }
    let text = std::fs::read_to_string(output).map_err(PeerError::NoOutput)?;
    let results: Results = serde_json::from_str(&text).map_err(PeerError::Json)?;
    Ok(results.results)
}

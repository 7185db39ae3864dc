//! How commands end: exit codes, and errors as one line.

use std::error::Error;
use std::io::{self, Write as _};
use std::process::ExitCode;

use engine::report::{error_chain, one_line};
use thiserror::Error;

/// How a command ended that has said all there is to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Well.
    Success,
    /// A check failed.
    CheckFailed,
    /// What was given cannot be used.
    BadInput,
}

impl From<Outcome> for ExitCode {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Success => Self::SUCCESS,
            Outcome::CheckFailed => Self::from(1),
            Outcome::BadInput => Self::from(2),
        }
    }
}

/// An error whose exit code is known; any other error means exit code 1.
#[derive(Debug, Error)]
pub enum Failure {
    /// The command line asks for something that cannot be.
    #[error("{0}")]
    Usage(String),
    /// A file or a value that was given cannot be used.
    #[error(transparent)]
    Input(Box<dyn Error + Send + Sync>),
    /// A check failed.
    #[error("{0}")]
    Check(String),
}

impl Failure {
    /// The command line asks for something that cannot be: exit code 2.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::Usage(message.into())
    }

    /// Something that was given cannot be used: exit code 2.
    pub fn input(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Input(error.into())
    }

    /// A check failed: exit code 1.
    pub fn check(message: impl Into<String>) -> Self {
        Self::Check(message.into())
    }

    const fn outcome(&self) -> Outcome {
        match self {
            Self::Usage(_) | Self::Input(_) => Outcome::BadInput,
            Self::Check(_) => Outcome::CheckFailed,
        }
    }
}

/// Writes an error as one line and gives its exit code. A closed pipe is no error.
pub fn report(error: &anyhow::Error) -> ExitCode {
    let is_closed_pipe = |cause: &(dyn Error + 'static)| {
        cause.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
    };
    if error.chain().any(is_closed_pipe) {
        return ExitCode::SUCCESS;
    }
    say(&error_chain(error.as_ref()));
    error.downcast_ref::<Failure>().map_or(Outcome::CheckFailed, Failure::outcome).into()
}

/// Writes one line of error.
pub fn say(message: &str) {
    // Nobody may be listening; then there is nobody to tell that either.
    let _ = writeln!(io::stderr(), "error: {}", one_line(message));
}

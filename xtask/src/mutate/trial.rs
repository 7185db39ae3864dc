//! One trial: builds tests in the copy, runs them until one binary fails, and reads from the output what noticed.

use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::Value;

use super::mutation::Tests;
use super::tree::Tree;
use crate::workspace::Workspace;

/// How a trial ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Tests failed: which ones, or checks of the suite, in the order of their report.
    Noticed(Vec<String>),
    /// The tests did not end in time.
    Hung,
    /// All tests passed.
    Survived,
    /// The copy does not compile, with the first error: the table is wrong, or the workspace.
    DoesNotCompile(String),
}

impl Verdict {
    /// Whether the tests noticed that something is wrong.
    pub(crate) const fn is_noticed(&self) -> bool {
        matches!(self, Self::Noticed(_) | Self::Hung)
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Noticed(by) => match by.as_slice() {
                [first, rest @ ..] if !rest.is_empty() => write!(f, "noticed by {first} and {} more", rest.len()),
                _ => write!(f, "noticed by {}", by.join(", ")),
            },
            Self::Hung => f.write_str("noticed: it hangs"),
            Self::Survived => f.write_str("no test failed"),
            Self::DoesNotCompile(error) => write!(f, "does not compile: {error}"),
        }
    }
}

/// Where trials run.
#[derive(Debug)]
pub(crate) struct Bench<'a> {
    workspace: &'a Workspace,
    tree: &'a Tree,
    timeout: Duration,
    log: PathBuf,
}

/// A test binary.
#[derive(Debug, PartialEq, Eq)]
struct Binary {
    path: PathBuf,
    /// The folder of its package, where cargo would run it.
    folder: PathBuf,
}

impl<'a> Bench<'a> {
    /// A bench over the copy; each test binary may take `timeout`.
    pub(crate) fn new(workspace: &'a Workspace, tree: &'a Tree, timeout: Duration) -> Self {
        Self { workspace, tree, timeout, log: workspace.path("target/mutants/output.txt") }
    }

    /// The last test binary's output, as a user at the root would name it.
    pub(crate) fn shown_log(&self) -> String {
        self.workspace.shown(&self.log).to_string()
    }

    /// Builds and runs the tests over the copy as it is; the time is for both.
    pub(crate) fn run(&self, tests: Tests) -> Result<(Verdict, Duration)> {
        let started = Instant::now();
        let verdict = match self.build(tests)? {
            Ok(binaries) => self.run_all(&binaries, tests.filter())?,
            Err(error) => Verdict::DoesNotCompile(error),
        };
        Ok((verdict, started.elapsed()))
    }

    /// Builds test binaries; the inner error is the compiler's first.
    fn build(&self, tests: Tests) -> Result<Result<Vec<Binary>, String>> {
        let mut command = self.workspace.cargo();
        command.current_dir(self.tree.root()).env("CARGO_TARGET_DIR", self.workspace.path("target/mutants/target"));
        command.args(["test", "--no-run", "--quiet", "--message-format=json"]).args(tests.targets());
        let output = command.output().context("cannot start cargo")?;
        let messages = String::from_utf8_lossy(&output.stdout);
        if output.status.success() {
            return Ok(Ok(binaries(&messages)));
        }
        let error = first_error(&messages).unwrap_or_else(|| String::from_utf8_lossy(&output.stderr).trim().to_owned());
        Ok(Err(error))
    }

    fn run_all(&self, binaries: &[Binary], filter: &[&str]) -> Result<Verdict> {
        for binary in binaries {
            let file = File::create(&self.log).with_context(|| format!("cannot write {}", self.log.display()))?;
            let mut command = Command::new(&binary.path);
            command.current_dir(&binary.folder).args(filter).stdin(Stdio::null());
            command.stderr(file.try_clone()?).stdout(file);
            let child = command.spawn().with_context(|| format!("cannot start {}", binary.path.display()))?;
            let Some(status) = wait(child, self.timeout)? else { return Ok(Verdict::Hung) };
            if !status.success() {
                let output = String::from_utf8_lossy(&fs::read(&self.log)?).into_owned();
                let by = noticed_by(&output);
                let crash = || vec![format!("a crash ({status})")];
                return Ok(Verdict::Noticed(if by.is_empty() { crash() } else { by }));
            }
        }
        Ok(Verdict::Survived)
    }
}

/// Waits for the end, or for the timeout and then ends the process.
fn wait(mut child: Child, timeout: Duration) -> Result<Option<ExitStatus>> {
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if started.elapsed() >= timeout {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(Duration::from_millis(20));
    }
}

fn messages(lines: &str) -> impl Iterator<Item = Value> {
    lines.lines().filter_map(|line| serde_json::from_str(line).ok())
}

/// The test binaries that cargo's messages name.
fn binaries(lines: &str) -> Vec<Binary> {
    let binary = |message: Value| {
        let path = message["executable"].as_str()?;
        let folder = Path::new(message["manifest_path"].as_str()?).parent()?;
        message["profile"]["test"]
            .as_bool()?
            .then(|| Binary { path: PathBuf::from(path), folder: folder.to_path_buf() })
    };
    messages(lines).filter_map(binary).collect()
}

/// The first error among the compiler's messages, with its place.
fn first_error(lines: &str) -> Option<String> {
    messages(lines).find(|message| message["message"]["level"] == "error").map(|message| {
        let (message, span) = (&message["message"], &message["message"]["spans"][0]);
        let text = message["message"].as_str().unwrap_or("an error without a text");
        match (span["file_name"].as_str(), span["line_start"].as_u64()) {
            (Some(file), Some(line)) => format!("{text} ({file}:{line})"),
            _ => text.to_owned(),
        }
    })
}

/// The checks of the suite with failures, or else the tests that failed, in the order of the output.
fn noticed_by(output: &str) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for name in output.lines().filter_map(failed_check) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    if names.is_empty() {
        names.extend(output.lines().filter_map(failed_test));
    }
    names
}

/// The name in a row of the suite's report, where its cases failed: `name passed refused skipped failed worst time`.
fn failed_check(line: &str) -> Option<String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let (name, numbers) = words.split_at_checked(words.len().checked_sub(6)?)?;
    let [passed, refused, skipped, failed, _, time] = numbers else { return None };
    let is_row = !name.is_empty()
        && [passed, refused, skipped].iter().all(|count| count.parse::<usize>().is_ok())
        && time.strip_suffix('s').is_some_and(|time| time.parse::<f64>().is_ok());
    (is_row && failed.parse::<usize>().is_ok_and(|count| count > 0)).then(|| name.join(" "))
}

fn failed_test(line: &str) -> Option<String> {
    line.strip_prefix("test ")?.strip_suffix(" ... FAILED").map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = "\
conformance of cpu in 5.0 s
check              passed  refused  skipped  failed  worst use     time
oracle                290        0        8       2       0.40     2.0s
empty rows             10        0        0       0      exact     0.1s
heads and widths       50        4        0       6          -     0.4s
all                   350        4                8
oracle                290        0        8       2       0.40     2.0s
test the_cpu_backend_passes ... FAILED
";

    #[test]
    fn checks_that_failed_are_read_from_the_report_and_count_once() {
        assert_eq!(noticed_by(REPORT), ["oracle", "heads and widths"]);
    }

    #[test]
    fn without_a_report_the_tests_that_failed_count() {
        let output = "running 3 tests\ntest a::b ... ok\ntest a::c ... FAILED\ntest d ... FAILED\n\nfailures:\n";
        assert_eq!(noticed_by(output), ["a::c", "d"]);
        assert!(noticed_by("memory allocation failed\n").is_empty());
    }

    #[test]
    fn binaries_and_errors_are_read_from_cargos_messages() {
        let lines = r#"{"reason":"compiler-artifact","executable":null,"manifest_path":"a/Cargo.toml","profile":{"test":false}}
{"reason":"compiler-artifact","executable":"t/x-1","manifest_path":"a/Cargo.toml","profile":{"test":true}}
{"reason":"compiler-message","message":{"level":"warning","message":"unused","spans":[]}}
{"reason":"compiler-message","message":{"level":"error","message":"no such name","spans":[{"file_name":"a.rs","line_start":7}]}}
not JSON"#;
        assert_eq!(binaries(lines), [Binary { path: "t/x-1".into(), folder: "a".into() }]);
        assert_eq!(first_error(lines).as_deref(), Some("no such name (a.rs:7)"));
    }

    #[test]
    fn a_process_that_hangs_is_ended() {
        let start = |seconds: &str| Command::new("sleep").arg(seconds).spawn().expect("sleep starts");
        assert!(wait(start("60"), Duration::from_millis(50)).expect("waits").is_none());
        assert!(wait(start("0"), Duration::from_secs(60)).expect("waits").is_some_and(|status| status.success()));
    }

    #[test]
    fn verdicts_say_what_noticed() {
        let noticed = |names: &[&str]| Verdict::Noticed(names.iter().map(|name| (*name).to_owned()).collect());
        assert_eq!(noticed(&["oracle"]).to_string(), "noticed by oracle");
        assert_eq!(noticed(&["oracle", "b", "c"]).to_string(), "noticed by oracle and 2 more");
        assert!(Verdict::Hung.is_noticed() && !Verdict::Survived.is_noticed());
        assert!(!Verdict::DoesNotCompile(String::new()).is_noticed());
    }
}

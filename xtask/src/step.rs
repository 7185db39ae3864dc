//! A step: one command with a name, run with live progress on a terminal and as plain lines in a pipe.
//!
//! On a terminal the step's output is one moving line, the lines that close a test binary stay, and all of it is
//! shown where the step fails. In a pipe the output passes through untouched.

use std::fmt;
use std::io::{self, BufRead, BufReader, IsTerminal, Read};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};

use crate::workspace::Workspace;

/// One cargo command of a task.
#[derive(Debug, Clone)]
pub(crate) struct Step {
    /// The name in the table.
    pub(crate) name: &'static str,
    /// Environment variables that the command needs.
    pub(crate) env: &'static [(&'static str, &'static str)],
    /// Arguments to cargo.
    pub(crate) args: Vec<&'static str>,
}

/// How a step ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Its command exited with 0.
    Passed,
    /// Its command exited otherwise.
    Failed,
    /// An earlier step failed.
    NotRun,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Passed => "ok",
            Self::Failed => "FAILED",
            Self::NotRun => "not run",
        })
    }
}

/// The command as a user would type it at the root.
impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (key, value) in self.env {
            write!(f, "{key}=\"{value}\" ")?;
        }
        write!(f, "cargo {}", self.args.join(" "))
    }
}

impl Step {
    /// Runs the step; the error is for a command that could not start.
    pub(crate) fn run(&self, workspace: &Workspace, position: &str) -> Result<(Outcome, Duration)> {
        let started = Instant::now();
        let mut command = workspace.cargo();
        command.args(&self.args).envs(self.env.iter().copied());
        let status = if io::stderr().is_terminal() {
            let bar = spinner(&format!("{position} {}", self.name));
            let run = run_behind(&mut command, &bar);
            bar.finish_and_clear();
            let (status, lines) = run.with_context(|| format!("cannot start `{self}`"))?;
            if !status.success() {
                lines.iter().for_each(|line| eprintln!("{line}"));
            }
            status
        } else {
            eprintln!("== {position} {}: {self}", self.name);
            command.status().with_context(|| format!("cannot start `{self}`"))?
        };
        let outcome = if status.success() { Outcome::Passed } else { Outcome::Failed };
        let elapsed = started.elapsed();
        eprintln!("== {position} {}: {outcome} ({})", self.name, seconds(elapsed));
        Ok((outcome, elapsed))
    }
}

/// Set for a task that runs in the background: it is to end, with all that it started, when its stdin does.
const BACKGROUND: &str = "XTASK_BACKGROUND";

/// In a task that another one runs in the background: ends with it, however that one ends.
pub(crate) fn end_with_parent() {
    if std::env::var_os(BACKGROUND).is_some() {
        thread::spawn(|| {
            // Nothing is ever written: this returns when the other end is gone.
            let _ = io::copy(&mut io::stdin(), &mut io::sink());
            stop_group(std::process::id());
        });
    }
}

/// Stops a process group at once, whoever is left in it.
fn stop_group(id: u32) {
    let mut shell = Command::new("sh");
    // Where the group is gone there is nothing to stop.
    let _ = shell.arg("-c").arg(format!("kill -s KILL -- -{id}")).stderr(Stdio::null()).status();
}

/// Makes a command the head of a process group of its own, so that it can be stopped with all that it starts.
fn lead_group(command: &mut Command) -> &mut Command {
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(command, 0);
    command
}

/// A task of this program that runs beside the steps, as the last to get a processor; its output is kept until it is
/// waited for. Dropped before that, it is stopped with all that it started, as it is where this process goes.
#[derive(Debug)]
pub(crate) struct Background {
    child: Child,
    /// Held open: its end tells the task that this process is gone.
    _stdin: Option<ChildStdin>,
    has_ended: bool,
    readers: Vec<thread::JoinHandle<()>>,
    lines: Receiver<String>,
    started: Instant,
}

impl Background {
    /// Starts `cargo ARGS` without cargo, whose lock the steps hold; the first argument is `xtask`.
    pub(crate) fn start(workspace: &Workspace, args: &[&str]) -> Result<Self> {
        let program = std::env::current_exe().context("cannot find this program")?;
        let run = |command: &mut Command| {
            command.args(&args[1..]).current_dir(workspace.path("")).env(BACKGROUND, "1");
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
            lead_group(command).spawn()
        };
        let spawned =
            run(Command::new("nice").args(["-n", "19"]).arg(&program)).or_else(|_| run(&mut Command::new(&program)));
        let mut child = spawned.with_context(|| format!("cannot start {}", args.join(" ")))?;
        let (sender, lines) = channel();
        let readers = [
            child.stdout.take().map(|pipe| forward(pipe, sender.clone())),
            child.stderr.take().map(|pipe| forward(pipe, sender)),
        ];
        let readers = readers.into_iter().flatten().collect();
        Ok(Self { _stdin: child.stdin.take(), child, has_ended: false, readers, lines, started: Instant::now() })
    }

    /// Waits for it and shows what it said, as a step; the duration is that of waiting.
    pub(crate) fn finish(mut self, step: &Step, position: &str) -> Result<(Outcome, Duration)> {
        let waiting = Instant::now();
        eprintln!("== {position} {}: {step}", step.name);
        let bar = spinner(&format!("{position} {}", step.name));
        for line in &self.lines {
            bar.suspend(|| println!("{line}"));
        }
        let status = self.child.wait().context("cannot wait for a step")?;
        self.has_ended = true;
        bar.finish_and_clear();
        self.readers.drain(..).for_each(|reader| reader.join().expect("a reader only forwards lines"));
        let outcome = if status.success() { Outcome::Passed } else { Outcome::Failed };
        let (elapsed, in_all) = (waiting.elapsed(), seconds(self.started.elapsed()));
        eprintln!("== {position} {}: {outcome} ({}, begun {in_all} ago)", step.name, seconds(elapsed));
        Ok((outcome, elapsed))
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if self.has_ended {
            return;
        }
        stop_group(self.child.id());
        // The group needs a shell to be stopped; the task itself does not.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A duration for a table.
pub(crate) fn seconds(duration: Duration) -> String {
    format!("{:.1} s", duration.as_secs_f64())
}

/// A spinner with elapsed time and a message that takes the rest of the line; hidden where there is no terminal.
pub(crate) fn spinner(prefix: &str) -> ProgressBar {
    let style =
        ProgressStyle::with_template("{spinner} {prefix} [{elapsed}] {wide_msg}").expect("the template is valid");
    let bar = ProgressBar::new_spinner().with_style(style).with_prefix(prefix.to_owned());
    bar.enable_steady_tick(Duration::from_millis(120));
    bar
}

/// Runs `command` with its output behind `bar`; returns the exit status and every line.
fn run_behind(command: &mut Command, bar: &ProgressBar) -> io::Result<(ExitStatus, Vec<String>)> {
    command.env("CARGO_TERM_COLOR", "always").stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let (sender, receiver) = channel();
    let readers = [
        child.stdout.take().map(|pipe| forward(pipe, sender.clone())),
        child.stderr.take().map(|pipe| forward(pipe, sender)),
    ];
    let mut lines = Vec::new();
    for line in receiver {
        if line.starts_with("test result:") {
            bar.suspend(|| println!("{line}"));
        }
        bar.set_message(line.trim().to_owned());
        lines.push(line);
    }
    for reader in readers.into_iter().flatten() {
        reader.join().expect("a reader only forwards lines");
    }
    Ok((child.wait()?, lines))
}

/// Sends the lines of `pipe` until it closes.
fn forward(pipe: impl Read + Send + 'static, lines: Sender<String>) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        for line in BufReader::new(pipe).split(b'\n').map_while(Result::ok) {
            // The receiver outlives every sender, so a failure here means that the run was given up.
            if lines.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                break;
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_prints_as_the_command_to_type() {
        let step = Step { name: "docs", env: &[("RUSTDOCFLAGS", "-D warnings")], args: vec!["doc", "--no-deps"] };
        assert_eq!(step.to_string(), "RUSTDOCFLAGS=\"-D warnings\" cargo doc --no-deps");
    }

    #[test]
    fn what_runs_beside_the_steps_is_judged_by_its_exit_code() {
        let finish = |args: &[&str]| {
            let workspace = Workspace::locate().unwrap();
            let step = Step { name: "beside", env: &[], args: Vec::new() };
            Background::start(&workspace, args).unwrap().finish(&step, "[1/1]").unwrap().0
        };
        // The program of this test is the test binary.
        assert_eq!(finish(&["xtask", "--list"]), Outcome::Passed);
        assert_eq!(finish(&["xtask", "--no-such-option"]), Outcome::Failed);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_group_is_stopped_with_all_that_it_started() {
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 600 & echo $!; wait"]).stdout(Stdio::piped());
        let mut child = lead_group(&mut command).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let of_sleep = std::path::Path::new("/proc").join(line.trim()).join("stat");
        // A process that nobody has waited for yet is still listed, as Z.
        let lives = || std::fs::read_to_string(&of_sleep).is_ok_and(|stat| !stat.contains(") Z "));
        assert!(lives());
        stop_group(child.id());
        assert!(!child.wait().unwrap().success());
        while lives() {
            thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn output_behind_a_bar_is_kept_whole() {
        let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        let (status, lines) = run_behind(command.arg("--version"), &ProgressBar::hidden()).expect("cargo starts");
        assert!(status.success());
        assert!(lines.iter().any(|line| line.contains("cargo ")), "{lines:?}");
    }
}

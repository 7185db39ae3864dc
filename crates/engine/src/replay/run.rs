//! Replays files: reads a problem, runs it on a backend chosen by name, writes the result under the same file name.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use attn_metadata::{HostDevice, Selection};

use super::error::ReplayError;
use super::file::{self, ReplayFile};
use super::memory::Memory;
use super::result::result_bytes;
use crate::backends::create_backend;

/// How files are replayed.
#[derive(Clone, Debug)]
pub struct ReplayOptions {
    /// A backend's name, a pair `"prefill,decode"` or `"auto"`.
    pub choice: String,
    /// The processor; how much memory a step may take is worked out for each file.
    pub device: HostDevice,
    /// Bytes that a problem may take besides its own tensors; `None`: most of what is free then.
    pub memory_bytes: Option<u64>,
    /// Where results go; there already.
    pub out_dir: PathBuf,
    /// Whether results hold the caches after the step.
    pub cache_out: bool,
}

/// One problem replayed.
#[derive(Clone, Debug)]
pub struct Replayed {
    /// The result file.
    pub result: PathBuf,
    /// Who ran it.
    pub selection: Selection,
    /// Requests of its batch.
    pub num_requests: usize,
    /// Rows of q.
    pub num_rows: u32,
    /// Time of the one call, first use of everything included.
    pub elapsed: Duration,
}

/// Result paths of files, in order; an error for each file whose result would replace another file of the call or the
/// result of one.
#[must_use]
pub fn claim_names(files: &[PathBuf], out_dir: &Path) -> Vec<Result<PathBuf, ReplayError>> {
    let problems: HashSet<PathBuf> = files.iter().filter_map(|file| fs::canonicalize(file).ok()).collect();
    let mut taken: HashSet<OsString> = HashSet::new();
    let claim = |file: &PathBuf| {
        let name = file.file_name().ok_or(ReplayError::NoName)?;
        if !taken.insert(name.to_owned()) {
            return Err(ReplayError::SameName { name: name.to_string_lossy().into_owned() });
        }
        let result = out_dir.join(name);
        match fs::canonicalize(&result) {
            Ok(existing) if problems.contains(&existing) => Err(ReplayError::OverItself),
            _ => Ok(result),
        }
    };
    files.iter().map(claim).collect()
}

/// Replays one file and writes its result.
///
/// # Errors
/// [`ReplayError`]; no result file is left half written.
pub fn replay(file: &Path, result: &Path, options: &ReplayOptions) -> Result<Replayed, ReplayError> {
    let ReplayFile { mut problem, fp8_as_u8 } = file::read(file)?;
    let memory = Memory::of(&problem, options)?;
    let device = HostDevice { memory_bytes: Some(memory.left()), ..options.device };
    let (mut backend, selection) = create_backend(&options.choice, &problem.config(device))?;
    let started = Instant::now();
    let step = backend.prepare_metadata(&problem.batch)?;
    let planned = started.elapsed();
    let plan = backend.explain(&step)?;
    memory.check(plan.groups.iter().map(|group| group.workspace_bytes).fold(0, u64::saturating_add))?;
    let mut outcome = problem.outcome();
    let started = Instant::now();
    problem.forward(backend.as_mut(), &step, &mut outcome)?;
    let elapsed = planned + started.elapsed();
    let cache = options.cache_out.then_some(&problem.cache);
    let bytes = result_bytes(&outcome, cache, fp8_as_u8).map_err(ReplayError::Pack)?;
    write_whole(result, &bytes)?;
    let num_requests = problem.batch.requests().len();
    Ok(Replayed { result: result.to_owned(), selection, num_requests, num_rows: problem.batch.num_rows(), elapsed })
}

/// Writes a file under another name first, so that nobody reads a half of it.
fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), ReplayError> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let written = fs::write(&partial, bytes).and_then(|()| fs::rename(&partial, path));
    written.map_err(|source| {
        // The error that counts is the first one.
        let _ = fs::remove_file(&partial);
        ReplayError::Write { path: path.display().to_string(), source }
    })
}

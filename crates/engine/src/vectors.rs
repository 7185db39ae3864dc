//! Test vectors from files against the backends of this build, by name.

use attn_sparse::vectors::{CaseReport, Subject, VectorError, VectorFile};
use attn_sparse::{SPARSE, oracle_entry};

use crate::backends::host_registry;

/// What was checked under a name.
#[derive(Debug)]
pub struct Checked {
    /// The backend.
    pub name: &'static str,
    /// How each case went.
    pub cases: Vec<CaseReport>,
}

/// A backend that cannot be checked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckError {
    /// No backend has this name, or it does not compute what the vectors are of.
    #[error("{name:?} is no backend for block-sparse attention; there are: {}", known.join(", "))]
    Unknown {
        /// The name asked for.
        name: String,
        /// The names there are.
        known: Vec<&'static str>,
    },
    /// The file.
    #[error(transparent)]
    File(#[from] VectorError),
}

/// Checks the backend of a name against a file's vectors; `None`: every backend that computes what they are of.
///
/// # Errors
/// [`CheckError`].
pub fn check_vectors(text: &str, name: Option<&str>) -> Result<Vec<Checked>, CheckError> {
    let file = VectorFile::parse(text)?;
    let registry = host_registry();
    let is_sparse = |entry: &&attn_metadata::BackendEntry<attn_metadata::Host>| {
        (entry.capabilities)(&attn_metadata::HostDevice::default()).is_ok_and(|c| c.families.contains(&SPARSE))
    };
    let entries: Vec<_> = registry.entries().iter().filter(is_sparse).collect();
    let chosen: Vec<_> = entries.iter().filter(|entry| name.is_none_or(|name| name == entry.name)).collect();
    if chosen.is_empty() {
        let known = entries.iter().map(|entry| entry.name).collect();
        return Err(CheckError::Unknown { name: name.unwrap_or_default().to_owned(), known });
    }
    let check = |entry: &attn_metadata::BackendEntry<attn_metadata::Host>| {
        // The oracle is checked in its own precision, which the waist does not carry.
        let subject = if entry.name == oracle_entry().name { Subject::Oracle } else { Subject::Backend(*entry) };
        Ok(Checked { name: entry.name, cases: file.check(&subject)? })
    };
    chosen.into_iter().map(|entry| check(entry)).collect()
}

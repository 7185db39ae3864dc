//! The stages behind the backend trait: [`SparseBackend`] (fast, in two forms) and [`OracleBackend`] (float64).

mod cpu;
mod layers;
mod oracle;
mod step;

pub use cpu::{SparseBackend, entry, page_table_entry};
pub use oracle::{OracleBackend, entry as oracle_entry};

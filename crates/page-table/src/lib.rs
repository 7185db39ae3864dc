//! From sequences to pages and slots.
//!
//! A [`PageTable`] keeps, for each sequence of an inference engine, its length and the pages that hold its KV. It
//! appends, truncates, forks, adopts shared pages and releases, all over a [`kvpool::PagePool`]; a batch is appended all
//! or none, and a shared partial page is copied before it is written.
//!
//! Once a step it writes what attention needs: [`StepTables`], the tables in CSR form with one slot per new token, or a
//! [`RectTable`]. [`PageGranularity`] converts them for kernels whose pages are smaller than the pool's.
//!
//! Conventions: `kv_len` counts the tokens appended this step too; `kv_indptr` counts pages, `qo_indptr` tokens;
//! `kv_last_page_len` is in `1..=page_size`, and 0 only where `kv_len` is 0; all tables are `i32`.
//!
//! It knows nothing of what tokens mean, of attention or of devices.

#![forbid(unsafe_code)]

mod append;
mod audit;
mod error;
mod granularity;
mod seq;
mod step;
mod table;

pub use append::AppendOutcome;
pub use audit::{TableAudit, TableAuditError};
pub use error::{AdoptError, StepError, TableError};
pub use granularity::{ConvertError, CsrRef, CsrTables, PageGranularity};
pub use seq::SeqId;
pub use step::{RectTable, StepTables};
pub use table::PageTable;

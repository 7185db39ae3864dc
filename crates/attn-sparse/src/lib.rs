//! Block-sparse attention: an index branch scores blocks of keys, the best of them are selected, and queries attend to
//! those alone.
//!
//! Three stages, none of which knows which model it is in: *index* (store the side cache, score blocks), *select*
//! (forced blocks, budget, ties, union over a group of heads) and *attend*. What passes between them is data: a
//! [`Selection`] can be used again by other layers of the same step.
#![forbid(unsafe_code)]

mod backend;
pub mod config;
pub mod cpu;
mod family;
pub mod oracle;
pub mod params;
pub mod pipeline;
pub mod plan;
pub mod select;
pub mod selection;
pub mod stage;
pub mod store;
pub mod table;
pub mod vectors;

pub use backend::{OracleBackend, SparseBackend, entry, oracle_entry, page_table_entry};
pub use config::{ConfigError, LayerKind, SparseConfig};
pub use family::{SPARSE, SelectionSource, SparseFamily};
pub use params::{BlockParams, Constraint, Limits, ScoreType, SparseParams, Violations};
pub use pipeline::Pipeline;
pub use select::BlockSelector;
pub use selection::{Fanout, Selection, SelectionError, Unit};

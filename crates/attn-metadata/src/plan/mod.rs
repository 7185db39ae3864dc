//! The split-KV planner: pure, over lengths alone.
//!
//! **A chunk is the unit of numerics, a range is the unit of scheduling.** Each request's queries are cut into tiles
//! and its KV into chunks, at boundaries that depend on the request alone (or on the whole batch, where [`CutBy`] says
//! so). A tile, a KV head and a chunk make a *unit*, which gives one partial state; a tile of one chunk writes its result
//! directly, the partials of others merge in ascending order. Workers get ranges of units, balanced by cost or taken one
//! after the other ([`Sharing`]). So a skewed batch balances, and yet a request's bits do not depend on its neighbours or
//! on the number of workers.
//!
//! Units are numbered: all those of tile 0, then of tile 1, …; within a tile KV head by KV head, within a head chunk
//! by chunk. They are not stored: a plan is one [`Tile`] for each query tile, and a few [`WorkRange`]s for
//! each worker or one for each chunk of a tile.

mod balance;
mod costs;
mod explain;
mod order;
mod planner;
mod rates;
mod workspace;

pub use explain::{GroupReport, PlanReport, RequestReport, Roofline};
pub use planner::{Chunking, CutBy, Plan, PlanConfig, Sharing, Tile, Unit, UnitIter, WorkRange};
pub use rates::KernelRates;
pub use workspace::{WorkspaceBuffer, WorkspaceLayout, max_chunks, workspace_requirement};

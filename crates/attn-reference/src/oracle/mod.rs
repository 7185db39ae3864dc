//! The oracle: attention in float64, written from the formulas, slow and obvious.
//!
//! It shares no code with any backend beyond the types of the waist: its own masks, its own softmax, loops and no
//! tricks. [`attend`] is the function; [`OracleBackend`] puts it behind the backend trait, so that it can stand
//! wherever a backend does; [`naive`] evaluates the same formulas in the rounding of an activation dtype, as a
//! yardstick for the error that the dtype alone causes.

mod attend;
mod backend;
pub mod naive;

#[cfg(test)]
mod tests;

pub use attend::{OracleOutput, attend, attend_over, sees};
pub use backend::{Attend, OracleBackend, capabilities, entry};

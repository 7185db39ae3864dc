//! The fast CPU stages: [`BlockIndex`], [`BlockSelect`], [`SparseAttend`].

mod attend;
mod index;
mod select;

pub use attend::SparseAttend;
pub use index::{BlockIndex, BlockIndexInput};
pub use select::BlockSelect;

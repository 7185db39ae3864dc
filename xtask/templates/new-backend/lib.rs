//! The attention backend `template`.
#![forbid(unsafe_code)]

mod backend;

pub use backend::{TemplateBackend, entry};

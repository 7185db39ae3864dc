//! Paged attention on the CPU: the fast SIMD backend ([`cpu`]) and the float64 oracle ([`oracle`]).
#![deny(unsafe_code)]

pub mod cpu;
pub mod oracle;
pub mod verify;

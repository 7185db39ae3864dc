//! The prefix cache: finds the pages that already hold the KV of a request's first tokens.
//!
//! * `key.rs`: what is looked up: tokens, and what else changes their KV; page-run hashes.
//! * `config.rs`: eviction policies, the hash function, how many events are kept.
//! * `tree.rs`, `node.rs`: the radix tree over page-aligned runs of tokens. It knows no policy.
//! * `cache.rs`: match and insert. `evict.rs`: making room.
//! * `tier.rs`, `host_layers.rs`: pages that moved to host memory.
//! * `event.rs`, `counters.rs`, `audit.rs`: what others may see.

mod audit;
mod cache;
mod config;
mod counters;
mod error;
mod event;
mod evict;
mod host_layers;
mod key;
mod node;
mod tier;
mod tree;

pub use audit::{PrefixAudit, PrefixAuditError};
pub use cache::{Inserted, PrefixCache, PrefixMatch, PrefixPreview};
pub use config::{EvictionPolicy, PageHashFn, PrefixConfig};
pub use counters::{PrefixCounters, SizeInfo, TierCounters};
pub use error::PrefixError;
pub use event::{EventBatch, PrefixEvent};
pub use host_layers::HostLayers;
pub use key::{ExtraKey, PageHash, PrefixKey, hash_page};
pub use tier::{HostTier, PageCopy, TieredCache};

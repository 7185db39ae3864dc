//! Workspace of a plan: where partial states live, and how much there is at most for given limits.
//!
//! Sizing and carving are one function, so that they cannot disagree: [`workspace_requirement`] is the layout for the
//! largest plan, [`Plan::workspace`] that for one plan; both come from [`WorkspaceLayout::new`].

use std::ops::Range;

use super::balance::MAX_UNITS_PER_WORKER;
use super::{CutBy, Plan, PlanConfig};
use crate::backend::BatchLimits;
use crate::model::PlanGroup;

/// Buffers start at multiples of this many bytes.
const ALIGN_BYTES: u64 = 256;

/// One named part of a workspace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkspaceBuffer {
    /// Its name, for messages.
    pub name: &'static str,
    /// Where it is, in bytes.
    pub bytes: Range<u64>,
}

/// The parts of a workspace: partial outputs `[rows, head_dim_vo]` and partial LSEs `[rows]`, both f32.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkspaceLayout {
    /// Unnormalised or normalised partial outputs, as the backend prefers.
    pub partial_out: WorkspaceBuffer,
    /// Partial LSEs.
    pub partial_lse: WorkspaceBuffer,
}

impl WorkspaceLayout {
    /// The layout for a number of partial rows. Sizes saturate at 2⁶⁴ − 1 bytes.
    #[must_use]
    pub const fn new(num_partial_rows: u64, head_dim_vo: u32) -> Self {
        let out_bytes = num_partial_rows.saturating_mul(4 * head_dim_vo as u64);
        let lse_begin = align(out_bytes);
        let lse_end = lse_begin.saturating_add(num_partial_rows.saturating_mul(4));
        Self {
            partial_out: WorkspaceBuffer { name: "partial_out", bytes: 0..out_bytes },
            partial_lse: WorkspaceBuffer { name: "partial_lse", bytes: lse_begin..lse_end },
        }
    }

    /// Bytes of the whole workspace.
    #[must_use]
    pub const fn total_bytes(&self) -> u64 {
        self.partial_lse.bytes.end
    }
}

const fn align(bytes: u64) -> u64 {
    match bytes.checked_next_multiple_of(ALIGN_BYTES) {
        Some(aligned) => aligned,
        None => u64::MAX,
    }
}

/// Chunks that a tile of any batch within the limits has, at most, for one plan group. Monotone in `max_kv_len`.
#[must_use]
pub fn max_chunks(config: &PlanConfig, group: &PlanGroup, max_kv_len: u32) -> u64 {
    let visible = group.window_left.map_or(max_kv_len, |w| {
        // A tile's first query sees w tokens before itself, its last query tile_len - 1 tokens after that.
        let span = if group.causal { w.saturating_add(config.tile_len) } else { u32::MAX };
        span.min(max_kv_len)
    });
    // A run of tokens that starts inside a chunk touches one chunk more than its length needs.
    let straddle = u64::from(group.window_left.is_some());
    let shortest = config.chunking.shortest;
    let chunks = match config.chunking.by {
        // What is shorter than a chunk is cut in two where chunks may be shorter.
        CutBy::Request => {
            let halved = if visible > shortest { 2 } else { 1 };
            u64::from(visible.div_ceil(config.chunking.chunk_len)).max(halved)
        }
        CutBy::Batch => u64::from(visible.div_ceil(shortest)),
    };
    chunks + straddle
}

/// The workspace that any batch within the limits fits into, for one plan group. Pure and monotone in the limits.
#[must_use]
pub fn workspace_requirement(config: &PlanConfig, group: &PlanGroup, limits: &BatchLimits) -> WorkspaceLayout {
    let max_chunks = max_chunks(config, group, limits.max_kv_len);
    let heads = u64::from(group.heads.num_qo_heads);
    let rows = u64::from(limits.max_rows) * heads;
    let mut partial_rows = if max_chunks > 1 { rows.saturating_mul(max_chunks) } else { 0 };
    if config.chunking.by == CutBy::Batch {
        // Units that a share of the batch fills, and for each tile one that it does not, or two where it begins inside.
        let num_tiles = u64::from(limits.max_requests) + u64::from(limits.max_rows / config.tile_len);
        let straddle = u64::from(group.window_left.is_some());
        let filled = u64::from(config.num_workers) * u64::from(MAX_UNITS_PER_WORKER);
        let ends = num_tiles.min(u64::from(limits.max_rows)) * (1 + straddle);
        // A tile's chunk is a unit of every KV head.
        let chunks = filled.div_ceil(u64::from(group.heads.num_kv_heads)) + ends;
        let tile_rows = heads * u64::from(config.tile_len.min(limits.max_rows));
        partial_rows = partial_rows.min(chunks.saturating_mul(tile_rows));
    }
    WorkspaceLayout::new(partial_rows, group.heads.head_dim_vo)
}

impl Plan {
    /// The workspace of this plan.
    #[must_use]
    pub const fn workspace(&self) -> WorkspaceLayout {
        WorkspaceLayout::new(self.num_partial_rows(), self.group().heads.head_dim_vo)
    }
}

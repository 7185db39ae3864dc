//! Owns a planned step: its plans on the host, and where its tables and its workspace are on the device.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use attn_metadata::plan::WorkspaceLayout;

use crate::device::DeviceBuffer;
use crate::tables::{GroupOffsets, GroupPlan, Offsets, PartOffsets};

/// Addresses of one part's tables, and its grid.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PartTables {
    pub(crate) is_decode: bool,
    pub(crate) step: u64,
    pub(crate) tiles: u64,
    pub(crate) ranges: u64,
    pub(crate) starts: u64,
    /// Thread blocks; 0: nothing to launch.
    pub(crate) grid: u32,
}

/// Addresses of one group's tables.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupTables {
    /// In order of launch.
    pub(crate) parts: [PartTables; 2],
    pub(crate) tiles: u64,
    pub(crate) merge_step: u64,
    pub(crate) merge_units: u64,
    /// Thread blocks that could be used for merging; 0: nothing is split.
    pub(crate) merge_grid: u32,
    /// Whether both parts run at the same time.
    pub(crate) is_at_once: bool,
    pub(crate) workspace: WorkspaceView,
}

/// Thread blocks of one group's launches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Grids {
    pub(crate) decode: u32,
    pub(crate) extend: u32,
    pub(crate) merge: u32,
    /// Both parts at the same time: `extend` leaves room for `decode`.
    pub(crate) is_at_once: bool,
}

/// Where partial states are.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WorkspaceView {
    pub(crate) partial_out: u64,
    pub(crate) partial_lse: u64,
    pub(crate) num_rows: i32,
}

impl WorkspaceView {
    /// Carves a buffer for `num_rows` rows of partial states of width `head_dim_vo`.
    pub(crate) fn carve(buffer: &DeviceBuffer, num_rows: u64, head_dim_vo: u32) -> Self {
        if num_rows == 0 {
            return Self::default();
        }
        let layout = WorkspaceLayout::new(num_rows, head_dim_vo);
        Self {
            partial_out: buffer.address() + layout.partial_out.bytes.start,
            partial_lse: buffer.address() + layout.partial_lse.bytes.start,
            num_rows: i32::try_from(num_rows).unwrap_or(i32::MAX),
        }
    }
}

/// A planned step.
#[derive(Debug)]
pub(crate) struct CudaStep {
    /// Distinct for every step of the process.
    pub(crate) id: u64,
    /// One for each group of the model.
    pub(crate) plans: Vec<GroupPlan>,
    /// Rows of q and out, padding included.
    pub(crate) num_rows: u32,
    pub(crate) has_mask: bool,
    /// Tables on the device.
    pub(crate) tables: Option<Arc<DeviceBuffer>>,
    /// Where partial states go; shared with other steps.
    pub(crate) workspace_buffer: Option<Arc<DeviceBuffer>>,
    /// Where kernels that decode count partial states, zeros between layers; shared with other steps. `None`: nothing is
    /// counted.
    pub(crate) counters: Option<Arc<DeviceBuffer>>,
    pub(crate) offsets: Offsets,
    pub(crate) groups: Vec<GroupTables>,
    pub(crate) kv_indices: u64,
    pub(crate) slots: u64,
    pub(crate) mask: u64,
    pub(crate) num_kv_indices: i32,
}

impl CudaStep {
    /// A step without a batch.
    pub(crate) fn new(plans: Vec<GroupPlan>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            plans,
            num_rows: 0,
            has_mask: false,
            tables: None,
            workspace_buffer: None,
            counters: None,
            offsets: Offsets::default(),
            groups: Vec::new(),
            kv_indices: 0,
            slots: 0,
            mask: 0,
            num_kv_indices: 0,
        }
    }

    /// Whether blocks claim what they compute of a part of a group's plan.
    pub(crate) fn is_claimed(&self, group: usize, part: &PartTables) -> bool {
        let plan = &self.plans[group];
        let of_part = if part.is_decode { plan.decode.as_ref() } else { Some(&plan.extend) };
        of_part.is_some_and(|part| part.plan.config().sharing.is_by_unit())
    }

    /// Sets the addresses from the offsets; `shape`: grids and workspace of a group, by its number and plan. Reuses memory.
    pub(crate) fn place(&mut self, shape: impl Fn(usize, &GroupPlan) -> (Grids, WorkspaceView)) {
        let base = self.tables.as_ref().map_or(0, |buffer| buffer.address());
        let at = |offset: usize| base + offset as u64;
        let part = |is_decode, part: &PartOffsets, grid| PartTables {
            is_decode,
            step: at(part.step),
            tiles: at(part.tiles),
            ranges: at(part.ranges),
            starts: at(part.starts),
            grid,
        };
        let group = |group: &GroupOffsets, (grids, workspace): (Grids, WorkspaceView)| GroupTables {
            parts: [part(true, &group.decode, grids.decode), part(false, &group.extend, grids.extend)],
            tiles: at(group.tiles),
            merge_step: at(group.merge_step),
            merge_units: at(group.merge_units),
            merge_grid: grids.merge,
            is_at_once: grids.is_at_once,
            workspace,
        };
        self.groups.clear();
        let groups = self.offsets.groups.iter().zip(&self.plans).enumerate();
        self.groups.extend(groups.map(|(index, (offsets, plan))| group(offsets, shape(index, plan))));
        self.kv_indices = at(self.offsets.kv_indices);
        self.slots = at(self.offsets.slots);
        self.mask = if self.has_mask { at(self.offsets.mask) } else { 0 };
    }
}

//! Predicting a plan's time from what a kernel family reaches on a device.

use super::costs::{UnitCost, busiest};
use super::{Plan, Tile};

/// What one kernel family reaches on one device. Measured figures: fitted to times of whole calls.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KernelRates {
    /// Bytes per second of q, out, KV and partial states.
    pub bytes_per_s: f64,
    /// Floating-point operations per second of all workers together, over what is computed, masked or not.
    pub flops_per_s: f64,
    /// Seconds of a call that are neither: launching, filling and emptying the device.
    pub overhead_s: f64,
    /// Seconds that a worker needs for a unit besides its operations.
    pub unit_s: f64,
    /// Seconds of merging, where there is something to merge.
    pub merge_s: f64,
    /// KV tokens that are computed together: a unit computes as many of these as it touches.
    pub kv_step: u32,
    /// Query rows that are computed together; of a tile that has fewer rows than others as many of these as it has, which
    /// take half as long again as their share. `u32::MAX`: all of a tile, however few rows it has.
    pub row_step: u32,
}

impl KernelRates {
    /// Seconds of a plan that has work and reads and writes `bytes` besides its partial states.
    ///
    /// Memory and the busiest worker are two lower bounds; a kernel overlaps them, so the larger counts.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a prediction, good to some per cent")]
    pub fn predict(&self, plan: &Plan, bytes: u64) -> f64 {
        let moving = (bytes + plan.workspace().total_bytes()) as f64 / self.bytes_per_s;
        let merging = if plan.num_partial_rows() > 0 { self.merge_s } else { 0.0 };
        let cost = UnitCost { of: |tile: &Tile, chunk| self.unit_ps(plan, tile, chunk), step: self.kv_step };
        let busiest = busiest(plan, &cost) as f64 / PS_PER_S;
        self.overhead_s + merging + moving.max(busiest)
    }

    /// Seconds that a worker needs for a unit.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "as above")]
    pub fn unit_s(&self, plan: &Plan, tile: &Tile, chunk: u32) -> f64 {
        let (heads, kv) = (plan.group().heads, tile.chunk(chunk));
        let group_size = u64::from(heads.group_size());
        let all_rows = u64::from(plan.config().tile_len) * group_size;
        let rows = (u64::from(tile.q_len) * group_size).next_multiple_of(self.row_step.into());
        let rows = if rows < all_rows { (rows * 3 / 2).min(all_rows) } else { all_rows };
        // KV is computed in whole steps.
        let steps = kv.end.div_ceil(self.kv_step) - kv.start / self.kv_step;
        let pairs = rows * u64::from(steps) * u64::from(self.kv_step);
        let flops = 2 * pairs * u64::from(heads.head_dim_qk + heads.head_dim_vo);
        let of_worker = self.flops_per_s / f64::from(plan.config().num_workers);
        self.unit_s + flops as f64 / of_worker
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "as above")]
    fn unit_ps(&self, plan: &Plan, tile: &Tile, chunk: u32) -> u64 {
        (self.unit_s(plan, tile, chunk) * PS_PER_S) as u64
    }
}

const PS_PER_S: f64 = 1e12;

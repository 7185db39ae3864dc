//! What a plan does, as text and as JSON: tiles, splits, balance, bytes, FLOPs, predicted time.

use std::fmt;

use serde::Serialize;

use super::costs::{UnitCost, busiest};
use super::rates::KernelRates;
use super::{CutBy, Plan, Tile};
use crate::batch::Batch;
use crate::model::{ModelSpec, PlanGroup};

/// Requests that a report lists one by one.
const MAX_LISTED: usize = 16;

/// What a device can do, for predictions. Measured figures, not data-sheet ones.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Roofline {
    /// Bytes read per second.
    pub read_bytes_per_s: f64,
    /// Floating-point operations per second in the kernel's precision.
    pub flops_per_s: f64,
    /// Seconds that a call takes without any work.
    pub overhead_s: f64,
}

/// A plan explained.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlanReport {
    /// One part for each backend (two for a hybrid) and plan group.
    pub groups: Vec<GroupReport>,
    /// What else a backend decided, a line each: how it computes a request, say, and what the other way would cost.
    pub notes: Vec<String>,
}

/// The plan of one group of layers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GroupReport {
    /// The backend.
    pub backend: &'static str,
    /// Layers that share the plan.
    pub num_layers: usize,
    /// Head counts and widths.
    pub heads: String,
    /// Causal or full, and the window.
    pub mask: String,
    /// Requests in the batch.
    pub num_requests: usize,
    /// Query tokens of a tile.
    pub tile_len: u32,
    /// Query tiles.
    pub num_tiles: usize,
    /// Units: (tile, KV head, chunk).
    pub num_units: u64,
    /// Whether a request is cut the same in every batch, so that its bits are the same.
    pub is_batch_invariant: bool,
    /// Tiles whose result is merged from partial states.
    pub num_split_tiles: usize,
    /// Ranges that the units are shared out in.
    pub num_workers: usize,
    /// Cost of the most loaded worker ÷ mean cost; 1 is perfect balance.
    pub imbalance: f64,
    /// Bytes of partial states.
    pub workspace_bytes: u64,
    /// Bytes of q, out and visible KV, each counted once.
    pub bytes: u64,
    /// 2 · visible pairs · query heads · (head_dim_qk + head_dim_vo).
    pub flops: u64,
    /// Seconds a layer, where it is known what the device can do.
    pub predicted_s: Option<f64>,
    /// The first requests.
    pub requests: Vec<RequestReport>,
}

/// How one request was cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RequestReport {
    /// Its place in the batch.
    pub request: u32,
    /// Query tokens.
    pub q_len: u32,
    /// KV tokens.
    pub kv_len: u32,
    /// Query tiles.
    pub num_tiles: u32,
    /// Chunks of its last tile.
    pub num_chunks: u32,
    /// Tokens of a chunk; `u32::MAX`: not cut.
    pub chunk_len: u32,
}

impl PlanReport {
    /// Explains the plans of a batch, one for each of the model's groups.
    #[must_use]
    pub fn new(
        backend: &'static str,
        model: &ModelSpec,
        batch: &Batch,
        plans: &[Plan],
        roofline: Option<&Roofline>,
    ) -> Self {
        let explain = |(group, plan)| group_report(backend, num_layers(model, group), model, batch, plan, roofline);
        Self { groups: plans.iter().enumerate().map(explain).collect(), notes: Vec::new() }
    }

    /// Explains the plan of one of the model's groups, by its place among them: for a backend whose groups have different
    /// names or batches.
    #[must_use]
    pub fn of_group(backend: &'static str, model: &ModelSpec, batch: &Batch, group: usize, plan: &Plan) -> Self {
        let report = group_report(backend, num_layers(model, group), model, batch, plan, None);
        Self { groups: vec![report], notes: Vec::new() }
    }

    /// Predicts the time of each group that has no prediction and whose backend, by name, the roofline is for.
    pub fn predict(&mut self, roofline: &Roofline, is_for: impl Fn(&str) -> bool) {
        for group in self.groups.iter_mut().filter(|group| is_for(group.backend)) {
            group.predicted_s.get_or_insert_with(|| predict(roofline, group.bytes, group.flops));
        }
    }

    /// Predicts the time of each group from its plan and the rates of the kernels that run it, where they are known; a
    /// plan without work takes none.
    pub fn predict_kernels(&mut self, plans: &[Plan], rates: impl Fn(&Plan) -> Option<KernelRates>) {
        for (group, plan) in self.groups.iter_mut().zip(plans) {
            let of_work = || rates(plan).map(|rates| rates.predict(plan, group.bytes));
            group.predicted_s = if plan.num_units() == 0 { Some(0.0) } else { of_work() };
        }
    }

    /// Who runs the work, as `a + b`.
    #[must_use]
    pub fn kernels(&self) -> String {
        let with_work = self.groups.iter().filter(|group| group.num_units > 0);
        let mut names: Vec<&str> = with_work.map(|group| group.backend).collect();
        names.dedup();
        names.join(" + ")
    }

    /// Seconds of all groups, a layer of each; `None` where one is not known.
    #[must_use]
    pub fn predicted_s(&self) -> Option<f64> {
        self.groups.iter().map(|group| group.predicted_s).sum()
    }

    /// Adds the parts of another report, as a hybrid does.
    pub fn absorb(&mut self, other: Self) {
        self.groups.extend(other.groups);
        self.notes.extend(other.notes);
    }
}

fn group_report(
    backend: &'static str,
    num_layers: usize,
    model: &ModelSpec,
    batch: &Batch,
    plan: &Plan,
    roofline: Option<&Roofline>,
) -> GroupReport {
    let group = plan.group();
    let (pairs, kv_tokens) = visible_work(plan, batch);
    let heads = group.heads;
    let q_rows: u64 = batch.requests().iter().map(|r| u64::from(r.q_len)).sum();
    let widths = u64::from(heads.head_dim_qk + heads.head_dim_vo);
    let q_bytes = q_rows * u64::from(heads.num_qo_heads) * widths * model.q_dtype().size_bytes() as u64;
    let kv_bytes = kv_tokens * group.kv.bytes_per_token(model.kv_dtype());
    let (bytes, flops) = (q_bytes + kv_bytes, 2 * pairs * u64::from(heads.num_qo_heads) * widths);
    GroupReport {
        backend,
        num_layers,
        heads: heads.to_string(),
        mask: mask_text(group, batch),
        num_requests: batch.requests().len(),
        tile_len: plan.config().tile_len,
        num_tiles: plan.tiles().len(),
        num_units: plan.num_units(),
        is_batch_invariant: plan.config().chunking.by == CutBy::Request,
        num_split_tiles: plan.tiles().iter().filter(|t| t.is_split()).count(),
        num_workers: plan.config().num_workers as usize,
        imbalance: imbalance(plan),
        workspace_bytes: plan.workspace().total_bytes(),
        bytes,
        flops,
        predicted_s: roofline.map(|r| predict(r, bytes, flops)),
        requests: request_reports(plan, batch),
    }
}

fn num_layers(model: &ModelSpec, group: usize) -> usize {
    (0..model.layers().len()).filter(|layer| model.group_of(*layer) == Some(group)).count()
}

#[expect(clippy::cast_precision_loss, reason = "a prediction, good to a few per cent")]
fn predict(roofline: &Roofline, bytes: u64, flops: u64) -> f64 {
    let reading = bytes as f64 / roofline.read_bytes_per_s;
    let computing = flops as f64 / roofline.flops_per_s;
    roofline.overhead_s + reading.max(computing)
}

/// Visible (query, key) pairs, and KV tokens that each request's queries see together. Custom masks are not counted
/// out: their pairs are computed all the same.
fn visible_work(plan: &Plan, batch: &Batch) -> (u64, u64) {
    let (mut pairs, mut kv_tokens) = (0u64, 0u64);
    let group = plan.group();
    for tiles in plan.tiles().chunk_by(|a, b| a.request == b.request) {
        let begin = tiles.iter().map(|t| t.kv_begin).min().unwrap_or(0);
        let end = tiles.iter().map(|t| t.kv_end).max().unwrap_or(0);
        kv_tokens += u64::from(end.saturating_sub(begin));
        for tile in tiles {
            let request = &batch.requests()[tile.request as usize];
            for row in tile.q_begin..tile.q_begin + tile.q_len {
                let position = request.position(row);
                let first = group.window_left.map_or(0, |window| position - i64::from(window));
                let last = if group.causal { position } else { i64::from(request.kv_len) - 1 };
                let first = first.max(i64::from(tile.kv_begin));
                let end = (last + 1).min(i64::from(tile.kv_end));
                pairs += (end - first).max(0).unsigned_abs();
            }
        }
    }
    (pairs, kv_tokens)
}

fn mask_text(group: &PlanGroup, batch: &Batch) -> String {
    let mut text = if group.causal { "causal" } else { "full" }.to_owned();
    if let Some(window) = group.window_left {
        text.push_str(&format!(", window_left {window}"));
    }
    if batch.custom_mask().is_some() {
        text.push_str(", custom mask");
    }
    text
}

/// Cost of the busiest worker over the mean.
#[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
fn imbalance(plan: &Plan) -> f64 {
    let max = busiest(plan, &UnitCost { of: |tile: &Tile, chunk| plan.unit_cost(tile, chunk), step: 1 });
    let sum = plan.total_cost();
    if sum == 0 { 1.0 } else { max as f64 * f64::from(plan.config().num_workers) / sum as f64 }
}

fn request_reports(plan: &Plan, batch: &Batch) -> Vec<RequestReport> {
    let tiles = plan.tiles().chunk_by(|a, b| a.request == b.request);
    tiles
        .take(MAX_LISTED)
        .map(|tiles| {
            let last = tiles.last().expect("chunk_by gives no empty run");
            let request = &batch.requests()[last.request as usize];
            RequestReport {
                request: last.request,
                q_len: request.q_len,
                kv_len: request.kv_len,
                num_tiles: u32::try_from(tiles.len()).expect("tiles hold 32-bit rows"),
                num_chunks: last.num_chunks,
                chunk_len: last.chunk_len,
            }
        })
        .collect()
}

impl fmt::Display for PlanReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.groups.iter().try_for_each(|group| write!(f, "{group}"))?;
        self.notes.iter().try_for_each(|note| writeln!(f, "{note}"))
    }
}

impl fmt::Display for GroupReport {
    #[expect(clippy::cast_precision_loss, reason = "figures for people")]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let free = if self.is_batch_invariant { "" } else { ", cut by the whole batch" };
        writeln!(f, "{}: {} layers, {}, {}{free}", self.backend, self.num_layers, self.heads, self.mask)?;
        writeln!(
            f,
            "  {} requests -> {} tiles of up to {} tokens ({} split) -> {} units on {} workers, imbalance {:.2}",
            self.num_requests,
            self.num_tiles,
            self.tile_len,
            self.num_split_tiles,
            self.num_units,
            self.num_workers,
            self.imbalance
        )?;
        let (mib, gflop) = (self.bytes as f64 / f64::from(1 << 20), self.flops as f64 / 1e9);
        write!(f, "  {mib:.2} MiB, {gflop:.3} GFLOP, workspace {} bytes", self.workspace_bytes)?;
        match self.predicted_s {
            Some(seconds) => writeln!(f, ", predicted {:.1} us a layer", seconds * 1e6)?,
            None => writeln!(f)?,
        }
        for r in &self.requests {
            write!(f, "  request {}: q {}, kv {}, {} tiles", r.request, r.q_len, r.kv_len, r.num_tiles)?;
            match r.num_chunks {
                1 => writeln!(f, ", not split")?,
                n => writeln!(f, ", {n} chunks of {} tokens", r.chunk_len)?,
            }
        }
        let listed = self.requests.len();
        if self.num_requests > listed {
            writeln!(f, "  and {} more requests", self.num_requests - listed)?;
        }
        Ok(())
    }
}

//! What the kernel families reach on GPUs that they were measured on, for predictions in reports.
//!
//! Fitted to `gpu-h200.json` and `gpu-portable-h200.json` in `docs/bench/`, `extend_sm90` to
//! `docs/kernels/extend-sm90.md`; a test compares with both files. When a kernel changes, its row is fitted anew:
//! `bytes_per_s` and `overhead_s` to a long and a short workload that memory bounds, `flops_per_s` and `unit_s` to one of
//! long and one of short prompts.

use attn_metadata::PlanGroup;
use attn_metadata::plan::KernelRates;
use kvpool::KvDtype;

use crate::device::DeviceProperties;

/// One kernel family on one GPU.
struct Row {
    /// How the GPU's name begins.
    gpu: &'static str,
    capability: (i32, i32),
    family: &'static str,
    /// Widths of values and outputs up to this.
    max_dim: u32,
    is_fp8: bool,
    rates: KernelRates,
}

const US: f64 = 1e-6;

const fn decode(family: &'static str, max_dim: u32, is_fp8: bool, gbs: f64) -> Row {
    let rates = KernelRates {
        bytes_per_s: gbs * 1e9,
        flops_per_s: 300e12,
        overhead_s: 10.5 * US,
        unit_s: 0.0,
        merge_s: 3.0 * US,
        kv_step: 64,
        row_step: u32::MAX,
    };
    Row { gpu: "NVIDIA H200", capability: (9, 0), family, max_dim, is_fp8, rates }
}

const fn extend(max_dim: u32, is_fp8: bool, tflops: f64) -> Row {
    prefill("cuda/extend", max_dim, is_fp8, tflops, 6.0, [u32::MAX, 64])
}

const fn extend_sm90(max_dim: u32, kv_step: u32, is_fp8: bool, tflops: f64) -> Row {
    // A warpgroup has 64 rows.
    prefill("cuda/extend_sm90", max_dim, is_fp8, tflops, 1.7, [64, kv_step])
}

const fn prefill(family: &'static str, max_dim: u32, is_fp8: bool, tflops: f64, unit_us: f64, steps: [u32; 2]) -> Row {
    let rates = KernelRates {
        bytes_per_s: 3.6e12,
        flops_per_s: tflops * 1e12,
        overhead_s: 11.0 * US,
        unit_s: unit_us * US,
        merge_s: 3.0 * US,
        kv_step: steps[1],
        row_step: steps[0],
    };
    Row { gpu: "NVIDIA H200", capability: (9, 0), family, max_dim, is_fp8, rates }
}

/// In order: the first that fits counts.
const ROWS: &[Row] = &[
    decode("cuda/decode_sm90", 256, false, 4_350.0),
    decode("cuda/decode_sm90", 256, true, 3_900.0),
    decode("cuda/decode", 256, false, 4_350.0),
    decode("cuda/decode", 256, true, 3_900.0),
    extend(64, false, 333.0),
    extend(128, false, 396.0),
    extend(256, false, 355.0),
    extend_sm90(64, 112, false, 555.0),
    extend_sm90(128, 80, false, 770.0),
    extend_sm90(256, 80, false, 762.0),
    extend_sm90(64, 112, true, 520.0),
    extend_sm90(128, 80, true, 713.0),
    extend_sm90(256, 80, true, 590.0),
];

/// What the kernels of a family reach for a group of layers; `None` where nobody measured it.
pub(crate) fn rates_of(
    gpu: &DeviceProperties,
    family: &str,
    group: &PlanGroup,
    kv_dtype: KvDtype,
) -> Option<KernelRates> {
    let is_fp8 = kv_dtype == KvDtype::Fp8E4m3;
    let fits = |row: &&Row| {
        let is_gpu = gpu.name.starts_with(row.gpu) && gpu.capability == row.capability;
        let is_kernel = row.family == family && row.is_fp8 == is_fp8 && group.heads.head_dim_vo <= row.max_dim;
        is_gpu && is_kernel
    };
    ROWS.iter().find(fits).map(|row| row.rates)
}

#[cfg(test)]
#[path = "rates_tests.rs"]
mod tests;

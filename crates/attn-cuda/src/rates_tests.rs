//! Predictions of the workloads of `bench/` against what was measured on the card in `docs/bench/`.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use attn_metadata::plan::PlanReport;
use attn_metadata::{Batch, HeadShape, Layer, LayerParams, ModelSpec, PoolShape, RawBatch};
use kvpool::{Dtype, PageSize};
use serde_json::Value;

use super::*;
use crate::entry::{Families, Limits, kernels_of};
use crate::policy::{GroupPolicy, Invariance};
use crate::reports::report;

const HOPPER: Limits = Limits { capability: (9, 0), shared_bytes: 232_448 };
/// Predictions may be off by this share.
const MAX_ERROR: f64 = 0.2;

fn json(path: &str) -> Value {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").join(path);
    serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap()
}

/// A workload's plan, explained as the backend would.
fn explained(workload: &Value, families: Families, by: Invariance) -> PlanReport {
    let number = |value: &Value| u32::try_from(value.as_u64().unwrap()).unwrap();
    let list = |key: &str| -> Vec<u32> { workload[key].as_array().unwrap().iter().map(number).collect() };
    let (q_lens, kv_lens, heads) = (list("q_lens"), list("kv_lens"), list("heads"));
    let page_size = number(&workload["page"]);
    let params = LayerParams {
        window_left: number(&workload["window"]).checked_sub(1),
        ..LayerParams::causal(HeadShape::new(heads[0], heads[1], number(&workload["dim"])))
    };
    let kv_dtype = if workload["kv_dtype"] == "fp8" { KvDtype::Fp8E4m3 } else { KvDtype::Bf16 };
    let size = PageSize::new(page_size).unwrap();
    let layer = Layer::new(params).unwrap();
    let model = Arc::new(ModelSpec::new(vec![layer], Dtype::Bf16, kv_dtype, size).unwrap());
    let sums = |counts: &mut dyn Iterator<Item = u32>| -> Vec<i32> {
        let mut sums = vec![0];
        counts.for_each(|n| sums.push(sums[sums.len() - 1] + i32::try_from(n).unwrap()));
        sums
    };
    let pages = sums(&mut kv_lens.iter().map(|kv| kv.div_ceil(page_size)));
    let num_pages = pages[pages.len() - 1];
    let raw = RawBatch {
        num_rows: q_lens.iter().sum::<u32>() as usize,
        qo_indptr: &sums(&mut q_lens.iter().copied()),
        kv_indptr: &pages,
        kv_indices: &(0..num_pages).collect::<Vec<_>>(),
        kv_last_page_len: &kv_lens.iter().map(|kv| ((kv - 1) % page_size + 1).cast_signed()).collect::<Vec<_>>(),
        slot_mapping: None,
        custom_mask: None,
    };
    let pool = PoolShape { num_pages: num_pages.unsigned_abs(), page_size: size };
    let batch = Batch::from_raw(pool, &raw).unwrap();
    let kernels = kernels_of(&model, &model.layers()[0], &HOPPER, families).unwrap();
    let policies = GroupPolicy::of_model(&model, &[kernels], &DeviceProperties::h200(), by);
    let mut plan = policies[0].plan(pool);
    plan.update(&batch);
    report(&DeviceProperties::h200(), &model, &policies, &[plan])
}

/// The report of a plan for the kernels that a row was measured with, `None` where today's choice has no such.
fn of_kernels(workload: &Value, kernels: &str, by: Invariance) -> Option<PlanReport> {
    let mut reports = [Families::All, Families::Portable].into_iter().map(|f| explained(workload, f, by));
    reports.find(|report| report.kernels() == kernels)
}

#[test]
fn every_workload_is_predicted_within_a_fifth() {
    let (workloads, results) = (json("bench/workloads.json"), ["gpu-h200", "gpu-portable-h200"]);
    let results = results.map(|file| json(&format!("docs/bench/{file}.json")));
    let workload = |name: &Value| workloads.as_array().unwrap().iter().find(|workload| workload["name"] == *name);
    let (mut num_compared, mut wrong) = (0, Vec::new());
    for row in results.iter().flat_map(|results| results["results"].as_array().unwrap()) {
        let by = match row["peer"].as_str() {
            Some("cuda" | "cuda-portable") => Invariance::Batch,
            Some("cuda-free") => Invariance::None,
            _ => continue,
        };
        let (Some(ms), Some(workload)) = (row["ms"].as_f64(), workload(&row["workload"])) else { continue };
        if !workload["dim"].is_number() {
            println!("{} is latent: its kernels have no rates", row["workload"]);
            continue;
        }
        let report = match row["kernels"].as_str() {
            Some(kernels) => of_kernels(workload, kernels, by),
            // Rows from before kernels were written down are of those for every GPU.
            None => Some(explained(workload, Families::Portable, by)),
        };
        let predicted = report.as_ref().and_then(PlanReport::predicted_s).map(|seconds| seconds * 1e3);
        let kernels = report.map_or("kernels that are not chosen any more".to_owned(), |report| report.kernels());
        let line = format!("{} on {kernels}, cut by {by:?}: {ms:.4} ms, predicted {predicted:.4?}", row["workload"]);
        println!("{line}, {:+.1} %", (predicted.unwrap_or(f64::NAN) / ms - 1.0) * 100.0);
        num_compared += 1;
        if predicted.is_none_or(|predicted| (predicted / ms - 1.0).abs() > MAX_ERROR) {
            wrong.push(line);
        }
    }
    assert!(num_compared > 20, "{num_compared} workloads were compared");
    assert!(wrong.is_empty(), "fit the rates of the kernels that changed, or measure anew: {wrong:#?}");
}

#[test]
fn what_was_not_measured_is_not_predicted() {
    let group = PlanGroup::plain(HeadShape::new(32, 8, 128), true, None);
    let rates = |name: &str, family| {
        let gpu = DeviceProperties { name: name.to_owned(), ..DeviceProperties::h200() };
        rates_of(&gpu, family, &group, KvDtype::Bf16)
    };
    assert!(rates("NVIDIA H200 NVL", "cuda/decode").is_some());
    assert!(rates("NVIDIA H100", "cuda/decode").is_none() && rates("NVIDIA H200", "cuda/plain").is_none());
}

//! Explains a step's plans: one report for each group of layers and part.

use attn_metadata::ModelSpec;
use attn_metadata::plan::{Plan, PlanReport};

use crate::device::DeviceProperties;
use crate::policy::GroupPolicy;
use crate::rates::rates_of;
use crate::tables::{GroupPlan, Part};

/// What the plans of a model's groups do, requests that extend first.
pub(crate) fn report(
    gpu: &DeviceProperties,
    model: &ModelSpec,
    policies: &[GroupPolicy],
    plans: &[GroupPlan],
) -> PlanReport {
    let explain = |is_decode: bool, parts: &[&Part]| {
        let label = policies.first().map_or("cuda", |policy| policy.label(is_decode));
        let plans: Vec<Plan> = parts.iter().map(|part| part.plan.clone()).collect();
        let batch = parts.first().map(|part| &part.batch)?;
        let mut report = PlanReport::new(label, model, batch, &plans, None);
        report.predict_kernels(&plans, |plan| rates_of(gpu, label, plan.group(), model.kv_dtype()));
        Some(report)
    };
    let extend: Vec<&Part> = plans.iter().map(|plan| &plan.extend).collect();
    let mut report = explain(false, &extend).expect("a model has a group");
    let decode: Option<Vec<&Part>> = plans.iter().map(|plan| plan.decode.as_ref()).collect();
    if let Some(decode) = decode.and_then(|parts| explain(true, &parts)) {
        report.absorb(decode);
    }
    report
}

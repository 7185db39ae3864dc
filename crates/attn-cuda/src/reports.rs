//! Explains a step's plans: one report for each group of layers and part.

use attn_metadata::ModelSpec;
use attn_metadata::plan::{Plan, PlanReport};

use crate::at_once::AtOnce;
use crate::device::DeviceProperties;
use crate::policy::GroupPolicy;
use crate::rates::rates_of;
use crate::tables::{GroupPlan, Part};

/// Seconds of launching and merging where both parts run at once.
const AROUND_S: f64 = 12e-6;

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
    let parts_at_once = policies.iter().zip(plans).map(|(policy, plan)| policy.at_once(plan));
    for (group, at_once) in parts_at_once.enumerate().filter_map(|(group, at_once)| Some((group, at_once?))) {
        predict_at_once(&mut report, group, plans.len(), &at_once);
        report.notes.push(format!(
            "group {group}: decoding and prefill at once, prefill on {} of {} multiprocessors; its predicted time is that \
             of both, decoding's that of launching and merging",
            at_once.extend_sms, gpu.num_sms
        ));
    }
    report
}

/// What both parts of a group take together is predicted for prefill, and for decoding only what surrounds them, so that the
/// sum is right; the note says so.
fn predict_at_once(report: &mut PlanReport, group: usize, num_groups: usize, at_once: &AtOnce) {
    let extend = &mut report.groups[group];
    extend.predicted_s = Some(at_once.seconds);
    report.groups[num_groups + group].predicted_s = Some(AROUND_S);
}

//! Explains a step's plans: one report for each group of layers and part.

use attn_metadata::ModelSpec;
use attn_metadata::plan::{GroupReport, PlanReport};

use crate::at_once::AtOnce;
use crate::device::DeviceProperties;
use crate::policy::GroupPolicy;
use crate::rates::rates_of;
use crate::tables::{GroupPlan, Part};

/// Seconds of launching and merging where both parts run at once.
const AROUND_S: f64 = 12e-6;

/// What the plans of a model's groups do: first the requests that extend of every group, then those that decode of every
/// group that has a kernel for it, each with its own kernel's name and rates.
pub(crate) fn report(
    gpu: &DeviceProperties,
    model: &ModelSpec,
    policies: &[GroupPolicy],
    plans: &[GroupPlan],
) -> PlanReport {
    let explain = |group: usize, is_decode: bool, part: &Part| {
        let label = policies[group].label(is_decode);
        explain_part(gpu, model, group, label, part)
    };
    let mut groups: Vec<GroupReport> =
        plans.iter().enumerate().flat_map(|(group, plan)| explain(group, false, &plan.extend)).collect();
    // Where each group's decoding is reported: not every group has a kernel for it.
    let mut decode_at = vec![None; plans.len()];
    for (group, plan) in plans.iter().enumerate() {
        if let Some(decode) = &plan.decode {
            decode_at[group] = Some(groups.len());
            groups.extend(explain(group, true, decode));
        }
    }
    let mut report = PlanReport { groups, notes: Vec::new() };
    let parts_at_once = policies.iter().zip(plans).map(|(policy, plan)| policy.at_once(plan));
    for (group, at_once) in parts_at_once.enumerate().filter_map(|(group, at_once)| Some((group, at_once?))) {
        predict_at_once(&mut report, group, decode_at[group], &at_once);
        report.notes.push(format!(
            "group {group}: decoding and prefill at once, prefill on {} of {} multiprocessors; its predicted time is that \
             of both, decoding's that of launching and merging",
            at_once.extend_sms, gpu.num_sms
        ));
    }
    report
}

/// The report of one part of one group's plan.
fn explain_part(
    gpu: &DeviceProperties,
    model: &ModelSpec,
    group: usize,
    label: &'static str,
    part: &Part,
) -> Vec<GroupReport> {
    let mut report = PlanReport::of_group(label, model, &part.batch, group, &part.plan);
    report
        .predict_kernels(std::slice::from_ref(&part.plan), |plan| rates_of(gpu, label, plan.group(), model.kv_dtype()));
    report.groups
}

/// What both parts of a group take together is predicted for prefill, and for decoding only what surrounds them, so that the
/// sum is right; the note says so.
fn predict_at_once(report: &mut PlanReport, extend: usize, decode: Option<usize>, at_once: &AtOnce) {
    report.groups[extend].predicted_s = Some(at_once.seconds);
    if let Some(decode) = decode {
        report.groups[decode].predicted_s = Some(AROUND_S);
    }
}

#[cfg(test)]
mod tests {
    use attn_metadata::{Batch, HeadShape, Layer, LayerParams, PoolShape, RawBatch};
    use kvpool::{Dtype, KvDtype, PageSize};

    use super::*;
    use crate::entry::{Families, Limits, kernels_of};
    use crate::policy::Invariance;

    const HOPPER: Limits = Limits { capability: (9, 0), shared_bytes: 232_448 };
    const PAGE: u32 = 16;

    /// Requests (q_len, kv_len) that read the same pages.
    fn batch(requests: &[(u32, u32)]) -> Batch {
        let sums = |counts: &mut dyn Iterator<Item = u32>| -> Vec<i32> {
            let mut sums = vec![0];
            counts.for_each(|n| sums.push(sums[sums.len() - 1] + n.cast_signed()));
            sums
        };
        let pages = || requests.iter().map(|(_, kv)| kv.div_ceil(PAGE));
        let last = |(_, kv): &(u32, u32)| ((kv - 1) % PAGE + 1).cast_signed();
        let raw = RawBatch {
            num_rows: requests.iter().map(|(q, _)| *q).sum::<u32>() as usize,
            qo_indptr: &sums(&mut requests.iter().map(|(q, _)| *q)),
            kv_indptr: &sums(&mut pages()),
            kv_indices: &pages().flat_map(|count| 0..count.cast_signed()).collect::<Vec<_>>(),
            kv_last_page_len: &requests.iter().map(last).collect::<Vec<_>>(),
            slot_mapping: None,
            custom_mask: None,
        };
        let pool = PoolShape { num_pages: pages().max().unwrap(), page_size: PageSize::new(PAGE).unwrap() };
        Batch::from_raw(pool, &raw).unwrap()
    }

    /// A batch whose parts run at once, on a model with two layers of each shape.
    fn explained(shapes: &[HeadShape]) -> PlanReport {
        let layers = shapes.iter().flat_map(|heads| [*heads; 2]);
        let layers = layers.map(|heads| Layer::new(LayerParams::causal(heads)).unwrap()).collect();
        let model = ModelSpec::new(layers, Dtype::Bf16, KvDtype::Bf16, PageSize::new(PAGE).unwrap()).unwrap();
        let kernels = model.layers().iter().map(|layer| kernels_of(&model, layer, &HOPPER, Families::All).unwrap());
        let (kernels, gpu) = (kernels.collect::<Vec<_>>(), DeviceProperties::h200());
        let policies = GroupPolicy::of_model(&model, &kernels, &gpu, Invariance::Batch);
        let batch = batch(&[&[(1, 8192); 64][..], &[(4096, 4096)]].concat());
        let mut plans: Vec<GroupPlan> = policies.iter().map(|policy| policy.plan(batch.pool())).collect();
        plans.iter_mut().for_each(|plan| plan.update(&batch));
        report(&gpu, &model, &policies, &plans)
    }

    #[test]
    fn every_group_is_reported_with_its_own_kernels_and_its_own_decoding() {
        let (wide, odd) = (HeadShape::new(32, 8, 128), HeadShape::new(8, 8, 80));
        for (shapes, decodes) in [([odd, wide], wide), ([wide, odd], wide)] {
            let report = explained(&shapes);
            let of = |heads: HeadShape| report.groups.iter().filter(move |group| group.heads == heads.to_string());
            let names = |heads| of(heads).map(|group| group.backend).collect::<Vec<_>>();
            assert_eq!(names(wide), ["cuda/extend_sm90", "cuda/decode_sm90"], "{report}");
            assert_eq!(names(odd), ["cuda/plain"], "{report}");
            assert!(report.groups.iter().all(|group| group.num_layers == 2), "{report}");
            assert_eq!(
                of(decodes).next_back().unwrap().predicted_s,
                Some(AROUND_S),
                "both parts run at once: {report}"
            );
            assert_eq!(of(odd).next().unwrap().predicted_s, None, "nobody measured it: {report}");
            assert_eq!(of(odd).next().unwrap().num_requests, 65, "{report}");
            assert_eq!(report.notes.len(), 1);
        }
    }

    #[test]
    fn a_model_of_groups_that_decode_has_a_report_for_each_and_part() {
        let shapes = [HeadShape::new(32, 8, 128), HeadShape::new(32, 8, 64)];
        let report = explained(&shapes);
        let heads: Vec<&str> = report.groups.iter().map(|group| group.heads.as_str()).collect();
        let [first, second] = shapes.map(|heads| heads.to_string());
        assert_eq!(heads, [&first, &second, &first, &second]);
        assert!(report.groups.iter().all(|group| group.predicted_s.is_some()), "{report}");
    }
}

//! Decides whether a step's two parts run one after the other or at once, and on how many multiprocessors.
//!
//! Decoding is bound by memory and needs a part of the multiprocessors to keep it busy; prefill is bound by arithmetic. At
//! once they take little longer than the longer one. Blocks of both kernels claim what they compute, so how many there are
//! of which changes no result, and decoding has what prefill leaves free, also when prefill has ended.
//!
//! The model is fitted to batches measured on an H200, see `docs/kernels/mixed.md`.

use attn_metadata::PlanGroup;
use attn_metadata::plan::{KernelRates, Plan};
use kvpool::KvDtype;

use crate::device::DeviceProperties;
use crate::rates::rates_of;
use crate::tables::GroupPlan;

/// Multiprocessors, in 132, beyond which decoding is no faster.
const DECODE_SMS_OF_132: f64 = 80.0;
/// How much longer both take, in seconds for each second of decoding alone: they share the memory.
const CONTENTION: f64 = 0.2;
/// Seconds that two streams cost.
const FORK_S: f64 = 4e-6;
/// Least gain over one after the other, as a share.
const LEAST_GAIN: f64 = 0.05;
/// Multiprocessors are given to prefill in steps of so many.
const STEP_SMS: u32 = 4;

/// How one group's parts run at once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct AtOnce {
    /// Multiprocessors that prefill is launched for, a block each; the others decode.
    pub(crate) extend_sms: u32,
    /// Seconds of both, as predicted, besides what launching and merging take.
    pub(crate) seconds: f64,
}

/// What the kernels of a group reach, where its parts may run at once.
#[derive(Clone, Debug)]
pub(crate) struct GroupRates {
    decode: KernelRates,
    extend: KernelRates,
    kv_bytes_per_token: u64,
    num_sms: u32,
}

/// What there is to do, in seconds.
#[derive(Clone, Copy, Debug)]
struct Work {
    /// Decoding on the whole GPU.
    decode_s: f64,
    /// All units of prefill on one multiprocessor.
    extend_s: f64,
    longest_unit_s: f64,
    shortest_unit_s: f64,
    num_units: u64,
}

impl GroupRates {
    /// `families`: of decoding and of prefill. `None` where nobody measured them on this GPU, or blocks of both fit into one
    /// multiprocessor: those of `extend_sm90` fill it.
    pub(crate) fn new(
        gpu: &DeviceProperties,
        families: [&str; 2],
        group: &PlanGroup,
        kv_dtype: KvDtype,
    ) -> Option<Self> {
        let [decode, extend] = families;
        if extend != "cuda/extend_sm90" {
            return None;
        }
        let rates = |family| rates_of(gpu, family, group, kv_dtype);
        let kv_bytes_per_token = group.kv.bytes_per_token(kv_dtype);
        Some(Self { decode: rates(decode)?, extend: rates(extend)?, kv_bytes_per_token, num_sms: gpu.num_sms })
    }

    /// The fastest way to run both parts at once; `None`: one after the other is about as fast, or there is but one part.
    pub(crate) fn plan(&self, plan: &GroupPlan) -> Option<AtOnce> {
        let decode = &plan.decode.as_ref()?.plan;
        let extend = &plan.extend.plan;
        if extend.num_units() == 0 || decode.num_units() == 0 {
            return None;
        }
        self.work(decode, extend).share(self.num_sms)
    }

    #[expect(clippy::cast_precision_loss, reason = "a prediction, good to some per cent")]
    fn work(&self, decode: &Plan, extend: &Plan) -> Work {
        let tokens: u64 = decode.tiles().iter().map(|tile| u64::from(tile.kv_end - tile.kv_begin)).sum();
        let unit_s = |range: &attn_metadata::plan::WorkRange| {
            self.extend.unit_s(extend, &extend.tiles()[range.first.tile as usize], range.first.chunk)
        };
        let (mut extend_s, mut longest_unit_s, mut shortest_unit_s) = (0.0, 0.0_f64, f64::INFINITY);
        for range in extend.ranges() {
            let of_unit = unit_s(range);
            extend_s += of_unit * range.num_units as f64;
            (longest_unit_s, shortest_unit_s) = (longest_unit_s.max(of_unit), shortest_unit_s.min(of_unit));
        }
        Work {
            decode_s: (tokens * self.kv_bytes_per_token) as f64 / self.decode.bytes_per_s,
            extend_s,
            longest_unit_s,
            shortest_unit_s,
            num_units: extend.num_units(),
        }
    }
}

impl Work {
    /// The number of multiprocessors for prefill with which both are done first.
    fn share(&self, num_sms: u32) -> Option<AtOnce> {
        // Many first: of equals the first is taken, and prefill is the one that cannot have more later.
        let choices = (1..num_sms.div_ceil(STEP_SMS)).rev().map(|i| i * STEP_SMS);
        let of = |extend_sms| AtOnce { extend_sms, seconds: self.at_once_s(extend_sms, num_sms) };
        let best = choices.map(of).min_by(|a, b| a.seconds.total_cmp(&b.seconds))?;
        let one_by_one = self.decode_s + self.extend_s_on(num_sms);
        (best.seconds < one_by_one * (1.0 - LEAST_GAIN)).then_some(best)
    }

    /// Seconds of prefill on some multiprocessors. Units of one length are done in rounds.
    #[expect(clippy::cast_precision_loss, reason = "as above")]
    fn extend_s_on(&self, sms: u32) -> f64 {
        let mean = self.extend_s / f64::from(sms);
        if self.shortest_unit_s * 4.0 >= self.longest_unit_s * 3.0 {
            let rounds = self.num_units.div_ceil(sms.into());
            return rounds as f64 * self.extend_s / self.num_units as f64;
        }
        mean.max(self.longest_unit_s)
    }

    fn at_once_s(&self, extend_sms: u32, num_sms: u32) -> f64 {
        let extend_s = self.extend_s_on(extend_sms);
        // Share of its full speed that decoding has meanwhile.
        let enough = DECODE_SMS_OF_132 / 132.0 * f64::from(num_sms);
        let missing = (1.0 - f64::from(num_sms - extend_sms) / enough).max(0.0);
        let speed = 1.0 - missing * missing;
        let decode_left_s = (self.decode_s - extend_s * speed).max(0.0);
        extend_s + decode_left_s + CONTENTION * self.decode_s + FORK_S
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMS: u32 = 132;

    fn even(num_units: u64, unit_us: f64, decode_us: f64) -> Work {
        let unit_s = unit_us * 1e-6;
        let extend_s = unit_s * f64::from(u32::try_from(num_units).unwrap());
        Work { decode_s: decode_us * 1e-6, extend_s, longest_unit_s: unit_s, shortest_unit_s: unit_s, num_units }
    }

    /// What was measured on an H200, in microseconds: units and how long one takes, decoding, both one by one, and at once
    /// with the best number of multiprocessors.
    const MEASURED: [(u64, f64, f64, f64, f64); 3] =
        [(352, 80.0, 246.0, 479.0, 389.0), (352, 80.0, 34.0, 286.0, 242.0), (704, 80.0, 81.0, 550.0, 484.0)];

    #[test]
    fn batches_that_were_measured_are_predicted_within_a_tenth() {
        for (num_units, unit_us, decode_us, one_by_one, at_once) in MEASURED {
            let work = even(num_units, unit_us, decode_us);
            let share = work.share(SMS).expect("at once is faster");
            assert!((share.seconds * 1e6 / at_once - 1.0).abs() < 0.1, "{num_units} units: {share:?}, not {at_once}");
            let one_by_one_s = work.decode_s + work.extend_s_on(SMS);
            assert!((one_by_one_s * 1e6 / one_by_one - 1.0).abs() < 0.1, "{one_by_one_s} for {one_by_one} us");
        }
    }

    #[test]
    fn prefill_that_needs_few_multiprocessors_leaves_the_others() {
        let share = even(40, 80.0, 250.0).share(SMS).unwrap();
        assert!((40..=SMS - 80).contains(&share.extend_sms), "{share:?}");
    }

    #[test]
    fn little_of_either_runs_one_by_one() {
        assert_eq!(even(10_000, 80.0, 20.0).share(SMS), None);
        assert_eq!(even(10, 2.0, 4_000.0).share(SMS), None);
        assert_eq!(even(8, 2.0, 3.0).share(SMS), None, "streams cost more than is gained");
    }

    #[test]
    fn what_is_chosen_is_never_slower_than_predicted_one_by_one() {
        for (units, decode_us) in (1..60).flat_map(|u| (0..40).map(move |d| (u * u, f64::from(d * d)))) {
            let work = even(units, 40.0, decode_us);
            if let Some(share) = work.share(SMS) {
                assert!(share.seconds < work.decode_s + work.extend_s_on(SMS), "{work:?}");
                assert!(share.extend_sms > 0 && share.extend_sms < SMS);
            }
        }
    }

    #[test]
    fn a_gpu_of_two_multiprocessors_is_not_shared() {
        assert_eq!(even(100, 80.0, 250.0).share(2), None);
    }
}

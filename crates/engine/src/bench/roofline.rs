//! A quick look at what the host can do, for predictions: a fraction of a second, where `ceilings.rs` takes its time.

use std::num::NonZeroUsize;
use std::thread;

use attn_metadata::HostDevice;
use attn_metadata::plan::Roofline;

use super::ceilings::read_gbs;
use super::measure::{Reps, Subject};
use super::problem::problem_of;
use super::work::Work;
use super::workload::{KvWidth, Workload, WorkloadKind};
use crate::replay::ReplayError;

/// Bytes that the read rate is measured over: beyond the caches of a core, and soon read.
const READ_BYTES: usize = 96 << 20;
/// Prompt of the problem that is bound by arithmetic.
const PROMPT_LEN: u32 = 768;
/// A call is timed this often; the best counts.
const REPS: Reps = Reps { min: 3, max: 3, budget: std::time::Duration::ZERO };

/// Measures what attention can reach on this processor: the rate of memory reads, the CPU backend's rate on a prompt
/// that is bound by arithmetic, and its time for a call with next to no work. All in f32, which the kernel computes in
/// whatever the dtypes are.
///
/// Another program's load makes it worse; it is a lower bound of what the machine can do.
///
/// # Errors
/// [`ReplayError`] where the backend cannot be made, as without threads.
#[expect(clippy::cast_precision_loss, reason = "a rate, good to a few per cent")]
pub fn host_roofline(device: HostDevice) -> Result<Roofline, ReplayError> {
    let num_threads = device.num_threads.or_else(|| thread::available_parallelism().ok().map(NonZeroUsize::get));
    let (overhead_s, _) = best_call(1, device)?;
    let (prompt_s, work) = best_call(PROMPT_LEN, device)?;
    Ok(Roofline {
        read_bytes_per_s: read_gbs(num_threads.unwrap_or(1), READ_BYTES) * 1e9,
        flops_per_s: work.flops as f64 / (prompt_s - overhead_s).max(prompt_s / 2.0),
        overhead_s,
    })
}

/// Seconds of the fastest call that computes a prompt on the CPU backend, and its work.
fn best_call(prompt_len: u32, device: HostDevice) -> Result<(f64, Work), ReplayError> {
    let workload = Workload {
        name: "roofline".to_owned(),
        kind: WorkloadKind::Prefill,
        q_lens: vec![prompt_len],
        kv_lens: vec![prompt_len],
        heads: [8, 2],
        dim: KvWidth::Same(128),
        page: 16,
        window: 0,
        kv_dtype: "f32".to_owned(),
        q_dtype: Some("f32".to_owned()),
        append: true,
        states: 2,
    };
    let problem = problem_of(&workload, 0, u64::MAX).expect("a plain prompt makes a valid problem");
    let work = Work::of(&problem);
    let mut subject = Subject::new(problem, "cpu", device)?;
    let times = subject.round(REPS)?;
    Ok((times.into_iter().fold(f64::INFINITY, f64::min) / 1e3, work))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_positive_numbers_and_a_call_takes_time() {
        let Roofline { read_bytes_per_s, flops_per_s, overhead_s } =
            host_roofline(HostDevice::with_threads(1)).unwrap();
        for figure in [read_bytes_per_s, flops_per_s, overhead_s] {
            assert!(figure.is_finite() && figure > 0.0, "{figure}");
        }
    }
}

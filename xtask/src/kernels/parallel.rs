//! Owns doing independent jobs on all processors.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Does each job once, on as many threads as there are processors, and returns what they gave, in any order. Jobs are begun
/// in order: long ones first keep all processors busy to the end.
pub(super) fn do_all<J: Sync, R: Send>(jobs: &[J], work: impl Fn(&J) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let worker = || {
        let mut done = Vec::new();
        while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            done.push(work(job));
        }
        done
    };
    let num_threads = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..num_threads).map(|_| scope.spawn(worker)).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("a job does not panic")).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_job_is_done_once() {
        let mut done = do_all(&(0..1000).collect::<Vec<u32>>(), |job| job * 2);
        done.sort_unstable();
        assert!(done.iter().copied().eq((0..1000).map(|job| job * 2)));
        assert!(do_all(&[], |job: &u32| *job).is_empty());
    }
}

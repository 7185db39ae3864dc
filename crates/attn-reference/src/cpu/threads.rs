//! Owns starting a backend's threads.

use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};

/// Starts threads named `attn-{name}-0` and on; `None`: as many as the process may use. Each has run before this
/// returns, so no step waits for a thread to come up, or sees what its start allocates.
///
/// # Errors
/// Where threads cannot be started.
pub fn start_threads(num_threads: Option<usize>, name: &'static str) -> Result<ThreadPool, ThreadPoolBuildError> {
    let pool = ThreadPoolBuilder::new()
        .num_threads(num_threads.unwrap_or(0))
        .thread_name(move |i| format!("attn-{name}-{i}"))
        .build()?;
    pool.broadcast(|_| ());
    Ok(pool)
}

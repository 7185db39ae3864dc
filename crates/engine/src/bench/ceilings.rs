//! What the machine can do at best, measured in the same run as everything else: reading memory, multiplying matrices.

use std::hint::black_box;
use std::time::Instant;

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use serde::{Deserialize, Serialize};

/// Bytes that the read rate is measured over: far beyond the caches of a core.
const READ_BYTES: usize = 1 << 30;
const READ_REPS: usize = 5;
#[cfg(feature = "model")]
const GEMM_SIZES: [usize; 3] = [512, 768, 1024];
#[cfg(feature = "model")]
const GEMM_REPS: usize = 8;

/// Best rates of the machine: of a processor, on as many threads as the backend has; of a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Ceilings {
    /// Memory reads; absent where nobody measured them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_gbs: Option<f64>,
    /// Memory reads and writes of a copy, on a GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy_gbs: Option<f64>,
    /// Matrix products: on a processor in f32, absent in a build without the feature `model`; on a GPU in bf16. Of a
    /// list the last is taken.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "one_or_last")]
    pub matmul_tflops: Option<f64>,
}

fn one_or_last<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Rates {
        One(f64),
        Many(Vec<f64>),
    }
    Ok(match Option::<Rates>::deserialize(deserializer)? {
        Some(Rates::One(rate)) => Some(rate),
        Some(Rates::Many(rates)) => rates.last().copied(),
        None => None,
    })
}

impl Ceilings {
    /// Measures both; takes a few seconds and 1 GiB.
    #[must_use]
    pub fn measure(num_threads: usize) -> Self {
        let read_gbs = Some(read_gbs(num_threads, READ_BYTES));
        Self { read_gbs, copy_gbs: None, matmul_tflops: gemm_gflops(num_threads).map(|g| g / 1e3) }
    }
}

impl Ceilings {
    /// The rate of memory that a roof is drawn with: of reads, or of a copy where reads were not measured.
    #[must_use]
    pub fn memory_gbs(&self) -> Option<f64> {
        self.read_gbs.or(self.copy_gbs)
    }
}

/// Best rate of summing a buffer on some threads, in GB/s.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "a rate for people")]
pub fn read_gbs(num_threads: usize, bytes: usize) -> f64 {
    let words: Vec<u64> = (0..bytes as u64 / 8).collect();
    let part = words.len().div_ceil(num_threads.max(1)).max(1);
    let sum = || words.par_chunks(part).map(|part| part.iter().fold(0u64, |a, b| a.wrapping_add(*b))).max();
    let read = || {
        let started = Instant::now();
        black_box(sum());
        started.elapsed().as_secs_f64()
    };
    let best = in_pool(num_threads, || (0..=READ_REPS).map(|_| read()).fold(f64::INFINITY, f64::min));
    (words.len() * 8) as f64 / best / 1e9
}

/// Best rate of multiplying f32 matrices on some threads, in GFLOP/s; `None` in a build without the feature `model`.
#[must_use]
pub fn gemm_gflops(num_threads: usize) -> Option<f64> {
    in_pool(num_threads, best_gemm)
}

#[cfg(feature = "model")]
#[expect(clippy::cast_precision_loss, reason = "a rate for people")]
fn best_gemm() -> Option<f64> {
    use candle_core::{Device, Tensor};

    let mut best: f64 = 0.0;
    for size in GEMM_SIZES {
        let random = || Tensor::randn(0f32, 1f32, (size, size), &Device::Cpu).ok();
        let (a, b) = (random()?, random()?);
        for _ in 0..GEMM_REPS {
            let started = Instant::now();
            black_box(a.matmul(&b).ok()?);
            best = best.max(2.0 * (size as f64).powi(3) / started.elapsed().as_secs_f64() / 1e9);
        }
    }
    Some(best)
}

#[cfg(not(feature = "model"))]
const fn best_gemm() -> Option<f64> {
    None
}

fn in_pool<T: Send>(num_threads: usize, work: impl FnOnce() -> T + Send) -> T {
    let pool: Option<ThreadPool> = ThreadPoolBuilder::new().num_threads(num_threads).build().ok();
    match pool {
        Some(pool) => pool.install(work),
        // Without threads of its own the work still runs, on those that there are.
        None => work(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_matrix_rates_gives_its_last() {
        let ceilings: Ceilings = serde_json::from_str(r#"{"copy_gbs": 4243, "matmul_tflops": [686, 713]}"#).unwrap();
        assert_eq!(ceilings, Ceilings { read_gbs: None, copy_gbs: Some(4243.0), matmul_tflops: Some(713.0) });
        assert_eq!(ceilings.memory_gbs(), Some(4243.0));
    }

    #[test]
    fn rates_are_positive_numbers() {
        let read = read_gbs(2, 1 << 22);
        assert!(read.is_finite() && read > 0.0, "{read}");
        assert_eq!(gemm_gflops(2).is_some(), cfg!(feature = "model"));
    }
}

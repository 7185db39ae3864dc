//! Measurements: workloads from JSON on a host backend or a GPU, ceilings of the machine, the planner, a peer, and charts.
//!
//! Every time comes with a check of the result: a row of figures whose `rel_err` is off says nothing. FLOPs count
//! visible (query, key) pairs only, bytes count q, out and the visible KV once.

mod ceilings;
mod cpu;
#[cfg(feature = "cuda")]
mod gpu;
mod measure;
mod peer;
mod peers;
mod planner;
mod plot;
mod problem;
mod results;
mod roofline;
mod steps;
mod truth;
mod work;
mod workload;

pub use ceilings::{Ceilings, gemm_gflops, read_gbs};
pub use cpu::{BenchError, CpuOptions, compare, cpu_workloads, workloads_named};
#[cfg(feature = "cuda")]
pub use gpu::{GpuBackend, GpuEnvironment, GpuOptions, measure_on_gpu};
pub use measure::{Measured, Reps, Subject, median};
pub use peer::{PeerError, run_peer};
pub use peers::add_peers;
pub use planner::{PlannerRow, measure_planner};
pub use plot::{PlotError, plot};
pub use problem::{ProblemError, problem_of};
pub use results::{Environment, Ratio, ResultRow, Results};
pub use roofline::host_roofline;
pub use steps::{StepRow, measure_steps};
pub use truth::{SampleRows, relative_error};
pub use work::Work;
pub use workload::{KvWidth, Workload, WorkloadError, WorkloadKind, parse_workloads};

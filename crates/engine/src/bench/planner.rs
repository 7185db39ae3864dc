//! Times what an engine pays once a step on the host: filling and checking a batch, and planning it.

use std::sync::Arc;
use std::time::Instant;

use attn_metadata::{BackendConfig, Batch, BatchLimits, HeadShape, HostDevice, Layer, LayerParams, ModelSpec};
use kvpool::{Dtype, KvDtype};
use rand::SeedableRng;
use rand::rngs::StdRng;
use serde::{Deserialize, Serialize};

use super::measure::median;
use super::problem::{ProblemError, Tables, pool_of};
use super::workload::{KvWidth, Workload, WorkloadKind};
use crate::backends::create_backend;
use crate::replay::ReplayError;

const KV_LEN: u32 = 4096;
const PAGE: u32 = 16;
const HEADS: [u32; 2] = [32, 8];
const DIM: u32 = 128;

/// Planning time of a decode batch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlannerRow {
    /// Requests, one query token each.
    pub num_requests: usize,
    /// KV tokens of a request.
    pub kv_len: u32,
    /// Median time of filling and checking the batch.
    pub set_us: f64,
    /// Median time of `prepare_metadata`.
    pub prepare_us: f64,
    /// Median time of both together.
    pub total_us: f64,
}

/// Times `reps` steps of a decode batch after a warm-up.
///
/// # Errors
/// [`ReplayError`] where no backend fits or refuses the batch.
///
/// # Panics
/// If the batch that is made here breaks a rule.
pub fn measure_planner(
    choice: &str,
    device: HostDevice,
    num_requests: usize,
    reps: usize,
) -> Result<PlannerRow, ReplayError> {
    let (tables, mut batch) = decode_batch(num_requests).expect("a plain decode batch is valid");
    let heads = HeadShape::new(HEADS[0], HEADS[1], DIM);
    let layer = Layer::new(LayerParams::causal(heads)).expect("a plain layer is valid");
    let model = ModelSpec::new(vec![layer], Dtype::F32, KvDtype::F32, batch.page_size()).expect("there is a layer");
    let limits = BatchLimits { max_rows: batch.num_rows(), max_requests: batch.num_rows(), max_kv_len: KV_LEN };
    let (mut backend, _) = create_backend(choice, &BackendConfig { model: Arc::new(model), limits, device })?;
    let raw = tables.raw(true);
    let (mut set, mut prepare, mut total) = (Vec::new(), Vec::new(), Vec::new());
    for rep in 0..reps + 3 {
        let started = Instant::now();
        batch.set(&raw).expect("the same tables were valid before");
        let filled = started.elapsed();
        backend.prepare_metadata(&batch)?;
        let done = started.elapsed();
        if rep >= 3 {
            set.push(filled.as_secs_f64() * 1e6);
            prepare.push((done - filled).as_secs_f64() * 1e6);
            total.push(done.as_secs_f64() * 1e6);
        }
    }
    let [set_us, prepare_us, total_us] = [&mut set, &mut prepare, &mut total].map(|times| median(times));
    Ok(PlannerRow { num_requests, kv_len: KV_LEN, set_us, prepare_us, total_us })
}

fn decode_batch(num_requests: usize) -> Result<(Tables, Batch), ProblemError> {
    let workload = Workload {
        name: "planner".to_owned(),
        kind: WorkloadKind::Decode,
        q_lens: vec![1; num_requests],
        kv_lens: vec![KV_LEN; num_requests],
        heads: HEADS,
        dim: KvWidth::Same(DIM),
        page: PAGE,
        window: 0,
        kv_dtype: "f32".to_owned(),
        q_dtype: Some("f32".to_owned()),
        append: true,
        states: 2,
    };
    let tables = Tables::new(&workload, pool_of(&workload)?, &mut StdRng::seed_from_u64(1));
    let batch = tables.batch(true)?;
    Ok((tables, batch))
}

//! A small backend around the kernel, with the contract's bookkeeping and the faults that belong there.

use std::sync::Arc;

use attn_metadata::plan::PlanReport;
use attn_metadata::{
    AttentionBackend, BackendConfig, Batch, BatchLimits, Bucket, Capabilities, CaptureError, CaptureLimits,
    CreateError, Feature, Host, Io, Kv, Lse, ModelSpec, PoolShape, PrepareError, Prepared, RunError, Steps, SubBatch,
    check_batch, check_io,
};
use kvpool::{HostKv, HostSliceMut, HostTensor, HostTensorMut, Slot};

use crate::fault::Fault;
use crate::kernel::Query;

pub(crate) struct Mini {
    model: Arc<ModelSpec>,
    limits: BatchLimits,
    capabilities: Capabilities,
    steps: Steps<Batch>,
    /// The last prepared batch, for the fault that uses it whatever the ticket says.
    last: Batch,
    threads: usize,
    has_limits: bool,
    runs: u32,
    fault: Option<Fault>,
}

impl Mini {
    pub(crate) fn new(config: &BackendConfig<Host>, fault: Option<Fault>) -> Result<Self, CreateError> {
        let heads = config.model.layers()[0].heads();
        if fault == Some(Fault::RefusedWithoutReason) && heads.num_qo_heads == 3 {
            return Err(CreateError::Unsupported { backend: "mini", reasons: Vec::new() });
        }
        let capabilities = attn_reference::oracle::entry().capabilities;
        let pool = PoolShape { num_pages: 0, page_size: config.model.page_size() };
        Ok(Self {
            model: Arc::clone(&config.model),
            limits: config.limits,
            capabilities: capabilities(&config.device).expect("the oracle runs everywhere"),
            steps: Steps::new(Batch::empty(pool)),
            last: Batch::empty(pool),
            threads: config.device.num_threads.unwrap_or(16),
            has_limits: false,
            runs: 0,
            fault,
        })
    }

    /// The same, which says that its bits may depend on the batch.
    pub(crate) fn without_invariance(mut self) -> Self {
        self.capabilities.features.set(Feature::BatchInvariant, false);
        self
    }

    fn has(&self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }

    fn batch_of(&self, step: &Prepared) -> Result<&Batch, RunError> {
        match self.steps.get(step) {
            Err(_) if self.has(Fault::StalePlanAccepted) && step.bucket().is_none() => Ok(&self.last),
            found => found,
        }
    }

    fn append(&self, batch: &Batch, cache: &mut HostKv, k: &HostTensor<'_>, v: Option<&HostTensor<'_>>) {
        let mut slots = batch.slot_mapping().unwrap_or_default().to_vec();
        slots.resize(k.rows(), Slot::PADDING);
        if self.has(Fault::PaddingSlotTakenAsLast) {
            let last = i32::try_from(cache.shape().num_slots() - 1).expect("sizes of the suite fit");
            slots.iter_mut().filter(|s| s.is_padding()).for_each(|s| *s = Slot::from_raw(last));
        }
        if self.has(Fault::AppendSkipsLastToken) {
            slots.iter_mut().rev().find(|s| !s.is_padding()).into_iter().for_each(|s| *s = Slot::PADDING);
        }
        if !self.has(Fault::AppendRoundsThroughBf16) {
            return cache.append(&slots, k, v).expect("check_io has checked the shapes");
        }
        let rounded = |tensor: &HostTensor<'_>| {
            let [rows, heads, dim] = tensor.shape();
            let mut data = vec![0.0; rows * heads * dim];
            for (state, vector) in data.chunks_mut(dim).enumerate() {
                tensor.read(state / heads, state % heads, vector);
                vector.iter_mut().for_each(|x| *x = half::bf16::from_f32(*x).to_f32());
            }
            data
        };
        let (rounded_k, rounded_v) = (rounded(k), v.map(rounded));
        let view = |data, of: &HostTensor<'_>| HostTensor::packed(data, of.shape()).expect("sizes of the suite fit");
        let v = rounded_v.as_ref().zip(v).map(|(data, of)| view(data, of));
        cache.append(&slots, &view(&rounded_k, k), v.as_ref()).expect("sizes of the suite fit");
    }

    /// What faults of determinism and memory do to a finished output.
    fn spoil(&self, batch: &Batch, cache: &HostKv, out: &mut HostTensorMut<'_>) {
        let requests = batch.requests();
        let spoilt = self.has(Fault::BitsDependOnBatch) && requests.len() > 2
            || self.has(Fault::BitsDependOnRun) && self.runs.is_multiple_of(13)
            || self.has(Fault::BitsDependOnThreads) && self.threads == 3;
        let mut extra = 0.0;
        if self.has(Fault::NanOfNeighbourLeaks) {
            for request in requests.iter().filter(|r| r.kv_len > 0) {
                let mut v = vec![0.0; cache.shape().head_dim_v as usize];
                cache.v().read(batch.page_of(request, request.kv_len - 1), 0, 0, &mut v);
                extra += 0.0 * v[0];
            }
        }
        for row in requests.iter().flat_map(|r| r.q_start..r.q_start + r.q_len) {
            for head in 0..out.heads() {
                let mut values = vec![0.0; out.dim()];
                out.as_ref().read(row as usize, head, &mut values);
                values.iter_mut().for_each(|x| *x = if spoilt && *x != 0.0 { x.next_up() } else { *x } + extra);
                out.write(row as usize, head, &values);
            }
        }
        if let (true, HostSliceMut::F32(data)) = (self.has(Fault::WritesBehindTheOutput), out.data_mut()) {
            data.iter_mut().next_back().into_iter().for_each(|x| *x = 0.0);
        }
    }

    fn run(&self, step: &Prepared, layer: usize, io: Io<'_, Host>) -> Result<(), RunError> {
        let Io { q, kv, mut out, mut lse, .. } = io;
        let batch = self.batch_of(step)?;
        let layer = if self.has(Fault::AlwaysLayerZero) { 0 } else { layer };
        let spec = &self.model.layers()[layer];
        if self.has(Fault::PanicsOnOddWidths) && spec.heads().head_dim_qk % 2 == 1 {
            panic!("odd width");
        }
        let cache = match kv {
            Kv::Attend { cache } => cache,
            Kv::Append { cache, k, v } => {
                self.append(batch, cache, &k, v.as_ref());
                cache
            }
        };
        let mut set_lse = |state: usize, value: f32| {
            lse.iter_mut().for_each(|lse| lse[state] = Lse::from_ln(value));
        };
        let padding = batch.num_used_rows() as usize..q.rows();
        let others = self.has(Fault::WritesRowsOfOthers).then_some(0..batch.num_used_rows() as usize);
        let skip = self.has(Fault::PaddingRowsUnwritten)
            || self.has(Fault::CapturedPaddingUnwritten) && step.bucket().is_some() && !batch.requests().is_empty();
        let padding = if batch.writes_padding() && !skip { padding } else { 0..0 };
        for row in padding.chain(others.into_iter().flatten()) {
            out.fill_row(row, 0.0);
            (0..q.heads()).for_each(|head| set_lse(row * q.heads() + head, f32::NEG_INFINITY));
        }
        let most = if self.has(Fault::RequestsBeyond65535Skipped) { 65_535 } else { usize::MAX };
        for request in batch.requests().iter().take(most) {
            for (row, head) in (0..request.q_len).flat_map(|r| (0..spec.heads().num_qo_heads).map(move |h| (r, h))) {
                let query = Query { batch, layer: spec, request, row, head, cache, fault: self.fault };
                let state = (request.q_start + row) as usize * q.heads() + head as usize;
                query.attend(&q, &mut out).into_iter().for_each(|lse| set_lse(state, lse));
            }
        }
        self.spoil(batch, cache, &mut out);
        Ok(())
    }
}

impl AttentionBackend<Host> for Mini {
    fn name(&self) -> &'static str {
        "mini"
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn model(&self) -> &ModelSpec {
        &self.model
    }

    fn prepare_metadata(&mut self, batch: &Batch) -> Result<Prepared, PrepareError> {
        let off = u32::from(self.has(Fault::LimitOffByOne));
        let limits = BatchLimits { max_kv_len: self.limits.max_kv_len.saturating_sub(off), ..self.limits };
        let spoils = self.has(Fault::RefusalSpoilsPlan);
        let Self { steps, last, model, capabilities, .. } = self;
        let step = steps.prepare(batch, |kept| {
            if spoils {
                batch.select_into(kept, SubBatch::First, |_| true);
            }
            check_batch("mini", batch, model, &limits, capabilities)?;
            batch.select_into(kept, SubBatch::First, |_| true);
            Ok(())
        })?;
        batch.select_into(last, SubBatch::First, |_| true);
        Ok(step)
    }

    fn forward(&mut self, step: &Prepared, layer: usize, mut io: Io<'_, Host>) -> Result<(), RunError> {
        self.runs += 1;
        if self.has(Fault::WritesBeforeChecks) {
            (0..io.out.rows()).for_each(|row| io.out.fill_row(row, 0.0));
        }
        self.batch_of(step)?;
        check_io(&self.model, step, layer, &io)?;
        self.run(step, layer, io)
    }

    fn explain(&self, step: &Prepared) -> Result<PlanReport, RunError> {
        let batch = self.batch_of(step)?;
        Ok(PlanReport::new("mini", &self.model, batch, &[], None))
    }

    fn init_capture_graph(&mut self, limits: &CaptureLimits) -> Result<(), CaptureError> {
        if self.has_limits && self.has(Fault::StaleCaptureAccepted) {
            return Ok(());
        }
        self.has_limits = true;
        self.steps.init_capture(limits)
    }

    fn prepare_for_capture(&mut self, bucket: Bucket) -> Result<Prepared, CaptureError> {
        let page_size = self.model.page_size();
        self.steps.capture(bucket, |limits| Ok(Batch::empty(PoolShape { num_pages: limits.num_pool_pages, page_size })))
    }

    fn prepare_for_replay(&mut self, step: &mut Prepared, batch: &Batch) -> Result<(), CaptureError> {
        let keeps = self.has(Fault::ReplayKeepsFirstBatch);
        if !self.has(Fault::ReplayTakesOtherPageSize) {
            check_batch("mini", batch, &self.model, &BatchLimits::NONE, &self.capabilities)?;
        }
        self.steps.replay(step, batch, |kept, _| {
            if !keeps || kept.requests().is_empty() {
                batch.select_into(kept, SubBatch::First, |_| true);
            }
            Ok(())
        })
    }
}

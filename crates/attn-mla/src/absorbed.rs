//! Owns the absorbed form: queries to the width of the rows, attention over the rows, outputs back to values.
//!
//! Buffers are head-major, `[num_heads, rows, width]`, so that each head is one worker's.

use std::sync::Arc;

use attn_metadata::plan::PlanReport;
use attn_metadata::{
    AttentionBackend as _, BackendConfig, Batch, CreateError, Host, Io, Kv, Layer, LayerParams, Lse, ModelSpec,
    PrepareError, Prepared, RunError,
};
use attn_reference::cpu::{CpuBackend, Isa, PackedRows};
use kvpool::{Dtype, HostKv, HostTensor, HostTensorMut};
use rayon::ThreadPool;
use rayon::prelude::*;

use crate::project::Projections;
use crate::rows::part;
use crate::step::Step;
use crate::{MlaFamily, MlaWidths};

/// Attention in the absorbed form, for all latent layers of a model.
pub(crate) struct Absorbed {
    attention: CpuBackend,
    isa: Isa,
    prepared: Option<Prepared>,
    /// `[num_heads, rows, latent + rope]`.
    queries: Vec<f32>,
    /// `[num_heads, rows, latent]`.
    latents: Vec<f32>,
    /// `[num_heads, rows, value]`.
    outputs: Vec<f32>,
    lse: Vec<Lse>,
    /// One a head.
    packed: Vec<PackedRows>,
}

/// The results of absorbed requests; rows of others hold anything.
pub(crate) struct AbsorbedRows<'a> {
    /// `[num_heads, rows, value]`.
    pub(crate) outputs: &'a [f32],
    /// `[rows, num_heads]`.
    pub(crate) lse: &'a [Lse],
    /// Rows of a head.
    pub(crate) num_rows: usize,
}

impl Absorbed {
    /// For the latent layers of a model, in the order given.
    pub(crate) fn new(
        layers: &[Layer],
        config: &BackendConfig<Host>,
        isa: Isa,
        pool: Arc<ThreadPool>,
    ) -> Result<Absorbed, CreateError> {
        let absorbed = |layer: &Layer| {
            let weights = layer.family_as::<MlaFamily>().expect("a latent layer").weights();
            let heads = weights.widths().absorbed_heads(weights.num_heads());
            let params = LayerParams { heads, values_in_keys: true, family: None, ..layer.params().clone() };
            Layer::new(params).expect("a latent layer is a plain one once its queries are absorbed")
        };
        let (kv_dtype, page_size) = (config.model.kv_dtype(), config.model.page_size());
        let model = ModelSpec::new(layers.iter().map(absorbed).collect(), Dtype::F32, kv_dtype, page_size);
        let model = Arc::new(model.expect("the model has these layers with this cache"));
        let config = BackendConfig { model, limits: config.limits, device: config.device };
        Ok(Absorbed {
            attention: CpuBackend::with_pool(&config, isa, pool)?,
            isa,
            prepared: None,
            queries: Vec::new(),
            latents: Vec::new(),
            outputs: Vec::new(),
            lse: Vec::new(),
            packed: Vec::new(),
        })
    }

    /// Plans the absorbed requests of a step.
    pub(crate) fn prepare(&mut self, batch: &Batch) -> Result<(), PrepareError> {
        self.prepared = Some(self.attention.prepare_metadata(batch)?);
        Ok(())
    }

    /// What is planned.
    pub(crate) fn explain(&self) -> Option<PlanReport> {
        self.attention.explain(self.prepared.as_ref()?).ok()
    }

    /// Attends for the absorbed requests of the step that was prepared last.
    pub(crate) fn forward(
        &mut self,
        step: &Step,
        layer: usize,
        (projections, widths): (&Projections, MlaWidths),
        q: HostTensor<'_>,
        cache: &HostKv,
    ) -> Result<AbsorbedRows<'_>, RunError> {
        let (num_heads, num_rows) = (projections.heads.len(), step.absorbed.num_rows() as usize);
        let (row, latent, value) = (widths.row() as usize, widths.latent() as usize, widths.value() as usize);
        grow(&mut self.queries, num_heads * num_rows * row);
        grow(&mut self.latents, num_heads * num_rows * latent);
        grow(&mut self.outputs, num_heads * num_rows * value);
        self.lse.resize(num_rows * num_heads, Lse::EMPTY);
        let isa = self.isa;
        self.packed.resize_with(num_heads.max(self.packed.len()), || PackedRows::new(isa));
        let pool = Arc::clone(self.attention.pool());
        pool.install(|| self.absorb(step, projections, widths, &q));
        let q = HostTensor::strided(&self.queries, [num_rows, num_heads, row], row, num_rows * row);
        let out = HostTensorMut::strided(&mut self.latents, [num_rows, num_heads, latent], latent, num_rows * latent);
        let io = Io {
            q: q.expect("as many elements as the shape has"),
            kv: Kv::Attend { cache },
            side: None,
            out: out.expect("as many elements as the shape has"),
            lse: Some(&mut self.lse[..num_rows * num_heads]),
        };
        let prepared = self.prepared.as_ref().expect("the step was prepared");
        self.attention.forward(prepared, layer, io)?;
        pool.install(|| self.project_values(step, projections, widths));
        let outputs = &self.outputs[..num_heads * num_rows * value];
        Ok(AbsorbedRows { outputs, lse: &self.lse[..num_rows * num_heads], num_rows })
    }

    /// `Ukᵀ q_nope` and `q_rope` side by side, for the rows of absorbed requests.
    fn absorb(&mut self, step: &Step, projections: &Projections, widths: MlaWidths, q: &HostTensor<'_>) {
        let (row, latent, nope) = (widths.row() as usize, widths.latent() as usize, widths.nope() as usize);
        let num_rows = step.absorbed.num_rows() as usize;
        if num_rows == 0 {
            return;
        }
        let heads = self.queries.par_chunks_mut(num_rows * row).zip(&mut self.packed).zip(&projections.heads);
        heads.enumerate().for_each(|(head, ((queries, packed), weights))| {
            for run in &step.runs {
                let queries = &mut queries[run.start * row..run.end * row];
                packed.pack(part(q, run.clone(), 0..nope), head);
                weights.absorb.multiply(packed, queries, row);
                let rope = part(q, run.clone(), nope..q.dim());
                for (i, query) in queries.chunks_exact_mut(row).enumerate() {
                    rope.read(i, head, &mut query[latent..]);
                }
            }
        });
    }

    /// `Uv` times the attention over the rows.
    fn project_values(&mut self, step: &Step, projections: &Projections, widths: MlaWidths) {
        let (latent, value) = (widths.latent() as usize, widths.value() as usize);
        let num_rows = step.absorbed.num_rows() as usize;
        if num_rows == 0 {
            return;
        }
        let heads = self.outputs.par_chunks_mut(num_rows * value).zip(self.latents.par_chunks(num_rows * latent));
        heads.zip(&mut self.packed).zip(&projections.heads).for_each(|(((outputs, latents), packed), weights)| {
            for run in &step.runs {
                let latents = &latents[run.start * latent..run.end * latent];
                let latents = HostTensor::packed(latents, [run.len(), 1, latent]).expect("rows of a head");
                packed.pack(latents, 0);
                weights.value.multiply(packed, &mut outputs[run.start * value..run.end * value], value);
            }
        });
    }
}

/// Makes room, with memory that the system may give when it is first touched: rows of expanded requests never are.
fn grow(buffer: &mut Vec<f32>, len: usize) {
    if buffer.len() < len {
        *buffer = vec![0.0; len];
    }
}

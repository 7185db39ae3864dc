//! Owns [`OracleBackend`]: the float64 oracle behind the backend trait, with every capability of the family and no
//! speed. It reads caches one vector at a time and computes one row at a time.

use std::sync::Arc;

use attn_metadata::plan::PlanReport;
use attn_metadata::{
    AttentionBackend, BackendConfig, BackendEntry, Batch, BatchLimits, Bucket, Capabilities, CaptureError,
    CaptureLimits, CreateError, DimRule, Feature, Host, Io, Lse, ModelSpec, PoolShape, PrepareError, Prepared, Request,
    Role, RunError, Side, SizeRule, Steps, check_batch, check_io,
};
use kvpool::{Dtype, HostKv, HostTensor, HostTensorMut, KvDtype, Slot, Values};

use super::layers::{SparseLayer, sparse_layers};
use super::step::{NotSelected, Numbered};
use crate::family::SPARSE;
use crate::oracle::{Oracle, Row, Scales, Sequence};
use crate::params::Limits;
use crate::store::{NewRows, store};

const NAME: &str = "sparse-oracle";

/// The registry's row: chosen by name alone.
#[must_use]
pub const fn entry() -> BackendEntry<Host> {
    BackendEntry {
        name: NAME,
        summary: "block-sparse in float64 from the formulas; slow, for checking",
        role: Role::Oracle,
        capabilities: |_| Ok(capabilities()),
        create: |config| Ok(Box::new(OracleBackend::new(config)?)),
    }
}

fn capabilities() -> Capabilities {
    let any = SizeRule::UpTo(u32::MAX);
    let features = [Feature::Lse, Feature::Extend, Feature::Graphs, Feature::ValuesInKeys, Feature::BatchInvariant];
    Capabilities {
        families: vec![SPARSE],
        q_dtypes: Dtype::ALL.to_vec(),
        kv_dtypes: KvDtype::ALL.to_vec(),
        head_dims: DimRule::Independent { qk: any.clone(), vo: any.clone() },
        group_sizes: any.clone(),
        page_sizes: any,
        features: features.into_iter().collect(),
    }
}

/// A row of the batch whose sets were computed: row, then the blocks of each KV head.
type RowSets = (usize, Vec<Vec<usize>>);

/// The oracle as a backend.
#[derive(Debug)]
pub struct OracleBackend {
    model: Arc<ModelSpec>,
    limits: BatchLimits,
    capabilities: Capabilities,
    layers: Vec<SparseLayer>,
    /// What each layer selected, and for which batch.
    selected: Vec<(u64, Vec<RowSets>)>,
    steps: Steps<Numbered>,
}

impl OracleBackend {
    /// An oracle for a model, all of whose layers are block-sparse.
    ///
    /// # Errors
    /// [`CreateError::Unsupported`] with every reason.
    pub fn new(config: &BackendConfig<Host>) -> Result<Self, CreateError> {
        let capabilities = capabilities();
        let checked = capabilities.supports_model(&config.model);
        checked.map_err(|reasons| CreateError::Unsupported { backend: NAME, reasons })?;
        let layers = sparse_layers(NAME, &config.model, &Limits::ORACLE)?;
        let pool = PoolShape { num_pages: 0, page_size: config.model.page_size() };
        Ok(Self {
            model: Arc::clone(&config.model),
            limits: config.limits,
            capabilities,
            selected: vec![(0, Vec::new()); layers.len()],
            layers,
            steps: Steps::new(Numbered::empty(pool, 0)),
        })
    }
}

impl AttentionBackend<Host> for OracleBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn model(&self) -> &ModelSpec {
        &self.model
    }

    fn prepare_metadata(&mut self, batch: &Batch) -> Result<Prepared, PrepareError> {
        check_batch(NAME, batch, &self.model, &self.limits, &self.capabilities)?;
        self.steps.prepare(batch, |kept| {
            kept.keep(batch, batch.num_rows());
            Ok(())
        })
    }

    fn forward(&mut self, step: &Prepared, layer: usize, mut io: Io<'_, Host>) -> Result<(), RunError> {
        let kept = self.steps.get(step)?;
        check_io(&self.model, step, layer, &io)?;
        let sparse = self.layers[layer];
        if !sparse.is_own(layer) && self.selected[sparse.source].0 != kept.serial {
            let error = NotSelected { layer, source_layer: sparse.source };
            return Err(RunError::Environment { backend: NAME, layer, source: Box::new(error) });
        }
        if let Some(mut main) = NewRows::of(&mut io.kv) {
            let mut side = io.side.as_mut().and_then(|side| NewRows::of(&mut side.kv));
            store(kept.slots(), &mut main, side.as_mut()).map_err(|source| RunError::Append { layer, source })?;
        }
        let spec = &self.model.layers()[layer];
        let scales = Scales { main: f64::from(spec.sm_scale()), index: f64::from(sparse.params.index_scale) };
        let oracle = Oracle { heads: spec.heads(), params: sparse.params, scales };
        let Io { q, kv, side, mut out, lse } = io;
        let (side_q, side_cache, mut side_out) = match &side {
            Some(Side { q, kv, .. }) => (Some(*q), Some(kv.cache()), None),
            None => (None, None, None::<HostTensorMut<'_>>),
        };
        let call = Call { kept, oracle, q, cache: kv.cache(), side: side_q.zip(side_cache) };
        let computed =
            if sparse.is_own(layer) { call.rows() } else { call.shared_rows(&self.selected[sparse.source].1) };
        if let Some(side) = side {
            side_out = side.out;
        }
        write(kept, &computed, &mut out, lse, side_out.as_mut());
        if sparse.is_own(layer) {
            let sets = computed.into_iter().map(|row| (row.row, row.sets)).collect();
            self.selected[layer] = (kept.serial, sets);
        }
        Ok(())
    }

    fn explain(&self, step: &Prepared) -> Result<PlanReport, RunError> {
        Ok(self.steps.get(step)?.report(NAME, &self.model))
    }

    fn init_capture_graph(&mut self, limits: &CaptureLimits) -> Result<(), CaptureError> {
        self.steps.init_capture(limits)
    }

    fn prepare_for_capture(&mut self, bucket: Bucket) -> Result<Prepared, CaptureError> {
        let page_size = self.model.page_size();
        self.steps.capture(bucket, |limits| {
            let pool = PoolShape { num_pages: limits.num_pool_pages, page_size };
            Ok(Numbered::empty(pool, bucket.num_rows))
        })
    }

    fn prepare_for_replay(&mut self, step: &mut Prepared, batch: &Batch) -> Result<(), CaptureError> {
        let Self { steps, model, capabilities, .. } = self;
        steps.replay(step, batch, |kept, bucket| {
            check_batch(NAME, batch, model, &BatchLimits::NONE, capabilities)?;
            kept.keep(batch, bucket.num_rows);
            Ok(())
        })
    }
}

/// One row's results.
struct Computed {
    row: usize,
    out: Vec<f64>,
    lse: Vec<f64>,
    index_out: Option<Vec<f64>>,
    sets: Vec<Vec<usize>>,
}

/// One call of the backend.
struct Call<'a> {
    kept: &'a Numbered,
    oracle: Oracle,
    q: HostTensor<'a>,
    cache: &'a HostKv,
    side: Option<(HostTensor<'a>, &'a HostKv)>,
}

/// KV of a request as real numbers.
struct Gathered {
    keys: Vec<f64>,
    values: Vec<f64>,
    index_keys: Vec<f64>,
    index_values: Option<Vec<f64>>,
}

impl Gathered {
    fn sequence(&self) -> Sequence<'_> {
        let Self { keys, values, index_keys, index_values } = self;
        Sequence { keys, values, index_keys, index_values: index_values.as_deref() }
    }
}

impl Call<'_> {
    /// Every row, by its own selection.
    fn rows(&self) -> Vec<Computed> {
        let mut computed = Vec::new();
        for request in self.kept.batch().requests() {
            let gathered = self.gather(request);
            for (row, visible) in rows(request) {
                let (q, index_q) = (read(&self.q, row), self.side.map(|(q, _)| read(&q, row)).unwrap_or_default());
                let result = self.oracle.row(&gathered.sequence(), &Row { visible, q: &q, index_q: &index_q });
                let (out, lse, index_out) = (result.out, result.lse, result.index_out);
                computed.push(Computed { row, out, lse, index_out, sets: result.by_kv_head });
            }
        }
        computed
    }

    /// Every row, by the selection of another layer.
    fn shared_rows(&self, selected: &[RowSets]) -> Vec<Computed> {
        let mut computed = Vec::new();
        for request in self.kept.batch().requests() {
            let gathered = self.gather(request);
            for (row, visible) in rows(request) {
                let (_, sets) = selected.iter().find(|(known, _)| *known == row).expect("a row of the same step");
                let q = read(&self.q, row);
                let (out, lse) = self.oracle.attend(&gathered.sequence(), &Row { visible, q: &q, index_q: &[] }, sets);
                computed.push(Computed { row, out, lse, index_out: None, sets: sets.clone() });
            }
        }
        computed
    }

    fn gather(&self, request: &Request) -> Gathered {
        let side = self.side.map(|(_, cache)| cache);
        let has_values = side.is_some_and(|cache| matches!(cache.spec().values, Values::Own(_)));
        Gathered {
            keys: self.plane(request, self.cache, false),
            values: self.plane(request, self.cache, true),
            index_keys: side.map(|cache| self.plane(request, cache, false)).unwrap_or_default(),
            index_values: side.filter(|_| has_values).map(|cache| self.plane(request, cache, true)),
        }
    }

    /// Keys or values of a request, in the order of positions, `[kv_len, heads, width]`.
    fn plane(&self, request: &Request, cache: &HostKv, is_values: bool) -> Vec<f64> {
        let (shape, page_size) = (cache.shape(), self.kept.batch().page_size());
        let width = if is_values { shape.head_dim_v } else { shape.head_dim_k };
        let mut vector = vec![0.0f32; width as usize];
        let mut all = Vec::new();
        for position in 0..request.kv_len {
            let page = self.kept.batch().page_of(request, position);
            let slot = Slot::new(page, position % page_size.get(), page_size).expect("a slot of the pool");
            for head in 0..shape.num_kv_heads {
                if is_values {
                    cache.read_v(slot, head, &mut vector);
                } else {
                    cache.read_k(slot, head, &mut vector);
                }
                all.extend(vector.iter().copied().map(f64::from));
            }
        }
        all
    }
}

/// The rows of a request, with the tokens that each sees.
fn rows(request: &Request) -> impl Iterator<Item = (usize, usize)> {
    (0..request.q_len).map(|row| {
        let visible = usize::try_from(request.position(row) + 1).unwrap_or(0);
        ((request.q_start + row) as usize, visible)
    })
}

/// A row of a tensor, `[heads, dim]`.
fn read(tensor: &HostTensor<'_>, row: usize) -> Vec<f64> {
    let mut vector = vec![0.0f32; tensor.dim()];
    let mut all = Vec::new();
    for head in 0..tensor.heads() {
        tensor.read(row, head, &mut vector);
        all.extend(vector.iter().copied().map(f64::from));
    }
    all
}

#[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is the point")]
const fn narrow(x: f64) -> f32 {
    x as f32
}

/// Writes the computed rows, and the padding rows where they are this batch's to write.
fn write(
    kept: &Numbered,
    computed: &[Computed],
    out: &mut HostTensorMut<'_>,
    mut lse: Option<&mut [Lse]>,
    mut side_out: Option<&mut HostTensorMut<'_>>,
) {
    let put = |out: &mut HostTensorMut<'_>, row: usize, values: &[f64]| {
        let dim = out.dim();
        for (head, vector) in values.chunks(dim).enumerate() {
            out.write(row, head, &vector.iter().map(|&x| narrow(x)).collect::<Vec<_>>());
        }
    };
    for row in computed {
        put(out, row.row, &row.out);
        if let Some(lse) = lse.as_deref_mut() {
            let begin = row.row * row.lse.len();
            lse[begin..].iter_mut().zip(&row.lse).for_each(|(to, &x)| *to = Lse::from_ln(narrow(x)));
        }
        if let (Some(side_out), Some(values)) = (side_out.as_deref_mut(), &row.index_out) {
            put(side_out, row.row, values);
        }
    }
    if kept.batch().writes_padding() {
        let heads = out.heads();
        for row in kept.batch().num_used_rows() as usize..kept.num_rows() {
            out.fill_row(row, 0.0);
            if let Some(lse) = lse.as_deref_mut() {
                lse[row * heads..(row + 1) * heads].fill(Lse::EMPTY);
            }
            if let Some(side_out) = side_out.as_deref_mut() {
                side_out.fill_row(row, 0.0);
            }
        }
    }
}

//! What every `forward` checks first: the tensors of a call against the model's layer and the step.

use kvpool::{KvDtype, KvSpec, Values};

use crate::error::RunError;
use crate::family::SideSpec;
use crate::model::ModelSpec;
use crate::space::{CacheFacts, Io, Kv, Side, Space, TensorFacts};
use crate::steps::Prepared;

/// Checks the tensors of a call against the model's layer and the step: what every `forward` does first.
///
/// # Errors
/// [`RunError`] for the first thing that does not fit.
pub fn check_io<S: Space>(model: &ModelSpec, step: &Prepared, layer: usize, io: &Io<'_, S>) -> Result<(), RunError> {
    let num_layers = model.layers().len();
    let spec = model.layers().get(layer).ok_or(RunError::NoSuchLayer { got: layer, num_layers })?;
    let check = Check { model, step, layer };
    let heads = spec.heads();
    check.tensor("q", S::tensor_facts(&io.q), heads.num_qo_heads, heads.head_dim_qk)?;
    check.tensor("out", S::tensor_mut_facts(&io.out), heads.num_qo_heads, heads.head_dim_vo)?;
    check.kv(&MAIN, &io.kv, &Stored { spec: spec.kv(), dtype: model.kv_dtype() })?;
    check.side(io.side.as_ref(), spec.side())?;
    let expected = step.num_rows() as usize * heads.num_qo_heads as usize;
    match io.lse.as_ref().map(S::lse_len) {
        Some(got) if got != expected => Err(RunError::LseLen { layer, expected, got }),
        _ => Ok(()),
    }
}

/// Checks the tensors of a call that writes new KV and attends to nothing: as [`check_io`], of the main branch.
///
/// # Errors
/// [`RunError`] for the first thing that does not fit.
pub fn check_store<S: Space>(model: &ModelSpec, step: &Prepared, layer: usize, kv: &Kv<'_, S>) -> Result<(), RunError> {
    let num_layers = model.layers().len();
    let spec = model.layers().get(layer).ok_or(RunError::NoSuchLayer { got: layer, num_layers })?;
    Check { model, step, layer }.kv(&MAIN, kv, &Stored { spec: spec.kv(), dtype: model.kv_dtype() })
}

/// What the tensors of a branch are called in messages.
struct Names {
    k: &'static str,
    v: &'static str,
    cache: &'static str,
}

/// What a branch stores.
struct Stored {
    spec: KvSpec,
    dtype: KvDtype,
}

const MAIN: Names = Names { k: "k", v: "v", cache: "cache" };
const SIDE: Names = Names { k: "side k", v: "side v", cache: "side cache" };

struct Check<'a> {
    model: &'a ModelSpec,
    step: &'a Prepared,
    layer: usize,
}

impl Check<'_> {
    fn tensor(&self, tensor: &'static str, facts: TensorFacts, num_heads: u32, dim: u32) -> Result<(), RunError> {
        let layer = self.layer;
        let expected = [self.step.num_rows() as usize, num_heads as usize, dim as usize];
        if facts.shape != expected {
            return Err(RunError::Shape { tensor, layer, expected, got: facts.shape });
        }
        if facts.dtype != self.model.q_dtype() {
            let (expected, got) = (self.model.q_dtype().name(), facts.dtype.name());
            return Err(RunError::Dtype { tensor, layer, expected, got });
        }
        Ok(())
    }

    /// One is given exactly where one is wanted.
    fn presence(&self, tensor: &'static str, is_given: bool, is_wanted: bool) -> Result<(), RunError> {
        let layer = self.layer;
        match (is_given, is_wanted) {
            (false, true) => Err(RunError::Missing { tensor, layer }),
            (true, false) => Err(RunError::Unwanted { tensor, layer }),
            _ => Ok(()),
        }
    }

    fn kv<S: Space>(&self, names: &Names, kv: &Kv<'_, S>, stored: &Stored) -> Result<(), RunError> {
        let spec = stored.spec;
        let cache = match kv {
            Kv::Attend { cache } => S::cache_facts(cache),
            Kv::Append { cache, k, v } => {
                self.tensor(names.k, S::tensor_facts(k), spec.num_kv_heads, spec.head_dim_k)?;
                self.presence(names.v, v.is_some(), matches!(spec.values, Values::Own(_)))?;
                if let Some(v) = v {
                    self.tensor(names.v, S::tensor_facts(v), spec.num_kv_heads, spec.values.head_dim())?;
                }
                S::cache_facts(&S::share_cache(cache))
            }
        };
        self.cache(names.cache, &cache, stored)?;
        if kv.appends() == self.step.appends() {
            return Ok(());
        }
        Err(RunError::AppendMismatch { layer: self.layer, batch_appends: self.step.appends() })
    }

    fn cache(&self, cache: &'static str, got: &CacheFacts, stored: &Stored) -> Result<(), RunError> {
        let layer = self.layer;
        if got.dtype != stored.dtype {
            let (expected, got) = (stored.dtype.name(), got.dtype.name());
            return Err(RunError::Dtype { tensor: cache, layer, expected, got });
        }
        if got.spec != stored.spec {
            return Err(RunError::CacheSpec { cache, layer, expected: stored.spec, got: got.spec });
        }
        let page_size = (self.model.page_size().get(), got.page_size.get());
        let pages = (self.step.num_pool_pages(), got.num_pages);
        let wrong_size = (page_size.0 != page_size.1).then_some(("tokens in a page", page_size));
        match wrong_size.or((pages.1 < pages.0).then_some(("pages", pages))) {
            Some((what, (expected, got))) => {
                Err(RunError::Cache { cache, layer, what, expected: expected.into(), got: got.into() })
            }
            None => Ok(()),
        }
    }

    fn side<S: Space>(&self, side: Option<&Side<'_, S>>, spec: Option<SideSpec>) -> Result<(), RunError> {
        self.presence("the side branch", side.is_some(), spec.is_some())?;
        let Some((side, spec)) = side.zip(spec) else { return Ok(()) };
        self.tensor("side q", S::tensor_facts(&side.q), spec.num_heads, spec.head_dim)?;
        self.kv(&SIDE, &side.kv, &Stored { spec: spec.kv, dtype: self.model.side_dtype() })?;
        self.presence("side out", side.out.is_some(), spec.out_dim.is_some())?;
        match (&side.out, spec.out_dim) {
            (Some(out), Some(dim)) => self.tensor("side out", S::tensor_mut_facts(out), spec.num_heads, dim),
            _ => Ok(()),
        }
    }
}

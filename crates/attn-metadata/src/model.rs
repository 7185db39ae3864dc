//! A model as attention sees it: its layers, the activations' dtype, the KV format's dtype and the page size.
//!
//! A backend is made for one [`ModelSpec`]; so every layer is checked against its capabilities once, constants are
//! uploaded once, and a step plans once for each [`PlanGroup`] instead of once a layer.

use kvpool::{Dtype, KvDtype, KvSpec, LatentRow, PageSize, Values};
use thiserror::Error;

use crate::capability::{Feature, FeatureSet, Requirements};
use crate::layer::{HeadShape, Layer};

/// What layers must have in common to share a plan: the shape of their work and the keys they can see.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PlanGroup {
    /// Head counts and widths.
    pub heads: HeadShape,
    /// What the layers keep of a token.
    pub kv: KvSpec,
    /// Whether the causal mask applies.
    pub causal: bool,
    /// The window, if any.
    pub window_left: Option<u32>,
}

impl PlanGroup {
    /// The group of plain layers with these heads and masks.
    #[must_use]
    pub const fn plain(heads: HeadShape, causal: bool, window_left: Option<u32>) -> Self {
        let HeadShape { num_kv_heads, head_dim_qk, head_dim_vo, .. } = heads;
        let kv = KvSpec { num_kv_heads, head_dim_k: head_dim_qk, values: Values::Own(head_dim_vo) };
        Self { heads, kv, causal, window_left }
    }

    /// The group of one layer.
    #[must_use]
    pub const fn of(layer: &Layer) -> Self {
        Self { heads: layer.heads(), kv: layer.kv(), causal: layer.is_causal(), window_left: layer.window_left() }
    }
}

/// A [`ModelSpec`] that cannot be.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ModelSpecError {
    /// No layer was given.
    #[error("a model needs at least one attention layer")]
    NoLayers,
    /// A layer's family cannot have pages of this size.
    #[error("layer {layer} ({family} attention): {why}")]
    PageSize {
        /// The layer.
        layer: usize,
        /// Its family.
        family: &'static str,
        /// The rule and the values.
        why: String,
    },
    /// What a layer keeps of a token cannot be stored so.
    #[error("layer {layer} cannot be stored as {dtype}: {why}")]
    KvDtype {
        /// The layer.
        layer: usize,
        /// Dtype of the stored KV.
        dtype: KvDtype,
        /// The rule and the values.
        why: String,
    },
}

/// The attention layers of a model and what they share. Immutable.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    layers: Vec<Layer>,
    q_dtype: Dtype,
    kv_dtype: KvDtype,
    side_dtype: KvDtype,
    page_size: PageSize,
    groups: Vec<PlanGroup>,
    group_of_layer: Vec<usize>,
}

impl ModelSpec {
    /// Describes a model.
    ///
    /// `q_dtype` is that of q, of the new k and v, and of out; `page_size` counts tokens.
    ///
    /// # Errors
    /// [`ModelSpecError::NoLayers`] where `layers` is empty, [`ModelSpecError::PageSize`] where a layer's family rules
    /// the page size out, [`ModelSpecError::KvDtype`] where a layer's KV does not fit `kv_dtype`.
    pub fn new(
        layers: Vec<Layer>,
        q_dtype: Dtype,
        kv_dtype: KvDtype,
        page_size: PageSize,
    ) -> Result<Self, ModelSpecError> {
        if layers.is_empty() {
            return Err(ModelSpecError::NoLayers);
        }
        for (layer, family) in layers.iter().enumerate().filter_map(|(i, l)| Some((i, l.family()?))) {
            let family_name = family.name();
            let checked = family.check_page_size(page_size);
            checked.map_err(|why| ModelSpecError::PageSize { layer, family: family_name, why })?;
        }
        for (layer, spec) in layers.iter().enumerate().map(|(i, layer)| (i, layer.kv())) {
            check_rows(&spec, kv_dtype).map_err(|why| ModelSpecError::KvDtype { layer, dtype: kv_dtype, why })?;
        }
        let mut groups: Vec<PlanGroup> = Vec::new();
        let mut group_of_layer = Vec::with_capacity(layers.len());
        for layer in &layers {
            let group = PlanGroup::of(layer);
            let known = groups.iter().position(|g| *g == group);
            group_of_layer.push(known.unwrap_or(groups.len()));
            if known.is_none() {
                groups.push(group);
            }
        }
        let side_dtype = if kv_dtype.is_scaled() { unscaled(q_dtype) } else { kv_dtype };
        Ok(Self { layers, q_dtype, kv_dtype, side_dtype, page_size, groups, group_of_layer })
    }

    /// The same model with another dtype in the caches of side branches.
    #[must_use]
    pub fn with_side_dtype(mut self, dtype: KvDtype) -> Self {
        self.side_dtype = dtype;
        self
    }

    /// Dtype stored for side branches: as [`kv_dtype`](Self::kv_dtype), but q's where that one is scaled, unless set.
    #[must_use]
    pub const fn side_dtype(&self) -> KvDtype {
        self.side_dtype
    }

    /// The model that consists of some of the layers, in the order given.
    ///
    /// # Errors
    /// [`ModelSpecError::NoLayers`] where none is given.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn subset(&self, layers: &[usize]) -> Result<Self, ModelSpecError> {
        let layers = layers.iter().map(|&layer| self.layers[layer].clone()).collect();
        Ok(Self::new(layers, self.q_dtype, self.kv_dtype, self.page_size)?.with_side_dtype(self.side_dtype))
    }

    /// The layers, in order.
    #[must_use]
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// Dtype of q, of the new k and v, and of out.
    #[must_use]
    pub const fn q_dtype(&self) -> Dtype {
        self.q_dtype
    }

    /// Dtype of the stored KV.
    #[must_use]
    pub const fn kv_dtype(&self) -> KvDtype {
        self.kv_dtype
    }

    /// Tokens in a page.
    #[must_use]
    pub const fn page_size(&self) -> PageSize {
        self.page_size
    }

    /// The distinct plan groups, in order of first use.
    #[must_use]
    pub fn groups(&self) -> &[PlanGroup] {
        &self.groups
    }

    /// Index into [`groups`](Self::groups) of a layer's group; `None` where there is no such layer.
    #[must_use]
    pub fn group_of(&self, layer: usize) -> Option<usize> {
        self.group_of_layer.get(layer).copied()
    }

    /// What running a layer asks of a backend.
    #[must_use]
    pub fn requirements(&self, layer: &Layer) -> Requirements {
        let mut features = FeatureSet::default();
        features.set(Feature::Full, !layer.is_causal());
        features.set(Feature::Window, layer.window_left().is_some());
        features.set(Feature::Softcap, layer.softcap().is_some());
        features.set(Feature::Sinks, layer.sinks().is_some());
        features.set(Feature::Alibi, layer.alibi_slopes().is_some());
        features.set(Feature::ValuesInKeys, matches!(layer.kv().values, Values::InKeys(_)));
        Requirements {
            family: layer.family_name(),
            heads: layer.heads(),
            q_dtype: self.q_dtype,
            kv_dtype: self.kv_dtype,
            page_size: self.page_size,
            features,
        }
    }
}

/// Latent rows hold their values in the keys, and come in certain widths.
fn check_rows(spec: &KvSpec, dtype: KvDtype) -> Result<(), String> {
    match (dtype, spec.values) {
        (KvDtype::Fp8Latent, Values::InKeys(width)) => {
            LatentRow::of_widths(spec.head_dim_k, width).map(|_| ()).map_err(|error| error.to_string())
        }
        (KvDtype::Fp8Latent, Values::Own(_) | Values::None) => {
            Err(format!("a latent row holds its values, not {spec}"))
        }
        _ => Ok(()),
    }
}

/// The cache dtype that stores activations as they are.
const fn unscaled(dtype: Dtype) -> KvDtype {
    match dtype {
        Dtype::F32 => KvDtype::F32,
        Dtype::F16 => KvDtype::F16,
        Dtype::Bf16 => KvDtype::Bf16,
    }
}

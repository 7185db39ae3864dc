//! A model as attention sees it: its layers, the activations' dtype, the KV format's dtype and the page size.
//!
//! A backend is made for one [`ModelSpec`]; so every layer is checked against its capabilities once, constants are
//! uploaded once, and a step plans once for each [`PlanGroup`] instead of once a layer.

use kvpool::{Dtype, KvDtype, PageSize};
use thiserror::Error;

use crate::capability::{Feature, FeatureSet, Requirements};
use crate::layer::{HeadShape, Layer};

/// What layers must have in common to share a plan: the shape of their work and the keys they can see.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PlanGroup {
    /// Head counts and widths.
    pub heads: HeadShape,
    /// Whether the causal mask applies.
    pub causal: bool,
    /// The window, if any.
    pub window_left: Option<u32>,
}

impl PlanGroup {
    /// The group of one layer.
    #[must_use]
    pub const fn of(layer: &Layer) -> Self {
        Self { heads: layer.heads(), causal: layer.is_causal(), window_left: layer.window_left() }
    }
}

/// A [`ModelSpec`] that cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ModelSpecError {
    /// No layer was given.
    #[error("a model needs at least one attention layer")]
    NoLayers,
}

/// The attention layers of a model and what they share. Immutable.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    layers: Vec<Layer>,
    q_dtype: Dtype,
    kv_dtype: KvDtype,
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
    /// [`ModelSpecError::NoLayers`] where `layers` is empty.
    pub fn new(
        layers: Vec<Layer>,
        q_dtype: Dtype,
        kv_dtype: KvDtype,
        page_size: PageSize,
    ) -> Result<Self, ModelSpecError> {
        if layers.is_empty() {
            return Err(ModelSpecError::NoLayers);
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
        Ok(Self { layers, q_dtype, kv_dtype, page_size, groups, group_of_layer })
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
        Requirements {
            heads: layer.heads(),
            q_dtype: self.q_dtype,
            kv_dtype: self.kv_dtype,
            page_size: self.page_size,
            features,
        }
    }
}

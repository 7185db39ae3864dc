//! Owns [`SparseFamily`]: block-sparse attention as the waist carries it.

use std::any::Any;

use attn_metadata::{Family, FamilyRef, HeadShape, Layer, LayerError, LayerParams, SideSpec};
use kvpool::{KvSpec, PageSize, Values};

use crate::params::{Limits, SparseParams, Violations};

/// The family's name.
pub const SPARSE: &str = "sparse";

/// Where a layer's selection comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SelectionSource {
    /// Its own index branch.
    Own,
    /// The nearest layer before it that has a selection of its own, in the same step. The layer has no index branch.
    Shared,
}

/// Block-sparse attention with its parameters for one layer.
///
/// The side branch is the index: queries `[rows, num_index_heads, index_dim]`, keys `[rows, 1, index_dim]`, perhaps
/// values of the same shape, and then an output `[rows, num_index_heads, index_dim]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SparseFamily {
    params: SparseParams,
    source: SelectionSource,
}

impl SparseFamily {
    /// A layer with an index branch of its own.
    ///
    /// # Errors
    /// [`Violations`]: every rule that is broken.
    pub fn new(params: SparseParams, heads: &HeadShape) -> Result<Self, Violations> {
        params.check(heads, &Limits::ORACLE)?;
        Ok(Self { params, source: SelectionSource::Own })
    }

    /// A layer that uses the selection of the nearest indexed layer before it: `params` are that layer's.
    ///
    /// # Errors
    /// [`Violations`]: every rule that is broken.
    pub fn shared(params: SparseParams, heads: &HeadShape) -> Result<Self, Violations> {
        params.check(heads, &Limits::ORACLE)?;
        let params = SparseParams { has_index_value: false, ..params };
        Ok(Self { params, source: SelectionSource::Shared })
    }

    /// A causal layer of this family with `sm_scale = 1/√head_dim_qk`.
    ///
    /// # Errors
    /// [`LayerError`].
    pub fn layer(self, heads: HeadShape) -> Result<Layer, LayerError> {
        Layer::new(LayerParams { family: Some(FamilyRef::new(self)), ..LayerParams::causal(heads) })
    }

    /// The parameters.
    #[must_use]
    pub const fn params(&self) -> &SparseParams {
        &self.params
    }

    /// Where the selection comes from.
    #[must_use]
    pub const fn source(&self) -> SelectionSource {
        self.source
    }
}

impl Family for SparseFamily {
    fn name(&self) -> &'static str {
        SPARSE
    }

    fn side(&self) -> Option<SideSpec> {
        let dim = self.params.index_dim;
        let has_value = self.params.has_index_value;
        let values = if has_value { Values::Own(dim) } else { Values::None };
        (self.source == SelectionSource::Own).then_some(SideSpec {
            num_heads: self.params.num_index_heads,
            head_dim: dim,
            kv: KvSpec { num_kv_heads: 1, head_dim_k: dim, values },
            out_dim: has_value.then_some(dim),
        })
    }

    fn check(&self, layer: &LayerParams) -> Result<(), String> {
        self.params.check(&layer.heads, &Limits::ORACLE).map_err(|violations| violations.to_string())?;
        if !layer.causal {
            return Err("a row's blocks end at its own position: the layer must be causal".to_owned());
        }
        if layer.window_left.is_some() {
            return Err("blocks are selected over the whole context: there can be no window".to_owned());
        }
        Ok(())
    }

    fn check_page_size(&self, page_size: PageSize) -> Result<(), String> {
        self.params.check_page_size(page_size).map_err(|constraint| constraint.to_string())
    }

    fn same(&self, other: &dyn Family) -> bool {
        (other as &dyn Any).downcast_ref::<Self>() == Some(self)
    }
}

//! What makes a layer more than plain attention: [`Family`], written by the crate that knows it.
//!
//! The waist carries a family without knowing it: what the layer keeps of a token, and the side branch that it may
//! have, are data; the rest is between the family's crate and the backends that name it in their capabilities.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use kvpool::{KvSpec, PageSize};

use crate::layer::LayerParams;

/// The name of plain attention in [`Capabilities::families`](crate::Capabilities::families).
pub const PLAIN: &str = "plain";

/// A side branch of a layer: queries and a cache of its own, on the same pages and slots as the layer's KV, and
/// perhaps an output. Block-sparse attention finds its blocks with one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SideSpec {
    /// Query heads, ≥ 1.
    pub num_heads: u32,
    /// Width of a query, ≥ 1.
    pub head_dim: u32,
    /// What its cache keeps of a token.
    pub kv: KvSpec,
    /// Width of a head of its output `[rows, num_heads, out_dim]`; `None`: it has none.
    pub out_dim: Option<u32>,
}

/// A kind of attention that plain backends do not know, with its parameters for one layer. Immutable.
///
/// Implementors validate themselves when they are made; [`check`](Self::check) is for what only the layer knows.
pub trait Family: Any + fmt::Debug + Send + Sync {
    /// Lower case, distinct among families.
    fn name(&self) -> &'static str;

    /// What the layer keeps of a token. Usually what a plain layer would.
    fn kv(&self, params: &LayerParams) -> KvSpec {
        params.plain_kv()
    }

    /// The side branch, if there is one.
    fn side(&self) -> Option<SideSpec> {
        None
    }

    /// Whether it can be the family of a layer with these parameters.
    ///
    /// # Errors
    /// What does not fit.
    fn check(&self, params: &LayerParams) -> Result<(), String>;

    /// Whether pages of this size are possible.
    ///
    /// # Errors
    /// The rule and the values.
    fn check_page_size(&self, page_size: PageSize) -> Result<(), String> {
        let _ = page_size;
        Ok(())
    }

    /// Whether another family is the same with the same parameters.
    fn same(&self, other: &dyn Family) -> bool;
}

/// A layer's family, shared.
#[derive(Clone, Debug)]
pub struct FamilyRef(Arc<dyn Family>);

impl FamilyRef {
    /// Shares a family.
    #[must_use]
    pub fn new(family: impl Family) -> Self {
        Self(Arc::new(family))
    }

    /// The family, where it is a `T`.
    #[must_use]
    pub fn downcast_ref<T: Family>(&self) -> Option<&T> {
        (&*self.0 as &dyn Any).downcast_ref()
    }
}

impl std::ops::Deref for FamilyRef {
    type Target = dyn Family;

    fn deref(&self) -> &dyn Family {
        &*self.0
    }
}

impl PartialEq for FamilyRef {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.0.same(&*other.0)
    }
}

//! Owns the storing of a layer's new rows: keys and values into the main cache, index keys and perhaps index values into
//! the side cache, on the same slots, before anything is scored.
//!
//! Invariant: all or nothing. Everything is checked against both caches before either is written.

use attn_metadata::{Host, Kv};
use kvpool::{AppendError, HostKv, HostTensor, Slot};

/// New rows of one cache.
#[derive(Debug)]
pub struct NewRows<'a, 'b> {
    /// The cache.
    pub cache: &'a mut HostKv,
    /// Keys `[rows, num_kv_heads, head_dim_k]`.
    pub k: HostTensor<'b>,
    /// Values `[rows, num_kv_heads, head_dim_v]`, where the cache has values of their own.
    pub v: Option<HostTensor<'b>>,
}

impl<'a, 'b> NewRows<'a, 'b> {
    /// The new rows of a call, if it appends.
    pub fn of(kv: &'a mut Kv<'b, Host>) -> Option<Self> {
        match kv {
            Kv::Attend { .. } => None,
            Kv::Append { cache, k, v } => Some(NewRows { cache, k: *k, v: *v }),
        }
    }
}

/// Writes the new rows of a layer to the same slots of both caches. Rows of padding slots write nothing.
///
/// # Errors
/// [`AppendError`]; neither cache was written then.
pub fn store(
    slots: &[Slot],
    main: &mut NewRows<'_, '_>,
    side: Option<&mut NewRows<'_, '_>>,
) -> Result<(), AppendError> {
    main.cache.check_append(slots, &main.k, main.v.as_ref())?;
    if let Some(side) = side {
        side.cache.append(slots, &side.k, side.v.as_ref())?;
    }
    main.cache.append(slots, &main.k, main.v.as_ref())
}

//! Owns the storing of a layer's new rows: keys and values into the main cache, index keys and perhaps index values into
//! the side cache, on the same slots, before anything is scored.
//!
//! Invariant: all or nothing. Everything is checked against both caches before either is written.

use attn_metadata::{Host, Kv};
use kvpool::{AppendError, HostKv, HostTensor, Slot, Values};

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

    fn check(&self, slots: &[Slot]) -> Result<(), AppendError> {
        let shape = self.cache.shape();
        let fits = |part, tensor: &HostTensor<'_>, dim: u32| {
            let expected = [slots.len(), shape.num_kv_heads as usize, dim as usize];
            let got = tensor.shape();
            if got == expected { Ok(()) } else { Err(AppendError::Shape { part, got, expected }) }
        };
        fits(kvpool::KvPart::K, &self.k, shape.head_dim_k)?;
        match (&self.v, self.cache.spec().values) {
            (Some(v), Values::Own(dim)) => fits(kvpool::KvPart::V, v, dim)?,
            (None, Values::Own(_)) => return Err(AppendError::MissingValues),
            (Some(_), _) => return Err(AppendError::UnwantedValues),
            (None, _) => {}
        }
        let num_slots = shape.num_slots();
        let is_legal = |slot: &Slot| slot.is_padding() || slot.index().is_some_and(|index| (index as u64) < num_slots);
        match slots.iter().position(|slot| !is_legal(slot)) {
            Some(row) => Err(AppendError::SlotOutOfRange { row, slot: slots[row].raw(), num_slots }),
            None => Ok(()),
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
    main.check(slots)?;
    if let Some(side) = side {
        side.check(slots)?;
        side.cache.append(slots, &side.k, side.v.as_ref())?;
    }
    main.cache.append(slots, &main.k, main.v.as_ref())
}

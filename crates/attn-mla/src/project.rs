//! Owns [`Projections`]: the weights of a layer, packed for the three products that latent attention has.

use attn_reference::cpu::{Isa, PackedWeights};
use rayon::prelude::*;

use crate::MlaWeights;

/// The packed weights of one head.
pub(crate) struct HeadProjections {
    /// `Ukᵀ` `[latent, nope]`: queries to absorbed queries.
    pub(crate) absorb: PackedWeights,
    /// `Uk` `[nope, latent]`: rows to keys.
    pub(crate) key: PackedWeights,
    /// `Uv` `[value, latent]`: rows to values, and absorbed outputs to outputs.
    pub(crate) value: PackedWeights,
}

/// The packed weights of a layer, head by head.
pub(crate) struct Projections {
    pub(crate) heads: Vec<HeadProjections>,
}

impl Projections {
    /// Packs them. Call it inside the thread pool that is to be used.
    pub(crate) fn new(isa: Isa, weights: &MlaWeights) -> Projections {
        let widths = weights.widths();
        let (latent, nope, value) = (widths.latent() as usize, widths.nope() as usize, widths.value() as usize);
        let pack = |head| {
            let (keys, values) = (weights.key_rows(head), weights.value_rows(head));
            HeadProjections {
                absorb: PackedWeights::new(isa, latent, nope, |c, i| keys[i * latent + c]),
                key: PackedWeights::new(isa, nope, latent, |i, c| keys[i * latent + c]),
                value: PackedWeights::new(isa, value, latent, |i, c| values[i * latent + c]),
            }
        };
        Projections { heads: (0..weights.num_heads()).into_par_iter().map(pack).collect() }
    }
}

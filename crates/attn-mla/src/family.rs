//! Owns [`MlaFamily`]: latent attention with its weights, as the family of a layer; and the parameters of layers.

use std::any::Any;

use attn_metadata::{Family, FamilyRef, HeadShape, LayerParams};
use kvpool::{KvSpec, Values};

use crate::{MlaError, MlaWeights, MlaWidths, Scale};

/// The name of the family.
pub const FAMILY: &str = "mla";

/// Latent attention with its weights.
///
/// Its layer takes queries `[rows, num_heads, nope + rope]`, gives outputs `[rows, num_heads, value]` and keeps one row
/// of `latent + rope` a token. RoPE is applied outside, to the last `rope` columns of queries and rows.
#[derive(Debug, Clone, PartialEq)]
pub struct MlaFamily {
    weights: MlaWeights,
}

impl MlaFamily {
    /// The family of layers with these weights.
    #[must_use]
    pub const fn new(weights: MlaWeights) -> MlaFamily {
        MlaFamily { weights }
    }

    /// The weights.
    #[must_use]
    pub const fn weights(&self) -> &MlaWeights {
        &self.weights
    }

    /// A causal layer of this family.
    #[must_use]
    pub fn layer_params(self, scale: Scale) -> LayerParams {
        let heads = self.weights.widths().heads(self.weights.num_heads());
        LayerParams { sm_scale: scale.get(), family: Some(FamilyRef::new(self)), ..LayerParams::causal(heads) }
    }

    fn check_params(&self, params: &LayerParams) -> Result<(), MlaError> {
        let expected = self.weights.widths().heads(self.weights.num_heads());
        let HeadShape { num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo } = expected;
        let got = params.heads;
        let fields = [
            ("num_qo_heads", num_qo_heads, got.num_qo_heads),
            ("num_kv_heads", num_kv_heads, got.num_kv_heads),
            ("head_dim_qk", head_dim_qk, got.head_dim_qk),
            ("head_dim_vo", head_dim_vo, got.head_dim_vo),
        ];
        if let Some((what, expected, got)) = fields.into_iter().find(|(_, expected, got)| expected != got) {
            return Err(MlaError::LayerShape { what, expected, got });
        }
        if params.values_in_keys {
            return Err(MlaError::ValuesInKeys);
        }
        Scale::checked(self.weights.widths(), params.sm_scale).map(|_| ())
    }
}

impl Family for MlaFamily {
    fn name(&self) -> &'static str {
        FAMILY
    }

    fn kv(&self, _: &LayerParams) -> KvSpec {
        let widths = self.weights.widths();
        KvSpec { num_kv_heads: 1, head_dim_k: widths.row(), values: Values::InKeys(widths.latent()) }
    }

    fn check(&self, params: &LayerParams) -> Result<(), String> {
        self.check_params(params).map_err(|error| error.to_string())
    }

    fn same(&self, other: &dyn Family) -> bool {
        (other as &dyn Any).downcast_ref::<MlaFamily>().is_some_and(|other| other == self)
    }
}

/// A causal layer of already absorbed queries `[rows, num_heads, latent + rope]` and outputs `[rows, num_heads, latent]`:
/// plain attention to a latent cache, for those who apply the weights themselves.
#[must_use]
pub fn absorbed_params(widths: MlaWidths, num_heads: u32, scale: Scale) -> LayerParams {
    let heads = widths.absorbed_heads(num_heads);
    LayerParams { sm_scale: scale.get(), values_in_keys: true, ..LayerParams::causal(heads) }
}

#[cfg(test)]
mod tests {
    use attn_metadata::{Layer, LayerError};

    use super::*;

    fn family(num_heads: u32) -> MlaFamily {
        let widths = MlaWidths::new(8, 2, 3, 5).unwrap();
        MlaFamily::new(MlaWeights::new(widths, num_heads, &vec![0.5; num_heads as usize * 64]).unwrap())
    }

    fn params() -> LayerParams {
        let family = family(4);
        let scale = Scale::of(family.weights().widths());
        family.layer_params(scale)
    }

    #[test]
    fn a_layer_keeps_one_latent_row_for_all_heads() {
        let layer = Layer::new(params()).unwrap();
        assert_eq!(layer.kv(), KvSpec { num_kv_heads: 1, head_dim_k: 10, values: Values::InKeys(8) });
        assert_eq!((layer.heads().head_dim_qk, layer.heads().head_dim_vo), (5, 5));
        assert_eq!(layer.family_name(), "mla");
        assert_eq!(layer.family_as::<MlaFamily>().unwrap().weights().num_heads(), 4);
    }

    #[test]
    fn layers_that_do_not_fit_the_weights_are_refused() {
        let refused = |params: LayerParams| match Layer::new(params).unwrap_err() {
            LayerError::Family { family: "mla", why } => why,
            other => panic!("{other}"),
        };
        let heads = params().heads;
        let with = |heads| refused(LayerParams { heads, ..params() });
        assert_eq!(with(HeadShape { num_qo_heads: 8, ..heads }), "num_qo_heads is 8, the weights are for 4");
        assert_eq!(with(HeadShape { head_dim_qk: 10, ..heads }), "head_dim_qk is 10, the weights are for 5");
        assert_eq!(with(HeadShape { head_dim_vo: 8, ..heads }), "head_dim_vo is 8, the weights are for 5");
        assert_eq!(with(HeadShape { num_kv_heads: 2, ..heads }), "num_kv_heads is 2, the weights are for 1");
        let why = refused(LayerParams { sm_scale: 1.0 / 10f32.sqrt(), ..params() });
        assert!(why.contains("of an absorbed width"), "{why}");
        refused(LayerParams { values_in_keys: true, ..params() });
    }

    #[test]
    fn families_are_equal_by_their_weights() {
        let (a, b) = (FamilyRef::new(family(4)), FamilyRef::new(family(4)));
        assert_eq!(a, b);
        assert_ne!(a, FamilyRef::new(family(2)));
    }

    #[test]
    fn absorbed_layers_are_plain_layers_over_a_latent_cache() {
        let layer = Layer::new(absorbed_params(MlaWidths::DEEPSEEK, 16, Scale::of(MlaWidths::DEEPSEEK))).unwrap();
        assert_eq!(layer.kv(), KvSpec { num_kv_heads: 1, head_dim_k: 576, values: Values::InKeys(512) });
        assert!((layer.sm_scale() - 1.0 / 192f32.sqrt()).abs() < 1e-7);
        assert_eq!(layer.family_name(), attn_metadata::PLAIN);
    }
}

//! What one attention layer computes: head shape, scale, masks, softcap, sinks, ALiBi.
//!
//! A [`Layer`] is validated when it is made and cannot change, so backends read it without checks and may keep
//! what they derive from it (device copies of sinks, say) for their lifetime.

use std::fmt;

use kvpool::{KvSpec, Values};
use thiserror::Error;

use crate::family::{Family, FamilyRef, PLAIN, SideSpec};

/// Head counts and widths of one layer, as q and out have them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HeadShape {
    /// Query (and output) heads, ≥ 1.
    pub num_qo_heads: u32,
    /// Key and value heads, ≥ 1; divides `num_qo_heads`.
    pub num_kv_heads: u32,
    /// Width of a query and of a key, in elements.
    pub head_dim_qk: u32,
    /// Width of a value and of an output row, in elements.
    pub head_dim_vo: u32,
}

impl HeadShape {
    /// The usual shape: queries, keys and values of one width.
    #[must_use]
    pub const fn new(num_qo_heads: u32, num_kv_heads: u32, head_dim: u32) -> Self {
        Self { num_qo_heads, num_kv_heads, head_dim_qk: head_dim, head_dim_vo: head_dim }
    }

    /// Query heads that share one KV head (any integer ≥ 1).
    #[must_use]
    pub const fn group_size(&self) -> u32 {
        self.num_qo_heads / self.num_kv_heads
    }
}

impl fmt::Display for HeadShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} query heads, {} KV heads, dim {}", self.num_qo_heads, self.num_kv_heads, self.head_dim_qk)?;
        if self.head_dim_vo != self.head_dim_qk {
            write!(f, "/{}", self.head_dim_vo)?;
        }
        Ok(())
    }
}

/// The parameters of a layer, before validation. Formulas: [`conventions`](crate::conventions).
#[derive(Clone, Debug, PartialEq)]
pub struct LayerParams {
    /// Head counts and widths.
    pub heads: HeadShape,
    /// Multiplier of q·k; finite and > 0.
    pub sm_scale: f32,
    /// Whether a query sees only keys at or before its position (bottom-right aligned).
    pub causal: bool,
    /// Tokens before itself that a query sees; `None`: no limit.
    pub window_left: Option<u32>,
    /// `c` in `c·tanh(s/c)`; finite and > 0; `None`: off.
    pub softcap: Option<f32>,
    /// One logit a query head, added to the denominator only. Finite or −inf (no sink). `[num_qo_heads]`.
    pub sinks: Option<Vec<f32>>,
    /// ALiBi slopes, finite. `[num_qo_heads]`.
    pub alibi_slopes: Option<Vec<f32>>,
    /// Whether a value is the first `head_dim_vo` columns of its key, so that only keys are stored.
    pub values_in_keys: bool,
    /// What the layer is beyond plain attention.
    pub family: Option<FamilyRef>,
}

impl LayerParams {
    /// A causal layer with `sm_scale = 1/√head_dim_qk` and nothing else.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "head widths are far below 2^24")]
    pub fn causal(heads: HeadShape) -> Self {
        Self {
            heads,
            sm_scale: 1.0 / (heads.head_dim_qk as f32).sqrt(),
            causal: true,
            window_left: None,
            softcap: None,
            sinks: None,
            alibi_slopes: None,
            values_in_keys: false,
            family: None,
        }
    }

    /// What a plain layer of these heads keeps of a token.
    #[must_use]
    pub const fn plain_kv(&self) -> KvSpec {
        let HeadShape { num_kv_heads, head_dim_qk, head_dim_vo, .. } = self.heads;
        let values = if self.values_in_keys { Values::InKeys(head_dim_vo) } else { Values::Own(head_dim_vo) };
        KvSpec { num_kv_heads, head_dim_k: head_dim_qk, values }
    }
}

/// A rule that the parameters of a layer break.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum LayerError {
    /// A head count or width is 0.
    #[error("{field} is 0, at least 1 is needed")]
    Zero {
        /// Which field.
        field: &'static str,
    },
    /// The query heads cannot be shared out evenly.
    #[error("{num_qo_heads} query heads are not divisible by {num_kv_heads} KV heads")]
    HeadsNotDivisible {
        /// Query heads given.
        num_qo_heads: u32,
        /// KV heads given.
        num_kv_heads: u32,
    },
    /// A scalar is NaN, infinite, zero or negative where it must be positive.
    #[error("{field} is {got}, a finite number above 0 is needed")]
    NotPositive {
        /// Which field.
        field: &'static str,
        /// The value given.
        got: f32,
    },
    /// A per-head array has the wrong length.
    #[error("{field} has {got} values, one for each of {expected} query heads is needed")]
    PerHeadLen {
        /// Which array.
        field: &'static str,
        /// Query heads.
        expected: u32,
        /// Values given.
        got: usize,
    },
    /// A per-head value is NaN or infinite where it must not be.
    #[error("{field} of query head {head} is {got}, {needed} is needed")]
    PerHeadValue {
        /// Which array.
        field: &'static str,
        /// Query head.
        head: usize,
        /// The value given.
        got: f32,
        /// What is accepted.
        needed: &'static str,
    },
    /// Values that are columns of the keys do not fit into them.
    #[error("values of {value_dim} elements cannot be columns of keys of {key_dim}")]
    ValuesWiderThanKeys {
        /// Width of a value.
        value_dim: u32,
        /// Width of a key.
        key_dim: u32,
    },
    /// The family does not go with the layer.
    #[error("{family} attention: {why}")]
    Family {
        /// The family.
        family: &'static str,
        /// What does not fit.
        why: String,
    },
}

/// One attention layer: validated, immutable.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    params: LayerParams,
    kv: KvSpec,
    side: Option<SideSpec>,
}

impl Layer {
    /// Checks the parameters.
    ///
    /// # Errors
    /// The first broken rule, see [`LayerError`].
    pub fn new(params: LayerParams) -> Result<Self, LayerError> {
        check_heads(&params.heads)?;
        check_positive("sm_scale", params.sm_scale)?;
        if let Some(c) = params.softcap {
            check_positive("softcap", c)?;
        }
        let heads = params.heads.num_qo_heads;
        check_per_head("sinks", params.sinks.as_deref(), heads, "a finite number or −inf", |s| {
            s.is_finite() || s == f32::NEG_INFINITY
        })?;
        check_per_head("alibi_slopes", params.alibi_slopes.as_deref(), heads, "a finite number", f32::is_finite)?;
        if let Some(family) = &params.family {
            family.check(&params).map_err(|why| LayerError::Family { family: family.name(), why })?;
        }
        let kv = params.family.as_ref().map_or(params.plain_kv(), |family| family.kv(&params));
        let side = params.family.as_ref().and_then(|family| family.side());
        check_kv(&kv)?;
        if let Some(side) = &side {
            check_side(side)?;
        }
        Ok(Self { params, kv, side })
    }

    /// What the layer keeps of a token.
    #[must_use]
    pub const fn kv(&self) -> KvSpec {
        self.kv
    }

    /// The side branch, if the layer has one.
    #[must_use]
    pub const fn side(&self) -> Option<SideSpec> {
        self.side
    }

    /// What the layer is beyond plain attention, if anything.
    #[must_use]
    pub fn family(&self) -> Option<&dyn Family> {
        self.params.family.as_deref()
    }

    /// The name of the layer's family, or [`PLAIN`].
    #[must_use]
    pub fn family_name(&self) -> &'static str {
        self.family().map_or(PLAIN, Family::name)
    }

    /// The layer's family, where it is a `T`.
    #[must_use]
    pub fn family_as<T: Family>(&self) -> Option<&T> {
        self.params.family.as_ref()?.downcast_ref()
    }

    /// Head counts and widths.
    #[must_use]
    pub const fn heads(&self) -> HeadShape {
        self.params.heads
    }

    /// Multiplier of q·k.
    #[must_use]
    pub const fn sm_scale(&self) -> f32 {
        self.params.sm_scale
    }

    /// Whether the causal mask applies.
    #[must_use]
    pub const fn is_causal(&self) -> bool {
        self.params.causal
    }

    /// Earlier tokens that a query sees besides itself; `None`: all.
    #[must_use]
    pub const fn window_left(&self) -> Option<u32> {
        self.params.window_left
    }

    /// The soft cap of the scores, if any.
    #[must_use]
    pub const fn softcap(&self) -> Option<f32> {
        self.params.softcap
    }

    /// Sink logits `[num_qo_heads]`, if any.
    #[must_use]
    pub fn sinks(&self) -> Option<&[f32]> {
        self.params.sinks.as_deref()
    }

    /// ALiBi slopes `[num_qo_heads]`, if any.
    #[must_use]
    pub fn alibi_slopes(&self) -> Option<&[f32]> {
        self.params.alibi_slopes.as_deref()
    }

    /// The parameters as given.
    #[must_use]
    pub const fn params(&self) -> &LayerParams {
        &self.params
    }
}

fn check_heads(heads: &HeadShape) -> Result<(), LayerError> {
    let fields = [
        ("num_qo_heads", heads.num_qo_heads),
        ("num_kv_heads", heads.num_kv_heads),
        ("head_dim_qk", heads.head_dim_qk),
        ("head_dim_vo", heads.head_dim_vo),
    ];
    check_not_zero(&fields)?;
    if !heads.num_qo_heads.is_multiple_of(heads.num_kv_heads) {
        let HeadShape { num_qo_heads, num_kv_heads, .. } = *heads;
        return Err(LayerError::HeadsNotDivisible { num_qo_heads, num_kv_heads });
    }
    Ok(())
}

fn check_not_zero(fields: &[(&'static str, u32)]) -> Result<(), LayerError> {
    match fields.iter().find(|(_, n)| *n == 0) {
        Some((field, _)) => Err(LayerError::Zero { field }),
        None => Ok(()),
    }
}

fn check_kv(kv: &KvSpec) -> Result<(), LayerError> {
    let KvSpec { num_kv_heads, head_dim_k, values } = *kv;
    check_not_zero(&[("num_kv_heads", num_kv_heads), ("head_dim_k", head_dim_k)])?;
    match values {
        Values::InKeys(value_dim) if value_dim > head_dim_k => {
            Err(LayerError::ValuesWiderThanKeys { value_dim, key_dim: head_dim_k })
        }
        Values::Own(dim) | Values::InKeys(dim) => check_not_zero(&[("head_dim_v", dim)]),
        Values::None => Ok(()),
    }
}

fn check_side(side: &SideSpec) -> Result<(), LayerError> {
    let out_dim = side.out_dim.unwrap_or(1);
    check_not_zero(&[
        ("num_heads of the side branch", side.num_heads),
        ("head_dim of the side branch", side.head_dim),
        ("out_dim of the side branch", out_dim),
    ])?;
    check_kv(&side.kv)
}

fn check_positive(field: &'static str, got: f32) -> Result<(), LayerError> {
    if got.is_finite() && got > 0.0 { Ok(()) } else { Err(LayerError::NotPositive { field, got }) }
}

fn check_per_head(
    field: &'static str,
    values: Option<&[f32]>,
    expected: u32,
    needed: &'static str,
    accepts: impl Fn(f32) -> bool,
) -> Result<(), LayerError> {
    let Some(values) = values else { return Ok(()) };
    if values.len() != expected as usize {
        return Err(LayerError::PerHeadLen { field, expected, got: values.len() });
    }
    match values.iter().position(|&v| !accepts(v)) {
        Some(head) => Err(LayerError::PerHeadValue { field, head, got: values[head], needed }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn base() -> LayerParams {
        LayerParams::causal(HeadShape::new(4, 2, 16))
    }

    fn check(edit: impl FnOnce(&mut LayerParams), expected: &LayerError) {
        let mut params = base();
        edit(&mut params);
        assert_eq!(Layer::new(params).unwrap_err().to_string(), expected.to_string());
    }

    #[test]
    fn each_broken_rule_is_named() {
        check(|p| p.heads.head_dim_vo = 0, &LayerError::Zero { field: "head_dim_vo" });
        check(|p| p.heads.num_kv_heads = 3, &LayerError::HeadsNotDivisible { num_qo_heads: 4, num_kv_heads: 3 });
        for got in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            check(|p| p.sm_scale = got, &LayerError::NotPositive { field: "sm_scale", got });
            check(|p| p.softcap = Some(got), &LayerError::NotPositive { field: "softcap", got });
        }
        check(|p| p.sinks = Some(vec![0.0; 3]), &LayerError::PerHeadLen { field: "sinks", expected: 4, got: 3 });
        let needed = "a finite number or −inf";
        let sinks = vec![0.0, f32::NEG_INFINITY, f32::INFINITY, 0.0];
        let got = f32::INFINITY;
        check(|p| p.sinks = Some(sinks), &LayerError::PerHeadValue { field: "sinks", head: 2, got, needed });
        let slopes = vec![0.0, 0.0, 0.0, f32::NEG_INFINITY];
        let expected = LayerError::PerHeadValue {
            field: "alibi_slopes",
            head: 3,
            got: f32::NEG_INFINITY,
            needed: "a finite number",
        };
        check(|p| p.alibi_slopes = Some(slopes), &expected);
    }

    #[test]
    fn values_can_be_columns_of_keys() {
        let mut params = LayerParams { values_in_keys: true, ..base() };
        params.heads = HeadShape { head_dim_qk: 16, head_dim_vo: 12, ..params.heads };
        let expected = KvSpec { num_kv_heads: 2, head_dim_k: 16, values: Values::InKeys(12) };
        assert_eq!(Layer::new(params.clone()).unwrap().kv(), expected);
        params.heads.head_dim_vo = 17;
        let error = LayerError::ValuesWiderThanKeys { value_dim: 17, key_dim: 16 };
        assert_eq!(Layer::new(params), Err(error));
    }

    #[test]
    fn a_sink_of_minus_infinity_is_accepted() {
        let params = LayerParams { sinks: Some(vec![f32::NEG_INFINITY; 4]), ..base() };
        assert!(Layer::new(params).is_ok());
    }
}

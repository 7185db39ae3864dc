//! What a backend can do, what a layer asks for, and the reasons why the two do not meet.

use std::fmt;

use kvpool::{Dtype, KvDtype, PageSize};

use crate::layer::HeadShape;
use crate::model::ModelSpec;

/// Something beyond plain causal attention that a backend may or may not do, or promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Feature {
    /// Attention without the causal mask.
    Full,
    /// `window_left`.
    Window,
    /// Softcap of the scores.
    Softcap,
    /// Sinks in the denominator.
    Sinks,
    /// ALiBi slopes.
    Alibi,
    /// Packed custom (tree) masks.
    CustomMask,
    /// Writing the LSE.
    Lse,
    /// Requests with more than one query token.
    Extend,
    /// The capture and replay hooks.
    Graphs,
    /// Values that are columns of the keys: latent caches.
    ValuesInKeys,
    /// A request's bits depend on nothing but the request: not on its batch-mates, nor on the number of workers. No layer
    /// asks for it; who wants it looks for it here.
    BatchInvariant,
}

impl Feature {
    /// Every feature, in display order.
    pub const ALL: [Self; 11] = [
        Self::Full,
        Self::Window,
        Self::Softcap,
        Self::Sinks,
        Self::Alibi,
        Self::CustomMask,
        Self::Lse,
        Self::Extend,
        Self::Graphs,
        Self::ValuesInKeys,
        Self::BatchInvariant,
    ];

    /// Short name for tables and messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Window => "window",
            Self::Softcap => "softcap",
            Self::Sinks => "sinks",
            Self::Alibi => "alibi",
            Self::CustomMask => "custom mask",
            Self::Lse => "lse",
            Self::Extend => "extend",
            Self::Graphs => "graphs",
            Self::ValuesInKeys => "values in keys",
            Self::BatchInvariant => "batch invariant",
        }
    }
}

/// A set of [`Feature`]s.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct FeatureSet(u16);

impl FeatureSet {
    /// Every feature.
    #[must_use]
    pub fn all() -> Self {
        Feature::ALL.into_iter().collect()
    }

    /// Adds or removes a feature.
    pub fn set(&mut self, feature: Feature, on: bool) {
        let bit = 1 << feature as u8;
        self.0 = if on { self.0 | bit } else { self.0 & !bit };
    }

    /// Whether a feature is in the set.
    #[must_use]
    pub const fn contains(self, feature: Feature) -> bool {
        self.0 & (1 << feature as u8) != 0
    }

    /// The features, in display order.
    pub fn iter(self) -> impl Iterator<Item = Feature> {
        Feature::ALL.into_iter().filter(move |f| self.contains(*f))
    }
}

impl FromIterator<Feature> for FeatureSet {
    fn from_iter<I: IntoIterator<Item = Feature>>(features: I) -> Self {
        let mut set = Self::default();
        features.into_iter().for_each(|f| set.set(f, true));
        set
    }
}

impl fmt::Debug for FeatureSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

/// Which sizes are supported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SizeRule {
    /// Every size from 1 to the given one.
    UpTo(u32),
    /// Just these sizes.
    OneOf(Vec<u32>),
    /// Multiples of a size, up to a bound (inclusive).
    MultipleOf {
        /// The unit, ≥ 1.
        unit: u32,
        /// The largest supported size.
        up_to: u32,
    },
}

impl SizeRule {
    /// Whether a size is supported.
    #[must_use]
    pub fn accepts(&self, size: u32) -> bool {
        match self {
            Self::UpTo(max) => (1..=*max).contains(&size),
            Self::OneOf(sizes) => sizes.contains(&size),
            Self::MultipleOf { unit, up_to } => size != 0 && size.is_multiple_of(*unit) && size <= *up_to,
        }
    }
}

impl fmt::Display for SizeRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UpTo(u32::MAX) => f.write_str("any"),
            Self::UpTo(max) => write!(f, "1 to {max}"),
            Self::OneOf(sizes) => {
                let sizes: Vec<_> = sizes.iter().map(u32::to_string).collect();
                f.write_str(&sizes.join(", "))
            }
            Self::MultipleOf { unit, up_to } => write!(f, "multiples of {unit} up to {up_to}"),
        }
    }
}

/// Which pairs of head widths (`head_dim_qk`, `head_dim_vo`) are supported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DimRule {
    /// The two widths are independent.
    Independent {
        /// Widths of queries and keys.
        qk: SizeRule,
        /// Widths of values and outputs.
        vo: SizeRule,
    },
    /// Just these pairs.
    Pairs(Vec<(u32, u32)>),
}

impl DimRule {
    /// Whether a pair of widths is supported.
    #[must_use]
    pub fn accepts(&self, heads: &HeadShape) -> bool {
        match self {
            Self::Independent { qk, vo } => qk.accepts(heads.head_dim_qk) && vo.accepts(heads.head_dim_vo),
            Self::Pairs(pairs) => pairs.contains(&(heads.head_dim_qk, heads.head_dim_vo)),
        }
    }
}

impl fmt::Display for DimRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Independent { qk, vo } if qk == vo => write!(f, "{qk}"),
            Self::Independent { qk, vo } => write!(f, "qk {qk}; vo {vo}"),
            Self::Pairs(pairs) => {
                let pairs: Vec<_> = pairs.iter().map(|(a, b)| format!("{a}/{b}")).collect();
                f.write_str(&pairs.join(", "))
            }
        }
    }
}

/// What one layer of a model asks of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Requirements {
    /// Name of the family, or [`PLAIN`](crate::PLAIN).
    pub family: &'static str,
    /// Head counts and widths.
    pub heads: HeadShape,
    /// Dtype of q, new k and v, and out.
    pub q_dtype: Dtype,
    /// Dtype of the stored KV.
    pub kv_dtype: KvDtype,
    /// Tokens in a page.
    pub page_size: PageSize,
    /// Features needed.
    pub features: FeatureSet,
}

/// Why a backend cannot run something.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// The family of attention is not supported.
    Family {
        /// What was asked.
        got: &'static str,
        /// What there is.
        supported: Vec<&'static str>,
    },
    /// The dtype of q is not supported.
    QDtype {
        /// What was asked.
        got: Dtype,
        /// What there is.
        supported: Vec<Dtype>,
    },
    /// The dtype of the stored KV is not supported.
    KvDtype {
        /// What was asked.
        got: KvDtype,
        /// What there is.
        supported: Vec<KvDtype>,
    },
    /// The head widths are not supported.
    HeadDim {
        /// Asked width of queries and keys.
        qk: u32,
        /// Asked width of values and outputs.
        vo: u32,
        /// What there is.
        supported: DimRule,
    },
    /// The number of query heads on a KV head is not supported.
    GroupSize {
        /// What was asked.
        got: u32,
        /// What there is.
        supported: SizeRule,
    },
    /// The page size is not supported.
    PageSize {
        /// What was asked.
        got: u32,
        /// What there is.
        supported: SizeRule,
    },
    /// A feature is missing.
    Missing(Feature),
    /// The backend cannot run on this machine.
    Unavailable {
        /// What is missing and what to do.
        why: String,
    },
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Family { got, supported } => {
                write!(f, "{got} attention is not among {}", supported.join(", "))
            }
            Self::QDtype { got, supported } => {
                write!(f, "q dtype {got} is not among {}", list(supported))
            }
            Self::KvDtype { got, supported } => write!(f, "KV dtype {got} is not among {}", list(supported)),
            Self::HeadDim { qk, vo, supported } => {
                write!(f, "head dims qk {qk}, vo {vo} are not supported (there is: {supported})")
            }
            Self::GroupSize { got, supported } => {
                write!(f, "group size {got} is not supported (there is: {supported})")
            }
            Self::PageSize { got, supported } => write!(f, "page size {got} is not supported (there is: {supported})"),
            Self::Missing(feature) => write!(f, "no support for {}", feature.name()),
            Self::Unavailable { why } => f.write_str(why),
        }
    }
}

fn list<T: fmt::Display>(items: &[T]) -> String {
    items.iter().map(T::to_string).collect::<Vec<_>>().join(", ")
}

/// What a backend can do. Data, so that it can be printed, compared and tested.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Families of attention, by name; [`PLAIN`](crate::PLAIN) for the plain one.
    pub families: Vec<&'static str>,
    /// Dtypes of q, new k and v, and out.
    pub q_dtypes: Vec<Dtype>,
    /// Dtypes of the stored KV.
    pub kv_dtypes: Vec<KvDtype>,
    /// Head widths.
    pub head_dims: DimRule,
    /// Query heads on one KV head.
    pub group_sizes: SizeRule,
    /// Tokens in a page.
    pub page_sizes: SizeRule,
    /// Everything beyond plain causal attention.
    pub features: FeatureSet,
}

impl Capabilities {
    /// Whether one layer can be run.
    ///
    /// # Errors
    /// Every reason why not; never an empty list.
    pub fn supports(&self, asked: &Requirements) -> Result<(), Vec<Reason>> {
        let mut reasons = Vec::new();
        if !self.families.contains(&asked.family) {
            reasons.push(Reason::Family { got: asked.family, supported: self.families.clone() });
        }
        if !self.q_dtypes.contains(&asked.q_dtype) {
            reasons.push(Reason::QDtype { got: asked.q_dtype, supported: self.q_dtypes.clone() });
        }
        if !self.kv_dtypes.contains(&asked.kv_dtype) {
            reasons.push(Reason::KvDtype { got: asked.kv_dtype, supported: self.kv_dtypes.clone() });
        }
        let heads = asked.heads;
        if !self.head_dims.accepts(&heads) {
            let (qk, vo) = (heads.head_dim_qk, heads.head_dim_vo);
            reasons.push(Reason::HeadDim { qk, vo, supported: self.head_dims.clone() });
        }
        if !self.group_sizes.accepts(heads.group_size()) {
            reasons.push(Reason::GroupSize { got: heads.group_size(), supported: self.group_sizes.clone() });
        }
        let page_size = asked.page_size.get();
        if !self.page_sizes.accepts(page_size) {
            reasons.push(Reason::PageSize { got: page_size, supported: self.page_sizes.clone() });
        }
        let missing = asked.features.iter().filter(|f| !self.features.contains(*f));
        reasons.extend(missing.map(Reason::Missing));
        if reasons.is_empty() { Ok(()) } else { Err(reasons) }
    }

    /// Whether every layer of a model can be run.
    ///
    /// # Errors
    /// Every distinct reason over all layers; never an empty list.
    pub fn supports_model(&self, model: &ModelSpec) -> Result<(), Vec<Reason>> {
        let mut reasons: Vec<Reason> = Vec::new();
        for layer in model.layers() {
            let Err(new) = self.supports(&model.requirements(layer)) else { continue };
            for reason in new {
                if !reasons.contains(&reason) {
                    reasons.push(reason);
                }
            }
        }
        if reasons.is_empty() { Ok(()) } else { Err(reasons) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::family::PLAIN;

    fn narrow() -> Capabilities {
        Capabilities {
            families: vec![PLAIN],
            q_dtypes: vec![Dtype::Bf16],
            kv_dtypes: vec![KvDtype::Bf16],
            head_dims: DimRule::Pairs(vec![(128, 128)]),
            group_sizes: SizeRule::OneOf(vec![1, 2, 4, 8]),
            page_sizes: SizeRule::MultipleOf { unit: 16, up_to: 256 },
            features: [Feature::Window].into_iter().collect(),
        }
    }

    #[test]
    fn every_reason_is_listed_at_once() {
        let asked = Requirements {
            family: "mla",
            heads: HeadShape::new(6, 2, 64),
            q_dtype: Dtype::F32,
            kv_dtype: KvDtype::Fp8E4m3,
            page_size: PageSize::new(8).unwrap(),
            features: [Feature::Window, Feature::Sinks, Feature::Full].into_iter().collect(),
        };
        let reasons = narrow().supports(&asked).unwrap_err();
        let text: Vec<_> = reasons.iter().map(Reason::to_string).collect();
        assert_eq!(
            text,
            [
                "mla attention is not among plain",
                "q dtype f32 is not among bf16",
                "KV dtype fp8_e4m3 is not among bf16",
                "head dims qk 64, vo 64 are not supported (there is: 128/128)",
                "group size 3 is not supported (there is: 1, 2, 4, 8)",
                "page size 8 is not supported (there is: multiples of 16 up to 256)",
                "no support for full",
                "no support for sinks",
            ]
        );
    }

    #[test]
    fn what_is_supported_has_no_reasons() {
        let asked = Requirements {
            family: PLAIN,
            heads: HeadShape::new(8, 2, 128),
            q_dtype: Dtype::Bf16,
            kv_dtype: KvDtype::Bf16,
            page_size: PageSize::new(32).unwrap(),
            features: [Feature::Window].into_iter().collect(),
        };
        assert_eq!(narrow().supports(&asked), Ok(()));
    }
}

//! Owns [`Case`]: one attention problem as data. Everything about it follows from its fields, so that a failure is
//! reproduced from the one line that it prints. What the values are: [`crate::harness`]; the line: `Display` and
//! `FromStr`, in `text.rs`.

use std::fmt;
use std::sync::Arc;

use attn_metadata::{FamilyRef, HeadShape, Layer, LayerParams, ModelSpec, Requirements};
use kvpool::{Dtype, KvDtype, KvFormat, KvScales, PageSize, Values};
use serde::{Deserialize, Serialize};

macro_rules! named_enum {
    ($(#[$meta:meta])* $name:ident: $($(#[$doc:meta])* $variant:ident = $text:literal),+ $(,)?) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name { $($(#[$doc])* $variant),+ }

        impl $name {
            /// Every value.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The name in a case's line.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }

            /// The value of a name.
            #[must_use]
            pub fn of_name(name: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|x| x.name() == name)
            }
        }
    };
}

named_enum! {
    /// Where K and V lie in the cache's buffer.
    Layout:
    /// `[pages, page_size, heads, dim]`, all of K before all of V.
    Nhd = "nhd",
    /// `[pages, heads, page_size, dim]`, all of K before all of V.
    Hnd = "hnd",
    /// NHD, K and V of a page next to each other.
    InterleavedNhd = "inhd",
    /// HND, K and V of a page next to each other.
    InterleavedHnd = "ihnd",
    /// NHD with gaps after each vector, token and page.
    Padded = "padded",
}

named_enum! {
    /// Which pages of the pool the requests have.
    Table:
    /// In order from page 0 on: paged is contiguous.
    Identity = "identity",
    /// Anywhere.
    Permuted = "permuted",
    /// The last ones of a larger pool, in descending order.
    Top = "top",
}

named_enum! {
    /// The sinks of the query heads.
    Sinks:
    /// None.
    None = "none",
    /// All −inf: as if there were none.
    NegInf = "neginf",
    /// All 0.
    Zero = "zero",
    /// All 5.
    Five = "five",
    /// −inf, 0, 5, −3 in turn.
    Mixed = "mixed",
}

named_enum! {
    /// What values the tensors hold.
    Data:
    /// Normal.
    Normal = "normal",
    /// Logits up to about ±60.
    Large = "large",
    /// Logits of ±1e5: a finite stand-in for −inf would show.
    Huge = "huge",
    /// Every 37th key outweighs the others.
    Dominant = "dominant",
    /// All keys alike, all values alike.
    Equal = "equal",
    /// Keys and values grow with their position.
    Ramp = "ramp",
    /// V is 1 in the column of the position modulo the width, else 0.
    OneHot = "onehot",
    /// As `OneHot`, with q = 0: all visible keys count alike, so the output says which they are.
    Probe = "probe",
    /// V (and half of the keys) are subnormal in the cache's dtype.
    Subnormal = "subnormal",
}

/// One request's lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestShape {
    /// Query tokens.
    pub q_len: u32,
    /// KV tokens, those appended in this step included.
    pub kv_len: u32,
}

/// A family of attention for the cases of a suite: see [`Suite::family`](crate::Suite::family).
#[derive(Clone, Copy)]
pub struct CaseFamily {
    /// Its name.
    pub name: &'static str,
    /// Brings a drawn case into a form that the family has: head counts, widths, page size, features.
    pub adapt: fn(&mut Case),
    /// The family of a case's layer, a function of the case alone.
    pub make: fn(&Case) -> FamilyRef,
}

impl fmt::Debug for CaseFamily {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl PartialEq for CaseFamily {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

/// One attention problem. Two cases that differ only in how things are stored (`page_size`, `layout`, `table`) have
/// the same values, unless `shared` is set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Case {
    /// The requests, in batch order.
    pub requests: Vec<RequestShape>,
    /// Rows of q after those of the requests.
    pub padding_rows: u32,
    /// Head counts and widths.
    pub heads: HeadShape,
    /// Dtype of q, new k and v, and out.
    pub q_dtype: Dtype,
    /// Dtype of the cache.
    pub kv_dtype: KvDtype,
    /// Scales of K and V, where the dtype has some; that of K for both where the values are in the keys.
    pub scales: (f32, f32),
    /// Whether the values are the first columns of the keys.
    pub values_in_keys: bool,
    /// The family, if the layer is not plain.
    pub family: Option<CaseFamily>,
    /// Tokens in a page.
    pub page_size: u32,
    /// Where K and V lie.
    pub layout: Layout,
    /// Which pages are used.
    pub table: Table,
    /// Whether the requests share their first whole pages.
    pub shared: bool,
    /// Causal or full.
    pub causal: bool,
    /// `window_left`.
    pub window: Option<u32>,
    /// Whether there is a custom mask (30 % of the bits 0, every fifth row all 0).
    pub custom: bool,
    /// Softcap.
    pub softcap: Option<f32>,
    /// Sinks.
    pub sinks: Sinks,
    /// Whether there are ALiBi slopes.
    pub alibi: bool,
    /// Whether the step appends its tokens; otherwise their KV is in the cache already.
    pub append: bool,
    /// What values.
    pub data: Data,
    /// Seed of the values.
    pub seed: u64,
}

impl Default for Case {
    /// One decode of 5 tokens, in f32, causal, two heads.
    fn default() -> Self {
        Self {
            requests: vec![RequestShape { q_len: 1, kv_len: 5 }],
            padding_rows: 0,
            heads: HeadShape::new(2, 1, 64),
            q_dtype: Dtype::F32,
            kv_dtype: KvDtype::F32,
            scales: (0.5, 2.0),
            values_in_keys: false,
            family: None,
            page_size: 16,
            layout: Layout::Nhd,
            table: Table::Permuted,
            shared: false,
            causal: true,
            window: None,
            custom: false,
            softcap: None,
            sinks: Sinks::None,
            alibi: false,
            append: true,
            data: Data::Normal,
            seed: 1,
        }
    }
}

impl Case {
    /// Why the case cannot be, if so.
    ///
    /// # Errors
    /// The first thing that is wrong with it.
    pub fn validate(&self) -> Result<(), String> {
        let layer = Layer::new(self.layer_params()).map_err(|error| error.to_string())?;
        let page_size = PageSize::new(self.page_size).map_err(|error| error.to_string())?;
        let model = ModelSpec::new(vec![layer], self.q_dtype, self.kv_dtype, page_size);
        model.map_err(|error| error.to_string())?;
        KvScales::new(self.scales.0, self.scales.1).map_err(|error| error.to_string())?;
        match self.requests.iter().position(|r| self.append && r.q_len > r.kv_len) {
            Some(request) => Err(format!("request {request} appends more tokens than its kv_len")),
            None => Ok(()),
        }
    }

    /// Tokens of a request that are in the cache before the step.
    #[must_use]
    pub const fn cached_len(&self, request: &RequestShape) -> u32 {
        if self.append { request.kv_len - request.q_len } else { request.kv_len }
    }

    /// Rows of the requests.
    #[must_use]
    pub fn num_used_rows(&self) -> u32 {
        self.requests.iter().map(|r| r.q_len).sum()
    }

    /// Longest `kv_len`.
    #[must_use]
    pub fn max_kv_len(&self) -> u32 {
        self.requests.iter().map(|r| r.kv_len).max().unwrap_or(0)
    }

    /// Multiplications that the oracle does, about.
    #[must_use]
    pub fn work(&self) -> u64 {
        let pairs: u64 = self.requests.iter().map(|r| u64::from(r.q_len) * u64::from(r.kv_len)).sum();
        let loads: u64 = self.requests.iter().map(|r| u64::from(r.kv_len)).sum();
        let width = u64::from(self.heads.head_dim_qk + self.heads.head_dim_vo);
        (pairs * u64::from(self.heads.num_qo_heads) + loads * u64::from(self.heads.num_kv_heads)) * width
    }

    /// The cache's format.
    #[must_use]
    pub fn format(&self) -> KvFormat {
        match self.kv_dtype {
            KvDtype::F32 => KvFormat::F32,
            KvDtype::Fp8Latent => KvFormat::Fp8Latent,
            KvDtype::F16 => KvFormat::F16,
            KvDtype::Bf16 => KvFormat::Bf16,
            KvDtype::Fp8E4m3 => {
                let (k, own_v) = self.scales;
                let v = if matches!(self.layer().kv().values, Values::InKeys(_)) { k } else { own_v };
                KvFormat::Fp8E4m3(KvScales::new(k, v).expect("the case was validated"))
            }
        }
    }

    /// The format of a side branch's cache: the dtype that the model stores there, unscaled.
    #[must_use]
    pub fn side_format(&self) -> KvFormat {
        match self.model(vec![self.layer()]).side_dtype() {
            KvDtype::F32 => KvFormat::F32,
            KvDtype::Fp8Latent => KvFormat::Fp8Latent,
            KvDtype::F16 => KvFormat::F16,
            KvDtype::Bf16 => KvFormat::Bf16,
            KvDtype::Fp8E4m3 => KvFormat::Fp8E4m3(KvScales::new(1.0, 1.0).expect("1 is a scale")),
        }
    }

    /// The layer's parameters. The scale is not `1/√dim`, so that one who derives it is found out.
    #[must_use]
    pub fn layer_params(&self) -> LayerParams {
        let usual = LayerParams::causal(self.heads);
        let head_values =
            |values: &[f32]| values.iter().copied().cycle().take(self.heads.num_qo_heads as usize).collect();
        let sinks: Option<&[f32]> = match self.sinks {
            Sinks::None => None,
            Sinks::NegInf => Some(&[f32::NEG_INFINITY]),
            Sinks::Zero => Some(&[0.0]),
            Sinks::Five => Some(&[5.0]),
            Sinks::Mixed => Some(&[f32::NEG_INFINITY, 0.0, 5.0, -3.0]),
        };
        LayerParams {
            sm_scale: 0.7 * usual.sm_scale,
            causal: self.causal,
            window_left: self.window,
            softcap: self.softcap,
            sinks: sinks.map(head_values),
            alibi_slopes: self.alibi.then(|| head_values(&[0.5, 0.25, 0.125, 0.062_5, 0.031_25])),
            values_in_keys: self.values_in_keys,
            family: self.family.map(|family| (family.make)(self)),
            ..usual
        }
    }

    /// The layer.
    ///
    /// # Panics
    /// If the case is not valid.
    #[must_use]
    pub fn layer(&self) -> Layer {
        Layer::new(self.layer_params()).expect("the case was validated")
    }

    /// A model of these layers in the case's dtypes and page size.
    ///
    /// # Panics
    /// If the case is not valid or there is no layer.
    #[must_use]
    pub fn model(&self, layers: Vec<Layer>) -> Arc<ModelSpec> {
        let page_size = PageSize::new(self.page_size).expect("the case was validated");
        let model = ModelSpec::new(layers, self.q_dtype, self.kv_dtype, page_size);
        Arc::new(model.expect("a case has a layer"))
    }

    /// What the case's layer asks of a backend.
    #[must_use]
    pub fn requirements(&self) -> Requirements {
        let model = self.model(vec![self.layer()]);
        model.requirements(&model.layers()[0])
    }
}

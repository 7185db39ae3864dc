//! Owns the choice of entry points: which kernels run a layer, out of the table that the build wrote.

use attn_metadata::{Feature, Layer, ModelSpec, Reason};
use kvpool::{Dtype, KvDtype};

use crate::device::ModuleSource;
use crate::images::ENTRIES;

/// The element types of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    F32,
    F16,
    Bf16,
    Fp8,
}

impl Element {
    /// Of activations.
    pub(crate) const fn of(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::F16 => Self::F16,
            Dtype::Bf16 => Self::Bf16,
        }
    }

    /// Of stored KV; `None` for rows that no kernel reads.
    pub(crate) const fn of_kv(dtype: KvDtype) -> Option<Self> {
        match dtype {
            KvDtype::F32 => Some(Self::F32),
            KvDtype::F16 => Some(Self::F16),
            KvDtype::Bf16 => Some(Self::Bf16),
            KvDtype::Fp8E4m3 => Some(Self::Fp8),
            KvDtype::Fp8Latent => None,
        }
    }
}

/// One entry point, as its list in `kernels/` has it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    /// Its images.
    pub(crate) module: &'static ModuleSource,
    /// Images of the flavour that checks tables.
    pub(crate) checked: &'static ModuleSource,
    /// Its name in them.
    pub(crate) name: &'static str,
    /// Element type of q and out.
    pub(crate) q: Element,
    /// Element type of the stored KV.
    pub(crate) kv: Element,
    /// Width of queries and keys; 0: any.
    pub(crate) head_dim_qk: u32,
    /// Width of values and outputs; 0: any.
    pub(crate) head_dim_vo: u32,
    /// Whether it does softcap, ALiBi and custom masks.
    pub(crate) is_general: bool,
    /// Threads of a block.
    pub(crate) threads: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub(crate) shared_bytes: u32,
    /// Blocks that a multiprocessor should hold.
    pub(crate) blocks_per_sm: u32,
    /// Query rows (tokens × group) that it holds at once; 0: any.
    pub(crate) rows: u32,
}

/// File name of the kernels that take tensor maps.
const MAPPED: &str = "extend_sm90";

impl Entry {
    /// Whether it has a place for this many rows.
    const fn holds(&self, rows: u32) -> bool {
        self.rows == 0 || rows <= self.rows
    }

    /// Whether it takes tensor maps besides what all take.
    pub(crate) fn takes_maps(&self) -> bool {
        self.module.name == MAPPED
    }
}

/// Which kernels a backend may choose from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Families {
    /// All that the GPU runs.
    All,
    /// Those for every GPU from compute capability 8.0 on, also where a GPU has faster ones of its own.
    Portable,
    /// The kernel for any shape alone.
    Plain,
}

impl Families {
    /// File names of the kernels for requests that extend, the fast ones first.
    const fn extend(self) -> &'static [&'static str] {
        match self {
            Self::All => &[MAPPED, "extend"],
            Self::Portable => &["extend"],
            Self::Plain => &[],
        }
    }

    /// File names of the kernels for requests that decode.
    const fn decode(self) -> &'static [&'static str] {
        match self {
            Self::All => &["decode_sm90", "decode"],
            Self::Portable => &["decode"],
            Self::Plain => &[],
        }
    }
}

/// What a GPU gives kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Compute capability.
    pub(crate) capability: (i32, i32),
    /// Shared memory of a block, in bytes.
    pub(crate) shared_bytes: u32,
}

/// Widest head of the kernel that takes any.
pub(crate) const MAX_HEAD_DIM: u32 = 512;
/// Head widths are multiples of this: rows of every dtype can then be read in vectors.
pub(crate) const HEAD_DIM_UNIT: u32 = 16;

/// The kernels of one layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LayerKernels {
    /// For requests whose queries fit its rows; `None`: all go to `extend`.
    pub(crate) decode: Option<Pair>,
    /// For all other requests.
    pub(crate) extend: Pair,
    /// Writes new KV.
    pub(crate) store: &'static Entry,
    /// Merges partial states.
    pub(crate) merge: &'static Entry,
}

/// Shared memory that the system takes of each block; a multiprocessor has so much more than one block may have.
const RESERVED_SHARED_BYTES: u32 = 1024;

/// An entry point for batches without and with a custom mask.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pair {
    pub(crate) plain: &'static Entry,
    pub(crate) masked: &'static Entry,
}

impl Pair {
    /// The one for a batch.
    pub(crate) const fn of(&self, has_mask: bool) -> &'static Entry {
        if has_mask { self.masked } else { self.plain }
    }

    /// Query rows that both hold at once; `u32::MAX`: any number.
    pub(crate) fn rows(&self) -> u32 {
        let rows = |entry: &Entry| if entry.rows == 0 { u32::MAX } else { entry.rows };
        rows(self.plain).min(rows(self.masked))
    }

    /// Blocks of a grid for each multiprocessor: those that the kernel without a mask, which is the one to be fast, was made
    /// for, or fewer where shared memory holds fewer: others would begin when these have ended. `max_shared_bytes`: of a
    /// block.
    pub(crate) fn blocks_per_sm(&self, max_shared_bytes: u32) -> u32 {
        let of_sm = max_shared_bytes + RESERVED_SHARED_BYTES;
        let that_fit = of_sm / (self.plain.shared_bytes + RESERVED_SHARED_BYTES);
        self.plain.blocks_per_sm.min(that_fit).max(1)
    }

    /// Name of the kernel file.
    pub(crate) const fn family(&self) -> &'static str {
        self.plain.module.name
    }
}

/// Chooses the kernels of a layer, the fast ones first.
///
/// # Errors
/// Every reason why there is none.
pub(crate) fn kernels_of(
    model: &ModelSpec,
    layer: &Layer,
    limits: &Limits,
    families: Families,
) -> Result<LayerKernels, Vec<Reason>> {
    let (q, kv) = (Element::of(model.q_dtype()), Element::of_kv(model.kv_dtype()));
    let heads = layer.heads();
    let needs_general = layer.softcap().is_some() || layer.alibi_slopes().is_some();
    let find = |family: &str, is_general: bool, rows: u32| {
        let fits = |entry: &&Entry| {
            let dim = |has: u32, asked: u32| has == asked || (has == 0 && asked <= MAX_HEAD_DIM);
            entry.module.name == family
                && entry.q == q
                && Some(entry.kv) == kv
                && dim(entry.head_dim_qk, heads.head_dim_qk)
                && dim(entry.head_dim_vo, heads.head_dim_vo)
                && (entry.is_general || !is_general)
                && entry.holds(rows)
                && runs_on(entry, limits)
        };
        // Of two that fit, the one that does less is the faster one.
        ENTRIES.iter().filter(fits).min_by_key(|entry| entry.is_general)
    };
    let pair = |family: &str| {
        let group = heads.group_size();
        Some(Pair { plain: find(family, needs_general, group)?, masked: find(family, true, group)? })
    };
    let first = |names: &[&str]| names.iter().find_map(|family| pair(family));
    let extend = first(families.extend()).or_else(|| pair("plain"));
    let of_module = |family: &'static str| ENTRIES.iter().filter(move |e| e.module.name == family && e.q == q);
    let store = of_module("store_kv").find(|e| Some(e.kv) == kv);
    match (extend, store, of_module("merge_partials").next()) {
        (Some(extend), Some(store), Some(merge)) => {
            Ok(LayerKernels { decode: first(families.decode()), extend, store, merge })
        }
        _ => Err(vec![Reason::KvDtype { got: model.kv_dtype(), supported: kv_dtypes_for(model.q_dtype()) }]),
    }
}

/// The kernel that merges callers' states of a dtype.
pub(crate) fn merge_states_entry(dtype: Dtype) -> &'static Entry {
    let q = Element::of(dtype);
    let of_dtype = |entry: &&Entry| entry.module.name == "merge_states" && entry.q == q;
    ENTRIES.iter().find(of_dtype).expect("states of every dtype have their kernel, which a test checks")
}

/// Dtypes of KV that there are kernels for, with this dtype of q.
pub(crate) fn kv_dtypes_for(dtype: Dtype) -> Vec<KvDtype> {
    let q = Element::of(dtype);
    let attends = |kv: &KvDtype| {
        let any =
            |family| ENTRIES.iter().any(|e| e.module.name == family && e.q == q && Some(e.kv) == Element::of_kv(*kv));
        any("plain") && any("store_kv")
    };
    KvDtype::ALL.into_iter().filter(attends).collect()
}

/// Whether a GPU can run an entry point.
fn runs_on(entry: &Entry, limits: &Limits) -> bool {
    entry.shared_bytes <= limits.shared_bytes
        && !crate::device::candidates(entry.module.images, limits.capability).is_empty()
}

/// Modules of kernels, and of each the image that a GPU would load first; `None`: it runs none of them.
#[must_use]
pub fn image_choices(capability: (i32, i32)) -> Vec<(&'static str, Option<&'static str>)> {
    let mut choices: Vec<(&'static str, Option<&'static str>)> = Vec::new();
    for entry in ENTRIES {
        if choices.iter().all(|(module, _)| *module != entry.module.name) {
            let best = crate::device::candidates(entry.module.images, capability).first().map(|image| image.name);
            choices.push((entry.module.name, best));
        }
    }
    choices
}

/// Features of the kernels.
pub(crate) fn features() -> attn_metadata::FeatureSet {
    [
        Feature::Full,
        Feature::Window,
        Feature::Softcap,
        Feature::Sinks,
        Feature::Alibi,
        Feature::CustomMask,
        Feature::Lse,
        Feature::Extend,
        Feature::Graphs,
        Feature::ValuesInKeys,
        Feature::BatchInvariant,
    ]
    .into_iter()
    .collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::Arc;

    use attn_metadata::{HeadShape, LayerParams};
    use kvpool::PageSize;

    use super::*;

    const HOPPER: Limits = Limits { capability: (9, 0), shared_bytes: 232_448 };

    fn model(heads: HeadShape, q: Dtype, kv: KvDtype, softcap: Option<f32>) -> Arc<ModelSpec> {
        let layer = Layer::new(LayerParams { softcap, ..LayerParams::causal(heads) }).unwrap();
        Arc::new(ModelSpec::new(vec![layer], q, kv, PageSize::new(16).unwrap()).unwrap())
    }

    fn choose(model: &ModelSpec, limits: &Limits) -> Result<LayerKernels, Vec<Reason>> {
        kernels_of(model, &model.layers()[0], limits, Families::All)
    }

    #[test]
    fn names_are_distinct_and_images_are_there() {
        let names: HashSet<_> = ENTRIES.iter().map(|entry| entry.name).collect();
        assert_eq!(names.len(), ENTRIES.len());
        let mut modules = HashSet::new();
        for entry in ENTRIES.iter().filter(|entry| modules.insert(entry.module.name)) {
            for source in [entry.module, entry.checked] {
                assert!(!source.images.is_empty());
                for image in source.images {
                    assert!(image.unpack().is_ok_and(|bytes| !bytes.is_empty()), "{image:?}");
                }
            }
        }
    }

    #[test]
    fn states_of_every_dtype_can_be_merged() {
        for dtype in Dtype::ALL {
            assert_eq!(merge_states_entry(dtype).q, Element::of(dtype));
        }
    }

    #[test]
    fn the_fast_kernels_are_chosen_where_they_fit() {
        let model = model(HeadShape::new(32, 8, 128), Dtype::Bf16, KvDtype::Bf16, None);
        let kernels = choose(&model, &HOPPER).unwrap();
        let decode = kernels.decode.unwrap();
        assert_eq!((decode.plain.name, decode.plain.is_general), ("decode_sm90_bf16_bf16_d128", false));
        assert!(decode.masked.is_general && decode.rows() >= 4);
        let plain = kernels_of(&model, &model.layers()[0], &HOPPER, Families::Plain).unwrap();
        assert!(plain.decode.is_none() && plain.extend.family() == "plain");
    }

    #[test]
    fn hoppers_own_kernels_run_there_alone() {
        let model = |dim, kv| model(HeadShape::new(32, 8, dim), Dtype::Bf16, kv, None);
        let family = |model: &ModelSpec, limits: &Limits, families| {
            kernels_of(model, &model.layers()[0], limits, families).unwrap().extend.family()
        };
        let (same, newer) = (KvDtype::Bf16, Limits { capability: (10, 0), ..HOPPER });
        for dim in [64, 128, 256] {
            assert_eq!(family(&model(dim, same), &HOPPER, Families::All), "extend_sm90", "{dim}");
            assert_eq!(family(&model(dim, same), &HOPPER, Families::Portable), "extend", "{dim}");
            assert_eq!(family(&model(dim, same), &newer, Families::All), "extend", "{dim}");
        }
        let decode = |limits, families| {
            let model = model(128, same);
            kernels_of(&model, &model.layers()[0], limits, families).unwrap().decode.unwrap().family()
        };
        assert_eq!(decode(&HOPPER, Families::All), "decode_sm90");
        assert_eq!([decode(&HOPPER, Families::Portable), decode(&newer, Families::All)], ["decode"; 2]);
        assert_eq!(family(&model(96, same), &HOPPER, Families::All), "extend");
        assert_eq!(family(&model(128, KvDtype::Fp8E4m3), &HOPPER, Families::All), "extend_sm90");
        assert_eq!(family(&model(128, KvDtype::Fp8E4m3), &HOPPER, Families::Portable), "extend");
    }

    #[test]
    fn softcap_takes_the_general_kernel_and_odd_widths_the_plain_one() {
        let capped = model(HeadShape::new(32, 8, 128), Dtype::F16, KvDtype::Fp8E4m3, Some(30.0));
        assert!(choose(&capped, &HOPPER).unwrap().decode.unwrap().plain.is_general);
        let odd = model(HeadShape::new(4, 4, 112), Dtype::Bf16, KvDtype::Bf16, None);
        let kernels = choose(&odd, &HOPPER).unwrap();
        assert!(kernels.decode.is_none() && kernels.extend.family() == "plain");
    }

    #[test]
    fn a_group_that_is_wider_than_the_rows_does_not_go_to_decode() {
        let wide = model(HeadShape::new(128, 1, 128), Dtype::Bf16, KvDtype::Bf16, None);
        assert!(choose(&wide, &HOPPER).unwrap().decode.is_none());
    }

    #[test]
    fn a_gpu_with_little_shared_memory_gets_kernels_that_fit() {
        let model = model(HeadShape::new(32, 8, 128), Dtype::Bf16, KvDtype::Bf16, None);
        let small = Limits { shared_bytes: 48 << 10, ..HOPPER };
        assert!(choose(&model, &small).unwrap().decode.is_none());
        let old = Limits { capability: (7, 5), shared_bytes: 64 << 10 };
        assert!(choose(&model, &old).is_err());
    }

    #[test]
    fn a_grid_is_as_large_as_there_is_shared_memory_for() {
        let decode = |dim| {
            let model = model(HeadShape::new(32, 8, dim), Dtype::Bf16, KvDtype::Bf16, None);
            kernels_of(&model, &model.layers()[0], &HOPPER, Families::Portable).unwrap().decode.unwrap()
        };
        // Most of a block on compute capabilities 9.0, 8.0 and 8.6.
        let blocks = |dim| [232_448, 166_912, 101_376].map(|bytes| decode(dim).blocks_per_sm(bytes));
        assert_eq!([blocks(64), blocks(128), blocks(256)], [[2, 2, 1], [2, 1, 1], [2, 1, 1]]);
        for entry in ENTRIES.iter().filter(|entry| entry.shared_bytes > 0) {
            let pair = Pair { plain: entry, masked: entry };
            assert_eq!(pair.blocks_per_sm(232_448), entry.blocks_per_sm, "{}: made for Hopper", entry.name);
            assert_eq!(pair.blocks_per_sm(0), 1);
        }
    }

    #[test]
    fn pairs_of_dtypes_without_a_kernel_are_refused_with_what_there_is() {
        let mixed = model(HeadShape::new(32, 8, 128), Dtype::Bf16, KvDtype::F16, None);
        let reasons = choose(&mixed, &HOPPER).unwrap_err();
        assert!(matches!(&reasons[..], [Reason::KvDtype { got: KvDtype::F16, supported }]
            if supported.contains(&KvDtype::Bf16) && !supported.contains(&KvDtype::F16)));
        for q in Dtype::ALL {
            assert!(!kv_dtypes_for(q).is_empty(), "{q}");
        }
    }
}

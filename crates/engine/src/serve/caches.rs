//! The pages' bytes: each layer's cache, and that of its side branch where it has one.

use attn_metadata::{Layer, ModelSpec};
use kvpool::{HostKv, KvDtype, KvFormat, KvLayout, KvScales, PageId, PageSize, ShapeError};

/// One layer's caches over all pages of the pool.
#[derive(Debug)]
pub(super) struct LayerCaches {
    pub(super) main: HostKv,
    pub(super) side: Option<HostKv>,
}

impl LayerCaches {
    /// Zeroed caches for a layer.
    fn new(layer: &Layer, pages: (u32, PageSize), main: KvFormat, side: KvFormat) -> Result<Self, ShapeError> {
        let (num_pages, page_size) = pages;
        let make = |spec, format| HostKv::for_spec(spec, num_pages, page_size, KvLayout::Nhd, format);
        let side = layer.side().map(|branch| make(branch.kv, side)).transpose()?;
        Ok(Self { main: make(layer.kv(), main)?, side })
    }

    /// Zeroed caches for each layer of a model.
    pub(super) fn for_model(model: &ModelSpec, num_pages: u32, main: KvFormat) -> Result<Vec<Self>, ShapeError> {
        let pages = (num_pages, model.page_size());
        let side = plain_format(model.side_dtype());
        model.layers().iter().map(|layer| Self::new(layer, pages, main, side)).collect()
    }

    /// Copies a page over another one of the same pool.
    pub(super) fn copy_page(&mut self, from: PageId, to: PageId) {
        for cache in [Some(&mut self.main), self.side.as_mut()].into_iter().flatten() {
            cache.copy_page(from, to).expect("pages of the pool are pages of its caches");
        }
    }
}

/// The format of a dtype, with scales of 1 where it has some.
fn plain_format(dtype: KvDtype) -> KvFormat {
    match dtype {
        KvDtype::F32 => KvFormat::F32,
        KvDtype::Fp8Latent => KvFormat::Fp8Latent,
        KvDtype::F16 => KvFormat::F16,
        KvDtype::Bf16 => KvFormat::Bf16,
        KvDtype::Fp8E4m3 => KvFormat::Fp8E4m3(KvScales::new(1.0, 1.0).expect("1 is a scale")),
    }
}

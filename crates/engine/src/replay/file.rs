//! Reads a replay file. Every rule that a file can break is checked here or in the types that it is turned into, before
//! any backend sees it.

use std::fs;
use std::path::Path;

use attn_metadata::{Batch, HeadShape, Layer, LayerParams, PoolShape, RawBatch};
use kvpool::{
    Dtype, HostKv, KvDtype, KvFormat, KvLayout, KvPageShape, KvScales, KvSpec, LatentRow, PageSize, Slot, Values,
};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype as FileDtype, TensorView};

use super::activation::{Activation, Elements};
use super::error::FileError;
use super::params::{ATTN_KEY, Kind, Params};
use super::problem::{NewKv, Problem};

/// A problem as a file holds it.
#[derive(Clone, Debug)]
pub struct ReplayFile {
    /// The problem.
    pub problem: Problem,
    /// Whether FP8 caches are stored as U8 rather than as `F8_E4M3`.
    pub fp8_as_u8: bool,
}

/// Reads a file.
///
/// # Errors
/// [`FileError`] for the first broken rule.
pub fn read(path: &Path) -> Result<ReplayFile, FileError> {
    if !fs::metadata(path).map_err(FileError::Read)?.is_file() {
        return Err(FileError::NotRegular);
    }
    ReplayFile::parse(&fs::read(path).map_err(FileError::Read)?)
}

impl ReplayFile {
    /// Reads the bytes of a file.
    ///
    /// # Errors
    /// [`FileError`] for the first broken rule.
    pub fn parse(bytes: &[u8]) -> Result<Self, FileError> {
        let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(FileError::NotSafetensors)?;
        let params = metadata.metadata().as_ref().and_then(|keys| keys.get(ATTN_KEY)).ok_or(FileError::NoParams)?;
        let params = Params::parse(params)?;
        let tensors = SafeTensors::deserialize(bytes).map_err(FileError::NotSafetensors)?;
        let tensors = Tensors { tensors };
        let q = tensors.required("q", "[tokens, query heads, width] in f32, f16 or bf16")?.activation()?;
        let (cache, fp8_as_u8) = match params.kind {
            Kind::Mha => tensors.cache(&params)?,
            Kind::Mla => tensors.latent_cache(&params)?,
        };
        let layer = tensors.layer(&params, &q, &cache)?;
        let new_kv = tensors.new_kv(&q, &layer)?;
        let pool = PoolShape { num_pages: cache.shape().num_pages, page_size: cache.shape().page_size };
        let batch = tensors.batch(q.shape()[0], pool, new_kv.is_some())?;
        Ok(Self { problem: Problem { layer, batch, q, cache, new_kv }, fp8_as_u8 })
    }
}

/// A tensor and its name.
struct Named<'a> {
    name: &'static str,
    view: TensorView<'a>,
}

impl Named<'_> {
    fn wrong_shape(&self, expected: impl Into<String>) -> FileError {
        FileError::TensorShape { name: self.name, got: self.view.shape().to_vec(), expected: expected.into() }
    }

    fn require_dtype(&self, expected: FileDtype) -> Result<(), FileError> {
        let got = self.view.dtype();
        if got == expected {
            return Ok(());
        }
        Err(FileError::TensorDtype { name: self.name, got: got.to_string(), expected: expected.to_string() })
    }

    fn activation(&self) -> Result<Activation, FileError> {
        let dtype = match self.view.dtype() {
            FileDtype::F32 => Dtype::F32,
            FileDtype::F16 => Dtype::F16,
            FileDtype::BF16 => Dtype::Bf16,
            other => {
                let expected = "F32, F16 or BF16".to_owned();
                return Err(FileError::TensorDtype { name: self.name, got: other.to_string(), expected });
            }
        };
        let &[rows, heads, width] = self.view.shape() else {
            return Err(self.wrong_shape("[tokens, heads, width]"));
        };
        let elements = Elements::from_bytes(dtype, self.view.data());
        Activation::new(elements, [rows, heads, width]).ok_or_else(|| self.wrong_shape("as many elements as bytes"))
    }

    /// A table or a per-head array: one axis of a given dtype.
    fn vector<T: bytemuck::Pod>(&self, dtype: FileDtype) -> Result<Vec<T>, FileError> {
        self.require_dtype(dtype)?;
        match self.view.shape() {
            [_] => Ok(bytemuck::pod_collect_to_vec(self.view.data())),
            _ => Err(self.wrong_shape("one axis")),
        }
    }

    /// `[pages, page_size, heads, width]` as 32-bit counts.
    fn cache_shape(&self) -> Result<[u32; 4], FileError> {
        let &[pages, page_size, heads, width] = self.view.shape() else {
            return Err(self.wrong_shape("[pages, page size, KV heads, width]"));
        };
        let narrow = |n: usize| u32::try_from(n).map_err(|_| self.wrong_shape("sizes below 2^32"));
        Ok([narrow(pages)?, narrow(page_size)?, narrow(heads)?, narrow(width)?])
    }
}

struct Tensors<'a> {
    tensors: SafeTensors<'a>,
}

impl Tensors<'_> {
    fn optional(&self, name: &'static str) -> Option<Named<'_>> {
        self.tensors.tensor(name).ok().map(|view| Named { name, view })
    }

    fn required(&self, name: &'static str, expected: &'static str) -> Result<Named<'_>, FileError> {
        self.optional(name).ok_or(FileError::MissingTensor { name, expected })
    }

    fn cache(&self, params: &Params) -> Result<(HostKv, bool), FileError> {
        let k = self.required("k_cache", "[pages, page size, KV heads, width]")?;
        let v = self.required("v_cache", "[pages, page size, KV heads, width]")?;
        let (format, fp8_as_u8) = cache_format(&k, params)?;
        v.require_dtype(k.view.dtype())?;
        let [num_pages, page_size, num_kv_heads, head_dim_k] = k.cache_shape()?;
        let [v_pages, v_page_size, v_heads, head_dim_v] = v.cache_shape()?;
        if [num_pages, page_size, num_kv_heads] != [v_pages, v_page_size, v_heads] {
            return Err(v.wrong_shape(format!("[{num_pages}, {page_size}, {num_kv_heads}, width], as k_cache has it")));
        }
        if let Some(expected) = params.head_dim_vo.filter(|&dim| dim != head_dim_v) {
            return Err(v.wrong_shape(format!("a width of {expected}, as head_dim_vo says")));
        }
        let page_size = PageSize::new(page_size)?;
        let page = KvPageShape { page_size, num_kv_heads, head_dim_k, head_dim_v };
        let mut cache = HostKv::new(page.with_pages(num_pages)?, KvLayout::Nhd, format)?;
        let (k_bytes, v_bytes) = cache.buffer_mut().into_bytes().split_at_mut(k.view.data().len());
        k_bytes.copy_from_slice(k.view.data());
        v_bytes.copy_from_slice(v.view.data());
        Ok((cache, fp8_as_u8))
    }

    /// A latent cache `[pages, page_size, width]`, or `[pages, page_size, bytes]` in U8 for quantised rows.
    fn latent_cache(&self, params: &Params) -> Result<(HostKv, bool), FileError> {
        let k = self.required("k_cache", "[pages, page size, width]")?;
        for name in ["v_cache", "v"] {
            if self.optional(name).is_some() {
                return Err(FileError::Unwanted { name, kind: params.kind.name() });
            }
        }
        let expected = "the width of values, the first columns of k_cache";
        let latent = params.head_dim_vo.ok_or(FileError::MissingKey { key: "head_dim_vo", expected })?;
        let &[num_pages, page_size, stored] = k.view.shape() else {
            return Err(k.wrong_shape("[pages, page size, width]"));
        };
        let narrow = |n: usize| u32::try_from(n).map_err(|_| k.wrong_shape("sizes below 2^32"));
        let (num_pages, page_size, stored) = (narrow(num_pages)?, narrow(page_size)?, narrow(stored)?);
        let (format, head_dim_k) = match k.view.dtype() {
            FileDtype::U8 => (KvFormat::Fp8Latent, row_width(&k, stored, latent)?),
            _ => (cache_format(&k, params)?.0, stored),
        };
        let spec = KvSpec { num_kv_heads: 1, head_dim_k, values: Values::InKeys(latent) };
        let mut cache = HostKv::for_spec(spec, num_pages, PageSize::new(page_size)?, KvLayout::Nhd, format)?;
        cache.buffer_mut().into_bytes().copy_from_slice(k.view.data());
        Ok((cache, false))
    }

    fn layer(&self, params: &Params, q: &Activation, cache: &HostKv) -> Result<Layer, FileError> {
        let [rows, num_qo_heads, width] = q.shape();
        let (shape, got) = (cache.shape(), q.shape().to_vec());
        let expected = format!("[{rows}, query heads, {}], as k_cache has it", shape.head_dim_k);
        let wrong_width = || FileError::TensorShape { name: "q", got, expected };
        let num_qo_heads = u32::try_from(num_qo_heads).ok().filter(|_| width == shape.head_dim_k as usize);
        let heads = HeadShape {
            num_qo_heads: num_qo_heads.ok_or_else(wrong_width)?,
            num_kv_heads: shape.num_kv_heads,
            head_dim_qk: shape.head_dim_k,
            head_dim_vo: shape.head_dim_v,
        };
        let per_head = |name| self.optional(name).map(|t| t.vector::<f32>(FileDtype::F32)).transpose();
        Ok(Layer::new(LayerParams {
            heads,
            sm_scale: params.sm_scale,
            causal: params.causal,
            window_left: params.window_left,
            softcap: params.softcap,
            sinks: per_head("sinks")?,
            alibi_slopes: per_head("alibi_slopes")?,
            values_in_keys: params.kind == Kind::Mla,
            family: None,
        })?)
    }

    fn new_kv(&self, q: &Activation, layer: &Layer) -> Result<Option<NewKv>, FileError> {
        let heads = layer.heads();
        let has_values = matches!(layer.kv().values, Values::Own(_));
        let names = ["k", "slot_mapping", "v"].into_iter().filter(|name| has_values || *name != "v");
        let find = |is_there: bool| names.clone().find(|name| self.optional(name).is_some() == is_there);
        if let (Some(given), Some(missing)) = (find(true), find(false)) {
            return Err(FileError::Incomplete { given, missing });
        }
        let Some(k) = self.optional("k") else { return Ok(None) };
        let read = |tensor: Named<'_>, width: u32| {
            let got = tensor.activation()?;
            let expected = [q.shape()[0], heads.num_kv_heads as usize, width as usize];
            if got.shape() != expected {
                return Err(
                    tensor.wrong_shape(format!("{expected:?}: a row for each of q, heads and width of the cache"))
                );
            }
            if got.dtype() != q.dtype() {
                let (got, expected) = (got.dtype().to_string(), format!("{}, as q is", q.dtype()));
                return Err(FileError::TensorDtype { name: tensor.name, got, expected });
            }
            Ok(got)
        };
        let k = read(k, heads.head_dim_qk)?;
        let v = self.optional("v").map(|v| read(v, heads.head_dim_vo)).transpose()?;
        Ok(Some(NewKv { k, v }))
    }

    fn batch(&self, num_rows: usize, pool: PoolShape, appends: bool) -> Result<Batch, FileError> {
        let table = |name, expected| self.required(name, expected)?.vector::<i32>(FileDtype::I32);
        let qo_indptr = table("qo_indptr", "i32, token offsets, one entry more than requests")?;
        let kv_indptr = table("kv_indptr", "i32, page offsets, one entry more than requests")?;
        let kv_indices = table("kv_indices", "i32, page ids of all requests")?;
        let kv_last_page_len = table("kv_last_page_len", "i32, tokens in each request's last page")?;
        if qo_indptr.len() == 1 {
            return Err(FileError::NoRequests);
        }
        let slots: Vec<Slot> = match self.optional("slot_mapping").filter(|_| appends) {
            Some(slots) => slots.vector::<i32>(FileDtype::I32)?.into_iter().map(Slot::from_raw).collect(),
            None => Vec::new(),
        };
        let mask = self.optional("custom_mask").map(|mask| mask.vector::<u8>(FileDtype::U8)).transpose()?;
        let raw = RawBatch {
            num_rows,
            qo_indptr: &qo_indptr,
            kv_indptr: &kv_indptr,
            kv_indices: &kv_indices,
            kv_last_page_len: &kv_last_page_len,
            slot_mapping: appends.then_some(&slots[..]),
            custom_mask: mask.as_deref(),
        };
        Ok(Batch::from_raw(pool, &raw)?)
    }
}

/// Width of the keys whose quantised rows take some bytes each.
fn row_width(k: &Named<'_>, row_bytes: u32, latent: u32) -> Result<u32, FileError> {
    let bare = LatentRow::new(latent, 0)?.bytes() as u64;
    let rope = u64::from(row_bytes).checked_sub(bare).filter(|bytes| bytes % 4 == 0).map(|bytes| bytes / 2);
    let width = rope.and_then(|rope| u32::try_from(u64::from(latent) + rope).ok());
    width.ok_or_else(|| {
        k.wrong_shape(format!("rows of {bare} bytes for {latent} quantised values, and 4 for each two of RoPE"))
    })
}

/// The caches' format, and whether FP8 is stored as U8.
fn cache_format(k: &Named<'_>, params: &Params) -> Result<(KvFormat, bool), FileError> {
    let got = k.view.dtype();
    let format = match got {
        FileDtype::F32 => KvFormat::F32,
        FileDtype::F16 => KvFormat::F16,
        FileDtype::BF16 => KvFormat::Bf16,
        FileDtype::F8_E4M3 | FileDtype::U8 => {
            let k = params.k_scale.ok_or(FileError::ScaleMissing { key: "k_scale" })?;
            let v = params.v_scale.ok_or(FileError::ScaleMissing { key: "v_scale" })?;
            KvFormat::Fp8E4m3(KvScales::new(k, v)?)
        }
        other => {
            let expected = "F32, F16, BF16, F8_E4M3 or U8 (FP8 codes)".to_owned();
            return Err(FileError::TensorDtype { name: k.name, got: other.to_string(), expected });
        }
    };
    let scales = [("k_scale", params.k_scale), ("v_scale", params.v_scale)];
    let unused = scales.into_iter().find_map(|(key, scale)| scale.filter(|&s| s != 1.0).map(|got| (key, got)));
    match unused.filter(|_| format.dtype() != KvDtype::Fp8E4m3) {
        Some((key, got)) => Err(FileError::ScaleUnused { key, got, dtype: format.dtype().name() }),
        None => Ok((format, got == FileDtype::U8)),
    }
}

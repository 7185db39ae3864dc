//! Writes a replay file from a call: its batch, its layer and its tensors, whatever their strides.

use std::borrow::Cow;
use std::collections::HashMap;

use attn_metadata::{Batch, Layer};
use half::{bf16, f16};
use kvpool::{Dtype, HostKv, HostSlice, HostTensor, KvDtype, KvFormat, KvPlane, KvShape, KvSpec, PageId, Slot, Values};
use safetensors::SafeTensorError;
use safetensors::tensor::{Dtype as FileDtype, View};
use thiserror::Error;

use super::activation::{Activation, Elements};
use super::params::{ATTN_KEY, Kind, Params};
use super::problem::{NewKv, Problem};

/// A call to be recorded, before it runs.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// The layer.
    pub layer: &'a Layer,
    /// The batch.
    pub batch: &'a Batch,
    /// Queries.
    pub q: HostTensor<'a>,
    /// The layer's pages, before the append.
    pub cache: &'a HostKv,
    /// New keys, and values where the layer keeps some of their own, where the batch appends.
    pub new_kv: Option<(HostTensor<'a>, Option<HostTensor<'a>>)>,
}

impl<'a> From<&'a Problem> for Call<'a> {
    fn from(problem: &'a Problem) -> Self {
        let Problem { layer, batch, q, cache, new_kv } = problem;
        let new_kv = new_kv.as_ref().map(|NewKv { k, v }| (k.view(), v.as_ref().map(Activation::view)));
        Self { layer, batch, q: q.view(), cache, new_kv }
    }
}

/// A call that a file cannot hold.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RecordError {
    /// The batch is a part of another one: rows of other requests lie between its own.
    #[error("request {request} does not begin where the one before it ends: record the whole batch, not a part of it")]
    SubBatch {
        /// The request.
        request: usize,
    },
    /// The layer has weights or a side branch, which a file has no place for.
    #[error("a layer of {family} attention cannot be recorded: a file holds plain layers and absorbed latent ones")]
    Family {
        /// The family.
        family: &'static str,
    },
    /// A latent cache has more than one head, which the files of latent caches have no axis for.
    #[error("a latent cache of {num_kv_heads} heads cannot be recorded, only one of 1 head")]
    LatentHeads {
        /// KV heads.
        num_kv_heads: u32,
    },
    /// The tensors cannot be packed.
    #[error("the call cannot be packed into a file")]
    Pack(#[source] SafeTensorError),
}

/// The bytes of a replay file.
///
/// # Errors
/// [`RecordError`].
pub fn record(call: &Call<'_>) -> Result<Vec<u8>, RecordError> {
    if call.layer.family().is_some() {
        return Err(RecordError::Family { family: call.layer.family_name() });
    }
    let KvSpec { num_kv_heads, values, .. } = call.layer.kv();
    if matches!(values, Values::InKeys(_)) && num_kv_heads != 1 {
        return Err(RecordError::LatentHeads { num_kv_heads });
    }
    let Tables { qo_indptr, kv_indptr, kv_last_page_len } = Tables::of(call.batch)?;
    let rows = call.q.rows();
    let mut tensors = cache_tensors(call.cache, false);
    tensors.push(FileTensor::activation("q", &packed(&call.q)));
    tensors.push(FileTensor::table("qo_indptr", &qo_indptr));
    tensors.push(FileTensor::table("kv_indptr", &kv_indptr));
    tensors.push(FileTensor::table("kv_indices", call.batch.kv_indices()));
    tensors.push(FileTensor::table("kv_last_page_len", &kv_last_page_len));
    if let (Some((k, v)), Some(slots)) = (&call.new_kv, call.batch.slot_mapping()) {
        tensors.push(FileTensor::activation("k", &packed(k)));
        tensors.extend(v.as_ref().map(|v| FileTensor::activation("v", &packed(v))));
        let slots: Vec<i32> = slots.iter().map(|slot: &Slot| slot.raw()).collect();
        debug_assert_eq!(slots.len(), rows, "a slot for each row");
        tensors.push(FileTensor::table("slot_mapping", &slots));
    }
    if let Some(mask) = call.batch.custom_mask() {
        let bytes = mask.bytes().to_vec();
        tensors.push(FileTensor::new("custom_mask", FileDtype::U8, vec![bytes.len()], bytes));
    }
    for (name, values) in [("sinks", call.layer.sinks()), ("alibi_slopes", call.layer.alibi_slopes())] {
        let Some(values) = values else { continue };
        let bytes = bytemuck::cast_slice(values).to_vec();
        tensors.push(FileTensor::new(name, FileDtype::F32, vec![values.len()], bytes));
    }
    let params = params_of(call.layer, call.cache.format()).to_json();
    pack(&tensors, Some(HashMap::from([(ATTN_KEY.to_owned(), params)]))).map_err(RecordError::Pack)
}

fn params_of(layer: &Layer, format: KvFormat) -> Params {
    let scaled = |scale| (format.dtype() == KvDtype::Fp8E4m3).then_some(scale);
    let kind = if matches!(layer.kv().values, Values::InKeys(_)) { Kind::Mla } else { Kind::Mha };
    Params {
        kind,
        sm_scale: layer.sm_scale(),
        causal: layer.is_causal(),
        window_left: layer.window_left(),
        softcap: layer.softcap(),
        k_scale: scaled(format.k_scale()),
        v_scale: scaled(format.v_scale()),
        head_dim_vo: Some(layer.heads().head_dim_vo),
    }
}

/// Offset tables of a batch.
struct Tables {
    qo_indptr: Vec<i32>,
    kv_indptr: Vec<i32>,
    kv_last_page_len: Vec<i32>,
}

impl Tables {
    fn of(batch: &Batch) -> Result<Self, RecordError> {
        let mut tables = Self { qo_indptr: vec![0], kv_indptr: vec![0], kv_last_page_len: Vec::new() };
        let narrow = |n: u32| i32::try_from(n).expect("a batch holds 31-bit sizes");
        let page_size = batch.page_size().get();
        let (mut q_end, mut pages_end) = (0, 0);
        for (request, r) in batch.requests().iter().enumerate() {
            if (r.q_start, r.pages_start) != (q_end, pages_end) {
                return Err(RecordError::SubBatch { request });
            }
            (q_end, pages_end) = (r.q_start + r.q_len, r.pages_start + r.num_pages);
            tables.qo_indptr.push(narrow(q_end));
            tables.kv_indptr.push(narrow(pages_end));
            let before_last = u64::from(r.num_pages.saturating_sub(1)) * u64::from(page_size);
            let last = u64::from(r.kv_len) - before_last;
            tables.kv_last_page_len.push(i32::try_from(last).expect("at most a page"));
        }
        Ok(tables)
    }
}

/// A tensor on its way into a file.
#[derive(Clone, Debug)]
pub(super) struct FileTensor {
    name: &'static str,
    dtype: FileDtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl FileTensor {
    pub(super) fn new(name: &'static str, dtype: FileDtype, shape: Vec<usize>, bytes: Vec<u8>) -> Self {
        Self { name, dtype, shape, bytes }
    }

    pub(super) fn activation(name: &'static str, activation: &Activation) -> Self {
        let dtype = match activation.dtype() {
            Dtype::F32 => FileDtype::F32,
            Dtype::F16 => FileDtype::F16,
            Dtype::Bf16 => FileDtype::BF16,
        };
        Self::new(name, dtype, activation.shape().to_vec(), activation.elements().as_bytes().to_vec())
    }

    /// The same without an axis of one head.
    fn drop_heads(&mut self) {
        if let [pages, page_size, 1, width] = self.shape[..] {
            self.shape = vec![pages, page_size, width];
        }
    }

    fn table(name: &'static str, values: &[i32]) -> Self {
        Self::new(name, FileDtype::I32, vec![values.len()], bytemuck::cast_slice(values).to_vec())
    }
}

impl View for &FileTensor {
    fn dtype(&self) -> FileDtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

pub(super) fn pack(
    tensors: &[FileTensor],
    metadata: Option<HashMap<String, String>>,
) -> Result<Vec<u8>, SafeTensorError> {
    safetensors::serialize(tensors.iter().map(|tensor| (tensor.name, tensor)), metadata)
}

/// `k_cache` and `v_cache` `[pages, page_size, heads, width]`, as stored; of a latent cache, `k_cache`
/// `[pages, page_size, width]` alone.
pub(super) fn cache_tensors(cache: &HostKv, fp8_as_u8: bool) -> Vec<FileTensor> {
    let dtype = match cache.format().dtype() {
        KvDtype::F32 => FileDtype::F32,
        KvDtype::F16 => FileDtype::F16,
        KvDtype::Bf16 => FileDtype::BF16,
        KvDtype::Fp8E4m3 if fp8_as_u8 => FileDtype::U8,
        KvDtype::Fp8Latent => FileDtype::U8,
        KvDtype::Fp8E4m3 => FileDtype::F8_E4M3,
    };
    let mut tensors = vec![plane_tensor("k_cache", dtype, &cache.shape(), &cache.k())];
    match cache.spec().values {
        Values::InKeys(_) => tensors.iter_mut().for_each(FileTensor::drop_heads),
        Values::Own(_) | Values::None => tensors.push(plane_tensor("v_cache", dtype, &cache.shape(), &cache.v())),
    }
    tensors
}

fn plane_tensor(name: &'static str, dtype: FileDtype, shape: &KvShape, plane: &KvPlane<'_>) -> FileTensor {
    let (size, width) = (plane.data.dtype().element_bytes(), plane.layout.vector_len());
    let (pages, page_size, heads) = (shape.num_pages, shape.page_size.get(), shape.num_kv_heads);
    let source = plane.data.as_bytes();
    let mut bytes = Vec::with_capacity(pages as usize * page_size as usize * heads as usize * width * size);
    for page in (0..pages).map(|page| PageId::new(page).expect("a valid shape has 31-bit pages")) {
        for token in 0..page_size {
            for head in 0..heads {
                let start = plane.layout.element(page, token, head) * size;
                bytes.extend_from_slice(&source[start..start + width * size]);
            }
        }
    }
    FileTensor::new(name, dtype, vec![pages as usize, page_size as usize, heads as usize, width], bytes)
}

/// A packed copy of a view.
fn packed(tensor: &HostTensor<'_>) -> Activation {
    fn gather<T: Copy>(data: &[T], tensor: &HostTensor<'_>) -> Vec<T> {
        let [rows, heads, width] = tensor.shape();
        let mut packed = Vec::with_capacity(rows * heads * width);
        for (row, head) in (0..rows).flat_map(|row| (0..heads).map(move |head| (row, head))) {
            packed.extend_from_slice(&data[tensor.offset(row, head)..][..width]);
        }
        packed
    }
    let elements = match tensor.data() {
        HostSlice::F32(data) => Elements::F32(gather::<f32>(data, tensor)),
        HostSlice::F16(data) => Elements::F16(gather::<f16>(data, tensor)),
        HostSlice::Bf16(data) => Elements::Bf16(gather::<bf16>(data, tensor)),
    };
    Activation::new(elements, tensor.shape()).expect("every vector of the view was copied")
}

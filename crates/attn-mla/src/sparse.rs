//! Owns [`SparseAttention`]: absorbed attention of each token over a list of slots, as DeepSeek's sparse attention has it.
//!
//! Listed rows are copied, as stored, into pages of their own, some tokens at a time; what is left is attention over a
//! short cache, on the CPU backend. So memory is bounded whatever the number of tokens.

use std::sync::Arc;

use attn_metadata::{
    AttentionBackend as _, BackendConfig, Batch, BatchLimits, CreateError, HostDevice, Io, Kv, Layer, LayerParams, Lse,
    ModelSpec, PoolShape, PrepareError, RawBatch, RunError,
};
use attn_reference::cpu::CpuBackend;
use kvpool::{Dtype, HostKv, HostTensor, HostTensorMut, KvFormat, KvLayout, KvSpec, PageSize, ShapeError, Slot};
use thiserror::Error;

use crate::IndexList;
use crate::rows::{part, part_mut};

/// Tokens in a page of copied rows.
const PAGE_SIZE: u32 = 64;
/// Bytes of rows that are copied at a time, about.
const COPY_BYTES: u64 = 32 << 20;

/// A call that was refused, or failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SparseError {
    /// A tensor has the wrong shape.
    #[error("{tensor} is {got:?}, {expected:?} is needed")]
    Shape {
        /// Which tensor.
        tensor: &'static str,
        /// `[tokens, heads, width]` needed.
        expected: [usize; 3],
        /// `[tokens, heads, width]` given.
        got: [usize; 3],
    },
    /// The LSE has the wrong number of elements.
    #[error("lse has {got} elements, {expected} are needed")]
    LseLen {
        /// Elements needed.
        expected: usize,
        /// Elements given.
        got: usize,
    },
    /// The cache keeps something else of a token, or keeps it otherwise.
    #[error("the cache keeps {got} as {got_format:?}; {expected} as {format:?} is needed")]
    Cache {
        /// What is needed.
        expected: KvSpec,
        /// How.
        format: KvFormat,
        /// What it keeps.
        got: KvSpec,
        /// How.
        got_format: KvFormat,
    },
    /// The index list was checked against a larger pool than the cache's.
    #[error("the index list was checked against {list_slots} slots, the cache has {cache_slots}")]
    Pool {
        /// Slots that the list may name.
        list_slots: u64,
        /// Slots of the cache.
        cache_slots: u64,
    },
    /// The layer is not one over a latent cache.
    #[error("token-sparse attention needs a plain layer whose values are in its keys, without window; {why}")]
    Layer {
        /// What does not fit.
        why: &'static str,
    },
    /// There is no memory for the copied rows.
    #[error(transparent)]
    Memory(#[from] ShapeError),
    /// The attention could not be planned.
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    /// The attention failed.
    #[error(transparent)]
    Run(#[from] RunError),
    /// The attention cannot run this layer.
    #[error(transparent)]
    Create(#[from] CreateError),
}

/// Token-sparse attention for one layer of absorbed queries.
#[derive(Debug)]
pub struct SparseAttention {
    attention: CpuBackend,
    layer: Layer,
    format: KvFormat,
    batch: Batch,
    tables: Tables,
    copied: Option<HostKv>,
}

#[derive(Debug, Default)]
struct Tables {
    qo_indptr: Vec<i32>,
    kv_indptr: Vec<i32>,
    kv_indices: Vec<i32>,
    last_page_len: Vec<i32>,
}

impl SparseAttention {
    /// For a layer over caches of a format, with queries and outputs of `q_dtype`. Whether the layer is causal does not
    /// matter: a token sees the slots of its list.
    ///
    /// # Errors
    /// [`SparseError::Layer`] where the layer has a family, a window or ALiBi (which need positions), or values of its
    /// own; [`SparseError::Create`].
    pub fn new(
        layer: &Layer,
        format: KvFormat,
        q_dtype: Dtype,
        device: HostDevice,
    ) -> Result<SparseAttention, SparseError> {
        let params = layer.params();
        let rules = [
            ("it is of a family", params.family.is_some()),
            ("its values are beside its keys", !params.values_in_keys),
            ("it has a window", params.window_left.is_some()),
            ("it has ALiBi", params.alibi_slopes.is_some()),
        ];
        if let Some((why, _)) = rules.into_iter().find(|(_, broken)| *broken) {
            return Err(SparseError::Layer { why });
        }
        let layer = Layer::new(LayerParams { causal: false, ..params.clone() }).expect("it was valid");
        let page_size = PageSize::new(PAGE_SIZE).expect("a small page");
        let model = ModelSpec::new(vec![layer.clone()], q_dtype, format.dtype(), page_size);
        let model =
            Arc::new(model.map_err(|_| SparseError::Layer { why: "its rows cannot be stored in this format" })?);
        let config = BackendConfig { model, limits: BatchLimits::NONE, device };
        Ok(SparseAttention {
            attention: CpuBackend::new(&config)?,
            layer,
            format,
            batch: Batch::empty(PoolShape { num_pages: 1, page_size }),
            tables: Tables::default(),
            copied: None,
        })
    }

    /// Attends with each token of `q` `[tokens, heads, latent + rope]` to the slots of its list, and writes `out`
    /// `[tokens, heads, latent]` and, where given, the LSEs `[tokens, heads]`. A token without slots gets zeros and −∞
    /// (or its sinks).
    ///
    /// # Errors
    /// [`SparseError`]; a refusal leaves the outputs as they were.
    pub fn attend(
        &mut self,
        q: &HostTensor<'_>,
        cache: &HostKv,
        list: &IndexList,
        out: &mut HostTensorMut<'_>,
        mut lse: Option<&mut [Lse]>,
    ) -> Result<(), SparseError> {
        self.check(q, cache, list, out, lse.as_deref())?;
        let num_heads = self.layer.heads().num_qo_heads as usize;
        let row_bytes = self.layer.kv().bytes_per_token(self.format.dtype());
        let mut first = 0;
        while first < list.num_tokens() {
            let mut end = first;
            let mut slots = 0u64;
            while end < list.num_tokens() && (end == first || slots.saturating_mul(row_bytes) < COPY_BYTES) {
                slots += (list.slots(end).len() as u64).next_multiple_of(PAGE_SIZE.into());
                end += 1;
            }
            self.copy(cache, list, first..end)?;
            let step = self.attention.prepare_metadata(&self.batch)?;
            let width = q.dim();
            let io = Io {
                q: part(q, first..end, 0..width),
                kv: Kv::Attend { cache: self.copied.as_ref().expect("rows were copied") },
                side: None,
                out: part_mut(out, first..end),
                lse: lse.as_mut().map(|lse| &mut lse[first * num_heads..end * num_heads]),
            };
            self.attention.forward(&step, 0, io)?;
            first = end;
        }
        Ok(())
    }

    fn check(
        &self,
        q: &HostTensor<'_>,
        cache: &HostKv,
        list: &IndexList,
        out: &HostTensorMut<'_>,
        lse: Option<&[Lse]>,
    ) -> Result<(), SparseError> {
        let heads = self.layer.heads();
        let (tokens, num_heads) = (list.num_tokens(), heads.num_qo_heads as usize);
        let shapes = [("q", q.shape(), heads.head_dim_qk), ("out", out.shape(), heads.head_dim_vo)];
        for (tensor, got, width) in shapes {
            let expected = [tokens, num_heads, width as usize];
            if got != expected {
                return Err(SparseError::Shape { tensor, expected, got });
            }
        }
        match lse {
            Some(lse) if lse.len() != tokens * num_heads => {
                return Err(SparseError::LseLen { expected: tokens * num_heads, got: lse.len() });
            }
            _ => {}
        }
        let (expected, got) = (self.layer.kv(), cache.spec());
        if expected != got || self.format != cache.format() {
            return Err(SparseError::Cache { expected, format: self.format, got, got_format: cache.format() });
        }
        let (list_slots, cache_slots) = (list.num_slots(), cache.shape().num_slots());
        if list_slots > cache_slots {
            return Err(SparseError::Pool { list_slots, cache_slots });
        }
        Ok(())
    }

    /// Copies the rows of some tokens' lists into pages, and makes the batch over them.
    fn copy(&mut self, cache: &HostKv, list: &IndexList, tokens: std::ops::Range<usize>) -> Result<(), SparseError> {
        let Tables { qo_indptr, kv_indptr, kv_indices, last_page_len } = &mut self.tables;
        for table in [&mut *qo_indptr, &mut *kv_indptr, &mut *kv_indices, &mut *last_page_len] {
            table.clear();
        }
        let page_size = PageSize::new(PAGE_SIZE).expect("a small page");
        qo_indptr.push(0);
        kv_indptr.push(0);
        for token in tokens.clone() {
            let pages = page_size.pages_for(list.slots(token).len());
            qo_indptr.push(narrow(qo_indptr.len()));
            kv_indices.extend(narrow(kv_indices.len())..narrow(kv_indices.len() + pages));
            kv_indptr.push(narrow(kv_indices.len()));
            last_page_len.push(narrow(page_size.last_page_len(list.slots(token).len()) as usize));
        }
        let num_pages = u32::try_from(kv_indices.len().max(1)).expect("pages of a bounded copy");
        let copied = match self.copied.take().filter(|copied| copied.shape().num_pages >= num_pages) {
            Some(copied) => copied,
            None => HostKv::for_spec(self.layer.kv(), num_pages, page_size, KvLayout::Nhd, self.format)?,
        };
        let copied = self.copied.insert(copied);
        for (i, token) in tokens.enumerate() {
            let first = usize::try_from(self.tables.kv_indptr[i]).expect("not negative") * PAGE_SIZE as usize;
            for (place, &slot) in list.slots(token).iter().enumerate() {
                let to = Slot::from_raw(narrow(first + place));
                copied.copy_token_from(cache, Slot::from_raw(slot), to).expect("slots and formats were checked");
            }
        }
        let pool = PoolShape { num_pages: copied.shape().num_pages, page_size };
        if self.batch.pool() != pool {
            self.batch = Batch::empty(pool);
        }
        let Tables { qo_indptr, kv_indptr, kv_indices, last_page_len } = &self.tables;
        let raw = RawBatch {
            num_rows: qo_indptr.len() - 1,
            qo_indptr,
            kv_indptr,
            kv_indices,
            kv_last_page_len: last_page_len,
            slot_mapping: None,
            custom_mask: None,
        };
        self.batch.set(&raw).expect("each token is a request over pages of its own");
        Ok(())
    }
}

fn narrow(x: usize) -> i32 {
    i32::try_from(x).expect("a bounded copy has few slots")
}

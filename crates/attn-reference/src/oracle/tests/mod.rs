//! Tests of the oracle: cases computed by hand, identities, a second implementation, the backend's bookkeeping.

mod backend;
mod by_hand;
mod identities;
mod second;

use attn_metadata::{Batch, HeadShape, Layer, LayerParams, PoolShape, RawBatch, mask_bytes};
use kvpool::{HostKv, HostTensor, KvFormat, KvLayout, KvPageShape, PageSize, Slot};

use super::{OracleOutput, attend};

/// A problem over f32 storage: requests one after the other in a pool of identity pages.
#[derive(Clone)]
pub(super) struct Problem {
    pub(super) params: LayerParams,
    /// (`q_len`, `kv_len`) of each request.
    pub(super) requests: Vec<(u32, u32)>,
    /// `[rows, num_qo_heads, head_dim_qk]`.
    pub(super) q: Vec<f32>,
    /// `[kv tokens of all requests, num_kv_heads, head_dim_qk]`.
    pub(super) k: Vec<f32>,
    /// `[kv tokens of all requests, num_kv_heads, head_dim_vo]`.
    pub(super) v: Vec<f32>,
    pub(super) page_size: u32,
    pub(super) mask: Option<Vec<u8>>,
}

impl Problem {
    /// Reproducible values in −1..1 for every tensor.
    pub(super) fn random(params: LayerParams, requests: &[(u32, u32)], seed: u64) -> Self {
        let heads = params.heads;
        let mut state = seed;
        let mut fill = |tokens: u32, num_heads: u32, dim: u32| {
            let len = tokens * num_heads * dim;
            (0..len).map(|_| next(&mut state)).collect::<Vec<f32>>()
        };
        let (rows, tokens) = (requests.iter().map(|r| r.0).sum(), requests.iter().map(|r| r.1).sum());
        let q = fill(rows, heads.num_qo_heads, heads.head_dim_qk);
        let k = fill(tokens, heads.num_kv_heads, heads.head_dim_qk);
        let v = fill(tokens, heads.num_kv_heads, heads.head_dim_vo);
        Self { params, requests: requests.to_vec(), q, k, v, page_size: 3, mask: None }
    }

    pub(super) fn with_random_mask(mut self, seed: u64) -> Self {
        let mut state = seed;
        let bytes = mask_bytes(self.requests.iter().copied()).unwrap();
        self.mask = Some((0..bytes).map(|_| next(&mut state).to_bits().to_le_bytes()[1]).collect());
        self
    }

    pub(super) fn batch(&self) -> Batch {
        let page_size = PageSize::new(self.page_size).unwrap();
        let (mut qo_indptr, mut kv_indptr, mut last) = (vec![0], vec![0], Vec::new());
        for &(q_len, kv_len) in &self.requests {
            qo_indptr.push(qo_indptr.last().unwrap() + i32::try_from(q_len).unwrap());
            let pages = i32::try_from(page_size.pages_for(kv_len as usize)).unwrap();
            kv_indptr.push(kv_indptr.last().unwrap() + pages);
            last.push(i32::try_from(page_size.last_page_len(kv_len as usize)).unwrap());
        }
        let num_pages = *kv_indptr.last().unwrap();
        let raw = RawBatch {
            num_rows: usize::try_from(*qo_indptr.last().unwrap()).unwrap(),
            qo_indptr: &qo_indptr,
            kv_indptr: &kv_indptr,
            kv_indices: &(0..num_pages).collect::<Vec<_>>(),
            kv_last_page_len: &last,
            slot_mapping: None,
            custom_mask: self.mask.as_deref(),
        };
        let num_pages = num_pages.unsigned_abs().max(1);
        Batch::from_raw(PoolShape { num_pages, page_size }, &raw).unwrap()
    }

    pub(super) fn cache(&self, batch: &Batch) -> HostKv {
        let HeadShape { num_kv_heads, head_dim_qk, head_dim_vo, .. } = self.params.heads;
        let page_size = batch.page_size();
        let shape = KvPageShape { page_size, num_kv_heads, head_dim_k: head_dim_qk, head_dim_v: head_dim_vo };
        let shape = shape.with_pages(batch.pool().num_pages).unwrap();
        let mut cache = HostKv::new(shape, KvLayout::Nhd, KvFormat::F32).unwrap();
        let tokens = batch.requests().iter().flat_map(|r| (0..r.kv_len).map(move |p| (r, p)));
        let slot = |r, p| Slot::new(batch.page_of(r, p), p % page_size.get(), page_size).unwrap();
        let slots: Vec<_> = tokens.map(|(r, p)| slot(r, p)).collect();
        let view =
            |data, dim: u32| HostTensor::packed(data, [slots.len(), num_kv_heads as usize, dim as usize]).unwrap();
        cache.append(&slots, &view(&self.k, head_dim_qk), Some(&view(&self.v, head_dim_vo))).unwrap();
        cache
    }

    pub(super) fn q(&self) -> HostTensor<'_> {
        let rows: u32 = self.requests.iter().map(|r| r.0).sum();
        let shape = [rows, self.params.heads.num_qo_heads, self.params.heads.head_dim_qk];
        HostTensor::packed(&self.q, shape.map(|n| n as usize)).unwrap()
    }

    pub(super) fn run(&self) -> OracleOutput {
        let batch = self.batch();
        attend(&batch, &Layer::new(self.params.clone()).unwrap(), &self.q(), &self.cache(&batch))
    }
}

/// The next value of a small generator, in −1..1.
fn next(state: &mut u64) -> f32 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    let bits = u16::try_from(*state >> 48).unwrap();
    f32::from(bits) / 32_768.0 - 1.0
}

/// Equal to almost the last bit of f64.
pub(super) fn assert_close(got: &[f64], expected: &[f64]) {
    assert_eq!(got.len(), expected.len());
    for (index, (got, expected)) in got.iter().zip(expected).enumerate() {
        let close = got == expected || (got - expected).abs() <= 1e-12 * (1.0 + expected.abs());
        assert!(close, "element {index}: {got} is not {expected}");
    }
}

pub(super) fn plain(num_qo_heads: u32, num_kv_heads: u32, dim: u32) -> LayerParams {
    LayerParams { sm_scale: 0.37, ..LayerParams::causal(HeadShape::new(num_qo_heads, num_kv_heads, dim)) }
}

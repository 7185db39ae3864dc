//! One attention problem: cache, batch, queries; how to run it, and the answer in `f64` straight from the formula.
//! The formula here is these tests' own: nothing is shared with the oracle, nor with the kernels.

use std::sync::Arc;

use attn_metadata::{
    AttentionBackend, BackendConfig, Batch, BatchLimits, HeadShape, HostDevice, Io, Kv, Layer, LayerParams, Lse,
    ModelSpec, PoolShape, RawBatch, mask_bytes,
};
use half::{bf16, f16};
use kvpool::{
    Dtype, HostKv, HostTensor, HostTensorMut, KvFormat, KvLayout, KvSliceMut, PageSize, Slot, Values, f32_to_fp8_e4m3,
};

use crate::cpu::{CpuBackend, Isa};

/// One problem; a failing case prints as a line that can be pasted back.
#[derive(Clone, Debug)]
pub(super) struct Case {
    /// (q_len, kv_len) of each request.
    pub(super) requests: Vec<(usize, usize)>,
    pub(super) heads: HeadShape,
    pub(super) page_size: u32,
    pub(super) layout: KvLayout,
    pub(super) interleaved: bool,
    pub(super) values_in_keys: bool,
    pub(super) format: KvFormat,
    pub(super) causal: bool,
    pub(super) window: Option<u32>,
    pub(super) softcap: Option<f32>,
    pub(super) sinks: bool,
    pub(super) alibi: bool,
    pub(super) custom: bool,
    pub(super) padding_rows: usize,
}

pub(super) fn case(requests: &[(usize, usize)]) -> Case {
    Case {
        requests: requests.to_vec(),
        heads: HeadShape::new(4, 2, 32),
        page_size: 16,
        layout: KvLayout::Nhd,
        interleaved: false,
        values_in_keys: false,
        format: KvFormat::F32,
        causal: true,
        window: None,
        softcap: None,
        sinks: false,
        alibi: false,
        custom: false,
        padding_rows: 0,
    }
}

pub(super) struct Rng(pub(super) u64);

impl Rng {
    fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(super) fn float(&mut self) -> f32 {
        #[allow(clippy::cast_precision_loss)]
        let unit = (self.bits() >> 40) as f32 / (1u64 << 24) as f32;
        unit * 4.0 - 2.0
    }
}

/// Everything that a call needs.
pub(super) struct Problem {
    pub(super) case: Case,
    pub(super) layer: Layer,
    pub(super) cache: HostKv,
    pub(super) batch: Batch,
    pub(super) q: Vec<f32>,
}

const NAN_CODE: u8 = 0x7F;

impl Problem {
    pub(super) fn new(case: &Case) -> Problem {
        let mut rng = Rng(0x9E37_79B9_7F4A_7C15);
        let Case { heads, page_size, .. } = *case;
        let page_size = PageSize::new(page_size).unwrap();
        let per_head =
            |on: bool, rng: &mut Rng| on.then(|| (0..heads.num_qo_heads).map(|_| rng.float()).collect::<Vec<f32>>());
        let params = LayerParams {
            causal: case.causal,
            window_left: case.window,
            softcap: case.softcap,
            sinks: per_head(case.sinks, &mut rng),
            alibi_slopes: per_head(case.alibi, &mut rng).map(|s| s.iter().map(|x| x * 0.05).collect()),
            values_in_keys: case.values_in_keys,
            ..LayerParams::causal(heads)
        };
        let counts: Vec<usize> = case.requests.iter().map(|r| page_size.pages_for(r.1)).collect();
        let used: usize = counts.iter().sum();
        let num_pages = u32::try_from(used + 3).unwrap();
        let spec = params.plain_kv();
        let shape = spec.shape(num_pages, page_size);
        let made = match (case.values_in_keys, case.interleaved) {
            (true, _) => HostKv::for_spec(spec, num_pages, page_size, case.layout, case.format),
            (false, true) => HostKv::interleaved(shape, case.layout, case.format),
            (false, false) => HostKv::new(shape, case.layout, case.format),
        };
        let mut cache = made.unwrap();
        poison(&mut cache);
        // Scattered pages, the last in front.
        let ids: Vec<i32> = (0..i32::try_from(used).unwrap()).rev().map(|i| i + 2).collect();
        let batch = build_batch(case, PoolShape { num_pages, page_size }, &counts, &ids, &mut rng);
        fill(&mut cache, &batch, &mut rng);
        let rows = batch.num_rows() as usize;
        let q = (0..rows * (heads.num_qo_heads * heads.head_dim_qk) as usize).map(|_| rng.float()).collect();
        Problem { case: case.clone(), layer: Layer::new(params).unwrap(), cache, batch, q }
    }

    pub(super) fn run(&self, isa: Isa, threads: usize) -> (Vec<f32>, Vec<f32>) {
        let rows = self.batch.num_rows() as usize;
        let heads = self.case.heads;
        let model =
            ModelSpec::new(vec![self.layer.clone()], Dtype::F32, self.case.format.dtype(), self.batch.page_size());
        let device = HostDevice::with_threads(threads);
        let config = BackendConfig { model: Arc::new(model.unwrap()), limits: BatchLimits::NONE, device };
        let mut backend = CpuBackend::with_isa(&config, isa).unwrap();
        let (num_heads, qk, vo) = (heads.num_qo_heads as usize, heads.head_dim_qk as usize, heads.head_dim_vo as usize);
        let mut out = vec![f32::NAN; rows * num_heads * vo];
        let mut lse = vec![Lse::from_ln(f32::NAN); rows * num_heads];
        let step = backend.prepare_metadata(&self.batch).unwrap();
        let io = Io {
            q: HostTensor::packed(&self.q, [rows, num_heads, qk]).unwrap(),
            kv: Kv::Attend { cache: &self.cache },
            side: None,
            out: HostTensorMut::packed(&mut out, [rows, num_heads, vo]).unwrap(),
            lse: Some(lse.as_mut_slice()),
        };
        backend.forward(&step, 0, io).unwrap();
        (out, lse.iter().map(|x| x.ln()).collect())
    }

    /// Attention of one row and head in f64.
    fn exact(&self, request: usize, row: u32, head: u32) -> (Vec<f64>, f64) {
        let r = self.batch.requests()[request];
        let heads = self.case.heads;
        let (qk, vo) = (heads.head_dim_qk as usize, heads.head_dim_vo as usize);
        let at = (r.q_start + row) as usize * heads.num_qo_heads as usize + head as usize;
        let q = &self.q[at * qk..(at + 1) * qk];
        let position = r.position(row);
        let (mut k, mut v) = (vec![0.0; qk], vec![0.0; vo]);
        let mut scores = Vec::new();
        for key in 0..r.kv_len {
            let distance = i64::from(key) - position;
            let hidden = (self.case.causal && distance > 0)
                || self.case.window.is_some_and(|w| -distance > i64::from(w))
                || self.batch.custom_mask().is_some_and(|m| !m.is_visible(&r, row, key));
            if hidden {
                continue;
            }
            let slot =
                Slot::new(self.batch.page_of(&r, key), key % self.case.page_size, self.batch.page_size()).unwrap();
            self.cache.read_k(slot, head / heads.group_size(), &mut k);
            self.cache.read_v(slot, head / heads.group_size(), &mut v);
            let mut s: f64 = q.iter().zip(&k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>()
                * f64::from(self.layer.sm_scale());
            if let Some(c) = self.layer.softcap() {
                s = f64::from(c) * (s / f64::from(c)).tanh();
            }
            if let Some(slopes) = self.layer.alibi_slopes() {
                #[allow(clippy::cast_precision_loss)]
                let distance = distance as f64;
                s += f64::from(slopes[head as usize]) * distance;
            }
            scores.push((s, v.clone()));
        }
        let sink = self.layer.sinks().map_or(f64::NEG_INFINITY, |s| f64::from(s[head as usize]));
        let max = scores.iter().map(|s| s.0).fold(sink, f64::max);
        if max == f64::NEG_INFINITY {
            return (vec![0.0; vo], max);
        }
        let sum: f64 = scores.iter().map(|s| (s.0 - max).exp()).sum::<f64>() + (sink - max).exp();
        let out = (0..vo).map(|d| scores.iter().map(|s| (s.0 - max).exp() * f64::from(s.1[d])).sum::<f64>() / sum);
        (out.collect(), max + sum.ln())
    }

    pub(super) fn check(&self, isa: Isa, (out, lse): &(Vec<f32>, Vec<f32>)) {
        let heads = self.case.heads;
        let vo = heads.head_dim_vo as usize;
        // Far keys have large negative scores under ALiBi, whose last place is that much larger.
        let atol = if self.case.alibi { 8e-6 } else { 2e-6 };
        for (request, r) in self.batch.requests().iter().enumerate() {
            for row in 0..r.q_len {
                for head in 0..heads.num_qo_heads {
                    let (expected, expected_lse) = self.exact(request, row, head);
                    let at = (r.q_start + row) as usize * heads.num_qo_heads as usize + head as usize;
                    let error = |got: f32, want: f64| (f64::from(got) - want).abs();
                    let context = format!("{isa:?}, request {request}, row {row}, head {head} of {:?}", self.case);
                    for (d, want) in expected.iter().enumerate() {
                        let got = out[at * vo + d];
                        assert!(
                            error(got, *want) <= atol + 1e-5 * want.abs(),
                            "element {d}: {got} for {want}, {context}"
                        );
                    }
                    let exact = f64::from(lse[at]) == expected_lse;
                    assert!(
                        exact || error(lse[at], expected_lse) <= atol + 1e-6 * expected_lse.abs(),
                        "lse {} for {expected_lse}, {context}",
                        lse[at]
                    );
                }
            }
        }
        let used = self.batch.num_used_rows() as usize * heads.num_qo_heads as usize;
        assert!(
            out[used * vo..].iter().all(|x| x.to_bits() == 0) && lse[used..].iter().all(|x| *x == f32::NEG_INFINITY)
        );
    }
}

fn poison(cache: &mut HostKv) {
    match cache.buffer_mut() {
        KvSliceMut::F32(x) => x.fill(f32::NAN),
        KvSliceMut::F16(x) => x.fill(f16::NAN),
        KvSliceMut::Bf16(x) => x.fill(bf16::NAN),
        KvSliceMut::Fp8E4m3(x) | KvSliceMut::Fp8Latent(x) => x.fill(NAN_CODE),
    }
}

fn build_batch(case: &Case, pool: PoolShape, counts: &[usize], ids: &[i32], rng: &mut Rng) -> Batch {
    let narrow = |x: usize| i32::try_from(x).unwrap();
    let (mut qo, mut kv, mut last) = (vec![0], vec![0], Vec::new());
    for (&(q_len, kv_len), &pages) in case.requests.iter().zip(counts) {
        qo.push(qo.last().unwrap() + narrow(q_len));
        kv.push(kv.last().unwrap() + narrow(pages));
        last.push(narrow(if kv_len == 0 { 0 } else { pool.page_size.last_page_len(kv_len) as usize }));
    }
    let lens = case.requests.iter().map(|r| (u32::try_from(r.0).unwrap(), u32::try_from(r.1).unwrap()));
    let mask: Vec<u8> = (0..mask_bytes(lens).unwrap()).map(|_| rng.bits().to_le_bytes()[3]).collect();
    let raw = RawBatch {
        num_rows: usize::try_from(*qo.last().unwrap()).unwrap() + case.padding_rows,
        qo_indptr: &qo,
        kv_indptr: &kv,
        kv_indices: ids,
        kv_last_page_len: &last,
        slot_mapping: None,
        custom_mask: case.custom.then_some(&mask),
    };
    Batch::from_raw(pool, &raw).unwrap()
}

/// Fills the valid KV with numbers; all else stays poisoned.
fn fill(cache: &mut HostKv, batch: &Batch, rng: &mut Rng) {
    let page_size = batch.page_size().get();
    for r in batch.requests() {
        for key in 0..r.kv_len {
            let page = batch.page_of(r, key);
            if matches!(cache.spec().values, Values::InKeys(_)) {
                fill_keys(cache, Slot::new(page, key % page_size, batch.page_size()).unwrap(), rng);
                continue;
            }
            for head in 0..cache.shape().num_kv_heads {
                for layout in [cache.k().layout, cache.v().layout] {
                    let start = layout.element(page, key % page_size, head);
                    for at in start..start + layout.head_dim {
                        set(cache, at, rng.float());
                    }
                }
            }
        }
    }
}

/// Fills the keys of a slot, which hold the values.
fn fill_keys(cache: &mut HostKv, slot: Slot, rng: &mut Rng) {
    let shape = [1, cache.shape().num_kv_heads as usize, cache.shape().head_dim_k as usize];
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| rng.float()).collect();
    cache.append(&[slot], &HostTensor::packed(&values, shape).unwrap(), None).unwrap();
}

pub(super) fn set(cache: &mut HostKv, at: usize, x: f32) {
    match cache.buffer_mut() {
        KvSliceMut::F32(data) => data[at] = x,
        KvSliceMut::F16(data) => data[at] = f16::from_f32(x),
        KvSliceMut::Bf16(data) => data[at] = bf16::from_f32(x),
        KvSliceMut::Fp8E4m3(data) | KvSliceMut::Fp8Latent(data) => data[at] = f32_to_fp8_e4m3(x),
    }
}

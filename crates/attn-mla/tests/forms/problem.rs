//! One problem of latent attention: weights, cache, batch, queries; and how a backend runs it.

use std::sync::Arc;

use attn_metadata::{
    AttentionBackend, BackendConfig, Batch, BatchLimits, Host, HostDevice, Io, Kv, Layer, LayerParams, Lse, ModelSpec,
    PoolShape, RawBatch,
};
use attn_mla::{Form, MlaBackend, MlaFamily, MlaWeights, MlaWidths, Scale};
use attn_reference::cpu::Isa;
use kvpool::{Dtype, HostKv, HostTensor, HostTensorMut, KvFormat, KvLayout, KvScales, PageSize, Slot};

/// A problem's shape; a failing one prints as a line.
#[derive(Debug, Clone)]
pub struct Case {
    pub widths: MlaWidths,
    pub num_heads: u32,
    /// (q_len, kv_len) of each request.
    pub requests: Vec<(usize, usize)>,
    pub page_size: u32,
    pub format: KvFormat,
    pub causal: bool,
}

impl Case {
    pub fn new(num_heads: u32, requests: &[(usize, usize)]) -> Case {
        Case {
            widths: MlaWidths::new(40, 8, 24, 20).unwrap(),
            num_heads,
            requests: requests.to_vec(),
            page_size: 16,
            format: KvFormat::F32,
            causal: true,
        }
    }
}

/// One FP8 scale for keys and values, which are the same elements.
pub fn fp8() -> KvFormat {
    KvFormat::Fp8E4m3(KvScales::new(0.02, 0.02).unwrap())
}

pub struct Problem {
    pub case: Case,
    pub layer: Layer,
    pub cache: HostKv,
    pub batch: Batch,
    pub q: Vec<f32>,
}

/// Numbers in -1..1.
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn float(&mut self) -> f32 {
        #[allow(clippy::cast_precision_loss)]
        let unit = (self.bits() >> 40) as f32 / (1u64 << 23) as f32;
        unit - 1.0
    }

    pub fn floats(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.float() * scale).collect()
    }
}

impl Problem {
    pub fn new(case: &Case) -> Problem {
        Problem::with_params(case, |params| params)
    }

    pub fn with_params(case: &Case, edit: impl Fn(LayerParams) -> LayerParams) -> Problem {
        let Case { widths, num_heads, page_size, .. } = *case;
        let mut rng = Rng::new(u64::from(num_heads) + 7);
        let num_weights = (num_heads * widths.up() * widths.latent()) as usize;
        #[allow(clippy::cast_precision_loss)]
        let spread = (widths.latent() as f32).sqrt().recip();
        let weights = MlaWeights::new(widths, num_heads, &rng.floats(num_weights, 2.0 * spread)).unwrap();
        let params = MlaFamily::new(weights).layer_params(Scale::of(widths));
        let layer = Layer::new(edit(LayerParams { causal: case.causal, ..params })).unwrap();
        let page_size = PageSize::new(page_size).unwrap();
        let counts: Vec<usize> = case.requests.iter().map(|r| page_size.pages_for(r.1)).collect();
        let used: usize = counts.iter().sum();
        let num_pages = u32::try_from(used + 2).unwrap();
        // Scattered pages, the last in front; pages 0 and 1 belong to nobody.
        let ids: Vec<i32> = (0..i32::try_from(used).unwrap()).rev().map(|i| i + 2).collect();
        let mut cache = HostKv::for_spec(layer.kv(), num_pages, page_size, KvLayout::Nhd, case.format).unwrap();
        cache.buffer_mut().into_bytes().fill(0x7f); // NaN, but for f32: huge
        let batch = batch(case, PoolShape { num_pages, page_size }, &counts, &ids);
        fill(&mut cache, &batch, &mut rng);
        let q = rng.floats(batch.num_rows() as usize * (num_heads * widths.query()) as usize, 2.0);
        Problem { case: case.clone(), layer, cache, batch, q }
    }

    pub fn config(&self, num_threads: usize) -> BackendConfig<Host> {
        let layers = vec![self.layer.clone()];
        let model = ModelSpec::new(layers, Dtype::F32, self.case.format.dtype(), self.batch.page_size()).unwrap();
        let device = HostDevice::with_threads(num_threads);
        BackendConfig { model: Arc::new(model), limits: BatchLimits::NONE, device }
    }

    pub fn queries(&self) -> HostTensor<'_> {
        let heads = self.layer.heads();
        let shape = [self.batch.num_rows() as usize, heads.num_qo_heads as usize, heads.head_dim_qk as usize];
        HostTensor::packed(&self.q, shape).unwrap()
    }

    /// Outputs `[rows, heads, value]` and LSEs `[rows, heads]`.
    pub fn run(&self, form: Option<Form>, num_threads: usize) -> (Vec<f32>, Vec<f32>) {
        let mut backend = MlaBackend::with_form(&self.config(num_threads), Isa::detect(), form).unwrap();
        self.run_on(&mut backend)
    }

    pub fn run_on(&self, backend: &mut dyn AttentionBackend<Host>) -> (Vec<f32>, Vec<f32>) {
        let heads = self.layer.heads();
        let (rows, num_heads, dim) =
            (self.batch.num_rows() as usize, heads.num_qo_heads as usize, heads.head_dim_vo as usize);
        let (mut out, mut lse) = (vec![f32::NAN; rows * num_heads * dim], vec![Lse::from_ln(7.0); rows * num_heads]);
        let step = backend.prepare_metadata(&self.batch).unwrap();
        let io = Io {
            q: self.queries(),
            kv: Kv::Attend { cache: &self.cache },
            side: None,
            out: HostTensorMut::packed(&mut out, [rows, num_heads, dim]).unwrap(),
            lse: Some(lse.as_mut_slice()),
        };
        backend.forward(&step, 0, io).unwrap();
        (out, lse.iter().map(|lse| lse.ln()).collect())
    }

    /// The row of the cache at a position of a request, as real values.
    pub fn row(&self, request: usize, position: u32) -> Vec<f32> {
        let page_size = self.batch.page_size();
        let page = self.batch.page_of(&self.batch.requests()[request], position);
        let slot = Slot::new(page, position % page_size.get(), page_size).unwrap();
        let mut row = vec![0.0; self.case.widths.row() as usize];
        self.cache.read_k(slot, 0, &mut row);
        row
    }
}

fn batch(case: &Case, pool: PoolShape, counts: &[usize], ids: &[i32]) -> Batch {
    let narrow = |x: usize| i32::try_from(x).unwrap();
    let (mut qo, mut kv, mut last) = (vec![0], vec![0], Vec::new());
    for (&(q_len, kv_len), &pages) in case.requests.iter().zip(counts) {
        qo.push(qo.last().unwrap() + narrow(q_len));
        kv.push(kv.last().unwrap() + narrow(pages));
        last.push(narrow(pool.page_size.last_page_len(kv_len) as usize));
    }
    let raw = RawBatch {
        num_rows: usize::try_from(*qo.last().unwrap()).unwrap() + 1,
        qo_indptr: &qo,
        kv_indptr: &kv,
        kv_indices: ids,
        kv_last_page_len: &last,
        slot_mapping: None,
        custom_mask: None,
    };
    Batch::from_raw(pool, &raw).unwrap()
}

fn fill(cache: &mut HostKv, batch: &Batch, rng: &mut Rng) {
    let width = cache.shape().head_dim_k as usize;
    for request in batch.requests() {
        for position in 0..request.kv_len {
            let page = batch.page_of(request, position);
            let slot = Slot::new(page, position % batch.page_size().get(), batch.page_size()).unwrap();
            let row = rng.floats(width, 2.0);
            cache.append(&[slot], &HostTensor::packed(&row, [1, 1, width]).unwrap(), None).unwrap();
        }
    }
}

//! Random problems: a batch over shuffled pages, numbers that are exact in `bf16` and whose products add up exactly.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "each test binary uses a part")]

use std::sync::Arc;

use attn_conformance::Rng;
use attn_metadata::FamilyRef;
use attn_metadata::{
    BackendConfig, BackendEntry, Batch, BatchLimits, BoxedBackend, HeadShape, Host, HostDevice, Io, Kv, Layer,
    LayerParams, Lse, ModelSpec, PoolShape, Prepared, RawBatch, Side,
};
use attn_sparse::oracle::{Oracle, Row, RowResult, Scales, Sequence};
use attn_sparse::{SparseFamily, SparseParams};
use kvpool::{Dtype, HostKv, HostTensor, HostTensorMut, KvDtype, KvFormat, KvLayout, KvSpec, PageSize, Slot, Values};

/// What a problem is made from.
#[derive(Clone, Debug)]
pub struct Shape {
    pub heads: HeadShape,
    pub params: SparseParams,
    pub sm_scale: f32,
    pub page_size: u32,
    /// Cached and new tokens of each request.
    pub requests: Vec<(usize, usize)>,
    pub padding_rows: usize,
    pub kv_dtype: KvDtype,
}

/// A batch with its tensors; KV of cached tokens is in the caches, that of new ones is given with the call.
pub struct Problem {
    pub shape: Shape,
    pub batch: Batch,
    pub cache: HostKv,
    pub index_cache: HostKv,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub index_q: Vec<f32>,
    pub index_k: Vec<f32>,
    pub index_v: Vec<f32>,
    /// All tokens of each request, for the oracle.
    sequences: Vec<[Vec<f64>; 4]>,
}

/// What a call returned.
#[derive(Clone, Debug, PartialEq)]
pub struct Results {
    pub out: Vec<f32>,
    pub lse: Vec<f32>,
    pub index_out: Vec<f32>,
}

/// A multiple of 1/32 within ±2.
fn number(rng: &mut Rng) -> f32 {
    f32::from(u8::try_from(rng.below(129)).unwrap()) / 32.0 - 2.0
}

fn numbers(rng: &mut Rng, len: usize) -> Vec<f32> {
    (0..len).map(|_| number(rng)).collect()
}

impl Problem {
    pub fn new(shape: Shape, seed: u64) -> Self {
        let mut rng = Rng::new(&[seed, 17]);
        let page_size = PageSize::new(shape.page_size).unwrap();
        let lens: Vec<usize> = shape.requests.iter().map(|(cached, new)| cached + new).collect();
        let num_pages: usize = lens.iter().map(|&len| page_size.pages_for(len)).sum::<usize>() + 2;
        let pool = PoolShape { num_pages: u32::try_from(num_pages).unwrap(), page_size };
        let mut pages: Vec<i32> = (0i32..).take(num_pages).collect();
        rng.shuffle(&mut pages);
        let (dims, heads) = (shape.params.index_dim, shape.heads);
        let values = if shape.params.has_index_value { Values::Own(dims) } else { Values::None };
        let spec = KvSpec {
            num_kv_heads: heads.num_kv_heads,
            head_dim_k: heads.head_dim_qk,
            values: Values::Own(heads.head_dim_vo),
        };
        let format = match shape.kv_dtype {
            KvDtype::Bf16 => KvFormat::Bf16,
            KvDtype::F16 => KvFormat::F16,
            _ => KvFormat::F32,
        };
        let index_spec = KvSpec { num_kv_heads: 1, head_dim_k: dims, values };
        let new_cache = |spec| HostKv::for_spec(spec, pool.num_pages, page_size, KvLayout::Nhd, format).unwrap();
        let mut problem = Problem {
            batch: Batch::empty(pool),
            cache: new_cache(spec),
            index_cache: new_cache(index_spec),
            q: Vec::new(),
            k: Vec::new(),
            v: Vec::new(),
            index_q: Vec::new(),
            index_k: Vec::new(),
            index_v: Vec::new(),
            sequences: Vec::new(),
            shape,
        };
        problem.fill(&mut rng, &pages, pool);
        problem
    }

    fn fill(&mut self, rng: &mut Rng, pages: &[i32], pool: PoolShape) {
        poison(&mut self.cache);
        poison(&mut self.index_cache);
        let (mut qo_indptr, mut kv_indptr, mut kv_indices, mut last) = (vec![0i32], vec![0i32], Vec::new(), Vec::new());
        let mut slots = Vec::new();
        let mut left = pages.iter().copied();
        for (cached, new) in self.shape.requests.clone() {
            let len = cached + new;
            let own: Vec<i32> = left.by_ref().take(pool.page_size.pages_for(len)).collect();
            self.add_request(rng, &own, cached, len, &mut slots);
            kv_indices.extend(own);
            kv_indptr.push(i32::try_from(kv_indices.len()).unwrap());
            qo_indptr.push(qo_indptr.last().unwrap() + i32::try_from(new).unwrap());
            last.push(pool.page_size.last_page_len(len).cast_signed());
        }
        slots.resize(slots.len() + self.shape.padding_rows, Slot::PADDING);
        let rows = slots.len();
        let Shape { heads, params, .. } = self.shape;
        let widths = [
            (&mut self.k, heads.num_kv_heads * heads.head_dim_qk),
            (&mut self.v, heads.num_kv_heads * heads.head_dim_vo),
            (&mut self.index_k, params.index_dim),
            (&mut self.index_v, params.index_dim),
        ];
        // Padding rows hold what must not matter.
        widths.into_iter().for_each(|(data, width)| data.resize(rows * width as usize, f32::NAN));
        self.q = numbers(rng, rows * (heads.num_qo_heads * heads.head_dim_qk) as usize);
        self.index_q = numbers(rng, rows * (params.num_index_heads * params.index_dim) as usize);
        let raw = RawBatch {
            num_rows: rows,
            qo_indptr: &qo_indptr,
            kv_indptr: &kv_indptr,
            kv_indices: &kv_indices,
            kv_last_page_len: &last,
            slot_mapping: Some(&slots),
            custom_mask: None,
        };
        self.batch = Batch::from_raw(pool, &raw).unwrap();
    }

    fn add_request(&mut self, rng: &mut Rng, pages: &[i32], cached: usize, len: usize, slots: &mut Vec<Slot>) {
        let Shape { heads, params, page_size, .. } = self.shape;
        let [k_width, v_width] = [heads.head_dim_qk, heads.head_dim_vo].map(|dim| (heads.num_kv_heads * dim) as usize);
        let width = params.index_dim as usize;
        let mut all = [k_width, v_width, width, width].map(|width| numbers(rng, len * width));
        if !params.has_index_value {
            all[3].clear();
        }
        let slot = |position: usize| {
            let page = pages[position / page_size as usize];
            Slot::from_raw(page * page_size.cast_signed() + i32::try_from(position % page_size as usize).unwrap())
        };
        let stored: Vec<Slot> = (0..cached).map(slot).collect();
        let part = |data: &Vec<f32>, heads: u32, from: usize, to: usize| -> (Vec<f32>, [usize; 3]) {
            let width = data.len() / len.max(1);
            (data[from * width..to * width].to_vec(), [to - from, heads as usize, width / heads as usize])
        };
        let append = |cache: &mut HostKv, k: &Vec<f32>, v: Option<&Vec<f32>>, heads: u32| {
            let (k, k_shape) = part(k, heads, 0, cached);
            let v = v.map(|v| part(v, heads, 0, cached));
            let v = v.as_ref().map(|(v, shape)| HostTensor::packed(&v[..], *shape).unwrap());
            cache.append(&stored, &HostTensor::packed(&k[..], k_shape).unwrap(), v.as_ref()).unwrap();
        };
        if cached > 0 {
            append(&mut self.cache, &all[0], Some(&all[1]), heads.num_kv_heads);
            append(&mut self.index_cache, &all[2], params.has_index_value.then_some(&all[3]), 1);
        }
        self.k.extend(&all[0][cached * k_width..]);
        self.v.extend(&all[1][cached * v_width..]);
        self.index_k.extend(&all[2][cached * width..]);
        if params.has_index_value {
            self.index_v.extend(&all[3][cached * width..]);
        } else {
            self.index_v.extend(vec![0.0; (len - cached) * width]);
        }
        slots.extend((cached..len).map(slot));
        self.sequences.push(all.map(|data| data.into_iter().map(f64::from).collect()));
    }

    pub fn layer(&self) -> Layer {
        layer(&self.shape)
    }

    pub fn backend(&self, entry: &BackendEntry<Host>) -> BoxedBackend<Host> {
        self.backend_of(entry, vec![self.layer()])
    }

    pub fn backend_of(&self, entry: &BackendEntry<Host>, layers: Vec<Layer>) -> BoxedBackend<Host> {
        (entry.create)(&self.config(layers)).unwrap()
    }

    pub fn config(&self, layers: Vec<Layer>) -> BackendConfig<Host> {
        let page_size = PageSize::new(self.shape.page_size).unwrap();
        let model = ModelSpec::new(layers, Dtype::F32, self.shape.kv_dtype, page_size).unwrap();
        let device = HostDevice::with_threads(2);
        BackendConfig { model: Arc::new(model), limits: BatchLimits::NONE, device }
    }

    /// Prepares and runs the first layer over fresh copies of the caches.
    pub fn run(&self, backend: &mut dyn attn_metadata::AttentionBackend<Host>) -> (Prepared, Results) {
        let step = backend.prepare_metadata(&self.batch).unwrap();
        let results = self.forward(backend, &step, 0, true).unwrap();
        (step, results)
    }

    /// Runs a layer; the side branch is left out where the layer has none.
    pub fn forward(
        &self,
        backend: &mut dyn attn_metadata::AttentionBackend<Host>,
        step: &Prepared,
        layer: usize,
        has_side: bool,
    ) -> Result<Results, attn_metadata::RunError> {
        let Shape { heads, params, .. } = self.shape;
        let rows = self.batch.num_rows() as usize;
        let [hq, hkv, qk, vo] =
            [heads.num_qo_heads, heads.num_kv_heads, heads.head_dim_qk, heads.head_dim_vo].map(|x| x as usize);
        let (hi, di) = (params.num_index_heads as usize, params.index_dim as usize);
        let (mut cache, mut index_cache) = (self.cache.clone(), self.index_cache.clone());
        let mut out = vec![7.0f32; rows * hq * vo];
        let mut index_out = vec![7.0f32; rows * hi * di];
        let mut lse = vec![Lse::from_ln(7.0); rows * hq];
        let has_value = params.has_index_value;
        let tensor = |data, heads, dim| HostTensor::packed(data, [rows, heads, dim]).unwrap();
        let side = Side {
            q: tensor(&self.index_q[..], hi, di),
            kv: Kv::Append {
                cache: &mut index_cache,
                k: tensor(&self.index_k[..], 1, di),
                v: has_value.then(|| tensor(&self.index_v[..], 1, di)),
            },
            out: has_value.then(|| HostTensorMut::packed(&mut index_out[..], [rows, hi, di]).unwrap()),
        };
        let io = Io {
            q: tensor(&self.q[..], hq, qk),
            kv: Kv::Append {
                cache: &mut cache,
                k: tensor(&self.k[..], hkv, qk),
                v: Some(tensor(&self.v[..], hkv, vo)),
            },
            side: has_side.then_some(side),
            out: HostTensorMut::packed(&mut out[..], [rows, hq, vo]).unwrap(),
            lse: Some(&mut lse[..]),
        };
        backend.forward(step, layer, io)?;
        if !has_value {
            index_out.clear();
        }
        Ok(Results { out, lse: lse.iter().map(|lse| lse.ln()).collect(), index_out })
    }

    pub fn oracle(&self) -> Oracle {
        let Shape { heads, params, sm_scale, .. } = self.shape;
        let scales = Scales { main: f64::from(sm_scale), index: f64::from(params.index_scale) };
        Oracle { heads, params, scales }
    }

    /// The oracle's results of every row of a request, in order.
    pub fn oracle_rows(&self) -> Vec<RowResult> {
        let oracle = self.oracle();
        let mut results = Vec::new();
        for (request, (cached, new)) in self.shape.requests.iter().enumerate() {
            let sequence = self.sequence(request);
            for row in 0..*new {
                let at = results.len();
                let (q, index_q) = (self.row_of(&self.q, at), self.row_of(&self.index_q, at));
                results.push(oracle.row(&sequence, &Row { visible: cached + row + 1, q: &q, index_q: &index_q }));
            }
        }
        results
    }

    pub fn sequence(&self, request: usize) -> Sequence<'_> {
        let [keys, values, index_keys, index_values] = &self.sequences[request];
        let index_values = self.shape.params.has_index_value.then_some(&index_values[..]);
        Sequence { keys, values, index_keys, index_values }
    }

    pub fn row_of(&self, data: &[f32], row: usize) -> Vec<f64> {
        let width = data.len() / self.batch.num_rows() as usize;
        data[row * width..(row + 1) * width].iter().copied().map(f64::from).collect()
    }
}

pub fn layer(shape: &Shape) -> Layer {
    let family = SparseFamily::new(shape.params, &shape.heads).unwrap();
    Layer::new(LayerParams {
        sm_scale: shape.sm_scale,
        family: Some(FamilyRef::new(family)),
        ..LayerParams::causal(shape.heads)
    })
    .unwrap()
}

/// NaN in every slot: whoever reads one that was not written is found out.
fn poison(cache: &mut HostKv) {
    match cache.buffer_mut() {
        kvpool::KvSliceMut::F32(data) => data.fill(f32::NAN),
        kvpool::KvSliceMut::F16(data) => data.fill(half::f16::NAN),
        kvpool::KvSliceMut::Bf16(data) => data.fill(half::bf16::NAN),
        kvpool::KvSliceMut::Fp8E4m3(data) | kvpool::KvSliceMut::Fp8Latent(data) => data.fill(0x7f),
    }
}

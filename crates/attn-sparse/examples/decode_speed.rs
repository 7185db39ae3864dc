//! How much faster a decode step is when it is sparse: block-sparse and dense attention over the same cache, in turns.
//! Medians say what a step takes beside what else the machine does, the least times what it takes alone.
//!
//! ```text
//! cargo run --release --package attn-sparse --example decode_speed -- [--tokens 65536] [--json]
//! ```
#![allow(clippy::print_stdout)]

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use attn_metadata::{
    AttentionBackend, BackendConfig, Batch, BatchLimits, HeadShape, Host, HostDevice, Io, Kv, Layer, LayerParams,
    ModelSpec, PoolShape, RawBatch, Side,
};
use attn_reference::cpu::CpuBackend;
use attn_sparse::{BlockParams, SparseBackend, SparseFamily, SparseParams};
use kvpool::{
    Dtype, HostKv, HostTensor, HostTensorMut, KvDtype, KvFormat, KvLayout, KvSliceMut, KvSpec, PageSize, Values,
};
use serde_json::json;

const THREADS: usize = 2;
const ROUNDS: usize = 25;
const INDEX_HEADS: u32 = 4;
const DIM: u32 = 128;
const BLOCKS: BlockParams = BlockParams { block_size: 128, topk: 16, init_blocks: 0, local_blocks: 1 };

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let is_json = args.iter().any(|arg| arg == "--json");
    let tokens = match args.iter().position(|arg| arg == "--tokens") {
        Some(at) => args.get(at + 1).ok_or("--tokens needs a number")?.parse()?,
        None => 65_536,
    };
    let mut rows = Vec::new();
    for (kv_heads, index_heads) in [(4, INDEX_HEADS), (2, 2), (1, 1)] {
        for format in [KvFormat::Bf16, KvFormat::F32] {
            let heads = HeadShape::new(16 * kv_heads, kv_heads, DIM);
            rows.push(measure(heads, index_heads, format, tokens)?);
        }
    }
    if is_json {
        println!("{:#}", json!({ "tokens": tokens, "threads": THREADS, "rounds": ROUNDS, "results": rows }));
        return Ok(());
    }
    for row in rows {
        println!("{row}");
    }
    Ok(())
}

/// The two backends in turns over one cache; medians.
fn measure(
    heads: HeadShape,
    index_heads: u32,
    format: KvFormat,
    tokens: u32,
) -> Result<serde_json::Value, Box<dyn Error>> {
    let page_size = PageSize::new(16)?;
    let pool = PoolShape { num_pages: tokens.div_ceil(16), page_size };
    let params = SparseParams::new(BLOCKS, index_heads, DIM);
    let sparse_layer = SparseFamily::new(params, &heads)?.layer(heads)?;
    let dense_layer = Layer::new(LayerParams::causal(heads))?;
    let mut sparse = SparseBackend::new(&config(sparse_layer, format.dtype(), page_size)?)?;
    let mut dense = CpuBackend::new(&config(dense_layer, format.dtype(), page_size)?)?;
    let index_spec = KvSpec { num_kv_heads: 1, head_dim_k: DIM, values: Values::None };
    let mut noise = Noise(7);
    let mut cache =
        HostKv::for_spec(KvSpec::new(heads.num_kv_heads, DIM), pool.num_pages, page_size, KvLayout::Nhd, format)?;
    let mut index_cache = HostKv::for_spec(index_spec, pool.num_pages, page_size, KvLayout::Nhd, format)?;
    noise.fill(cache.buffer_mut());
    noise.fill(index_cache.buffer_mut());
    let batch = decode(pool, tokens)?;
    let (q_step, d_step) = (sparse.prepare_metadata(&batch)?, dense.prepare_metadata(&batch)?);
    let q = noise.floats(heads.num_qo_heads as usize * DIM as usize);
    let index_q = noise.floats(index_heads as usize * DIM as usize);
    let mut out = vec![0.0f32; q.len()];
    let (mut sparse_times, mut dense_times) = (Vec::new(), Vec::new());
    for _ in 0..=ROUNDS {
        let side = Side { q: tensor(&index_q, index_heads)?, kv: Kv::Attend { cache: &index_cache }, out: None };
        sparse_times.push(timed(&mut sparse, &q_step, &q, &cache, Some(side), &mut out)?);
        dense_times.push(timed(&mut dense, &d_step, &q, &cache, None, &mut out)?);
    }
    let ([sparse_ms, sparse_best], [dense_ms, dense_best]) = (stats_ms(&mut sparse_times), stats_ms(&mut dense_times));
    Ok(json!({
        "q_heads": heads.num_qo_heads, "kv_heads": heads.num_kv_heads, "index_heads": index_heads,
        "kv_dtype": format.dtype().name(), "dense_ms": dense_ms, "sparse_ms": sparse_ms,
        "dense_over_sparse": dense_ms / sparse_ms,
        "dense_best_ms": dense_best, "sparse_best_ms": sparse_best, "best_over_best": dense_best / sparse_best,
    }))
}

fn config(layer: Layer, kv_dtype: KvDtype, page_size: PageSize) -> Result<BackendConfig<Host>, Box<dyn Error>> {
    let model = Arc::new(ModelSpec::new(vec![layer], Dtype::F32, kv_dtype, page_size)?);
    let device = HostDevice::with_threads(THREADS);
    Ok(BackendConfig { model, limits: BatchLimits::NONE, device })
}

/// One request of this many tokens, on pages in a scattered order, that decodes one.
fn decode(pool: PoolShape, tokens: u32) -> Result<Batch, Box<dyn Error>> {
    let n = pool.num_pages;
    let stride = (n / 3..).find(|s| gcd(*s, n) == 1).ok_or("a stride")?;
    let place = |i: u32| u32::try_from(u64::from(i) * u64::from(stride) % u64::from(n)).map(u32::cast_signed);
    let pages = (0..n).map(place).collect::<Result<Vec<i32>, _>>()?;
    let raw = RawBatch {
        num_rows: 1,
        qo_indptr: &[0, 1],
        kv_indptr: &[0, n.cast_signed()],
        kv_indices: &pages,
        kv_last_page_len: &[pool.page_size.last_page_len(tokens as usize).cast_signed()],
        slot_mapping: None,
        custom_mask: None,
    };
    Ok(Batch::from_raw(pool, &raw)?)
}

const fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn tensor(data: &[f32], heads: u32) -> Result<HostTensor<'_>, kvpool::ShapeError> {
    HostTensor::packed(data, [1, heads as usize, DIM as usize])
}

fn timed<'a>(
    backend: &mut dyn AttentionBackend<Host>,
    step: &attn_metadata::Prepared,
    q: &'a [f32],
    cache: &'a HostKv,
    side: Option<Side<'a, Host>>,
    out: &'a mut [f32],
) -> Result<Duration, Box<dyn Error>> {
    let heads = backend.model().layers()[0].heads().num_qo_heads;
    let out = HostTensorMut::packed(out, [1, heads as usize, DIM as usize])?;
    let io = Io { q: tensor(q, heads)?, kv: Kv::Attend { cache }, side, out, lse: None };
    let begin = Instant::now();
    backend.forward(step, 0, io)?;
    Ok(begin.elapsed())
}

/// Median and least, without the first one, which warms up.
fn stats_ms(times: &mut [Duration]) -> [f64; 2] {
    let times = &mut times[1..];
    times.sort();
    [times[times.len() / 2], times[0]].map(|time| time.as_secs_f64() * 1e3)
}

/// Reproducible numbers in -1..1.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        f32::from(((self.0 >> 48) as u16).cast_signed()) / 32768.0
    }

    fn floats(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.next()).collect()
    }

    fn fill(&mut self, data: KvSliceMut<'_>) {
        match data {
            KvSliceMut::F32(data) => data.iter_mut().for_each(|x| *x = self.next()),
            KvSliceMut::Bf16(data) => data.iter_mut().for_each(|x| *x = half::bf16::from_f32(self.next())),
            KvSliceMut::F16(data) => data.iter_mut().for_each(|x| *x = half::f16::from_f32(self.next())),
            KvSliceMut::Fp8E4m3(data) | KvSliceMut::Fp8Latent(data) => data.fill(0x30),
        }
    }
}

//! Latent attention against what the machine can do: memory reads and multiply-adds, measured in the same run.
//!
//! `cargo run --release -p attn-mla --example mla_bench -- [--json] [--threads N] [--only PART_OF_A_NAME]`

#![allow(clippy::print_stdout, clippy::cast_precision_loss)]

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use attn_metadata::{
    AttentionBackend as _, BackendConfig, Batch, BatchLimits, HostDevice, Io, Kv, Layer, LayerParams, ModelSpec,
    PoolShape, RawBatch,
};
use attn_mla::{IndexList, MlaBackend, MlaFamily, MlaWeights, MlaWidths, Scale, SparseAttention, absorbed_params};
use kvpool::{Dtype, HostKv, HostTensor, HostTensorMut, KvFormat, KvLayout, KvScales, PageSize, Slot};
use serde_json::{Value, json};

type Error = Box<dyn std::error::Error>;

const WIDTHS: MlaWidths = MlaWidths::DEEPSEEK;
const PAGE_SIZE: u32 = 64;
const REPS: usize = 15;

/// What is measured.
struct Workload {
    name: &'static str,
    num_heads: u32,
    format: KvFormat,
    requests: usize,
    q_len: usize,
    kv_len: usize,
    /// Pages that hold it all, over and over: few are in a cache of the CPU's. `None`: pages of their own.
    distinct_pages: Option<usize>,
    kind: Kind,
}

enum Kind {
    /// A layer whose queries are absorbed already.
    Absorbed,
    /// A layer with weights.
    Weighted,
    /// The same, over a list of this many slots a token.
    Sparse(usize),
}

fn workloads() -> Result<Vec<Workload>, Error> {
    let fp8 = KvFormat::Fp8E4m3(KvScales::new(0.02, 0.02)?);
    let decode = |name, num_heads, format| Workload {
        name,
        num_heads,
        format,
        requests: 8,
        q_len: 1,
        kv_len: 4096,
        distinct_pages: None,
        kind: Kind::Absorbed,
    };
    let weighted = |name, num_heads, requests, q_len, kv_len| Workload {
        name,
        num_heads,
        format: KvFormat::Bf16,
        requests,
        q_len,
        kv_len,
        distinct_pages: None,
        kind: Kind::Weighted,
    };
    let sparse = |name, format| Workload { kind: Kind::Sparse(2048), ..decode(name, 128, format) };
    Ok(vec![
        decode("decode 16 heads f32", 16, KvFormat::F32),
        Workload { distinct_pages: Some(4), ..decode("decode 16 heads f32 in cache", 16, KvFormat::F32) },
        decode("decode 16 heads bf16", 16, KvFormat::Bf16),
        Workload { distinct_pages: Some(4), ..decode("decode 16 heads bf16 in cache", 16, KvFormat::Bf16) },
        decode("decode 16 heads f16", 16, KvFormat::F16),
        decode("decode 16 heads fp8", 16, fp8),
        decode("decode 16 heads rows", 16, KvFormat::Fp8Latent),
        decode("decode 1 head f32", 1, KvFormat::F32),
        decode("decode 64 heads bf16", 64, KvFormat::Bf16),
        decode("decode 128 heads bf16", 128, KvFormat::Bf16),
        decode("decode 128 heads rows", 128, KvFormat::Fp8Latent),
        sparse("sparse 128 heads bf16", KvFormat::Bf16),
        sparse("sparse 128 heads rows", KvFormat::Fp8Latent),
        weighted("decode 16 heads with weights", 16, 8, 1, 4096),
        weighted("prefill 16 heads 1024", 16, 1, 1024, 1024),
        weighted("prefill 16 heads 512 on 4096", 16, 1, 512, 4608),
    ])
}

fn main() -> Result<(), Error> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let value_of = |name: &str| match args.iter().position(|arg| arg == name) {
        Some(at) => args.get(at + 1).map(|value| Some(value.as_str())).ok_or(format!("{name} needs a value")),
        None => Ok(None),
    };
    let threads = value_of("--threads")?.map_or(Ok(2), str::parse)?;
    let only = value_of("--only")?.unwrap_or_default();
    let is_json = args.iter().any(|arg| arg == "--json");
    let first_reads = read_gbs(threads);
    let mut results = Vec::new();
    if !is_json {
        println!("{threads} threads, memory reads {first_reads:.1} GB/s before the first, {}", load());
        println!("{:<30} {:>9} {:>9} {:>9} {:>10}", "workload", "ms", "GB/s", "of reads", "GFLOP/s");
    }
    for workload in workloads()?.into_iter().filter(|workload| workload.name.contains(only)) {
        // The memory's rate changes with what others do: measured again beside each workload.
        let reads = read_gbs(threads);
        let ms = measure(&workload, threads)?;
        let (bytes, flops) = work(&workload);
        let (gbs, gflops) = (bytes / ms / 1e6, flops / ms / 1e6);
        if is_json {
            results.push(json!({
                "workload": workload.name, "ms": ms, "gb_per_s": gbs, "reads_gb_per_s": reads,
                "of_reads": gbs / reads, "gflop_per_s": gflops,
            }));
        } else {
            println!("{:<30} {ms:>9.2} {gbs:>9.1} {:>8.0}% {gflops:>10.0}", workload.name, 100.0 * gbs / reads);
        }
    }
    if is_json {
        let all: Value =
            json!({ "threads": threads, "load": load(), "reads_gb_per_s": first_reads, "results": results });
        println!("{}", serde_json::to_string_pretty(&all)?);
    }
    Ok(())
}

/// Bytes of rows that are read once, and operations of the attention (those of the cheaper form, with weights).
fn work(w: &Workload) -> (f64, f64) {
    let row_bytes = match w.format {
        KvFormat::Fp8Latent => 656.0,
        format => f64::from(WIDTHS.row()) * format.dtype().element_bytes() as f64,
    };
    let (requests, q, kv) = (w.requests as f64, w.q_len as f64, w.kv_len as f64);
    let kv = if let Kind::Sparse(topk) = w.kind { topk as f64 } else { kv };
    let heads = f64::from(w.num_heads);
    let pairs = q * kv - q * (q - 1.0) / 2.0;
    let absorbed = 2.0 * heads * pairs * f64::from(WIDTHS.row() + WIDTHS.latent());
    let project = 2.0 * heads * f64::from(WIDTHS.latent() * WIDTHS.up());
    let flops = match w.kind {
        Kind::Absorbed | Kind::Sparse(_) => absorbed,
        Kind::Weighted if q < 16.0 => absorbed + q * project,
        Kind::Weighted => 2.0 * heads * pairs * f64::from(WIDTHS.query() + WIDTHS.value()) + kv * project,
    };
    (requests * kv * row_bytes, requests * flops)
}

/// Median milliseconds of a call.
fn measure(w: &Workload, threads: usize) -> Result<f64, Error> {
    let page_size = PageSize::new(PAGE_SIZE)?;
    let params: LayerParams = match w.kind {
        Kind::Weighted => {
            let len = (w.num_heads * WIDTHS.up() * WIDTHS.latent()) as usize;
            MlaFamily::new(MlaWeights::new(WIDTHS, w.num_heads, &numbers(len, 0.05))?).layer_params(Scale::of(WIDTHS))
        }
        Kind::Absorbed | Kind::Sparse(_) => absorbed_params(WIDTHS, w.num_heads, Scale::of(WIDTHS)),
    };
    let layer = Layer::new(params)?;
    let per_request = page_size.pages_for(w.kv_len);
    let num_pages = u32::try_from(w.distinct_pages.unwrap_or(per_request * w.requests))?;
    let mut cache = HostKv::for_spec(layer.kv(), num_pages, page_size, KvLayout::Nhd, w.format)?;
    fill(&mut cache)?;
    let heads = layer.heads();
    let rows = w.requests * w.q_len;
    let shape = |width: u32| [rows, heads.num_qo_heads as usize, width as usize];
    let q = numbers(shape(heads.head_dim_qk).iter().product(), 1.0);
    let q = HostTensor::packed(&q, shape(heads.head_dim_qk))?;
    let mut out = vec![0.0f32; shape(heads.head_dim_vo).iter().product()];
    let device = HostDevice::with_threads(threads);
    if let Kind::Sparse(topk) = w.kind {
        let mut attention = SparseAttention::new(&layer, w.format, Dtype::F32, device)?;
        let list = random_list(rows, topk, cache.shape().num_slots())?;
        return median(|| {
            let mut out = HostTensorMut::packed(&mut out, shape(heads.head_dim_vo))?;
            Ok(attention.attend(&q, &cache, &list, &mut out, None)?)
        });
    }
    let model = Arc::new(ModelSpec::new(vec![layer], Dtype::F32, w.format.dtype(), page_size)?);
    let mut backend = MlaBackend::new(&BackendConfig { model, limits: BatchLimits::NONE, device })?;
    let step = backend.prepare_metadata(&batch(w, page_size, num_pages)?)?;
    median(|| {
        let out = HostTensorMut::packed(&mut out, shape(heads.head_dim_vo))?;
        Ok(backend.forward(&step, 0, Io { q, kv: Kv::Attend { cache: &cache }, side: None, out, lse: None })?)
    })
}

fn median(mut call: impl FnMut() -> Result<(), Error>) -> Result<f64, Error> {
    call()?;
    let mut times = Vec::new();
    for _ in 0..REPS {
        let started = Instant::now();
        call()?;
        times.push(started.elapsed().as_secs_f64() * 1e3);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[REPS / 2])
}

/// Requests over pages that are scattered over the pool.
fn batch(w: &Workload, page_size: PageSize, num_pages: u32) -> Result<Batch, Error> {
    let per_request = page_size.pages_for(w.kv_len);
    let table = |step: usize| (0..=w.requests).map(|i| i32::try_from(i * step)).collect::<Result<Vec<_>, _>>();
    let count = num_pages as usize;
    let stride = (37..).find(|stride| gcd(count, *stride) == 1).ok_or("there is one below the count")?;
    let all = 0..per_request * w.requests;
    let pages = all.map(|i| i32::try_from(i * stride % count)).collect::<Result<Vec<_>, _>>()?;
    let raw = RawBatch {
        num_rows: w.requests * w.q_len,
        qo_indptr: &table(w.q_len)?,
        kv_indptr: &table(per_request)?,
        kv_indices: &pages,
        kv_last_page_len: &vec![i32::try_from(page_size.last_page_len(w.kv_len))?; w.requests],
        slot_mapping: None,
        custom_mask: None,
    };
    Ok(Batch::from_raw(PoolShape { num_pages, page_size }, &raw)?)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn random_list(tokens: usize, topk: usize, num_slots: u64) -> Result<IndexList, Error> {
    let count = usize::try_from(num_slots)?;
    let indices: Vec<i32> = (0..tokens)
        .flat_map(|token| (0..topk).map(move |i| i32::try_from((token * 977 + i * 13) % count)))
        .collect::<Result<_, _>>()?;
    let mut list = IndexList::new();
    list.set(&indices, topk, None, num_slots)?;
    Ok(list)
}

fn fill(cache: &mut HostKv) -> Result<(), Error> {
    let width = cache.shape().head_dim_k as usize;
    let rows = numbers(64 * width, 1.0);
    let slots: Vec<Slot> = (0..i32::try_from(cache.shape().num_slots())?).map(Slot::from_raw).collect();
    for slots in slots.chunks(64) {
        cache.append(slots, &HostTensor::packed(&rows[..slots.len() * width], [slots.len(), 1, width])?, None)?;
    }
    Ok(())
}

/// Numbers in -scale..scale that look random.
fn numbers(n: usize, scale: f32) -> Vec<f32> {
    let mut state = 0x9E37_79B9u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f32::from(u16::try_from(state >> 16).expect("16 bits are left")) / 32_768.0 - 1.0
    };
    (0..n).map(|_| scale * next()).collect()
}

/// Best rate of summing 256 MiB on some threads, in GB/s.
fn read_gbs(threads: usize) -> f64 {
    let words = vec![1u64; 32 << 20];
    let part = words.len().div_ceil(threads);
    let read = || {
        let started = Instant::now();
        std::thread::scope(|scope| {
            for part in words.chunks(part) {
                scope.spawn(move || black_box(part.iter().fold(0u64, |a, b| a.wrapping_add(*b))));
            }
        });
        started.elapsed().as_secs_f64()
    };
    let best = (0..6).map(|_| read()).fold(f64::INFINITY, f64::min);
    (words.len() * 8) as f64 / best / 1e9
}

/// The machine's load, where the system tells.
fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().next().map_or_else(|| "load unknown".to_owned(), |load| format!("load {load}"))
}

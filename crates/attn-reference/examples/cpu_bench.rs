//! Times the CPU backend on four workloads: `cpu_bench [threads] [page_size] [nhd|hnd] [f32|bf16|fp8] [filter]`.
#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::cast_possible_truncation, clippy::cast_precision_loss, clippy::cast_possible_wrap)]

use std::sync::Arc;
use std::time::Instant;

use attn_metadata::*;
use attn_reference::cpu::{CpuBackend, Isa};
use kvpool::*;

struct Rng(u64);
impl Rng {
    fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        let s: f32 = (0..4).map(|i| ((self.0 >> (16 * i)) & 0xFFFF) as f32 / 65536.0 - 0.5).sum();
        s * 1.7
    }
}

fn main() {
    let arg = |i: usize, d: &str| std::env::args().nth(i).unwrap_or(d.to_owned());
    let threads: usize = arg(1, "2").parse().unwrap();
    let ps: u32 = arg(2, "16").parse().unwrap();
    let layout = if arg(3, "nhd") == "nhd" { KvLayout::Nhd } else { KvLayout::Hnd };
    let format = match arg(4, "f32").as_str() {
        "f32" => KvFormat::F32,
        "bf16" => KvFormat::Bf16,
        "f16" => KvFormat::F16,
        _ => KvFormat::Fp8E4m3(KvScales::new(0.5, 0.25).unwrap()),
    };
    let (hq, hkv, d) = (32u32, 8u32, 128u32);
    for (name, b, q_len, kv_len, reps) in
        [("prefill-1x2048", 1, 2048, 2048, 9), ("prefill-4x512", 4, 512, 512, 15), ("decode-8x4096", 8, 1, 4096, 41), ("decode-1x16384", 1, 1, 16384, 41)]
    {
        if !name.contains(&arg(5, "")) {
            continue;
        }
        let page_size = PageSize::new(ps).unwrap();
        let per = (kv_len as u32).div_ceil(ps);
        let pages = per * b as u32;
        let layer = Layer::new(LayerParams::causal(HeadShape::new(hq, hkv, d))).unwrap();
        let model = Arc::new(ModelSpec::new(vec![layer], Dtype::F32, format.dtype(), page_size).unwrap());
        let config = BackendConfig { model, limits: BatchLimits::NONE, device: HostDevice { num_threads: Some(threads) } };
        let isa = match arg(6, "").as_str() {
            "" => Isa::detect(),
            name => Isa::available().find(|i| i.name() == name).unwrap(),
        };
        let mut backend = CpuBackend::with_isa(&config, isa).unwrap();
        let shape = KvShape { num_pages: pages, page_size, num_kv_heads: hkv, head_dim_k: d, head_dim_v: d };
        let mut cache = HostKv::new(shape, layout, format).unwrap();
        let mut rng = Rng(88172645463325252);
        match cache.buffer_mut() {
            KvSliceMut::F32(x) => x.iter_mut().for_each(|x| *x = rng.next()),
            KvSliceMut::F16(x) => x.iter_mut().for_each(|x| *x = half::f16::from_f32(rng.next())),
            KvSliceMut::Bf16(x) => x.iter_mut().for_each(|x| *x = half::bf16::from_f32(rng.next())),
            KvSliceMut::Fp8E4m3(x) => x.iter_mut().for_each(|x| *x = f32_to_fp8_e4m3(rng.next())),
        }
        let rows = b * q_len;
        let mut r = |n: usize| (0..n).map(|_| rng.next()).collect::<Vec<f32>>();
        let q = r(rows * (hq * d) as usize);
        let k = r(rows * (hkv * d) as usize);
        let v = r(rows * (hkv * d) as usize);
        let mut out = vec![0f32; rows * (hq * d) as usize];
        let qo: Vec<i32> = (0..=b).map(|i| (i * q_len) as i32).collect();
        let kvp: Vec<i32> = (0..=b).map(|i| (i as u32 * per) as i32).collect();
        // pages scattered by a stride coprime to their number
        let step = (1..).map(|i| 7919 + i).find(|s| gcd(*s, u64::from(pages)) == 1).unwrap();
        let idx: Vec<i32> = (0..u64::from(pages)).map(|i| ((i * step) % u64::from(pages)) as i32).collect();
        let last = vec![((kv_len as u32 - 1) % ps + 1) as i32; b];
        let slots: Vec<Slot> = (0..rows)
            .map(|row| {
                let (req, t) = (row / q_len, kv_len - q_len + row % q_len);
                Slot::from_raw(idx[req * per as usize + t / ps as usize] * ps as i32 + (t % ps as usize) as i32)
            })
            .collect();
        let raw = RawBatch { num_rows: rows, qo_indptr: &qo, kv_indptr: &kvp, kv_indices: &idx, kv_last_page_len: &last, slot_mapping: Some(&slots), custom_mask: None };
        let batch = Batch::from_raw(PoolShape { num_pages: pages, page_size }, &raw).unwrap();
        let (mut times, mut cpu) = (Vec::new(), Vec::new());
        for _ in 0..reps {
            let (t, c) = (Instant::now(), cpu_ms());
            let step = backend.prepare_metadata(&batch).unwrap();
            let io = Io {
                q: HostTensor::packed(&q, [rows, hq as usize, d as usize]).unwrap(),
                kv: Kv::Append {
                    cache: &mut cache,
                    k: HostTensor::packed(&k, [rows, hkv as usize, d as usize]).unwrap(),
                    v: HostTensor::packed(&v, [rows, hkv as usize, d as usize]).unwrap(),
                },
                out: HostTensorMut::packed(&mut out, [rows, hq as usize, d as usize]).unwrap(),
                lse: None,
            };
            backend.forward(&step, 0, io).unwrap();
            times.push(t.elapsed().as_secs_f64() * 1e3);
            cpu.push(cpu_ms() - c);
        }
        times.sort_by(f64::total_cmp);
        cpu.sort_by(f64::total_cmp);
        println!("{name:16} {} min {:8.2} ms  median {:8.2} ms  cpu min {:8.2} median {:8.2}", isa.name(), times[0], times[times.len() / 2], cpu[0], cpu[cpu.len() / 2]);
    }
}

/// CPU time of all threads so far, in ms.
fn cpu_ms() -> f64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let ns = tasks.map(|t| {
        let text = std::fs::read_to_string(t.unwrap().path().join("schedstat")).unwrap_or_default();
        text.split_whitespace().next().map_or(0u64, |x| x.parse().unwrap())
    });
    ns.sum::<u64>() as f64 / 1e6
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

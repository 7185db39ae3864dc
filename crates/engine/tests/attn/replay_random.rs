//! Random problems, replayed on a backend and by the oracle: within the suite's tolerances, caches byte for byte.

use std::fs;
use std::path::PathBuf;

use attn_conformance::harness::Run;
use attn_conformance::tolerance::{compare, tolerance};
use attn_reference::oracle::{OracleOutput, attend};
use engine::replay::{Activation, NewKv, Problem, ReplayFile};
use safetensors::tensor::Dtype;

use crate::support::{File, Random, Tensor, attn_ok, backend, fresh_dir};

/// Random tables: lengths, pages in random order, slots of the new tokens.
struct Tables {
    qo_indptr: Vec<i32>,
    kv_indptr: Vec<i32>,
    kv_indices: Vec<i32>,
    kv_last_page_len: Vec<i32>,
    slots: Vec<i32>,
    num_pages: usize,
    num_mask_bits: usize,
}

impl Tables {
    fn random(random: &mut Random, page_size: usize, appends: bool, of: Kinds) -> Self {
        let lens: Vec<(usize, usize)> = (0..random.within(1, 5))
            .map(|_| {
                let is_long = of == Kinds::Kernels && random.chance(25);
                let kv_len = random.within(0, if is_long { 1500 } else { 60 });
                let most = if is_long { 40 } else { 9 };
                (random.within(0, if appends { kv_len.min(most) } else { most }), kv_len)
            })
            .collect();
        let pages_of = |kv_len: usize| kv_len.div_ceil(page_size);
        let num_pages = lens.iter().map(|(_, kv)| pages_of(*kv)).sum::<usize>() + random.within(1, 4);
        let mut free: Vec<usize> = (0..num_pages).collect();
        for i in (1..free.len()).rev() {
            free.swap(i, random.within(0, i));
        }
        let mut tables = Self {
            qo_indptr: vec![0],
            kv_indptr: vec![0],
            kv_indices: Vec::new(),
            kv_last_page_len: Vec::new(),
            slots: Vec::new(),
            num_pages,
            num_mask_bits: lens.iter().map(|(q, kv)| q * kv).sum(),
        };
        let narrow = |n: usize| i32::try_from(n).unwrap();
        for (q_len, kv_len) in lens {
            let pages: Vec<usize> = free.drain(..pages_of(kv_len)).collect();
            for position in kv_len.saturating_sub(q_len)..kv_len {
                let slot = pages[position / page_size] * page_size + position % page_size;
                tables.slots.push(if random.chance(5) { -1 } else { narrow(slot) });
            }
            tables.kv_indices.extend(pages.into_iter().map(narrow));
            tables.qo_indptr.push(tables.qo_indptr.last().unwrap() + narrow(q_len));
            tables.kv_indptr.push(narrow(tables.kv_indices.len()));
            tables.kv_last_page_len.push(if kv_len == 0 { 0 } else { narrow((kv_len - 1) % page_size + 1) });
        }
        tables
    }
}

/// What random problems are of.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kinds {
    /// Any dtypes and widths.
    All,
    /// Those that there are GPU kernels for; some requests long enough to be split.
    Kernels,
}

impl Kinds {
    fn dtypes(self, random: &mut Random) -> (Dtype, Dtype) {
        use Dtype::{BF16, F8_E4M3, F16, F32, U8};
        let dtype = [F32, F16, BF16][random.within(0, 2)];
        match self {
            Self::All => (dtype, [F32, F16, BF16, F8_E4M3, U8][random.within(0, 4)]),
            Self::Kernels if dtype == F32 => (dtype, dtype),
            Self::Kernels => (dtype, [dtype, dtype, F8_E4M3, U8][random.within(0, 3)]),
        }
    }

    fn width(self, random: &mut Random) -> usize {
        match self {
            Self::All => random.within(1, 72),
            Self::Kernels => [16, 48, 64, 80, 128, 256][random.within(0, 5)],
        }
    }
}

/// A random problem that is valid by construction.
fn random_problem(random: &mut Random, of: Kinds) -> File {
    let (dtype, kv_dtype) = of.dtypes(random);
    let is_fp8 = matches!(kv_dtype, Dtype::F8_E4M3 | Dtype::U8);
    let (page_size, num_kv_heads, appends) = (random.within(1, 17), random.within(1, 3), random.chance(50));
    let (dim_qk, mut dim_vo, num_qo_heads) = (of.width(random), of.width(random), num_kv_heads * random.within(1, 5));
    if of == Kinds::Kernels && random.chance(60) {
        // Most kernels have one width.
        dim_vo = dim_qk;
    }
    let mut tables = Tables::random(random, page_size, appends, of);
    let rows = usize::try_from(*tables.qo_indptr.last().unwrap()).unwrap() + if random.chance(20) { 2 } else { 0 };
    tables.slots.resize(rows, -1);
    let mut float =
        |dtype, shape: &[usize], scale: f32| Tensor::float(dtype, shape, &random.floats(shape.iter().product(), scale));
    let stored = if is_fp8 { 100.0 } else { 1.0 };
    let mut file = File::default()
        .with("q", float(dtype, &[rows, num_qo_heads, dim_qk], 1.0))
        .with("k_cache", float(kv_dtype, &[tables.num_pages, page_size, num_kv_heads, dim_qk], stored))
        .with("v_cache", float(kv_dtype, &[tables.num_pages, page_size, num_kv_heads, dim_vo], stored))
        .with("k", float(dtype, &[rows, num_kv_heads, dim_qk], 1.0))
        .with("v", float(dtype, &[rows, num_kv_heads, dim_vo], 1.0))
        .with("slot_mapping", Tensor::i32(&tables.slots))
        .with("sinks", float(Dtype::F32, &[num_qo_heads], 2.0))
        .with("alibi_slopes", float(Dtype::F32, &[num_qo_heads], 0.2))
        .with("qo_indptr", Tensor::i32(&tables.qo_indptr))
        .with("kv_indptr", Tensor::i32(&tables.kv_indptr))
        .with("kv_indices", Tensor::i32(&tables.kv_indices))
        .with("kv_last_page_len", Tensor::i32(&tables.kv_last_page_len));
    let mask = (0..tables.num_mask_bits.div_ceil(8)).map(|_| random.next().to_le_bytes()[0]).collect();
    file = file.with("custom_mask", Tensor::u8(mask));
    for (names, percent) in [
        (&["k", "v", "slot_mapping"][..], if appends { 100 } else { 0 }),
        (&["sinks"], 30),
        (&["alibi_slopes"], 30),
        (&["custom_mask"], 30),
    ] {
        if !random.chance(percent) {
            file = file.without(names);
        }
    }
    let window = if random.chance(40) { random.within(0, 20).to_string() } else { "null".to_owned() };
    let scale = if is_fp8 { "0.01" } else { "null" };
    file.with_params(&[
        ("causal", Some(if random.chance(70) { "true" } else { "false" })),
        ("window_left", Some(&window)),
        ("softcap", Some(["null", "0", "15.0"][random.within(0, 2)])),
        ("k_scale", Some(scale)),
        ("v_scale", Some(scale)),
        ("head_dim_vo", Some(&dim_vo.to_string())),
    ])
}

/// What the oracle gives for a problem in a file, by the library: in float64, not rounded.
fn truth(bytes: &[u8]) -> (Problem, OracleOutput) {
    let mut problem = ReplayFile::parse(bytes).unwrap().problem;
    if let Some(NewKv { k, v }) = &problem.new_kv {
        let slots = problem.batch.slot_mapping().unwrap().to_vec();
        problem.cache.append(&slots, &k.view(), v.as_ref().map(Activation::view).as_ref()).unwrap();
    }
    let output = attend(&problem.batch, &problem.layer, &problem.q.view(), &problem.cache);
    (problem, output)
}

/// A result file as the suite sees what a backend wrote.
fn run_of(result: &File, dtype: kvpool::Dtype) -> Run {
    let (out, lse) = (&result.tensors["out"], &result.tensors["lse"]);
    let bits = |tensor: &Tensor| -> Vec<u32> {
        let size = tensor.dtype.bitsize() / 8;
        let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |word, byte| word << 8 | u32::from(*byte));
        tensor.bytes.chunks_exact(size).map(word).collect()
    };
    let shape = out.shape[..].try_into().unwrap();
    Run { dtype, shape, out: bits(out), lse: Some(bits(lse)), cache: None, side_out: None, side_cache: None }
}

#[test]
fn random_problems_agree_with_the_oracle() {
    let dir = fresh_dir("random");
    let backend = backend().unwrap_or_else(|| "cpu".to_owned());
    let kinds = if backend.starts_with("cuda") { Kinds::Kernels } else { Kinds::All };
    let mut random = Random(2024);
    let files: Vec<PathBuf> = (0..200)
        .map(|i| {
            let path = dir.join(format!("{i}.safetensors"));
            fs::write(&path, random_problem(&mut random, kinds).bytes()).unwrap();
            path
        })
        .collect();
    let run = |backend: &str| {
        let out = dir.join(backend);
        let mut args: Vec<PathBuf> =
            ["replay", "--cache-out", "--attention-backend", backend, "--out-dir"].map(PathBuf::from).to_vec();
        args.push(out.clone());
        args.extend(files.iter().cloned());
        assert_eq!(attn_ok(&args).lines().count(), files.len());
        out
    };
    let [tested, oracle] = [&backend, "oracle"].map(run);
    let mut worst = 0.0f64;
    for file in &files {
        let name = file.file_name().unwrap();
        let (got, by_oracle) = (File::read(&tested.join(name)), File::read(&oracle.join(name)));
        let (problem, exact) = truth(&fs::read(file).unwrap());
        let (dtype, layer) = (problem.q.dtype(), &problem.layer);
        let allowed = tolerance(dtype, layer.heads().head_dim_qk);
        for (who, result) in [(backend.as_str(), &got), ("oracle", &by_oracle)] {
            let used = compare(&run_of(result, dtype), &exact, None, layer.sinks(), &allowed);
            worst = worst.max(used.unwrap_or_else(|stop| panic!("{} on {who}: {stop:?}", name.display())));
        }
        for cache in ["k_cache", "v_cache"] {
            assert_eq!(got.tensors[cache], by_oracle.tensors[cache], "{} {cache}", name.display());
        }
    }
    println!("{} problems on {backend}: at most {worst:.3} of what is allowed", files.len());
}

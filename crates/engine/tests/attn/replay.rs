//! What `attn replay` computes.

use std::fs;
use std::path::{Path, PathBuf};

use safetensors::tensor::Dtype;

use crate::support::{File, Random, Tensor, attn, attn_ok, fresh_dir, refused};

fn replay(dir: &Path, file: &File, more: &[&str]) -> File {
    let path = dir.join("problem.safetensors");
    fs::write(&path, file.bytes()).unwrap();
    let out = dir.join("out");
    let mut args = vec!["replay", path.to_str().unwrap(), "--out-dir", out.to_str().unwrap()];
    args.extend_from_slice(more);
    attn_ok(&args);
    File::read(&out.join("problem.safetensors"))
}

#[test]
fn a_result_has_the_shapes_and_dtypes_of_the_problem() {
    let dir = fresh_dir("shapes");
    for backend in ["auto", "cpu", "oracle", "cpu,oracle"] {
        let result = replay(&dir, &File::good(), &["--attention-backend", backend]);
        assert_eq!(result.tensors["out"].shape, [6, 4, 6]);
        assert_eq!(result.tensors["out"].dtype, Dtype::F32);
        assert_eq!((result.tensors["lse"].dtype, &result.tensors["lse"].shape[..]), (Dtype::F32, &[6, 4][..]));
        assert_eq!(result.tensors.len(), 2);
    }
    let result = replay(&dir, &File::good(), &["--cache-out"]);
    assert_eq!(result.tensors["k_cache"].shape, [7, 4, 2, 8]);
    assert_eq!(result.tensors["v_cache"].shape, [7, 4, 2, 6]);
}

#[test]
fn appended_tokens_are_in_their_slots_and_nothing_else_changed() {
    let dir = fresh_dir("append");
    let problem = File::good().with_entry("slot_mapping", 3, -1);
    let result = replay(&dir, &problem, &["--cache-out"]);
    for (name, cache, width) in [("k", "k_cache", 16), ("v", "v_cache", 12)] {
        let mut expected = problem.tensors[cache].to_f32();
        let new = problem.tensors[name].to_f32();
        for (row, slot) in problem.tensors["slot_mapping"].to_i32().into_iter().enumerate() {
            let Ok(slot) = usize::try_from(slot) else { continue };
            expected[slot * width..][..width].copy_from_slice(&new[row * width..][..width]);
        }
        assert_eq!(result.tensors[cache].to_f32(), expected);
    }
}

#[test]
fn padding_rows_are_zeros_and_minus_infinity() {
    let dir = fresh_dir("padding");
    let good = File::good().without(&["k", "v", "slot_mapping"]);
    let padded = good.clone().with("q", good.tensors["q"].reshaped(&[8, 4, 8]));
    for backend in ["cpu", "oracle"] {
        let result = replay(&dir, &padded, &["--attention-backend", backend]);
        assert!(result.tensors["out"].to_f32()[6 * 24..].iter().all(|&x| x == 0.0));
        assert!(result.tensors["lse"].to_f32()[6 * 4..].iter().all(|&x| x == f32::NEG_INFINITY));
        let unpadded = replay(&dir, &good, &["--attention-backend", backend]);
        assert_eq!(result.tensors["out"].to_f32()[..6 * 24], unpadded.tensors["out"].to_f32()[..]);
    }
}

#[test]
fn fp8_codes_keep_the_dtype_that_they_came_in() {
    let dir = fresh_dir("fp8");
    let mut results = Vec::new();
    for dtype in [Dtype::F8_E4M3, Dtype::U8] {
        let fp8 = File::good()
            .with("k_cache", Tensor::float(dtype, &[7, 4, 2, 8], &Random(1).floats(448, 4.0)))
            .with("v_cache", Tensor::float(dtype, &[7, 4, 2, 6], &Random(2).floats(336, 4.0)))
            .with_params(&[("k_scale", Some("0.25")), ("v_scale", Some("0.5"))]);
        let result = replay(&dir, &fp8, &["--cache-out"]);
        assert_eq!(result.tensors["k_cache"].dtype, dtype);
        results.push((result.tensors["out"].clone(), result.tensors["v_cache"].bytes.clone()));
    }
    assert_eq!(results[0], results[1]);
}

#[test]
fn a_bad_file_does_not_keep_the_others_from_being_replayed() {
    let dir = fresh_dir("several");
    let paths: Vec<PathBuf> = (0..4).map(|i| dir.join(format!("{i}.safetensors"))).collect();
    for (i, path) in paths.iter().enumerate() {
        let bytes = File::good().bytes();
        fs::write(path, if i % 2 == 0 { &bytes[..] } else { &bytes[..50] }).unwrap();
    }
    let out = dir.join("out");
    let mut args = vec![PathBuf::from("replay"), PathBuf::from("--out-dir"), out.clone()];
    args.extend(paths.iter().cloned());
    let lines = refused(&attn(&args), 2, 2);
    assert!(lines[0].contains("1.safetensors: ") && lines[1].contains("3.safetensors: "), "{lines:?}");
    let written: Vec<bool> = (0..4).map(|i| out.join(format!("{i}.safetensors")).exists()).collect();
    assert_eq!(written, [true, false, true, false]);
}

#[test]
fn results_never_replace_problems_or_each_other() {
    let dir = fresh_dir("names");
    let path = dir.join("a.safetensors");
    fs::write(&path, File::good().bytes()).unwrap();
    let lines = refused(&attn(&["replay".as_ref(), path.as_path(), "--out-dir".as_ref(), &dir]), 2, 1);
    assert!(lines[0].contains("choose another --out-dir"), "{}", lines[0]);
    assert_eq!(fs::read(&path).unwrap(), File::good().bytes());
    let other = dir.join("other");
    fs::create_dir(&other).unwrap();
    fs::copy(&path, other.join("a.safetensors")).unwrap();
    let second = other.join("a.safetensors");
    let out = dir.join("out");
    let lines = refused(&attn(&["replay".as_ref(), path.as_path(), &second, "--out-dir".as_ref(), &out]), 2, 1);
    assert!(lines[0].contains("also named"), "{}", lines[0]);
    assert!(out.join("a.safetensors").exists());
    let absent =
        attn(&["replay".as_ref(), path.as_path(), "--out-dir".as_ref(), &out, "--attention-backend=nobody".as_ref()]);
    assert!(refused(&absent, 2, 1)[0].contains("there are: auto, cpu, oracle"));
}

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
    fn random(random: &mut Random, page_size: usize, appends: bool) -> Self {
        let lens: Vec<(usize, usize)> = (0..random.within(1, 5))
            .map(|_| {
                let kv_len = random.within(0, 60);
                (random.within(0, if appends { kv_len.min(9) } else { 9 }), kv_len)
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

/// A random problem that is valid by construction.
fn random_problem(random: &mut Random) -> File {
    let dtype = [Dtype::F32, Dtype::F16, Dtype::BF16][random.within(0, 2)];
    let kv_dtype = [Dtype::F32, Dtype::F16, Dtype::BF16, Dtype::F8_E4M3, Dtype::U8][random.within(0, 4)];
    let is_fp8 = matches!(kv_dtype, Dtype::F8_E4M3 | Dtype::U8);
    let (page_size, num_kv_heads, appends) = (random.within(1, 17), random.within(1, 3), random.chance(50));
    let (dim_qk, dim_vo, num_qo_heads) =
        (random.within(1, 72), random.within(1, 72), num_kv_heads * random.within(1, 5));
    let mut tables = Tables::random(random, page_size, appends);
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

/// Largest difference that rounding to a dtype explains, relative to 1 + |value|.
fn tolerance(dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F32 => 2e-5,
        Dtype::F16 => 2e-3,
        _ => 1.6e-2,
    }
}

fn assert_close(what: &str, got: &Tensor, truth: &Tensor, tolerance: f32) {
    assert_eq!((got.dtype, &got.shape), (truth.dtype, &truth.shape), "{what}");
    for (index, (got, truth)) in got.to_f32().into_iter().zip(truth.to_f32()).enumerate() {
        let is_close = got == truth || (got - truth).abs() <= tolerance * (1.0 + truth.abs());
        assert!(is_close, "{what}, element {index}: {got} instead of {truth}");
    }
}

#[test]
fn random_problems_agree_with_the_oracle() {
    let dir = fresh_dir("random");
    let mut random = Random(2024);
    let files: Vec<PathBuf> = (0..200)
        .map(|i| {
            let path = dir.join(format!("{i}.safetensors"));
            fs::write(&path, random_problem(&mut random).bytes()).unwrap();
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
    let [cpu, oracle] = ["cpu", "oracle"].map(run);
    for file in &files {
        let name = file.file_name().unwrap();
        let (got, truth) = (File::read(&cpu.join(name)), File::read(&oracle.join(name)));
        let what = format!("{}", name.display());
        assert_close(
            &format!("{what} out"),
            &got.tensors["out"],
            &truth.tensors["out"],
            tolerance(truth.tensors["out"].dtype),
        );
        assert_close(&format!("{what} lse"), &got.tensors["lse"], &truth.tensors["lse"], 2e-5);
        for cache in ["k_cache", "v_cache"] {
            assert_eq!(got.tensors[cache], truth.tensors[cache], "{what} {cache}");
        }
    }
}

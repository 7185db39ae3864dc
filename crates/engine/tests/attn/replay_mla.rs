//! What `attn replay` makes of latent caches: `k_cache` alone, in every dtype and as quantised rows.

use std::fs;
use std::path::Path;

use safetensors::tensor::Dtype;

use crate::support::{File, Random, Tensor, attn, attn_ok, fresh_dir, refused};

/// 4 requests' worth of absorbed queries over rows of 128 + 16 values, on 6 pages of 4 tokens.
fn latent(dtype: Dtype) -> File {
    let mut random = Random(11);
    let mut float = |dtype, shape: &[usize]| Tensor::float(dtype, shape, &random.floats(shape.iter().product(), 1.0));
    let file = File::good().without(&["v", "v_cache", "custom_mask", "alibi_slopes"]);
    file.with("q", float(Dtype::F32, &[6, 4, 144]))
        .with("k", float(Dtype::F32, &[6, 1, 144]))
        .with("k_cache", float(dtype, &[7, 4, 144]))
        .with_params(&[("kind", Some("\"mla\"")), ("head_dim_vo", Some("128")), ("k_scale", None)])
}

/// The same as keys and values of their own.
fn separate(file: &File) -> File {
    let cut = |name: &str, shape: &[usize]| {
        let rows: Vec<f32> = file.tensors[name].to_f32().chunks(144).flat_map(|row| row[..128].to_vec()).collect();
        Tensor::float(Dtype::F32, shape, &rows)
    };
    let keys = Tensor::float(Dtype::F32, &[7, 4, 1, 144], &file.tensors["k_cache"].to_f32());
    let file = file.clone().with("v", cut("k", &[6, 1, 128])).with("v_cache", cut("k_cache", &[7, 4, 1, 128]));
    file.with("k_cache", keys).with_params(&[("head_dim_vo", Some("128")), ("k_scale", None)])
}

/// Quantised rows of 128 codes, a scale and 16 bf16 values.
fn quantised() -> File {
    let mut random = Random(12);
    let mut bytes = Vec::new();
    for _ in 0..28 {
        bytes.extend(random.floats(128, 1.0).into_iter().map(|x| kvpool::f32_to_fp8_e4m3(x * 100.0)));
        bytes.extend(0.01f32.to_le_bytes());
        bytes.extend(random.floats(16, 1.0).into_iter().flat_map(|x| half::bf16::from_f32(x).to_le_bytes()));
    }
    latent(Dtype::F32).with("k_cache", Tensor { dtype: Dtype::U8, shape: vec![7, 4, 164], bytes })
}

fn replay(dir: &Path, file: &File, more: &[&str]) -> File {
    let (path, out) = (dir.join("problem.safetensors"), dir.join("out"));
    fs::write(&path, file.bytes()).unwrap();
    let mut args = vec!["replay", path.to_str().unwrap(), "--out-dir", out.to_str().unwrap()];
    args.extend_from_slice(more);
    attn_ok(&args);
    File::read(&out.join("problem.safetensors"))
}

fn assert_close(what: &str, a: &File, b: &File) {
    for name in ["out", "lse"] {
        let (a, b) = (a.tensors[name].to_f32(), b.tensors[name].to_f32());
        assert_eq!(a.len(), b.len(), "{what}");
        assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() <= 1e-5 || a == b), "{what}: {name}");
    }
}

#[test]
fn a_latent_cache_is_its_keys_and_its_first_columns() {
    let dir = fresh_dir("mla");
    let expected = replay(&dir, &separate(&latent(Dtype::F32)), &["--attention-backend", "oracle"]);
    assert_eq!(expected.tensors["out"].shape, [6, 4, 128]);
    for backend in ["auto", "cpu", "oracle", "mla", "mla-oracle"] {
        let result = replay(&dir, &latent(Dtype::F32), &["--attention-backend", backend, "--cache-out"]);
        assert_close(backend, &result, &expected);
        assert_eq!(result.tensors["k_cache"].shape, [7, 4, 144]);
        assert!(!result.tensors.contains_key("v_cache"));
    }
}

#[test]
fn every_dtype_and_the_quantised_row_give_the_oracles_result() {
    let dir = fresh_dir("mla-dtypes");
    for (what, file) in [("bf16", latent(Dtype::BF16)), ("f16", latent(Dtype::F16)), ("rows", quantised())] {
        let run = |backend| replay(&dir, &file, &["--attention-backend", backend, "--cache-out"]);
        let (mla, oracle) = (run("mla"), run("oracle"));
        assert_close(what, &mla, &oracle);
        assert_eq!(mla.tensors["k_cache"], oracle.tensors["k_cache"], "{what}: the rows that were appended");
        assert_ne!(mla.tensors["k_cache"], file.tensors["k_cache"], "{what}");
    }
}

#[test]
fn latent_files_that_do_not_fit_are_refused() {
    let dir = fresh_dir("mla-refused");
    let refuses = |file: &File, expected: &str| {
        let path = dir.join("bad.safetensors");
        fs::write(&path, file.bytes()).unwrap();
        let output = attn(&["replay", path.to_str().unwrap(), "--out-dir", dir.join("out").to_str().unwrap()]);
        let lines = refused(&output, 2, 1);
        assert!(lines[0].contains(expected), "{}", lines[0]);
    };
    let params = |dim| [("kind", Some("\"mla\"")), ("head_dim_vo", dim), ("k_scale", None)];
    let good = latent(Dtype::F32);
    refuses(&good.clone().with_params(&params(None)), "lacks `head_dim_vo`");
    refuses(&good.clone().with_params(&params(Some("145"))), "v takes columns 0..145 of k, which has 144 columns");
    let v_cache = good.tensors["k_cache"].clone();
    refuses(&good.clone().with("v_cache", v_cache.clone()), "tensor `v_cache` is there, but kind \"mla\" has none");
    refuses(&good.clone().with("k_cache", v_cache.reshaped(&[7, 4, 1, 144])), "expected [pages, page size, width]");
    refuses(&good.clone().with("q", good.tensors["q"].reshaped(&[6, 4, 143])), "tensor `q` is [6, 4, 143]");
    refuses(&good.without(&["slot_mapping"]), "`slot_mapping` is not");
    let rows = quantised();
    let cut = rows.tensors["k_cache"].reshaped(&[7, 4, 162]);
    refuses(&rows.clone().with("k_cache", cut), "rows of 132 bytes for 128 quantised values");
    refuses(&rows.with_params(&params(Some("100"))), "a latent row of 100 + 0 values");
}

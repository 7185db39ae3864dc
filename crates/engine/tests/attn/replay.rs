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
        assert_eq!(result.tensors["out"].shape, [6, 4, 32]);
        assert_eq!(result.tensors["out"].dtype, Dtype::F32);
        assert_eq!((result.tensors["lse"].dtype, &result.tensors["lse"].shape[..]), (Dtype::F32, &[6, 4][..]));
        assert_eq!(result.tensors.len(), 2);
    }
    let result = replay(&dir, &File::good(), &["--cache-out"]);
    assert_eq!(result.tensors["k_cache"].shape, [7, 4, 2, 16]);
    assert_eq!(result.tensors["v_cache"].shape, [7, 4, 2, 32]);
}

#[test]
fn appended_tokens_are_in_their_slots_and_nothing_else_changed() {
    let dir = fresh_dir("append");
    let problem = File::good().with_entry("slot_mapping", 3, -1);
    let result = replay(&dir, &problem, &["--cache-out"]);
    for (name, cache, width) in [("k", "k_cache", 32), ("v", "v_cache", 64)] {
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
    let padded = good.clone().with("q", good.tensors["q"].reshaped(&[8, 4, 16]));
    for backend in ["cpu", "oracle"] {
        let result = replay(&dir, &padded, &["--attention-backend", backend]);
        assert!(result.tensors["out"].to_f32()[6 * 128..].iter().all(|&x| x == 0.0));
        assert!(result.tensors["lse"].to_f32()[6 * 4..].iter().all(|&x| x == f32::NEG_INFINITY));
        let unpadded = replay(&dir, &good, &["--attention-backend", backend]);
        assert_eq!(result.tensors["out"].to_f32()[..6 * 128], unpadded.tensors["out"].to_f32()[..]);
    }
}

#[test]
fn fp8_codes_keep_the_dtype_that_they_came_in() {
    let dir = fresh_dir("fp8");
    let mut results = Vec::new();
    for dtype in [Dtype::F8_E4M3, Dtype::U8] {
        let fp8 = File::good()
            .with("k_cache", Tensor::float(dtype, &[7, 4, 2, 16], &Random(1).floats(896, 4.0)))
            .with("v_cache", Tensor::float(dtype, &[7, 4, 2, 32], &Random(2).floats(1792, 4.0)))
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

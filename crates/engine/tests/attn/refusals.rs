//! Every way to spoil a replay file: each is refused with exit code 2 and one line that names the fault.

use std::fs;
use std::path::{Path, PathBuf};

use safetensors::tensor::Dtype;

use crate::support::{File, FreshDir, Random, Tensor, attn, attn_ok, backend, fresh_dir, refused};

/// A directory, and the spoilt files that were tried in it.
struct Trial {
    dir: FreshDir,
}

impl Trial {
    fn new(name: &str) -> Self {
        Self { dir: fresh_dir(name) }
    }

    /// Replays bytes, which must be refused with a line that contains `expected`.
    fn refuses_bytes(&self, what: &str, bytes: &[u8], expected: &str) {
        let file = self.dir.join("problem.safetensors");
        fs::write(&file, bytes).unwrap();
        self.refuses_path(what, &file, expected);
    }

    fn refuses_path(&self, what: &str, file: &Path, expected: &str) {
        let out = self.dir.join("out");
        let mut args = vec![PathBuf::from("replay"), file.to_owned(), PathBuf::from("--out-dir"), out.clone()];
        args.extend(backend().into_iter().flat_map(|name| [PathBuf::from("--attention-backend"), PathBuf::from(name)]));
        let output = attn(&args);
        println!("{what}: {}", String::from_utf8_lossy(&output.stderr));
        let lines = refused(&output, 2, 1);
        assert!(lines[0].contains(expected), "{what}: {expected:?} is not in {:?}", lines[0]);
        let left: Vec<_> = fs::read_dir(&out).unwrap().collect();
        assert!(left.is_empty(), "{what}: {left:?} was written");
    }

    fn refuses(&self, what: &str, file: &File, expected: &str) {
        self.refuses_bytes(what, &file.bytes(), expected);
    }
}

/// What is spoilt below is good: nothing is refused for another reason than the one that was planted.
#[test]
fn the_file_as_it_is_is_accepted() {
    let dir = fresh_dir("accepted");
    let file = dir.join("problem.safetensors");
    fs::write(&file, File::good().bytes()).unwrap();
    let name = backend().unwrap_or_else(|| "auto".to_owned());
    let out = dir.join("out");
    attn_ok(&[
        "replay".as_ref(),
        file.as_path(),
        "--out-dir".as_ref(),
        &out,
        "--attention-backend".as_ref(),
        name.as_ref(),
    ]);
}

fn tensor_names() -> Vec<String> {
    File::good().tensors.into_keys().collect()
}

#[test]
fn a_missing_tensor_is_named() {
    let trial = Trial::new("missing");
    for name in tensor_names() {
        if ["custom_mask", "sinks", "alibi_slopes"].contains(&name.as_str()) {
            continue;
        }
        trial.refuses(&name, &File::good().without(&[&name]), &format!("`{name}`"));
    }
}

#[test]
fn a_tensor_of_another_size_is_refused() {
    let trial = Trial::new("misshaped");
    for name in tensor_names() {
        let good = File::good();
        let tensor = good.tensors[&name].clone();
        for axis in 0..tensor.shape.len() {
            for more in [true, false] {
                let mut shape = tensor.shape.clone();
                shape[axis] = if more { shape[axis] + 1 } else { shape[axis] - 1 };
                trial.refuses(&format!("{name} {shape:?}"), &good.clone().with(&name, tensor.reshaped(&shape)), "");
            }
            let mut shape = tensor.shape.clone();
            shape[axis] = 0;
            trial.refuses(&format!("{name} {shape:?}"), &good.clone().with(&name, tensor.reshaped(&shape)), "");
        }
        let deeper = [&[1], &tensor.shape[..]].concat();
        trial.refuses(&format!("{name} {deeper:?}"), &good.clone().with(&name, tensor.reshaped(&deeper)), &name);
        let flat = [tensor.shape.iter().product::<usize>()];
        if tensor.shape.len() > 1 {
            trial.refuses(&format!("{name} {flat:?}"), &good.clone().with(&name, tensor.reshaped(&flat)), &name);
        }
        trial.refuses(&format!("{name} []"), &good.clone().with(&name, tensor.reshaped(&[])), &name);
    }
}

#[test]
fn a_tensor_of_another_dtype_is_refused() {
    use Dtype::{BF16, BOOL, F16, F32, F64, I8, I32, I64, U8, U32};
    let trial = Trial::new("mistyped");
    for name in tensor_names() {
        let tensor = File::good().tensors[&name].clone();
        for dtype in [BF16, BOOL, F16, F32, F64, I8, I32, I64, U8, U32] {
            // q and the new KV are of one dtype, the caches of another; q alone may change where nothing is appended.
            if dtype == tensor.dtype {
                continue;
            }
            trial.refuses(&format!("{name} as {dtype}"), &File::good().with(&name, tensor.retyped(dtype)), "");
        }
    }
}

#[test]
fn page_ids_and_slots_outside_the_pool_are_named() {
    let trial = Trial::new("ids");
    for id in [-1, -2, 7, i32::MAX, i32::MIN] {
        for index in 0..5 {
            let file = File::good().with_entry("kv_indices", index, id);
            trial.refuses(&format!("page {id}"), &file, &format!("page id {id} is not in 0..7"));
        }
    }
    for slot in [-2, 28, i32::MAX, i32::MIN] {
        let file = File::good().with_entry("slot_mapping", 1, slot);
        trial.refuses(&format!("slot {slot}"), &file, &format!("slot {slot} is not in 0..28 (row 1)"));
    }
    let file = File::good().with_entry("slot_mapping", 1, 22);
    trial.refuses("slot twice", &file, "slot 22");
    let shared = File::good().with_entry("kv_indices", 4, 5).with_entry("slot_mapping", 4, 20);
    trial.refuses("a slot of another request", &shared.with_entry("slot_mapping", 5, 22), "slot 22");
    // Two requests that share a page and both append at its offset 2.
    let duplicate = File::good()
        .with_entry("kv_indices", 4, 5)
        .with_entry("kv_last_page_len", 2, 4)
        .with_entry("slot_mapping", 4, 22)
        .with_entry("slot_mapping", 5, 23)
        .without(&["custom_mask"]);
    trial.refuses("a slot twice", &duplicate, "slot 22 is written by row 0 and by row 4");
}

#[test]
fn tables_that_contradict_each_other_are_named() {
    let trial = Trial::new("tables");
    for table in ["qo_indptr", "kv_indptr"] {
        let end = File::good().tensors[table].to_i32()[3];
        trial.refuses("start", &File::good().with_entry(table, 0, 1), &format!("{table} starts at 1"));
        trial.refuses("fall", &File::good().with_entry(table, 1, end + 1), &format!("{table} falls from"));
        for value in [-1, i32::MIN] {
            trial.refuses("negative", &File::good().with_entry(table, 1, value), &format!("{table} falls"));
            trial.refuses("negative end", &File::good().with_entry(table, 3, value), &format!("{table} falls"));
        }
        for value in [end + 1, i32::MAX] {
            trial.refuses("beyond", &File::good().with_entry(table, 3, value), &format!("{table} ends at {value}"));
        }
    }
    for len in [0, 5, -1, i32::MAX, i32::MIN] {
        let file = File::good().with_entry("kv_last_page_len", 0, len);
        trial.refuses("last page", &file, &format!("kv_last_page_len {len} is not in 1..=4 (request 0)"));
    }
    // Request 2 has two new tokens and one KV token.
    let short = File::good().with_entry("kv_last_page_len", 2, 1).without(&["custom_mask"]);
    trial.refuses("append", &short, "2 tokens are appended, but kv_len 1 does not hold them (request 2)");
    let empty = Tensor::i32(&[0]);
    let none = Tensor::i32(&[]);
    let zero = File::good().with("qo_indptr", empty.clone()).with("kv_indptr", empty);
    let zero = zero.with("kv_indices", none.clone()).with("kv_last_page_len", none.clone());
    trial.refuses("no request", &zero, "there is no request");
    trial.refuses("no table", &File::good().with("qo_indptr", none), "qo_indptr is empty");
}

#[test]
fn parameters_that_make_no_sense_are_named() {
    let trial = Trial::new("params");
    let refuses = |key: &str, text: Option<&str>, expected: &str| {
        trial.refuses(&format!("{key} {text:?}"), &File::good().with_params(&[(key, text)]), expected);
    };
    for key in ["kind", "sm_scale", "causal"] {
        refuses(key, None, &format!("lacks `{key}`"));
    }
    for text in ["NaN", "Infinity", "-Infinity", "1e999", "nan"] {
        for key in ["sm_scale", "k_scale", "v_scale", "softcap"] {
            refuses(key, Some(text), "not a JSON object");
        }
    }
    for text in ["0", "-0.0", "-1", "1e300", "1e-60"] {
        refuses("sm_scale", Some(text), "sm_scale is");
    }
    for text in ["null", "\"1\"", "true", "[1]", "{}"] {
        refuses("sm_scale", Some(text), "sm_scale`");
    }
    for text in ["null", "1", "\"true\""] {
        refuses("causal", Some(text), "`causal` is");
    }
    refuses("kind", Some("\"nsa\""), "kind \"nsa\" cannot be replayed");
    refuses("kind", Some("\"\\n\\u0000\""), "cannot be replayed");
    refuses("kind", Some("7"), "`kind` is 7");
    for text in ["-1", "1.5", "\"x\"", "1e20", "4294967296"] {
        refuses("window_left", Some(text), "`window_left` is");
    }
    for text in ["-1", "-0.5", "1e300"] {
        refuses("softcap", Some(text), "softcap is");
    }
    for text in ["0", "-1", "2.5", "1e300"] {
        refuses("k_scale", Some(text), "`k_scale` is");
        refuses("v_scale", Some(text), "`v_scale` is");
    }
    for text in ["5", "0", "-6", "6.5"] {
        refuses("head_dim_vo", Some(text), "");
    }
    for text in ["", "{", "[]", "7", "null", "{\"kind\": \"mha\"", "\u{0}", "{}"] {
        let file = File { params: Some(text.to_owned()), ..File::good() };
        trial.refuses(text, &file, "metadata key `attn`");
    }
    let deep = File { params: Some("[".repeat(100_000)), ..File::good() };
    trial.refuses("deep", &deep, "metadata key `attn`");
    trial.refuses("no metadata", &File { params: None, ..File::good() }, "no metadata key `attn`");
}

#[test]
fn per_head_arrays_and_fp8_scales_must_be_numbers() {
    let trial = Trial::new("numbers");
    for (name, values) in [("sinks", [0.0, f32::NAN, 0.0, 0.0]), ("alibi_slopes", [0.0, 0.0, f32::INFINITY, 0.0])] {
        let file = File::good().with(name, Tensor::float(Dtype::F32, &[4], &values));
        trial.refuses(name, &file, &format!("{name} of query head"));
    }
    for dtype in [Dtype::F8_E4M3, Dtype::U8] {
        let fp8 = File::good()
            .with("k_cache", Tensor::float(dtype, &[7, 4, 2, 16], &[0.5; 896]))
            .with("v_cache", Tensor::float(dtype, &[7, 4, 2, 32], &[0.5; 1792]));
        for key in ["k_scale", "v_scale"] {
            let with = |text| {
                let mut changes = vec![("k_scale", Some("0.5")), ("v_scale", Some("0.5"))];
                changes.retain(|(name, _)| *name != key);
                changes.push((key, text));
                fp8.clone().with_params(&changes)
            };
            for text in [None, Some("null")] {
                trial.refuses(key, &with(text), &format!("`{key}` is needed"));
            }
            for text in ["0", "-1", "1e300", "1e-60", "1e-40"] {
                trial.refuses(key, &with(Some(text)), &format!("{key} is"));
            }
        }
    }
}

#[test]
fn what_is_no_safetensors_file_is_refused() {
    let trial = Trial::new("garbage");
    let bytes = File::good().bytes();
    for len in (0..bytes.len()).step_by(131).chain(0..10) {
        trial.refuses_bytes(&format!("the first {len} bytes"), &bytes[..len], "not a whole safetensors file");
    }
    let mut longer = bytes.clone();
    longer.push(0);
    trial.refuses_bytes("one byte more", &longer, "not a whole safetensors file");
    let mut random = Random(1);
    for len in [1, 7, 8, 9, 100, 5000] {
        let garbage: Vec<u8> = (0..len).map(|_| random.next().to_le_bytes()[0]).collect();
        trial.refuses_bytes("random bytes", &garbage, "not a whole safetensors file");
    }
    let mut huge = bytes;
    huge[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    trial.refuses_bytes("a huge header", &huge, "not a whole safetensors file");
    trial.refuses_path("a missing file", &trial.dir.join("nowhere.safetensors"), "No such file");
    trial.refuses_path("a directory", &trial.dir, "not a regular file");
    if cfg!(unix) {
        trial.refuses_path("a device", Path::new("/dev/zero"), "not a regular file");
    }
}

/// A small file can ask for more than any memory holds: values far wider than queries, or one page again and again.
/// The second asks for 84 TiB of partial states: more than a machine has, and less than a process has addresses, so that
/// a system that gives whatever it is asked for gives that too. `replay_memory.rs` has what is counted.
#[test]
fn what_no_memory_holds_is_refused() {
    let dir = fresh_dir("memory");
    let zeros =
        |shape: &[usize]| Tensor { dtype: Dtype::F32, shape: shape.to_vec(), bytes: Vec::new() }.reshaped(shape);
    let problem = |q: [usize; 3], page_size: usize, width: usize, pages: i32| {
        File::good()
            .without(&["k", "v", "slot_mapping", "custom_mask", "sinks", "alibi_slopes"])
            .with("q", zeros(&q))
            .with("k_cache", zeros(&[1, page_size, 1, 1]))
            .with("v_cache", zeros(&[1, page_size, 1, width]))
            .with("qo_indptr", Tensor::i32(&[0, i32::try_from(q[0]).unwrap()]))
            .with("kv_indptr", Tensor::i32(&[0, pages]))
            .with("kv_indices", Tensor::i32(&vec![0; usize::try_from(pages).unwrap()]))
            .with("kv_last_page_len", Tensor::i32(&[1]))
            .with_params(&[("head_dim_vo", None), ("window_left", None)])
    };
    for (file, backend) in
        [(problem([1 << 20, 1, 1], 1, 1 << 20, 1), "oracle"), (problem([16, 1024, 1], 2047, 640, 1 << 20), "cpu")]
    {
        let path = dir.join("problem.safetensors");
        fs::write(&path, file.bytes()).unwrap();
        let out = dir.join("out");
        let args = [
            "replay".as_ref(),
            path.as_path(),
            "--out-dir".as_ref(),
            &out,
            "--attention-backend".as_ref(),
            backend.as_ref(),
        ];
        assert!(refused(&attn(&args), 2, 1)[0].contains("MiB"), "{backend}");
    }
}

/// Flipping any one byte gives an error in one line or a result, never a crash.
#[test]
fn a_flipped_byte_never_crashes() {
    let dir = fresh_dir("flipped");
    let bytes = File::good().bytes();
    let mut random = Random(5);
    let mut files = Vec::new();
    for trial in 0..400 {
        let mut spoilt = bytes.clone();
        let at = if trial < 300 { random.within(0, bytes.len() - 6000) } else { random.within(0, bytes.len() - 1) };
        spoilt[at] ^= 1 << random.within(0, 7);
        let file = dir.join(format!("{trial}.safetensors"));
        fs::write(&file, spoilt).unwrap();
        files.push(file);
    }
    let out = dir.join("out");
    let mut args = vec![PathBuf::from("replay"), PathBuf::from("--out-dir"), out.clone()];
    args.extend(backend().into_iter().flat_map(|name| [PathBuf::from("--attention-backend"), PathBuf::from(name)]));
    args.extend(files.iter().cloned());
    let output = attn(&args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!stderr.contains("panicked"), "{stderr}");
    assert!(matches!(output.status.code(), Some(0 | 2)), "{}", output.status);
    let num_written = files.iter().filter(|file| out.join(file.file_name().unwrap()).exists()).count();
    assert_eq!(stderr.lines().count() + num_written, files.len());
}

//! Running `attn`, and replay files that can be spoilt in any way.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use half::{bf16, f16};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, View};

/// The backend that these tests are run on, where it is not the usual one; elsewhere than where they were built also
/// `ATTN_TEST_PROGRAM` says where `attn` is, and `ATTN_TEST_DIR` where files go.
pub fn backend() -> Option<String> {
    std::env::var("ATTN_TEST_BACKEND").ok()
}

/// Runs `attn`.
pub fn attn<S: AsRef<std::ffi::OsStr>>(args: &[S]) -> Output {
    let program = std::env::var_os("ATTN_TEST_PROGRAM").unwrap_or_else(|| env!("CARGO_BIN_EXE_attn").into());
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).output().expect("attn can be started")
}

/// Runs `attn`, which must do well, and returns its stdout.
pub fn attn_ok<S: AsRef<std::ffi::OsStr> + std::fmt::Debug>(args: &[S]) -> String {
    let output = attn(args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {} {stderr}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

/// Checks that a run ended with a code and said why in so many lines, and returns them.
pub fn refused(output: &Output, code: i32, num_lines: usize) -> Vec<String> {
    let stderr = String::from_utf8(output.stderr.clone()).unwrap();
    assert!(!stderr.contains("panicked"), "{stderr}");
    assert_eq!(output.status.code(), Some(code), "{stderr}");
    let lines: Vec<String> = stderr.lines().map(str::to_owned).collect();
    assert_eq!(lines.len(), num_lines, "{stderr}");
    assert!(lines.iter().all(|line| line.starts_with("error: ") && line.len() > 20), "{stderr}");
    lines
}

/// A directory of one test, gone with it unless the test fails.
pub struct FreshDir(PathBuf);

impl Deref for FreshDir {
    type Target = PathBuf;

    fn deref(&self) -> &PathBuf {
        &self.0
    }
}

impl Drop for FreshDir {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // What is left behind is in nobody's way.
            let _ = fs::remove_dir_all(&self.0);
        }
    }
}

/// An empty directory of one test. Its name has the process in it: these tests may run twice at once.
pub fn fresh_dir(name: &str) -> FreshDir {
    let dir = std::env::var_os("ATTN_TEST_DIR").unwrap_or_else(|| env!("CARGO_TARGET_TMPDIR").into());
    let dir = Path::new(&dir).join(format!("{name}-{}", std::process::id()));
    if dir.exists() {
        fs::remove_dir_all(&dir).unwrap();
    }
    fs::create_dir_all(&dir).unwrap();
    FreshDir(dir)
}

/// A small generator of random numbers (SplitMix64).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number of a range, the end included.
    pub fn within(&mut self, low: usize, high: usize) -> usize {
        low + usize::try_from(self.next() % (high - low + 1) as u64).unwrap()
    }

    pub fn chance(&mut self, percent: usize) -> bool {
        self.within(0, 99) < percent
    }

    /// A number from −1 to 1.
    pub fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub fn floats(&mut self, len: usize, scale: f32) -> Vec<f32> {
        (0..len).map(|_| self.float() * scale).collect()
    }
}

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Tensor {
    pub fn i32(values: &[i32]) -> Self {
        Self { dtype: Dtype::I32, shape: vec![values.len()], bytes: bytemuck::cast_slice(values).to_vec() }
    }

    pub fn u8(bytes: Vec<u8>) -> Self {
        Self { dtype: Dtype::U8, shape: vec![bytes.len()], bytes }
    }

    /// Values rounded to a dtype.
    pub fn float(dtype: Dtype, shape: &[usize], values: &[f32]) -> Self {
        let bytes = match dtype {
            Dtype::F32 => bytemuck::cast_slice(values).to_vec(),
            Dtype::F16 => values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
            Dtype::BF16 => values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
            Dtype::F8_E4M3 | Dtype::U8 => values.iter().map(|&x| kvpool::f32_to_fp8_e4m3(x)).collect(),
            other => panic!("{other} is no dtype of these tests"),
        };
        Self { dtype, shape: shape.to_vec(), bytes }
    }

    pub fn to_i32(&self) -> Vec<i32> {
        bytemuck::pod_collect_to_vec(&self.bytes)
    }

    /// The values, widened.
    pub fn to_f32(&self) -> Vec<f32> {
        let halves = || self.bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
        match self.dtype {
            Dtype::F32 => bytemuck::pod_collect_to_vec(&self.bytes),
            Dtype::F16 => halves().map(|bits| f16::from_bits(bits).to_f32()).collect(),
            Dtype::BF16 => halves().map(|bits| bf16::from_bits(bits).to_f32()).collect(),
            other => panic!("{other} is no dtype of these tests"),
        }
    }

    /// The same tensor with another shape: cut, or filled up with zero bytes.
    pub fn reshaped(&self, shape: &[usize]) -> Self {
        let size = self.dtype.bitsize() / 8;
        let mut bytes = self.bytes.clone();
        bytes.resize(shape.iter().product::<usize>() * size, 0);
        Self { dtype: self.dtype, shape: shape.to_vec(), bytes }
    }

    /// Zeros of another dtype in the same shape.
    pub fn retyped(&self, dtype: Dtype) -> Self {
        let len: usize = self.shape.iter().product();
        Self { dtype, shape: self.shape.clone(), bytes: vec![0; len * dtype.bitsize() / 8] }
    }
}

impl View for &Tensor {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// A replay or result file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct File {
    pub tensors: BTreeMap<String, Tensor>,
    /// The text under the metadata key `attn`.
    pub params: Option<String>,
}

impl File {
    /// A small problem with everything in it: three requests that append, sinks, ALiBi and a custom mask. Its widths are
    /// such as every backend takes.
    pub fn good() -> Self {
        let mut random = Random(7);
        let mut float = |shape: &[usize]| {
            let values = random.floats(shape.iter().product(), 1.0);
            Tensor::float(Dtype::F32, shape, &values)
        };
        let tensors = [
            ("q", float(&[6, 4, 16])),
            ("k", float(&[6, 2, 16])),
            ("v", float(&[6, 2, 32])),
            ("k_cache", float(&[7, 4, 2, 16])),
            ("v_cache", float(&[7, 4, 2, 32])),
            ("sinks", float(&[4])),
            ("alibi_slopes", float(&[4])),
            ("qo_indptr", Tensor::i32(&[0, 3, 4, 6])),
            ("kv_indptr", Tensor::i32(&[0, 2, 4, 5])),
            ("kv_indices", Tensor::i32(&[5, 0, 6, 2, 3])),
            ("kv_last_page_len", Tensor::i32(&[1, 2, 2])),
            // Positions 2 to 4 of pages 5 and 0; position 5 of pages 6 and 2; positions 0 and 1 of page 3.
            ("slot_mapping", Tensor::i32(&[22, 23, 0, 9, 12, 13])),
            // 3 x 5 + 1 x 6 + 2 x 2 bits.
            ("custom_mask", Tensor::u8(vec![0b1011_1111, 0b1111_1101, 0b1110_1111, 0b1])),
        ];
        let tensors = tensors.into_iter().map(|(name, tensor)| (name.to_owned(), tensor)).collect();
        let file = Self { tensors, params: None };
        file.with_params(&[])
    }

    /// The usual parameters, with some of them replaced by other JSON text; `None` leaves a key out.
    pub fn with_params(mut self, changes: &[(&str, Option<&str>)]) -> Self {
        let usual = [
            ("kind", "\"mha\""),
            ("sm_scale", "0.35"),
            ("causal", "true"),
            ("window_left", "3"),
            ("softcap", "20.0"),
            ("k_scale", "1.0"),
            ("v_scale", "null"),
            ("head_dim_vo", "32"),
        ];
        let changed = |key: &str| changes.iter().find(|(name, _)| *name == key).map(|(_, text)| *text);
        let pairs = usual.iter().filter_map(|(key, text)| {
            let text = changed(key).unwrap_or(Some(text))?;
            Some(format!("\"{key}\": {text}"))
        });
        self.params = Some(format!("{{{}}}", pairs.collect::<Vec<_>>().join(", ")));
        self
    }

    /// With a tensor replaced.
    pub fn with(mut self, name: &str, tensor: Tensor) -> Self {
        self.tensors.insert(name.to_owned(), tensor);
        self
    }

    /// With one entry of a table replaced.
    pub fn with_entry(self, name: &str, index: usize, value: i32) -> Self {
        let mut values = self.tensors[name].to_i32();
        values[index] = value;
        self.with(name, Tensor::i32(&values))
    }

    /// Without some tensors.
    pub fn without(mut self, names: &[&str]) -> Self {
        self.tensors.retain(|name, _| !names.contains(&name.as_str()));
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        let metadata = self.params.clone().map(|text| HashMap::from([("attn".to_owned(), text)]));
        safetensors::serialize(self.tensors.iter(), metadata).unwrap()
    }

    pub fn read(path: &Path) -> Self {
        let bytes = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensor = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
            let (dtype, shape, bytes) = (view.dtype(), view.shape().to_vec(), view.data().to_vec());
            (name, Tensor { dtype, shape, bytes })
        };
        Self { tensors: file.tensors().into_iter().map(tensor).collect(), params: None }
    }
}

//! What can be wrong with a GGUF file.
//!
//! Every message says what was found and, where a reader can act on it, what to do. The numbers
//! are bytes, and offsets count from the start of the file.

use std::path::PathBuf;

/// Why a GGUF file, one of its metadata keys or one of its tensors cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    /// The file could not be opened.
    #[error("cannot open the model file {path:?}; give the path of a readable .gguf file")]
    Open {
        /// The path as given.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// Reading failed in the middle of an intact file.
    #[error("cannot read {what} at byte {offset}")]
    Read {
        /// What was being read.
        what: String,
        /// Where.
        offset: u64,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// The file does not begin with the GGUF magic.
    #[error("not a GGUF file: it begins with {magic:02x?} instead of \"GGUF\"; convert the model to GGUF first")]
    NotGguf {
        /// The first four bytes.
        magic: [u8; 4],
    },
    /// The format version is not 2 or 3.
    #[error("GGUF version {version} is not supported (2 and 3 are; a huge number means a big-endian file)")]
    Version {
        /// The version found.
        version: u32,
    },
    /// The file ends before what its header promises.
    #[error(
        "the file ends early: {what} at byte {offset} needs {needed} bytes and {remaining} remain; the file is truncated or corrupt, fetch it again"
    )]
    Truncated {
        /// What was being read.
        what: String,
        /// Where it begins.
        offset: u64,
        /// Bytes it needs at least.
        needed: u64,
        /// Bytes left in the file.
        remaining: u64,
    },
    /// A metadata value has a type number that the format does not define.
    #[error("metadata key {key:?} has the unknown value type {type_id}; the file is corrupt or newer than this reader")]
    ValueType {
        /// The key.
        key: String,
        /// The type number found.
        type_id: u32,
    },
    /// An array of arrays, which no supported model uses.
    #[error("metadata key {key:?} is an array of arrays, which is not supported")]
    NestedArray {
        /// The key.
        key: String,
    },
    /// A key or a tensor occurs twice.
    #[error("{what} {name:?} occurs twice; the file is corrupt")]
    Duplicate {
        /// `"metadata key"` or `"tensor"`.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// `general.alignment` is not a positive multiple of 8.
    #[error("general.alignment is {alignment}, expected a positive multiple of 8; the file is corrupt")]
    Alignment {
        /// The value found.
        alignment: u64,
    },
    /// A tensor's dimensions cannot be right.
    #[error("tensor {name:?} has impossible dimensions {dims:?} ({reason}); the file is corrupt")]
    Dimensions {
        /// The tensor.
        name: String,
        /// Its dimensions, outermost first.
        dims: Vec<u64>,
        /// The rule that is broken.
        reason: &'static str,
    },
    /// A tensor is stored in a type that cannot be dequantised.
    #[error(
        "tensor {name:?} is stored as ggml type {type_id}, which is not supported (F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K are); quantise the model to one of these"
    )]
    TensorType {
        /// The tensor.
        name: String,
        /// The ggml type number.
        type_id: u32,
    },
    /// A metadata key that the model needs is absent.
    #[error("metadata key {key:?} is missing; convert the model again with a current converter")]
    MissingKey {
        /// The key.
        key: String,
    },
    /// A metadata value has another type than its key wants.
    #[error("metadata key {key:?} holds {got}, expected {expected}")]
    KeyType {
        /// The key.
        key: String,
        /// The wanted type.
        expected: &'static str,
        /// The type found.
        got: &'static str,
    },
    /// A metadata number is outside the range that its key allows.
    #[error("metadata key {key:?} is {value}, expected {expected}")]
    KeyRange {
        /// The key.
        key: String,
        /// The value found.
        value: String,
        /// The allowed range.
        expected: &'static str,
    },
    /// A tensor that the model needs is absent.
    #[error("tensor {name:?} is missing; the file does not hold the whole model")]
    MissingTensor {
        /// The tensor.
        name: String,
    },
    /// A tensor has another shape than the metadata says.
    #[error("tensor {name:?} has shape {got:?}, the metadata says {expected:?}")]
    TensorShape {
        /// The tensor.
        name: String,
        /// The shape that follows from the metadata, outermost first.
        expected: Vec<usize>,
        /// The shape found, outermost first.
        got: Vec<usize>,
    },
    /// The tensor library refused the tensor's bytes.
    #[error("tensor {name:?} cannot be dequantised")]
    Dequantise {
        /// The tensor.
        name: String,
        /// The library's reason.
        source: candle_core::Error,
    },
}

//! What can be wrong with a replay file, one variant a rule, and what can go wrong after it was read.

use std::io;

use attn_metadata::{BatchError, LayerError, PrepareError, RunError, SelectError};
use kvpool::{FormatError, ShapeError};
use safetensors::SafeTensorError;
use thiserror::Error;

/// A file that is no valid attention problem.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FileError {
    /// The file cannot be read at all.
    #[error("cannot read it, give the path of a safetensors file")]
    Read(#[source] io::Error),
    /// The path is that of a directory or a device.
    #[error("it is not a regular file, give the path of a safetensors file")]
    NotRegular,
    /// The bytes are no safetensors file.
    #[error("not a whole safetensors file, write it anew")]
    NotSafetensors(#[source] SafeTensorError),
    /// The metadata key is not there.
    #[error("the file has no metadata key `attn`, add one that holds the parameters as JSON")]
    NoParams,
    /// The metadata is not JSON. Note that JSON has neither NaN nor infinity.
    #[error("metadata key `attn` is not a JSON object (JSON has no NaN and no infinity)")]
    ParamsJson(#[source] serde_json::Error),
    /// The metadata is JSON, but no object.
    #[error("metadata key `attn` is not a JSON object, it must look like {{\"kind\": \"mha\", ...}}")]
    ParamsNotObject,
    /// A parameter is missing.
    #[error("metadata key `attn` lacks `{key}`, add it ({expected})")]
    MissingKey {
        /// The parameter.
        key: &'static str,
        /// What it should be.
        expected: &'static str,
    },
    /// A parameter is of the wrong type or out of range.
    #[error("`{key}` is {got}, expected {expected}")]
    KeyValue {
        /// The parameter.
        key: &'static str,
        /// Its value.
        got: String,
        /// What it should be.
        expected: &'static str,
    },
    /// The kind of attention cannot be replayed.
    #[error("kind {got:?} cannot be replayed by this build, expected \"mha\" or \"mla\"")]
    Kind {
        /// The kind.
        got: String,
    },
    /// A tensor is missing.
    #[error("tensor `{name}` is missing, add it ({expected})")]
    MissingTensor {
        /// The tensor.
        name: &'static str,
        /// What it should be.
        expected: &'static str,
    },
    /// Tensors that belong together are not all there.
    #[error(
        "tensor `{given}` is there but `{missing}` is not: give the new KV and slot_mapping together, or none of them"
    )]
    Incomplete {
        /// One that is there.
        given: &'static str,
        /// One that is not.
        missing: &'static str,
    },
    /// A tensor has a dtype that it cannot have.
    #[error("tensor `{name}` is {got}, expected {expected}")]
    TensorDtype {
        /// The tensor.
        name: &'static str,
        /// Its dtype.
        got: String,
        /// What it should be.
        expected: String,
    },
    /// A tensor has a shape that does not fit the others.
    #[error("tensor `{name}` is {got:?}, expected {expected}")]
    TensorShape {
        /// The tensor.
        name: &'static str,
        /// Its shape.
        got: Vec<usize>,
        /// What it should be.
        expected: String,
    },
    /// A tensor that this kind of attention has not.
    #[error("tensor `{name}` is there, but kind {kind:?} has none: values are columns of the keys")]
    Unwanted {
        /// The tensor.
        name: &'static str,
        /// The kind.
        kind: &'static str,
    },
    /// The file holds no request.
    #[error("there is no request: qo_indptr has one entry, it needs one more than there are requests")]
    NoRequests,
    /// FP8 caches come without a scale.
    #[error("the caches hold FP8, so `{key}` is needed: stored value x scale = real value")]
    ScaleMissing {
        /// The parameter.
        key: &'static str,
    },
    /// A cache that has no scale comes with one.
    #[error("`{key}` is {got}, but {dtype} caches are not scaled: use 1 or null")]
    ScaleUnused {
        /// The parameter.
        key: &'static str,
        /// Its value.
        got: f32,
        /// The caches' dtype.
        dtype: &'static str,
    },
    /// A scale that cannot be.
    #[error(transparent)]
    Scale(#[from] FormatError),
    /// The caches cannot be.
    #[error("the caches cannot be used")]
    Cache(#[from] ShapeError),
    /// The layer's parameters are not valid.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// The tables are not valid.
    #[error(transparent)]
    Batch(#[from] BatchError),
}

/// A problem that could not be replayed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// The file is not valid.
    #[error(transparent)]
    File(#[from] FileError),
    /// No backend of that name, or it cannot run this problem.
    #[error(transparent)]
    Select(#[from] SelectError),
    /// The backend refuses the batch.
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    /// The backend fails.
    #[error(transparent)]
    Run(#[from] RunError),
    /// The result would replace the problem.
    #[error("the result would replace the problem itself, choose another --out-dir")]
    OverItself,
    /// Two problems of one name.
    #[error("another file of this call is also named {name:?}, so the results would replace each other: rename one")]
    SameName {
        /// The file name.
        name: String,
    },
    /// What it takes is more than there is, as where a table names one page again and again.
    #[error(
        "the result and what makes it need {needed_mib} MiB, {available_mib} MiB may be used: give fewer rows or less KV"
    )]
    Memory {
        /// What it needs.
        needed_mib: u64,
        /// What may be used.
        available_mib: u64,
    },
    /// The path has no file name.
    #[error("the path names no file, give the path of a safetensors file")]
    NoName,
    /// The result cannot be packed.
    #[error("cannot write the result")]
    Pack(#[source] SafeTensorError),
    /// The result cannot be written.
    #[error("cannot write the result to {path}")]
    Write {
        /// Where to.
        path: String,
        /// Why not.
        source: io::Error,
    },
}

impl ReplayError {
    /// Whether the caller gave something that cannot be run, as opposed to a failure on the way.
    #[must_use]
    pub const fn is_bad_input(&self) -> bool {
        !matches!(self, Self::Run(_) | Self::Pack(_) | Self::Write { .. })
    }
}

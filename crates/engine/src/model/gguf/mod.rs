//! GGUF files: metadata and tensors of a model.
//!
//! [`GgufFile::open`] reads and checks the whole header, so a truncated or hostile file is refused
//! before any tensor is touched. Tensors are read one at a time and dequantised to f32; the block
//! formats themselves are candle's business.

mod error;
mod header;
mod metadata;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::Path;

use candle_core::quantized::gguf_file;
use candle_core::{Device, Shape, Tensor};

pub use error::GgufError;
pub use metadata::{Metadata, Value};

/// Shape, type and place of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Dimensions, outermost first; a linear layer is `[out, in]`.
    pub shape: Vec<usize>,
    /// ggml type number.
    type_id: u32,
    /// Bytes from the start of the tensor data.
    offset: u64,
}

/// An open GGUF file with its header parsed and checked.
#[derive(Debug)]
pub struct GgufFile<R = BufReader<File>> {
    reader: R,
    metadata: Metadata,
    tensors: HashMap<String, TensorInfo>,
    data_offset: u64,
}

impl GgufFile {
    /// Opens the file at `path`.
    ///
    /// # Errors
    /// When it cannot be read, is not GGUF version 2 or 3, or ends before the last tensor does.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let failed = |source| GgufError::Open { path: path.to_owned(), source };
        let file = File::open(path).map_err(failed)?;
        if file.metadata().map_err(failed)?.is_dir() {
            return Err(failed(std::io::ErrorKind::IsADirectory.into()));
        }
        Self::from_reader(BufReader::with_capacity(1 << 20, file))
    }
}

impl<R: Read + Seek> GgufFile<R> {
    /// Reads from anything seekable, from its first byte.
    ///
    /// # Errors
    /// As [`GgufFile::open`].
    pub fn from_reader(mut reader: R) -> Result<Self, GgufError> {
        let failed = |source| GgufError::Read { what: "the file's length".to_owned(), offset: 0, source };
        let len = reader.seek(SeekFrom::End(0)).map_err(failed)?;
        reader.rewind().map_err(failed)?;
        let header = header::read(&mut reader, len)?;
        let header::Header { metadata, tensors, data_offset } = header;
        Ok(Self { reader, metadata, tensors, data_offset })
    }

    /// The metadata.
    #[must_use]
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Whether a tensor of this name is in the file.
    #[must_use]
    pub fn has_tensor(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Number of tensors in the file.
    #[must_use]
    pub fn num_tensors(&self) -> usize {
        self.tensors.len()
    }

    /// Reads a tensor, which must have exactly `shape`, and dequantises it to f32.
    ///
    /// # Errors
    /// When it is missing, has another shape or a type that cannot be dequantised.
    pub fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Tensor, GgufError> {
        let missing = || GgufError::MissingTensor { name: name.to_owned() };
        let info = self.tensors.get(name).ok_or_else(missing)?;
        if info.shape != shape {
            let (expected, got) = (shape.to_vec(), info.shape.clone());
            return Err(GgufError::TensorShape { name: name.to_owned(), expected, got });
        }
        let unknown = || GgufError::TensorType { name: name.to_owned(), type_id: info.type_id };
        let source = gguf_file::TensorInfo {
            ggml_dtype: header::ggml_type(info.type_id).ok_or_else(unknown)?,
            shape: Shape::from(shape),
            offset: info.offset,
        };
        let failed = |source| GgufError::Dequantise { name: name.to_owned(), source };
        let quantised = source.read(&mut self.reader, self.data_offset, &Device::Cpu).map_err(failed)?;
        quantised.dequantize(&Device::Cpu).map_err(failed)
    }

    /// As [`GgufFile::tensor`] for a vector of `len` elements.
    ///
    /// # Errors
    /// As [`GgufFile::tensor`].
    pub fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, GgufError> {
        let tensor = self.tensor(name, &[len])?;
        tensor.to_vec1().map_err(|source| GgufError::Dequantise { name: name.to_owned(), source })
    }
}

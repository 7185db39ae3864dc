//! Reads the header of a GGUF file: magic, version, metadata, tensor directory.
//!
//! Nothing is allocated on the word of the file alone: every count and length is compared with the
//! bytes that remain before memory is taken for it, and every tensor's extent is checked against
//! the file's length. What this returns can be read without further checks.

use std::collections::HashMap;
use std::io::Read;

use candle_core::quantized::GgmlDType;

use super::{GgufError, Metadata, TensorInfo, Value};

const MAGIC: [u8; 4] = *b"GGUF";
const DEFAULT_ALIGNMENT: u64 = 32;
const MAX_DIMS: u32 = 4;

/// Parsed header; see [`super::GgufFile`].
#[derive(Debug)]
pub(super) struct Header {
    pub(super) metadata: Metadata,
    pub(super) tensors: HashMap<String, TensorInfo>,
    /// Byte at which the tensor data begin.
    pub(super) data_offset: u64,
}

/// Parses the header of a file of `len` bytes.
pub(super) fn read(reader: impl Read, len: u64) -> Result<Header, GgufError> {
    let mut bytes = Bytes { reader, pos: 0, len };
    let magic = bytes.array::<4>(&"the magic")?;
    if magic != MAGIC {
        return Err(GgufError::NotGguf { magic });
    }
    let version = bytes.u32(&"the version")?;
    if !(2..=3).contains(&version) {
        return Err(GgufError::Version { version });
    }
    let num_tensors = bytes.u64(&"the tensor count")?;
    let num_keys = bytes.u64(&"the metadata count")?;
    // Smallest entries: a key is a length, a type and one byte; a tensor a length, the number of
    // dimensions, a type and an offset.
    bytes.expect(num_keys.saturating_mul(8 + 4 + 1), &"the metadata")?;
    bytes.expect(num_tensors.saturating_mul(8 + 4 + 4 + 8), &"the tensor directory")?;
    let metadata = read_metadata(&mut bytes, num_keys)?;
    let directory = read_directory(&mut bytes, num_tensors)?;
    let data_offset = bytes.pos.next_multiple_of(alignment(&metadata)?);
    let tensors = place(directory, data_offset, len)?;
    Ok(Header { metadata, tensors, data_offset })
}

fn alignment(metadata: &Metadata) -> Result<u64, GgufError> {
    let alignment = match metadata.opt_usize("general.alignment")? {
        Some(alignment) => alignment as u64,
        None => DEFAULT_ALIGNMENT,
    };
    if alignment == 0 || !alignment.is_multiple_of(8) {
        return Err(GgufError::Alignment { alignment });
    }
    Ok(alignment)
}

fn read_metadata<R: Read>(bytes: &mut Bytes<R>, num_keys: u64) -> Result<Metadata, GgufError> {
    let mut metadata = Metadata::default();
    for _ in 0..num_keys {
        let key = bytes.string(&"a metadata key")?;
        let type_id = bytes.u32(&key)?;
        let value = if type_id == 9 { read_array(bytes, &key)? } else { read_scalar(bytes, &key, type_id)? };
        if !metadata.insert(key.clone(), value) {
            return Err(GgufError::Duplicate { what: "metadata key", name: key });
        }
    }
    Ok(metadata)
}

fn read_scalar<R: Read>(bytes: &mut Bytes<R>, key: &String, type_id: u32) -> Result<Value, GgufError> {
    Ok(match type_id {
        0..=5 | 10 | 11 => Value::Int(read_int(bytes, key, type_id)?),
        6 | 12 => Value::Float(read_float(bytes, key, type_id)?),
        7 => Value::Bool(bytes.array::<1>(key)?[0] != 0),
        8 => Value::String(bytes.string(key)?),
        _ => return Err(GgufError::ValueType { key: key.clone(), type_id }),
    })
}

fn read_int<R: Read>(bytes: &mut Bytes<R>, key: &String, type_id: u32) -> Result<i64, GgufError> {
    Ok(match type_id {
        0 => bytes.array::<1>(key)?[0].into(),
        1 => i8::from_le_bytes(bytes.array(key)?).into(),
        2 => u16::from_le_bytes(bytes.array(key)?).into(),
        3 => i16::from_le_bytes(bytes.array(key)?).into(),
        4 => bytes.u32(key)?.into(),
        5 => i32::from_le_bytes(bytes.array(key)?).into(),
        10 => {
            let wide = bytes.u64(key)?;
            let expected = "at most 9223372036854775807";
            i64::try_from(wide).map_err(|_| GgufError::KeyRange {
                key: key.clone(),
                value: wide.to_string(),
                expected,
            })?
        }
        _ => i64::from_le_bytes(bytes.array(key)?),
    })
}

fn read_float<R: Read>(bytes: &mut Bytes<R>, key: &String, type_id: u32) -> Result<f64, GgufError> {
    if type_id == 6 {
        return Ok(f32::from_le_bytes(bytes.array(key)?).into());
    }
    Ok(f64::from_le_bytes(bytes.array(key)?))
}

fn read_array<R: Read>(bytes: &mut Bytes<R>, key: &String) -> Result<Value, GgufError> {
    let type_id = bytes.u32(key)?;
    let len = bytes.u64(key)?;
    let smallest = match type_id {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        8 | 10..=12 => 8,
        9 => return Err(GgufError::NestedArray { key: key.clone() }),
        _ => return Err(GgufError::ValueType { key: key.clone(), type_id }),
    };
    bytes.expect(len.saturating_mul(smallest), key)?;
    Ok(match type_id {
        6 | 12 => Value::Floats((0..len).map(|_| read_float(bytes, key, type_id)).collect::<Result<_, _>>()?),
        7 => Value::Bools((0..len).map(|_| Ok(bytes.array::<1>(key)?[0] != 0)).collect::<Result<_, _>>()?),
        8 => Value::Strings((0..len).map(|_| bytes.string(key)).collect::<Result<_, _>>()?),
        _ => Value::Ints((0..len).map(|_| read_int(bytes, key, type_id)).collect::<Result<_, _>>()?),
    })
}

/// A directory entry before its extent is known to be inside the file.
struct Entry {
    name: String,
    /// Outermost first; the file stores them innermost first.
    dims: Vec<u64>,
    type_id: u32,
    offset: u64,
}

fn read_directory<R: Read>(bytes: &mut Bytes<R>, num_tensors: u64) -> Result<Vec<Entry>, GgufError> {
    let mut entries = Vec::new();
    for _ in 0..num_tensors {
        let name = bytes.string(&"a tensor name")?;
        let num_dims = bytes.u32(&name)?;
        if num_dims > MAX_DIMS {
            let dims = vec![num_dims.into()];
            return Err(GgufError::Dimensions { name, dims, reason: "more than 4 dimensions, their number is given" });
        }
        let mut dims = (0..num_dims).map(|_| bytes.u64(&name)).collect::<Result<Vec<_>, _>>()?;
        dims.reverse();
        let type_id = bytes.u32(&name)?;
        let offset = bytes.u64(&name)?;
        entries.push(Entry { name, dims, type_id, offset });
    }
    Ok(entries)
}

fn place(directory: Vec<Entry>, data_offset: u64, len: u64) -> Result<HashMap<String, TensorInfo>, GgufError> {
    let mut tensors = HashMap::new();
    let mut total_bytes = 0u64;
    for entry in directory {
        let (info, num_bytes) = check_entry(&entry, data_offset, len)?;
        total_bytes = total_bytes.saturating_add(num_bytes);
        if tensors.insert(entry.name.clone(), info).is_some() {
            return Err(GgufError::Duplicate { what: "tensor", name: entry.name });
        }
    }
    // Tensors that share bytes would let a small file ask for any amount of memory.
    let remaining = len.saturating_sub(data_offset);
    if total_bytes > remaining {
        let what = "the data of all tensors".to_owned();
        return Err(GgufError::Truncated { what, offset: data_offset, needed: total_bytes, remaining });
    }
    Ok(tensors)
}

/// Checks one entry's dimensions and that its data lie inside the file; returns their size too.
fn check_entry(entry: &Entry, data_offset: u64, len: u64) -> Result<(TensorInfo, u64), GgufError> {
    let bad = |reason| GgufError::Dimensions { name: entry.name.clone(), dims: entry.dims.clone(), reason };
    let dtype = ggml_type(entry.type_id);
    let block = dtype.map_or(1, |dtype| dtype.block_size() as u64);
    let block_bytes = dtype.map_or(0, |dtype| dtype.type_size() as u64);
    let Some(&row) = entry.dims.last() else {
        return Err(bad("no dimension"));
    };
    if !row.is_multiple_of(block) {
        return Err(bad("rows are not whole blocks of the quantised type"));
    }
    let num_bytes = entry
        .dims
        .iter()
        .try_fold(1u64, |product, &dim| product.checked_mul(dim))
        .and_then(|elements| (elements / block).checked_mul(block_bytes))
        .ok_or_else(|| bad("more than 2^64 bytes"))?;
    let start = data_offset.saturating_add(entry.offset);
    let remaining = len.saturating_sub(start);
    if num_bytes > remaining {
        let what = format!("the data of tensor {:?}", entry.name);
        return Err(GgufError::Truncated { what, offset: start, needed: num_bytes, remaining });
    }
    let shape = entry.dims.iter().map(|&dim| usize::try_from(dim)).collect::<Result<_, _>>();
    let shape = shape.map_err(|_| bad("a dimension is too large for this machine"))?;
    Ok((TensorInfo { shape, type_id: entry.type_id, offset: entry.offset }, num_bytes))
}

/// The library's name for a ggml type number that it can dequantise.
pub(super) fn ggml_type(type_id: u32) -> Option<GgmlDType> {
    Some(match type_id {
        0 => GgmlDType::F32,
        1 => GgmlDType::F16,
        2 => GgmlDType::Q4_0,
        3 => GgmlDType::Q4_1,
        6 => GgmlDType::Q5_0,
        7 => GgmlDType::Q5_1,
        8 => GgmlDType::Q8_0,
        10 => GgmlDType::Q2K,
        11 => GgmlDType::Q3K,
        12 => GgmlDType::Q4K,
        13 => GgmlDType::Q5K,
        14 => GgmlDType::Q6K,
        30 => GgmlDType::BF16,
        _ => return None,
    })
}

/// A reader that knows where it is and how much is left.
struct Bytes<R> {
    reader: R,
    pos: u64,
    len: u64,
}

impl<R: Read> Bytes<R> {
    /// Errors unless `needed` bytes remain.
    fn expect(&self, needed: u64, what: &impl ToString) -> Result<(), GgufError> {
        let remaining = self.len.saturating_sub(self.pos);
        if needed <= remaining {
            return Ok(());
        }
        Err(GgufError::Truncated { what: what.to_string(), offset: self.pos, needed, remaining })
    }

    fn fill(&mut self, buffer: &mut [u8], what: &impl ToString) -> Result<(), GgufError> {
        self.expect(buffer.len() as u64, what)?;
        let failed = |source| GgufError::Read { what: what.to_string(), offset: self.pos, source };
        self.reader.read_exact(buffer).map_err(failed)?;
        self.pos += buffer.len() as u64;
        Ok(())
    }

    fn array<const N: usize>(&mut self, what: &impl ToString) -> Result<[u8; N], GgufError> {
        let mut buffer = [0; N];
        self.fill(&mut buffer, what)?;
        Ok(buffer)
    }

    fn u32(&mut self, what: &impl ToString) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &impl ToString) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A length and that many bytes. Bytes that are not UTF-8 become U+FFFD: some vocabularies
    /// hold such tokens, and a token's text is never used as bytes without going through the
    /// byte-level alphabet.
    fn string(&mut self, what: &impl ToString) -> Result<String, GgufError> {
        let len = self.u64(what)?;
        self.expect(len, what)?;
        let too_long = |_| GgufError::Truncated {
            what: what.to_string(),
            offset: self.pos,
            needed: len,
            remaining: self.len.saturating_sub(self.pos),
        };
        let mut buffer = vec![0; usize::try_from(len).map_err(too_long)?];
        self.fill(&mut buffer, what)?;
        Ok(String::from_utf8_lossy(&buffer).into_owned())
    }
}

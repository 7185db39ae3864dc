//! Tests of the reader: agreement with candle's writer, and refusal of everything else.

use std::io::Cursor;
use std::path::Path;

use candle_core::quantized::GgmlDType;

use super::super::Model;
use super::super::testing::{TinyGguf, Value as Written};
use super::*;

fn open(bytes: &[u8]) -> Result<GgufFile<Cursor<Vec<u8>>>, GgufError> {
    GgufFile::from_reader(Cursor::new(bytes.to_vec()))
}

/// A file that holds nothing but this header after the magic and version 3.
fn raw(parts: &[&[u8]]) -> Vec<u8> {
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    parts.iter().for_each(|part| bytes.extend_from_slice(part));
    bytes
}

fn text(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    bytes
}

/// A header with one metadata key `k` of type `type_id`.
fn one_key(type_id: u32, value: &[u8]) -> Vec<u8> {
    raw(&[&0u64.to_le_bytes(), &1u64.to_le_bytes(), &text("k"), &type_id.to_le_bytes(), value])
}

#[test]
fn what_candle_writes_is_read_back() {
    let mut file = TinyGguf::empty();
    file.set("int", Written::I16(-3));
    file.set("wide", Written::U64(1 << 40));
    file.set("float", Written::F64(0.5));
    file.set("flag", Written::Bool(true));
    file.set("text", Written::String("tä".into()));
    file.set("ints", Written::Array(vec![Written::U8(1), Written::U8(2)]));
    file.set("floats", Written::Array(vec![Written::F32(1.5)]));
    file.set("none", Written::Array(vec![]));
    file.set_noise("m", &[2, 3]);
    let values: Vec<f32> = (0..64).map(|i| i as f32 - 31.0).collect();
    file.set_tensor("q", &[2, 32], values.clone(), GgmlDType::Q8_0);
    let mut bytes = file.bytes();
    for version in [2, 3] {
        bytes[4] = version;
        let mut read = open(&bytes).unwrap();
        let metadata = read.metadata();
        assert_eq!(metadata.get("int"), Some(&Value::Int(-3)));
        assert_eq!(metadata.get("wide"), Some(&Value::Int(1 << 40)));
        assert_eq!(metadata.f32("float").unwrap(), 0.5);
        assert_eq!(metadata.opt_bool("flag").unwrap(), Some(true));
        assert_eq!(metadata.string("text").unwrap(), "tä");
        assert_eq!(metadata.opt_ints("ints").unwrap(), Some(&[1, 2][..]));
        assert_eq!(metadata.get("floats"), Some(&Value::Floats(vec![1.5])));
        assert!(metadata.strings("none").unwrap().is_empty());
        assert_eq!(read.num_tensors(), 2);
        let matrix = read.tensor("m", &[2, 3]).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(matrix, file.values("m"));
        let quantised = read.tensor("q", &[2, 32]).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(quantised, file.values("q"));
        assert!(quantised.iter().zip(&values).all(|(got, value)| (got - value).abs() < 0.2));
    }
}

#[test]
fn every_prefix_of_a_file_is_refused() {
    let mut file = TinyGguf::empty();
    file.set("text", Written::String("some text".into()));
    file.set("ints", Written::Array(vec![Written::I32(1), Written::I32(2)]));
    file.set_noise("a", &[3, 2]);
    // 32 bytes, so that no padding follows the last tensor.
    file.set_noise("b", &[8]);
    let bytes = file.bytes();
    for len in 0..bytes.len() {
        let error = open(&bytes[..len]).map(|_| len).unwrap_err();
        let named = matches!(&error, GgufError::Truncated { offset, needed, .. } if offset + needed > len as u64);
        assert!(named, "{len} bytes: {error}");
    }
    assert!(open(&bytes).is_ok());
}

#[test]
fn no_changed_byte_makes_loading_panic() {
    // The second file is long, and much of it names the tokens for bytes.
    for (bytes, step) in [(TinyGguf::model().bytes(), 1), (TinyGguf::gemma().bytes(), 11)] {
        change_bytes(&bytes, step);
    }
}

fn change_bytes(bytes: &[u8], step: usize) {
    for place in (0..bytes.len()).step_by(step) {
        // Data come after the header; every 16th byte of them is enough.
        if place > bytes.len() / 2 && !place.is_multiple_of(16) {
            continue;
        }
        for value in [0x00, 0xff, bytes[place].wrapping_add(1)] {
            let mut changed = bytes.to_vec();
            changed[place] = value;
            // Only that it returns is tested: some changes are harmless.
            let _ = open(&changed).map(|mut file| Model::from_gguf(&mut file, &mut |_, _| ()).is_ok());
        }
    }
}

#[test]
fn random_bytes_are_refused() {
    let mut state = 1u64;
    for _ in 0..2_000 {
        let mut bytes = raw(&[]);
        for _ in 0..8 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            // Small numbers often, so that counts get past the first check.
            let word = if state >> 63 == 0 { state >> 60 } else { state };
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        let _ = open(&bytes);
        assert!(matches!(open(&bytes[8..]), Err(GgufError::NotGguf { .. })));
    }
}

#[test]
fn counts_beyond_the_file_are_refused_before_memory_is_taken() {
    let huge = (1u64 << 61).to_le_bytes();
    let zero = 0u64.to_le_bytes();
    let strings = [&8u32.to_le_bytes()[..], &huge].concat();
    for bytes in [
        raw(&[&huge, &zero]),
        raw(&[&zero, &huge]),
        raw(&[&zero, &1u64.to_le_bytes(), &huge, &[0; 32]]),
        one_key(8, &huge),
        one_key(9, &strings),
    ] {
        assert!(matches!(open(&bytes), Err(GgufError::Truncated { .. })), "{bytes:?}");
    }
}

#[test]
fn malformed_headers_name_the_rule() {
    let case = |bytes: &[u8], expected: &str| {
        let error = open(bytes).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error:?} lacks {expected:?}");
    };
    case(b"PK\x03\x04 and so on", "not a GGUF file");
    case(b"GGUF\x01\0\0\0", "version 1");
    case(b"GGUF\0\0\0\x03", "big-endian");
    case(&one_key(13, &[0; 8]), "unknown value type 13");
    case(&one_key(9, &[&9u32.to_le_bytes()[..], &[0; 8]].concat()), "array of arrays");
    case(&one_key(10, &[0xff; 8]), "18446744073709551615");
    let mut file = TinyGguf::empty();
    file.set("general.alignment", Written::U32(0));
    case(&file.bytes(), "general.alignment is 0");
    file.metadata = vec![("k".into(), Written::U8(1)), ("k".into(), Written::U8(2))];
    case(&file.bytes(), "\"k\" occurs twice");
}

/// A header with one tensor `t`; `tail` is dimensions, type and offset, then 64 bytes of data.
fn one_tensor(dims: &[u64], type_id: u32, offset: u64) -> Vec<u8> {
    let mut bytes = raw(&[&1u64.to_le_bytes(), &0u64.to_le_bytes(), &text("t")]);
    bytes.extend_from_slice(&u32::try_from(dims.len()).unwrap().to_le_bytes());
    dims.iter().rev().for_each(|dim| bytes.extend_from_slice(&dim.to_le_bytes()));
    bytes.extend_from_slice(&type_id.to_le_bytes());
    bytes.extend_from_slice(&offset.to_le_bytes());
    bytes.resize(bytes.len().next_multiple_of(32) + 64, 0);
    bytes
}

#[test]
fn malformed_tensors_are_refused() {
    assert!(open(&one_tensor(&[4, 4], 0, 0)).is_ok());
    assert!(matches!(open(&one_tensor(&[4, 4], 0, 4)), Err(GgufError::Truncated { .. })));
    assert!(matches!(open(&one_tensor(&[4, 4], 0, u64::MAX)), Err(GgufError::Truncated { .. })));
    for (dims, type_id) in [(&[][..], 0), (&[1, 1, 1, 1, 1], 0), (&[1 << 40, 1 << 40], 0), (&[4, 33], 8)] {
        let error = open(&one_tensor(dims, type_id, 0)).map(|_| ()).unwrap_err();
        assert!(matches!(error, GgufError::Dimensions { .. }), "{dims:?}: {error}");
    }
    let mut unknown = open(&one_tensor(&[4, 4], 99, 0)).unwrap();
    assert!(matches!(unknown.tensor("t", &[4, 4]), Err(GgufError::TensorType { type_id: 99, .. })));
    assert!(matches!(unknown.tensor("t", &[4, 5]), Err(GgufError::TensorShape { .. })));
    assert!(matches!(unknown.tensor("u", &[4]), Err(GgufError::MissingTensor { .. })));
}

#[test]
fn tensors_that_share_bytes_are_refused() {
    let mut bytes = raw(&[&2u64.to_le_bytes(), &0u64.to_le_bytes()]);
    for name in ["a", "b"] {
        bytes.extend_from_slice(&text(name));
        bytes.extend_from_slice(&1u32.to_le_bytes());
        bytes.extend_from_slice(&16u64.to_le_bytes());
        bytes.extend_from_slice(&[0; 12]);
    }
    bytes.resize(bytes.len().next_multiple_of(32) + 64, 0);
    assert!(matches!(open(&bytes), Err(GgufError::Truncated { .. })));
}

#[test]
fn a_missing_file_and_a_folder_are_named() {
    for path in ["/no/such/model.gguf", "/"] {
        let error = GgufFile::open(Path::new(path)).map(|_| ()).unwrap_err();
        assert!(matches!(&error, GgufError::Open { .. }) && error.to_string().contains(path), "{error}");
    }
}

#[test]
fn getters_name_the_key_the_kind_and_the_range() {
    let mut file = TinyGguf::empty();
    file.set("text", Written::String("x".into()));
    file.set("minus", Written::I32(-1));
    file.set("inf", Written::F32(f32::INFINITY));
    let metadata = file.parsed_metadata();
    let error = metadata.usize("text").unwrap_err().to_string();
    assert_eq!(error, "metadata key \"text\" holds a string, expected an integer");
    assert!(matches!(metadata.usize("minus"), Err(GgufError::KeyRange { .. })));
    assert!(matches!(metadata.opt_token("minus"), Err(GgufError::KeyRange { .. })));
    assert!(matches!(metadata.f32("inf"), Err(GgufError::KeyRange { .. })));
    assert!(matches!(metadata.string("nothing"), Err(GgufError::MissingKey { .. })));
    assert_eq!(metadata.opt_string("nothing").unwrap(), None);
}

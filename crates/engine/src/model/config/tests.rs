//! Tests of what metadata become, and of what is refused.

use super::super::testing::{TinyGguf, Value};
use super::*;

fn config(file: &TinyGguf) -> Result<ModelConfig, ConfigError> {
    ModelConfig::from_metadata(&file.parsed_metadata())
}

#[test]
fn impossible_configurations_are_refused() {
    let cases: [(&str, Value, &str); 13] = [
        ("general.architecture", Value::String("mamba".into()), "supported: llama, gemma3"),
        ("llama.block_count", Value::U32(0), "at least 1"),
        ("llama.block_count", Value::String("2".into()), "holds a string"),
        ("llama.attention.head_count_kv", Value::U32(3), "a divisor of the 4"),
        ("llama.attention.key_length", Value::U32(0), "at least 1"),
        ("llama.attention.value_length", Value::U32(7), "6 for K and 7 for V"),
        ("llama.attention.scale", Value::F32(-1.0), "more than 0"),
        ("llama.attention.sliding_window", Value::U32(9), "a sliding window of 9 tokens"),
        ("llama.rope.dimension_count", Value::U32(8), "2 to the head size 6"),
        ("llama.rope.dimension_count", Value::U32(0), "from 2"),
        ("llama.rope.scaling.type", Value::String("yarn".into()), "RoPE scaling"),
        ("llama.expert_count", Value::U32(8), "8 experts"),
        ("llama.vocab_size", Value::U32(7), "entries of tokenizer.ggml.tokens"),
    ];
    for (key, value, expected) in cases {
        let mut file = TinyGguf::model();
        file.set(key, value);
        let error = config(&file).unwrap_err().to_string();
        assert!(error.contains(expected), "{error:?} lacks {expected:?}");
    }
}

#[test]
fn impossible_windows_and_caps_are_refused() {
    let cases: [(&str, Value, &str); 7] = [
        ("attention.sliding_window", Value::U32(0), "at least 1"),
        ("attention.sliding_window_pattern", Value::U32(0), "at least 1"),
        ("attention.sliding_window_pattern", Value::Array(vec![Value::Bool(true)]), "holds an array of bools"),
        ("rope.freq_base_swa", Value::F32(0.0), "more than 0"),
        ("rope.scaling.factor", Value::F32(-8.0), "more than 0"),
        ("attn_logit_softcapping", Value::F32(0.0), "more than 0"),
        ("final_logit_softcapping", Value::F32(f32::NAN), "a finite 32-bit float"),
    ];
    for (key, value, expected) in cases {
        let mut file = TinyGguf::gemma();
        let key = format!("gemma3.{key}");
        file.set(&key, value);
        let error = config(&file).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains(&key), "{error:?} lacks {expected:?} or {key:?}");
    }
}

#[test]
fn missing_keys_are_named_and_optional_ones_have_defaults() {
    for key in ["block_count", "context_length", "feed_forward_length", "attention.layer_norm_rms_epsilon"] {
        let mut file = TinyGguf::model();
        let key = format!("llama.{key}");
        file.remove(&key);
        let error = config(&file).unwrap_err();
        assert!(matches!(&error, ConfigError::Metadata(GgufError::MissingKey { key: k }) if *k == key), "{error}");
    }
    let mut file = TinyGguf::model();
    for key in ["head_count_kv", "key_length"] {
        file.remove(&format!("llama.attention.{key}"));
    }
    file.remove("llama.rope.dimension_count");
    file.remove("llama.rope.freq_base");
    let config = config(&file).unwrap();
    assert_eq!((config.num_kv_heads, config.head_dim, config.rope.num_dims), (4, 2, 2));
    assert_eq!((config.rope.freq_base, config.sm_scale, config.embedding_scale), (10_000.0, 0.5f32.sqrt(), 1.0));
    assert_eq!((config.window, config.softcap, config.logit_softcap), (None, None, None));
}

#[test]
fn a_file_that_is_silent_on_its_windows_has_five_of_six() {
    let mut file = TinyGguf::gemma();
    file.set("gemma3.block_count", Value::U32(18));
    file.remove("gemma3.attention.sliding_window_pattern");
    file.remove("gemma3.rope.freq_base_swa");
    let config = config(&file).unwrap();
    let full: Vec<usize> = (0..18).filter(|&layer| config.window_of(layer).is_none()).collect();
    assert_eq!(full, [5, 11, 17]);
    let window = config.window_of(0).unwrap();
    assert_eq!((window.num_tokens, window.rope.freq_base, window.rope.linear_factor), (3, 10_000.0, 1.0));
    assert_eq!((config.rope.freq_base, config.rope.linear_factor), (1000.0, 2.0));
    assert_eq!((config.rope.pairs, config.activation), (RopePairs::Halves, Activation::GeluTanh));
    file.remove("gemma3.attention.sliding_window");
    let error = super::ModelConfig::from_metadata(&file.parsed_metadata()).unwrap_err();
    assert!(error.to_string().contains("sliding_window"), "{error}");
}

#[test]
fn the_scale_is_the_files_or_that_of_a_head_or_of_the_stream() {
    let mut file = TinyGguf::gemma();
    assert_eq!(config(&file).unwrap().sm_scale, 6f32.sqrt().recip());
    file.set("gemma3.block_count", Value::U32(62));
    assert_eq!(config(&file).unwrap().sm_scale, 2f32.sqrt().recip());
    file.set("gemma3.attention.scale", Value::F32(0.25));
    assert_eq!(config(&file).unwrap().sm_scale, 0.25);
}

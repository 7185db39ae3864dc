//! Tests of encoding, decoding and streaming on a tiny vocabulary.

use super::super::testing::{TinyGguf, Value};
use super::*;

const E: u32 = 1;
const E_BANG: u32 = 2;
const KEEP: u32 = 3;

fn tokenizer() -> Tokenizer {
    Tokenizer::from_metadata(&TinyGguf::model().parsed_metadata()).unwrap()
}

fn id(tokenizer: &Tokenizer, text: &str) -> u32 {
    (0u32..).zip(&tokenizer.tokens).find(|(_, token)| *token == text).unwrap().0
}

fn encode(tokenizer: &Tokenizer, text: &str, special: SpecialTokens) -> Vec<String> {
    let tokens = tokenizer.encode(text, special).unwrap();
    tokens.iter().map(|&token| tokenizer.token_text(token).unwrap().to_owned()).collect()
}

#[test]
fn merges_apply_and_text_comes_back() {
    let tokenizer = tokenizer();
    assert_eq!(encode(&tokenizer, "ab ab a12", SpecialTokens::AsText), ["ab", "Ġab", "Ġa", "1", "2"]);
    for text in ["", "ab ab\nz", "é.", "it's 😀 "] {
        let tokens = tokenizer.encode(text, SpecialTokens::Parse).unwrap();
        assert_eq!(tokenizer.decode(&tokens, true).unwrap(), text);
    }
}

#[test]
fn control_tokens_in_text_are_parsed_only_when_allowed() {
    let tokenizer = tokenizer();
    let parsed = tokenizer.encode("<|e|>!<|e|><keep>", SpecialTokens::Parse).unwrap();
    assert_eq!(parsed, [E_BANG, E, KEEP]);
    let plain = encode(&tokenizer, "<|e|><keep>", SpecialTokens::AsText);
    assert_eq!(plain, ["<", "|", "e", "|", ">", "<keep>"]);
    assert_eq!(tokenizer.decode(&parsed, false).unwrap(), "<|e|>!<|e|><keep>");
    assert_eq!(tokenizer.decode(&parsed, true).unwrap(), "<keep>");
}

#[test]
fn bos_comes_first_where_the_model_wants_it() {
    let mut file = TinyGguf::model();
    file.set("tokenizer.ggml.add_bos_token", Value::Bool(true));
    let tokenizer = Tokenizer::from_metadata(&file.parsed_metadata()).unwrap();
    assert_eq!(tokenizer.encode("", SpecialTokens::AsText).unwrap(), [0]);
    assert_eq!(encode(&tokenizer, "ab", SpecialTokens::AsText), ["<|b|>", "ab"]);
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(0), Some(E)));
    assert!(tokenizer.is_end(E) && !tokenizer.is_end(0));
}

#[test]
fn streaming_holds_back_unfinished_characters() {
    let tokenizer = tokenizer();
    let tokens = tokenizer.encode("a😀é<|e|>b", SpecialTokens::Parse).unwrap();
    let mut stream = tokenizer.stream(true);
    let parts: Vec<String> = tokens.iter().map(|&token| stream.push(token)).collect();
    assert_eq!(parts, ["a", "", "", "😀", "", "é", "", "b"]);
    assert_eq!(stream.finish(), "");
}

#[test]
fn streaming_replaces_what_is_no_text() {
    let tokenizer = tokenizer();
    let mut stream = tokenizer.stream(true);
    assert_eq!(stream.push(id(&tokenizer, "©")), "\u{fffd}");
    assert_eq!(stream.push(id(&tokenizer, "ðŁ")), "");
    assert_eq!(stream.push(id(&tokenizer, "a")), "\u{fffd}a");
    assert_eq!(stream.push(u32::MAX), "");
    assert_eq!(stream.push(id(&tokenizer, "Ã")), "");
    assert_eq!(stream.finish(), "\u{fffd}");
}

#[test]
fn streamed_text_is_the_decoded_text_for_any_tokens() {
    let tokenizer = tokenizer();
    let mut state = 1u32;
    for _ in 0..300 {
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 16) % u32::try_from(tokenizer.vocab_size()).unwrap()
        };
        let tokens: Vec<u32> = (0..12).map(|_| next()).collect();
        let mut stream = tokenizer.stream(false);
        let mut text: String = tokens.iter().map(|&token| stream.push(token)).collect();
        text.push_str(&stream.finish());
        assert_eq!(text, tokenizer.decode(&tokens, false).unwrap(), "{tokens:?}");
    }
}

#[test]
fn an_unknown_token_is_named() {
    let error = tokenizer().decode(&[1, 4096], false).unwrap_err();
    assert!(matches!(error, TokenizerError::UnknownToken { token: 4096, .. }));
}

#[test]
fn inconsistent_vocabularies_are_refused() {
    let texts = |texts: &[&str]| Value::Array(texts.iter().map(|&t| Value::String(t.into())).collect());
    let cases: [(&str, Value, &str); 9] = [
        ("tokenizer.ggml.model", Value::String("llama".into()), "byte-level BPE"),
        ("tokenizer.ggml.model", Value::U8(1), "holds an integer"),
        ("tokenizer.ggml.pre", Value::String("tekken".into()), "supported: default"),
        ("tokenizer.ggml.tokens", texts(&["a", "b", "a"]), "0 and 2 are both \"a\""),
        ("tokenizer.ggml.token_type", Value::Array(vec![Value::I32(1)]), "1 entries"),
        ("tokenizer.ggml.merges", texts(&["a b", "ab"]), "merge 1 is \"ab\""),
        ("tokenizer.ggml.merges", texts(&["y z"]), "merge 0"),
        ("tokenizer.ggml.eos_token_id", Value::U32(999), "eos_token_id is 999"),
        ("tokenizer.ggml.bos_token_id", Value::I32(-1), "bos_token_id\" is -1"),
    ];
    for (key, value, expected) in cases {
        let mut file = TinyGguf::model();
        file.set(key, value);
        let error = Tokenizer::from_metadata(&file.parsed_metadata()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error:?} lacks {expected:?}");
    }
    let mut file = TinyGguf::model();
    file.remove("tokenizer.ggml.bos_token_id");
    file.set("tokenizer.ggml.add_bos_token", Value::Bool(true));
    let error = Tokenizer::from_metadata(&file.parsed_metadata()).unwrap_err();
    assert!(matches!(error, TokenizerError::NoBosToken));
}

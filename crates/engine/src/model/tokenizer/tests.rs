//! Tests of encoding, decoding and streaming on tiny vocabularies.

use super::super::testing::{TinyGguf, Value};
use super::*;

const E: u32 = 1;
const E_BANG: u32 = 2;
const KEEP: u32 = 3;

fn tokenizer() -> Tokenizer {
    Tokenizer::from_metadata(&TinyGguf::model().parsed_metadata()).unwrap()
}

fn scored() -> Tokenizer {
    Tokenizer::from_metadata(&TinyGguf::gemma().parsed_metadata()).unwrap()
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
    let mut state = 1u32;
    let (byte_level, scored) = (tokenizer(), scored());
    for tokenizer in [&byte_level, &scored].repeat(300) {
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
        ("tokenizer.ggml.model", Value::String("bert".into()), "byte-level BPE"),
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

#[test]
fn scores_bytes_and_literals_make_the_tokens() {
    let check = |text: &str, expected: &[&str]| {
        let tokenizer = scored();
        assert_eq!(encode(&tokenizer, text, SpecialTokens::AsText), [&["<bos>"], expected].concat(), "{text:?}");
        let tokens = tokenizer.encode(text, SpecialTokens::AsText).unwrap();
        assert_eq!(tokenizer.decode(&tokens, true).unwrap(), text.replace('▁', " "));
    };
    check("", &[]);
    check("cab ab", &["cab", "▁ab"]);
    check("é日 日", &["é", "日", "▁日"]);
    check("xü", &["<0x78>", "<0xC3>", "<0xBC>"]);
    check("a\n\n\n a", &["a", "\n\n", "\n", "▁a"]);
    check("a  ab   ab", &["a", "  ", "ab", "  ", "▁ab"]);
    check("a▁▁ab", &["a", "  ", "ab"]);
    check("<td> <", &["<td>", "▁", "<"]);
    check("<eos>", &["<", "e", "o", "s", ">"]);
    check("<0x41>", &["<", "<0x30>", "<0x78>", "<0x34>", "<0x31>", ">"]);
}

#[test]
fn control_tokens_of_a_scored_vocabulary_are_parsed_only_when_allowed() {
    let tokenizer = scored();
    let tokens = encode(&tokenizer, "a<eos> a<unk>", SpecialTokens::Parse);
    assert_eq!(tokens, ["<bos>", "a", "<eos>", "▁a", "<unk>"]);
    // A text that brings the BOS token gets no second one.
    assert_eq!(encode(&tokenizer, "<bos>a", SpecialTokens::Parse), ["<bos>", "a"]);
    let tokens = tokenizer.encode("<bos>a<eos>", SpecialTokens::Parse).unwrap();
    assert_eq!(tokenizer.decode(&tokens, true).unwrap(), "a");
    assert_eq!(tokenizer.decode(&tokens, false).unwrap(), "<bos>a<eos>");
}

#[test]
fn streaming_joins_the_bytes_of_a_character() {
    let tokenizer = scored();
    let tokens = tokenizer.encode("a ü😀\n b", SpecialTokens::AsText).unwrap();
    let mut stream = tokenizer.stream(true);
    let parts: Vec<String> = tokens.iter().map(|&token| stream.push(token)).collect();
    assert_eq!(parts, ["", "a", " ", "", "ü", "", "", "", "😀", "\n", " ", "b"]);
    assert_eq!(stream.finish(), "");
}

#[test]
fn scored_vocabularies_that_cannot_be_used_are_refused() {
    let floats = |floats: &[f32]| Value::Array(floats.iter().map(|&f| Value::F32(f)).collect());
    let mut types: Vec<i32> = scored().kinds.iter().map(|kind| if *kind == Kind::Ordinary { 1 } else { 3 }).collect();
    let mut types_with = |token: usize, number| {
        types[token] = number;
        Value::Array(types.iter().map(|&number| Value::I32(number)).collect())
    };
    let mut scores = vec![0.0; scored().vocab_size()];
    scores[270] = f32::NAN;
    let cases: [(&str, Value, &str); 9] = [
        ("scores", floats(&[1.0]), "scores has 1 entries"),
        ("scores", floats(&scores), "the score of token 270"),
        ("scores", Value::String("high".into()), "holds a string"),
        ("token_type", types_with(8, 3), "byte 0x00"),
        ("token_type", types_with(5, 6), "token 5 is \"\\n\", expected a byte"),
        ("token_type", types_with(5, 5), "token 5 (\"\\n\") has type 5"),
        ("add_space_prefix", Value::Bool(true), "a space before the text"),
        ("remove_extra_whitespaces", Value::Bool(true), "repeated spaces"),
        ("precompiled_charsmap", floats(&[]), "a map of characters"),
    ];
    for (key, value, expected) in cases {
        let mut file = TinyGguf::gemma();
        file.set(&format!("tokenizer.ggml.{key}"), value);
        let error = Tokenizer::from_metadata(&file.parsed_metadata()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error:?} lacks {expected:?}");
    }
    for (key, expected) in [("scores", "tokenizer.ggml.scores"), ("add_space_prefix", "a space before the text")] {
        let mut file = TinyGguf::gemma();
        file.remove(&format!("tokenizer.ggml.{key}"));
        let error = Tokenizer::from_metadata(&file.parsed_metadata()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error:?} lacks {expected:?}");
    }
}

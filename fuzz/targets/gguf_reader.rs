//! Bytes as a GGUF file, or as changes of a tiny model's file. What can be loaded runs: text becomes tokens of the
//! vocabulary, tokens become text, whole or in a stream, and a forward pass gives a row of logits or an error.
//!
//! Memory is what libFuzzer's limit on single allocations watches: no file may ask for much more than its size.

#![no_main]

mod changes;
#[path = "../../crates/engine/src/model/testing.rs"]
#[allow(dead_code, clippy::unwrap_used)]
mod testing;

use std::io::Cursor;

use arbitrary::{Arbitrary, Unstructured};
use attn_metadata::RunError;
use engine::lm::{LanguageModel, LayerAttention, ModelInput};
use engine::model::gguf; // where the tests' file looks for it
use engine::model::{ChatTemplate, Decoder, GgufFile, Message, Model, ModelConfig, SpecialTokens, Tokenizer};
use libfuzzer_sys::fuzz_target;

use changes::Changes;

const TEXT: &str = "a <|e|>! ab\u{e9}\u{1f600}\n\n  <td>\0 cab 12 don't";
/// Tokens of a forward pass.
const MAX_TOKENS: usize = 3;

fuzz_target!(|bytes: &[u8]| {
    if bytes.starts_with(b"GGUF") {
        return load(bytes.to_vec());
    }
    let Ok(changes) = Changes::arbitrary(&mut Unstructured::new(bytes)) else { return };
    if let Some(file) = changes.file() {
        load(file);
    }
});

fn load(bytes: Vec<u8>) {
    let mut file = match GgufFile::from_reader(Cursor::new(bytes)) {
        Ok(file) => file,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    let config = ModelConfig::from_metadata(file.metadata());
    let tokenizer = Tokenizer::from_metadata(file.metadata());
    if let Ok(tokenizer) = &tokenizer {
        check_tokenizer(tokenizer);
        if let Ok(Some(template)) = ChatTemplate::from_metadata(file.metadata(), tokenizer) {
            check_template(&template, file.metadata());
        }
    }
    match (config, tokenizer) {
        (Ok(config), Ok(tokenizer)) => {
            assert_eq!(config.vocab_size, tokenizer.vocab_size());
            if let Ok(mut decoder) = Decoder::load(&mut file, config, &mut |_, _| ()) {
                check_decoder(&mut decoder, &tokenizer);
            }
        }
        (config, tokenizer) => {
            let error = Model::from_gguf(&mut file, &mut |_, _| ()).expect_err("one of its parts is refused");
            let parts = [config.err().map(|e| e.to_string()), tokenizer.err().map(|e| e.to_string())];
            assert!(parts.contains(&Some(error.to_string())), "{error} is none of {parts:?}");
        }
    }
}

fn check_tokenizer(tokenizer: &Tokenizer) {
    for special in [SpecialTokens::Parse, SpecialTokens::AsText] {
        let Ok(tokens) = tokenizer.encode(TEXT, special) else { continue };
        assert!(tokens.iter().all(|&token| tokenizer.token_text(token).is_some()));
        for skips in [false, true] {
            let text = tokenizer.decode(&tokens, skips).expect("the tokens are in the vocabulary");
            let mut stream = tokenizer.stream(skips);
            let mut streamed: String = tokens.iter().map(|&token| stream.push(token)).collect();
            streamed += &stream.finish();
            assert_eq!(streamed, text);
        }
    }
    let all: Vec<u32> = (0u32..).take(tokenizer.vocab_size()).collect();
    tokenizer.decode(&all, false).expect("all are in the vocabulary");
}

/// A template is a program of the file's author and may run for long; only those without a loop are rendered.
fn check_template(template: &ChatTemplate, metadata: &gguf::Metadata) {
    let source = metadata.string("tokenizer.chat_template").expect("there is a template");
    if !["for", "macro", "call", "include", "import", "extends", "*"].iter().any(|word| source.contains(word)) {
        let _ = template.render(&[Message::user(TEXT)], true);
    }
}

/// Attention that sees nothing.
struct Blind;

impl LayerAttention for Blind {
    fn attend(&mut self, _: usize, _: &[f32], _: &[f32], _: &[f32], out: &mut [f32]) -> Result<(), RunError> {
        out.fill(0.0);
        Ok(())
    }
}

fn check_decoder(decoder: &mut Decoder, tokenizer: &Tokenizer) {
    let Ok(mut tokens) = tokenizer.encode(TEXT, SpecialTokens::AsText) else { return };
    tokens.truncate(MAX_TOKENS.min(decoder.max_len()));
    if tokens.is_empty() {
        return;
    }
    let positions: Vec<u32> = (0u32..).take(tokens.len()).collect();
    let input = ModelInput { tokens: &tokens, positions: &positions, logit_rows: &[tokens.len() - 1] };
    let logits = decoder.forward(input, &mut Blind).expect("the input is valid");
    assert_eq!(logits.row(0).map(<[f32]>::len), Some(tokenizer.vocab_size()));
}

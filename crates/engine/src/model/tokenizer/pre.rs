//! Pre-tokenizers: how text is cut before merges apply, by the name in `tokenizer.ggml.pre`.
//!
//! A wrong cut gives other tokens for the same text, quietly; so a name that is not in the table
//! is an error and never falls back to a default.

use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior};

use super::TokenizerError;

/// Names accepted in `tokenizer.ggml.pre`.
pub const SUPPORTED_PRE_TOKENIZERS: &[&str] = &["default", "gpt-2", "gpt2", "llama-bpe", "llama3", "qwen2", "smollm"];

/// Words with a leading separator, runs of up to three digits, punctuation, line ends, blanks.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// As [`LLAMA3`], but each digit is a piece of its own.
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// What happens to text before the merges.
pub(super) struct Pipeline {
    pub(super) normalizer: Option<NormalizerWrapper>,
    pub(super) pre_tokenizer: PreTokenizerWrapper,
    /// Whether a piece that is a token as a whole is taken whole, whatever the merges say.
    pub(super) whole_pieces_first: bool,
}

/// The pipeline for a name in [`SUPPORTED_PRE_TOKENIZERS`].
pub(super) fn pipeline(name: &str) -> Result<Pipeline, TokenizerError> {
    let gpt2 = ByteLevel::new(false, true, true);
    let plain = |pre_tokenizer| Pipeline { normalizer: None, pre_tokenizer, whole_pieces_first: false };
    Ok(match name {
        "default" | "gpt-2" | "gpt2" => plain(gpt2.into()),
        "smollm" => plain(Sequence::new(vec![Digits::new(true).into(), gpt2.into()]).into()),
        "llama-bpe" | "llama3" => {
            Pipeline { normalizer: None, pre_tokenizer: split_by(LLAMA3)?, whole_pieces_first: true }
        }
        "qwen2" => {
            Pipeline { normalizer: Some(NFC.into()), pre_tokenizer: split_by(QWEN2)?, whole_pieces_first: false }
        }
        other => return Err(TokenizerError::PreTokenizer { name: other.to_owned() }),
    })
}

fn split_by(regex: &str) -> Result<PreTokenizerWrapper, TokenizerError> {
    let pattern = SplitPattern::Regex(regex.to_owned());
    let split =
        Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map_err(TokenizerError::library("a pattern"))?;
    let bytes = ByteLevel::new(false, true, false);
    Ok(Sequence::new(vec![split.into(), bytes.into()]).into())
}

#[cfg(test)]
mod tests {
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _};

    use super::*;

    fn pieces(name: &str, text: &str) -> Vec<String> {
        let mut pieces = PreTokenizedString::from(text);
        pipeline(name).unwrap().pre_tokenizer.pre_tokenize(&mut pieces).unwrap();
        let splits = pieces.get_splits(OffsetReferential::Original, OffsetType::Byte);
        splits.into_iter().map(|(piece, _, _)| piece.to_owned()).collect()
    }

    #[test]
    fn names_cut_digits_and_blanks_as_they_should() {
        let text = "It's 1234  x\n\n y";
        assert_eq!(pieces("gpt2", text), ["It", "'s", "Ġ1234", "Ġ", "Ġx", "ĊĊ", "Ġy"]);
        assert_eq!(pieces("smollm", text), ["It", "'s", "Ġ", "1", "2", "3", "4", "Ġ", "Ġx", "ĊĊ", "Ġy"]);
        assert_eq!(pieces("llama-bpe", text), ["It", "'s", "Ġ", "123", "4", "Ġ", "Ġx", "ĊĊ", "Ġy"]);
        assert_eq!(pieces("qwen2", text), ["It", "'s", "Ġ", "1", "2", "3", "4", "Ġ", "Ġx", "ĊĊ", "Ġy"]);
    }

    #[test]
    fn every_listed_name_works_and_another_is_refused() {
        for name in SUPPORTED_PRE_TOKENIZERS {
            assert!(pipeline(name).is_ok(), "{name}");
        }
        let Err(error) = pipeline("tekken") else { panic!("accepted") };
        assert!(error.to_string().contains("smollm"), "{error}");
    }
}

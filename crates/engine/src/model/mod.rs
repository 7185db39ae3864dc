//! Language models from GGUF files: metadata, tokenizer, chat template, weights, forward pass.
//!
//! [`Model::open`] reads everything that a file holds. The parts are usable alone: [`GgufFile`]
//! knows no models, [`Tokenizer`] no weights, and [`Decoder`] no attention; it asks the caller's
//! [`LayerAttention`](crate::lm::LayerAttention) for that, which is where this workspace's backends come in.
//!
//! ```no_run
//! use engine::lm::{LanguageModel as _, LayerAttention, ModelInput};
//! use engine::model::{Message, Model, SpecialTokens};
//! use engine::sample::{Sampler, SamplingParams};
//!
//! fn answer(question: &str, attention: &mut impl LayerAttention) -> Result<String, Box<dyn std::error::Error>> {
//!     let mut model = Model::open("model.gguf".as_ref(), &mut |_done, _total| ())?;
//!     let template = model.chat_template.as_ref().ok_or("a base model")?;
//!     let prompt = template.render(&[Message::user(question)], true)?;
//!     let mut tokens = model.tokenizer.encode(&prompt, SpecialTokens::Parse)?;
//!     let mut sampler = Sampler::new(SamplingParams::GREEDY)?;
//!     let mut text = model.tokenizer.stream(true);
//!     let (mut answer, mut position) = (String::new(), 0);
//!     loop {
//!         let positions: Vec<u32> = (position..).take(tokens.len()).collect();
//!         let input = ModelInput { tokens: &tokens, positions: &positions, logit_rows: &[tokens.len() - 1] };
//!         let logits = model.decoder.forward(input, attention)?;
//!         let choice = sampler.sample(logits.row(0).ok_or("no logits")?)?;
//!         if model.tokenizer.is_end(choice.token) {
//!             return Ok(answer + &text.finish());
//!         }
//!         answer += &text.push(choice.token);
//!         position += u32::try_from(tokens.len())?;
//!         tokens = vec![choice.token];
//!     }
//! }
//! ```

pub mod chat;
pub mod config;
pub mod decoder;
pub mod gguf;
pub mod random;
#[cfg(test)]
mod testing;
pub mod tokenizer;

use std::io::{Read, Seek};
use std::path::Path;

pub use chat::{ChatError, ChatTemplate, Message};
pub use config::{ConfigError, ModelConfig};
pub use decoder::Decoder;
pub use gguf::{GgufError, GgufFile};
pub use tokenizer::{SpecialTokens, StreamDecoder, Tokenizer, TokenizerError};

/// Why a model cannot be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The file, a key or a tensor.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The metadata do not describe a model that can be run.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The attention layers.
    #[error(transparent)]
    Attention(#[from] attn_metadata::LayerError),
    /// The chat template.
    #[error(transparent)]
    Chat(#[from] ChatError),
}

/// All that a GGUF file holds.
#[derive(Debug)]
#[non_exhaustive]
pub struct Model {
    /// The weights and the forward pass.
    pub decoder: Decoder,
    /// Text to tokens and back.
    pub tokenizer: Tokenizer,
    /// The chat template; `None` for a base model.
    pub chat_template: Option<ChatTemplate>,
}

impl Model {
    /// Loads the file at `path`. `progress` hears (tensors done, tensors in the file).
    ///
    /// # Errors
    /// When the file cannot be read or does not hold a supported model.
    pub fn open(path: &Path, progress: &mut dyn FnMut(usize, usize)) -> Result<Self, ModelError> {
        Self::from_gguf(&mut GgufFile::open(path)?, progress)
    }

    /// Loads from an open file.
    ///
    /// # Errors
    /// When it does not hold a supported model.
    pub fn from_gguf<R: Read + Seek>(
        file: &mut GgufFile<R>,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self, ModelError> {
        let config = ModelConfig::from_metadata(file.metadata())?;
        let tokenizer = Tokenizer::from_metadata(file.metadata())?;
        let chat_template = ChatTemplate::from_metadata(file.metadata(), &tokenizer)?;
        let decoder = Decoder::load(file, config, progress)?;
        Ok(Self { decoder, tokenizer, chat_template })
    }
}

//! Models of real shapes and random weights: to run kinds of attention for which no small model exists.
//!
//! Tokens are bytes. The weights follow from a seed, so a model says the same on every machine of one instruction set;
//! what it says means nothing. All arithmetic between the attention calls is `f32`, a row at a time.

mod matrix;
mod minimax;
mod mla;
mod stack;

use std::fmt;
use std::str::FromStr;

use crate::lm::LanguageModel;

/// Token ids of every random model: one for each byte.
pub const VOCAB_SIZE: usize = 256;

/// A kind of random model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RandomModel {
    /// Dense and block-sparse layers, as MiniMax M3 has them.
    Minimax,
    /// Latent layers behind a dense one, as DeepSeek-V2 and V3 have them.
    Mla,
}

impl RandomModel {
    /// Every kind.
    pub const ALL: [Self; 2] = [Self::Minimax, Self::Mla];

    /// Its name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Minimax => "minimax",
            Self::Mla => "mla",
        }
    }

    /// Makes one.
    ///
    /// # Errors
    /// [`RandomModelError`] where its layers are refused.
    pub fn make(self, seed: u64) -> Result<Box<dyn LanguageModel>, RandomModelError> {
        match self {
            Self::Minimax => Ok(Box::new(minimax::model(seed)?)),
            Self::Mla => Ok(Box::new(mla::model(seed)?)),
        }
    }
}

impl fmt::Display for RandomModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for RandomModel {
    type Err = UnknownRandomModel;

    fn from_str(name: &str) -> Result<Self, UnknownRandomModel> {
        let found = Self::ALL.into_iter().find(|kind| kind.name() == name);
        found.ok_or_else(|| UnknownRandomModel { name: name.to_owned() })
    }
}

/// A kind of random model that does not exist.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no random model {name:?}; there are: {}", RandomModel::ALL.map(RandomModel::name).join(", "))]
pub struct UnknownRandomModel {
    /// The name given.
    pub name: String,
}

/// Why a random model cannot be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RandomModelError {
    /// Its configuration.
    #[error(transparent)]
    Config(#[from] attn_sparse::ConfigError),
    /// What its configuration makes of a sparse layer.
    #[error(transparent)]
    Sparse(#[from] attn_sparse::Violations),
    /// The widths or the weights of a latent layer.
    #[error(transparent)]
    Latent(#[from] attn_mla::MlaError),
    /// A layer.
    #[error(transparent)]
    Layer(#[from] attn_metadata::LayerError),
}

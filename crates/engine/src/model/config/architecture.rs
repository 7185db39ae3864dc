//! The architectures: what each one fixes and its files do not say.
//!
//! A decoder of any of them is the same code; a new architecture is a row here, and code only where
//! it computes something that no other does.

use super::{Activation, ConfigError, RopePairs};

/// One architecture.
#[derive(Debug)]
pub(super) struct Architecture {
    /// As in `general.architecture`; the prefix of its metadata keys.
    pub(super) name: &'static str,
    pub(super) rope_pairs: RopePairs,
    pub(super) activation: Activation,
    /// Whether each head of Q and K is normed.
    pub(super) has_qk_norms: bool,
    /// Whether what attention and the MLP give is normed before it is added.
    pub(super) has_post_norms: bool,
    /// Whether embeddings are scaled by the root of their width.
    pub(super) scales_embeddings: bool,
    /// Layers with a window, where it has such.
    pub(super) window: Option<WindowDefaults>,
    /// Number of layers of the one model whose scale is `1 / sqrt(hidden_size / num_qo_heads)`,
    /// with no word of it in its file.
    pub(super) num_layers_scaled_by_stream: Option<usize>,
}

/// What holds for layers with a window unless the file says otherwise.
#[derive(Debug)]
pub(super) struct WindowDefaults {
    pub(super) period: usize,
    pub(super) freq_base: f32,
}

const LLAMA: Architecture = Architecture {
    name: "llama",
    rope_pairs: RopePairs::Neighbours,
    activation: Activation::Silu,
    has_qk_norms: false,
    has_post_norms: false,
    scales_embeddings: false,
    window: None,
    num_layers_scaled_by_stream: None,
};

const GEMMA3: Architecture = Architecture {
    name: "gemma3",
    rope_pairs: RopePairs::Halves,
    activation: Activation::GeluTanh,
    has_qk_norms: true,
    has_post_norms: true,
    scales_embeddings: true,
    window: Some(WindowDefaults { period: 6, freq_base: 10_000.0 }),
    num_layers_scaled_by_stream: Some(62), // the 27B model
};

/// The architectures that the runner knows, as named in `general.architecture`.
pub const SUPPORTED_ARCHITECTURES: &[&str] = &[LLAMA.name, GEMMA3.name];

impl Architecture {
    pub(super) fn named(name: &str) -> Result<&'static Self, ConfigError> {
        let found = [&LLAMA, &GEMMA3].into_iter().find(|architecture| architecture.name == name);
        found.ok_or_else(|| ConfigError::Architecture { architecture: name.to_owned() })
    }
}

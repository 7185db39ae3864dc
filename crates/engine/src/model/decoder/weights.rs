//! The weights of a decoder, dequantised to f32 once.
//!
//! GGUF stores them ready for use: norm weights with any constant 1 already added, Q and K permuted
//! where the architecture turns neighbours.

use std::io::{Read, Seek};

use candle_core::Tensor;

use super::super::ModelError;
use super::super::config::ModelConfig;
use super::super::gguf::{GgufError, GgufFile};
use super::linear::Linear;
use super::ops::rope_frequencies;

/// Weights of one layer.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) attn_norm: Vec<f32>,
    pub(super) q: Linear,
    pub(super) k: Linear,
    pub(super) v: Linear,
    /// `[head_dim]`, as the next.
    pub(super) q_norm: Option<Vec<f32>>,
    pub(super) k_norm: Option<Vec<f32>>,
    pub(super) o: Linear,
    pub(super) post_attn_norm: Option<Vec<f32>>,
    pub(super) mlp_norm: Vec<f32>,
    pub(super) gate: Linear,
    pub(super) up: Linear,
    pub(super) down: Linear,
    pub(super) post_mlp_norm: Option<Vec<f32>>,
}

/// All weights, and the RoPE frequencies that follow from them.
#[derive(Debug)]
pub(super) struct Weights {
    pub(super) embedding: Linear,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: Vec<f32>,
    /// `None` when the embedding serves as the head too.
    pub(super) head: Option<Linear>,
    /// One for each rotated pair, in the layers without a window.
    pub(super) frequencies: Vec<f64>,
    /// The same in the layers with a window; empty where there are none.
    pub(super) window_frequencies: Vec<f64>,
}

impl Weights {
    /// Reads everything; `progress` hears (tensors done, tensors in the file).
    pub(super) fn load<R: Read + Seek>(
        file: &mut GgufFile<R>,
        config: &ModelConfig,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self, ModelError> {
        let total = file.num_tensors();
        let mut loader = Loader { file, progress, done: 0, total };
        let (hidden, vocab) = (config.hidden_size, config.vocab_size);
        let embedding = loader.linear("token_embd", vocab, hidden)?;
        let layers = (0..config.num_layers).map(|idx| layer(&mut loader, idx, config)).collect::<Result<_, _>>()?;
        let norm = loader.vector("output_norm.weight", hidden)?;
        let has_head = loader.file.has_tensor("output.weight");
        let head = has_head.then(|| loader.linear("output", vocab, hidden)).transpose()?;
        let num_pairs = config.rope.num_dims / 2;
        let factors = loader.opt_vector("rope_freqs.weight", num_pairs)?;
        let frequencies = rope_frequencies(&config.rope, factors.as_deref());
        let window_frequencies = config.window.map_or(Vec::new(), |window| rope_frequencies(&window.rope, None));
        Ok(Self { embedding, layers, norm, head, frequencies, window_frequencies })
    }
}

fn layer<R: Read + Seek>(loader: &mut Loader<'_, R>, idx: usize, config: &ModelConfig) -> Result<Layer, ModelError> {
    let name = |part: &str| format!("blk.{idx}.{part}");
    let (hidden, inner, head_dim) = (config.hidden_size, config.intermediate_size, config.head_dim);
    let (has_qk_norms, has_post_norms) = (config.has_qk_norms, config.has_post_norms);
    Ok(Layer {
        attn_norm: loader.vector(&name("attn_norm.weight"), hidden)?,
        q: loader.linear(&name("attn_q"), config.q_width(), hidden)?,
        k: loader.linear(&name("attn_k"), config.kv_width(), hidden)?,
        v: loader.linear(&name("attn_v"), config.kv_width(), hidden)?,
        q_norm: loader.vector_if(has_qk_norms, &name("attn_q_norm.weight"), head_dim)?,
        k_norm: loader.vector_if(has_qk_norms, &name("attn_k_norm.weight"), head_dim)?,
        o: loader.linear(&name("attn_output"), hidden, config.q_width())?,
        post_attn_norm: loader.vector_if(has_post_norms, &name("post_attention_norm.weight"), hidden)?,
        mlp_norm: loader.vector(&name("ffn_norm.weight"), hidden)?,
        gate: loader.linear(&name("ffn_gate"), inner, hidden)?,
        up: loader.linear(&name("ffn_up"), inner, hidden)?,
        down: loader.linear(&name("ffn_down"), hidden, inner)?,
        post_mlp_norm: loader.vector_if(has_post_norms, &name("post_ffw_norm.weight"), hidden)?,
    })
}

struct Loader<'a, R> {
    file: &'a mut GgufFile<R>,
    progress: &'a mut dyn FnMut(usize, usize),
    done: usize,
    total: usize,
}

impl<R: Read + Seek> Loader<'_, R> {
    /// `name.weight` `[num_out, num_in]`, with `name.bias` when the file has it.
    fn linear(&mut self, name: &str, num_out: usize, num_in: usize) -> Result<Linear, ModelError> {
        let weight_name = format!("{name}.weight");
        let weight: Tensor = self.file.tensor(&weight_name, &[num_out, num_in])?;
        self.step();
        let bias = self.opt_vector(&format!("{name}.bias"), num_out)?;
        let failed = |source| GgufError::Dequantise { name: weight_name, source };
        Ok(Linear::new(&weight, bias).map_err(failed)?)
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        let vector = self.file.vector(name, len)?;
        self.step();
        Ok(vector)
    }

    fn opt_vector(&mut self, name: &str, len: usize) -> Result<Option<Vec<f32>>, ModelError> {
        self.vector_if(self.file.has_tensor(name), name, len)
    }

    fn vector_if(&mut self, is_there: bool, name: &str, len: usize) -> Result<Option<Vec<f32>>, ModelError> {
        is_there.then(|| self.vector(name, len)).transpose()
    }

    fn step(&mut self) {
        self.done += 1;
        (self.progress)(self.done, self.total);
    }
}

//! Continuous batching over a model of one's own: four requests share a pool that is too small for all of them, and a
//! thread reads the tokens of one as they come.
//!
//! The model here only repeats patterns; what matters is that it asks for attention through `LayerAttention` and knows
//! nothing of pages.

#![allow(clippy::print_stdout)]

use std::thread;

use attn_metadata::{HeadShape, HostDevice, Layer, LayerParams};
use engine::lm::{AttentionInput, AttentionOutput, ForwardError, LanguageModel, LayerAttention, Logits, ModelInput};
use engine::sample::SamplingParams;
use engine::serve::{Event, RequestSpec, SchedulerConfig, Session, SessionConfig};
use kvpool::{ExtraKey, KvFormat, PageSize, PrefixConfig};

const VOCAB: usize = 16;

/// Looks at the tokens that came before tokens like this one, and says what followed them.
struct Copycat {
    layers: Vec<Layer>,
}

/// A one-hot vector for each token.
fn one_hot(tokens: impl Iterator<Item = u32>) -> Vec<f32> {
    tokens.flat_map(|token| (0..16).map(move |i| f32::from(u8::from(i == token)))).collect()
}

impl LanguageModel for Copycat {
    fn layers(&self) -> &[Layer] {
        &self.layers
    }

    fn vocab_size(&self) -> usize {
        VOCAB
    }

    fn max_len(&self) -> usize {
        4096
    }

    fn forward(&mut self, input: ModelInput<'_>, attention: &mut dyn LayerAttention) -> Result<Logits, ForwardError> {
        let tokens = input.tokens.iter().copied();
        // Keys and queries are the tokens, values the tokens that follow them here: the next one in a counting loop.
        let (q, v) = (one_hot(tokens.clone()), one_hot(tokens.map(|token| (token + 1) % 5)));
        let mut out = vec![0.0; q.len()];
        let attended = attention.attend(0, &AttentionInput::plain(&q, &q, &v), AttentionOutput::plain(&mut out));
        attended.map_err(|source| ForwardError::Attention { layer: 0, source })?;
        let rows = input.logit_rows.iter().flat_map(|&row| out[row * VOCAB..][..VOCAB].to_vec());
        Ok(Logits::new(rows.collect(), VOCAB))
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let layer = Layer::new(LayerParams { sm_scale: 20.0, ..LayerParams::causal(HeadShape::new(1, 1, 16)) })?;
    let mut model = Copycat { layers: vec![layer] };
    let config = SessionConfig {
        page_size: PageSize::new(4)?,
        num_pages: 8,
        kv_format: KvFormat::F32,
        scheduler: SchedulerConfig { extend_chunk: 6, ..SchedulerConfig::default() },
        backend: "auto".to_owned(),
        device: HostDevice::default(),
        prefix_cache: Some(PrefixConfig::default()),
        verify_every: 10,
    };
    let mut session = Session::new(&model, &config)?;
    println!("attention on {}", session.selection());
    for len in [4, 9, 14] {
        session.submit(RequestSpec {
            prompt: (0..len).map(|i| i % 5).collect(),
            max_new_tokens: 10,
            stop_tokens: vec![],
            sampling: SamplingParams::GREEDY,
            extra: ExtraKey::default(),
        })?;
    }
    // This one has a channel of its own; who drops the receiver cancels the request.
    let (id, events) = session.stream(RequestSpec {
        prompt: (0..7).map(|i| i % 5).collect(),
        max_new_tokens: 10,
        stop_tokens: vec![],
        sampling: SamplingParams::GREEDY,
        extra: ExtraKey::default(),
    })?;
    let reader = thread::spawn(move || {
        let token = |event| if let Event::Token { token, .. } = event { Some(token) } else { None };
        events.iter().filter_map(token).inspect(|token| println!("{id} says {token}")).count()
    });
    session.run_to_end(&mut model, &mut |event| match event {
        Event::Preempted { id } => println!("{id} gave its pages back"),
        Event::Finished { id, .. } => println!("{id} has ended"),
        Event::Token { .. } => {}
    })?;
    assert_eq!(reader.join().map_err(|_| "the reader panicked")?, 10);
    while let Some(done) = session.take_completion() {
        println!("{}: {:?}", done.id, done.tokens);
        assert!(done.tokens.windows(2).all(|pair| pair[1] == (pair[0] + 1) % 5), "it counts on");
    }
    print!("{}", session.metrics().prometheus());
    Ok(())
}

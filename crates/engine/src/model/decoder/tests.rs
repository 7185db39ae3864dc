//! Tests of the forward pass against the naive one.

use attn_metadata::RunError;

use super::super::testing::TinyGguf;
use super::super::{GgufError, Model, ModelError};
use super::naive::{self, Dense};
use super::*;

fn input<'a>(tokens: &'a [u32], positions: &'a [u32], logit_rows: &'a [usize]) -> ModelInput<'a> {
    ModelInput { tokens, positions, logit_rows }
}

fn load(file: &TinyGguf) -> Result<Decoder, ModelError> {
    Model::from_gguf(&mut file.open(), &mut |_, _| ()).map(|model| model.decoder)
}

fn assert_close(got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len());
    for (g, e) in got.iter().zip(expected) {
        assert!((g - e).abs() < 1e-4, "{g} is not {e}");
    }
}

#[test]
fn a_packed_batch_of_two_sequences_matches_the_naive_model() {
    let (llama, gemma) = (TinyGguf::model(), TinyGguf::gemma());
    let (a, b) = ([5, 9, 4, 30, 7, 7], [8, 3, 11]);
    let cases = [
        (
            &llama,
            Dense::llama(Vec::new()),
            naive::llama(&llama, &a, "token_embd"),
            naive::llama(&llama, &b, "token_embd"),
        ),
        (&gemma, Dense::gemma(Vec::new()), naive::gemma(&gemma, &a), naive::gemma(&gemma, &b)),
    ];
    for (file, mut attention, expected_a, expected_b) in cases {
        let mut decoder = load(file).unwrap();
        // Five tokens of a and two of b, interleaved; then the last of each.
        attention.rows = vec![0, 1, 0, 0, 1, 0, 0];
        let batch = input(&[5, 8, 9, 4, 3, 30, 7], &[0, 0, 1, 2, 1, 3, 4], &[6, 4, 0]);
        let logits = decoder.forward(batch, &mut attention).unwrap();
        assert_eq!(logits.num_rows(), 3);
        assert_close(logits.row(0).unwrap(), &expected_a[4]);
        assert_close(logits.row(1).unwrap(), &expected_b[1]);
        assert_close(logits.row(2).unwrap(), &expected_a[0]);
        attention.rows = vec![1, 0];
        let logits = decoder.forward(input(&[11, 7], &[2, 5], &[0, 1]), &mut attention).unwrap();
        let rows: Vec<&[f32]> = logits.rows().collect();
        assert_close(rows[0], &expected_b[2]);
        assert_close(rows[1], &expected_a[5]);
        assert_eq!(logits.row(2), None);
    }
}

#[test]
fn masks_and_scores_are_told_to_attention_layer_by_layer() {
    let decoder = load(&TinyGguf::gemma()).unwrap();
    let windows: Vec<Option<u32>> = decoder.layers().iter().map(attn_metadata::Layer::window_left).collect();
    assert_eq!(windows, [Some(2), Some(2), None, Some(2)]);
    for layer in decoder.layers() {
        assert_eq!((layer.is_causal(), layer.softcap(), layer.sm_scale()), (true, Some(2.0), 6f32.sqrt().recip()));
        assert_eq!(layer.heads(), HeadShape::new(4, 1, 6));
    }
    for layer in load(&TinyGguf::model()).unwrap().layers() {
        assert_eq!((layer.window_left(), layer.softcap(), layer.sm_scale()), (None, None, 6f32.sqrt().recip()));
    }
}

#[test]
fn a_head_of_its_own_is_used_where_the_file_has_one() {
    let mut file = TinyGguf::model();
    let vocab_size = load(&file).unwrap().config().vocab_size;
    file.set_noise("output.weight", &[vocab_size, 8]);
    let mut attention = Dense::llama(vec![0]);
    let logits = load(&file).unwrap().forward(input(&[6], &[0], &[0]), &mut attention).unwrap();
    assert_close(logits.row(0).unwrap(), &naive::llama(&file, &[6], "output")[0]);
}

#[test]
fn an_empty_batch_and_no_logits_are_fine() {
    let mut decoder = load(&TinyGguf::model()).unwrap();
    let mut attention = Dense::llama(Vec::new());
    assert_eq!(decoder.forward(input(&[], &[], &[]), &mut attention).unwrap().num_rows(), 0);
    attention.rows = vec![0];
    assert_eq!(decoder.forward(input(&[6], &[0], &[]), &mut attention).unwrap().num_rows(), 0);
}

#[test]
fn mistakes_are_named_before_attention_is_called() {
    let mut decoder = load(&TinyGguf::model()).unwrap();
    let mut check = |tokens: &[u32], positions: &[u32], rows: &[usize], expected: &str| {
        let mut attention = Dense::llama(Vec::new());
        let error = decoder.forward(input(tokens, positions, rows), &mut attention).unwrap_err().to_string();
        assert!(error.contains(expected), "{error:?} lacks {expected:?}");
        assert!(attention.cache[0][0].0.is_empty());
    };
    check(&[1, 2], &[0], &[], "2 tokens and 1 positions");
    check(&[1, 4000], &[0, 1], &[], "token 4000 at row 1");
    check(&[1], &[32], &[], "context of 32");
    check(&[1], &[0], &[1], "row 1 of a batch of 1");
}

struct Failing;

impl LayerAttention for Failing {
    fn attend(&mut self, layer: usize, _: &AttentionInput<'_>, _: AttentionOutput<'_>) -> Result<(), RunError> {
        if layer == 1 { Err(RunError::NoLse { backend: "none" }) } else { Ok(()) }
    }
}

#[test]
fn an_error_of_attention_comes_back_with_its_layer() {
    let error = load(&TinyGguf::model()).unwrap().forward(input(&[1], &[0], &[0]), &mut Failing).unwrap_err();
    assert!(matches!(&error, ForwardError::Attention { layer: 1, source: RunError::NoLse { .. } }));
}

#[test]
fn progress_counts_to_the_number_of_tensors() {
    for file in [TinyGguf::model(), TinyGguf::gemma()] {
        let mut heard = Vec::new();
        Model::from_gguf(&mut file.open(), &mut |done, total| heard.push((done, total))).unwrap();
        let total = file.tensors.len();
        assert_eq!(heard, (1..=total).map(|done| (done, total)).collect::<Vec<_>>());
    }
}

#[test]
fn missing_and_misshapen_tensors_are_named() {
    for make in [TinyGguf::model, TinyGguf::gemma] {
        let names: Vec<String> = make().tensors.into_iter().map(|(name, _)| name).collect();
        for name in names {
            let mut file = make();
            file.remove_tensor(&name);
            match load(&file) {
                Ok(_) => assert!(name.ends_with("bias"), "{name} was not missed"),
                Err(error) => assert!(error.to_string().contains(&name), "{name}: {error}"),
            }
            file.set_noise(&name, &[3, 5]);
            let error = load(&file).unwrap_err();
            let is_shape = matches!(&error, ModelError::Gguf(GgufError::TensorShape { .. }));
            assert!(is_shape && error.to_string().contains(&name), "{name}: {error}");
        }
    }
}

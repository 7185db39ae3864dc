//! `attn check-vectors`, and `attn generate` with a model of random weights.

use std::fs;

use serde_json::Value;

use crate::support::{attn, attn_ok, fresh_dir, refused};

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/vectors/sparse_vectors.json");

#[test]
fn the_published_vectors_pass_on_every_block_sparse_backend() {
    let text = attn_ok(&["check-vectors", FILE]);
    for line in ["sparse: 32 passed, 0 refused, 0 failed", "sparse-oracle: 32 passed, 0 refused, 0 failed"] {
        assert!(text.lines().any(|l| l == line), "{line} is not in {text}");
    }
    assert!(text.contains("sparse-pages: 24 passed, 8 refused, 0 failed"), "{text}");
    let one = attn_ok(&["check-vectors", FILE, "--attention-backend", "sparse-oracle"]);
    assert_eq!(one, "sparse-oracle: 32 passed, 0 refused, 0 failed\n");
    let json: Value =
        serde_json::from_str(&attn_ok(&["check-vectors", FILE, "--attention-backend", "sparse", "--json"])).unwrap();
    assert_eq!(json[0]["cases"].as_array().unwrap().len(), 32);
    assert_eq!(json[0]["cases"][0]["case"], "attention prefill_max_local1");
}

#[test]
fn a_wrong_number_ends_with_exit_code_1_and_the_first_difference() {
    let dir = fresh_dir("check_vectors");
    let path = dir.join("wrong.json");
    let text = fs::read_to_string(FILE).unwrap().replacen("-0.8274013194451754", "-0.8275", 1);
    fs::write(&path, text).unwrap();
    let output = attn(&["check-vectors", path.to_str().unwrap(), "--attention-backend", "sparse"]);
    assert_eq!(output.status.code(), Some(1));
    let stdout = String::from_utf8(output.stdout).unwrap();
    let found = "  attention prefill_max_local1: FAILED: o[0][0][0] is -0.82740";
    assert!(stdout.contains("31 passed, 0 refused, 1 failed") && stdout.contains(found), "{stdout}");
}

#[test]
fn what_cannot_be_checked_is_refused() {
    let [line] = &refused(&attn(&["check-vectors", FILE, "--attention-backend", "cpu"]), 2, 1)[..] else { panic!() };
    assert!(line.contains("there are: sparse, sparse-oracle, sparse-pages"), "{line}");
    refused(&attn(&["check-vectors", "no such file"]), 2, 1);
    let dir = fresh_dir("check_vectors_refused");
    let path = dir.join("other.json");
    fs::write(&path, "{}").unwrap();
    refused(&attn(&["check-vectors", path.to_str().unwrap()]), 2, 1);
}

#[cfg(feature = "model")]
mod random {
    use super::*;

    /// Prompts of more than the three blocks of 64 tokens that a block-sparse row may take.
    fn generate(kind: &str, args: &[&str]) -> String {
        let prompts = ["block-sparse ".repeat(30), "attention ".repeat(35), "block-sparse ".repeat(31)];
        let mut all = vec!["generate", "--random-model", kind, "--max-new-tokens", "12"];
        prompts.iter().for_each(|prompt| all.extend(["--prompt", prompt]));
        all.extend(args);
        attn_ok(&all)
    }

    /// The tokens of each prompt, and its last logit.
    fn said(text: &str) -> Vec<(&str, f32)> {
        let parse = |line| {
            let (tokens, logit) = str::split_once(line, " (last logit ").unwrap();
            (tokens, logit.trim_end_matches(')').parse().unwrap())
        };
        text.lines().map(parse).collect()
    }

    fn check(kind: &str, backends: &str, tolerance: f32) {
        let expected = generate(kind, &["--page-size", "16"]);
        assert_eq!(expected.lines().count(), 3);
        let small_pool = ["--page-size", "16", "--num-pages", "40"];
        for args in [
            &["--page-size", "1"][..],
            &["--page-size", "64"],
            &["--prefill-chunk", "37"],
            &["--prefill-chunk", "1"],
            &["--no-prefix-cache"],
            &["--attention-backend", backends],
            &["--threads", "1"],
            &small_pool,
        ] {
            let got = generate(kind, args);
            for ((tokens, logit), (want, want_logit)) in said(&got).into_iter().zip(said(&expected)) {
                assert_eq!(tokens, want, "{kind}, {args:?}");
                assert!((logit - want_logit).abs() <= tolerance, "{kind}, {args:?}: {logit} for {want_logit}");
            }
            assert_eq!(got.lines().count(), 3);
        }
        assert_ne!(generate(kind, &["--model-seed", "1"]), expected, "another seed is another model");
    }

    #[test]
    fn block_sparse_layers_say_the_same_however_they_are_run() {
        check("minimax", "cpu+sparse", 0.0);
    }

    #[test]
    fn latent_layers_say_the_same_however_they_are_run() {
        // The two forms of latent attention round differently.
        check("mla", "cpu+mla", 1e-5);
    }

    #[test]
    fn random_models_refuse_what_they_cannot_do() {
        let [line] = &refused(&attn(&["generate", "--random-model", "gpt", "--prompt", "a"]), 2, 1)[..] else {
            panic!()
        };
        assert!(line.contains("there is no random model"), "{line}");
        refused(&attn(&["generate", "--random-model", "minimax", "--model", "x", "--prompt", "a"]), 2, 1);
        refused(&attn(&["generate", "--random-model", "minimax"]), 2, 1);
        refused(&attn(&["generate", "--prompt", "a"]), 2, 1);
        let page_size = ["generate", "--random-model", "minimax", "--prompt", "a", "--page-size", "48"];
        let [line] = &refused(&attn(&page_size), 2, 1)[..] else { panic!() };
        assert!(line.contains("pages of 48 tokens do not divide blocks of 64 tokens"), "{line}");
        let threads = ["generate", "--random-model", "mla", "--prompt", "a", "--threads", "0"];
        let [line] = &refused(&attn(&threads), 2, 1)[..] else { panic!() };
        assert!(line.contains("expected a number from 1 to 1024"), "{line}");
    }

    #[test]
    fn more_tokens_than_the_model_has_positions_are_refused_for_that_however_many() {
        for number in ["100000000", "18446744073709551615"] {
            let args = ["generate", "--random-model", "mla", "--prompt", "abc", "--max-new-tokens", number];
            let [line] = &refused(&attn(&args), 2, 1)[..] else { panic!() };
            let expected = format!("error: prompt 0: 3 prompt tokens and {number} new ones exceed the model's ");
            assert!(line.starts_with(&expected), "{line}");
        }
    }

    #[test]
    fn options_that_recorded_prompts_decide_are_refused_beside_them() {
        for option in [&["--max-new-tokens", "3"][..], &["--chat"], &["--system", "b"]] {
            let args = [&["generate", "--model", "a.gguf", "--cases", "b.json"], option].concat();
            let [line] = &refused(&attn(&args), 2, 1)[..] else { panic!() };
            assert!(line.contains("cannot be used with"), "{line}");
        }
    }

    #[test]
    fn a_pair_is_named_whole() {
        let args = ["generate", "--random-model", "mla", "--prompt", "a", "--attention-backend", "mla,mla-oracle"];
        let output = attn(&[&args[..], &["--max-new-tokens", "2"]].concat());
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(stderr.contains("on backend mla for prefill, mla-oracle for decode"), "{stderr}");
    }
}

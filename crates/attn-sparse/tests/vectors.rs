//! The published vectors on the oracle, on both CPU backends, and doctored ones on the checker.

#![allow(clippy::unwrap_used)]

use attn_sparse::vectors::{CaseOutcome, Subject, VectorFile};

const FILE: &str = include_str!("../../../tests/vectors/sparse_vectors.json");

fn outcomes(text: &str, subject: &Subject) -> Vec<(String, CaseOutcome)> {
    let reports = VectorFile::parse(text).unwrap().check(subject).unwrap();
    reports.into_iter().map(|report| (report.name, report.outcome)).collect()
}

fn check(subject: &Subject, num_refused: usize) {
    let outcomes = outcomes(FILE, subject);
    assert_eq!(outcomes.len(), 9 + 12 + 6 + 5);
    let mut refused = 0;
    for (name, outcome) in outcomes {
        match outcome {
            CaseOutcome::Passed => {}
            CaseOutcome::Refused(why) => {
                refused += 1;
                assert!(why.contains("one KV head"), "{name}: {why}");
            }
            CaseOutcome::Failed(failure) => panic!("{name}: {failure}: {:?}", std::error::Error::source(&failure)),
        }
    }
    assert_eq!(refused, num_refused);
}

#[test]
fn the_oracle_agrees_to_1e_12() {
    check(&Subject::Oracle, 0);
}

#[test]
fn the_fast_backend_agrees_and_selects_the_same() {
    check(&Subject::Backend(attn_sparse::entry()), 0);
}

#[test]
fn the_oracle_agrees_through_the_waist() {
    check(&Subject::Backend(attn_sparse::oracle_entry()), 0);
}

#[test]
fn the_page_table_path_agrees_where_there_is_one_kv_head() {
    check(&Subject::Backend(attn_sparse::page_table_entry()), 8);
}

/// A change of the file that must be noticed: the text to replace, and what the failure names.
fn notices(from: &str, to: &str, what: &str) {
    assert!(FILE.contains(from), "{from}");
    for subject in [Subject::Oracle, Subject::Backend(attn_sparse::entry())] {
        let failed: Vec<String> = outcomes(&FILE.replacen(from, to, 1), &subject)
            .into_iter()
            .filter_map(|(_, outcome)| match outcome {
                CaseOutcome::Failed(failure) => Some(failure.to_string()),
                _ => None,
            })
            .collect();
        assert!(failed.iter().any(|text| text.starts_with(what)), "{from}: {failed:?}");
    }
}

#[test]
fn a_file_that_says_otherwise_fails() {
    notices("-0.8274013194451754", "-0.83", "o[0][0][0]");
    notices("1.1231534957030465", "1.124", "block_scores[0][0][0]");
    notices("-0.8795821361531493", "-0.87", "idx_o[0][0][0]");
    notices("\"real_seq_lens\":[7", "\"real_seq_lens\":[8", "real_seq_lens[0]");
    notices("\"max\"", "\"lse\"", "block_scores");
}

#[test]
fn broken_files_are_refused() {
    let refusal = |from: &str, to: &str| {
        assert!(FILE.contains(from), "{from}");
        VectorFile::parse(&FILE.replacen(from, to, 1)).unwrap_err().to_string()
    };
    assert!(refusal("attn-sparse/minimax/1", "other").starts_with("schema \"other\""));
    assert_eq!(refusal("\"num_q_heads\":4", "\"num_q_heads\":5"), "case prefill_max_local1: q is 4, 5 is needed");
    assert_eq!(refusal("\"num_slots\":40", "\"num_slots\":39"), "case prefill_max_local1: k_cache is 40, 39 is needed");
    let falls = refusal("\"cu_seqlens_q\":[0,", "\"cu_seqlens_q\":[0,4000,");
    assert!(falls.starts_with("case prefill_max_local1: cu_seqlens_q is"), "{falls}");
    assert!(VectorFile::parse("{}").is_err());
}

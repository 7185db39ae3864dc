//! The backend against attention in f64, feature by feature, on every instruction set of this machine.

mod matmul;
mod primitives;
mod problem;
mod relations;
mod rows;
mod shared;

use attn_metadata::HeadShape;
use kvpool::{KvFormat, KvLayout, KvScales};

use super::Isa;
use problem::{Case, Problem, case};

fn check(case: &Case) {
    let problem = Problem::new(case);
    for isa in Isa::available() {
        let got = problem.run(isa, 2);
        problem.check(isa, &got);
        assert!(bits(&got) == bits(&problem.run(isa, 1)), "{isa:?}: two threads and one differ for {case:?}");
    }
}

pub(super) fn bits((out, lse): &(Vec<f32>, Vec<f32>)) -> (Vec<u32>, Vec<u32>) {
    (out.iter().map(|x| x.to_bits()).collect(), lse.iter().map(|x| x.to_bits()).collect())
}

fn fp8() -> KvFormat {
    KvFormat::Fp8E4m3(KvScales::new(0.5, 2.0).unwrap())
}

#[test]
fn lengths_around_tiles_and_chunks() {
    for kv in [1, 15, 127, 128, 129, 255, 257, 1023, 1025, 2100] {
        check(&case(&[(1, kv), (3, kv), (kv.min(40), kv)]));
    }
    check(&Case { padding_rows: 3, ..case(&[(0, 0), (2, 0), (5, 3), (1, 1), (0, 9), (150, 300)]) });
    check(&case(&[]));
    check(&case(&[(400, 400), (130, 1200)]));
}

#[test]
fn all_masks_and_score_rules() {
    let requests = [(1, 300), (70, 200), (7, 1100), (9, 4), (2, 0)];
    for causal in [true, false] {
        for window in [None, Some(0), Some(5), Some(128), Some(500)] {
            check(&Case { causal, window, ..case(&requests) });
            check(&Case { causal, window, custom: true, sinks: true, ..case(&requests) });
        }
        check(&Case { causal, alibi: true, softcap: Some(3.0), ..case(&requests) });
        check(&Case {
            causal,
            alibi: true,
            softcap: Some(0.5),
            sinks: true,
            custom: true,
            window: Some(60),
            ..case(&requests)
        });
    }
}

#[test]
fn head_widths_groups_and_pages() {
    for (qk, vo) in [(1, 3), (8, 8), (24, 40), (80, 80), (128, 128), (192, 128), (576, 512), (640, 8)] {
        let heads = HeadShape { num_qo_heads: 6, num_kv_heads: 2, head_dim_qk: qk, head_dim_vo: vo };
        check(&Case { heads, ..case(&[(1, 140), (20, 33)]) });
    }
    for group in [1, 2, 3, 5, 6, 7, 8, 9, 13, 16, 17, 600] {
        let heads = HeadShape { num_qo_heads: group * 2, num_kv_heads: 2, head_dim_qk: 16, head_dim_vo: 24 };
        check(&Case { heads, ..case(&[(1, 70), (2, 1100), (11, 20)]) });
    }
    for page_size in [1, 2, 3, 61, 64, 257] {
        check(&Case { page_size, layout: KvLayout::Hnd, ..case(&[(1, 200), (66, 130)]) });
    }
}

#[test]
fn all_formats_and_layouts() {
    for format in [KvFormat::F32, KvFormat::F16, KvFormat::Bf16, fp8()] {
        for layout in [KvLayout::Nhd, KvLayout::Hnd] {
            for interleaved in [false, true] {
                let heads = HeadShape { num_qo_heads: 4, num_kv_heads: 2, head_dim_qk: 40, head_dim_vo: 24 };
                check(&Case { format, layout, interleaved, heads, page_size: 5, ..case(&[(1, 77), (33, 60)]) });
            }
        }
    }
}

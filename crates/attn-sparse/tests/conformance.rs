//! The backends pass the exact relations of the conformance suite, side branches included.

#![allow(clippy::print_stdout)]

use attn_conformance::{Case, CaseFamily, Suite, host};
use attn_metadata::FamilyRef;
use attn_sparse::{BlockParams, ScoreType, SparseFamily, SparseParams};

const BLOCK: u32 = 64;

/// Every score type, with and without forced blocks, index values and unions, by the bits of the seed.
fn params(case: &Case) -> SparseParams {
    let bit = |n: u32| case.seed >> n & 1 == 1;
    let init_blocks = u32::from(bit(0));
    let blocks = BlockParams { block_size: BLOCK, topk: 2 + init_blocks, init_blocks, local_blocks: 1 };
    let group = if bit(1) { 2 } else { 1 };
    SparseParams {
        score: if bit(2) { ScoreType::Lse } else { ScoreType::Max },
        has_index_value: bit(3),
        ..SparseParams::new(blocks, case.heads.num_kv_heads * group, 24)
    }
}

fn make(case: &Case) -> FamilyRef {
    FamilyRef::new(SparseFamily::new(params(case), &case.heads).expect("params within the rules"))
}

fn adapt(case: &mut Case) {
    case.page_size = match case.page_size {
        size if BLOCK.is_multiple_of(size) => size,
        3 => 4,
        61 => 32,
        _ => BLOCK,
    };
    (case.causal, case.window, case.softcap) = (true, None, None);
    (case.alibi, case.custom) = (false, false);
    case.sinks = attn_conformance::case::Sinks::None;
}

fn adapt_to_one_kv_head(case: &mut Case) {
    adapt(case);
    case.heads.num_qo_heads /= case.heads.num_kv_heads;
    case.heads.num_kv_heads = 1;
}

fn check(family: CaseFamily, entry: &attn_metadata::BackendEntry<attn_metadata::Host>, floor: usize) {
    let report = host::run(&Suite::family(family).with_floor(floor), entry.create);
    println!("{report}");
    report.assert_passed();
}

const FAMILY: CaseFamily = CaseFamily { name: "sparse", adapt, make };

#[test]
fn the_fast_backend_passes() {
    check(FAMILY, &attn_sparse::entry(), 130);
}

#[test]
fn the_oracle_passes() {
    check(FAMILY, &attn_sparse::oracle_entry(), 130);
}

#[test]
fn the_page_table_path_passes() {
    let family = CaseFamily { adapt: adapt_to_one_kv_head, ..FAMILY };
    check(family, &attn_sparse::page_table_entry(), 130);
}

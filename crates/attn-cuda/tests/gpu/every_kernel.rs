//! Every kernel that a layer may be given, once, on a small step that decodes, extends, splits, merges and appends:
//! what is run under a sanitizer, where the whole suite would take hours.

use attn_conformance::case::{RequestShape, Sinks};
use attn_conformance::harness::Stop;
use attn_conformance::{Case, host};
use attn_metadata::HeadShape;
use kvpool::{Dtype, KvDtype};

use crate::support;

/// Dtypes of q and of stored KV.
const DTYPES: [(Dtype, KvDtype); 5] = [
    (Dtype::Bf16, KvDtype::Bf16),
    (Dtype::Bf16, KvDtype::Fp8E4m3),
    (Dtype::F16, KvDtype::F16),
    (Dtype::F16, KvDtype::Fp8E4m3),
    (Dtype::F32, KvDtype::F32),
];
/// Widths of queries and keys, and of values; the last pair has the kernel for any shape alone.
const WIDTHS: [(u32, u32); 7] = [(64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128), (112, 48)];

/// One step through the kernels of a layer.
fn case(dtypes: (Dtype, KvDtype), widths: (u32, u32)) -> Case {
    let request = |q_len, kv_len| RequestShape { q_len, kv_len };
    Case {
        // Decoded in one chunk and in several, a few tokens, extended in one tile and in several.
        requests: vec![request(1, 5), request(1, 1100), request(3, 20), request(40, 45), request(70, 130)],
        padding_rows: 3,
        heads: HeadShape { num_qo_heads: 4, num_kv_heads: 2, head_dim_qk: widths.0, head_dim_vo: widths.1 },
        q_dtype: dtypes.0,
        kv_dtype: dtypes.1,
        ..Case::default()
    }
}

/// The variants that have kernels of their own, or parameters that only some launches read.
fn variants(base: &Case) -> Vec<Case> {
    let general = Case { softcap: Some(30.0), alibi: true, ..base.clone() };
    let masked = Case { custom: true, causal: false, ..base.clone() };
    let windowed = Case { window: Some(33), sinks: Sinks::Mixed, page_size: 3, ..base.clone() };
    vec![base.clone(), general, masked, windowed]
}

/// Decoding alone, so that merging begins before it ends, and one request of so many chunks that a block merges a segment of
/// dims, in place of a warp a head.
fn of_many_chunks(widths: (u32, u32)) -> Case {
    let base = case(DTYPES[0], widths);
    let heads = HeadShape { num_qo_heads: 2, num_kv_heads: 1, ..base.heads };
    let request = |q_len, kv_len| RequestShape { q_len, kv_len };
    Case { requests: vec![request(1, 33_900), request(3, 9300), request(1, 70)], heads, sinks: Sinks::Mixed, ..base }
}

/// Small pages of requests with many tiles.
fn of_small_pages(dtypes: (Dtype, KvDtype), widths: (u32, u32)) -> Case {
    let base = case(dtypes, widths);
    let heads = HeadShape { num_qo_heads: 8, num_kv_heads: 1, ..base.heads };
    let request = |q_len, kv_len| RequestShape { q_len, kv_len };
    Case { requests: vec![request(80, 230), request(3, 9), request(100, 100)], heads, page_size: 1, ..base }
}

fn cases() -> Vec<Case> {
    let bases = DTYPES.iter().flat_map(|&dtypes| WIDTHS.iter().map(move |&widths| case(dtypes, widths)));
    let long = WIDTHS.iter().map(|&widths| of_many_chunks(widths));
    let small = WIDTHS.iter().flat_map(|&widths| [DTYPES[0], DTYPES[2]].map(|dtypes| of_small_pages(dtypes, widths)));
    bases.flat_map(|base| variants(&base)).chain(long).chain(small).collect()
}

#[test]
fn every_kernel_agrees_with_the_oracle() {
    if !support::has_gpu() {
        return;
    }
    let mut failures = Vec::new();
    for case in cases() {
        let line = case.to_string();
        for entry in [attn_cuda::host_entry(), attn_cuda::host_portable_entry()] {
            if let Err(Stop::Refused(why) | Stop::Skipped(why) | Stop::Failed(why)) =
                host::run_case("oracle", &line, &entry.create)
            {
                failures.push(format!("{}, {line}: {why}", entry.name));
            }
        }
    }
    assert!(failures.is_empty(), "{} of {} cases:\n{}", failures.len(), cases().len(), failures.join("\n"));
}

#[test]
fn every_case_is_valid_and_its_line_reads_back() {
    for case in cases() {
        case.validate().unwrap();
        assert_eq!(case.to_string().parse::<Case>().unwrap(), case);
    }
}

//! Long KV and many requests: where a grid, a split count or a 16-bit index ends.

use attn_metadata::HeadShape;

use super::accuracy::against_oracle;
use super::{Check, check};
use crate::case::{Case, RequestShape};
use crate::rng::Rng;

pub(super) const LONG: Check =
    check("long KV", "KV around 4096 and 8192 tokens, decode and extend, is right", with_long_kv, against_oracle);

pub(super) const MANY: Check = check(
    "many requests",
    "65535 and more requests in a batch, most of them empty, are right at both ends",
    with_many,
    against_oracle,
);

pub(super) const MANY_PAGES: Check = check(
    "many pages",
    "a request of 4097 or 65537 pages of one token is right: an index of pages has no end of its own",
    with_many_pages,
    against_oracle,
);

pub(super) const WIDE_GROUPS: Check = check(
    "wide groups",
    "513 or 600 query heads over one KV head are right, over short KV and over KV that is split",
    with_wide_group,
    against_oracle,
);

/// One head of each kind: the length is what counts.
pub(super) const fn few_heads(case: &mut Case, most: u32) {
    let group = case.heads.num_qo_heads / case.heads.num_kv_heads;
    let group = if group > most { 1 } else { group };
    case.heads = HeadShape { num_qo_heads: group, num_kv_heads: 1, ..case.heads };
}

fn with_long_kv(case: &mut Case, rng: &mut Rng) {
    let extends = case.requests.iter().any(|r| r.q_len > 1);
    few_heads(case, 3);
    let kv_len = rng.pick(&[4095, 4096, 4097, 8191, 8193]);
    case.requests = vec![
        RequestShape { q_len: 1, kv_len: 5 },
        RequestShape { q_len: if extends { rng.pick(&[1, 2, 7]) } else { 1 }, kv_len },
        RequestShape { q_len: 1, kv_len: 130 },
    ];
    if case.window.is_some() && rng.below(2) == 0 {
        case.window = None;
    }
}

fn with_wide_group(case: &mut Case, rng: &mut Rng) {
    let (num_qo_heads, dim) = (rng.pick(&[513, 600]), rng.pick(&[16, 64]));
    case.heads = HeadShape { num_qo_heads, num_kv_heads: 1, head_dim_qk: dim, head_dim_vo: dim };
    case.window = None;
    case.requests = vec![RequestShape { q_len: 1, kv_len: 9 }, RequestShape { q_len: 1, kv_len: 1100 }];
}

const fn narrow_heads(case: &mut Case) {
    if case.heads.head_dim_vo > 128 {
        (case.heads.head_dim_qk, case.heads.head_dim_vo) = (64, 64);
    }
}

fn with_many_pages(case: &mut Case, rng: &mut Rng) {
    few_heads(case, 1);
    narrow_heads(case);
    (case.page_size, case.window, case.custom) = (1, None, false);
    let kv_len = rng.pick(&[4097, 65_537]);
    case.requests = vec![RequestShape { q_len: 1, kv_len: 5 }, RequestShape { q_len: 1, kv_len }];
}

fn with_many(case: &mut Case, rng: &mut Rng) {
    few_heads(case, 1);
    narrow_heads(case); // a gigabyte of zeros would show nothing more
    (case.append, case.custom, case.shared) = (false, false, false);
    let full = RequestShape { q_len: 1, kv_len: 3 };
    let count = rng.pick(&[65_535, 65_536, 65_537]);
    case.requests = vec![RequestShape { q_len: 1, kv_len: 0 }; count];
    case.requests[..16].fill(full);
    case.requests[count - 16..].fill(full);
}

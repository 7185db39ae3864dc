//! Head counts and widths over the whole range: a backend refuses with reasons or is right, there is no third outcome.

use attn_metadata::HeadShape;

use super::accuracy::against_oracle;
use super::{Check, check};
use crate::case::{Case, RequestShape};
use crate::rng::Rng;

pub(super) const HEADS: Check = check(
    "heads and widths",
    "any group size and any widths: refused with reasons, or right",
    any_heads,
    against_oracle,
);

const GROUPS: &[u32] = &[1, 2, 3, 4, 5, 6, 7, 8, 9, 16];
const WIDTHS: &[u32] = &[1, 2, 7, 8, 17, 32, 48, 64, 72, 80, 96, 112, 128, 160, 192, 256, 320, 512, 576, 640];
const PAGES: &[u32] = &[1, 2, 3, 5, 16, 61, 64, 100, 256, 257];

fn any_heads(case: &mut Case, rng: &mut Rng) {
    let qk = rng.pick(WIDTHS);
    let vo = if rng.below(3) == 0 { rng.pick(WIDTHS) } else { qk };
    let num_kv_heads = rng.pick(&[1, 2, 3]);
    case.heads =
        HeadShape { num_qo_heads: num_kv_heads * rng.pick(GROUPS), num_kv_heads, head_dim_qk: qk, head_dim_vo: vo };
    case.values_in_keys &= vo <= qk;
    if rng.below(2) == 0 {
        case.page_size = rng.pick(PAGES);
    }
    let extends = case.requests.iter().any(|r| r.q_len > 1);
    let q_len = if extends { 3 } else { 1 };
    case.requests = vec![RequestShape { q_len: 1, kv_len: 66 }, RequestShape { q_len, kv_len: 3 }];
}

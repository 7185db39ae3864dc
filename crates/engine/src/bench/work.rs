//! How much work a call is: visible pairs, FLOPs, bytes.

use attn_metadata::{Layer, Request};

use crate::replay::Problem;

/// The work of one call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Visible (query, key) pairs, of one query head.
    pub pairs: u64,
    /// 2 · pairs · query heads · (head_dim_qk + head_dim_vo).
    pub flops: u64,
    /// Bytes of q, out and the visible KV, each counted once.
    pub bytes: u64,
}

impl Work {
    /// The work of a problem; a custom mask is not counted out.
    #[must_use]
    pub fn of(problem: &Problem) -> Self {
        let heads = problem.layer.heads();
        let (mut pairs, mut kv_tokens, mut q_tokens) = (0, 0, 0);
        for request in problem.batch.requests() {
            let (request_pairs, request_kv) = visible(&problem.layer, request);
            pairs += request_pairs;
            kv_tokens += request_kv;
            q_tokens += u64::from(request.q_len);
        }
        let widths = u64::from(heads.head_dim_qk + heads.head_dim_vo);
        let q_bytes = problem.q.dtype().size_bytes() as u64;
        let token_bytes = problem.cache.format().dtype().token_bytes(heads.head_dim_qk, heads.head_dim_vo);
        Self {
            pairs,
            flops: 2 * pairs * u64::from(heads.num_qo_heads) * widths,
            bytes: widths * q_tokens * u64::from(heads.num_qo_heads) * q_bytes
                + kv_tokens * u64::from(heads.num_kv_heads) * token_bytes,
        }
    }
}

/// Visible pairs of a request, and the KV tokens that any of its queries sees.
fn visible(layer: &Layer, request: &Request) -> (u64, u64) {
    let kv_len = i64::from(request.kv_len);
    let (mut pairs, mut first, mut last) = (0, kv_len, 0);
    for row in 0..request.q_len {
        let position = request.position(row);
        let end = if layer.is_causal() { (position + 1).clamp(0, kv_len) } else { kv_len };
        let begin = layer.window_left().map_or(0, |w| (position - i64::from(w)).clamp(0, end));
        pairs += (end - begin).unsigned_abs();
        if begin < end {
            (first, last) = (first.min(begin), last.max(end));
        }
    }
    (pairs, (last - first).max(0).unsigned_abs())
}

#[cfg(test)]
mod tests {
    use attn_metadata::{HeadShape, LayerParams};

    use super::*;

    #[test]
    fn pairs_and_tokens_are_counted_as_by_hand() {
        let request = Request { q_start: 0, q_len: 3, kv_len: 5, pages_start: 0, num_pages: 5, mask_start: 0 };
        let layer = |window_left, causal| {
            let base = LayerParams::causal(HeadShape::new(1, 1, 8));
            Layer::new(LayerParams { window_left, causal, ..base }).unwrap()
        };
        assert_eq!(visible(&layer(None, true), &request), (3 + 4 + 5, 5));
        assert_eq!(visible(&layer(Some(1), true), &request), (2 + 2 + 2, 4));
        assert_eq!(visible(&layer(None, false), &request), (15, 5));
    }
}

//! How much work a call is: visible pairs, FLOPs, bytes.

use attn_metadata::{Batch, Layer, Request};
use kvpool::{Dtype, KvDtype, Values};

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
        Self::of_call(&problem.layer, &problem.batch, problem.q.dtype(), problem.cache.format().dtype())
    }

    /// The work of a layer's call on a batch.
    #[must_use]
    pub fn of_call(layer: &Layer, batch: &Batch, q_dtype: Dtype, kv_dtype: KvDtype) -> Self {
        let heads = layer.heads();
        let (mut pairs, mut kv_tokens, mut q_tokens) = (0, 0, 0);
        for request in batch.requests() {
            let (request_pairs, request_kv) = visible(layer, request);
            pairs += request_pairs;
            kv_tokens += request_kv;
            q_tokens += u64::from(request.q_len);
        }
        let widths = u64::from(heads.head_dim_qk + heads.head_dim_vo);
        let q_bytes = q_dtype.size_bytes() as u64;
        // Values that are columns of the keys are read with them.
        let spec = layer.kv();
        let own_values = if let Values::Own(width) = spec.values { width } else { 0 };
        let token_bytes = kv_dtype.token_bytes(spec.head_dim_k, own_values);
        Self {
            pairs,
            flops: 2 * pairs * u64::from(heads.num_qo_heads) * widths,
            bytes: widths * q_tokens * u64::from(heads.num_qo_heads) * q_bytes
                + kv_tokens * u64::from(spec.num_kv_heads) * token_bytes,
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

//! Owns who sees what: the causal and window geometry as one range of keys for each query, and packed custom masks.
//! Invariant: masked scores are overwritten with -inf, never combined with anything, so a masked key's content (NaN
//! included) cannot reach a result.

use std::ops::Range;

use super::qk::ScoreRow;

/// The keys that the queries of a request may see.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Visibility<'a> {
    pub(crate) q_len: usize,
    pub(crate) kv_len: usize,
    pub(crate) causal: bool,
    pub(crate) window_left: Option<u32>,
    /// Bits of the custom mask and the bit of (query 0, key 0).
    pub(crate) custom: Option<(&'a [u8], u64)>,
}

impl Visibility<'_> {
    /// Position of a query; negative where it comes before the first key.
    pub(crate) fn position(&self, query: usize) -> i64 {
        to_i64(self.kv_len) - to_i64(self.q_len) + to_i64(query)
    }

    /// The range of keys that causality and window leave; may be empty. Both ends ascend with the query.
    pub(crate) fn keys(&self, query: usize) -> Range<usize> {
        let (position, kv_len) = (self.position(query), to_i64(self.kv_len));
        let end = if self.causal { (position + 1).clamp(0, kv_len) } else { kv_len };
        let start = self.window_left.map_or(0, |window| (position - i64::from(window)).clamp(0, end));
        to_usize(start)..to_usize(end)
    }

    /// The keys that any of the queries may see.
    pub(crate) fn union(&self, queries: Range<usize>) -> Range<usize> {
        if queries.is_empty() {
            return 0..0;
        }
        self.keys(queries.start).start..self.keys(queries.end - 1).end
    }

    /// The columns of the tile that begins at key `start`, of `len` columns, that a query may see.
    pub(crate) fn columns(&self, query: usize, start: usize, len: usize) -> Range<usize> {
        let keys = self.keys(query);
        let clip = |key: usize| key.clamp(start, start + len) - start;
        clip(keys.start)..clip(keys.end)
    }

    /// Whether the custom mask, if any, lets `query` see `key`.
    #[inline]
    pub(crate) fn is_unmasked(&self, query: usize, key: usize) -> bool {
        self.custom.is_none_or(|(bits, start)| {
            let bit = start + query as u64 * self.kv_len as u64 + key as u64;
            let byte = usize::try_from(bit / 8).expect("the mask is in memory");
            bits[byte] >> (bit % 8) & 1 == 1
        })
    }

    /// Overwrites the scores that `query` may not see in the tile that begins at key `start` with -inf.
    pub(crate) fn mask_row(&self, query: usize, start: usize, scores: &mut ScoreRow) {
        let columns = self.columns(query, start, scores.len());
        scores[..columns.start].fill(f32::NEG_INFINITY);
        scores[columns.end..].fill(f32::NEG_INFINITY);
        if self.custom.is_some() {
            for column in columns {
                if !self.is_unmasked(query, start + column) {
                    scores[column] = f32::NEG_INFINITY;
                }
            }
        }
    }

    /// The first run of columns in a range that the custom mask leaves visible.
    pub(crate) fn next_run(&self, query: usize, start: usize, range: Range<usize>) -> Option<Range<usize>> {
        let end = range.end;
        let sees = |column: usize| self.is_unmasked(query, start + column);
        let first = range.into_iter().find(|&column| sees(column))?;
        let last = (first..end).find(|&column| !sees(column)).unwrap_or(end);
        Some(first..last)
    }
}

fn to_i64(x: usize) -> i64 {
    i64::try_from(x).expect("token counts are far below 2^63")
}

fn to_usize(x: i64) -> usize {
    usize::try_from(x).expect("clamped to 0 and above")
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAUSAL: Visibility<'_> = Visibility { q_len: 3, kv_len: 8, causal: true, window_left: None, custom: None };

    #[test]
    fn causal_is_aligned_to_the_bottom_right() {
        assert_eq!((0..3).map(|q| CAUSAL.keys(q)).collect::<Vec<_>>(), [0..6, 0..7, 0..8]);
        let more_queries = Visibility { q_len: 5, kv_len: 3, ..CAUSAL };
        assert_eq!((0..5).map(|q| more_queries.keys(q).len()).collect::<Vec<_>>(), [0, 0, 1, 2, 3]);
        assert!(Visibility { kv_len: 0, ..CAUSAL }.keys(2).is_empty());
    }

    #[test]
    fn a_window_holds_the_query_and_the_tokens_before_it() {
        let window = |w| Visibility { window_left: Some(w), ..CAUSAL };
        assert_eq!(window(0).keys(1), 6..7);
        assert_eq!(window(2).keys(0), 3..6);
        assert_eq!(window(u32::MAX).keys(2), 0..8);
        assert_eq!(Visibility { causal: false, ..window(1) }.keys(0), 4..8);
        let early = Visibility { q_len: 9, kv_len: 2, window_left: Some(1), causal: false, custom: None };
        assert_eq!(early.keys(0), 0..2);
    }

    #[test]
    fn custom_bits_mask_and_run() {
        // Two queries of 10 keys from bit 3 on; query 1 sees keys 1, 2, 3 and 9.
        let mut bits = [0u8; 4];
        for key in [1, 2, 3, 9] {
            let bit = 3 + 10 + key;
            bits[bit / 8] |= 1 << (bit % 8);
        }
        let v = Visibility { q_len: 2, kv_len: 10, causal: false, window_left: None, custom: Some((&bits, 3)) };
        let mut scores = [1.0; super::super::pack::KV_TILE];
        v.mask_row(1, 0, &mut scores);
        let seen: Vec<usize> = (0..scores.len()).filter(|&c| scores[c] == 1.0).collect();
        assert_eq!(seen, [1, 2, 3, 9]);
        assert_eq!(v.next_run(1, 0, 0..10), Some(1..4));
        assert_eq!(v.next_run(1, 0, 4..10), Some(9..10));
        assert_eq!(v.next_run(1, 0, 4..9), None);
    }
}

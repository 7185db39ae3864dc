//! Owns the choice between absorbed and expanded attention: work counted from lengths and widths alone.
//! Invariant: the choice depends on the request and the layer, never on other requests or the machine, so a request's
//! bits do not either.

use std::fmt;

use crate::MlaWidths;

/// How a request's attention is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Form {
    /// Queries are projected to the width of the rows; rows are read as they are.
    Absorbed,
    /// Rows are expanded to keys and values of each head, chunk by chunk.
    Expanded,
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Form::Absorbed => "absorbed",
            Form::Expanded => "expanded",
        })
    }
}

/// Work of a request in one form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cost {
    /// Floating-point operations.
    pub flops: u64,
    /// Bytes that go through memory for the keys and values.
    pub bytes: u64,
}

/// Operations that take as long as moving a byte: a core's multiply-adds against its share of memory.
const FLOPS_PER_BYTE: u64 = 16;

impl Cost {
    /// One number to compare by: operations, and bytes as operations.
    #[must_use]
    pub const fn total(self) -> u64 {
        self.flops.saturating_add(self.bytes.saturating_mul(FLOPS_PER_BYTE))
    }
}

/// The work of latent attention for some heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CostModel {
    /// Widths.
    pub widths: MlaWidths,
    /// Heads.
    pub num_heads: u32,
    /// Bytes of a stored row.
    pub row_bytes: u64,
}

impl CostModel {
    /// Work of `q_len` queries over `kv_len` rows in a form. Causal queries see less; both forms less alike.
    #[must_use]
    pub fn cost(&self, form: Form, q_len: u32, kv_len: u32, causal: bool) -> Cost {
        let MlaWork { row, latent, query, value, up, rope } = MlaWork::of(self.widths);
        let (q, kv, heads) = (u64::from(q_len), u64::from(kv_len), u64::from(self.num_heads));
        let pairs = visible_pairs(q, kv, causal);
        // A head's product with its part of kv_b_proj, for each row of the queries or of the cache.
        let project = 2 * latent * up;
        let (per_pair, projected, bytes_per_row) = match form {
            Form::Absorbed => (2 * (row + latent), q, self.row_bytes),
            // Expanded keys and values are written, read by the attention, packed by it and read once more.
            Form::Expanded => (2 * (query + value), kv, self.row_bytes + 4 * 4 * heads * (up + rope)),
        };
        let flops =
            heads.saturating_mul(pairs.saturating_mul(per_pair).saturating_add(projected.saturating_mul(project)));
        Cost { flops, bytes: kv.saturating_mul(bytes_per_row) }
    }

    /// The cheaper form; absorbed where they are equal.
    #[must_use]
    pub fn choose(&self, q_len: u32, kv_len: u32, causal: bool) -> Form {
        let total = |form| self.cost(form, q_len, kv_len, causal).total();
        if total(Form::Expanded) < total(Form::Absorbed) { Form::Expanded } else { Form::Absorbed }
    }
}

struct MlaWork {
    row: u64,
    latent: u64,
    query: u64,
    value: u64,
    up: u64,
    rope: u64,
}

impl MlaWork {
    fn of(widths: MlaWidths) -> MlaWork {
        MlaWork {
            row: widths.row().into(),
            latent: widths.latent().into(),
            query: widths.query().into(),
            value: widths.value().into(),
            up: widths.up().into(),
            rope: widths.rope().into(),
        }
    }
}

/// (query, key) pairs that are visible: the last of `q` causal queries sees all of `kv` keys, the one before one less.
fn visible_pairs(q: u64, kv: u64, causal: bool) -> u64 {
    if !causal {
        return q.saturating_mul(kv);
    }
    let seeing = q.min(kv);
    // kv + (kv - 1) + … for the queries that see anything.
    seeing.saturating_mul(2 * kv - seeing + u64::from(seeing > 0)) / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: CostModel = CostModel { widths: MlaWidths::DEEPSEEK, num_heads: 128, row_bytes: 1152 };

    #[test]
    fn pairs_are_those_of_a_count() {
        for q in 0..7u64 {
            for kv in 0..7u64 {
                let mut count = 0;
                for row in 0..q {
                    count += (0..kv).filter(|key| *key + q <= kv + row).count() as u64;
                }
                assert_eq!(visible_pairs(q, kv, true), count, "{q} over {kv}");
                assert_eq!(visible_pairs(q, kv, false), q * kv);
            }
        }
    }

    #[test]
    fn decode_is_absorbed_and_long_prefill_is_expanded() {
        for kv in [1, 100, 4096, 1 << 20] {
            for q in [1, 2, 8] {
                assert_eq!(MODEL.choose(q.min(kv), kv, true), Form::Absorbed, "{q} over {kv}");
            }
        }
        assert_eq!(MODEL.choose(4096, 4096, true), Form::Expanded);
        assert_eq!(MODEL.choose(1024, 65536, true), Form::Expanded);
        assert_eq!(MODEL.choose(0, 65536, true), Form::Absorbed);
        assert_eq!(MODEL.choose(0, 0, true), Form::Absorbed);
    }

    #[test]
    fn costs_are_those_of_the_formulas() {
        let cost = MODEL.cost(Form::Absorbed, 1, 10, true);
        assert_eq!(cost, Cost { flops: 128 * (10 * 2 * (576 + 512) + 2 * 512 * 256), bytes: 10 * 1152 });
        let cost = MODEL.cost(Form::Expanded, 2, 10, false);
        assert_eq!(cost.flops, 128 * (20 * 2 * (192 + 128) + 10 * 2 * 512 * 256));
        assert_eq!(cost.bytes, 10 * (1152 + 16 * 128 * 320));
        let huge = MODEL.cost(Form::Expanded, u32::MAX, u32::MAX, false);
        assert_eq!(huge.total(), u64::MAX);
    }
}

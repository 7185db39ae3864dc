//! The oracle: block-sparse attention in float64, written from the formulas, slow and obvious.
//!
//! It shares no code with the fast path: its own scores, its own choice of blocks, its own softmax. One row at a time,
//! over keys and values that lie in the order of their positions. The backend `sparse-oracle` puts it behind the backend trait.
//!

use attn_metadata::HeadShape;

use crate::params::{ScoreType, SparseParams};

/// One request's KV, in the order of positions.
#[derive(Clone, Copy, Debug)]
pub struct Sequence<'a> {
    /// `[len, num_kv_heads, head_dim_qk]`.
    pub keys: &'a [f64],
    /// `[len, num_kv_heads, head_dim_vo]`.
    pub values: &'a [f64],
    /// `[len, index_dim]`.
    pub index_keys: &'a [f64],
    /// `[len, index_dim]`, where there are index values.
    pub index_values: Option<&'a [f64]>,
}

/// One query row.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    /// Keys that it sees: those at its own position and before.
    pub visible: usize,
    /// `[num_qo_heads, head_dim_qk]`.
    pub q: &'a [f64],
    /// `[num_index_heads, index_dim]`.
    pub index_q: &'a [f64],
}

/// What the layer multiplies scores by.
#[derive(Clone, Copy, Debug)]
pub struct Scales {
    /// Multiplier of q·k.
    pub main: f64,
    /// Multiplier of index query · index key.
    pub index: f64,
}

/// A layer as the oracle takes it.
#[derive(Clone, Copy, Debug)]
pub struct Oracle {
    /// Head counts and widths.
    pub heads: HeadShape,
    /// What makes it sparse; its own `index_scale` is not used.
    pub params: SparseParams,
    /// The scales.
    pub scales: Scales,
}

/// Everything about one row.
#[derive(Clone, Debug, PartialEq)]
pub struct RowResult {
    /// `[num_index_heads][visible blocks]`: natural units, before forcing.
    pub block_scores: Vec<Vec<f64>>,
    /// Ids of each index head, ascending.
    pub by_index_head: Vec<Vec<usize>>,
    /// Ids of each KV head, ascending: the union over its index heads.
    pub by_kv_head: Vec<Vec<usize>>,
    /// `[num_index_heads, index_dim]`, where there are index values.
    pub index_out: Option<Vec<f64>>,
    /// `[num_qo_heads, head_dim_vo]`.
    pub out: Vec<f64>,
    /// `[num_qo_heads]`, natural logarithm; −∞ where nothing is visible.
    pub lse: Vec<f64>,
}

impl Oracle {
    /// Computes a row.
    ///
    /// # Panics
    /// Where a slice is too short for the row and the layer.
    #[must_use]
    pub fn row(&self, sequence: &Sequence<'_>, row: &Row<'_>) -> RowResult {
        let block_scores = self.block_scores(sequence, row);
        let by_index_head: Vec<Vec<usize>> = block_scores.iter().map(|scores| self.select(scores)).collect();
        let by_kv_head = self.sets(&by_index_head);
        let (out, lse) = self.attend(sequence, row, &by_kv_head);
        let index_out = sequence.index_values.map(|values| self.index_out(sequence, values, row));
        RowResult { block_scores, by_index_head, by_kv_head, index_out, out, lse }
    }

    /// Scores of the visible blocks for each index head, before forcing: `max` or `ln Σ exp` over the visible keys of
    /// a block. A block with a NaN among its scores is NaN.
    #[must_use]
    pub fn block_scores(&self, sequence: &Sequence<'_>, row: &Row<'_>) -> Vec<Vec<f64>> {
        let mut all = Vec::new();
        for head in 0..self.params.num_index_heads as usize {
            let scores = self.index_scores(sequence, row, head);
            let blocks = scores.chunks(self.params.blocks.block_size as usize);
            all.push(blocks.map(|block| pool(self.params.score, block)).collect());
        }
        all
    }

    /// The ids that a row of these scores takes, ascending. Forced blocks are scores overwritten: 1e30 for initial
    /// ones, then 1e29 for local ones. NaN is lowest; of equal scores the lower id wins.
    #[must_use]
    pub fn select(&self, scores: &[f64]) -> Vec<usize> {
        let num_blocks = scores.len();
        let blocks = self.params.blocks;
        let mut forced: Vec<f64> = scores.iter().map(|&s| if s.is_nan() { f64::NEG_INFINITY } else { s }).collect();
        for (j, score) in forced.iter_mut().enumerate() {
            if j < blocks.init_blocks as usize {
                *score = 1e30;
            }
            if j + blocks.local_blocks as usize >= num_blocks {
                *score = 1e29;
            }
        }
        let mut order: Vec<usize> = (0..num_blocks).collect();
        order.sort_by(|&a, &b| forced[b].total_cmp(&forced[a]).then(a.cmp(&b)));
        order.truncate(blocks.topk as usize);
        order.sort_unstable();
        order
    }

    /// The sets of the KV heads: each the union over its consecutive index heads, ascending.
    #[must_use]
    pub fn sets(&self, by_index_head: &[Vec<usize>]) -> Vec<Vec<usize>> {
        let group = (self.params.num_index_heads / self.heads.num_kv_heads) as usize;
        let mut sets = Vec::new();
        for kv_head in 0..self.heads.num_kv_heads as usize {
            let mut set: Vec<usize> = by_index_head[kv_head * group..(kv_head + 1) * group].concat();
            set.sort_unstable();
            set.dedup();
            sets.push(set);
        }
        sets
    }

    /// Attends to the visible tokens of the given blocks, `sets[kv_head]`: `out` and `lse`.
    #[must_use]
    pub fn attend(&self, sequence: &Sequence<'_>, row: &Row<'_>, sets: &[Vec<usize>]) -> (Vec<f64>, Vec<f64>) {
        let tokens: Vec<Vec<usize>> = sets.iter().map(|set| self.tokens_of(set, row.visible)).collect();
        self.attend_tokens(sequence, row, &tokens)
    }

    /// Attends to the given positions, `tokens[kv_head]`, all of which the row sees: `out` and `lse`.
    #[must_use]
    pub fn attend_tokens(&self, sequence: &Sequence<'_>, row: &Row<'_>, tokens: &[Vec<usize>]) -> (Vec<f64>, Vec<f64>) {
        let HeadShape { num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo } = self.heads;
        let (kv_heads, qk, vo) = (num_kv_heads as usize, head_dim_qk as usize, head_dim_vo as usize);
        let (mut out, mut lse) = (Vec::new(), Vec::new());
        for head in 0..num_qo_heads as usize {
            let kv_head = head / (num_qo_heads / num_kv_heads) as usize;
            let q = &row.q[head * qk..(head + 1) * qk];
            let key = |token: usize| &sequence.keys[(token * kv_heads + kv_head) * qk..][..qk];
            let value = |token: usize| &sequence.values[(token * kv_heads + kv_head) * vo..][..vo];
            let (head_out, head_lse) = softmax(&tokens[kv_head], vo, |t| dot(q, key(t)) * self.scales.main, value);
            out.extend(head_out);
            lse.push(head_lse);
        }
        (out, lse)
    }

    /// The index branch's own output: causal attention over every visible token.
    #[must_use]
    pub fn index_out(&self, sequence: &Sequence<'_>, values: &[f64], row: &Row<'_>) -> Vec<f64> {
        let dim = self.params.index_dim as usize;
        let tokens: Vec<usize> = (0..row.visible).collect();
        let mut out = Vec::new();
        for head in 0..self.params.num_index_heads as usize {
            let scores = self.index_scores(sequence, row, head);
            out.extend(softmax(&tokens, dim, |t| scores[t], |t| &values[t * dim..(t + 1) * dim]).0);
        }
        out
    }

    fn index_scores(&self, sequence: &Sequence<'_>, row: &Row<'_>, head: usize) -> Vec<f64> {
        let dim = self.params.index_dim as usize;
        let q = &row.index_q[head * dim..(head + 1) * dim];
        let score = |token: usize| dot(q, &sequence.index_keys[token * dim..(token + 1) * dim]) * self.scales.index;
        (0..row.visible).map(score).collect()
    }

    fn tokens_of(&self, set: &[usize], visible: usize) -> Vec<usize> {
        let block_size = self.params.blocks.block_size as usize;
        set.iter().flat_map(|block| block * block_size..((block + 1) * block_size).min(visible)).collect()
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sum = 0.0;
    for (a, b) in a.iter().zip(b) {
        sum += a * b;
    }
    sum
}

fn pool(score: ScoreType, block: &[f64]) -> f64 {
    if block.iter().any(|s| s.is_nan()) {
        return f64::NAN;
    }
    let max = block.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    match score {
        ScoreType::Max => max,
        ScoreType::Lse if max == f64::NEG_INFINITY => max,
        ScoreType::Lse => max + block.iter().map(|s| (s - max).exp()).sum::<f64>().ln(),
    }
}

/// `softmax(scores) · values` over some tokens, and the LSE. Nothing to see: zeros and −∞. A NaN among the scores: NaN.
fn softmax<'v>(
    tokens: &[usize],
    dim: usize,
    score: impl Fn(usize) -> f64,
    value: impl Fn(usize) -> &'v [f64],
) -> (Vec<f64>, f64) {
    let scores: Vec<f64> = tokens.iter().map(|&token| score(token)).collect();
    if scores.iter().any(|s| s.is_nan()) {
        return (vec![f64::NAN; dim], f64::NAN);
    }
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if max == f64::NEG_INFINITY {
        return (vec![0.0; dim], f64::NEG_INFINITY);
    }
    let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
    let denominator = weights.iter().sum::<f64>();
    let mut out = vec![0.0; dim];
    for (&token, weight) in tokens.iter().zip(&weights) {
        let probability = weight / denominator;
        for (out, v) in out.iter_mut().zip(value(token)) {
            *out += probability * v;
        }
    }
    (out, max + denominator.ln())
}

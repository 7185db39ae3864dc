//! The selector: `Σ_h w[h] · relu(q[h] · k)` over all index heads is a token's score; the best tokens make one set for all
//! heads; nothing is forced. Written against the public boundary alone.

use attn_sparse::stage::{Index, Scores, Select, StageError, Step, rows_of};
use attn_sparse::{Fanout, Selection, Unit};
use kvpool::{HostKv, HostTensor, Slot};

/// Scores tokens by weighted rectified products.
pub(crate) struct TokenIndex {
    num_heads: usize,
    key: Vec<f32>,
    query: Vec<f32>,
}

impl TokenIndex {
    /// For index heads of a width.
    pub(crate) fn new(num_heads: usize, dim: usize) -> Self {
        Self { num_heads, key: vec![0.0; dim], query: vec![0.0; dim] }
    }
}

/// What it is given: queries `[rows, heads, dim]`, weights `[rows, heads, 1]`, the cache of index keys.
pub(crate) struct TokenInput<'a> {
    pub(crate) q: HostTensor<'a>,
    pub(crate) weights: HostTensor<'a>,
    pub(crate) cache: &'a HostKv,
}

impl Index for TokenIndex {
    type Input<'a> = TokenInput<'a>;

    fn num_heads(&self) -> usize {
        1 // the heads are summed here: one score a token
    }

    fn unit(&self) -> Unit {
        Unit::Token
    }

    fn score(&mut self, step: &mut Step<'_>, input: &mut TokenInput<'_>, out: &mut Scores) -> Result<(), StageError> {
        let page_size = step.batch.page_size();
        let Self { num_heads, key, query } = self;
        for (request, row, _) in rows_of(step.batch, out.rows()) {
            let scores = out.get_mut(row, 0);
            for (token, score) in (0u32..).zip(scores.iter_mut()) {
                let page = step.batch.page_of(request, token);
                let slot = Slot::new(page, token % page_size.get(), page_size).expect("a slot of the pool");
                input.cache.read_k(slot, 0, key);
                *score = 0.0;
                for head in 0..*num_heads {
                    input.q.read(row, head, query);
                    let product: f32 = query.iter().zip(&*key).map(|(q, k)| q * k).sum();
                    *score += input.weights.get(row, head, 0) * product.max(0.0);
                }
            }
        }
        Ok(())
    }
}

/// Takes the best tokens; of equal scores the lower position.
pub(crate) struct TokenSelect {
    /// Tokens of a row at most.
    pub(crate) topk: usize,
}

impl Select for TokenSelect {
    fn fanout(&self) -> Fanout {
        Fanout::Shared
    }

    fn width(&self) -> usize {
        self.topk
    }

    fn needs_scores(&self, num_units: usize) -> bool {
        num_units > self.topk
    }

    fn select(&mut self, scores: &Scores, out: &mut Selection) -> Result<(), StageError> {
        for row in scores.rows() {
            let mut ids: Vec<i32> = (0i32..).take(out.visible(row) as usize).collect();
            if self.needs_scores(ids.len()) {
                let score = |id: &i32| scores.get(row, 0)[id.unsigned_abs() as usize];
                ids.sort_by(|a, b| score(b).total_cmp(&score(a)));
                ids.truncate(self.topk);
                ids.sort_unstable();
            }
            out.set(row, 0, &ids)?;
        }
        Ok(())
    }
}

//! Owns the second stage for blocks: a [`BlockSelector`] a row and index head, the union over a group.

use attn_metadata::HeadShape;

use crate::params::SparseParams;
use crate::select::{BlockSelector, unite};
use crate::selection::{Fanout, Selection};
use crate::stage::{Scores, Select, StageError};

/// Selects blocks: forced ones inside the budget, the best of the rest, and for each KV head the union over its
/// consecutive index heads.
#[derive(Clone, Debug)]
pub struct BlockSelect {
    selector: BlockSelector,
    num_kv_heads: u32,
    group: usize,
    union: Vec<i32>,
}

impl BlockSelect {
    /// A selector for layers with these settings, which [`SparseParams::check`] has accepted.
    #[must_use]
    pub fn new(params: &SparseParams, heads: &HeadShape) -> Self {
        let group = params.index_group(heads) as usize;
        let union = Vec::with_capacity(params.width(heads) as usize);
        Self { selector: BlockSelector::new(params.blocks), num_kv_heads: heads.num_kv_heads, group, union }
    }

    /// Sets the ids of a row that sees `num_blocks` blocks; `scores` gives those of an index head.
    ///
    /// # Errors
    /// [`StageError::Selection`] where the row of the selection sees fewer blocks.
    fn select_row<'s>(
        &mut self,
        row: usize,
        num_blocks: usize,
        scores: impl Fn(usize) -> &'s [f32],
        out: &mut Selection,
    ) -> Result<(), StageError> {
        for kv_head in 0..self.num_kv_heads as usize {
            if let Some(all) = self.selector.select_all(num_blocks) {
                out.set(row, kv_head, all)?;
                continue;
            }
            self.union.clear();
            for head in kv_head * self.group..(kv_head + 1) * self.group {
                unite(&mut self.union, self.selector.select(scores(head)));
            }
            out.set(row, kv_head, &self.union)?;
        }
        Ok(())
    }
}

impl Select for BlockSelect {
    fn fanout(&self) -> Fanout {
        Fanout::per_kv_head(self.num_kv_heads)
    }

    fn width(&self) -> usize {
        self.selector.params().topk as usize * self.group
    }

    fn needs_scores(&self, num_units: usize) -> bool {
        num_units > self.selector.params().topk as usize
    }

    fn select(&mut self, scores: &Scores, out: &mut Selection) -> Result<(), StageError> {
        for row in scores.rows() {
            let num_blocks = out.unit().count(out.visible(row)) as usize;
            self.select_row(row, num_blocks, |head| scores.get(row, head), out)?;
        }
        Ok(())
    }
}

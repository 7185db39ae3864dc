//! Owns the way through the three stages: [`Pipeline`].
//!
//! Rows are scored and selected in groups, so that the memory for scores does not grow with the batch. What a third
//! stage accepts is asked once, where the pipeline is made. Rows of no request of the batch are left alone.

use std::ops::Range;

use kvpool::PageSize;

use crate::selection::Selection;
use crate::stage::{Attend, AttendInput, AttendOutput, Index, Offer, Refusal, Scores, Select, StageError, Step};

/// Scores held at once, unless a single row has more.
const MAX_SCORES: usize = 1 << 22;

/// Index, select, attend.
#[derive(Debug)]
pub struct Pipeline<I, S, A> {
    index: I,
    select: S,
    attend: A,
    scores: Scores,
}

impl<I: Index, S: Select, A: Attend> Pipeline<I, S, A> {
    /// Puts three stages together.
    ///
    /// # Errors
    /// Every [`Refusal`] of the third stage.
    pub fn new(index: I, select: S, attend: A, page_size: PageSize, num_kv_heads: u32) -> Result<Self, Vec<Refusal>> {
        let offer =
            Offer { unit: index.unit(), fanout: select.fanout(), width: select.width(), page_size, num_kv_heads };
        attend.accepts(&offer)?;
        Ok(Self { index, select, attend, scores: Scores::default() })
    }

    /// A selection that [`select`](Self::select) can fill.
    #[must_use]
    pub fn new_selection(&self) -> Selection {
        Selection::new(self.index.unit(), self.select.fanout())
    }

    /// The first two stages: which units each row of the batch attends to. New KV must have been stored.
    ///
    /// # Errors
    /// [`StageError`].
    pub fn select(
        &mut self,
        step: &mut Step<'_>,
        input: &mut I::Input<'_>,
        out: &mut Selection,
    ) -> Result<(), StageError> {
        out.reset_for(step.batch, self.select.width());
        let mut row = 0;
        while row < out.num_rows() {
            let rows = self.group(out, row);
            row = rows.end;
            let Self { index, select, scores, .. } = self;
            let units = rows.clone().map(|row| units_to_score(select, out, row));
            scores.reset(rows.start, index.num_heads(), units);
            index.score(step, input, scores)?;
            select.select(scores, out)?;
        }
        Ok(())
    }

    /// The third stage, with a selection of this layer or of another one of the same step.
    ///
    /// # Errors
    /// [`StageError`], in particular [`StageError::OtherRows`].
    pub fn attend(
        &mut self,
        step: &mut Step<'_>,
        input: &AttendInput<'_>,
        selection: &Selection,
        output: AttendOutput<'_>,
    ) -> Result<(), StageError> {
        self.attend.attend(step, input, selection, output)
    }

    /// Rows from `first` on whose scores fit at once.
    fn group(&self, selection: &Selection, first: usize) -> Range<usize> {
        let mut num_scores = 0;
        let mut end = first;
        while end < selection.num_rows() {
            num_scores += units_to_score(&self.select, selection, end) * self.index.num_heads();
            if num_scores > MAX_SCORES && end > first {
                break;
            }
            end += 1;
        }
        first..end
    }
}

fn units_to_score(select: &impl Select, selection: &Selection, row: usize) -> usize {
    let num_units = selection.unit().count(selection.visible(row)) as usize;
    if select.needs_scores(num_units) { num_units } else { 0 }
}

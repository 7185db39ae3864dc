//! The boundary between the three stages: what each is given and gives.
//!
//! A new selector implements [`Index`] and [`Select`] and uses an [`Attend`] that is there, or the other way round.
//! No stage knows which model it is in. The caller stores new KV, side caches included, before anything is scored: a
//! row sees its own key.

use std::ops::Range;

use attn_metadata::{Batch, Lse, Request};
use attn_reference::cpu::tiles::Workers;
use kvpool::{HostKv, HostTensor, HostTensorMut, PageSize};
use thiserror::Error;

use crate::selection::{Fanout, Selection, SelectionError, Unit, visible_tokens};

/// What a stage needs of the step: the batch, and threads to work with.
#[derive(Debug)]
pub struct Step<'a> {
    /// The batch.
    pub batch: &'a Batch,
    /// Rows of the call's tensors: at least the batch's, more where a captured call is padded.
    pub num_rows: usize,
    /// The threads.
    pub workers: &'a mut Workers,
}

/// Scores of the units that some consecutive rows see, `[rows][heads][units of the row]`, in natural units.
///
/// Rows whose selection needs no scores have none.
#[derive(Clone, Debug, Default)]
pub struct Scores {
    first_row: usize,
    num_heads: usize,
    /// Where each row begins, and the end of the last.
    starts: Vec<usize>,
    data: Vec<f32>,
}

impl Scores {
    /// Makes room for rows from `first_row` on that have this many units to be scored by each of the heads. What was
    /// there is lost; memory is reused.
    pub fn reset(&mut self, first_row: usize, num_heads: usize, units: impl Iterator<Item = usize>) {
        (self.first_row, self.num_heads) = (first_row, num_heads);
        self.starts.clear();
        let mut start = 0;
        self.starts.push(start);
        for units in units {
            start += units * num_heads;
            self.starts.push(start);
        }
        self.data.resize(start, f32::NEG_INFINITY);
    }

    /// The rows, counted in the batch.
    #[must_use]
    pub fn rows(&self) -> Range<usize> {
        self.first_row..self.first_row + self.starts.len().saturating_sub(1)
    }

    /// Heads that score.
    #[must_use]
    pub const fn num_heads(&self) -> usize {
        self.num_heads
    }

    /// Units of a row that are to be scored; 0 where the row needs no scores.
    ///
    /// # Panics
    /// Where the row is not among the [`rows`](Self::rows).
    #[must_use]
    pub fn num_units(&self, row: usize) -> usize {
        let row = row - self.first_row;
        (self.starts[row + 1] - self.starts[row]) / self.num_heads.max(1)
    }

    /// Scores of a row and head, `[num_units]`.
    ///
    /// # Panics
    /// Where there is no such row or head.
    #[must_use]
    pub fn get(&self, row: usize, head: usize) -> &[f32] {
        &self.data[self.range(row, head)]
    }

    /// Scores of a row and head, to be written.
    ///
    /// # Panics
    /// Where there is no such row or head.
    pub fn get_mut(&mut self, row: usize, head: usize) -> &mut [f32] {
        let range = self.range(row, head);
        &mut self.data[range]
    }

    fn range(&self, row: usize, head: usize) -> Range<usize> {
        assert!(head < self.num_heads, "head {head} of {}", self.num_heads);
        let units = self.num_units(row);
        let start = self.starts[row - self.first_row] + head * units;
        start..start + units
    }
}

/// The first stage: scores units for some rows.
pub trait Index {
    /// What it is given beside the batch: queries, caches, weights, and where a branch's own output goes.
    type Input<'a>;

    /// Heads that score.
    fn num_heads(&self) -> usize;

    /// What is scored.
    fn unit(&self) -> Unit;

    /// Scores the units of the rows of `out`: writes every score that it has room for.
    ///
    /// # Errors
    /// [`StageError`].
    fn score(&mut self, step: &mut Step<'_>, input: &mut Self::Input<'_>, out: &mut Scores) -> Result<(), StageError>;
}

/// The second stage: takes units by their scores. Pure: the same scores give the same ids.
pub trait Select {
    /// Who shares a set of ids.
    fn fanout(&self) -> Fanout;

    /// Ids of a set at most.
    fn width(&self) -> usize;

    /// Whether rows of this many units are selected by score.
    fn needs_scores(&self, num_units: usize) -> bool;

    /// Sets the ids of the rows of `scores`. `out` was reset for the batch.
    ///
    /// # Errors
    /// [`StageError`].
    fn select(&mut self, scores: &Scores, out: &mut Selection) -> Result<(), StageError>;
}

/// What an [`Attend`] is asked whether it can take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// What is selected.
    pub unit: Unit,
    /// Who shares a set of ids.
    pub fanout: Fanout,
    /// Ids of a set at most.
    pub width: usize,
    /// Tokens in a page.
    pub page_size: PageSize,
    /// KV heads of the layer.
    pub num_kv_heads: u32,
}

/// Why an [`Attend`] cannot take what a [`Select`] gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{attend} needs {needed}, the selection has {got}")]
pub struct Refusal {
    /// Who refuses.
    pub attend: &'static str,
    /// What it needs.
    pub needed: &'static str,
    /// What it was offered, as a number of tokens, sets or heads.
    pub got: u32,
}

/// The queries and keys of the third stage.
#[derive(Clone, Copy, Debug)]
pub struct AttendInput<'a> {
    /// `[num_rows, num_qo_heads, head_dim_qk]`.
    pub q: HostTensor<'a>,
    /// The layer's main cache.
    pub cache: &'a HostKv,
    /// Multiplier of q·k.
    pub sm_scale: f32,
}

/// Where the third stage writes.
#[derive(Debug)]
pub struct AttendOutput<'a> {
    /// `[num_rows, num_qo_heads, head_dim_vo]`.
    pub out: HostTensorMut<'a>,
    /// `[num_rows, num_qo_heads]`, where wanted.
    pub lse: Option<&'a mut [Lse]>,
}

/// The third stage: attends to what was selected.
pub trait Attend {
    /// Whether it can take such selections. Asked once, where a pipeline is made.
    ///
    /// # Errors
    /// Every [`Refusal`].
    fn accepts(&self, offer: &Offer) -> Result<(), Vec<Refusal>>;

    /// Attends, and writes the rows of the batch's requests, and no others.
    ///
    /// # Errors
    /// [`StageError`].
    fn attend(
        &mut self,
        step: &mut Step<'_>,
        input: &AttendInput<'_>,
        selection: &Selection,
        output: AttendOutput<'_>,
    ) -> Result<(), StageError>;
}

/// A stage that is refused or fails.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StageError {
    /// Ids that are no selection.
    #[error(transparent)]
    Selection(#[from] SelectionError),
    /// A selection that was made for other rows.
    #[error("the selection was made for {got} rows of another step, the batch has {expected}")]
    OtherRows {
        /// Rows of the batch.
        expected: usize,
        /// Rows of the selection.
        got: usize,
    },
    /// The third stage cannot take what the second gives.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Refused(Vec<Refusal>),
    /// A tensor has the wrong shape.
    #[error("{tensor} is {got:?}, {expected:?} is needed")]
    Shape {
        /// Which tensor.
        tensor: &'static str,
        /// `[rows, heads, dim]` needed.
        expected: [usize; 3],
        /// `[rows, heads, dim]` given.
        got: [usize; 3],
    },
    /// Pages do not tile the units of a selection.
    #[error("pages of {page_size} tokens do not tile units of {unit} tokens")]
    Pages {
        /// Tokens in a page.
        page_size: u32,
        /// Tokens in a unit.
        unit: u32,
    },
    /// A sparse page table with more pages than an `i32` counts; give the batch in smaller ones.
    #[error("the sparse page table has more than 2147483647 entries at row {row}: give the batch in smaller ones")]
    TableTooLarge {
        /// The first row that does not fit.
        row: usize,
    },
    /// The batch of a sparse page table is refused.
    #[error("the sparse page table is no batch")]
    Batch(#[source] attn_metadata::BatchError),
    /// The dense backend cannot plan the sparse page table.
    #[error("the dense backend cannot plan the sparse page table")]
    Prepare(#[source] attn_metadata::PrepareError),
    /// The dense backend failed.
    #[error("the dense backend failed")]
    Run(#[source] attn_metadata::RunError),
}

/// The request of each row of a range, with the tokens that the row sees; padding rows are left out.
pub fn rows_of(batch: &Batch, rows: Range<usize>) -> impl Iterator<Item = (&Request, usize, u32)> {
    batch.requests().iter().flat_map(move |request| {
        let start = request.q_start as usize;
        let rows = rows.start.max(start)..rows.end.min(start + request.q_len as usize);
        rows.map(move |row| {
            let query = u32::try_from(row - start).expect("a row of the request");
            (request, row, visible_tokens(request.position(query)))
        })
    })
}

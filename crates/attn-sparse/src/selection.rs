//! Owns [`Selection`]: which units of its KV each row attends to.
//!
//! Invariant: the ids of a row are strictly ascending, below the row's number of units, and the tail is −1. So whoever
//! attends needs no check, the only unit that may be partly visible comes last, and no id is met twice.
//! A selection says how much each of its rows sees: it can be used again by another layer of the same step, and by no batch
//! whose rows see more or less. That a batch of other requests with the same lengths is not given it is the caller's.

use std::num::NonZeroU32;

use attn_metadata::Batch;
use thiserror::Error;

/// The id behind a row's last one.
pub const TAIL: i32 = -1;

/// What an id counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unit {
    /// Tokens.
    Token,
    /// Blocks of this many tokens, the last of a row perhaps partly visible.
    Block(NonZeroU32),
}

impl Unit {
    /// Blocks of this many tokens.
    ///
    /// # Panics
    /// Where `block_size` is 0.
    #[must_use]
    pub const fn block(block_size: u32) -> Self {
        Self::Block(NonZeroU32::new(block_size).expect("a block has tokens"))
    }

    /// Tokens in a unit.
    #[must_use]
    pub const fn num_tokens(self) -> u32 {
        match self {
            Self::Token => 1,
            Self::Block(len) => len.get(),
        }
    }

    /// Units that hold this many visible tokens.
    #[must_use]
    pub const fn count(self, visible: u32) -> u32 {
        visible.div_ceil(self.num_tokens())
    }
}

/// Who shares a row's ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fanout {
    /// All KV heads.
    Shared,
    /// The query heads of one KV head; this many KV heads.
    PerKvHead(NonZeroU32),
}

impl Fanout {
    /// One set for each of these KV heads.
    ///
    /// # Panics
    /// Where `num_kv_heads` is 0.
    #[must_use]
    pub const fn per_kv_head(num_kv_heads: u32) -> Self {
        Self::PerKvHead(NonZeroU32::new(num_kv_heads).expect("a layer has KV heads"))
    }

    /// Sets of a row.
    #[must_use]
    pub const fn num_sets(self) -> usize {
        match self {
            Self::Shared => 1,
            Self::PerKvHead(n) => n.get() as usize,
        }
    }

    /// The set of a KV head.
    #[must_use]
    pub const fn set_of(self, kv_head: usize) -> usize {
        match self {
            Self::Shared => 0,
            Self::PerKvHead(_) => kv_head,
        }
    }
}

/// An id list that is not a selection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SelectionError {
    /// An id is not below the row's number of units.
    #[error("id {got} at place {place} of row {row}, set {set} is outside the row's {num_units} units")]
    OutOfRange {
        /// The row.
        row: usize,
        /// The set.
        set: usize,
        /// Place in the list.
        place: usize,
        /// The id.
        got: i32,
        /// Units of the row.
        num_units: u32,
    },
    /// An id is not above the one before it: a duplicate, or a list out of order.
    #[error("id {got} at place {place} of row {row}, set {set} is not above {before}, the one before it")]
    NotAscending {
        /// The row.
        row: usize,
        /// The set.
        set: usize,
        /// Place in the list.
        place: usize,
        /// The id.
        got: i32,
        /// The id before it.
        before: i32,
    },
    /// An id comes after the tail began.
    #[error("id {got} at place {place} of row {row}, set {set} comes after the tail began")]
    AfterTail {
        /// The row.
        row: usize,
        /// The set.
        set: usize,
        /// Place in the list.
        place: usize,
        /// The id.
        got: i32,
    },
    /// More ids than a row has room for.
    #[error("{got} ids for row {row}, set {set}, there is room for {width}")]
    TooMany {
        /// The row.
        row: usize,
        /// The set.
        set: usize,
        /// Ids given.
        got: usize,
        /// Room.
        width: usize,
    },
    /// The table has another size than rows × sets × width.
    #[error("{got} ids, {expected} are needed")]
    Len {
        /// Ids needed.
        expected: usize,
        /// Ids given.
        got: usize,
    },
}

/// Which units of its KV each row attends to. See the [module](self).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    unit: Unit,
    fanout: Fanout,
    width: usize,
    /// Visible tokens of each row.
    visible: Vec<u32>,
    /// `[rows, sets, width]`.
    ids: Vec<i32>,
}

impl Selection {
    /// A selection for no row.
    #[must_use]
    pub const fn new(unit: Unit, fanout: Fanout) -> Self {
        Self { unit, fanout, width: 0, visible: Vec::new(), ids: Vec::new() }
    }

    /// A selection from a table `[rows, sets, width]` of ids; `visible` tokens of each row.
    ///
    /// # Errors
    /// [`SelectionError`], the first one.
    pub fn from_table(
        unit: Unit,
        fanout: Fanout,
        width: usize,
        visible: &[u32],
        ids: &[i32],
    ) -> Result<Self, SelectionError> {
        let mut selection = Self::new(unit, fanout);
        selection.reset(visible.iter().copied(), width);
        let (expected, got) = (selection.ids.len(), ids.len());
        if expected != got {
            return Err(SelectionError::Len { expected, got });
        }
        for place in 0..expected / width.max(1) {
            let (row, set) = (place / fanout.num_sets(), place % fanout.num_sets());
            check(row, set, unit.count(visible[row]), &ids[place * width..(place + 1) * width])?;
        }
        selection.ids.copy_from_slice(ids);
        Ok(selection)
    }

    /// Empties it for rows that see `visible` tokens each. Reuses memory.
    pub fn reset(&mut self, visible: impl Iterator<Item = u32>, width: usize) {
        self.width = width;
        self.visible.clear();
        self.visible.extend(visible);
        self.ids.clear();
        self.ids.resize(self.visible.len() * self.fanout.num_sets() * width, TAIL);
    }

    /// Empties it for the rows of a batch, padding rows included. Reuses memory.
    pub fn reset_for(&mut self, batch: &Batch, width: usize) {
        self.reset(std::iter::empty(), width);
        self.visible.resize(batch.num_rows() as usize, 0);
        for request in batch.requests() {
            for row in 0..request.q_len {
                self.visible[(request.q_start + row) as usize] = visible_tokens(request.position(row));
            }
        }
        self.ids.resize(self.visible.len() * self.fanout.num_sets() * width, TAIL);
    }

    /// Sets the ids of a row, without a tail.
    ///
    /// # Errors
    /// [`SelectionError`]; the row is unchanged.
    ///
    /// # Panics
    /// Where there is no such row or set.
    pub fn set(&mut self, row: usize, set: usize, ids: &[i32]) -> Result<(), SelectionError> {
        if ids.len() > self.width {
            return Err(SelectionError::TooMany { row, set, got: ids.len(), width: self.width });
        }
        check(row, set, self.unit.count(self.visible[row]), ids)?;
        let target = self.slot_mut(row, set);
        target[..ids.len()].copy_from_slice(ids);
        target[ids.len()..].fill(TAIL);
        Ok(())
    }

    /// What an id counts.
    #[must_use]
    pub const fn unit(&self) -> Unit {
        self.unit
    }

    /// Who shares ids.
    #[must_use]
    pub const fn fanout(&self) -> Fanout {
        self.fanout
    }

    /// Ids that a row has room for.
    #[must_use]
    pub const fn width(&self) -> usize {
        self.width
    }

    /// Rows.
    #[must_use]
    pub const fn num_rows(&self) -> usize {
        self.visible.len()
    }

    /// Tokens that a row sees.
    ///
    /// # Panics
    /// Where there is no such row.
    #[must_use]
    pub fn visible(&self, row: usize) -> u32 {
        self.visible[row]
    }

    /// The ids of a row, tail included, `[width]`.
    ///
    /// # Panics
    /// Where there is no such row or set.
    #[must_use]
    pub fn padded(&self, row: usize, set: usize) -> &[i32] {
        let start = self.start(row, set);
        &self.ids[start..start + self.width]
    }

    /// The ids of a row, without the tail.
    ///
    /// # Panics
    /// Where there is no such row or set.
    #[must_use]
    pub fn ids(&self, row: usize, set: usize) -> &[i32] {
        let padded = self.padded(row, set);
        &padded[..padded.iter().position(|&id| id == TAIL).unwrap_or(padded.len())]
    }

    /// Tokens that the ids of a row hold: only the last unit of a row may be partly visible.
    ///
    /// # Panics
    /// Where there is no such row or set.
    #[must_use]
    pub fn num_tokens(&self, row: usize, set: usize) -> u32 {
        self.ids(row, set)
            .iter()
            .map(|&id| self.tokens(row, id).len())
            .sum::<usize>()
            .try_into()
            .expect("visible tokens")
    }

    /// The visible tokens of a unit of a row.
    ///
    /// # Panics
    /// Where there is no such row.
    #[must_use]
    pub fn tokens(&self, row: usize, id: i32) -> std::ops::Range<usize> {
        let (start, len) =
            (id.unsigned_abs() as usize * self.unit.num_tokens() as usize, self.unit.num_tokens() as usize);
        start..(start + len).min(self.visible[row] as usize)
    }

    /// Whether the selection was made for rows that see what the rows of this batch see.
    #[must_use]
    pub fn fits(&self, batch: &Batch) -> bool {
        let row_fits = |request: &attn_metadata::Request, row: u32| {
            let visible = self.visible.get((request.q_start + row) as usize);
            visible == Some(&visible_tokens(request.position(row)))
        };
        self.num_rows() == batch.num_rows() as usize
            && batch.requests().iter().all(|request| (0..request.q_len).all(|row| row_fits(request, row)))
    }

    fn start(&self, row: usize, set: usize) -> usize {
        let num_sets = self.fanout.num_sets();
        assert!(row < self.num_rows() && set < num_sets, "row {row}, set {set} of {} rows", self.num_rows());
        (row * num_sets + set) * self.width
    }

    fn slot_mut(&mut self, row: usize, set: usize) -> &mut [i32] {
        let start = self.start(row, set);
        &mut self.ids[start..start + self.width]
    }
}

/// Tokens that a row at this position sees.
#[must_use]
pub fn visible_tokens(position: i64) -> u32 {
    u32::try_from(position + 1).unwrap_or(0)
}

fn check(row: usize, set: usize, num_units: u32, ids: &[i32]) -> Result<(), SelectionError> {
    let mut before = None;
    for (place, &got) in ids.iter().enumerate() {
        match before {
            Some(TAIL) if got != TAIL => return Err(SelectionError::AfterTail { row, set, place, got }),
            _ if got == TAIL => {}
            _ if u32::try_from(got).is_ok_and(|id| id < num_units) => {}
            _ => return Err(SelectionError::OutOfRange { row, set, place, got, num_units }),
        }
        if let Some(before) = before.filter(|before| got != TAIL && got <= *before) {
            return Err(SelectionError::NotAscending { row, set, place, got, before });
        }
        before = Some(got);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(ids: &[i32]) -> Result<Selection, SelectionError> {
        // 18 tokens are 5 blocks of 4.
        Selection::from_table(Unit::block(4), Fanout::Shared, 4, &[18], ids)
    }

    #[test]
    fn a_list_of_ascending_ids_with_a_tail_is_accepted() {
        let selection = table(&[0, 2, 4, -1]).expect("valid");
        assert_eq!(selection.ids(0, 0), [0, 2, 4]);
        assert_eq!(selection.num_tokens(0, 0), 4 + 4 + 2);
        assert_eq!(selection.tokens(0, 4), 16..18);
        assert!(table(&[-1; 4]).is_ok() && table(&[0, 1, 2, 3]).is_ok());
    }

    #[test]
    fn each_broken_list_is_named() {
        let (row, set) = (0, 0);
        let not_ascending = |place, got, before| SelectionError::NotAscending { row, set, place, got, before };
        assert_eq!(table(&[1, 1, -1, -1]), Err(not_ascending(1, 1, 1)), "a duplicate");
        assert_eq!(table(&[3, 1, -1, -1]), Err(not_ascending(1, 1, 3)), "out of order");
        let out_of_range = |place, got| SelectionError::OutOfRange { row, set, place, got, num_units: 5 };
        assert_eq!(table(&[0, 5, -1, -1]), Err(out_of_range(1, 5)), "beyond the row");
        assert_eq!(table(&[-2, 0, -1, -1]), Err(out_of_range(0, -2)), "another negative id");
        assert_eq!(table(&[0, -1, 2, -1]), Err(SelectionError::AfterTail { row, set, place: 2, got: 2 }));
        assert_eq!(table(&[0]), Err(SelectionError::Len { expected: 4, got: 1 }));
    }

    #[test]
    fn a_refused_row_is_unchanged() {
        let mut selection = table(&[0, 2, 4, -1]).expect("valid");
        let before = selection.clone();
        assert!(selection.set(0, 0, &[2, 2]).is_err());
        assert!(matches!(selection.set(0, 0, &[0, 1, 2, 3, 4]), Err(SelectionError::TooMany { got: 5, width: 4, .. })));
        assert_eq!(selection, before);
        selection.set(0, 0, &[1]).expect("valid");
        assert_eq!(selection.padded(0, 0), [1, -1, -1, -1]);
    }
}

//! Owns the errors of this crate: [`MlaError`] for widths, scales and weights, [`IndexError`] for index lists.

use thiserror::Error;

/// Widths, a scale or weights that cannot be those of latent attention.
#[derive(Debug, Clone, Copy, PartialEq, Error)]
#[non_exhaustive]
pub enum MlaError {
    /// A width that must be at least 1 is 0.
    #[error("the {what} width is 0, at least 1 is needed")]
    ZeroWidth {
        /// Which width.
        what: &'static str,
    },
    /// A sum of two widths does not fit 31 bits.
    #[error("{what} is {got}, at most {} is possible", u32::MAX / 2)]
    WideWidths {
        /// Which widths.
        what: &'static str,
        /// Their sum.
        got: u64,
    },
    /// There are no heads.
    #[error("0 heads were given, at least 1 is needed")]
    NoHeads,
    /// The weights are not as many as the widths say.
    #[error(
        "kv_b_proj holds {got} elements, {expected} are needed: {num_heads} heads x ({nope} + {value}) x latent {latent}"
    )]
    WeightLen {
        /// Elements given.
        got: usize,
        /// Elements needed.
        expected: u64,
        /// Heads.
        num_heads: u32,
        /// Rows of a head for the keys.
        nope: u32,
        /// Rows of a head for the values.
        value: u32,
        /// Columns.
        latent: u32,
    },
    /// The rows of the weights cannot be shared out evenly.
    #[error("{rows} rows of kv_b_proj are not divisible by {num_heads} heads")]
    RowsNotDivisible {
        /// Rows given.
        rows: u32,
        /// Heads.
        num_heads: u32,
    },
    /// A weight is NaN or infinite.
    #[error("kv_b_proj row {row}, column {column} is {got}, a finite number is needed")]
    WeightValue {
        /// Row, `head * (nope + value) + row of the head`.
        row: usize,
        /// Column, a latent value.
        column: usize,
        /// The weight.
        got: f32,
    },
    /// A layer has other heads or widths than its weights.
    #[error("{what} is {got}, the weights are for {expected}")]
    LayerShape {
        /// The field of the layer's head shape.
        what: &'static str,
        /// What the weights are for.
        expected: u32,
        /// What the layer says.
        got: u32,
    },
    /// A layer of the family says that its values are columns of its keys, which is for already absorbed layers.
    #[error("values_in_keys is for layers whose queries are absorbed already; these weights absorb them")]
    ValuesInKeys,
    /// A scale is NaN, infinite, 0 or negative.
    #[error("the scale is {got}, a finite number above 0 is needed")]
    Scale {
        /// The scale.
        got: f32,
    },
    /// A scale comes from an absorbed width.
    #[error("the scale {got} is 1/sqrt({width}), of an absorbed width; the unabsorbed one gives {expected}")]
    AbsorbedScale {
        /// The scale.
        got: f32,
        /// The width that it comes from.
        width: u32,
        /// `1 / √(nope + rope)`.
        expected: f32,
    },
}

/// An index list that was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum IndexError {
    /// The list does not have `tokens x topk` entries, or not as many lengths as tokens.
    #[error("{what} has {got} entries, {expected} are needed")]
    Len {
        /// Which array.
        what: &'static str,
        /// Entries given.
        got: usize,
        /// Entries needed.
        expected: usize,
    },
    /// A length is more than a token has entries.
    #[error("token {token} has a length of {got}, its list has {topk} entries")]
    Length {
        /// The token.
        token: usize,
        /// Its length.
        got: i32,
        /// Entries of a token.
        topk: usize,
    },
    /// An entry is neither −1 nor a slot of the pool.
    #[error("entry {entry} of token {token} is {got}, −1 or a slot below {num_slots} is needed")]
    OutOfRange {
        /// The token.
        token: usize,
        /// The entry of its list.
        entry: usize,
        /// The value.
        got: i32,
        /// Slots of the pool.
        num_slots: u64,
    },
    /// A slot is in a token's list twice: it would count twice.
    #[error("entry {entry} of token {token} is slot {slot}, which its list has before")]
    Duplicate {
        /// The token.
        token: usize,
        /// The later entry.
        entry: usize,
        /// The slot.
        slot: i32,
    },
}

//! Owns [`ShapeError`], the refusals of sizes, strides and buffers, and [`KvPart`], which names the
//! plane that an error speaks of.
//! Every variant carries the values that broke the rule. Nothing here decides a rule.

use std::fmt;

use crate::format::KvDtype;

/// Which of the two planes of a KV cache is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvPart {
    /// The keys.
    K,
    /// The values.
    V,
}

impl fmt::Display for KvPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            KvPart::K => "k",
            KvPart::V => "v",
        })
    }
}

/// A size, a stride or a buffer that does not describe a legal view or cache.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ShapeError {
    /// A count that must be at least 1 is 0.
    #[error("{what} is 0, expected at least 1")]
    Zero {
        /// Name of the count.
        what: &'static str,
    },
    /// A count is beyond what the tables can hold.
    #[error("{what} is {value}, expected at most {max}")]
    TooLarge {
        /// Name of the count.
        what: &'static str,
        /// The count that was asked for.
        value: u64,
        /// The largest legal count, inclusive.
        max: u64,
    },
    /// The slots of a pool do not fit the `i32` tables.
    #[error("{num_pages} pages x {page_size} tokens are more than {max} slots")]
    TooManySlots {
        /// Pages of the pool.
        num_pages: u64,
        /// Tokens per page.
        page_size: u32,
        /// The largest legal number of slots, inclusive.
        max: u64,
    },
    /// The number of elements or bytes does not fit the address space.
    #[error("the extent of {what} overflows the address space")]
    Overflow {
        /// Name of the view or plane.
        what: &'static str,
    },
    /// The machine does not give the memory.
    #[error("no memory for {what} of {bytes} bytes")]
    OutOfMemory {
        /// Name of the buffer.
        what: &'static str,
        /// Bytes that were asked for.
        bytes: u64,
    },
    /// The data of a packed view is not exactly as long as its shape says.
    #[error("{what} holds {len} elements, its shape {shape:?} says {expected}")]
    PackedLength {
        /// Name of the view.
        what: &'static str,
        /// Elements of the data.
        len: usize,
        /// Elements that the shape implies.
        expected: usize,
        /// The shape, `[rows, heads, dim]`.
        shape: [usize; 3],
    },
    /// The data ends before the last element of the view.
    #[error("{what} reaches over {needed} elements, its data holds {len}")]
    OutOfBounds {
        /// Name of the view or plane.
        what: &'static str,
        /// Elements of the data.
        len: usize,
        /// Elements that the view reaches over, from the start of the data.
        needed: usize,
    },
    /// Two different positions of a writable view are the same element.
    #[error("{what} overlaps itself: {detail}")]
    Overlap {
        /// Name of the view or plane.
        what: &'static str,
        /// Which positions meet, with the strides.
        detail: OverlapDetail,
    },
    /// A plane's `head_dim` is not that of the shape.
    #[error("plane {part} has head_dim {got}, the shape says {expected}")]
    HeadDim {
        /// The plane.
        part: KvPart,
        /// `head_dim` of the plane.
        got: usize,
        /// `head_dim` of the shape.
        expected: usize,
    },
    /// A buffer's dtype is not that of the format.
    #[error("the buffer is {got}, the format says {expected}")]
    BufferDtype {
        /// Dtype of the buffer.
        got: KvDtype,
        /// Dtype of the format.
        expected: KvDtype,
    },
    /// The columns of a shared V are not all columns of K.
    #[error("v takes columns {v_column}..{end} of k, which has {head_dim_k} columns")]
    SharedColumns {
        /// First column of V in K.
        v_column: usize,
        /// One past the last column of V in K.
        end: usize,
        /// Columns of K.
        head_dim_k: usize,
    },
    /// There is no quantised latent row of these widths.
    #[error("a latent row of {latent} + {rope} values: the first must be a multiple of 128 above 0, the second even")]
    LatentRow {
        /// Quantised values.
        latent: u32,
        /// Values in bf16.
        rope: u32,
    },
    /// A plane says that its vectors are of another kind than the dtype has.
    #[error("plane {part} of a {dtype} cache {}", if *has_row {"has latent rows"} else {"has no latent rows"})]
    RowFormat {
        /// The plane.
        part: KvPart,
        /// Dtype of the format.
        dtype: KvDtype,
        /// Whether the plane's vectors are latent rows.
        has_row: bool,
    },
    /// A latent row holds the values in its first columns, so the values cannot be elsewhere.
    #[error("the values of a {dtype} cache are the first columns of its keys, and not a plane of their own")]
    RowsHoldValues {
        /// Dtype of the format.
        dtype: KvDtype,
    },
    /// K and V share their elements, so they cannot have two scales.
    #[error("k and v share their elements, but k_scale is {k_scale} and v_scale is {v_scale}")]
    SharedScales {
        /// Scale of K.
        k_scale: f32,
        /// Scale of V.
        v_scale: f32,
    },
}

/// How a view meets itself, see [`ShapeError::Overlap`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum OverlapDetail {
    /// The strides nest neither as rows of heads nor as heads of rows.
    Strides {
        /// Shape `[rows, heads, dim]`.
        shape: [usize; 3],
        /// Elements from a row to the next.
        row_stride: usize,
        /// Elements from a head to the next.
        head_stride: usize,
    },
    /// This element of the buffer belongs to two positions.
    Element {
        /// Index of the first element that is met twice.
        element: usize,
    },
}

impl fmt::Display for OverlapDetail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OverlapDetail::Strides { shape, row_stride, head_stride } => {
                write!(f, "shape {shape:?} with row_stride {row_stride} and head_stride {head_stride} elements")
            }
            OverlapDetail::Element { element } => write!(f, "element {element} belongs to two positions"),
        }
    }
}

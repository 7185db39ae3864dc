//! Owns strided host views `[rows, heads, dim]` of activations: [`HostTensor`] to read, [`HostTensorMut`] to write.
//! Invariants: unit stride in `dim`, strides in elements, every element of a view lies inside its data, and no two
//! positions of a writable view meet. So slices of a fused QKV buffer, padded rows and head-major data need no copy.
//! Does not own data and does not compute.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::error::{OverlapDetail, ShapeError};
use crate::slice::{Dtype, HostSlice, HostSliceMut};

/// Shape and strides of a view, all in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Geometry {
    shape: [usize; 3],
    row_stride: usize,
    head_stride: usize,
}

impl Geometry {
    fn packed(len: usize, shape: [usize; 3]) -> Result<Geometry, ShapeError> {
        let [rows, heads, dim] = shape;
        let row_stride = heads.checked_mul(dim).ok_or(ShapeError::Overflow { what: "tensor" })?;
        let expected = rows.checked_mul(row_stride).ok_or(ShapeError::Overflow { what: "tensor" })?;
        if len != expected {
            return Err(ShapeError::PackedLength { what: "tensor", len, expected, shape });
        }
        Ok(Geometry { shape, row_stride, head_stride: dim })
    }

    fn strided(len: usize, shape: [usize; 3], row_stride: usize, head_stride: usize) -> Result<Geometry, ShapeError> {
        let geometry = Geometry { shape, row_stride, head_stride };
        let needed = geometry.extent().ok_or(ShapeError::Overflow { what: "tensor" })?;
        if needed > len {
            return Err(ShapeError::OutOfBounds { what: "tensor", len, needed });
        }
        Ok(geometry)
    }

    /// One past the last element, `None` on overflow.
    fn extent(&self) -> Option<usize> {
        let [rows, heads, dim] = self.shape;
        if rows == 0 || heads == 0 || dim == 0 {
            return Some(0);
        }
        let row = (rows - 1).checked_mul(self.row_stride)?;
        let head = (heads - 1).checked_mul(self.head_stride)?;
        row.checked_add(head)?.checked_add(dim)
    }

    /// Rows of heads or heads of rows, each inner block ending before the next begins. The extent was checked before.
    fn require_disjoint(&self) -> Result<(), ShapeError> {
        let [rows, heads, dim] = self.shape;
        if rows == 0 || heads == 0 || dim == 0 {
            return Ok(());
        }
        let nests = |outer: usize, outer_stride: usize, inner: usize, inner_stride: usize| {
            (inner == 1 || inner_stride >= dim)
                && (outer == 1 || outer_stride >= (inner - 1).saturating_mul(inner_stride).saturating_add(dim))
        };
        if nests(rows, self.row_stride, heads, self.head_stride)
            || nests(heads, self.head_stride, rows, self.row_stride)
        {
            return Ok(());
        }
        let Geometry { shape, row_stride, head_stride } = *self;
        let detail = OverlapDetail::Strides { shape, row_stride, head_stride };
        Err(ShapeError::Overlap { what: "tensor", detail })
    }

    fn offset(&self, row: usize, head: usize) -> usize {
        let [rows, heads, _] = self.shape;
        assert!(row < rows && head < heads, "row {row}, head {head} of a tensor of {rows} rows, {heads} heads");
        row * self.row_stride + head * self.head_stride
    }
}

macro_rules! geometry_getters {
    () => {
        /// The shape, `[rows, heads, dim]`.
        #[must_use]
        pub const fn shape(&self) -> [usize; 3] {
            self.geometry.shape
        }

        /// Rows (tokens); may be 0.
        #[must_use]
        pub const fn rows(&self) -> usize {
            self.geometry.shape[0]
        }

        /// Heads.
        #[must_use]
        pub const fn heads(&self) -> usize {
            self.geometry.shape[1]
        }

        /// Elements of one head vector.
        #[must_use]
        pub const fn dim(&self) -> usize {
            self.geometry.shape[2]
        }

        /// Elements from a row to the next.
        #[must_use]
        pub const fn row_stride(&self) -> usize {
            self.geometry.row_stride
        }

        /// Elements from a head to the next.
        #[must_use]
        pub const fn head_stride(&self) -> usize {
            self.geometry.head_stride
        }

        /// The element type.
        #[must_use]
        pub const fn dtype(&self) -> Dtype {
            self.data.dtype()
        }

        /// Index in the data of the first element of a head vector.
        ///
        /// # Panics
        /// Where `row` or `head` is out of range.
        #[must_use]
        pub fn offset(&self, row: usize, head: usize) -> usize {
            self.geometry.offset(row, head)
        }
    };
}

/// A view `[rows, heads, dim]` to read: unit stride in `dim`, any stride in rows and heads (0 repeats).
#[derive(Debug, Clone, Copy)]
pub struct HostTensor<'a> {
    data: HostSlice<'a>,
    geometry: Geometry,
}

impl<'a> HostTensor<'a> {
    geometry_getters!();

    /// A view of exactly `rows * heads * dim` elements without gaps.
    ///
    /// # Errors
    /// [`ShapeError::PackedLength`] where the length differs, [`ShapeError::Overflow`].
    pub fn packed(data: impl Into<HostSlice<'a>>, shape: [usize; 3]) -> Result<HostTensor<'a>, ShapeError> {
        let data = data.into();
        let geometry = Geometry::packed(data.len(), shape)?;
        Ok(HostTensor { data, geometry })
    }

    /// A view with strides in elements; the data may be longer than the view reaches.
    ///
    /// # Errors
    /// [`ShapeError::OutOfBounds`] where the view reaches beyond the data, [`ShapeError::Overflow`].
    pub fn strided(
        data: impl Into<HostSlice<'a>>,
        shape: [usize; 3],
        row_stride: usize,
        head_stride: usize,
    ) -> Result<HostTensor<'a>, ShapeError> {
        let data = data.into();
        let geometry = Geometry::strided(data.len(), shape, row_stride, head_stride)?;
        Ok(HostTensor { data, geometry })
    }

    /// The whole data of the view; index it with [`HostTensor::offset`].
    #[must_use]
    pub const fn data(&self) -> HostSlice<'a> {
        self.data
    }

    /// Widens one head vector into `out`.
    ///
    /// # Panics
    /// Where `row` or `head` is out of range, or `out` does not hold `dim` elements.
    pub fn read(&self, row: usize, head: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.dim(), "elements of the output and of a head vector");
        let start = self.offset(row, head);
        let range = start..start + out.len();
        match self.data {
            HostSlice::F32(data) => out.copy_from_slice(&data[range]),
            HostSlice::F16(data) => data[range].convert_to_f32_slice(out),
            HostSlice::Bf16(data) => data[range].convert_to_f32_slice(out),
        }
    }

    /// One element, widened.
    ///
    /// # Panics
    /// Where `row`, `head` or `d` is out of range.
    #[must_use]
    pub fn get(&self, row: usize, head: usize, d: usize) -> f32 {
        assert!(d < self.dim(), "element {d} of a head vector of {} elements", self.dim());
        let element = self.offset(row, head) + d;
        match self.data {
            HostSlice::F32(data) => data[element],
            HostSlice::F16(data) => data[element].to_f32(),
            HostSlice::Bf16(data) => data[element].to_f32(),
        }
    }
}

/// A view `[rows, heads, dim]` to write: as [`HostTensor`], and no two positions are the same element.
#[derive(Debug)]
pub struct HostTensorMut<'a> {
    data: HostSliceMut<'a>,
    geometry: Geometry,
}

impl<'a> HostTensorMut<'a> {
    geometry_getters!();

    /// A view of exactly `rows * heads * dim` elements without gaps.
    ///
    /// # Errors
    /// [`ShapeError::PackedLength`] where the length differs, [`ShapeError::Overflow`].
    pub fn packed(data: impl Into<HostSliceMut<'a>>, shape: [usize; 3]) -> Result<HostTensorMut<'a>, ShapeError> {
        let data = data.into();
        let geometry = Geometry::packed(data.len(), shape)?;
        Ok(HostTensorMut { data, geometry })
    }

    /// A view with strides in elements; the data may be longer than the view reaches.
    ///
    /// # Errors
    /// [`ShapeError::OutOfBounds`] where the view reaches beyond the data, [`ShapeError::Overlap`] where the strides
    /// nest neither as rows of heads nor as heads of rows, [`ShapeError::Overflow`].
    pub fn strided(
        data: impl Into<HostSliceMut<'a>>,
        shape: [usize; 3],
        row_stride: usize,
        head_stride: usize,
    ) -> Result<HostTensorMut<'a>, ShapeError> {
        let data = data.into();
        let geometry = Geometry::strided(data.len(), shape, row_stride, head_stride)?;
        geometry.require_disjoint()?;
        Ok(HostTensorMut { data, geometry })
    }

    /// The whole data of the view; index it with [`HostTensorMut::offset`].
    pub const fn data_mut(&mut self) -> HostSliceMut<'_> {
        self.data.reborrow()
    }

    /// The same view, to read.
    #[must_use]
    pub const fn as_ref(&self) -> HostTensor<'_> {
        HostTensor { data: self.data.as_slice(), geometry: self.geometry }
    }

    /// The same view, borrowed for less long.
    pub const fn reborrow(&mut self) -> HostTensorMut<'_> {
        HostTensorMut { data: self.data.reborrow(), geometry: self.geometry }
    }

    /// Writes one head vector, rounding to nearest even.
    ///
    /// # Panics
    /// Where `row` or `head` is out of range, or `values` does not hold `dim` elements.
    pub fn write(&mut self, row: usize, head: usize, values: &[f32]) {
        assert_eq!(values.len(), self.dim(), "elements of the input and of a head vector");
        let start = self.offset(row, head);
        let range = start..start + values.len();
        match self.data.reborrow() {
            HostSliceMut::F32(data) => data[range].copy_from_slice(values),
            HostSliceMut::F16(data) => data[range].convert_from_f32_slice(values),
            HostSliceMut::Bf16(data) => data[range].convert_from_f32_slice(values),
        }
    }

    /// Writes `value` to every element of a row, rounding to nearest even.
    ///
    /// # Panics
    /// Where `row` is out of range.
    pub fn fill_row(&mut self, row: usize, value: f32) {
        let dim = self.dim();
        for head in 0..self.heads() {
            let start = self.offset(row, head);
            let range = start..start + dim;
            match self.data.reborrow() {
                HostSliceMut::F32(data) => data[range].fill(value),
                HostSliceMut::F16(data) => data[range].fill(f16::from_f32(value)),
                HostSliceMut::Bf16(data) => data[range].fill(bf16::from_f32(value)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counting(len: u16) -> Vec<f32> {
        (0..len).map(f32::from).collect()
    }

    #[test]
    fn a_slice_of_a_fused_buffer_reads_as_its_packed_copy() {
        // Rows of 20 elements: q has 2 heads of 3 at columns 5..; head stride 4.
        let fused = counting(60);
        let q = HostTensor::strided(&fused[5..], [3, 2, 3], 20, 4).unwrap();
        let mut out = [0.0; 3];
        q.read(2, 1, &mut out);
        assert_eq!(out, [49.0, 50.0, 51.0]);
        assert_eq!(q.get(1, 0, 2), 27.0);
    }

    #[test]
    fn a_view_may_end_exactly_at_its_data_and_not_beyond() {
        let data = counting(20);
        assert!(HostTensor::strided(&data, [3, 2, 4], 6, 4).is_ok()); // 2*6 + 4 + 4 = 20
        let beyond = HostTensor::strided(&data[..19], [3, 2, 4], 6, 4).unwrap_err();
        assert_eq!(beyond, ShapeError::OutOfBounds { what: "tensor", len: 19, needed: 20 });
        assert!(HostTensor::packed(&data, [5, 2, 2]).is_ok());
        assert!(matches!(HostTensor::packed(&data, [5, 2, 1]), Err(ShapeError::PackedLength { expected: 10, .. })));
        let huge = HostTensor::strided(&data, [usize::MAX, 2, 4], usize::MAX, 4).unwrap_err();
        assert_eq!(huge, ShapeError::Overflow { what: "tensor" });
        assert!(HostTensor::strided(&data[..0], [0, 2, 4], usize::MAX, usize::MAX).is_ok());
    }

    #[test]
    fn a_writable_view_whose_positions_meet_is_refused() {
        let accepted = |shape, row, head| HostTensorMut::strided(&mut counting(64), shape, row, head).is_ok();
        assert!(accepted([3, 2, 4], 8, 4)); // rows of heads
        assert!(accepted([3, 2, 4], 4, 12)); // heads of rows
        assert!(accepted([3, 1, 4], 4, 0)); // one head: its stride is not used
        assert!(accepted([1, 3, 4], 0, 4));
        assert!(!accepted([3, 2, 4], 7, 4)); // a row begins inside the last head
        assert!(!accepted([3, 2, 4], 8, 3)); // heads meet
        assert!(!accepted([3, 2, 4], 0, 4)); // all rows are one
        assert!(!accepted([3, 2, 4], 4, 11));
    }

    #[test]
    fn writing_rounds_to_nearest_even_and_touches_only_its_vector() {
        let mut data = vec![bf16::from_f32(9.0); 24];
        let mut view = HostTensorMut::strided(&mut data, [2, 2, 3], 12, 5).unwrap();
        // 1 + 2^-8 is half way between 1 and 1 + 2^-7: to even, 1.
        view.write(1, 1, &[1.0 + 0.003_906_25, 1.0 + 3.0 * 0.003_906_25, f32::NAN]);
        view.reborrow().fill_row(0, 2.0);
        assert_eq!((view.as_ref().get(1, 1, 0), view.as_ref().get(1, 1, 1)), (1.0, 1.0 + 4.0 * 0.003_906_25));
        assert!(view.as_ref().get(1, 1, 2).is_nan());
        let untouched: Vec<usize> = (0..24).filter(|&i| data[i].to_f32() == 9.0).collect();
        assert_eq!(untouched, [3, 4, 8, 9, 10, 11, 12, 13, 14, 15, 16, 20, 21, 22, 23]);
    }

    #[test]
    #[should_panic(expected = "row 2, head 0 of a tensor of 2 rows, 1 heads")]
    fn a_row_out_of_range_panics_instead_of_reading_the_next() {
        let data = counting(64);
        let _ = HostTensor::strided(&data, [2, 1, 4], 8, 4).unwrap().get(2, 0, 0);
    }
}

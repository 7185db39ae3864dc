//! Owns small views of host tensors: runs of rows, columns of heads.

use std::ops::Range;

use kvpool::{HostSlice, HostSliceMut, HostTensor, HostTensorMut};

/// Rows `rows` and columns `columns` of every head of a view.
pub(crate) fn part<'a>(x: &HostTensor<'a>, rows: Range<usize>, columns: Range<usize>) -> HostTensor<'a> {
    let shape = [rows.len(), x.heads(), columns.len()];
    // A view without elements may begin anywhere.
    let is_empty = shape.contains(&0);
    let start = if is_empty { 0 } else { x.offset(rows.start, 0) + columns.start };
    let data = match x.data() {
        HostSlice::F32(data) => HostSlice::F32(&data[start..]),
        HostSlice::F16(data) => HostSlice::F16(&data[start..]),
        HostSlice::Bf16(data) => HostSlice::Bf16(&data[start..]),
    };
    HostTensor::strided(data, shape, x.row_stride(), x.head_stride()).expect("a part of a view is a view")
}

/// Rows `rows` of a view to write.
pub(crate) fn part_mut<'a>(x: &'a mut HostTensorMut<'_>, rows: Range<usize>) -> HostTensorMut<'a> {
    let (shape, row_stride, head_stride) = ([rows.len(), x.heads(), x.dim()], x.row_stride(), x.head_stride());
    let start = if shape.contains(&0) { 0 } else { x.offset(rows.start, 0) };
    match x.data_mut() {
        HostSliceMut::F32(data) => HostTensorMut::strided(&mut data[start..], shape, row_stride, head_stride),
        HostSliceMut::F16(data) => HostTensorMut::strided(&mut data[start..], shape, row_stride, head_stride),
        HostSliceMut::Bf16(data) => HostTensorMut::strided(&mut data[start..], shape, row_stride, head_stride),
    }
    .expect("rows of a view are a view")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_has_the_elements_of_the_whole() {
        let data: Vec<f32> = (0u8..60).map(f32::from).collect();
        let whole = HostTensor::strided(&data, [3, 2, 7], 20, 9).unwrap();
        let part = part(&whole, 1..3, 2..6);
        assert_eq!(part.shape(), [2, 2, 4]);
        for row in 0..2 {
            for head in 0..2 {
                for d in 0..4 {
                    assert_eq!(part.get(row, head, d), whole.get(row + 1, head, d + 2));
                }
            }
        }
        assert_eq!(super::part(&whole, 3..3, 0..7).rows(), 0);
    }
}

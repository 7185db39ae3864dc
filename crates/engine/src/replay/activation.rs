//! Owned activations `[rows, heads, dim]`, packed, in any of the activation dtypes.

use attn_metadata::Lse;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use kvpool::{Dtype, HostSlice, HostSliceMut, HostTensor, HostTensorMut};

/// Owned elements of an activation dtype.
#[derive(Clone, Debug, PartialEq)]
pub enum Elements {
    /// Single precision.
    F32(Vec<f32>),
    /// Half precision.
    F16(Vec<f16>),
    /// bfloat16.
    Bf16(Vec<bf16>),
}

impl Elements {
    /// `len` zeros.
    #[must_use]
    pub fn zeroed(dtype: Dtype, len: usize) -> Self {
        match dtype {
            Dtype::F32 => Self::F32(bytemuck::zeroed_vec(len)),
            Dtype::F16 => Self::F16(bytemuck::zeroed_vec(len)),
            Dtype::Bf16 => Self::Bf16(bytemuck::zeroed_vec(len)),
        }
    }

    /// Values rounded to nearest even.
    #[must_use]
    pub fn from_f32(dtype: Dtype, values: Vec<f32>) -> Self {
        let mut elements = match dtype {
            Dtype::F32 => return Self::F32(values),
            _ => Self::zeroed(dtype, values.len()),
        };
        match &mut elements {
            Self::F32(_) => {}
            Self::F16(data) => data.convert_from_f32_slice(&values),
            Self::Bf16(data) => data.convert_from_f32_slice(&values),
        }
        elements
    }

    /// Elements from their bytes, as a file holds them; a rest that is no whole element is dropped.
    #[must_use]
    pub fn from_bytes(dtype: Dtype, bytes: &[u8]) -> Self {
        let whole = &bytes[..bytes.len() - bytes.len() % dtype.size_bytes()];
        match dtype {
            Dtype::F32 => Self::F32(bytemuck::pod_collect_to_vec(whole)),
            Dtype::F16 => Self::F16(bytemuck::pod_collect_to_vec(whole)),
            Dtype::Bf16 => Self::Bf16(bytemuck::pod_collect_to_vec(whole)),
        }
    }

    /// The element type.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.as_slice().dtype()
    }

    /// The elements, to read.
    #[must_use]
    pub fn as_slice(&self) -> HostSlice<'_> {
        match self {
            Self::F32(data) => HostSlice::F32(data),
            Self::F16(data) => HostSlice::F16(data),
            Self::Bf16(data) => HostSlice::Bf16(data),
        }
    }

    /// The elements, to write.
    pub fn as_slice_mut(&mut self) -> HostSliceMut<'_> {
        match self {
            Self::F32(data) => HostSliceMut::F32(data),
            Self::F16(data) => HostSliceMut::F16(data),
            Self::Bf16(data) => HostSliceMut::Bf16(data),
        }
    }

    /// The bytes, in the machine's order.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Self::F32(data) => bytemuck::must_cast_slice(data),
            Self::F16(data) => bytemuck::must_cast_slice(data),
            Self::Bf16(data) => bytemuck::must_cast_slice(data),
        }
    }
}

/// An owned activation `[rows, heads, dim]`, packed.
#[derive(Clone, Debug, PartialEq)]
pub struct Activation {
    elements: Elements,
    shape: [usize; 3],
}

impl Activation {
    /// Zeros.
    ///
    /// # Panics
    /// If the shape has more elements than memory can hold.
    #[must_use]
    pub fn zeroed(dtype: Dtype, shape: [usize; 3]) -> Self {
        let len = shape.iter().try_fold(1usize, |len, &n| len.checked_mul(n)).expect("the shape fits into memory");
        Self { elements: Elements::zeroed(dtype, len), shape }
    }

    /// Elements with their shape; `None` where the two do not fit.
    #[must_use]
    pub fn new(elements: Elements, shape: [usize; 3]) -> Option<Self> {
        let fits = HostTensor::packed(elements.as_slice(), shape).is_ok();
        fits.then_some(Self { elements, shape })
    }

    /// `[rows, heads, dim]`.
    #[must_use]
    pub const fn shape(&self) -> [usize; 3] {
        self.shape
    }

    /// The element type.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.elements.dtype()
    }

    /// The elements, rows first.
    #[must_use]
    pub const fn elements(&self) -> &Elements {
        &self.elements
    }

    /// A view to read.
    #[must_use]
    pub fn view(&self) -> HostTensor<'_> {
        HostTensor::packed(self.elements.as_slice(), self.shape).expect("the shape was checked when it was made")
    }

    /// A view to write.
    pub fn view_mut(&mut self) -> HostTensorMut<'_> {
        HostTensorMut::packed(self.elements.as_slice_mut(), self.shape).expect("the shape was checked when it was made")
    }
}

/// The bytes of LSEs, as f32 in natural log.
pub(crate) fn lse_bytes(lse: &[Lse]) -> &[u8] {
    bytemuck::cast_slice(lse)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_survive_their_bytes() {
        for dtype in Dtype::ALL {
            let elements = Elements::from_f32(dtype, vec![1.0, -0.5, 448.0]);
            assert_eq!(Elements::from_bytes(dtype, elements.as_bytes()), elements);
            assert_eq!(elements.dtype(), dtype);
        }
    }

    #[test]
    fn a_shape_that_does_not_fit_its_elements_is_refused() {
        assert!(Activation::new(Elements::F32(vec![0.0; 7]), [1, 2, 4]).is_none());
        assert!(Activation::new(Elements::F32(vec![0.0; 8]), [1, 2, 4]).is_some());
    }
}

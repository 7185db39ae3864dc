//! Owns [`Activation`]: an owned tensor `[rows, heads, dim]` with strides, and guard elements that nobody may write.
//! Everything outside the view, and a fresh output, holds a NaN of a known bit pattern.

use half::{bf16, f16};
use kvpool::{Dtype, HostTensor, HostTensorMut};

/// Guard elements before and after the view.
const GUARD: usize = 8;

/// How a tensor lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strides {
    /// Rows of heads without gaps.
    Packed,
    /// Rows of heads with gaps, as in a slice of a fused QKV tensor.
    Gapped,
    /// Heads of rows.
    HeadMajor,
}

#[derive(Clone, Debug)]
enum Elements {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

/// An owned strided tensor between guards.
#[derive(Clone, Debug)]
pub struct Activation {
    elements: Elements,
    shape: [usize; 3],
    row_stride: usize,
    head_stride: usize,
}

impl Activation {
    /// A tensor whose every element, and every guard, is the canary NaN.
    #[must_use]
    pub fn poisoned(dtype: Dtype, shape: [usize; 3], strides: Strides) -> Self {
        let [rows, heads, dim] = shape;
        let (row_stride, head_stride) = match strides {
            Strides::Packed => (heads * dim, dim),
            Strides::Gapped => (heads * (dim + 3) + 5, dim + 3),
            Strides::HeadMajor => (dim, rows * dim + 7),
        };
        let len = GUARD + rows * row_stride.max(dim) + heads * head_stride + GUARD;
        let elements = match dtype {
            Dtype::F32 => Elements::F32(vec![f32::from_bits(canary(dtype)); len]),
            Dtype::F16 => Elements::F16(vec![f16::from_bits(low_half(canary(dtype))); len]),
            Dtype::Bf16 => Elements::Bf16(vec![bf16::from_bits(low_half(canary(dtype))); len]),
        };
        Self { elements, shape, row_stride, head_stride }
    }

    /// The shape `[rows, heads, dim]`.
    #[must_use]
    pub const fn shape(&self) -> [usize; 3] {
        self.shape
    }

    /// The dtype.
    #[must_use]
    pub const fn dtype(&self) -> Dtype {
        match self.elements {
            Elements::F32(_) => Dtype::F32,
            Elements::F16(_) => Dtype::F16,
            Elements::Bf16(_) => Dtype::Bf16,
        }
    }

    /// A view to read.
    #[must_use]
    pub fn view(&self) -> HostTensor<'_> {
        let Self { shape, row_stride, head_stride, .. } = *self;
        let view = match &self.elements {
            Elements::F32(data) => HostTensor::strided(&data[GUARD..], shape, row_stride, head_stride),
            Elements::F16(data) => HostTensor::strided(&data[GUARD..], shape, row_stride, head_stride),
            Elements::Bf16(data) => HostTensor::strided(&data[GUARD..], shape, row_stride, head_stride),
        };
        view.expect("the data was sized for the view")
    }

    /// A view to write.
    #[must_use]
    pub fn view_mut(&mut self) -> HostTensorMut<'_> {
        let Self { shape, row_stride, head_stride, .. } = *self;
        let view = match &mut self.elements {
            Elements::F32(data) => HostTensorMut::strided(&mut data[GUARD..], shape, row_stride, head_stride),
            Elements::F16(data) => HostTensorMut::strided(&mut data[GUARD..], shape, row_stride, head_stride),
            Elements::Bf16(data) => HostTensorMut::strided(&mut data[GUARD..], shape, row_stride, head_stride),
        };
        view.expect("the data was sized for the view")
    }

    /// Bits of all elements in order of `[rows, heads, dim]`.
    #[must_use]
    pub fn bits(&self) -> Vec<u32> {
        self.positions().into_iter().map(|index| self.bits_at(index)).collect()
    }

    /// The first element outside the view that is not the canary any more.
    #[must_use]
    pub fn broken_guard(&self) -> Option<usize> {
        let mut inside = vec![false; self.len()];
        self.positions().into_iter().for_each(|index| inside[index] = true);
        (0..self.len()).find(|&index| !inside[index] && self.bits_at(index) != canary(self.dtype()))
    }

    const fn len(&self) -> usize {
        match &self.elements {
            Elements::F32(data) => data.len(),
            Elements::F16(data) => data.len(),
            Elements::Bf16(data) => data.len(),
        }
    }

    fn bits_at(&self, index: usize) -> u32 {
        match &self.elements {
            Elements::F32(data) => data[index].to_bits(),
            Elements::F16(data) => data[index].to_bits().into(),
            Elements::Bf16(data) => data[index].to_bits().into(),
        }
    }

    /// Index of every element, in order.
    fn positions(&self) -> Vec<usize> {
        let [rows, heads, dim] = self.shape;
        let states = (0..rows).flat_map(|row| (0..heads).map(move |head| (row, head)));
        let start = |(row, head)| GUARD + row * self.row_stride + head * self.head_stride;
        states.flat_map(|state| (0..dim).map(move |d| start(state) + d)).collect()
    }
}

/// The NaN that marks an element which nobody wrote.
#[must_use]
pub const fn canary(dtype: Dtype) -> u32 {
    match dtype {
        Dtype::F32 => 0x7fc1_b2c3,
        Dtype::F16 => 0x7e5a,
        Dtype::Bf16 => 0x7fda,
    }
}

/// A value from its bits.
#[must_use]
pub fn value(dtype: Dtype, bits: u32) -> f32 {
    match dtype {
        Dtype::F32 => f32::from_bits(bits),
        Dtype::F16 => f16::from_bits(low_half(bits)).to_f32(),
        Dtype::Bf16 => bf16::from_bits(low_half(bits)).to_f32(),
    }
}

fn low_half(bits: u32) -> u16 {
    u16::try_from(bits & 0xffff).expect("16 bits")
}

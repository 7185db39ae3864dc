//! Owns the elements of a KV cache in one of its dtypes ([`KvBuffer`]), views of them ([`KvSlice`], [`KvPlane`]) and the
//! conversions on the way in and out.
//! Invariant: conversion rounds to nearest even; FP8 saturates. Does not check slots or shapes; [`crate::HostKv`] does.

use std::ops::Range;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::elements::Elements;
use crate::error::ShapeError;
use crate::format::KvDtype;
use crate::fp8::{f32_to_fp8_e4m3, fp8_e4m3_to_f32};
use crate::ids::PageId;
use crate::layout::KvPlaneLayout;
use crate::slice::HostSlice;

/// The elements of one layer's KV cache.
#[derive(Debug, Clone, PartialEq)]
pub enum KvBuffer {
    /// Single precision.
    F32(Elements<f32>),
    /// Half precision.
    F16(Elements<f16>),
    /// bfloat16.
    Bf16(Elements<bf16>),
    /// FP8 E4M3 codes.
    Fp8E4m3(Elements<u8>),
    /// Bytes of latent rows.
    Fp8Latent(Elements<u8>),
}

impl KvBuffer {
    /// `len` zeros.
    ///
    /// # Panics
    /// Where [`KvBuffer::try_zeroed`] is an error.
    #[must_use]
    pub fn zeroed(dtype: KvDtype, len: usize) -> KvBuffer {
        KvBuffer::try_zeroed(dtype, len).expect("the machine has the memory that was asked for")
    }

    /// `len` zeros; the system may give the memory when it is first touched.
    ///
    /// # Errors
    /// [`ShapeError::OutOfMemory`].
    pub fn try_zeroed(dtype: KvDtype, len: usize) -> Result<KvBuffer, ShapeError> {
        let buffer = match dtype {
            KvDtype::F32 => Elements::try_zeroed(len).map(KvBuffer::F32),
            KvDtype::F16 => Elements::try_zeroed(len).map(KvBuffer::F16),
            KvDtype::Bf16 => Elements::try_zeroed(len).map(KvBuffer::Bf16),
            KvDtype::Fp8E4m3 => Elements::try_zeroed(len).map(KvBuffer::Fp8E4m3),
            KvDtype::Fp8Latent => Elements::try_zeroed(len).map(KvBuffer::Fp8Latent),
        };
        let bytes = (len as u64).saturating_mul(dtype.element_bytes() as u64);
        buffer.ok_or(ShapeError::OutOfMemory { what: "kv cache", bytes })
    }

    /// Elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.as_slice().len()
    }

    /// Whether there is no element.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The element type.
    #[must_use]
    pub fn dtype(&self) -> KvDtype {
        self.as_slice().dtype()
    }

    /// All elements, to read.
    #[must_use]
    pub fn as_slice(&self) -> KvSlice<'_> {
        match self {
            KvBuffer::F32(data) => KvSlice::F32(data),
            KvBuffer::F16(data) => KvSlice::F16(data),
            KvBuffer::Bf16(data) => KvSlice::Bf16(data),
            KvBuffer::Fp8E4m3(data) => KvSlice::Fp8E4m3(data),
            KvBuffer::Fp8Latent(data) => KvSlice::Fp8Latent(data),
        }
    }

    /// All elements, to write.
    pub fn as_slice_mut(&mut self) -> KvSliceMut<'_> {
        match self {
            KvBuffer::F32(data) => KvSliceMut::F32(data),
            KvBuffer::F16(data) => KvSliceMut::F16(data),
            KvBuffer::Bf16(data) => KvSliceMut::Bf16(data),
            KvBuffer::Fp8E4m3(data) => KvSliceMut::Fp8E4m3(data),
            KvBuffer::Fp8Latent(data) => KvSliceMut::Fp8Latent(data),
        }
    }

    /// Converts the vector `source[at..]` of a plane to the elements from `start` on: FP8 after a division by `scale`,
    /// rows after one by their own scales.
    pub(crate) fn write(&mut self, start: usize, source: HostSlice<'_>, at: usize, plane: &KvPlaneLayout, scale: f32) {
        let len = plane.head_dim;
        match (self, source) {
            (KvBuffer::F32(data), source) => widen(source, at, &mut data[start..start + len]),
            (KvBuffer::F16(data), HostSlice::F16(source)) => {
                data[start..start + len].copy_from_slice(&source[at..at + len]);
            }
            (KvBuffer::F16(data), HostSlice::F32(source)) => {
                data[start..start + len].convert_from_f32_slice(&source[at..at + len]);
            }
            (KvBuffer::F16(data), HostSlice::Bf16(source)) => {
                convert(&source[at..at + len], &mut data[start..start + len], |x| f16::from_f32(x.to_f32()));
            }
            (KvBuffer::Bf16(data), HostSlice::Bf16(source)) => {
                data[start..start + len].copy_from_slice(&source[at..at + len]);
            }
            (KvBuffer::Bf16(data), HostSlice::F32(source)) => {
                data[start..start + len].convert_from_f32_slice(&source[at..at + len]);
            }
            (KvBuffer::Bf16(data), HostSlice::F16(source)) => {
                convert(&source[at..at + len], &mut data[start..start + len], |x| bf16::from_f32(x.to_f32()));
            }
            (KvBuffer::Fp8Latent(data), source) => {
                let row = plane.row.expect("planes of rows were checked to have them");
                row.write(&mut data[start..start + row.bytes()], source, at);
            }
            (KvBuffer::Fp8E4m3(data), source) => {
                let data = &mut data[start..start + len];
                match source {
                    HostSlice::F32(source) => convert(&source[at..at + len], data, |x| f32_to_fp8_e4m3(x / scale)),
                    HostSlice::F16(source) => {
                        convert(&source[at..at + len], data, |x| f32_to_fp8_e4m3(x.to_f32() / scale));
                    }
                    HostSlice::Bf16(source) => {
                        convert(&source[at..at + len], data, |x| f32_to_fp8_e4m3(x.to_f32() / scale));
                    }
                }
            }
        }
    }

    /// Copies elements inside the buffer.
    pub(crate) fn copy_within(&mut self, source: Range<usize>, target: usize) {
        match self {
            KvBuffer::F32(data) => data.copy_within(source, target),
            KvBuffer::F16(data) => data.copy_within(source, target),
            KvBuffer::Bf16(data) => data.copy_within(source, target),
            KvBuffer::Fp8E4m3(data) | KvBuffer::Fp8Latent(data) => data.copy_within(source, target),
        }
    }

    /// Copies elements of another buffer of the same dtype.
    pub(crate) fn copy_from(&mut self, target: usize, source: &KvBuffer, range: Range<usize>) {
        let end = target + range.len();
        match (self, source) {
            (KvBuffer::F32(data), KvBuffer::F32(source)) => data[target..end].copy_from_slice(&source[range]),
            (KvBuffer::F16(data), KvBuffer::F16(source)) => data[target..end].copy_from_slice(&source[range]),
            (KvBuffer::Bf16(data), KvBuffer::Bf16(source)) => data[target..end].copy_from_slice(&source[range]),
            (KvBuffer::Fp8E4m3(data), KvBuffer::Fp8E4m3(source))
            | (KvBuffer::Fp8Latent(data), KvBuffer::Fp8Latent(source)) => {
                data[target..end].copy_from_slice(&source[range]);
            }
            (data, source) => unreachable!("{} was copied to {}", source.dtype(), data.dtype()),
        }
    }
}

fn widen(source: HostSlice<'_>, at: usize, out: &mut [f32]) {
    let range = at..at + out.len();
    match source {
        HostSlice::F32(source) => out.copy_from_slice(&source[range]),
        HostSlice::F16(source) => source[range].convert_to_f32_slice(out),
        HostSlice::Bf16(source) => source[range].convert_to_f32_slice(out),
    }
}

fn convert<A: Copy, B>(source: &[A], target: &mut [B], convert: impl Fn(A) -> B) {
    for (target, source) in target.iter_mut().zip(source) {
        *target = convert(*source);
    }
}

/// Borrowed elements of a KV cache.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum KvSlice<'a> {
    /// Single precision.
    F32(&'a [f32]),
    /// Half precision.
    F16(&'a [f16]),
    /// bfloat16.
    Bf16(&'a [bf16]),
    /// FP8 E4M3 codes.
    Fp8E4m3(&'a [u8]),
    /// Bytes of latent rows.
    Fp8Latent(&'a [u8]),
}

impl<'a> KvSlice<'a> {
    /// Elements.
    #[must_use]
    pub const fn len(&self) -> usize {
        match self {
            KvSlice::F32(data) => data.len(),
            KvSlice::F16(data) => data.len(),
            KvSlice::Bf16(data) => data.len(),
            KvSlice::Fp8E4m3(data) | KvSlice::Fp8Latent(data) => data.len(),
        }
    }

    /// Whether there is no element.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The element type.
    #[must_use]
    pub const fn dtype(&self) -> KvDtype {
        match self {
            KvSlice::F32(_) => KvDtype::F32,
            KvSlice::F16(_) => KvDtype::F16,
            KvSlice::Bf16(_) => KvDtype::Bf16,
            KvSlice::Fp8E4m3(_) => KvDtype::Fp8E4m3,
            KvSlice::Fp8Latent(_) => KvDtype::Fp8Latent,
        }
    }

    /// The bytes, in the machine's order.
    #[must_use]
    pub fn as_bytes(self) -> &'a [u8] {
        match self {
            KvSlice::F32(data) => bytemuck::must_cast_slice(data),
            KvSlice::F16(data) => bytemuck::must_cast_slice(data),
            KvSlice::Bf16(data) => bytemuck::must_cast_slice(data),
            KvSlice::Fp8E4m3(data) | KvSlice::Fp8Latent(data) => data,
        }
    }

    /// Widens the elements from `start` on into `out`, as stored (not scaled). Bytes of rows count as codes;
    /// [`KvPlane::read`] knows rows.
    ///
    /// # Panics
    /// Where `start + out.len()` is beyond the end.
    pub fn widen(self, start: usize, out: &mut [f32]) {
        match self {
            KvSlice::F32(data) => widen(HostSlice::F32(data), start, out),
            KvSlice::F16(data) => widen(HostSlice::F16(data), start, out),
            KvSlice::Bf16(data) => widen(HostSlice::Bf16(data), start, out),
            KvSlice::Fp8E4m3(data) | KvSlice::Fp8Latent(data) => {
                let end = start + out.len();
                convert(&data[start..end], out, fp8_e4m3_to_f32);
            }
        }
    }
}

/// Mutably borrowed elements of a KV cache.
#[derive(Debug)]
pub enum KvSliceMut<'a> {
    /// Single precision.
    F32(&'a mut [f32]),
    /// Half precision.
    F16(&'a mut [f16]),
    /// bfloat16.
    Bf16(&'a mut [bf16]),
    /// FP8 E4M3 codes.
    Fp8E4m3(&'a mut [u8]),
    /// Bytes of latent rows.
    Fp8Latent(&'a mut [u8]),
}

impl<'a> KvSliceMut<'a> {
    /// The bytes, in the machine's order: to load a file or to fill with poison.
    #[must_use]
    pub fn into_bytes(self) -> &'a mut [u8] {
        match self {
            KvSliceMut::F32(data) => bytemuck::must_cast_slice_mut(data),
            KvSliceMut::F16(data) => bytemuck::must_cast_slice_mut(data),
            KvSliceMut::Bf16(data) => bytemuck::must_cast_slice_mut(data),
            KvSliceMut::Fp8E4m3(data) | KvSliceMut::Fp8Latent(data) => data,
        }
    }
}

/// K or V of a layer: the elements of the whole layer, and where this plane lies in them.
#[derive(Debug, Clone, Copy)]
pub struct KvPlane<'a> {
    /// All elements of the layer.
    pub data: KvSlice<'a>,
    /// Where the plane lies.
    pub layout: KvPlaneLayout,
}

impl KvPlane<'_> {
    /// Widens the vector of (`page`, `token` in the page, `head`) into `out`, as stored: a format's scales are not
    /// applied, those in a row are.
    ///
    /// # Panics
    /// Where the vector is beyond the data, or `out` does not hold `head_dim` elements.
    pub fn read(&self, page: PageId, token: u32, head: u32, out: &mut [f32]) {
        assert_eq!(out.len(), self.layout.head_dim, "elements of the output and of a head vector");
        let start = self.layout.element(page, token, head);
        match (self.data, self.layout.row) {
            (KvSlice::Fp8Latent(data), Some(row)) => row.read(&data[start..start + row.bytes()], out),
            _ => self.data.widen(start, out),
        }
    }
}

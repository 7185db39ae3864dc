//! Owns views of device memory: activations `[rows, heads, dim]`, and LSEs.
//!
//! A view is an address with shape and strides. Memory may be ours ([`DeviceBuffer`]) or another library's: the unsafe
//! constructors take an address, and the caller promises what the compiler cannot see.

use std::marker::PhantomData;

use kvpool::{Dtype, OverlapDetail, ShapeError};

use super::buffer::DeviceBuffer;
use super::context::{Device, StreamId};
use super::error::DeviceError;

/// Shape and strides of a view, all in elements; unit stride in `dim`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Geometry {
    shape: [usize; 3],
    row_stride: usize,
    head_stride: usize,
}

impl Geometry {
    const fn packed(shape: [usize; 3]) -> Self {
        Self { shape, row_stride: shape[1].saturating_mul(shape[2]), head_stride: shape[2] }
    }

    /// Checks that `len` elements hold the view.
    fn require_len(&self, len: usize) -> Result<(), ShapeError> {
        let needed = self.extent().ok_or(ShapeError::Overflow { what: "tensor" })?;
        if needed > len { Err(ShapeError::OutOfBounds { what: "tensor", len, needed }) } else { Ok(()) }
    }

    fn extent(&self) -> Option<usize> {
        let [rows, heads, dim] = self.shape;
        if rows == 0 || heads == 0 || dim == 0 {
            return Some(0);
        }
        let row = (rows - 1).checked_mul(self.row_stride)?;
        row.checked_add((heads - 1).checked_mul(self.head_stride)?)?.checked_add(dim)
    }

    /// Rows of heads or heads of rows, each inner block ending before the next begins.
    fn require_disjoint(&self) -> Result<(), ShapeError> {
        let [rows, heads, dim] = self.shape;
        let nests = |outer: usize, outer_stride: usize, inner: usize, inner_stride: usize| {
            (inner <= 1 || inner_stride >= dim)
                && (outer <= 1 || outer_stride >= inner.saturating_sub(1).saturating_mul(inner_stride) + dim)
        };
        let Self { shape, row_stride, head_stride } = *self;
        if nests(rows, row_stride, heads, head_stride) || nests(heads, head_stride, rows, row_stride) {
            return Ok(());
        }
        let detail = OverlapDetail::Strides { shape, row_stride, head_stride };
        Err(ShapeError::Overlap { what: "tensor", detail })
    }
}

macro_rules! activation_view {
    ($(#[$doc:meta])* $name:ident, $buffer:ty, $disjoint:expr) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name<'a> {
            address: u64,
            dtype: Dtype,
            geometry: Geometry,
            /// Whose stream frees the memory; `None`: another library's.
            owner: Option<StreamId>,
            memory: PhantomData<$buffer>,
        }

        impl<'a> $name<'a> {
            /// A view without gaps that begins `at` bytes into a buffer.
            ///
            /// # Errors
            /// [`ShapeError::OutOfBounds`], [`ShapeError::Overflow`].
            pub fn packed(buffer: $buffer, at: usize, dtype: Dtype, shape: [usize; 3]) -> Result<Self, ShapeError> {
                let Geometry { row_stride, head_stride, .. } = Geometry::packed(shape);
                Self::strided(buffer, at, dtype, shape, row_stride, head_stride)
            }

            /// A view with strides in elements that begins `at` bytes into a buffer.
            ///
            /// # Errors
            /// [`ShapeError::OutOfBounds`], [`ShapeError::Overlap`] where it is to be written, [`ShapeError::Overflow`].
            pub fn strided(
                buffer: $buffer,
                at: usize,
                dtype: Dtype,
                shape: [usize; 3],
                row_stride: usize,
                head_stride: usize,
            ) -> Result<Self, ShapeError> {
                let geometry = Geometry { shape, row_stride, head_stride };
                geometry.require_len(buffer.len().saturating_sub(at) / dtype.size_bytes())?;
                if $disjoint {
                    geometry.require_disjoint()?;
                }
                let address = buffer.address() + at as u64;
                let owner = Some(buffer.device().stream_id());
                Ok(Self { address, dtype, geometry, owner, memory: PhantomData })
            }

            /// A view of memory that another library owns.
            ///
            /// # Safety
            /// The memory holds the view, lives for `'a`, is of the context of the device that it will be used on, and
            /// whoever else uses it is ordered with that device's stream. A writable view shares no memory.
            #[must_use]
            pub const unsafe fn from_raw(
                address: u64,
                dtype: Dtype,
                shape: [usize; 3],
                row_stride: usize,
                head_stride: usize,
            ) -> Self {
                let geometry = Geometry { shape, row_stride, head_stride };
                Self { address, dtype, geometry, owner: None, memory: PhantomData }
            }

            /// Where it begins.
            #[must_use]
            pub const fn address(&self) -> u64 {
                self.address
            }

            /// The element type.
            #[must_use]
            pub const fn dtype(&self) -> Dtype {
                self.dtype
            }

            /// The shape, `[rows, heads, dim]`.
            #[must_use]
            pub const fn shape(&self) -> [usize; 3] {
                self.geometry.shape
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

            /// Checks that kernels of a device can use it: memory of ours is of its stream, and can be read in vectors.
            pub(crate) fn require_usable(&self, what: &'static str, device: &Device) -> Result<(), DeviceError> {
                require_owner(what, self.owner, device.stream_id())?;
                self.require_aligned(what)
            }

            /// Checks that kernels can read it in vectors.
            pub(crate) fn require_aligned(&self, what: &'static str) -> Result<(), DeviceError> {
                let [rows, heads, _] = self.shape();
                let bytes = self.dtype.size_bytes();
                require_aligned(what, self.address)?;
                require_aligned(what, if rows > 1 { (self.row_stride() * bytes) as u64 } else { 0 })?;
                require_aligned(what, if heads > 1 { (self.head_stride() * bytes) as u64 } else { 0 })
            }
        }
    };
}

activation_view! {
    /// A read-only view `[rows, heads, dim]` of device memory: unit stride in `dim`, any strides else.
    CudaTensor, &'a DeviceBuffer, false
}
activation_view! {
    /// A view `[rows, heads, dim]` of device memory to write: as [`CudaTensor`], and no two positions are the same.
    CudaTensorMut, &'a mut DeviceBuffer, true
}

impl Clone for CudaTensor<'_> {
    fn clone(&self) -> Self {
        *self
    }
}

impl Copy for CudaTensor<'_> {}

impl CudaTensor<'_> {
    /// The same view for a shorter time.
    pub(crate) const fn shorten(&self) -> CudaTensor<'_> {
        let Self { address, dtype, geometry, owner, .. } = *self;
        CudaTensor { address, dtype, geometry, owner, memory: PhantomData }
    }
}

impl CudaTensorMut<'_> {
    /// The same view for a shorter time.
    pub(crate) const fn reborrow(&mut self) -> CudaTensorMut<'_> {
        let Self { address, dtype, geometry, owner, .. } = *self;
        CudaTensorMut { address, dtype, geometry, owner, memory: PhantomData }
    }
}

/// Where `len` values begin that lie `at` bytes into a buffer.
fn lse_address(buffer: &DeviceBuffer, at: usize, len: usize) -> Result<u64, ShapeError> {
    let there = buffer.len().saturating_sub(at) / size_of::<f32>();
    if len > there {
        return Err(ShapeError::OutOfBounds { what: "lse", len: there, needed: len });
    }
    Ok(buffer.address() + at as u64)
}

/// An LSE to write: f32 `[rows, num_qo_heads]`, natural logarithm.
#[derive(Debug)]
pub struct CudaLseMut<'a> {
    address: u64,
    len: usize,
    /// Whose stream frees the memory; `None`: another library's.
    owner: Option<StreamId>,
    memory: PhantomData<&'a mut DeviceBuffer>,
}

impl<'a> CudaLseMut<'a> {
    /// `len` values that begin `at` bytes into a buffer.
    ///
    /// # Errors
    /// [`ShapeError::OutOfBounds`].
    pub fn new(buffer: &'a mut DeviceBuffer, at: usize, len: usize) -> Result<Self, ShapeError> {
        let owner = Some(buffer.device().stream_id());
        Ok(Self { address: lse_address(buffer, at, len)?, len, owner, memory: PhantomData })
    }

    /// Values in memory that another library owns.
    ///
    /// # Safety
    /// As [`CudaTensorMut::from_raw`].
    #[must_use]
    pub const unsafe fn from_raw(address: u64, len: usize) -> Self {
        Self { address, len, owner: None, memory: PhantomData }
    }

    /// Where it begins.
    #[must_use]
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Values.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no value.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Checks that kernels of a device can write its values: memory of ours is of its stream, and values lie whole.
    pub(crate) fn require_usable(&self, what: &'static str, device: &Device) -> Result<(), DeviceError> {
        require_owner(what, self.owner, device.stream_id())?;
        require_multiple(what, self.address, LSE_BYTES)
    }

    /// The same view for a shorter time.
    pub(crate) const fn reborrow(&mut self) -> CudaLseMut<'_> {
        CudaLseMut { address: self.address, len: self.len, owner: self.owner, memory: PhantomData }
    }
}

/// An LSE to read: f32 `[rows, num_qo_heads]`, natural logarithm.
#[derive(Clone, Copy, Debug)]
pub struct CudaLse<'a> {
    address: u64,
    len: usize,
    /// Whose stream frees the memory; `None`: another library's.
    owner: Option<StreamId>,
    memory: PhantomData<&'a DeviceBuffer>,
}

impl<'a> CudaLse<'a> {
    /// `len` values that begin `at` bytes into a buffer.
    ///
    /// # Errors
    /// [`ShapeError::OutOfBounds`].
    pub fn new(buffer: &'a DeviceBuffer, at: usize, len: usize) -> Result<Self, ShapeError> {
        let owner = Some(buffer.device().stream_id());
        Ok(Self { address: lse_address(buffer, at, len)?, len, owner, memory: PhantomData })
    }

    /// Values in memory that another library owns.
    ///
    /// # Safety
    /// As [`CudaTensor::from_raw`].
    #[must_use]
    pub const unsafe fn from_raw(address: u64, len: usize) -> Self {
        Self { address, len, owner: None, memory: PhantomData }
    }

    /// Where it begins.
    #[must_use]
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Values.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no value.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Checks that kernels of a device can read its values: memory of ours is of its stream, and values lie whole.
    pub(crate) fn require_usable(&self, what: &'static str, device: &Device) -> Result<(), DeviceError> {
        require_owner(what, self.owner, device.stream_id())?;
        require_multiple(what, self.address, LSE_BYTES)
    }
}

/// Bytes that kernels read and write at once.
const VECTOR_BYTES: u64 = 16;

/// Bytes of one value of an LSE: kernels read and write them whole.
const LSE_BYTES: u64 = size_of::<f32>() as u64;

/// Checks that memory of ours is used on the stream that frees it, which alone orders the release after the use.
pub(super) fn require_owner(what: &'static str, owner: Option<StreamId>, user: StreamId) -> Result<(), DeviceError> {
    if owner.is_none_or(|owner| owner == user) { Ok(()) } else { Err(DeviceError::OtherStream { what }) }
}

/// Checks an address or a step that kernels read in vectors.
pub(super) fn require_aligned(what: &'static str, bytes: u64) -> Result<(), DeviceError> {
    require_multiple(what, bytes, VECTOR_BYTES)
}

fn require_multiple(what: &'static str, bytes: u64, needed: u64) -> Result<(), DeviceError> {
    match bytes % needed {
        0 => Ok(()),
        got => Err(DeviceError::Alignment { what, got, needed }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(address: u64, shape: [usize; 3], row: usize, head: usize) -> CudaTensor<'static> {
        // SAFETY: the view is only asked for its geometry.
        unsafe { CudaTensor::from_raw(address, Dtype::Bf16, shape, row, head) }
    }

    #[test]
    fn vectors_need_aligned_addresses_and_strides() {
        assert!(tensor(4096, [2, 3, 64], 192, 64).require_aligned("q").is_ok());
        let error = tensor(4104, [2, 3, 64], 192, 64).require_aligned("q").unwrap_err();
        assert_eq!(error, DeviceError::Alignment { what: "q", got: 8, needed: 16 });
        assert!(tensor(4096, [2, 3, 64], 193, 64).require_aligned("q").is_err());
        assert!(tensor(4096, [2, 3, 64], 200, 67).require_aligned("q").is_err());
        assert!(tensor(4096, [1, 1, 64], 193, 67).require_aligned("q").is_ok(), "strides that are not used");
    }

    #[test]
    fn values_of_an_lse_are_aligned() {
        assert!(require_multiple("lse", 4100, LSE_BYTES).is_ok());
        let error = require_multiple("lse", 4097, LSE_BYTES).unwrap_err();
        assert_eq!(error, DeviceError::Alignment { what: "lse", got: 1, needed: 4 });
    }

    #[test]
    fn memory_of_another_stream_is_refused_and_another_librarys_is_not() {
        let [this, other] = [StreamId::of_test(1), StreamId::of_test(2)];
        assert!(require_owner("q", Some(this), this).is_ok() && require_owner("q", None, this).is_ok());
        let error = require_owner("q", Some(other), this).unwrap_err();
        assert_eq!(error, DeviceError::OtherStream { what: "q" });
    }

    #[test]
    fn views_that_do_not_fit_or_overlap_are_refused() {
        let geometry = |shape, row_stride, head_stride| Geometry { shape, row_stride, head_stride };
        assert!(geometry([3, 2, 4], 8, 4).require_len(24).is_ok());
        assert!(geometry([3, 2, 4], 8, 4).require_len(23).is_err());
        assert!(geometry([usize::MAX, 2, 4], usize::MAX, 4).require_len(24).is_err());
        assert!(geometry([0, 2, 4], usize::MAX, 4).require_len(0).is_ok());
        assert!(geometry([3, 2, 4], 4, 12).require_disjoint().is_ok());
        assert!(geometry([3, 2, 4], 7, 4).require_disjoint().is_err());
        assert!(geometry([3, 2, 4], 0, 4).require_disjoint().is_err());
    }
}

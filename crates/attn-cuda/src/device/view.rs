//! Owns views of device memory: activations `[rows, heads, dim]`, LSEs, and one layer's KV pages.
//!
//! A view is an address with shape and strides. Memory may be ours ([`DeviceBuffer`]) or another library's: the unsafe
//! constructors take an address, and the caller promises what the compiler cannot see.

use std::marker::PhantomData;

use kvpool::{
    Dtype, HostKv, KvFormat, KvLayout, KvPlaneLayout, KvShape, KvSpec, OverlapDetail, PageSize, ShapeError, Values,
};

use super::buffer::DeviceBuffer;
use super::context::Device;
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
                Ok(Self { address, dtype, geometry, memory: PhantomData })
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
                Self { address, dtype, geometry: Geometry { shape, row_stride, head_stride }, memory: PhantomData }
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
        let Self { address, dtype, geometry, .. } = *self;
        CudaTensor { address, dtype, geometry, memory: PhantomData }
    }
}

impl CudaTensorMut<'_> {
    /// The same view for a shorter time.
    pub(crate) const fn reborrow(&mut self) -> CudaTensorMut<'_> {
        let Self { address, dtype, geometry, .. } = *self;
        CudaTensorMut { address, dtype, geometry, memory: PhantomData }
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
    memory: PhantomData<&'a mut DeviceBuffer>,
}

impl<'a> CudaLseMut<'a> {
    /// `len` values that begin `at` bytes into a buffer.
    ///
    /// # Errors
    /// [`ShapeError::OutOfBounds`].
    pub fn new(buffer: &'a mut DeviceBuffer, at: usize, len: usize) -> Result<Self, ShapeError> {
        Ok(Self { address: lse_address(buffer, at, len)?, len, memory: PhantomData })
    }

    /// Values in memory that another library owns.
    ///
    /// # Safety
    /// As [`CudaTensorMut::from_raw`].
    #[must_use]
    pub const unsafe fn from_raw(address: u64, len: usize) -> Self {
        Self { address, len, memory: PhantomData }
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

    /// The same view for a shorter time.
    pub(crate) const fn reborrow(&mut self) -> CudaLseMut<'_> {
        CudaLseMut { address: self.address, len: self.len, memory: PhantomData }
    }
}

/// An LSE to read: f32 `[rows, num_qo_heads]`, natural logarithm.
#[derive(Clone, Copy, Debug)]
pub struct CudaLse<'a> {
    address: u64,
    len: usize,
    memory: PhantomData<&'a DeviceBuffer>,
}

impl<'a> CudaLse<'a> {
    /// `len` values that begin `at` bytes into a buffer.
    ///
    /// # Errors
    /// [`ShapeError::OutOfBounds`].
    pub fn new(buffer: &'a DeviceBuffer, at: usize, len: usize) -> Result<Self, ShapeError> {
        Ok(Self { address: lse_address(buffer, at, len)?, len, memory: PhantomData })
    }

    /// Values in memory that another library owns.
    ///
    /// # Safety
    /// As [`CudaTensor::from_raw`].
    #[must_use]
    pub const unsafe fn from_raw(address: u64, len: usize) -> Self {
        Self { address, len, memory: PhantomData }
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
}

/// One layer's KV pages on a device: one buffer, two planes, offsets by the layout types of `kvpool`.
#[derive(Debug)]
pub struct CudaKv {
    address: u64,
    /// `None`: another library's memory.
    buffer: Option<DeviceBuffer>,
    shape: KvShape,
    values: Values,
    format: KvFormat,
    k: KvPlaneLayout,
    v: KvPlaneLayout,
}

impl CudaKv {
    /// Zeroed pages with all of K before all of V.
    ///
    /// # Errors
    /// [`CudaKvError`].
    pub fn new(device: &Device, shape: KvShape, layout: KvLayout, format: KvFormat) -> Result<Self, CudaKvError> {
        Self::zeroed(device, shape, format, shape.packed_planes(layout)?)
    }

    /// Zeroed pages for what a layer keeps of a token.
    ///
    /// # Errors
    /// [`CudaKvError`]; values in the keys need one scale for both and no more columns than a key has.
    pub fn for_spec(
        device: &Device,
        spec: KvSpec,
        num_pages: u32,
        page_size: PageSize,
        layout: KvLayout,
        format: KvFormat,
    ) -> Result<Self, CudaKvError> {
        let shape = spec.shape(num_pages, page_size);
        let Values::InKeys(width) = spec.values else { return Self::new(device, shape, layout, format) };
        let (k_scale, v_scale) = (format.k_scale(), format.v_scale());
        if k_scale.to_bits() != v_scale.to_bits() {
            return Err(ShapeError::SharedScales { k_scale, v_scale }.into());
        }
        if width > spec.head_dim_k {
            let (end, head_dim_k) = (width as usize, spec.head_dim_k as usize);
            return Err(ShapeError::SharedColumns { v_column: 0, end, head_dim_k }.into());
        }
        let [k, _] = shape.packed_planes(layout)?;
        let v = KvPlaneLayout { head_dim: width as usize, ..k };
        Ok(Self { values: spec.values, ..Self::zeroed(device, shape, format, [k, v])? })
    }

    /// Zeroed pages with K and V of a page next to each other.
    ///
    /// # Errors
    /// [`CudaKvError`].
    pub fn interleaved(
        device: &Device,
        shape: KvShape,
        layout: KvLayout,
        format: KvFormat,
    ) -> Result<Self, CudaKvError> {
        Self::zeroed(device, shape, format, shape.interleaved_planes(layout)?)
    }

    /// A copy of host pages, with their strides.
    ///
    /// # Errors
    /// [`CudaKvError`].
    pub fn from_host(device: &Device, host: &HostKv) -> Result<Self, CudaKvError> {
        let bytes = host.buffer().as_slice().as_bytes();
        let buffer = DeviceBuffer::from_bytes(device, bytes, "kv cache")?;
        let (k, v) = (host.k().layout, host.v().layout);
        let (shape, values, format) = (host.shape(), host.spec().values, host.format());
        Ok(Self { address: buffer.address(), buffer: Some(buffer), shape, values, format, k, v })
    }

    /// Pages in memory that another library owns.
    ///
    /// # Safety
    /// As [`CudaTensorMut::from_raw`] for the whole life of the value; `len` is the number of elements from `address`
    /// on, and no two positions of the two planes are the same element, but where V is the first columns of K.
    ///
    /// # Errors
    /// [`ShapeError::OutOfBounds`] where a plane reaches beyond `len`, [`ShapeError::HeadDim`], and as
    /// [`KvShape::validate`].
    pub unsafe fn from_raw(
        address: u64,
        len: usize,
        shape: KvShape,
        format: KvFormat,
        k: KvPlaneLayout,
        v: KvPlaneLayout,
    ) -> Result<Self, ShapeError> {
        shape.validate()?;
        let parts = [(kvpool::KvPart::K, k, shape.head_dim_k), (kvpool::KvPart::V, v, shape.head_dim_v)];
        for (part, plane, head_dim) in parts {
            if plane.head_dim != head_dim as usize {
                let (got, expected) = (plane.head_dim, head_dim as usize);
                return Err(ShapeError::HeadDim { part, got, expected });
            }
            let needed = plane.extent(&shape).ok_or(ShapeError::Overflow { what: "kv cache" })?;
            if needed > len {
                return Err(ShapeError::OutOfBounds { what: "kv cache", len, needed });
            }
        }
        let columns = KvPlaneLayout { head_dim: v.head_dim, ..k };
        let values = match shape.head_dim_v {
            0 => Values::None,
            dim if v == columns => Values::InKeys(dim),
            dim => Values::Own(dim),
        };
        Ok(Self { address, buffer: None, shape, values, format, k, v })
    }

    fn zeroed(
        device: &Device,
        shape: KvShape,
        format: KvFormat,
        planes: [KvPlaneLayout; 2],
    ) -> Result<Self, CudaKvError> {
        let extents = planes.map(|plane| plane.extent(&shape));
        let len = extents.into_iter().flatten().max().ok_or(ShapeError::Overflow { what: "kv cache" })?;
        let bytes = len.checked_mul(format.dtype().element_bytes()).ok_or(ShapeError::Overflow { what: "kv cache" })?;
        let buffer = DeviceBuffer::zeroed(device, bytes, "kv cache")?;
        let [k, v] = planes;
        let values = if shape.head_dim_v == 0 { Values::None } else { Values::Own(shape.head_dim_v) };
        Ok(Self { address: buffer.address(), buffer: Some(buffer), shape, values, format, k, v })
    }

    /// What it keeps of a token.
    #[must_use]
    pub const fn spec(&self) -> KvSpec {
        let KvShape { num_kv_heads, head_dim_k, .. } = self.shape;
        KvSpec { num_kv_heads, head_dim_k, values: self.values }
    }

    /// The shape.
    #[must_use]
    pub const fn shape(&self) -> KvShape {
        self.shape
    }

    /// Dtype and scales.
    #[must_use]
    pub const fn format(&self) -> KvFormat {
        self.format
    }

    /// Where K lies in the buffer.
    #[must_use]
    pub const fn k(&self) -> KvPlaneLayout {
        self.k
    }

    /// Where V lies in the buffer.
    #[must_use]
    pub const fn v(&self) -> KvPlaneLayout {
        self.v
    }

    /// Address of the first element of a plane.
    #[must_use]
    pub fn plane_address(&self, plane: &KvPlaneLayout) -> u64 {
        self.address + (plane.offset * self.format.dtype().element_bytes()) as u64
    }

    /// The memory, where it is ours.
    #[must_use]
    pub const fn buffer(&self) -> Option<&DeviceBuffer> {
        self.buffer.as_ref()
    }

    /// The memory to write, where it is ours.
    pub const fn buffer_mut(&mut self) -> Option<&mut DeviceBuffer> {
        self.buffer.as_mut()
    }

    /// Checks that kernels can read both planes in vectors.
    pub(crate) fn require_aligned(&self) -> Result<(), DeviceError> {
        let bytes = self.format.dtype().element_bytes();
        for (what, plane) in [("a cache's K", self.k), ("a cache's V", self.v)] {
            let strides = plane.strides;
            require_aligned(what, self.plane_address(&plane))?;
            for stride in [strides.page, strides.token, strides.head] {
                require_aligned(what, (stride * bytes) as u64)?;
            }
            if let Some(&got) = [strides.page, strides.token].iter().find(|stride| **stride > MAX_STRIDE) {
                return Err(DeviceError::Stride { what, got, max: MAX_STRIDE });
            }
        }
        Ok(())
    }
}

/// KV pages that cannot be made.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaKvError {
    /// The shape is not legal.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The device does not give the memory.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Elements from a page or token to the next that kernels can step by.
const MAX_STRIDE: usize = i32::MAX.unsigned_abs() as usize;

/// Bytes that kernels read and write at once.
const VECTOR_BYTES: u64 = 16;

fn require_aligned(what: &'static str, bytes: u64) -> Result<(), DeviceError> {
    match bytes % VECTOR_BYTES {
        0 => Ok(()),
        got => Err(DeviceError::Alignment { what, got, needed: VECTOR_BYTES }),
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

    #[test]
    fn pages_of_another_library_are_checked_against_their_length() {
        let page_size = kvpool::PageSize::new(16).unwrap();
        let shape = KvShape { num_pages: 4, page_size, num_kv_heads: 2, head_dim_k: 64, head_dim_v: 64 };
        let [k, v] = shape.packed_planes(KvLayout::Nhd).unwrap();
        let len = 2 * 4 * 16 * 2 * 64;
        // SAFETY: the address is not used, only the layout is checked.
        let fits = unsafe { CudaKv::from_raw(4096, len, shape, KvFormat::Bf16, k, v) };
        assert_eq!(fits.unwrap().plane_address(&v), 4096 + len as u64);
        // SAFETY: as above.
        let short = unsafe { CudaKv::from_raw(4096, len - 1, shape, KvFormat::Bf16, k, v) };
        assert!(matches!(short, Err(ShapeError::OutOfBounds { .. })));
    }
}

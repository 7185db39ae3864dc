//! Owns [`CudaKv`]: one layer's KV pages on a device, ours or another library's.

use kvpool::{HostKv, KvFormat, KvLayout, KvPlaneLayout, KvShape, KvSpec, PageSize, ShapeError, Values};

use super::buffer::DeviceBuffer;
use super::context::Device;
use super::error::DeviceError;
use super::view::{require_aligned, require_owner};

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
        require_shared(&shape, format)?;
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
        let mut kv = Self::like_host(device, host)?;
        kv.upload(0, bytes)?;
        Ok(kv)
    }

    /// Pages of anything with the strides of host pages.
    pub(crate) fn like_host(device: &Device, host: &HostKv) -> Result<Self, DeviceError> {
        let len = host.buffer().as_slice().as_bytes().len();
        let buffer = DeviceBuffer::new(device, len, "kv cache")?;
        let (k, v) = (host.k().layout, host.v().layout);
        let (shape, values, format) = (host.shape(), host.spec().values, host.format());
        Ok(Self { address: buffer.address(), buffer: Some(buffer), shape, values, format, k, v })
    }

    /// The same pages, where values in the keys begin at another of their columns; all of them lie in a key.
    pub(crate) fn with_value_column(mut self, column: usize) -> Self {
        assert!(matches!(self.values, Values::InKeys(_)) && column + self.v.head_dim <= self.k.head_dim);
        self.v.offset = self.k.offset + column;
        self
    }

    /// Pages in memory that another library owns.
    ///
    /// # Safety
    /// As [`CudaTensorMut::from_raw`](super::CudaTensorMut::from_raw) for the whole life of the value; `len` is the number
    /// of elements from `address` on, and no two positions of the two planes are the same element, but where V is the first
    /// columns of K.
    ///
    /// # Errors
    /// [`ShapeError::OutOfBounds`] where a plane reaches beyond `len`, [`ShapeError::HeadDim`], and as
    /// [`KvShape::validate`]; where V is the first columns of K, [`ShapeError::SharedScales`] and
    /// [`ShapeError::SharedColumns`] as for [`for_spec`](Self::for_spec).
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
        if matches!(values, Values::InKeys(_)) {
            require_shared(&shape, format)?;
        }
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

    /// Copies host bytes to `at`, counted from the first byte of the pages' memory, and waits until they are there.
    ///
    /// # Errors
    /// [`DeviceError::OutOfBounds`], also for memory that another library owns, which is no byte of ours;
    /// [`DeviceError::Driver`].
    pub fn upload(&mut self, at: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        match &mut self.buffer {
            Some(buffer) => buffer.upload(at, bytes),
            None => Err(not_ours("an upload to pages", at, bytes.len())),
        }
    }

    /// Copies `len` bytes of a buffer to `at`, counted from the first byte of the pages' memory, in stream order.
    ///
    /// # Errors
    /// As [`upload`](Self::upload), and [`DeviceError::OutOfBounds`] where the source ends before.
    pub fn copy_from(&mut self, at: usize, source: &DeviceBuffer, from: usize, len: usize) -> Result<(), DeviceError> {
        match &mut self.buffer {
            Some(buffer) => buffer.copy_from(at, source, from, len),
            None => Err(not_ours("a copy to pages", at, len)),
        }
    }

    /// Sets every byte of the pages' memory, gaps included, in stream order.
    ///
    /// # Errors
    /// As [`upload`](Self::upload).
    pub fn fill(&mut self, byte: u8) -> Result<(), DeviceError> {
        match &mut self.buffer {
            Some(buffer) => buffer.fill(byte),
            None => Err(not_ours("filling pages", 0, 1)),
        }
    }

    /// Checks that kernels of a device can use it: memory of ours is of its stream, and both planes can be read in vectors.
    pub(crate) fn require_usable(&self, device: &Device) -> Result<(), DeviceError> {
        require_owner("a cache", self.buffer.as_ref().map(|buffer| buffer.device().stream_id()), device.stream_id())?;
        self.require_aligned()
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

/// Checks that values can be columns of the keys: as wide at most, with the same scale.
fn require_shared(shape: &KvShape, format: KvFormat) -> Result<(), ShapeError> {
    let (k_scale, v_scale) = (format.k_scale(), format.v_scale());
    if k_scale.to_bits() != v_scale.to_bits() {
        return Err(ShapeError::SharedScales { k_scale, v_scale });
    }
    if shape.head_dim_v > shape.head_dim_k {
        let (end, head_dim_k) = (shape.head_dim_v as usize, shape.head_dim_k as usize);
        return Err(ShapeError::SharedColumns { v_column: 0, end, head_dim_k });
    }
    Ok(())
}

/// Memory of another library has no byte that is ours to write.
const fn not_ours(what: &'static str, begin: usize, len: usize) -> DeviceError {
    DeviceError::OutOfBounds { what, begin, end: begin.saturating_add(len), len: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn values_in_the_keys_of_another_library_have_the_scale_of_the_keys() {
        let page_size = PageSize::new(16).unwrap();
        let shape = KvShape { num_pages: 4, page_size, num_kv_heads: 1, head_dim_k: 64, head_dim_v: 32 };
        let [k, _] = shape.packed_planes(KvLayout::Nhd).unwrap();
        let v = KvPlaneLayout { head_dim: 32, ..k };
        let of = |shape, format, v| {
            // SAFETY: the address is not used, only the layout is checked.
            unsafe { CudaKv::from_raw(4096, 4 * 16 * 64, shape, format, k, v) }
        };
        let scaled = |k, v| KvFormat::Fp8E4m3(kvpool::KvScales::new(k, v).unwrap());
        assert_eq!(of(shape, scaled(0.5, 0.5), v).unwrap().spec().values, Values::InKeys(32));
        let shifted = of(shape, scaled(0.5, 0.5), v).unwrap().with_value_column(16);
        assert_eq!(shifted.v().offset, k.offset + 16);
        assert_eq!(shifted.plane_address(&shifted.v()), 4096 + 16);
        let error = of(shape, scaled(0.5, 0.25), v).unwrap_err();
        assert_eq!(error, ShapeError::SharedScales { k_scale: 0.5, v_scale: 0.25 });
        let wide = KvPlaneLayout { head_dim: 48, ..k };
        let narrow_keys = KvShape { head_dim_v: 48, ..shape };
        assert!(of(narrow_keys, scaled(0.5, 0.5), wide).is_ok());
        assert_eq!(require_shared(&KvShape { head_dim_v: 65, ..shape }, KvFormat::Bf16).unwrap_err(), {
            ShapeError::SharedColumns { v_column: 0, end: 65, head_dim_k: 64 }
        });
    }

    #[test]
    fn memory_of_another_library_is_not_written_by_the_host() {
        let page_size = PageSize::new(16).unwrap();
        let shape = KvShape { num_pages: 1, page_size, num_kv_heads: 1, head_dim_k: 16, head_dim_v: 16 };
        let [k, v] = shape.packed_planes(KvLayout::Nhd).unwrap();
        // SAFETY: the address is not used: both calls are refused.
        let mut kv = unsafe { CudaKv::from_raw(4096, 512, shape, KvFormat::Bf16, k, v) }.unwrap();
        assert!(matches!(kv.upload(8, &[1, 2]), Err(DeviceError::OutOfBounds { begin: 8, end: 10, len: 0, .. })));
        assert!(matches!(kv.fill(0), Err(DeviceError::OutOfBounds { len: 0, .. })));
    }
}

//! Owns [`DeviceBuffer`]: device memory that is freed in the order of its device's stream.

use cudarc::driver::{CudaSlice, DevicePtr, sys};

use super::context::Device;
use super::error::{DeviceError, DriverCode, check, failed};
use super::view::require_owner;

/// Bytes on a device. Aligned to at least 256 bytes where it was allocated here.
///
/// Do not drop one while its stream is being captured: the release would become part of the graph.
#[derive(Debug)]
pub struct DeviceBuffer {
    device: Device,
    /// `None`: of length 0, which the driver need not be asked for.
    slice: Option<CudaSlice<u8>>,
    address: u64,
    len: usize,
}

impl DeviceBuffer {
    /// `len` bytes of anything.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn new(device: &Device, len: usize, what: &'static str) -> Result<Self, DeviceError> {
        if len == 0 {
            return Ok(Self { device: device.clone(), slice: None, address: 0, len: 0 });
        }
        device.bind()?;
        // SAFETY: the memory is not read before it is written: kernels write whole outputs, copies whole ranges.
        let slice = unsafe { device.stream().alloc::<u8>(len) };
        let slice = slice.map_err(|e| out_of_memory(what, len, e.into()))?;
        Ok(Self::of_slice(device, slice))
    }

    /// `len` zero bytes.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`], [`DeviceError::Driver`].
    pub fn zeroed(device: &Device, len: usize, what: &'static str) -> Result<Self, DeviceError> {
        let mut buffer = Self::new(device, len, what)?;
        buffer.fill(0)?;
        Ok(buffer)
    }

    /// A copy of host bytes. Waits until they are there.
    ///
    /// # Errors
    /// As [`new`](Self::new) and [`upload`](Self::upload).
    pub fn from_bytes(device: &Device, bytes: &[u8], what: &'static str) -> Result<Self, DeviceError> {
        let mut buffer = Self::new(device, bytes.len(), what)?;
        buffer.upload(0, bytes)?;
        Ok(buffer)
    }

    /// Memory that cudarc allocated, of the device's context.
    #[must_use]
    pub fn of_slice(device: &Device, slice: CudaSlice<u8>) -> Self {
        let len = slice.len();
        let address = slice.device_ptr(device.stream()).0;
        Self { device: device.clone(), slice: Some(slice), address, len }
    }

    /// Bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no byte.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device that it is on.
    #[must_use]
    pub const fn device(&self) -> &Device {
        &self.device
    }

    /// The memory as cudarc knows it; `None` where it is empty.
    #[must_use]
    pub const fn as_slice(&self) -> Option<&CudaSlice<u8>> {
        self.slice.as_ref()
    }

    /// Where it begins; 0 where it is empty.
    #[must_use]
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Sets every byte, in stream order.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub fn fill(&mut self, byte: u8) -> Result<(), DeviceError> {
        self.set(byte)
    }

    /// Sets every byte to zero, in stream order. Work given before sees what was there, so it is not borrowed for writing.
    pub(crate) fn clear(&self) -> Result<(), DeviceError> {
        self.set(0)
    }

    fn set(&self, byte: u8) -> Result<(), DeviceError> {
        if self.len == 0 {
            return Ok(());
        }
        self.device.bind()?;
        // SAFETY: the range is this buffer, which is freed after this work on the same stream.
        let result = unsafe { sys::cuMemsetD8Async(self.address, byte, self.len, self.device.cu_stream()) };
        check("filling device memory", result)
    }

    /// Copies host bytes to `at`, and waits until they are there.
    ///
    /// # Errors
    /// [`DeviceError::OutOfBounds`], [`DeviceError::Driver`].
    pub fn upload(&mut self, at: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        self.require("an upload", at, bytes.len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        self.device.bind()?;
        let (to, from) = (self.address + at as u64, bytes.as_ptr().cast());
        // SAFETY: the target lies in this buffer; the source lives beyond the wait below.
        let result = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from, bytes.len(), self.device.cu_stream()) };
        check("copying to the device", result)?;
        self.device.synchronize()
    }

    /// Copies bytes from `at` to the host, after all work given before; waits for them.
    ///
    /// # Errors
    /// [`DeviceError::OutOfBounds`], [`DeviceError::Driver`], and as [`Device::synchronize`].
    pub fn download(&self, at: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.require("a download", at, bytes.len())?;
        if bytes.is_empty() {
            return self.device.synchronize();
        }
        self.device.bind()?;
        let (to, from) = (bytes.as_mut_ptr().cast(), self.address + at as u64);
        // SAFETY: the source lies in this buffer; the target is borrowed beyond the wait below.
        let result = unsafe { sys::cuMemcpyDtoHAsync_v2(to, from, bytes.len(), self.device.cu_stream()) };
        check("copying from the device", result)?;
        self.device.synchronize()
    }

    /// Copies `len` bytes of another buffer of the same device handle or a clone of it, in stream order.
    ///
    /// # Errors
    /// [`DeviceError::OutOfBounds`], [`DeviceError::OtherStream`], [`DeviceError::Driver`].
    pub fn copy_from(&mut self, at: usize, source: &Self, from: usize, len: usize) -> Result<(), DeviceError> {
        self.require("the target of a copy", at, len)?;
        source.require("the source of a copy", from, len)?;
        require_owner("the source of a copy", Some(source.device.stream_id()), self.device.stream_id())?;
        if len == 0 {
            return Ok(());
        }
        self.device.bind()?;
        let (to, from) = (self.address + at as u64, source.address + from as u64);
        // SAFETY: both ranges lie in their buffers; the copy is ordered with all other work on the stream.
        let result = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, len, self.device.cu_stream()) };
        check("copying on the device", result)
    }

    fn require(&self, what: &'static str, begin: usize, len: usize) -> Result<(), DeviceError> {
        match begin.checked_add(len) {
            Some(end) if end <= self.len => Ok(()),
            end => Err(DeviceError::OutOfBounds { what, begin, end: end.unwrap_or(usize::MAX), len: self.len }),
        }
    }
}

pub(super) fn out_of_memory(what: &'static str, bytes: usize, code: DriverCode) -> DeviceError {
    if code == DriverCode::OUT_OF_MEMORY {
        DeviceError::OutOfMemory { what, bytes, code }
    } else {
        failed("allocating memory", code)
    }
}

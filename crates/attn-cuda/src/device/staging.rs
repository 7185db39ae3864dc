//! Owns pinned host memory: [`Pinned`], and [`Staging`], through which a step's tables go to the device.

use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream, sys};

use super::buffer::{DeviceBuffer, out_of_memory};
use super::context::Device;
use super::error::{DeviceError, DriverCode, check, failed};

/// Host memory that the device can read and write directly.
#[derive(Debug)]
pub struct Pinned {
    stream: Arc<CudaStream>,
    pointer: std::ptr::NonNull<u8>,
    len: usize,
}

// SAFETY: it is plain memory of the process with one owner; nothing ties it to the thread that made it.
unsafe impl Send for Pinned {}
// SAFETY: shared access only reads.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// `len` zero bytes, at least one.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn new(device: &Device, len: usize, what: &'static str) -> Result<Self, DeviceError> {
        device.bind()?;
        let len = len.max(1);
        let mut pointer = std::ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: the pointer is written to a local; the context is current.
        let result = unsafe { sys::cuMemHostAlloc(&raw mut pointer, len, flags) };
        DriverCode::check(result).map_err(|code| out_of_memory(what, len, code))?;
        let pointer = std::ptr::NonNull::new(pointer.cast::<u8>()).expect("a successful allocation has an address");
        // SAFETY: the memory was just allocated with this length and nobody else knows it.
        unsafe { pointer.as_ptr().write_bytes(0, len) };
        Ok(Self { stream: Arc::clone(device.stream()), pointer, len })
    }

    /// The bytes. What the device is still writing may be read half-way; wait first.
    #[must_use]
    pub const fn bytes(&self) -> &[u8] {
        // SAFETY: the memory is initialised, of this length, and owned.
        unsafe { std::slice::from_raw_parts(self.pointer.as_ptr(), self.len) }
    }

    /// The bytes, to write. What the device is still reading must not be written; wait first.
    pub const fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the memory is initialised, of this length, and owned.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.as_ptr(), self.len) }
    }

    /// Where the device sees it.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub fn device_address(&self) -> Result<u64, DeviceError> {
        self.stream.context().bind_to_thread().map_err(|e| failed("binding the context", e))?;
        let mut address = 0;
        // SAFETY: the memory was allocated as mapped.
        let result = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut address, self.pointer.as_ptr().cast(), 0) };
        check("mapping pinned memory", result).map(|()| address)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // Whatever still reads or writes it comes first; a lost context has stopped all of that.
        let _ = self.stream.synchronize();
        // SAFETY: allocated by `cuMemHostAlloc`, freed once.
        let _ = unsafe { sys::cuMemFreeHost(self.pointer.as_ptr().cast()) };
    }
}

/// One pinned buffer of a [`Staging`] and the event after which it may be written again.
#[derive(Debug)]
struct Slot {
    pinned: Pinned,
    event: Arc<CudaEvent>,
}

/// Pinned buffers that take turns: a step writes one while the copy of the step before may still be reading another.
/// Each is owned by the event of its last copy.
#[derive(Debug)]
pub struct Staging {
    device: Device,
    slots: Vec<Slot>,
    next: usize,
}

impl Staging {
    /// Steps in flight that need not wait for each other.
    const NUM_SLOTS: usize = 3;

    /// No memory yet.
    #[must_use]
    pub fn new(device: &Device) -> Self {
        Self { device: device.clone(), slots: Vec::new(), next: 0 }
    }

    /// Lets `fill` write `len` bytes, then copies them to the beginning of `target`, in stream order: one copy. Work
    /// given before reads what `target` held before, graphs included: so it is not borrowed for writing.
    ///
    /// Waits only where the copy of three steps before has not been done.
    ///
    /// # Errors
    /// [`DeviceError::OutOfBounds`], [`DeviceError::OutOfMemory`], [`DeviceError::Driver`].
    pub fn send(&mut self, len: usize, target: &DeviceBuffer, fill: impl FnOnce(&mut [u8])) -> Result<(), DeviceError> {
        if len > target.len() {
            let what = "a step's tables";
            return Err(DeviceError::OutOfBounds { what, begin: 0, end: len, len: target.len() });
        }
        if len == 0 {
            return Ok(());
        }
        let slot = self.take(len)?;
        fill(&mut slot.pinned.bytes_mut()[..len]);
        let event = Arc::clone(&slot.event);
        let (to, from) = (target.address(), slot.pinned.bytes().as_ptr().cast());
        // SAFETY: the target was checked; the source is owned by the slot, which waits for the event below before it
        // is written or freed.
        let result = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from, len, self.device.cu_stream()) };
        check("sending a step's tables", result)?;
        event.record(self.device.stream()).map_err(|e| failed("recording an event", e))
    }

    /// The next slot, free to be written and large enough.
    fn take(&mut self, len: usize) -> Result<&mut Slot, DeviceError> {
        self.device.bind()?;
        let index = self.next % Self::NUM_SLOTS;
        if index >= self.slots.len() {
            let pinned = Pinned::new(&self.device, len.next_power_of_two(), "staging")?;
            let event = self.device.context().new_event(None).map_err(|e| failed("making an event", e))?;
            self.slots.push(Slot { pinned, event: Arc::new(event) });
        }
        let slot = &mut self.slots[index];
        slot.event.synchronize().map_err(|e| failed("waiting for an earlier step's tables", e))?;
        if slot.pinned.bytes().len() < len {
            slot.pinned = Pinned::new(&self.device, len.next_power_of_two(), "staging")?;
        }
        self.next = (index + 1) % Self::NUM_SLOTS;
        Ok(slot)
    }
}

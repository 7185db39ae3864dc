//! Owns pinned host memory: [`Pinned`], and [`Staging`], through which a step's tables go to the device.

use std::ops::Range;
use std::sync::Arc;

use attn_metadata::KvIndices;
use bytemuck::Pod;
use cudarc::driver::{CudaEvent, CudaStream, sys};

use super::buffer::{DeviceBuffer, out_of_memory};
use super::context::{Device, bind, bind_anyway};
use super::error::{DeviceError, DriverCode, check, failed};
use super::locked::is_locked;

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

    /// Bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no byte: never.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A copy of the first bytes as they are now, each read once. What the device is still writing may be seen half-way, so
    /// nobody may rely on it before a wait; `None` where there are fewer bytes.
    #[must_use]
    pub fn read<T: Pod>(&self) -> Option<T> {
        if size_of::<T>() > self.len {
            return None;
        }
        let mut value = T::zeroed();
        for (at, byte) in bytemuck::bytes_of_mut(&mut value).iter_mut().enumerate() {
            let from = self.pointer.as_ptr().wrapping_add(at);
            // SAFETY: the byte lies in the memory, which is initialised. It is read as memory that changes on its own.
            *byte = unsafe { from.read_volatile() };
        }
        Some(value)
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
        bind(self.stream.context())?;
        let mut address = 0;
        // SAFETY: the memory was allocated as mapped.
        let result = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut address, self.pointer.as_ptr().cast(), 0) };
        check("mapping pinned memory", result).map(|()| address)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if bind_anyway(self.stream.context()) {
            // Whatever still reads or writes it comes first; a lost context has stopped all of that.
            // SAFETY: the stream is alive, its context is current.
            let _ = unsafe { sys::cuStreamSynchronize(self.stream.cu_stream()) };
        }
        // SAFETY: allocated by `cuMemHostAlloc`, freed once.
        let _ = unsafe { sys::cuMemFreeHost(self.pointer.as_ptr().cast()) };
    }
}

/// One pinned buffer of a [`Staging`] and the event after which it may be written again.
#[derive(Debug)]
struct Slot {
    /// Waits when it is dropped: so before what is read from elsewhere.
    pinned: Pinned,
    event: Arc<CudaEvent>,
    /// Page ids that its last copy reads where they lie.
    reads: Option<KvIndices>,
}

/// Page ids that end what is sent.
#[derive(Clone, Copy, Debug)]
pub struct Tail<'a> {
    /// The page ids.
    pub ids: &'a KvIndices,
    /// Where they begin, in bytes.
    pub at: usize,
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

    /// Lets `fill` write the first `len` bytes, then copies those that lie in `spans`, which ascend, to their places in
    /// `target`, and the page ids to theirs behind them, in stream order. Work given before reads what `target` held
    /// before, graphs included: so it is not borrowed for writing. Page ids in memory that is filled again and again are
    /// read by the device where they lie, others are copied with the rest.
    ///
    /// Waits where the copy of three steps before has not been done, and, for all work of the stream, where its buffer is
    /// too small and is replaced.
    ///
    /// # Errors
    /// [`DeviceError::OutOfBounds`] where the page ids begin before `len` or the target ends before them,
    /// [`DeviceError::OutOfMemory`], [`DeviceError::Driver`].
    pub fn send(
        &mut self,
        len: usize,
        spans: impl Iterator<Item = Range<usize>>,
        tail: Option<Tail<'_>>,
        target: &DeviceBuffer,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<(), DeviceError> {
        let end = tail.map_or(len, |tail| tail.at + size_of_val(tail.ids.get()));
        if end > target.len() || tail.is_some_and(|tail| tail.at < len) {
            let what = "a step's tables";
            return Err(DeviceError::OutOfBounds { what, begin: 0, end, len: target.len() });
        }
        if end == 0 {
            return Ok(());
        }
        let device = self.device.clone();
        let in_place = tail.filter(|tail| is_locked(&device, tail.ids));
        let copied = tail.filter(|_| in_place.is_none());
        let staged_len = if copied.is_some() { end } else { len };
        let slot = self.take(staged_len)?;
        let bytes = &mut slot.pinned.bytes_mut()[..staged_len];
        fill(&mut bytes[..len]);
        if let Some(tail) = copied {
            bytes[tail.at..].copy_from_slice(bytemuck::cast_slice(tail.ids.get()));
        }
        let of_tail = copied.map(|tail| tail.at..end);
        for run in runs(spans.map(|span| span.start.min(len)..span.end.min(len)).chain(of_tail)) {
            copy(&device, target.address() + run.start as u64, &bytes[run])?;
        }
        if let Some(tail) = in_place {
            // Held before the copy is given, so that nobody writes there whatever happens next.
            slot.reads = Some(tail.ids.clone());
            copy(&device, target.address() + tail.at as u64, bytemuck::cast_slice(tail.ids.get()))?;
        }
        slot.event.record(device.stream()).map_err(|e| failed("recording an event", e))
    }

    /// The next slot, free to be written and large enough.
    fn take(&mut self, len: usize) -> Result<&mut Slot, DeviceError> {
        self.device.bind()?;
        let index = self.next % Self::NUM_SLOTS;
        if index >= self.slots.len() {
            let pinned = Pinned::new(&self.device, len.next_power_of_two(), "staging")?;
            let event = self.device.context().new_event(None).map_err(|e| failed("making an event", e))?;
            self.slots.push(Slot { pinned, event: Arc::new(event), reads: None });
        }
        for other in self.slots.iter_mut().filter(|slot| slot.reads.is_some()) {
            if other.event.is_complete() {
                other.reads = None;
            }
        }
        let slot = &mut self.slots[index];
        slot.event.synchronize().map_err(|e| failed("waiting for an earlier step's tables", e))?;
        slot.reads = None;
        if slot.pinned.len() < len {
            slot.pinned = Pinned::new(&self.device, len.next_power_of_two(), "staging")?;
        }
        self.next = (index + 1) % Self::NUM_SLOTS;
        Ok(slot)
    }
}

/// Bytes that go along in the copy before and after them, since a copy of its own takes longer: some microseconds.
const MAX_GAP_BYTES: usize = 64 << 10;

/// What to copy at once: spans, which ascend, with what lies between them where that is little.
pub(crate) fn runs(spans: impl Iterator<Item = Range<usize>>) -> impl Iterator<Item = Range<usize>> {
    let mut spans = spans.filter(|span| !span.is_empty()).peekable();
    std::iter::from_fn(move || {
        let mut run = spans.next()?;
        while let Some(next) = spans.next_if(|next| next.start <= run.end + MAX_GAP_BYTES) {
            run.end = run.end.max(next.end);
        }
        Some(run)
    })
}

/// Gives a copy to the device's stream. The source must stay as it is until the stream has come to an event after it.
fn copy(device: &Device, to: u64, from: &[u8]) -> Result<(), DeviceError> {
    if from.is_empty() {
        return Ok(());
    }
    // SAFETY: the target was checked; the source is held by the slot, which waits for its event before it is written or
    // freed.
    let result = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), from.len(), device.cu_stream()) };
    check("sending a step's tables", result)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_that_lie_close_are_one_copy() {
        let runs = |spans: &[Range<usize>]| super::runs(spans.iter().cloned()).collect::<Vec<_>>();
        let gap = MAX_GAP_BYTES;
        assert_eq!(runs(&[]), []);
        assert_eq!(runs(&[7..7, 9..9]), []);
        let one = runs(&[0..10, 10..12, 5..11, 40..40, 256..300]);
        assert_eq!((one.len(), one[0].clone()), (1, 0..300));
        assert_eq!(
            runs(&[0..10, gap + 10..gap + 20, 2 * gap + 21..2 * gap + 30]),
            [0..gap + 20, 2 * gap + 21..2 * gap + 30]
        );
    }
}

//! Owns [`Locked`]: a batch's page ids, made readable for the device where they lie.
//!
//! A large table costs more to copy into pinned memory than everything else of a step's plan (1 MB at page size 1, 64
//! requests of 4,096 tokens: 40 to 80 us). So memory that batches use again and again is locked once, and the device
//! copies from there. Whoever gives such a copy to the stream holds the page ids until it is done.

use std::ptr::NonNull;
use std::sync::Arc;

use attn_metadata::KvIndices;
use cudarc::driver::{CudaContext, sys};

use super::context::{Device, bind_anyway};
use super::error::check;

/// Tables shorter than this are copied: that takes no longer than another copy by the device.
const MIN_BYTES: usize = 64 << 10;

/// The memory of a table, locked; or not, where the driver refused: it is not asked again.
#[derive(Debug)]
struct Locked(Option<Lock>);

/// Locked memory of somebody else, unlocked when dropped.
#[derive(Debug)]
struct Lock {
    context: Arc<CudaContext>,
    pointer: NonNull<u8>,
}

// SAFETY: it holds an address for the driver alone and reads nothing there.
unsafe impl Send for Lock {}
// SAFETY: as above.
unsafe impl Sync for Lock {}

/// Whether the device may read the page ids where they lie, until the memory is freed. Locks memory that is worth it.
pub(super) fn is_locked(device: &Device, ids: &KvIndices) -> bool {
    if size_of_val(ids.get()) < MIN_BYTES {
        return false;
    }
    if ids.companion().is_none() && ids.is_reused() {
        // Where another backend was faster, its companion counts.
        let _ = ids.attach(Box::new(Locked(Lock::new(device, ids))));
    }
    ids.companion().and_then(|companion| companion.downcast_ref()).is_some_and(|Locked(lock)| lock.is_some())
}

impl Lock {
    /// Locks the memory with all its room; `None` where the driver refuses.
    fn new(device: &Device, ids: &KvIndices) -> Option<Self> {
        device.bind().ok()?;
        let pointer = NonNull::new(ids.get().as_ptr().cast_mut())?.cast::<u8>();
        let bytes = ids.capacity() * size_of::<i32>();
        // SAFETY: the memory is of this size and stays where it is until after the companion, this, is dropped.
        let result =
            unsafe { sys::cuMemHostRegister_v2(pointer.as_ptr().cast(), bytes, sys::CU_MEMHOSTREGISTER_PORTABLE) };
        check("locking a page table", result).ok()?;
        Some(Self { context: Arc::clone(device.context()), pointer })
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Of a lost context nothing is left to unlock.
        if bind_anyway(&self.context) {
            // SAFETY: it was locked, and nobody holds the table any more, so no copy from it is under way.
            let _ = unsafe { sys::cuMemHostUnregister(self.pointer.as_ptr().cast()) };
        }
    }
}

//! Owns room that grows: buffers of a backend that are replaced where a step needs larger ones, and errors of doing so.

use std::sync::Arc;

use attn_metadata::PrepareError;

use crate::device::{Device, DeviceBuffer, DeviceError};

/// Makes a buffer of so many bytes, which a message calls so.
type MakeBuffer = fn(&Device, usize, &'static str) -> Result<DeviceBuffer, DeviceError>;

/// Who needs room, where, and what for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room<'a> {
    pub(crate) backend: &'static str,
    pub(crate) device: &'a Device,
    pub(crate) what: &'static str,
}

impl Room<'_> {
    /// Replaces a buffer that is too small by one that `make` gives; keeps it otherwise.
    pub(crate) fn grow(
        self,
        buffer: &mut Option<Arc<DeviceBuffer>>,
        bytes: u64,
        make: MakeBuffer,
    ) -> Result<(), PrepareError> {
        let there = buffer.as_ref().map_or(0, |buffer| buffer.len() as u64);
        if bytes <= there {
            return Ok(());
        }
        let Self { backend, device, what } = self;
        let len = usize::try_from(bytes).map_err(|_| PrepareError::OutOfMemory { what, bytes })?;
        // Some room, so that batches that grow a little do not allocate each time.
        let roomy = make(device, len.saturating_add(len / 4), what);
        let made = match roomy {
            Err(DeviceError::OutOfMemory { .. }) => make(device, len, what),
            other => other,
        };
        *buffer = Some(Arc::new(made.map_err(|error| no_room(backend, what, bytes, &error))?));
        Ok(())
    }
}

/// What it means for a step that there is no room: smaller batches help where memory has run out and nowhere else.
fn no_room(backend: &'static str, what: &'static str, bytes: u64, error: &DeviceError) -> PrepareError {
    match error {
        DeviceError::OutOfMemory { .. } => PrepareError::OutOfMemory { what, bytes },
        other => PrepareError::Environment { backend, why: other.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DriverCode;

    #[test]
    fn only_memory_that_has_run_out_is_told_so() {
        let code = DriverCode::OUT_OF_MEMORY;
        let full = DeviceError::OutOfMemory { what: "x", bytes: 125, code };
        let error = no_room("cuda", "partial states", 100, &full);
        assert_eq!(error, PrepareError::OutOfMemory { what: "partial states", bytes: 100 });
        let lost = DeviceError::Lost { during: "allocating memory", code: DriverCode::INVALID_IMAGE };
        let error = no_room("cuda", "partial states", 100, &lost);
        assert!(matches!(error, PrepareError::Environment { backend: "cuda", .. }), "{error}");
        assert!(error.to_string().contains("context is lost"), "{error}");
    }
}

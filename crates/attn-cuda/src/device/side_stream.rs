//! Owns [`SideStream`]: a second stream for kernels that run beside those of the device's own.

use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream, sys};

use super::context::Device;
use super::error::{DeviceError, failed};

/// A stream beside a device's own one. Work is given to it within [`beside`](Self::beside), which orders it after what
/// the device's stream was given before and before what it is given later, also while a graph is recorded. So to all
/// else there is still one stream.
#[derive(Debug)]
pub struct SideStream {
    device: Device,
    stream: Arc<CudaStream>,
    forked: CudaEvent,
    joined: CudaEvent,
}

impl SideStream {
    /// Makes one.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub fn new(device: &Device) -> Result<Self, DeviceError> {
        device.bind()?;
        let context = device.context();
        let event = || {
            let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
            context.new_event(Some(flags)).map_err(|e| failed("making an event", e))
        };
        let stream = context.new_stream().map_err(|e| failed("making a stream", e))?;
        Ok(Self { device: device.clone(), stream, forked: event()?, joined: event()? })
    }

    /// Runs `work`, which may give kernels to both streams. Both are joined again whatever it returns.
    ///
    /// # Errors
    /// What `work` returns; [`DeviceError::Driver`].
    pub fn beside(&self, work: impl FnOnce(&Self) -> Result<(), DeviceError>) -> Result<(), DeviceError> {
        self.device.bind()?;
        let main = self.device.stream();
        let forks = || {
            self.forked.record(main)?;
            self.stream.wait(&self.forked)
        };
        forks().map_err(|e| failed("beginning work beside a stream", e))?;
        let worked = work(self);
        let joins = || {
            self.joined.record(&self.stream)?;
            main.wait(&self.joined)
        };
        let joined = joins().map_err(|e| failed("ending work beside a stream", e));
        worked.and(joined)
    }

    pub(super) fn cu_stream(&self) -> sys::CUstream {
        self.stream.cu_stream()
    }
}

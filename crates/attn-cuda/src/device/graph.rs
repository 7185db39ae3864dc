//! Owns captured graphs: [`Graph`] is recorded once and replayed, and keeps alive what it was given to keep.
//!
//! Its nodes hold addresses. The compiler does not see that they are used again by every replay, so tensors and pages that
//! the recorded work was called with are the caller's to keep where they are, unless they are among what the graph keeps.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys;

use super::context::Device;
use super::error::{DeviceError, check};

/// What a recording gave, and what it was given back besides.
#[derive(Debug)]
pub struct Captured<T> {
    /// The graph.
    pub graph: Graph,
    /// What the recorded closure returned.
    pub value: T,
}

/// Recorded work of one stream, ready to be replayed. Waits for its last replay when dropped.
pub struct Graph {
    exec: sys::CUgraphExec,
    graph: sys::CUgraph,
    device: Device,
    /// Buffers, modules and whatever else the nodes use and the graph was given.
    keeps: Vec<Arc<dyn Any + Send + Sync>>,
}

// SAFETY: the handles may be used from any thread with the context current, one at a time; `replay` takes `&mut self`.
unsafe impl Send for Graph {}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph").field("keeps", &self.keeps.len()).finish_non_exhaustive()
    }
}

/// Ends a capture that was left half-way: by an error or a panic of what was recorded.
struct Recording<'a> {
    device: &'a Device,
    is_open: bool,
}

impl Recording<'_> {
    fn end(&mut self) -> Result<sys::CUgraph, DeviceError> {
        self.is_open = false;
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream is alive and was being captured.
        let result = unsafe { sys::cuStreamEndCapture(self.device.cu_stream(), &raw mut graph) };
        check("ending a recording", result).map(|()| graph)
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        if self.is_open
            && let Ok(graph) = self.end()
            && !graph.is_null()
        {
            // SAFETY: the graph was made by the end of this capture and has no other owner.
            let _ = unsafe { sys::cuGraphDestroy(graph) };
        }
    }
}

impl Graph {
    /// Records what `work` gives the device's stream. `keeps` is what the recorded work uses and lives as long as the
    /// graph. Memory that `work` uses and that is not in it must be neither freed nor moved before the last replay is done:
    /// a replay reads and writes at the addresses that were recorded, whatever lies there by then.
    ///
    /// `work` must not allocate, wait or copy from memory that is not pinned: the driver refuses that.
    ///
    /// # Errors
    /// What `work` returns, [`DeviceError::Capture`] where nothing was recorded, [`DeviceError::Driver`]. The stream is
    /// usable again in every case.
    pub fn record<T, E: From<DeviceError>>(
        device: &Device,
        keeps: Vec<Arc<dyn Any + Send + Sync>>,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<Captured<T>, E> {
        device.bind()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive; the guard below ends the capture in every case.
        check("starting a recording", unsafe { sys::cuStreamBeginCapture_v2(device.cu_stream(), mode) })?;
        let mut recording = Recording { device, is_open: true };
        let value = work()?;
        let graph = recording.end()?;
        if graph.is_null() {
            return Err(DeviceError::Capture { why: "the recording was invalidated".to_owned() }.into());
        }
        let mut exec = std::ptr::null_mut();
        // SAFETY: the graph was just recorded.
        let result = unsafe { sys::cuGraphInstantiateWithFlags(&raw mut exec, graph, 0) };
        let graph = Self { exec, graph, device: device.clone(), keeps };
        check("instantiating a graph", result)?;
        // SAFETY: the executable graph was just made for this context.
        check("uploading a graph", unsafe { sys::cuGraphUpload(graph.exec, device.cu_stream()) })?;
        Ok(Captured { graph, value })
    }

    /// Gives the recorded work to the stream once more. Tensors and pages of the recorded calls are read and written as
    /// they were then: see [`record`](Self::record) for who keeps them.
    ///
    /// # Errors
    /// [`DeviceError::Driver`], [`DeviceError::Lost`].
    pub fn replay(&mut self) -> Result<(), DeviceError> {
        self.device.bind()?;
        // SAFETY: the graph is instantiated. What `keeps` names lives as long as the graph; what it does not, the caller's
        // tensors and pages, lives by the caller's promise to `record`, which no type enforces.
        check("replaying a graph", unsafe { sys::cuGraphLaunch(self.exec, self.device.cu_stream()) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // What the nodes use is released after them.
        let _ = self.device.synchronize();
        if !self.exec.is_null() {
            // SAFETY: made by `record`, destroyed once, no replay is running.
            let _ = unsafe { sys::cuGraphExecDestroy(self.exec) };
        }
        // SAFETY: as above.
        let _ = unsafe { sys::cuGraphDestroy(self.graph) };
    }
}

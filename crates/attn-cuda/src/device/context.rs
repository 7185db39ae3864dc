//! Owns [`Device`]: a GPU's context and one stream, what the GPU is, the modules loaded on it.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, sys};

use super::error::{DeviceError, check, failed};
use super::module::{ImageKind, Module, ModuleSource};
use super::probe::probe;
use super::staging::Pinned;
use super::trap::{TrapRecord, TrapReport};

/// What a GPU is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceProperties {
    /// Its number, from 0.
    pub ordinal: usize,
    /// Its name.
    pub name: String,
    /// Compute capability: major, minor.
    pub capability: (i32, i32),
    /// Streaming multiprocessors.
    pub num_sms: u32,
    /// Shared memory that one thread block may have, in bytes.
    pub max_shared_bytes: u32,
    /// Memory, in bytes.
    pub memory_bytes: u64,
    /// Second-level cache, in bytes.
    pub l2_bytes: u64,
}

#[cfg(test)]
impl DeviceProperties {
    /// Those of an H200.
    pub(crate) fn h200() -> Self {
        Self {
            ordinal: 0,
            name: "NVIDIA H200".to_owned(),
            capability: (9, 0),
            num_sms: 132,
            max_shared_bytes: 232_448,
            memory_bytes: 140 << 30,
            l2_bytes: 60 << 20,
        }
    }
}

/// Loaded modules by name, and of those that were loaded as text by kernel.
type Modules = HashMap<(&'static str, Option<Box<str>>), Arc<Module>>;

/// A GPU's context and the one stream that this handle works on. Cheap to clone; clones share everything.
///
/// Two handles of one GPU have two streams and are not ordered with each other.
#[derive(Clone)]
pub struct Device {
    inner: Arc<Inner>,
}

/// Which context and stream work goes to. Handles of live streams differ; null ones, of default streams, differ by context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StreamId {
    context: usize,
    stream: usize,
}

#[cfg(test)]
impl StreamId {
    pub(crate) const fn of_test(stream: usize) -> Self {
        Self { context: 0, stream }
    }
}

struct Inner {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    properties: DeviceProperties,
    /// Shared by all handles that were forked from one.
    modules: Arc<Mutex<Modules>>,
    /// Where checked kernels leave their record; made when first asked for.
    trap: Mutex<Option<Pinned>>,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("properties", &self.inner.properties).finish_non_exhaustive()
    }
}

impl Device {
    /// Opens a GPU with a stream of its own. Turns cudarc's tracking of events off for the context: work is ordered by
    /// the one stream, and a captured graph could not contain waits on events from outside.
    ///
    /// # Errors
    /// As [`probe`](super::probe()), [`DeviceError::NoSuchDevice`], [`DeviceError::Driver`].
    pub fn open(ordinal: usize) -> Result<Self, DeviceError> {
        let count = probe()?.num_devices;
        if ordinal >= count {
            return Err(DeviceError::NoSuchDevice { ordinal, count });
        }
        let context = CudaContext::new(ordinal).map_err(|e| failed("opening the GPU's context", e))?;
        // SAFETY: every slice of this context is used on the stream made below, on which it is freed too.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(|e| failed("making a stream", e))?;
        Self::on_stream(stream)
    }

    /// Works on the stream of another library: candle's `CudaDevice::cuda_stream`, burn's, an engine's own.
    ///
    /// Kernels run in that stream's order, so tensors that were written on it before need no wait. Capturing graphs
    /// needs a stream that is not the legacy default one, and a context whose event tracking is off.
    ///
    /// # Errors
    /// As [`probe`](super::probe()), and [`DeviceError::Driver`].
    pub fn on_stream(stream: Arc<CudaStream>) -> Result<Self, DeviceError> {
        probe()?;
        bind(stream.context())?;
        let properties = properties_of(stream.context().ordinal())?;
        Ok(Self::with(stream, properties, Arc::default()))
    }

    /// Another handle of the same GPU, with a stream of its own and the modules that are loaded already.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub fn fork(&self) -> Result<Self, DeviceError> {
        let stream = self.inner.context.new_stream().map_err(|e| failed("making a stream", e))?;
        Ok(Self::with(stream, self.inner.properties.clone(), Arc::clone(&self.inner.modules)))
    }

    fn with(stream: Arc<CudaStream>, properties: DeviceProperties, modules: Arc<Mutex<Modules>>) -> Self {
        let (context, trap) = (Arc::clone(stream.context()), Mutex::default());
        Self { inner: Arc::new(Inner { context, stream, properties, modules, trap }) }
    }

    /// What the GPU is.
    #[must_use]
    pub fn properties(&self) -> &DeviceProperties {
        &self.inner.properties
    }

    /// The stream.
    #[must_use]
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.inner.stream
    }

    /// The context.
    #[must_use]
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.inner.context
    }

    /// Whether two handles work on one stream, so that work on them is ordered.
    #[must_use]
    pub fn is_same_stream(&self, other: &Self) -> bool {
        self.stream_id() == other.stream_id()
    }

    /// The stream's identity.
    pub(crate) fn stream_id(&self) -> StreamId {
        StreamId { context: self.inner.context.cu_ctx().addr(), stream: self.cu_stream().addr() }
    }

    /// Bytes of memory that are free now.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub fn free_bytes(&self) -> Result<u64, DeviceError> {
        self.bind()?;
        let info = self.inner.context.mem_get_info();
        info.map(|(free, _)| free as u64).map_err(|e| failed("asking for free memory", e))
    }

    /// Waits until all work given so far is done.
    ///
    /// # Errors
    /// [`DeviceError::Trapped`] where a checked kernel stopped, [`DeviceError::Lost`] where work failed otherwise;
    /// [`DeviceError::Driver`] where memory could not be freed earlier, which is told once: after the wait.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        // Callers free and reuse memory after this, so an error of before does not stand in for the wait.
        let bound = self.bind();
        if bound.is_err() {
            self.bind()?;
        }
        // SAFETY: the stream lives as long as this handle.
        let result = unsafe { sys::cuStreamSynchronize(self.cu_stream()) };
        let waited = check("waiting for the stream", result);
        waited.and(bound).map_err(|error| self.trap_report().map_or(error, |report| DeviceError::Trapped { report }))
    }

    /// Where checked kernels of this device leave their record, as the device sees it.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn trap_address(&self) -> Result<u64, DeviceError> {
        let mut trap = self.inner.trap.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pinned) = &*trap {
            return pinned.device_address();
        }
        let mut pinned = Pinned::new(self, size_of::<TrapRecord>(), "the record of checked kernels")?;
        pinned.bytes_mut().fill(0);
        let address = pinned.device_address();
        *trap = Some(pinned);
        address
    }

    /// What a checked kernel of this device found, if one did.
    #[must_use]
    pub fn trap_report(&self) -> Option<TrapReport> {
        let trap = self.inner.trap.lock().unwrap_or_else(PoisonError::into_inner);
        TrapReport::of(trap.as_ref()?.read()?)
    }

    /// The loaded module of a source that has a kernel; loads it where this is its first use.
    pub(super) fn module(&self, source: &ModuleSource, kernel: &str) -> Result<Arc<Module>, DeviceError> {
        let mut modules = self.inner.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let of_all = (source.name, None);
        let of_kernel = (source.name, Some(Box::from(kernel)));
        if let Some(module) = modules.get(&of_all).or_else(|| modules.get(&of_kernel)) {
            return Ok(Arc::clone(module));
        }
        let module = Arc::new(Module::load(self, source, kernel)?);
        let key = if module.image().kind == ImageKind::Ptx { of_kernel } else { of_all };
        modules.insert(key, Arc::clone(&module));
        Ok(module)
    }

    /// Makes the context current on this thread.
    pub(super) fn bind(&self) -> Result<(), DeviceError> {
        bind(&self.inner.context)
    }

    pub(super) fn cu_stream(&self) -> sys::CUstream {
        self.inner.stream.cu_stream()
    }

    /// Starts a measurement of time on the stream.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub fn start_timer(&self) -> Result<Timer, DeviceError> {
        let begin = self.timing_event()?;
        begin.record(&self.inner.stream).map_err(|e| failed("recording an event", e))?;
        Ok(Timer { begin, device: self.clone() })
    }

    fn timing_event(&self) -> Result<CudaEvent, DeviceError> {
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT;
        self.inner.context.new_event(Some(flags)).map_err(|e| failed("making an event", e))
    }
}

/// Makes a context current on this thread. An error that cudarc recorded while it dropped something is returned once instead.
pub(super) fn bind(context: &Arc<CudaContext>) -> Result<(), DeviceError> {
    context.bind_to_thread().map_err(|e| failed("binding the context", e))
}

/// The same for what is to be released, where nobody can be told: whether the context is current, whatever was recorded.
pub(super) fn bind_anyway(context: &Arc<CudaContext>) -> bool {
    // The first call takes the recorded error with it.
    context.bind_to_thread().is_ok() || context.bind_to_thread().is_ok()
}

/// A measurement of time on a device's stream.
#[derive(Debug)]
pub struct Timer {
    begin: CudaEvent,
    device: Device,
}

impl Timer {
    /// Ends it, waits, and returns the milliseconds between the work given before and after.
    ///
    /// # Errors
    /// [`DeviceError::Driver`], and as [`Device::synchronize`].
    pub fn stop(self) -> Result<f64, DeviceError> {
        let end = self.device.timing_event()?;
        end.record(self.device.stream()).map_err(|e| failed("recording an event", e))?;
        self.device.synchronize()?;
        self.begin.elapsed_ms(&end).map(f64::from).map_err(|e| failed("reading the time", e))
    }
}

/// Every GPU that the driver shows, without opening any.
///
/// # Errors
/// As [`probe`](super::probe()), and [`DeviceError::Driver`].
pub fn devices() -> Result<Vec<DeviceProperties>, DeviceError> {
    let count = probe()?.num_devices;
    (0..count).map(properties_of).collect()
}

fn properties_of(ordinal: usize) -> Result<DeviceProperties, DeviceError> {
    use cudarc::driver::result::device;
    use sys::CUdevice_attribute_enum as A;
    let number = i32::try_from(ordinal).unwrap_or(i32::MAX);
    let handle = device::get(number).map_err(|e| failed("finding the GPU", e))?;
    // SAFETY: the handle was just given by the driver.
    let attribute = |which| unsafe { device::get_attribute(handle, which) }.map_err(|e| failed("asking the GPU", e));
    let count = |which| attribute(which).map(|n| u32::try_from(n).unwrap_or(0));
    // SAFETY: as above.
    let memory_bytes = unsafe { device::total_mem(handle) }.map_err(|e| failed("asking for the GPU's memory", e))?;
    Ok(DeviceProperties {
        ordinal,
        name: device::get_name(handle).map_err(|e| failed("asking for the GPU's name", e))?,
        capability: (
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        num_sms: count(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        max_shared_bytes: count(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        memory_bytes: memory_bytes as u64,
        l2_bytes: count(A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?.into(),
    })
}

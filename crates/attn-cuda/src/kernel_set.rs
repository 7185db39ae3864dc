//! Owns what a backend holds for its model's layers: the kernels found so far, constants on the device.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use attn_metadata::Layer;

use crate::device::{Device, DeviceBuffer, DeviceError, Kernel, KernelParams};
use crate::entry::{Entry, LayerKernels};
use crate::maps::MadeMaps;
use crate::params::{AttnMappedParams, AttnParams, StoreKvParams};

/// Kernels by name and flavour.
type Found<P> = Mutex<HashMap<(&'static str, bool), Kernel<P>>>;

/// Kernels that were found so far.
#[derive(Debug, Default)]
pub(crate) struct KernelSet {
    attention: Found<AttnParams>,
    mapped: Found<AttnMappedParams>,
    store: Found<StoreKvParams>,
    /// Tensor maps that were made so far.
    pub(crate) maps: MadeMaps,
}

impl KernelSet {
    /// A kernel of attention that takes tensor maps.
    pub(crate) fn mapped(
        &self,
        device: &Device,
        entry: &Entry,
        is_checked: bool,
    ) -> Result<Kernel<AttnMappedParams>, DeviceError> {
        find(&self.mapped, device, entry, is_checked)
    }

    /// Another kernel of attention, or one of merging.
    pub(crate) fn attention(
        &self,
        device: &Device,
        entry: &Entry,
        is_checked: bool,
    ) -> Result<Kernel<AttnParams>, DeviceError> {
        find(&self.attention, device, entry, is_checked)
    }

    /// A kernel that writes KV.
    pub(crate) fn store(
        &self,
        device: &Device,
        entry: &Entry,
        is_checked: bool,
    ) -> Result<Kernel<StoreKvParams>, DeviceError> {
        find(&self.store, device, entry, is_checked)
    }

    /// Loads all that a layer may launch, so that no launch has to: a recording could not.
    pub(crate) fn load(&self, device: &Device, kernels: &LayerKernels, is_checked: bool) -> Result<(), DeviceError> {
        let pairs = kernels.decode.iter().chain([&kernels.extend]).flat_map(|pair| [pair.plain, pair.masked]);
        for entry in pairs.chain([kernels.merge]) {
            if entry.takes_maps() {
                self.mapped(device, entry, is_checked)?;
            } else {
                self.attention(device, entry, is_checked)?;
            }
        }
        self.store(device, kernels.store, is_checked).map(|_| ())
    }
}

fn find<P: KernelParams>(
    found: &Found<P>,
    device: &Device,
    entry: &Entry,
    is_checked: bool,
) -> Result<Kernel<P>, DeviceError> {
    let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(kernel) = found.get(&(entry.name, is_checked)) {
        return Ok(kernel.clone());
    }
    let source = if is_checked { entry.checked } else { entry.module };
    let kernel = Kernel::find(device, source, entry.name, entry.shared_bytes)?;
    found.insert((entry.name, is_checked), kernel.clone());
    Ok(kernel)
}

/// What a layer needs on the device for the backend's whole life.
#[derive(Clone, Debug)]
pub(crate) struct LayerConstants {
    pub(crate) kernels: LayerKernels,
    /// f32 `[num_qo_heads]`.
    pub(crate) sinks: Option<Arc<DeviceBuffer>>,
    /// f32 `[num_qo_heads]`.
    pub(crate) alibi_slopes: Option<Arc<DeviceBuffer>>,
}

impl LayerConstants {
    /// Uploads them.
    pub(crate) fn new(device: &Device, layer: &Layer, kernels: LayerKernels) -> Result<Self, DeviceError> {
        let upload = |values: Option<&[f32]>, what| {
            let bytes = values.map(bytemuck::cast_slice::<f32, u8>);
            bytes.map(|bytes| DeviceBuffer::from_bytes(device, bytes, what).map(Arc::new)).transpose()
        };
        Ok(Self {
            kernels,
            sinks: upload(layer.sinks(), "sinks")?,
            alibi_slopes: upload(layer.alibi_slopes(), "ALiBi slopes")?,
        })
    }
}

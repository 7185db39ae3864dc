//! The space of GPU memory: [`Cuda`], its device, and how the waist sees its tensors.

use attn_metadata::{CacheFacts, Space, TensorFacts};
use kvpool::KvShape;

use crate::device::{CudaKv, CudaLseMut, CudaTensor, CudaTensorMut, Device, DeviceError};

/// Memory of one NVIDIA GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cuda {}

/// The GPU that backends run on, and how.
#[derive(Clone, Debug)]
pub struct CudaDevice {
    /// Context and stream.
    pub device: Device,
    /// Whether kernels check every table entry on the device: a broken rule stops them with a record of kernel, rule,
    /// request and value. Slower; for finding out.
    pub is_checked: bool,
}

impl CudaDevice {
    /// A GPU by its number, from 0.
    ///
    /// # Errors
    /// As [`Device::open`].
    pub fn open(ordinal: usize) -> Result<Self, DeviceError> {
        Ok(Device::open(ordinal)?.into())
    }

    /// The same with kernels that check.
    #[must_use]
    pub fn checked(self) -> Self {
        Self { is_checked: true, ..self }
    }
}

impl From<Device> for CudaDevice {
    fn from(device: Device) -> Self {
        Self { device, is_checked: false }
    }
}

impl Space for Cuda {
    type Device = CudaDevice;
    type Tensor<'a> = CudaTensor<'a>;
    type TensorMut<'a> = CudaTensorMut<'a>;
    type LseMut<'a> = CudaLseMut<'a>;
    type Cache<'a> = &'a CudaKv;
    type CacheMut<'a> = &'a mut CudaKv;

    fn shorten<'b>(tensor: &'b CudaTensor<'_>) -> CudaTensor<'b> {
        tensor.shorten()
    }

    fn shorten_cache<'b>(cache: &'b &CudaKv) -> &'b CudaKv {
        cache
    }

    fn reborrow<'b>(tensor: &'b mut CudaTensorMut<'_>) -> CudaTensorMut<'b> {
        tensor.reborrow()
    }

    fn reborrow_lse<'b>(lse: &'b mut CudaLseMut<'_>) -> CudaLseMut<'b> {
        lse.reborrow()
    }

    fn reborrow_cache<'b>(cache: &'b mut &mut CudaKv) -> &'b mut CudaKv {
        cache
    }

    fn share_cache<'b>(cache: &'b &mut CudaKv) -> &'b CudaKv {
        cache
    }

    fn tensor_facts(tensor: &CudaTensor<'_>) -> TensorFacts {
        TensorFacts { shape: tensor.shape(), dtype: tensor.dtype() }
    }

    fn tensor_mut_facts(tensor: &CudaTensorMut<'_>) -> TensorFacts {
        TensorFacts { shape: tensor.shape(), dtype: tensor.dtype() }
    }

    fn lse_len(lse: &CudaLseMut<'_>) -> usize {
        lse.len()
    }

    fn cache_facts(cache: &&CudaKv) -> CacheFacts {
        let KvShape { num_pages, page_size, .. } = cache.shape();
        CacheFacts { num_pages, page_size, spec: cache.spec(), dtype: cache.format().dtype() }
    }
}

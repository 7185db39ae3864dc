//! The host space: tensors and caches in main memory.

use kvpool::{HostKv, HostTensor, HostTensorMut, KvShape, Slot};

use crate::error::RunError;
use crate::lse::Lse;
use crate::space::{CacheFacts, Kv, Space, TensorFacts};

/// Main memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Host {}

/// How to use the processor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostDevice {
    /// Worker threads; `None`: as many as the process may use. Results do not depend on it.
    pub num_threads: Option<usize>,
    /// Bytes that a step may take for its plan and its partial states; a batch that needs more is refused when it is
    /// prepared. `None`: whatever the system gives, and a system that gives more than it has stops the process. The CPU
    /// backend and the oracle heed it, each of a pair for itself; others may not.
    pub memory_bytes: Option<u64>,
}

impl HostDevice {
    /// So many threads, and whatever memory the system gives.
    #[must_use]
    pub const fn with_threads(num_threads: usize) -> Self {
        Self { num_threads: Some(num_threads), memory_bytes: None }
    }
}

impl Kv<'_, Host> {
    /// Writes the new rows of a call to `slots`, one for each row; nothing where the call only attends.
    ///
    /// # Errors
    /// [`RunError::Append`]; nothing was written.
    pub fn append(&mut self, slots: &[Slot], layer: usize) -> Result<(), RunError> {
        match self {
            Kv::Attend { .. } => Ok(()),
            Kv::Append { cache, k, v } => {
                cache.append(slots, k, v.as_ref()).map_err(|source| RunError::Append { layer, source })
            }
        }
    }
}

impl Space for Host {
    type Device = HostDevice;
    type Tensor<'a> = HostTensor<'a>;
    type TensorMut<'a> = HostTensorMut<'a>;
    type LseMut<'a> = &'a mut [Lse];
    type Cache<'a> = &'a HostKv;
    type CacheMut<'a> = &'a mut HostKv;

    fn shorten<'b>(tensor: &'b HostTensor<'_>) -> HostTensor<'b> {
        *tensor
    }

    fn shorten_cache<'b>(cache: &'b &HostKv) -> &'b HostKv {
        cache
    }

    fn reborrow<'b>(tensor: &'b mut HostTensorMut<'_>) -> HostTensorMut<'b> {
        tensor.reborrow()
    }

    fn reborrow_lse<'b>(lse: &'b mut &mut [Lse]) -> &'b mut [Lse] {
        lse
    }

    fn reborrow_cache<'b>(cache: &'b mut &mut HostKv) -> &'b mut HostKv {
        cache
    }

    fn share_cache<'b>(cache: &'b &mut HostKv) -> &'b HostKv {
        cache
    }

    fn tensor_facts(tensor: &HostTensor<'_>) -> TensorFacts {
        TensorFacts { shape: tensor.shape(), dtype: tensor.dtype() }
    }

    fn tensor_mut_facts(tensor: &HostTensorMut<'_>) -> TensorFacts {
        TensorFacts { shape: tensor.shape(), dtype: tensor.dtype() }
    }

    fn lse_len(lse: &&mut [Lse]) -> usize {
        lse.len()
    }

    fn cache_facts(cache: &&HostKv) -> CacheFacts {
        let KvShape { num_pages, page_size, .. } = cache.shape();
        CacheFacts { num_pages, page_size, spec: cache.spec(), dtype: cache.format().dtype() }
    }
}

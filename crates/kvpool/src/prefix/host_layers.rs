//! Owns [`HostLayers`], the host tier of pages that lie in [`HostKv`]s on both sides: for CPU backends and for tests.
//! Invariant: a copy is done in all layers when it returns. Borrows the layers for as long as a call needs them.

use crate::host::{CopyPageError, HostKv};
use crate::prefix::tier::{HostTier, PageCopy};

/// The layers that a backend uses, and those that keep what was evicted; layer by layer the same page shape and format.
#[derive(Debug)]
pub struct HostLayers<'a> {
    /// The layers of the device pages.
    pub device: &'a mut [HostKv],
    /// The layers of the host pages.
    pub host: &'a mut [HostKv],
}

impl HostTier for HostLayers<'_> {
    type Error = CopyPageError;

    fn offload(&mut self, copies: &[PageCopy]) -> Result<(), CopyPageError> {
        copy_layers(self.device, self.host, copies)
    }

    fn restore(&mut self, copies: &[PageCopy]) -> Result<(), CopyPageError> {
        copy_layers(self.host, self.device, copies)
    }
}

fn copy_layers(from: &[HostKv], to: &mut [HostKv], copies: &[PageCopy]) -> Result<(), CopyPageError> {
    if from.len() != to.len() {
        return Err(CopyPageError::NumLayers { from: from.len(), to: to.len() });
    }
    for (from, to) in from.iter().zip(to) {
        for copy in copies {
            to.copy_page_from(from, copy.from, copy.to)?;
        }
    }
    Ok(())
}

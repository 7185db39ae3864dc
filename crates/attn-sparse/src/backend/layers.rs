//! Owns the choice of a model's layers: which are block-sparse, and whose selection each uses.

use attn_metadata::{CreateError, Layer, ModelSpec, Reason};

use crate::family::{SelectionSource, SparseFamily};
use crate::params::{Limits, SparseParams};

/// A block-sparse layer of a model.
#[derive(Clone, Copy, Debug)]
pub(super) struct SparseLayer {
    pub(super) params: SparseParams,
    /// The layer whose selection it uses: its own place, or an earlier one.
    pub(super) source: usize,
}

impl SparseLayer {
    /// Whether the layer selects for itself.
    pub(super) const fn is_own(&self, layer: usize) -> bool {
        self.source == layer
    }
}

/// The layers of a model, all of which must be block-sparse and within the limits of an implementation.
pub(super) fn sparse_layers(
    backend: &'static str,
    model: &ModelSpec,
    limits: &Limits,
) -> Result<Vec<SparseLayer>, CreateError> {
    let mut reasons = Vec::new();
    let mut last: Option<(usize, &Layer)> = None;
    let mut layers = Vec::new();
    for (index, layer) in model.layers().iter().enumerate() {
        let Some(family) = layer.family_as::<SparseFamily>() else {
            reasons.push(unavailable(index, "it is not block-sparse"));
            continue;
        };
        let params = *family.params();
        if let Err(violations) = params.check(&layer.heads(), limits) {
            reasons.push(unavailable(index, &violations.to_string()));
        }
        if let Err(violations) = limits.check_storage(&params, model.q_dtype(), model.kv_dtype(), model.page_size()) {
            reasons.push(unavailable(index, &violations.to_string()));
        }
        let source = match family.source() {
            SelectionSource::Own => {
                last = Some((index, layer));
                index
            }
            SelectionSource::Shared => match last {
                Some((source, indexed)) if shares(indexed, layer, &params) => source,
                Some((source, _)) => {
                    let why = format!("it cannot share the selection of layer {source}: blocks or heads differ");
                    reasons.push(unavailable(index, &why));
                    index
                }
                None => {
                    reasons.push(unavailable(index, "there is no layer before it whose selection it could share"));
                    index
                }
            },
        };
        layers.push(SparseLayer { params, source });
    }
    if reasons.is_empty() { Ok(layers) } else { Err(CreateError::Unsupported { backend, reasons }) }
}

/// Whether a selection of one layer is one of another.
fn shares(indexed: &Layer, layer: &Layer, params: &SparseParams) -> bool {
    let same_blocks =
        indexed.family_as::<SparseFamily>().is_some_and(|f| f.params().blocks.block_size == params.blocks.block_size);
    same_blocks && indexed.heads().num_kv_heads == layer.heads().num_kv_heads
}

fn unavailable(layer: usize, why: &str) -> Reason {
    Reason::Unavailable { why: format!("layer {layer}: {why}") }
}

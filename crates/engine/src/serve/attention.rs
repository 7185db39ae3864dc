//! Attention over a session's pages, as a model sees it.

use std::time::{Duration, Instant};

use attn_metadata::{AttentionBackend, Host, Io, Kv, Layer, Prepared, RunError};
use kvpool::{HostKv, HostTensor, HostTensorMut, ShapeError};

use crate::lm::LayerAttention;

/// One step's attention: the plan, and each layer's pages.
pub(super) struct PagedAttention<'a> {
    pub(super) backend: &'a mut dyn AttentionBackend<Host>,
    pub(super) step: &'a Prepared,
    pub(super) caches: &'a mut [HostKv],
    pub(super) time: Duration,
}

impl LayerAttention for PagedAttention<'_> {
    fn attend(&mut self, layer: usize, q: &[f32], k: &[f32], v: &[f32], out: &mut [f32]) -> Result<(), RunError> {
        let begin = Instant::now();
        let num_layers = self.caches.len();
        let cache = self.caches.get_mut(layer).ok_or(RunError::NoSuchLayer { got: layer, num_layers })?;
        let heads = self.backend.model().layers().get(layer).map(Layer::heads);
        let heads = heads.ok_or(RunError::NoSuchLayer { got: layer, num_layers })?;
        let rows = self.step.num_rows() as usize;
        let [hq, hkv] = [heads.num_qo_heads as usize, heads.num_kv_heads as usize];
        let [dqk, dvo] = [heads.head_dim_qk as usize, heads.head_dim_vo as usize];
        let wrong = |source: ShapeError| RunError::Environment { backend: "engine", layer, source: Box::new(source) };
        let io = Io {
            q: HostTensor::packed(q, [rows, hq, dqk]).map_err(wrong)?,
            kv: Kv::Append {
                cache,
                k: HostTensor::packed(k, [rows, hkv, dqk]).map_err(wrong)?,
                v: HostTensor::packed(v, [rows, hkv, dvo]).map_err(wrong)?,
            },
            out: HostTensorMut::packed(out, [rows, hq, dvo]).map_err(wrong)?,
            lse: None,
        };
        self.backend.forward(self.step, layer, io)?;
        self.time += begin.elapsed();
        Ok(())
    }
}

//! Attention over a session's pages, as a model sees it.

use std::time::{Duration, Instant};

use attn_metadata::{AttentionBackend, Host, Io, Kv, Prepared, RunError, Side};
use kvpool::{HostKv, HostTensor, HostTensorMut, KvSpec, ShapeError};

use super::caches::LayerCaches;
use crate::lm::{AttentionInput, AttentionOutput, LayerAttention, Rows};

/// One step's attention: the plan, and each layer's pages.
pub(super) struct PagedAttention<'a> {
    pub(super) backend: &'a mut dyn AttentionBackend<Host>,
    pub(super) step: &'a Prepared,
    pub(super) caches: &'a mut [LayerCaches],
    pub(super) time: Duration,
}

impl LayerAttention for PagedAttention<'_> {
    fn attend(
        &mut self,
        layer: usize,
        input: &AttentionInput<'_>,
        output: AttentionOutput<'_>,
    ) -> Result<(), RunError> {
        let begin = Instant::now();
        let num_layers = self.caches.len();
        let no_such = RunError::NoSuchLayer { got: layer, num_layers };
        let cached = self.caches.get_mut(layer).zip(self.backend.model().layers().get(layer));
        let Some((LayerCaches { main, side: side_cache }, spec)) = cached else { return Err(no_such) };
        let (heads, kv, side_spec) = (spec.heads(), spec.kv(), spec.side());
        let view = Views { layer, rows: self.step.num_rows() as usize };
        let side = match (side_spec, side_cache, &input.side) {
            (Some(spec), Some(cache), Some(rows)) => Some(Side {
                q: view.tensor(rows.q, spec.num_heads, spec.head_dim)?,
                kv: view.kv(cache, spec.kv, rows)?,
                out: output.side.map(|out| view.out(out, spec.num_heads, spec.out_dim.unwrap_or(0))).transpose()?,
            }),
            (_, _, Some(_)) => return Err(RunError::Unwanted { tensor: "the side branch", layer }),
            _ => None,
        };
        let io = Io {
            q: view.tensor(input.rows.q, heads.num_qo_heads, heads.head_dim_qk)?,
            kv: view.kv(main, kv, &input.rows)?,
            side,
            out: view.out(output.out, heads.num_qo_heads, heads.head_dim_vo)?,
            lse: None,
        };
        self.backend.forward(self.step, layer, io)?;
        self.time += begin.elapsed();
        Ok(())
    }
}

/// Makes views `[rows, heads, width]` of a layer's slices.
struct Views {
    layer: usize,
    rows: usize,
}

impl Views {
    fn wrong(&self, source: ShapeError) -> RunError {
        RunError::Environment { backend: "engine", layer: self.layer, source: Box::new(source) }
    }

    fn tensor<'a>(&self, data: &'a [f32], heads: u32, dim: u32) -> Result<HostTensor<'a>, RunError> {
        HostTensor::packed(data, [self.rows, heads as usize, dim as usize]).map_err(|source| self.wrong(source))
    }

    fn out<'a>(&self, data: &'a mut [f32], heads: u32, dim: u32) -> Result<HostTensorMut<'a>, RunError> {
        HostTensorMut::packed(data, [self.rows, heads as usize, dim as usize]).map_err(|source| self.wrong(source))
    }

    fn kv<'a>(&self, cache: &'a mut HostKv, spec: KvSpec, rows: &Rows<'a>) -> Result<Kv<'a, Host>, RunError> {
        let KvSpec { num_kv_heads, head_dim_k, values } = spec;
        let v = rows.v.map(|v| self.tensor(v, num_kv_heads, values.head_dim())).transpose()?;
        Ok(Kv::Append { cache, k: self.tensor(rows.k, num_kv_heads, head_dim_k)?, v })
    }
}

//! One attention problem in memory: everything that one call of `forward` takes, and running it.

use std::sync::Arc;

use attn_metadata::{
    AttentionBackend, BackendConfig, Batch, BatchLimits, Host, HostDevice, Io, Kv, Layer, Lse, ModelSpec, Prepared,
    RunError,
};
use kvpool::HostKv;

use super::activation::Activation;

/// New keys and values, for a batch that appends.
#[derive(Clone, Debug, PartialEq)]
pub struct NewKv {
    /// Keys `[rows, num_kv_heads, head_dim_k]` of what the layer keeps of a token.
    pub k: Activation,
    /// Values `[rows, num_kv_heads, head_dim_v]`; `None` where it keeps no values of their own.
    pub v: Option<Activation>,
}

/// One attention problem: a model of one layer, a batch and its tensors.
#[derive(Clone, Debug)]
pub struct Problem {
    /// The layer.
    pub layer: Layer,
    /// The batch.
    pub batch: Batch,
    /// Queries `[rows, num_qo_heads, head_dim_qk]`.
    pub q: Activation,
    /// The layer's pages.
    pub cache: HostKv,
    /// New KV; there exactly where the batch has a slot mapping.
    pub new_kv: Option<NewKv>,
}

/// What a run writes.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// `[rows, num_qo_heads, head_dim_vo]`, of q's dtype.
    pub out: Activation,
    /// `[rows, num_qo_heads]`.
    pub lse: Vec<Lse>,
}

impl Problem {
    /// The model: one layer.
    #[must_use]
    pub fn model(&self) -> ModelSpec {
        let kv_dtype = self.cache.format().dtype();
        ModelSpec::new(vec![self.layer.clone()], self.q.dtype(), kv_dtype, self.cache.shape().page_size)
            .expect("a model of one layer has a layer")
    }

    /// What a backend for this problem is made from; its limits are those of the batch.
    #[must_use]
    pub fn config(&self, device: HostDevice) -> BackendConfig<Host> {
        let limits = BatchLimits {
            max_rows: self.batch.num_rows(),
            max_requests: u32::try_from(self.batch.requests().len()).unwrap_or(u32::MAX),
            max_kv_len: self.batch.max_kv_len(),
        };
        BackendConfig { model: Arc::new(self.model()), limits, device }
    }

    /// A buffer for the result.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        let [rows, num_qo_heads, _] = self.q.shape();
        let head_dim_vo = self.layer.heads().head_dim_vo as usize;
        Outcome {
            out: Activation::zeroed(self.q.dtype(), [rows, num_qo_heads, head_dim_vo]),
            lse: vec![Lse::EMPTY; rows * num_qo_heads],
        }
    }

    /// Runs a prepared step: appends the new KV, if any, and attends.
    ///
    /// # Errors
    /// [`RunError`].
    pub fn forward(
        &mut self,
        backend: &mut dyn AttentionBackend<Host>,
        step: &Prepared,
        into: &mut Outcome,
    ) -> Result<(), RunError> {
        let kv = match &self.new_kv {
            Some(NewKv { k, v }) => {
                Kv::Append { cache: &mut self.cache, k: k.view(), v: v.as_ref().map(Activation::view) }
            }
            None => Kv::Attend { cache: &self.cache },
        };
        let (out, lse) = (into.out.view_mut(), Some(into.lse.as_mut_slice()));
        let io = Io { q: self.q.view(), kv, side: None, out, lse };
        backend.forward(step, 0, io)
    }
}

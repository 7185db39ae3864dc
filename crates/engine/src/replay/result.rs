//! The result of a replay as a file: `out` in q's dtype and `lse` in f32, and on request the caches after the step.

use kvpool::HostKv;
use safetensors::SafeTensorError;
use safetensors::tensor::Dtype as FileDtype;

use super::activation::lse_bytes;
use super::problem::Outcome;
use super::record::{FileTensor, cache_tensors, pack};

/// The bytes of a result file; with a cache also `k_cache` and `v_cache`, FP8 as `fp8_as_u8` says.
///
/// # Errors
/// [`SafeTensorError`] where the tensors cannot be packed.
pub fn result_bytes(outcome: &Outcome, cache: Option<&HostKv>, fp8_as_u8: bool) -> Result<Vec<u8>, SafeTensorError> {
    let [rows, num_qo_heads, _] = outcome.out.shape();
    let mut tensors = cache.map(|cache| cache_tensors(cache, fp8_as_u8)).unwrap_or_default();
    tensors.push(FileTensor::activation("out", &outcome.out));
    tensors.push(FileTensor::new("lse", FileDtype::F32, vec![rows, num_qo_heads], lse_bytes(&outcome.lse).to_vec()));
    pack(&tensors, None)
}

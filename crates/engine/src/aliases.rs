//! Names by which SGLang's users know attention backends, and what they stand for here.
//!
//! A name of something that runs on the processor stands for our CPU backend, one of something on an NVIDIA GPU for the
//! CUDA backend. In a build without it, such a name is refused with the reason: nobody asks for it to get a slow answer.

use attn_metadata::Alias;

const fn alias(name: &'static str, target: Option<&'static str>, note: &'static str) -> Alias {
    Alias { name, target, note }
}

/// What stands for kernels on NVIDIA GPUs.
const CUDA: Option<&str> = if cfg!(feature = "cuda") { Some("cuda") } else { None };

/// SGLang's list of names, in its order.
pub const SGLANG: &[Alias] = &[
    alias("triton", CUDA, "attention kernels for GPUs written in Triton; the CUDA backend has their features and more"),
    alias("torch_native", Some("cpu"), "PyTorch's own attention; the CPU backend has its features and more"),
    alias("flex_attention", Some("cpu"), "PyTorch's attention with score hooks; masks, softcap and ALiBi are built in"),
    alias("nsa", None, "token-sparse MLA on NVIDIA GPUs; there is no sparse MLA backend in this build"),
    alias("dsa", None, "token-sparse MLA on NVIDIA GPUs; there is no sparse MLA backend in this build"),
    alias("cutlass_mla", None, "MLA decode on Blackwell GPUs; there is no MLA backend in this build"),
    alias("fa3", CUDA, "FlashAttention-3 for Hopper GPUs; the CUDA backend has its features and more"),
    alias("fa4", CUDA, "FlashAttention-4 for Hopper and Blackwell GPUs; the CUDA backend has its features and more"),
    alias("flashinfer", CUDA, "kernels for NVIDIA GPUs; the CUDA backend has their features and more"),
    alias("flashmla", None, "MLA on NVIDIA GPUs; there is no MLA backend in this build"),
    alias("trtllm_mla", None, "MLA on Blackwell GPUs; there is no MLA backend in this build"),
    alias("trtllm_mha", CUDA, "attention for Blackwell GPUs; the CUDA backend runs on them too"),
    alias("dual_chunk_flash_attn", None, "dual-chunk attention is not a feature of any backend here"),
    alias("aiter", None, "it needs an AMD GPU, and there is no backend for one here"),
    alias("wave", None, "it needs an AMD GPU, and there is no backend for one here"),
    alias("intel_amx", Some("cpu"), "Intel's CPU kernels; the CPU backend uses AVX-512 or AVX2 where there is no more"),
    alias("intel_xpu", None, "it needs an Intel GPU, and there is no backend for one here"),
    alias("ascend", None, "it needs an Ascend NPU, and there is no backend for one here"),
    alias("hybrid_linear_attn", None, "linear attention is not a feature of any backend here"),
];

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::Arc;

    use attn_metadata::{
        BackendConfig, BatchLimits, HeadShape, HostDevice, Layer, LayerParams, ModelSpec, SelectError,
    };
    use kvpool::{Dtype, KvDtype, PageSize};

    use super::*;
    use crate::backends::{create_backend, host_registry};

    fn config() -> BackendConfig<attn_metadata::Host> {
        let layer = Layer::new(LayerParams::causal(HeadShape::new(4, 2, 16))).unwrap();
        let page_size = PageSize::new(16).unwrap();
        let model = ModelSpec::new(vec![layer], Dtype::F32, KvDtype::F32, page_size).unwrap();
        let device = HostDevice::with_threads(1);
        BackendConfig { model: Arc::new(model), limits: BatchLimits::NONE, device }
    }

    #[test]
    fn every_name_gives_a_backend_with_a_note_or_a_refusal_that_says_why() {
        let names: HashSet<_> = SGLANG.iter().map(|alias| alias.name).collect();
        assert_eq!(names.len(), SGLANG.len());
        for alias in SGLANG {
            match create_backend(alias.name, &config()) {
                Ok((backend, selection)) => {
                    assert_eq!(Some(backend.name()), alias.target);
                    assert!(selection.notes[0].contains(alias.note), "{selection}");
                }
                Err(SelectError::NoCounterpart { why, known, .. }) => {
                    assert!(alias.target.is_none() && why == alias.note && known.contains(&"cpu"));
                }
                // Where there is no GPU, the backend that was found says what is missing.
                Err(SelectError::Unsupported { name, reasons }) => {
                    assert!(alias.target == Some(name) && name == "cuda" && !reasons.is_empty());
                }
                Err(error) => panic!("{}: {error}", alias.name),
            }
        }
    }

    #[test]
    fn a_pair_may_mix_names_of_both_systems() {
        let (backend, selection) = create_backend("torch_native,oracle", &config()).unwrap();
        let names = (selection.extend.to_string(), selection.decode.to_string());
        assert_eq!((backend.name(), &*names.0, &*names.1), ("hybrid", "cpu", "oracle"));
        assert_eq!(selection.notes.len(), 1);
    }

    #[test]
    fn targets_are_backends_and_no_backend_is_hidden_by_an_alias() {
        let registry = host_registry();
        let is_known = |name| registry.entries().iter().any(|entry| entry.name == name);
        for alias in registry.aliases() {
            assert!(alias.target.is_none_or(is_known) && !is_known(alias.name), "{}", alias.name);
        }
    }
}

//! Names by which SGLang's users know attention backends, and what they stand for here.
//!
//! A name of something that runs on the processor stands for our CPU backend, one of something on an NVIDIA GPU for the
//! CUDA backend. In a build without it, such a name is refused with the reason: nobody asks for it to get a slow answer.

use attn_metadata::Alias;

const fn alias(name: &'static str, target: Option<&'static str>, note: &'static str) -> Alias {
    Alias { name, target, note }
}

/// A name of attention kernels on NVIDIA GPUs: what it is, and what the CUDA backend is beside it.
macro_rules! on_cuda {
    ($name:literal, $what:literal, $ours:literal) => {
        if cfg!(feature = "cuda") {
            alias($name, Some("cuda"), concat!($what, "; ", $ours))
        } else {
            alias(
                $name,
                None,
                concat!($what, "; the CUDA backend is not in this build: rebuild with `--features cuda`"),
            )
        }
    };
}

/// A name of latent attention on GPUs, where there is none here.
macro_rules! mla_on_gpu {
    ($name:literal, $what:literal) => {
        alias($name, None, concat!($what, "; here MLA runs on the CPU alone: choose mla"))
    };
}

/// A name of token-sparse latent attention, which no backend here does by name.
macro_rules! sparse_mla {
    ($name:literal) => {
        alias(
            $name,
            None,
            "token-sparse MLA on NVIDIA GPUs; here it is part of the library attn-mla, on the CPU, and no backend; mla is \
             MLA over all tokens, on the CPU",
        )
    };
}

/// SGLang's list of names, in its order.
pub const SGLANG: &[Alias] = &[
    on_cuda!("triton", "attention kernels for GPUs written in Triton", "the CUDA backend has their features and more"),
    alias("torch_native", Some("cpu"), "PyTorch's own attention; the CPU backend has its features and more"),
    alias("flex_attention", Some("cpu"), "PyTorch's attention with score hooks; masks, softcap and ALiBi are built in"),
    sparse_mla!("nsa"),
    sparse_mla!("dsa"),
    mla_on_gpu!("cutlass_mla", "MLA decode on Blackwell GPUs"),
    on_cuda!("fa3", "FlashAttention-3 for Hopper GPUs", "the CUDA backend has its features and more"),
    on_cuda!("fa4", "FlashAttention-4 for Hopper and Blackwell GPUs", "the CUDA backend has its features and more"),
    on_cuda!("flashinfer", "kernels for NVIDIA GPUs", "the CUDA backend has their features and more"),
    mla_on_gpu!("flashmla", "MLA on NVIDIA GPUs"),
    mla_on_gpu!("trtllm_mla", "MLA on Blackwell GPUs"),
    on_cuda!("trtllm_mha", "attention for Blackwell GPUs", "the CUDA backend runs on them too"),
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
    fn a_note_denies_no_backend_that_is_there() {
        let note = |name: &str| SGLANG.iter().find(|alias| alias.name == name).unwrap().note;
        let has = |name: &str| host_registry().entries().iter().any(|entry| entry.name == name);
        for name in ["cutlass_mla", "flashmla", "trtllm_mla", "nsa", "dsa"] {
            let note = note(name);
            assert!(has("mla") && !note.contains("no MLA backend") && note.contains("mla") && note.contains("CPU"));
        }
        for name in ["triton", "fa3", "fa4", "flashinfer", "trtllm_mha"] {
            assert_eq!(note(name).contains("rebuild with `--features cuda`"), !has("cuda"), "{name}");
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

//! Every attention backend of this build, one row each, and how one is made by name.
//!
//! The order is the preference of `auto`. A new backend is a row here and a line in `Cargo.toml`; nothing else of this
//! crate names a backend.

use attn_metadata::{BackendConfig, BackendEntry, BoxedBackend, Host, Registry, Role, SelectError, Selection};

use crate::aliases;

/// The rows, in order of preference.
const ROWS: &[fn() -> BackendEntry<Host>] = &[
    attn_reference::cpu::entry,
    attn_reference::oracle::entry,
    #[cfg(feature = "cuda")]
    attn_cuda::host_entry,
    #[cfg(feature = "cuda")]
    attn_cuda::host_portable_entry,
    #[cfg(feature = "cuda")]
    attn_cuda::host_plain_entry,
    #[cfg(feature = "cuda")]
    attn_cuda::host_strict_entry,
    #[cfg(feature = "cuda")]
    attn_cuda::host_free_entry,
    attn_sparse::entry,
    attn_sparse::oracle_entry,
    attn_sparse::page_table_entry,
    attn_mla::entry,
    attn_mla::oracle::entry,
    // new backends: one row each, above this line
];

/// The backends for tensors in main memory.
#[must_use]
pub fn host_registry() -> Registry<Host> {
    Registry::new(ROWS.iter().map(|row| row()).collect()).with_aliases(aliases::SGLANG)
}

/// The backends that run in the memory of an NVIDIA GPU.
#[cfg(feature = "cuda")]
#[must_use]
pub fn cuda_registry() -> Registry<attn_cuda::Cuda> {
    Registry::new(vec![
        attn_cuda::entry(),
        attn_cuda::portable_entry(),
        attn_cuda::plain_entry(),
        attn_cuda::strict_entry(),
        attn_cuda::free_entry(),
    ])
}

/// Chooses and makes a backend: `choice` is a name, a pair `"prefill,decode"` or `"auto"`.
///
/// # Errors
/// [`SelectError`], with the reasons of every backend that does not fit.
pub fn create_backend(
    choice: &str,
    config: &BackendConfig<Host>,
) -> Result<(BoxedBackend<Host>, Selection), SelectError> {
    host_registry().create(choice, config)
}

/// Makes what runs every layer on an oracle: float64 references, which are chosen by name alone.
///
/// # Errors
/// [`SelectError`] where a layer's family has no oracle in this build.
pub fn create_oracle(config: &BackendConfig<Host>) -> Result<BoxedBackend<Host>, SelectError> {
    let registry = host_registry();
    let names: Vec<_> =
        registry.entries().iter().filter(|entry| entry.role == Role::Oracle).map(|entry| entry.name).collect();
    registry.create(&names.join("+"), config).map(|(backend, _)| backend)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn names_are_distinct_lower_case_and_have_no_comma() {
        let registry = host_registry();
        let names: HashSet<_> = registry.entries().iter().map(|entry| entry.name).collect();
        assert_eq!(names.len(), registry.entries().len());
        for name in names {
            assert!(!name.contains([',', ' ']) && name != "auto" && name == name.to_lowercase(), "{name:?}");
        }
    }

    /// `cargo xtask new-backend` refuses a name for its list of those taken, or because the name's crate is there.
    #[test]
    fn names_of_backends_and_aliases_are_taken() {
        let list = include_str!("../../../xtask/src/backend_name.rs").split("const TAKEN").nth(1).unwrap();
        let list = list.split("];").next().unwrap();
        let registry = host_registry();
        let names = registry.entries().iter().map(|entry| entry.name);
        for name in names.chain(registry.aliases().iter().map(|alias| alias.name)) {
            let crate_dir = format!("{}/../attn-{name}", env!("CARGO_MANIFEST_DIR"));
            let is_refused = list.contains(&format!("\"{name}\"")) || std::path::Path::new(&crate_dir).exists();
            assert!(is_refused || name.contains('_'), "{name} can be given to a new backend: add it to TAKEN");
        }
    }

    #[test]
    fn auto_prefers_the_cpu_backend_and_never_takes_the_oracle() {
        let entries = host_registry().entries().to_vec();
        assert_eq!(entries[0].name, "cpu");
        assert!(entries.iter().any(|entry| entry.name == "oracle" && entry.role == Role::Oracle));
    }
}

//! Renders the manifest: from what and how the images were built, and what each entry point uses.

use anyhow::Result;
use serde_json::{Value, json};

use super::image::{Built, Kind};
use super::source::{Unit, hash_of};
use super::toolkit::VERSION;

/// The manifest as text.
pub(super) fn render(units: &[Unit], built: &[Built], source_hash: &str) -> Result<String> {
    let image = |b: &Built| {
        let entries: serde_json::Map<String, Value> = b
            .usage
            .iter()
            .map(|(name, usage)| {
                let value = json!({
                    "registers": usage.registers,
                    "spill_store_bytes": usage.spill_store_bytes,
                    "spill_load_bytes": usage.spill_load_bytes,
                    "stack_bytes": usage.stack_bytes,
                    "static_shared_bytes": usage.shared_bytes,
                });
                (name.clone(), value)
            })
            .collect();
        json!({
            "file": b.target.file_name(),
            "target": b.target.sm(),
            "ptx_version": if b.target.kind == Kind::Ptx { Some(b.target.ptx_version()) } else { None },
            "flags": b.target.all_flags(),
            "bytes": b.bytes.len(),
            "sha256": hash_of(&b.bytes),
            "entries": entries,
        })
    };
    let modules: Vec<Value> =
        units.iter().map(|unit| json!({"module": unit.stem, "entries": unit.entries.len()})).collect();
    let manifest = json!({
        "source_hash": source_hash,
        "compiler": format!("nvcc {VERSION}"),
        "modules": modules,
        "images": built.iter().map(image).collect::<Vec<Value>>(),
    });
    Ok(serde_json::to_string_pretty(&manifest)? + "\n")
}

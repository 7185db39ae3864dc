//! Owns what is shipped: the images as they are in the tree, unpacked, and what the manifest says of them.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use super::image::{Target, Usage};
use super::source::hash_of;

/// The images there are.
#[derive(Debug, Default)]
pub(super) struct Shipped {
    /// By name of the packed file.
    images: BTreeMap<String, Vec<u8>>,
    /// By name of the file: its hash, and what its entry points use.
    manifest: BTreeMap<String, (String, BTreeMap<String, Usage>)>,
}

impl Shipped {
    /// Reads a folder; what cannot be read there is not shipped.
    pub(super) fn read(folder: &Path) -> Result<Self> {
        let mut shipped = Self::default();
        let Ok(entries) = fs::read_dir(folder) else { return Ok(shipped) };
        for entry in entries {
            let path = entry.with_context(|| format!("cannot read {}", folder.display()))?.path();
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            if name == "manifest.json" {
                shipped.manifest = fs::read_to_string(&path).map(|text| manifest(&text)).unwrap_or_default();
            } else if let Some(bytes) = fs::read(&path).ok().and_then(|packed| unpack(&packed)) {
                shipped.images.insert(name, bytes);
            }
        }
        Ok(shipped)
    }

    /// An image by the name of its packed file.
    pub(super) fn image(&self, packed_name: &str) -> Option<&[u8]> {
        self.images.get(packed_name).map(Vec::as_slice)
    }

    /// What the manifest says of an image that has these bytes, in the manifest and in the tree.
    pub(super) fn usage_of(&self, target: &Target, bytes: &[u8]) -> Option<BTreeMap<String, Usage>> {
        let (hash, usage) = self.manifest.get(&target.file_name())?;
        let is_same = self.image(&target.packed_name()) == Some(bytes) && *hash == hash_of(bytes);
        is_same.then(|| usage.clone())
    }
}

fn unpack(packed: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    brotli::BrotliDecompress(&mut &*packed, &mut bytes).ok()?;
    Some(bytes)
}

/// Hash and usage of each image of a manifest; what has none of the form that we write is left out.
fn manifest(text: &str) -> BTreeMap<String, (String, BTreeMap<String, Usage>)> {
    let manifest: Value = serde_json::from_str(text).unwrap_or_default();
    let image = |image: &Value| {
        let entries = image["entries"].as_object()?;
        let usage: Option<BTreeMap<String, Usage>> =
            entries.iter().map(|(name, value)| Some((name.clone(), usage(value)?))).collect();
        Some((image["file"].as_str()?.to_owned(), (image["sha256"].as_str()?.to_owned(), usage?)))
    };
    manifest["images"].as_array().map(|images| images.iter().filter_map(image).collect()).unwrap_or_default()
}

fn usage(value: &Value) -> Option<Usage> {
    let number = |name: &str| u32::try_from(value[name].as_u64()?).ok();
    Some(Usage {
        registers: number("registers")?,
        spill_store_bytes: number("spill_store_bytes")?,
        spill_load_bytes: number("spill_load_bytes")?,
        stack_bytes: number("stack_bytes")?,
        shared_bytes: number("static_shared_bytes")?,
    })
}

#[cfg(test)]
mod tests {
    use super::super::image::{Built, Kind};
    use super::super::{compress, manifest};
    use super::*;

    #[test]
    fn usage_is_that_of_the_shipped_bytes_alone() {
        let target = Target { stem: "a".to_owned(), kind: Kind::Ptx, arch: 80, is_specific: false, is_checked: false };
        let usage = Usage { registers: 7, spill_store_bytes: 1, spill_load_bytes: 2, stack_bytes: 3, shared_bytes: 4 };
        let usage = BTreeMap::from([("k".to_owned(), usage)]);
        let built = Built { target: target.clone(), bytes: b"text".to_vec(), usage: usage.clone() };
        let folder = std::env::temp_dir().join(format!("xtask-shipped-{}", std::process::id()));
        // A run that failed may have left one behind, and its process id comes again.
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("manifest.json"), manifest::render(&[], &[built], "").unwrap()).unwrap();
        fs::write(folder.join(target.packed_name()), compress(b"text").unwrap()).unwrap();
        let shipped = Shipped::read(&folder).unwrap();
        assert_eq!(shipped.usage_of(&target, b"text"), Some(usage));
        assert_eq!(shipped.usage_of(&target, b"other"), None);
        fs::write(folder.join(target.packed_name()), compress(b"other").unwrap()).unwrap();
        let shipped = Shipped::read(&folder).unwrap();
        assert_eq!(shipped.usage_of(&target, b"text"), None, "the manifest is of another text");
        assert_eq!(shipped.usage_of(&target, b"other"), None, "the manifest is of another text");
        fs::remove_dir_all(folder).unwrap();
    }
}

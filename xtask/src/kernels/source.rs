//! Owns what is to be built: the kernel files of `kernels/` with the entry points that their `.inst` lists name.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};

/// Kernel files that use instructions of compute capability 9.0 alone end in this.
const HOPPER_SUFFIX: &str = "_sm90";

/// One entry point, as a line of an `.inst` list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) q_dtype: String,
    pub(super) kv_dtype: String,
    pub(super) head_dim_qk: u32,
    pub(super) head_dim_vo: u32,
    pub(super) is_general: bool,
    pub(super) threads: u32,
    pub(super) shared_bytes: u32,
    pub(super) blocks_per_sm: u32,
    pub(super) rows: u32,
}

/// One kernel file.
#[derive(Clone, Debug)]
pub(super) struct Unit {
    pub(super) stem: String,
    pub(super) entries: Vec<Entry>,
}

impl Unit {
    /// Whether it runs on compute capability 9.0 alone.
    pub(super) fn is_hopper(&self) -> bool {
        self.stem.ends_with(HOPPER_SUFFIX)
    }

    /// Whether it is another file's, for Hopper alone, with every entry point of that.
    pub(super) fn replaces(&self, other: &Self) -> bool {
        let key =
            |e: &Entry| (e.q_dtype.clone(), e.kv_dtype.clone(), e.head_dim_qk, e.head_dim_vo, e.is_general, e.rows);
        self.stem.strip_suffix(HOPPER_SUFFIX) == Some(other.stem.as_str())
            && other.entries.iter().all(|entry| self.entries.iter().any(|own| key(own) == key(entry)))
    }
}

/// The kernel files, by name.
pub(super) fn units(folder: &Path) -> Result<Vec<Unit>> {
    let mut stems: Vec<String> = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "cu") {
            stems.push(path.file_stem().context("a file has a name")?.to_string_lossy().into_owned());
        }
    }
    stems.sort();
    ensure!(!stems.is_empty(), "no kernel file in {}", folder.display());
    let unit = |stem: String| {
        let path = folder.join(format!("{stem}.inst"));
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let entries = parse_list(&text).with_context(|| format!("in {}", path.display()))?;
        Ok(Unit { stem, entries })
    };
    stems.into_iter().map(unit).collect()
}

/// The entry points of a list.
fn parse_list(text: &str) -> Result<Vec<Entry>> {
    let mut entries: Vec<Entry> = Vec::new();
    for line in text.lines().map(str::trim) {
        if line.is_empty() || line.starts_with("//") || line.starts_with('#') {
            continue;
        }
        let inner = line.strip_prefix("KERNEL(").and_then(|rest| rest.split_once(')'));
        let Some((inner, _)) = inner else { bail!("not a line KERNEL(...): {line}") };
        let fields: Vec<&str> = inner.split(',').map(str::trim).collect();
        let [name, q_dtype, kv_dtype, qk, vo, general, threads, shared, blocks, rows] = fields[..] else {
            bail!("{} fields where 10 are needed: {line}", fields.len())
        };
        let number = |text: &str| text.parse::<u32>().with_context(|| format!("{text:?} is no number: {line}"));
        ensure!(entries.iter().all(|entry| entry.name != name), "{name} is listed twice");
        entries.push(Entry {
            name: name.to_owned(),
            q_dtype: q_dtype.to_owned(),
            kv_dtype: kv_dtype.to_owned(),
            head_dim_qk: number(qk)?,
            head_dim_vo: number(vo)?,
            is_general: number(general)? != 0,
            threads: number(threads)?,
            shared_bytes: number(shared)?,
            blocks_per_sm: number(blocks)?,
            rows: number(rows)?,
        });
    }
    ensure!(!entries.is_empty(), "no entry point");
    Ok(entries)
}

/// SHA-256 over names and contents of all sources, in hexadecimal.
pub(super) fn hash(folder: &Path) -> Result<String> {
    hash_where(folder, |_| true)
}

/// SHA-256 over what one kernel file is built from: itself, its list, and every header.
pub(super) fn hash_of_unit(folder: &Path, stem: &str) -> Result<String> {
    let is_header = |path: &Path| path.extension().is_some_and(|e| e == "h" || e == "cuh");
    hash_where(folder, |path| is_header(path) || path.file_stem().is_some_and(|s| s == stem))
}

fn hash_where(folder: &Path, keep: impl Fn(&Path) -> bool) -> Result<String> {
    let mut paths = Vec::new();
    collect(folder, &mut paths)?;
    paths.retain(|path| keep(path));
    paths.sort();
    let mut hasher = Sha256::new();
    for path in &paths {
        let name = path.strip_prefix(folder).context("a source lies in the folder")?;
        let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        hasher.update(name.to_string_lossy().replace('\\', "/").as_bytes());
        hasher.update([0]);
        hasher.update((bytes.len() as u64).to_le_bytes());
        hasher.update(&bytes);
    }
    Ok(hex(hasher.finalize()))
}

/// SHA-256 of some bytes, in hexadecimal.
pub(super) fn hash_of(bytes: &[u8]) -> String {
    hex(Sha256::digest(bytes))
}

fn hex(digest: impl AsRef<[u8]>) -> String {
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn collect(folder: &Path, paths: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, paths)?;
        } else if path.extension().is_some_and(|e| ["cu", "cuh", "h", "inst"].iter().any(|known| e == *known)) {
            paths.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_gives_its_entry_points() {
        let text = "// comment\n\nKERNEL(decode_bf16_64, bf16, fp8, 64, 128, 1, 256, 49152, 2, 16) // more\n";
        let entries = parse_list(text).unwrap();
        assert_eq!(entries.len(), 1);
        let entry = &entries[0];
        assert_eq!((entry.name.as_str(), entry.kv_dtype.as_str(), entry.rows), ("decode_bf16_64", "fp8", 16));
        assert!(entry.is_general && entry.shared_bytes == 49_152);
    }

    #[test]
    fn a_file_for_hopper_replaces_the_one_whose_entry_points_it_all_has() {
        let unit = |stem: &str, dims: &[u32]| {
            let line = |dim: &u32| format!("KERNEL({stem}_{dim}, bf16, bf16, {dim}, {dim}, 0, 32, 0, 1, 16)\n");
            Unit { stem: stem.to_owned(), entries: parse_list(&dims.iter().map(line).collect::<String>()).unwrap() }
        };
        let base = unit("decode", &[64, 128]);
        assert!(unit("decode_sm90", &[128, 64]).replaces(&base));
        assert!(!unit("decode_sm90", &[64]).replaces(&base) && !unit("extend_sm90", &[64, 128]).replaces(&base));
        assert!(!base.replaces(&base));
    }

    #[test]
    fn what_is_no_entry_point_is_an_error() {
        assert!(parse_list("KERNEL(a, bf16)").unwrap_err().to_string().contains("2 fields"));
        assert!(parse_list("kernel(a)").is_err());
        assert!(parse_list("").is_err());
        let twice = "KERNEL(a, f16, f16, 1, 1, 0, 1, 0, 1, 1)\n".repeat(2);
        assert!(parse_list(&twice).unwrap_err().to_string().contains("twice"));
    }
}

//! `cargo xtask kernels`: compiles `kernels/` into the images that `attn-cuda` ships.
//!
//! What a build gives depends on the sources and the pinned compiler alone: no time, no path, no machine. So `--check`
//! builds again and compares, byte for byte.

mod compile;
mod image;
mod manifest;
mod source;
mod table;
mod toolkit;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use self::image::Built;
use self::source::Unit;
use self::toolkit::Toolkit;
use crate::workspace::Workspace;

/// Where the sources are.
const SOURCES: &str = "kernels";
/// Where images and manifest go.
const IMAGES: &str = "crates/attn-cuda/images";
/// The generated table of images and entry points.
const TABLE: &str = "crates/attn-cuda/src/images.rs";

/// Options of `kernels`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Compare with the images there are instead of replacing them
    #[arg(long)]
    check: bool,
    /// With --check: fail where the compiler cannot be had, instead of comparing source hashes alone
    #[arg(long)]
    strict: bool,
    /// With --check: compare source hashes alone, which takes a moment
    #[arg(long, conflicts_with = "strict")]
    hashes: bool,
}

/// Everything that a build writes, by path in the workspace.
type Files = BTreeMap<String, Vec<u8>>;

/// Builds, and writes or compares.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<bool> {
    let units = source::units(&workspace.path(SOURCES))?;
    let source_hash = source::hash(&workspace.path(SOURCES))?;
    if args.check && args.hashes {
        return check_hash(workspace, &source_hash);
    }
    let toolkit = match Toolkit::find(workspace) {
        Ok(toolkit) => toolkit,
        Err(why) if args.check && !args.strict => {
            println!("kernels are not rebuilt, only their source hash is compared: {why:#}");
            return check_hash(workspace, &source_hash);
        }
        Err(why) => return Err(why),
    };
    println!("compiler: {}", toolkit.describe(workspace));
    let built = compile::all(workspace, &toolkit, &units)?;
    let files = files(&units, &built, &source_hash)?;
    if args.check { compare(workspace, &files) } else { write(workspace, &files) }
}

fn files(units: &[Unit], built: &[Built], source_hash: &str) -> Result<Files> {
    let mut files: Files = Files::new();
    for b in built {
        files.insert(format!("{IMAGES}/{}", b.target.packed_name()), compress(&b.bytes)?);
    }
    files.insert(format!("{IMAGES}/manifest.json"), manifest::render(units, built, source_hash)?.into_bytes());
    files.insert(TABLE.to_owned(), table::render(units, built).into_bytes());
    Ok(files)
}

/// Kernels of one file are much alike, over more than the window of most compressors: brotli with its largest window.
fn compress(bytes: &[u8]) -> Result<Vec<u8>> {
    let params = brotli::enc::BrotliEncoderParams {
        quality: 9,
        lgwin: 24,
        size_hint: bytes.len(),
        ..brotli::enc::BrotliEncoderParams::default()
    };
    let mut packed = Vec::new();
    brotli::BrotliCompress(&mut &*bytes, &mut packed, &params).context("cannot compress an image")?;
    Ok(packed)
}

fn write(workspace: &Workspace, files: &Files) -> Result<bool> {
    let folder = workspace.path(IMAGES);
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    for name in present(&folder)? {
        let path = format!("{IMAGES}/{name}");
        if !files.contains_key(&path) {
            fs::remove_file(workspace.path(&path)).with_context(|| format!("cannot delete {path}"))?;
        }
    }
    for (path, bytes) in files {
        fs::write(workspace.path(path), bytes).with_context(|| format!("cannot write {path}"))?;
    }
    let bytes: usize = files.values().map(Vec::len).sum();
    println!("wrote {} files, {} KiB", files.len(), bytes >> 10);
    Ok(true)
}

/// Says which files are not what a build gives.
fn compare(workspace: &Workspace, files: &Files) -> Result<bool> {
    let mut differences: Vec<String> = Vec::new();
    for (path, bytes) in files {
        match fs::read(workspace.path(path)) {
            Ok(there) if there == *bytes => {}
            Ok(_) => differences.push(format!("{path} is not what the sources give")),
            Err(_) => differences.push(format!("{path} is missing")),
        }
    }
    for name in present(&workspace.path(IMAGES))? {
        if !files.contains_key(&format!("{IMAGES}/{name}")) {
            differences.push(format!("{IMAGES}/{name} is not built any more"));
        }
    }
    differences.iter().for_each(|difference| println!("{difference}"));
    if differences.is_empty() {
        println!("{} files are what the sources give", files.len());
    } else {
        println!("run `cargo xtask kernels` and commit what it writes");
    }
    Ok(differences.is_empty())
}

fn check_hash(workspace: &Workspace, source_hash: &str) -> Result<bool> {
    let path = workspace.path(IMAGES).join("manifest.json");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", workspace.shown(&path)))?;
    let manifest: serde_json::Value = serde_json::from_str(&text)?;
    let is_same = manifest["source_hash"].as_str() == Some(source_hash);
    println!("{}", if is_same { "the images are of these sources" } else { "the images are of other sources" });
    Ok(is_same)
}

fn present(folder: &Path) -> Result<Vec<String>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", folder.display())),
    };
    let name = |entry: std::io::Result<fs::DirEntry>| entry.map(|e| e.file_name().to_string_lossy().into_owned());
    Ok(entries.map(name).collect::<std::io::Result<Vec<String>>>()?)
}

//! `cargo xtask kernels`: compiles `kernels/` into the images that `attn-cuda` ships.
//!
//! What a build gives depends on the sources and the pinned compiler alone: no time, no path, no machine. So `--check`
//! builds again and compares, byte for byte. Text is assembled where it is written, to see that the oldest assembler
//! takes it; `--check` does that again only with `--strict`, since the same text gives the same.

mod compile;
mod image;
mod manifest;
mod parallel;
mod shipped;
mod source;
mod table;
mod toolkit;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use self::image::Built;
use self::parallel::do_all;
use self::shipped::Shipped;
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
    /// With --check: fail where the compiler cannot be had, instead of comparing source hashes alone, and assemble all
    /// text again
    #[arg(long, requires = "check")]
    strict: bool,
    /// With --check: compare source hashes alone, which takes a moment
    #[arg(long, conflicts_with = "strict", requires = "check")]
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
    if !args.check {
        let built = compile::all(workspace, &toolkit, &units, None)?;
        let mut files = texts(&units, &built, &source_hash)?;
        files.extend(compress_all(&built)?);
        return write(workspace, &files);
    }
    let shipped = Shipped::read(&workspace.path(IMAGES))?;
    let built = compile::all(workspace, &toolkit, &units, (!args.strict).then_some(&shipped))?;
    compare(workspace, &texts(&units, &built, &source_hash)?, &built, &shipped)
}

/// Manifest and table.
fn texts(units: &[Unit], built: &[Built], source_hash: &str) -> Result<Files> {
    let manifest = manifest::render(units, built, source_hash)?.into_bytes();
    let table = table::render(units, built).into_bytes();
    Ok(Files::from([(format!("{IMAGES}/manifest.json"), manifest), (TABLE.to_owned(), table)]))
}

/// The images as they are shipped.
fn compress_all(built: &[Built]) -> Result<Files> {
    let mut jobs: Vec<&Built> = built.iter().collect();
    jobs.sort_by_key(|image| std::cmp::Reverse(image.bytes.len()));
    let packed = do_all(&jobs, |image| {
        let path = format!("{IMAGES}/{}", image.target.packed_name());
        compress(&image.bytes).map(|packed| (path, packed))
    });
    packed.into_iter().collect()
}

/// Kernels of one file are much alike, over more than the window of most compressors: brotli with its largest window. Quality
/// 10 makes text a third smaller than 9 does, for some minutes.
fn compress(bytes: &[u8]) -> Result<Vec<u8>> {
    let params = brotli::enc::BrotliEncoderParams {
        quality: 10,
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
fn compare(workspace: &Workspace, texts: &Files, built: &[Built], shipped: &Shipped) -> Result<bool> {
    let mut differences: Vec<String> = Vec::new();
    let mut expect = |path: &str, is_same: Option<bool>| match is_same {
        Some(true) => {}
        Some(false) => differences.push(format!("{path} is not what the sources give")),
        None => differences.push(format!("{path} is missing or damaged")),
    };
    for (path, bytes) in texts {
        expect(path, fs::read(workspace.path(path)).ok().map(|there| there == *bytes));
    }
    for image in built {
        let name = image.target.packed_name();
        expect(&format!("{IMAGES}/{name}"), shipped.image(&name).map(|there| there == image.bytes));
    }
    for name in present(&workspace.path(IMAGES))? {
        let is_built = built.iter().any(|image| image.target.packed_name() == name);
        if !is_built && !texts.contains_key(&format!("{IMAGES}/{name}")) {
            differences.push(format!("{IMAGES}/{name} is not built any more"));
        }
    }
    differences.iter().for_each(|difference| println!("{difference}"));
    if differences.is_empty() {
        println!("all {} images, the manifest and the table are what is shipped", built.len());
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

//! Runs the compiler and reads what it says. Spills, serialised matrix products and code whose names depend on where
//! it was compiled are errors.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use super::SOURCES;
use super::image::{Built, Kind, Target, Usage, targets};
use super::parallel::do_all;
use super::shipped::Shipped;
use super::source::{self, Unit};
use super::toolkit::{Toolkit, VERSION};
use crate::workspace::Workspace;

/// Entry points that may spill: name, reason.
const SPILLS_ALLOWED: &[(&str, &str)] = &[];

/// Where intermediate files go.
const SCRATCH: &str = ".cache/kernels";

/// Builds every image of every file, on as many threads as there are processors. Text that is the same as the shipped
/// one is not assembled again to see whether it assembles: what comes of it then is what came of it when it was shipped.
///
/// What the compiler gave is kept, by everything that it depends on, and compared again each time: so a check that finds
/// sources, flags and compiler as they were compiles nothing, and still sees a shipped image that is another.
pub(super) fn all(
    workspace: &Workspace,
    toolkit: &Toolkit,
    units: &[Unit],
    shipped: Option<&Shipped>,
) -> Result<Vec<Built>> {
    let scratch = workspace.path(SCRATCH);
    fs::create_dir_all(&scratch).with_context(|| format!("cannot create {}", scratch.display()))?;
    let mut jobs: Vec<(&Unit, Vec<Target>)> = Vec::new();
    for unit in units {
        let mut of_unit = targets(unit, units);
        of_unit.sort_by_key(|target| (target.text(), target.kind));
        let of_a_text = of_unit.chunk_by(|a, b| a.text() == b.text());
        jobs.extend(of_a_text.map(|targets| (unit, targets.to_vec())));
    }
    // Long ones first, so that all processors are busy to the end.
    jobs.sort_by_key(|(unit, targets)| std::cmp::Reverse((unit.entries.len(), targets.len())));
    let built = do_all(&jobs, |(unit, targets)| of_a_text(workspace, toolkit, unit, targets, &scratch, shipped));
    let built = built.into_iter().collect::<Result<Vec<_>>>()?;
    let mut built: Vec<Built> = built.into_iter().flatten().collect();
    built.sort_by(|a, b| a.target.cmp(&b.target));
    Ok(built)
}

/// The images that come of one text: the text itself, machine code, or both.
fn of_a_text(
    workspace: &Workspace,
    toolkit: &Toolkit,
    unit: &Unit,
    targets: &[Target],
    scratch: &Path,
    shipped: Option<&Shipped>,
) -> Result<Vec<Built>> {
    let text = targets.first().context("a text has an image")?.text();
    let kept = Kept::of(workspace, &text, scratch)?;
    if kept.load().is_none() {
        compile(workspace, toolkit, &text, &kept)?;
    }
    let image = |target: &Target| {
        let (bytes, usage, said) = match target.kind {
            Kind::Ptx => shipped_text(toolkit, target, &kept, shipped)?,
            Kind::Cubin => machine_code(workspace, toolkit, target, &kept, scratch)?,
        };
        judge(unit, target, &usage, &said)?;
        Ok(Built { target: target.clone(), bytes, usage })
    };
    targets.iter().map(image).collect()
}

/// An image, what its entry points use, and what the assembler said.
type Image = (Vec<u8>, BTreeMap<String, Usage>, String);

/// Text as it is shipped, and proof that it assembles, where it is not what is shipped already.
fn shipped_text(toolkit: &Toolkit, target: &Target, kept: &Kept, shipped: Option<&Shipped>) -> Result<Image> {
    let text = fs::read_to_string(&kept.image).with_context(|| format!("cannot read {}", kept.image.display()))?;
    let bytes = lower(&text, target.ptx_version()).with_context(|| format!("in {}", target.file_name()))?.into_bytes();
    if let Some(known) = shipped.and_then(|shipped| shipped.usage_of(target, &bytes)) {
        return Ok((bytes, known, String::new()));
    }
    let said = kept.proof(toolkit, target, &bytes)?;
    Ok((bytes, usage(&said), said))
}

/// What the assembler makes of a text.
fn machine_code(
    workspace: &Workspace,
    toolkit: &Toolkit,
    target: &Target,
    text: &Kept,
    scratch: &Path,
) -> Result<Image> {
    let kept = Kept::of(workspace, target, scratch)?;
    let (bytes, said) = match kept.load() {
        Some(found) => found,
        None => {
            eprintln!("assembling {}", target.file_name());
            let mut command = toolkit.command("ptxas");
            command.args(target.assembler_flags()).arg(&text.image);
            kept.run(command, &target.file_name())?
        }
    };
    Ok((bytes, usage(&said), said))
}

/// Runs the compiler.
fn compile(workspace: &Workspace, toolkit: &Toolkit, text: &Target, kept: &Kept) -> Result<()> {
    eprintln!("compiling {}", text.file_name());
    let mut command = toolkit.command("nvcc");
    // Relative names: what the compiler remembers of them is the same everywhere.
    command.current_dir(workspace.path(SOURCES)).args(text.flags()).arg("-I.").arg(format!("{}.cu", text.stem));
    kept.run(command, &text.file_name()).map(|_| ())
}

/// What an earlier build of the same sources with the same compiler and flags gave.
struct Kept {
    image: PathBuf,
    report: PathBuf,
}

impl Kept {
    fn of(workspace: &Workspace, target: &Target, scratch: &Path) -> Result<Self> {
        let inputs = source::hash_of_unit(&workspace.path(SOURCES), &target.stem)?;
        let key = source::hash_of(format!("{VERSION} {} {inputs}", target.all_flags().join(" ")).as_bytes());
        let image = scratch.join(format!("{}.{}", target.file_name(), &key[..16]));
        Ok(Self { report: image.with_extension(format!("{}.report", &key[..16])), image })
    }

    /// What the assembler said of the lowered text.
    fn proof(&self, toolkit: &Toolkit, target: &Target, text: &[u8]) -> Result<String> {
        let digest = source::hash_of(text);
        let path = self.image.with_extension(format!("{}.proof", &digest[..16]));
        if let Ok(said) = fs::read_to_string(&path) {
            return Ok(said);
        }
        let lowered = self.image.with_extension("lowered");
        fs::write(&lowered, text).with_context(|| format!("cannot write {}", lowered.display()))?;
        let said = assemble(toolkit, target, &lowered)?;
        fs::write(&path, &said).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(said)
    }

    /// Runs a tool that writes the image; returns that and what it said.
    fn run(&self, mut command: Command, name: &str) -> Result<(Vec<u8>, String)> {
        // Under its own name at first: another run may be at the same file, and this one may be stopped.
        let partial = self.image.with_extension(format!("partial-{}", std::process::id()));
        let tool = command.get_program().to_string_lossy().into_owned();
        let output = command.arg("-o").arg(&partial).output().with_context(|| format!("cannot start {tool}"))?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "{tool} failed for {name}:\n{said}");
        fs::rename(&partial, &self.image).with_context(|| format!("cannot write {}", self.image.display()))?;
        let bytes = fs::read(&self.image).with_context(|| format!("cannot read {}", self.image.display()))?;
        // The report last: without it the image does not count.
        fs::write(&self.report, &said).with_context(|| format!("cannot write {}", self.report.display()))?;
        Ok((bytes, said))
    }

    fn load(&self) -> Option<(Vec<u8>, String)> {
        Some((fs::read(&self.image).ok()?, fs::read_to_string(&self.report).ok()?))
    }
}

/// Assembles lowered text, which proves that the older version knows its instructions.
fn assemble(toolkit: &Toolkit, target: &Target, text: &Path) -> Result<String> {
    let mut command = toolkit.command("ptxas");
    command.arg("-v").arg(format!("-arch={}", target.sm())).arg(text).arg("-o").arg(text.with_extension("assembled"));
    let output = command.output().context("cannot start ptxas")?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let version = target.ptx_version();
    ensure!(output.status.success(), "{} does not assemble as PTX {version}:\n{said}", target.file_name());
    Ok(said)
}

/// The text with an older version in its head, without comments and needless blanks.
fn lower(text: &str, version: &str) -> Result<String> {
    let text = &without_path_hashes(text)?;
    let mut lowered = String::with_capacity(text.len());
    let mut num_versions = 0;
    for line in text.lines() {
        let line = line.split("//").next().unwrap_or_default();
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            // The pragma tells a newer assembler what is read of a load; older ones do not know it.
            [] | [".pragma", "\"used_bytes_mask", ..] => continue,
            [".version", _] => {
                num_versions += 1;
                lowered.push_str(".version ");
                lowered.push_str(version);
            }
            _ => lowered.push_str(&words.join(" ")),
        }
        lowered.push('\n');
    }
    ensure!(num_versions == 1, "{num_versions} lines .version");
    Ok(lowered)
}

/// Names with internal linkage hold two hashes of where their file lies: `_INTERNAL_<hash>_<n>_<file>_cu_<hash>` of
/// functions and constants, `_GLOBAL__N__` in place of `_INTERNAL_` of what is in a namespace without a name. All files
/// have their own module, so zeros are as good.
fn without_path_hashes(text: &str) -> Result<String> {
    let mut text = text.to_owned();
    for marker in ["_INTERNAL_", "_GLOBAL__N__"] {
        let Some((_, rest)) = text.split_once(marker) else { continue };
        let is_hash = |hash: &&str| hash.len() == 8 && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
        let first = rest.get(..8).filter(is_hash).context("a name with internal linkage has no hash")?;
        let second = rest.split_once("_cu_").and_then(|(_, rest)| rest.get(..8)).filter(is_hash);
        let second = second.context("a name with internal linkage has no second hash")?;
        text = text.replace(first, "00000000").replace(second, "00000000");
    }
    Ok(text)
}

/// Reads the assembler's report: a line that names an entry point, then lines about it.
fn usage(said: &str) -> BTreeMap<String, Usage> {
    let mut all: BTreeMap<String, Usage> = BTreeMap::new();
    let mut current = String::new();
    for line in said.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            current = rest.split('\'').next().unwrap_or_default().to_owned();
            all.entry(current.clone()).or_default();
        }
        let Some(usage) = all.get_mut(&current) else { continue };
        let mut words = line.split([' ', ',']).filter(|word| !word.is_empty()).peekable();
        while let Some(word) = words.next() {
            let Ok(number) = word.parse::<u32>() else { continue };
            let mut rest = words.clone();
            match [rest.next(), rest.next(), rest.next()] {
                [Some("registers"), ..] => usage.registers = number,
                [Some("bytes"), Some("smem"), _] => usage.shared_bytes = number,
                [Some("bytes"), Some("stack"), _] => usage.stack_bytes = number,
                [Some("bytes"), Some("spill"), Some("stores")] => usage.spill_store_bytes = number,
                [Some("bytes"), Some("spill"), Some("loads")] => usage.spill_load_bytes = number,
                _ => {}
            }
        }
    }
    all
}

/// Fails for what must not ship.
fn judge(unit: &Unit, target: &Target, usage: &BTreeMap<String, Usage>, said: &str) -> Result<()> {
    let name = target.file_name();
    if let Some(line) = said.lines().find(|line| line.contains("wgmma") && line.contains("serialized")) {
        bail!("{name}: {line}");
    }
    for entry in &unit.entries {
        let Some(usage) = usage.get(&entry.name) else { bail!("{name} has no entry point {}", entry.name) };
        let spills = usage.spill_store_bytes + usage.spill_load_bytes > 0;
        // Of text the driver's compiler makes what runs; what ours makes of it is in the manifest.
        let is_allowed = target.kind == Kind::Ptx || SPILLS_ALLOWED.iter().any(|(allowed, _)| *allowed == entry.name);
        ensure!(!spills || is_allowed, "{name}: {} spills registers: {usage:?}", entry.name);
    }
    let unlisted = usage.keys().find(|name| unit.entries.iter().all(|entry| entry.name != **name));
    ensure!(unlisted.is_none(), "{name} has an entry point that no list names: {unlisted:?}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = "ptxas info    : Compiling entry function 'k1' for 'sm_90a'\n\
        ptxas info    : Function properties for k1\n    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n\
        ptxas info    : Used 168 registers, used 1 barriers, 1024 bytes smem, 400 bytes cmem[0]\n\
        ptxas info    : Compiling entry function 'k2' for 'sm_90a'\n\
        ptxas info    : Used 10 registers, used 0 barriers\n";

    #[test]
    fn the_report_is_read() {
        let usage = usage(SAID);
        let k1 =
            Usage { registers: 168, spill_store_bytes: 4, spill_load_bytes: 12, stack_bytes: 8, shared_bytes: 1024 };
        assert_eq!(usage["k1"], k1);
        assert_eq!(usage["k2"], Usage { registers: 10, ..Usage::default() });
    }

    #[test]
    fn the_compiler_runs_again_where_something_that_it_reads_changed() {
        let root = std::env::temp_dir().join(format!("xtask-kept-{}", std::process::id()));
        // A run that failed may have left one behind, and its process id comes again.
        let _ = fs::remove_dir_all(&root);
        let write = |name: &str, text: &str| fs::write(root.join(SOURCES).join(name), text).unwrap();
        fs::create_dir_all(root.join(SOURCES).join("primitives")).unwrap();
        for name in ["a.cu", "a.inst", "b.cu", "params.h", "primitives/mma.cuh"] {
            write(name, "as it was");
        }
        let workspace = Workspace::at(root.clone());
        let plain = Target { stem: "a".to_owned(), kind: Kind::Ptx, arch: 80, is_specific: false, is_checked: false };
        let kept = |target: &Target| Kept::of(&workspace, target, &root).unwrap();
        assert!(kept(&plain).load().is_none(), "nothing is kept in a fresh clone");
        let keep = |kept: &Kept| {
            fs::write(&kept.image, "image").unwrap();
            assert!(kept.load().is_none(), "an image without its report was not finished");
            fs::write(&kept.report, "report").unwrap();
        };
        keep(&kept(&plain));
        assert_eq!(kept(&plain).load(), Some((b"image".to_vec(), "report".to_owned())));
        assert!(kept(&Target { is_checked: true, ..plain.clone() }).load().is_none(), "other flags");
        write("b.cu", "changed");
        assert!(kept(&plain).load().is_some(), "another kernel's file");
        for name in ["a.cu", "a.inst", "params.h", "primitives/mma.cuh"] {
            write(name, "changed");
            assert!(kept(&plain).load().is_none(), "{name} changed");
            write(name, "as it was");
            assert!(kept(&plain).load().is_some(), "{name} is as it was");
        }
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn spills_and_serialised_products_fail() {
        let entry = |name: &str| super::super::source::Entry {
            name: name.to_owned(),
            q_dtype: String::new(),
            kv_dtype: String::new(),
            head_dim_qk: 1,
            head_dim_vo: 1,
            is_general: false,
            threads: 1,
            shared_bytes: 0,
            blocks_per_sm: 1,
            rows: 1,
        };
        let unit = |names: &[&str]| Unit { stem: "x".to_owned(), entries: names.iter().map(|n| entry(n)).collect() };
        let plain = &targets(&unit(&["k1"]), &[])[0].clone();
        let spill = judge(&unit(&["k1", "k2"]), plain, &usage(SAID), SAID).unwrap_err();
        assert!(spill.to_string().contains("k1 spills"), "{spill}");
        let clean = SAID.replace("4 bytes spill", "0 bytes spill").replace("12 bytes spill", "0 bytes spill");
        assert!(judge(&unit(&["k1", "k2"]), plain, &usage(&clean), &clean).is_ok());
        assert!(judge(&unit(&["k1"]), plain, &usage(&clean), &clean).is_err(), "k2 is not listed");
        assert!(judge(&unit(&["k1", "k2", "k3"]), plain, &usage(&clean), &clean).is_err(), "k3 is missing");
        let serial =
            format!("{clean}Potential Performance Loss: wgmma.mma_async instructions are serialized due to x\n");
        assert!(judge(&unit(&["k1", "k2"]), plain, &usage(&clean), &serial).is_err());
    }

    #[test]
    fn text_is_lowered_and_cleaned() {
        let text = "//\n// made by\n.version 9.0\n.target sm_80\n\n\tmov.u32 \t%r1, %r2; // x\n";
        let text = &text.replace("\n\n", "\n\t.pragma \"used_bytes_mask 0x3333\";\n");
        assert_eq!(lower(text, "7.4").unwrap(), ".version 7.4\n.target sm_80\nmov.u32 %r1, %r2;\n");
        let named = ".version 9.0\n48_INTERNAL_c3cbe546_17_x_cu_e297dba250_GLOBAL__N__c3cbe546_17_x_cu_e297dba2E\n";
        let zeros = "48_INTERNAL_00000000_17_x_cu_0000000050_GLOBAL__N__00000000_17_x_cu_00000000E";
        assert_eq!(lower(named, "7.4").unwrap(), format!(".version 7.4\n{zeros}\n"));
        let unnamed = ".version 9.0\n.b8 _ZN41_GLOBAL__N__acd6d9da_9_decode_cu_0993b3a36sharedE[];\n";
        let zeros = ".b8 _ZN41_GLOBAL__N__00000000_9_decode_cu_000000006sharedE[];";
        assert_eq!(lower(unnamed, "7.4").unwrap(), format!(".version 7.4\n{zeros}\n"));
        assert!(lower("a _ZN28_INTERNAL_1 b\n.version 9.0\n", "7.4").is_err());
        assert!(lower("no head\n", "7.4").is_err());
    }
}

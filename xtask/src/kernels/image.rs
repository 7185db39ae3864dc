//! Owns what is built of a kernel file: which images, for which GPUs, with which flags.

use std::collections::BTreeMap;

use super::source::Unit;

/// What an image holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Cubin,
    Ptx,
}

/// One image to build.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Target {
    pub(super) stem: String,
    pub(super) kind: Kind,
    /// Compute capability: 10 · major + minor.
    pub(super) arch: u32,
    /// Whether it runs on that capability alone.
    pub(super) is_specific: bool,
    /// Whether the kernels check their tables.
    pub(super) is_checked: bool,
}

impl Target {
    /// `sm_90a`.
    pub(super) fn sm(&self) -> String {
        format!("sm_{}{}", self.arch, if self.is_specific { "a" } else { "" })
    }

    /// Name of the compressed file.
    pub(super) fn packed_name(&self) -> String {
        self.file_name() + ".br"
    }

    /// `decode.checked.sm_80.ptx`.
    pub(super) fn file_name(&self) -> String {
        let checked = if self.is_checked { ".checked" } else { "" };
        let extension = if self.kind == Kind::Cubin { "cubin" } else { "ptx" };
        format!("{}{checked}.{}.{extension}", self.stem, self.sm())
    }

    /// The PTX version that the text is lowered to: the oldest that knows its instructions.
    pub(super) const fn ptx_version(&self) -> &'static str {
        if self.arch >= 90 { "8.1" } else { "7.4" }
    }

    /// The text that the image is, or is assembled from: images of one text are compiled once.
    pub(super) fn text(&self) -> Self {
        Self { kind: Kind::Ptx, ..self.clone() }
    }

    /// Flags of the compiler that the text depends on.
    pub(super) fn flags(&self) -> Vec<String> {
        let arch = self.sm().replace("sm_", "compute_");
        let mut flags = ["-std=c++17", "-O3", "-ptx"].map(str::to_owned).to_vec();
        flags.push(format!("-arch={arch}"));
        if self.is_checked {
            flags.push("-DATTN_CHECKED".to_owned());
        }
        flags
    }

    /// All flags that the image depends on.
    pub(super) fn all_flags(&self) -> Vec<String> {
        let mut flags = self.flags();
        if self.kind == Kind::Cubin {
            flags.extend(self.assembler_flags());
        }
        flags
    }

    /// Flags of the assembler that machine code depends on. It remembers them, and their order.
    pub(super) fn assembler_flags(&self) -> [String; 3] {
        [format!("-arch={}", self.sm()), "-m64".to_owned(), "-v".to_owned()]
    }
}

/// The images of a kernel file: machine code for Hopper, and text for everything from compute capability 8.0 on, plain
/// and checked. Files for Hopper alone have no text for others, and where such a file has every entry point of another
/// one, the other has no machine code: on Hopper it runs but to be compared with.
pub(super) fn targets(unit: &Unit, units: &[Unit]) -> Vec<Target> {
    let target =
        |kind, arch, is_specific, is_checked| Target { stem: unit.stem.clone(), kind, arch, is_specific, is_checked };
    let hopper = target(Kind::Cubin, 90, true, false);
    if unit.is_hopper() {
        return vec![hopper, target(Kind::Ptx, 90, true, false), target(Kind::Ptx, 90, true, true)];
    }
    let texts = [target(Kind::Ptx, 80, false, false), target(Kind::Ptx, 80, false, true)];
    let is_replaced = units.iter().any(|other| other.replaces(unit));
    (!is_replaced).then_some(hopper).into_iter().chain(texts).collect()
}

/// What the assembler says of an entry point.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Usage {
    pub(super) registers: u32,
    pub(super) spill_store_bytes: u32,
    pub(super) spill_load_bytes: u32,
    pub(super) stack_bytes: u32,
    /// Static shared memory.
    pub(super) shared_bytes: u32,
}

/// A built image.
#[derive(Clone, Debug)]
pub(super) struct Built {
    pub(super) target: Target,
    pub(super) bytes: Vec<u8>,
    /// By entry point.
    pub(super) usage: BTreeMap<String, Usage>,
}

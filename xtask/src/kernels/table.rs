//! Renders the table of images and entry points that `attn-cuda` dispatches by, as Rust.

use std::fmt::Write;

use super::image::{Built, Kind};
use super::source::{Entry, Unit};

const HEAD: &str = "\
//! Every image and entry point. Written by `cargo xtask kernels` from the lists in `kernels/`; do not edit.
#![cfg_attr(rustfmt, rustfmt_skip)]

use crate::device::{Image, ImageKind, ModuleSource};
use crate::entry::{Element, Entry};

";

/// The table as text.
pub(super) fn render(units: &[Unit], built: &[Built]) -> String {
    let mut text = HEAD.to_owned();
    for unit in units {
        for is_checked in [false, true] {
            module(&mut text, unit, built, is_checked);
        }
    }
    text.push_str("/// Every entry point, in the order of the lists.\npub(crate) static ENTRIES: &[Entry] = &[\n");
    for unit in units {
        unit.entries.iter().for_each(|e| entry(&mut text, unit, e));
    }
    text.push_str("];\n");
    text
}

fn module(text: &mut String, unit: &Unit, built: &[Built], is_checked: bool) {
    let name = static_name(unit, is_checked);
    let checked = if is_checked { ", checked flavour" } else { "" };
    let module = format!("{}{}", unit.stem, if is_checked { ".checked" } else { "" });
    let _ = writeln!(text, "/// Images of `{}.cu`{checked}.", unit.stem);
    let _ = writeln!(text, "pub(crate) static {name}: ModuleSource = ModuleSource {{");
    let _ = writeln!(text, "    name: \"{module}\",\n    images: &[");
    for b in built.iter().filter(|b| b.target.stem == unit.stem && b.target.is_checked == is_checked) {
        let kind = if b.target.kind == Kind::Cubin { "Cubin" } else { "Ptx" };
        let (file, packed) = (b.target.file_name(), b.target.packed_name());
        let (arch, is_specific) = (b.target.arch, b.target.is_specific);
        let _ = writeln!(
            text,
            "        Image {{ name: \"{file}\", kind: ImageKind::{kind}, arch: {arch}, is_specific: {is_specific}, \
             packed: include_bytes!(\"../images/{packed}\") }},"
        );
    }
    text.push_str("    ],\n};\n");
}

fn entry(text: &mut String, unit: &Unit, e: &Entry) {
    let element = |dtype: &str| match dtype {
        "f32" => "F32",
        "f16" => "F16",
        "bf16" => "Bf16",
        _ => "Fp8",
    };
    let _ = writeln!(
        text,
        "    Entry {{ module: &{}, checked: &{}, name: \"{}\", q: Element::{}, kv: Element::{}, head_dim_qk: {}, \
         head_dim_vo: {}, is_general: {}, threads: {}, shared_bytes: {}, blocks_per_sm: {}, rows: {} }},",
        static_name(unit, false),
        static_name(unit, true),
        e.name,
        element(&e.q_dtype),
        element(&e.kv_dtype),
        e.head_dim_qk,
        e.head_dim_vo,
        e.is_general,
        e.threads,
        e.shared_bytes,
        e.blocks_per_sm,
        e.rows
    );
}

fn static_name(unit: &Unit, is_checked: bool) -> String {
    format!("{}{}", unit.stem.to_uppercase(), if is_checked { "_CHECKED" } else { "" })
}

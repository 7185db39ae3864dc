//! Every image and entry point. Written by `cargo xtask kernels` from the lists in `kernels/`; do not edit.
#![cfg_attr(rustfmt, rustfmt_skip)]

use crate::device::{Image, ImageKind, ModuleSource};
use crate::entry::{Element, Entry};

/// Images of `decode.cu`.
pub(crate) static DECODE: ModuleSource = ModuleSource {
    name: "decode",
    images: &[
        Image { name: "decode.sm_80.ptx", kind: ImageKind::Ptx, arch: 80, is_specific: false, packed: include_bytes!("../images/decode.sm_80.ptx.br") },
    ],
};
/// Images of `decode.cu`, checked flavour.
pub(crate) static DECODE_CHECKED: ModuleSource = ModuleSource {
    name: "decode.checked",
    images: &[
        Image { name: "decode.checked.sm_80.ptx", kind: ImageKind::Ptx, arch: 80, is_specific: false, packed: include_bytes!("../images/decode.checked.sm_80.ptx.br") },
    ],
};
/// Images of `decode_sm90.cu`.
pub(crate) static DECODE_SM90: ModuleSource = ModuleSource {
    name: "decode_sm90",
    images: &[
        Image { name: "decode_sm90.sm_90a.cubin", kind: ImageKind::Cubin, arch: 90, is_specific: true, packed: include_bytes!("../images/decode_sm90.sm_90a.cubin.br") },
        Image { name: "decode_sm90.sm_90a.ptx", kind: ImageKind::Ptx, arch: 90, is_specific: true, packed: include_bytes!("../images/decode_sm90.sm_90a.ptx.br") },
    ],
};
/// Images of `decode_sm90.cu`, checked flavour.
pub(crate) static DECODE_SM90_CHECKED: ModuleSource = ModuleSource {
    name: "decode_sm90.checked",
    images: &[
        Image { name: "decode_sm90.checked.sm_90a.ptx", kind: ImageKind::Ptx, arch: 90, is_specific: true, packed: include_bytes!("../images/decode_sm90.checked.sm_90a.ptx.br") },
    ],
};
/// Images of `extend.cu`.
pub(crate) static EXTEND: ModuleSource = ModuleSource {
    name: "extend",
    images: &[
        Image { name: "extend.sm_90a.cubin", kind: ImageKind::Cubin, arch: 90, is_specific: true, packed: include_bytes!("../images/extend.sm_90a.cubin.br") },
        Image { name: "extend.sm_80.ptx", kind: ImageKind::Ptx, arch: 80, is_specific: false, packed: include_bytes!("../images/extend.sm_80.ptx.br") },
    ],
};
/// Images of `extend.cu`, checked flavour.
pub(crate) static EXTEND_CHECKED: ModuleSource = ModuleSource {
    name: "extend.checked",
    images: &[
        Image { name: "extend.checked.sm_80.ptx", kind: ImageKind::Ptx, arch: 80, is_specific: false, packed: include_bytes!("../images/extend.checked.sm_80.ptx.br") },
    ],
};
/// Images of `extend_sm90.cu`.
pub(crate) static EXTEND_SM90: ModuleSource = ModuleSource {
    name: "extend_sm90",
    images: &[
        Image { name: "extend_sm90.sm_90a.cubin", kind: ImageKind::Cubin, arch: 90, is_specific: true, packed: include_bytes!("../images/extend_sm90.sm_90a.cubin.br") },
        Image { name: "extend_sm90.sm_90a.ptx", kind: ImageKind::Ptx, arch: 90, is_specific: true, packed: include_bytes!("../images/extend_sm90.sm_90a.ptx.br") },
    ],
};
/// Images of `extend_sm90.cu`, checked flavour.
pub(crate) static EXTEND_SM90_CHECKED: ModuleSource = ModuleSource {
    name: "extend_sm90.checked",
    images: &[
        Image { name: "extend_sm90.checked.sm_90a.ptx", kind: ImageKind::Ptx, arch: 90, is_specific: true, packed: include_bytes!("../images/extend_sm90.checked.sm_90a.ptx.br") },
    ],
};
/// Images of `merge_partials.cu`.
pub(crate) static MERGE_PARTIALS: ModuleSource = ModuleSource {
    name: "merge_partials",
    images: &[
        Image { name: "merge_partials.sm_90a.cubin", kind: ImageKind::Cubin, arch: 90, is_specific: true, packed: include_bytes!("../images/merge_partials.sm_90a.cubin.br") },
        Image { name: "merge_partials.sm_80.ptx", kind: ImageKind::Ptx, arch: 80, is_specific: false, packed: include_bytes!("../images/merge_partials.sm_80.ptx.br") },
    ],
};
/// Images of `merge_partials.cu`, checked flavour.
pub(crate) static MERGE_PARTIALS_CHECKED: ModuleSource = ModuleSource {
    name: "merge_partials.checked",
    images: &[
        Image { name: "merge_partials.checked.sm_80.ptx", kind: ImageKind::Ptx, arch: 80, is_specific: false, packed: include_bytes!("../images/merge_partials.checked.sm_80.ptx.br") },
    ],
};
/// Images of `merge_states.cu`.
pub(crate) static MERGE_STATES: ModuleSource = ModuleSource {
    name: "merge_states",
    images: &[
        Image { name: "merge_states.sm_90a.cubin", kind: ImageKind::Cubin, arch: 90, is_specific: true, packed: include_bytes!("../images/merge_states.sm_90a.cubin.br") },
        Image { name: "merge_states.sm_80.ptx", kind: ImageKind::Ptx, arch: 80, is_specific: false, packed: include_bytes!("../images/merge_states.sm_80.ptx.br") },
    ],
};
/// Images of `merge_states.cu`, checked flavour.
pub(crate) static MERGE_STATES_CHECKED: ModuleSource = ModuleSource {
    name: "merge_states.checked",
    images: &[
        Image { name: "merge_states.checked.sm_80.ptx", kind: ImageKind::Ptx, arch: 80, is_specific: false, packed: include_bytes!("../images/merge_states.checked.sm_80.ptx.br") },
    ],
};
/// Images of `plain.cu`.
pub(crate) static PLAIN: ModuleSource = ModuleSource {
    name: "plain",
    images: &[
        Image { name: "plain.sm_90a.cubin", kind: ImageKind::Cubin, arch: 90, is_specific: true, packed: include_bytes!("../images/plain.sm_90a.cubin.br") },
        Image { name: "plain.sm_80.ptx", kind: ImageKind::Ptx, arch: 80, is_specific: false, packed: include_bytes!("../images/plain.sm_80.ptx.br") },
    ],
};
/// Images of `plain.cu`, checked flavour.
pub(crate) static PLAIN_CHECKED: ModuleSource = ModuleSource {
    name: "plain.checked",
    images: &[
        Image { name: "plain.checked.sm_80.ptx", kind: ImageKind::Ptx, arch: 80, is_specific: false, packed: include_bytes!("../images/plain.checked.sm_80.ptx.br") },
    ],
};
/// Images of `store_kv.cu`.
pub(crate) static STORE_KV: ModuleSource = ModuleSource {
    name: "store_kv",
    images: &[
        Image { name: "store_kv.sm_90a.cubin", kind: ImageKind::Cubin, arch: 90, is_specific: true, packed: include_bytes!("../images/store_kv.sm_90a.cubin.br") },
        Image { name: "store_kv.sm_80.ptx", kind: ImageKind::Ptx, arch: 80, is_specific: false, packed: include_bytes!("../images/store_kv.sm_80.ptx.br") },
    ],
};
/// Images of `store_kv.cu`, checked flavour.
pub(crate) static STORE_KV_CHECKED: ModuleSource = ModuleSource {
    name: "store_kv.checked",
    images: &[
        Image { name: "store_kv.checked.sm_80.ptx", kind: ImageKind::Ptx, arch: 80, is_specific: false, packed: include_bytes!("../images/store_kv.checked.sm_80.ptx.br") },
    ],
};
/// Every entry point, in the order of the lists.
pub(crate) static ENTRIES: &[Entry] = &[
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_bf16_bf16_d64", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 64, head_dim_vo: 64, is_general: false, threads: 192, shared_bytes: 81032, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_bf16_bf16_d64_general", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 64, head_dim_vo: 64, is_general: true, threads: 192, shared_bytes: 81032, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_bf16_bf16_d96", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 96, head_dim_vo: 96, is_general: false, threads: 192, shared_bytes: 75400, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_bf16_bf16_d96_general", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 96, head_dim_vo: 96, is_general: true, threads: 192, shared_bytes: 75400, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_bf16_bf16_d128", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 128, head_dim_vo: 128, is_general: false, threads: 192, shared_bytes: 93320, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_bf16_bf16_d128_general", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 128, head_dim_vo: 128, is_general: true, threads: 192, shared_bytes: 93320, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_bf16_bf16_d192", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 192, head_dim_vo: 192, is_general: false, threads: 128, shared_bytes: 76488, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_bf16_bf16_d192_general", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 192, head_dim_vo: 192, is_general: true, threads: 128, shared_bytes: 76488, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_bf16_bf16_d256", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 256, head_dim_vo: 256, is_general: false, threads: 128, shared_bytes: 101064, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_bf16_bf16_d256_general", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 256, head_dim_vo: 256, is_general: true, threads: 128, shared_bytes: 101064, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_bf16_bf16_d192x128", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 192, head_dim_vo: 128, is_general: false, threads: 128, shared_bytes: 91952, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_bf16_bf16_d192x128_general", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 192, head_dim_vo: 128, is_general: true, threads: 128, shared_bytes: 91952, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_bf16_fp8_d64", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 64, head_dim_vo: 64, is_general: false, threads: 192, shared_bytes: 80112, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_bf16_fp8_d64_general", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 64, head_dim_vo: 64, is_general: true, threads: 192, shared_bytes: 80112, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_bf16_fp8_d96", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 96, head_dim_vo: 96, is_general: false, threads: 192, shared_bytes: 88408, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_bf16_fp8_d96_general", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 96, head_dim_vo: 96, is_general: true, threads: 192, shared_bytes: 88408, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_bf16_fp8_d128", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 128, head_dim_vo: 128, is_general: false, threads: 192, shared_bytes: 93320, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_bf16_fp8_d128_general", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 128, head_dim_vo: 128, is_general: true, threads: 192, shared_bytes: 93320, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_bf16_fp8_d192", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 192, head_dim_vo: 192, is_general: false, threads: 128, shared_bytes: 95128, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_bf16_fp8_d192_general", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 192, head_dim_vo: 192, is_general: true, threads: 128, shared_bytes: 95128, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_bf16_fp8_d256", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 256, head_dim_vo: 256, is_general: false, threads: 128, shared_bytes: 94000, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_bf16_fp8_d256_general", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 256, head_dim_vo: 256, is_general: true, threads: 128, shared_bytes: 94000, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_bf16_fp8_d192x128", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 192, head_dim_vo: 128, is_general: false, threads: 128, shared_bytes: 80792, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_bf16_fp8_d192x128_general", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 192, head_dim_vo: 128, is_general: true, threads: 128, shared_bytes: 80792, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_f16_f16_d64", q: Element::F16, kv: Element::F16, head_dim_qk: 64, head_dim_vo: 64, is_general: false, threads: 192, shared_bytes: 81032, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_f16_f16_d64_general", q: Element::F16, kv: Element::F16, head_dim_qk: 64, head_dim_vo: 64, is_general: true, threads: 192, shared_bytes: 81032, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_f16_f16_d96", q: Element::F16, kv: Element::F16, head_dim_qk: 96, head_dim_vo: 96, is_general: false, threads: 192, shared_bytes: 75400, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_f16_f16_d96_general", q: Element::F16, kv: Element::F16, head_dim_qk: 96, head_dim_vo: 96, is_general: true, threads: 192, shared_bytes: 75400, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_f16_f16_d128", q: Element::F16, kv: Element::F16, head_dim_qk: 128, head_dim_vo: 128, is_general: false, threads: 192, shared_bytes: 93320, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_f16_f16_d128_general", q: Element::F16, kv: Element::F16, head_dim_qk: 128, head_dim_vo: 128, is_general: true, threads: 192, shared_bytes: 93320, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_f16_f16_d192", q: Element::F16, kv: Element::F16, head_dim_qk: 192, head_dim_vo: 192, is_general: false, threads: 128, shared_bytes: 76488, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_f16_f16_d192_general", q: Element::F16, kv: Element::F16, head_dim_qk: 192, head_dim_vo: 192, is_general: true, threads: 128, shared_bytes: 76488, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_f16_f16_d256", q: Element::F16, kv: Element::F16, head_dim_qk: 256, head_dim_vo: 256, is_general: false, threads: 128, shared_bytes: 101064, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_f16_f16_d256_general", q: Element::F16, kv: Element::F16, head_dim_qk: 256, head_dim_vo: 256, is_general: true, threads: 128, shared_bytes: 101064, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_f16_f16_d192x128", q: Element::F16, kv: Element::F16, head_dim_qk: 192, head_dim_vo: 128, is_general: false, threads: 128, shared_bytes: 91952, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_f16_f16_d192x128_general", q: Element::F16, kv: Element::F16, head_dim_qk: 192, head_dim_vo: 128, is_general: true, threads: 128, shared_bytes: 91952, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_f16_fp8_d64", q: Element::F16, kv: Element::Fp8, head_dim_qk: 64, head_dim_vo: 64, is_general: false, threads: 192, shared_bytes: 80112, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_f16_fp8_d64_general", q: Element::F16, kv: Element::Fp8, head_dim_qk: 64, head_dim_vo: 64, is_general: true, threads: 192, shared_bytes: 80112, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_f16_fp8_d96", q: Element::F16, kv: Element::Fp8, head_dim_qk: 96, head_dim_vo: 96, is_general: false, threads: 192, shared_bytes: 88408, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_f16_fp8_d96_general", q: Element::F16, kv: Element::Fp8, head_dim_qk: 96, head_dim_vo: 96, is_general: true, threads: 192, shared_bytes: 88408, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_f16_fp8_d128", q: Element::F16, kv: Element::Fp8, head_dim_qk: 128, head_dim_vo: 128, is_general: false, threads: 192, shared_bytes: 93320, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_f16_fp8_d128_general", q: Element::F16, kv: Element::Fp8, head_dim_qk: 128, head_dim_vo: 128, is_general: true, threads: 192, shared_bytes: 93320, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_f16_fp8_d192", q: Element::F16, kv: Element::Fp8, head_dim_qk: 192, head_dim_vo: 192, is_general: false, threads: 128, shared_bytes: 95128, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_f16_fp8_d192_general", q: Element::F16, kv: Element::Fp8, head_dim_qk: 192, head_dim_vo: 192, is_general: true, threads: 128, shared_bytes: 95128, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_f16_fp8_d256", q: Element::F16, kv: Element::Fp8, head_dim_qk: 256, head_dim_vo: 256, is_general: false, threads: 128, shared_bytes: 94000, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_f16_fp8_d256_general", q: Element::F16, kv: Element::Fp8, head_dim_qk: 256, head_dim_vo: 256, is_general: true, threads: 128, shared_bytes: 94000, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_f16_fp8_d192x128", q: Element::F16, kv: Element::Fp8, head_dim_qk: 192, head_dim_vo: 128, is_general: false, threads: 128, shared_bytes: 80792, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE, checked: &DECODE_CHECKED, name: "decode_f16_fp8_d192x128_general", q: Element::F16, kv: Element::Fp8, head_dim_qk: 192, head_dim_vo: 128, is_general: true, threads: 128, shared_bytes: 80792, blocks_per_sm: 2, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_bf16_bf16_d64", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 64, head_dim_vo: 64, is_general: false, threads: 320, shared_bytes: 157704, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_bf16_bf16_d64_general", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 64, head_dim_vo: 64, is_general: true, threads: 320, shared_bytes: 157704, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_bf16_bf16_d96", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 96, head_dim_vo: 96, is_general: false, threads: 320, shared_bytes: 143880, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_bf16_bf16_d96_general", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 96, head_dim_vo: 96, is_general: true, threads: 320, shared_bytes: 143880, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_bf16_bf16_d128", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 128, head_dim_vo: 128, is_general: false, threads: 320, shared_bytes: 178184, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_bf16_bf16_d128_general", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 128, head_dim_vo: 128, is_general: true, threads: 320, shared_bytes: 178184, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_bf16_bf16_d192", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 192, head_dim_vo: 192, is_general: false, threads: 192, shared_bytes: 140424, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_bf16_bf16_d192_general", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 192, head_dim_vo: 192, is_general: true, threads: 192, shared_bytes: 140424, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_bf16_bf16_d256", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 256, head_dim_vo: 256, is_general: false, threads: 192, shared_bytes: 185480, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_bf16_bf16_d256_general", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 256, head_dim_vo: 256, is_general: true, threads: 192, shared_bytes: 185480, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_bf16_bf16_d192x128", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 192, head_dim_vo: 128, is_general: false, threads: 192, shared_bytes: 165104, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_bf16_bf16_d192x128_general", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 192, head_dim_vo: 128, is_general: true, threads: 192, shared_bytes: 165104, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_bf16_fp8_d64", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 64, head_dim_vo: 64, is_general: false, threads: 320, shared_bytes: 153712, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_bf16_fp8_d64_general", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 64, head_dim_vo: 64, is_general: true, threads: 320, shared_bytes: 153712, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_bf16_fp8_d96", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 96, head_dim_vo: 96, is_general: false, threads: 320, shared_bytes: 163032, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_bf16_fp8_d96_general", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 96, head_dim_vo: 96, is_general: true, threads: 320, shared_bytes: 163032, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_bf16_fp8_d128", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 128, head_dim_vo: 128, is_general: false, threads: 320, shared_bytes: 178184, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_bf16_fp8_d128_general", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 128, head_dim_vo: 128, is_general: true, threads: 320, shared_bytes: 178184, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_bf16_fp8_d192", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 192, head_dim_vo: 192, is_general: false, threads: 192, shared_bytes: 165208, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_bf16_fp8_d192_general", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 192, head_dim_vo: 192, is_general: true, threads: 192, shared_bytes: 165208, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_bf16_fp8_d256", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 256, head_dim_vo: 256, is_general: false, threads: 192, shared_bytes: 163056, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_bf16_fp8_d256_general", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 256, head_dim_vo: 256, is_general: true, threads: 192, shared_bytes: 163056, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_bf16_fp8_d192x128", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 192, head_dim_vo: 128, is_general: false, threads: 192, shared_bytes: 136536, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_bf16_fp8_d192x128_general", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 192, head_dim_vo: 128, is_general: true, threads: 192, shared_bytes: 136536, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_f16_f16_d64", q: Element::F16, kv: Element::F16, head_dim_qk: 64, head_dim_vo: 64, is_general: false, threads: 320, shared_bytes: 157704, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_f16_f16_d64_general", q: Element::F16, kv: Element::F16, head_dim_qk: 64, head_dim_vo: 64, is_general: true, threads: 320, shared_bytes: 157704, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_f16_f16_d96", q: Element::F16, kv: Element::F16, head_dim_qk: 96, head_dim_vo: 96, is_general: false, threads: 320, shared_bytes: 143880, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_f16_f16_d96_general", q: Element::F16, kv: Element::F16, head_dim_qk: 96, head_dim_vo: 96, is_general: true, threads: 320, shared_bytes: 143880, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_f16_f16_d128", q: Element::F16, kv: Element::F16, head_dim_qk: 128, head_dim_vo: 128, is_general: false, threads: 320, shared_bytes: 178184, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_f16_f16_d128_general", q: Element::F16, kv: Element::F16, head_dim_qk: 128, head_dim_vo: 128, is_general: true, threads: 320, shared_bytes: 178184, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_f16_f16_d192", q: Element::F16, kv: Element::F16, head_dim_qk: 192, head_dim_vo: 192, is_general: false, threads: 192, shared_bytes: 140424, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_f16_f16_d192_general", q: Element::F16, kv: Element::F16, head_dim_qk: 192, head_dim_vo: 192, is_general: true, threads: 192, shared_bytes: 140424, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_f16_f16_d256", q: Element::F16, kv: Element::F16, head_dim_qk: 256, head_dim_vo: 256, is_general: false, threads: 192, shared_bytes: 185480, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_f16_f16_d256_general", q: Element::F16, kv: Element::F16, head_dim_qk: 256, head_dim_vo: 256, is_general: true, threads: 192, shared_bytes: 185480, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_f16_f16_d192x128", q: Element::F16, kv: Element::F16, head_dim_qk: 192, head_dim_vo: 128, is_general: false, threads: 192, shared_bytes: 165104, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_f16_f16_d192x128_general", q: Element::F16, kv: Element::F16, head_dim_qk: 192, head_dim_vo: 128, is_general: true, threads: 192, shared_bytes: 165104, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_f16_fp8_d64", q: Element::F16, kv: Element::Fp8, head_dim_qk: 64, head_dim_vo: 64, is_general: false, threads: 320, shared_bytes: 153712, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_f16_fp8_d64_general", q: Element::F16, kv: Element::Fp8, head_dim_qk: 64, head_dim_vo: 64, is_general: true, threads: 320, shared_bytes: 153712, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_f16_fp8_d96", q: Element::F16, kv: Element::Fp8, head_dim_qk: 96, head_dim_vo: 96, is_general: false, threads: 320, shared_bytes: 163032, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_f16_fp8_d96_general", q: Element::F16, kv: Element::Fp8, head_dim_qk: 96, head_dim_vo: 96, is_general: true, threads: 320, shared_bytes: 163032, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_f16_fp8_d128", q: Element::F16, kv: Element::Fp8, head_dim_qk: 128, head_dim_vo: 128, is_general: false, threads: 320, shared_bytes: 178184, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_f16_fp8_d128_general", q: Element::F16, kv: Element::Fp8, head_dim_qk: 128, head_dim_vo: 128, is_general: true, threads: 320, shared_bytes: 178184, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_f16_fp8_d192", q: Element::F16, kv: Element::Fp8, head_dim_qk: 192, head_dim_vo: 192, is_general: false, threads: 192, shared_bytes: 165208, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_f16_fp8_d192_general", q: Element::F16, kv: Element::Fp8, head_dim_qk: 192, head_dim_vo: 192, is_general: true, threads: 192, shared_bytes: 165208, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_f16_fp8_d256", q: Element::F16, kv: Element::Fp8, head_dim_qk: 256, head_dim_vo: 256, is_general: false, threads: 192, shared_bytes: 163056, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_f16_fp8_d256_general", q: Element::F16, kv: Element::Fp8, head_dim_qk: 256, head_dim_vo: 256, is_general: true, threads: 192, shared_bytes: 163056, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_f16_fp8_d192x128", q: Element::F16, kv: Element::Fp8, head_dim_qk: 192, head_dim_vo: 128, is_general: false, threads: 192, shared_bytes: 136536, blocks_per_sm: 1, rows: 16 },
    Entry { module: &DECODE_SM90, checked: &DECODE_SM90_CHECKED, name: "decode_sm90_f16_fp8_d192x128_general", q: Element::F16, kv: Element::Fp8, head_dim_qk: 192, head_dim_vo: 128, is_general: true, threads: 192, shared_bytes: 136536, blocks_per_sm: 1, rows: 16 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_bf16_bf16_d64_m128", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 64, head_dim_vo: 64, is_general: false, threads: 128, shared_bytes: 57728, blocks_per_sm: 3, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_bf16_bf16_d64_m128_general", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 64, head_dim_vo: 64, is_general: true, threads: 128, shared_bytes: 51584, blocks_per_sm: 2, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_bf16_bf16_d96_m128", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 96, head_dim_vo: 96, is_general: false, threads: 128, shared_bytes: 82304, blocks_per_sm: 2, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_bf16_bf16_d96_m128_general", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 96, head_dim_vo: 96, is_general: true, threads: 128, shared_bytes: 82304, blocks_per_sm: 2, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_bf16_bf16_d128_m128", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 128, head_dim_vo: 128, is_general: false, threads: 128, shared_bytes: 100736, blocks_per_sm: 2, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_bf16_bf16_d128_m128_general", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 128, head_dim_vo: 128, is_general: true, threads: 128, shared_bytes: 66944, blocks_per_sm: 2, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_bf16_bf16_d192_m128", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 192, head_dim_vo: 192, is_general: false, threads: 256, shared_bytes: 166272, blocks_per_sm: 1, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_bf16_bf16_d192_m128_general", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 192, head_dim_vo: 192, is_general: true, threads: 256, shared_bytes: 166272, blocks_per_sm: 1, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_bf16_bf16_d256_m128", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 256, head_dim_vo: 256, is_general: false, threads: 256, shared_bytes: 215424, blocks_per_sm: 1, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_bf16_bf16_d256_m128_general", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 256, head_dim_vo: 256, is_general: true, threads: 256, shared_bytes: 215424, blocks_per_sm: 1, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_bf16_bf16_d192x128_m128", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 192, head_dim_vo: 128, is_general: false, threads: 128, shared_bytes: 91520, blocks_per_sm: 2, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_bf16_bf16_d192x128_m128_general", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 192, head_dim_vo: 128, is_general: true, threads: 128, shared_bytes: 91520, blocks_per_sm: 2, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_bf16_fp8_d64_m128", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 64, head_dim_vo: 64, is_general: false, threads: 128, shared_bytes: 39296, blocks_per_sm: 2, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_bf16_fp8_d64_m128_general", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 64, head_dim_vo: 64, is_general: true, threads: 128, shared_bytes: 39296, blocks_per_sm: 2, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_bf16_fp8_d96_m128", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 96, head_dim_vo: 96, is_general: false, threads: 128, shared_bytes: 42368, blocks_per_sm: 2, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_bf16_fp8_d96_m128_general", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 96, head_dim_vo: 96, is_general: true, threads: 128, shared_bytes: 42368, blocks_per_sm: 2, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_bf16_fp8_d128_m128", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 128, head_dim_vo: 128, is_general: false, threads: 128, shared_bytes: 50560, blocks_per_sm: 2, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_bf16_fp8_d128_m128_general", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 128, head_dim_vo: 128, is_general: true, threads: 128, shared_bytes: 50560, blocks_per_sm: 2, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_bf16_fp8_d192_m128", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 192, head_dim_vo: 192, is_general: false, threads: 256, shared_bytes: 121216, blocks_per_sm: 1, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_bf16_fp8_d192_m128_general", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 192, head_dim_vo: 192, is_general: true, threads: 256, shared_bytes: 121216, blocks_per_sm: 1, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_bf16_fp8_d256_m128", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 256, head_dim_vo: 256, is_general: false, threads: 256, shared_bytes: 149888, blocks_per_sm: 1, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_bf16_fp8_d256_m128_general", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 256, head_dim_vo: 256, is_general: true, threads: 256, shared_bytes: 149888, blocks_per_sm: 1, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_bf16_fp8_d192x128_m128", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 192, head_dim_vo: 128, is_general: false, threads: 128, shared_bytes: 72064, blocks_per_sm: 2, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_bf16_fp8_d192x128_m128_general", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 192, head_dim_vo: 128, is_general: true, threads: 128, shared_bytes: 72064, blocks_per_sm: 2, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_f16_f16_d64_m128", q: Element::F16, kv: Element::F16, head_dim_qk: 64, head_dim_vo: 64, is_general: false, threads: 128, shared_bytes: 57728, blocks_per_sm: 3, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_f16_f16_d64_m128_general", q: Element::F16, kv: Element::F16, head_dim_qk: 64, head_dim_vo: 64, is_general: true, threads: 128, shared_bytes: 51584, blocks_per_sm: 2, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_f16_f16_d96_m128", q: Element::F16, kv: Element::F16, head_dim_qk: 96, head_dim_vo: 96, is_general: false, threads: 128, shared_bytes: 82304, blocks_per_sm: 2, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_f16_f16_d96_m128_general", q: Element::F16, kv: Element::F16, head_dim_qk: 96, head_dim_vo: 96, is_general: true, threads: 128, shared_bytes: 82304, blocks_per_sm: 2, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_f16_f16_d128_m128", q: Element::F16, kv: Element::F16, head_dim_qk: 128, head_dim_vo: 128, is_general: false, threads: 128, shared_bytes: 100736, blocks_per_sm: 2, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_f16_f16_d128_m128_general", q: Element::F16, kv: Element::F16, head_dim_qk: 128, head_dim_vo: 128, is_general: true, threads: 128, shared_bytes: 66944, blocks_per_sm: 2, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_f16_f16_d192_m128", q: Element::F16, kv: Element::F16, head_dim_qk: 192, head_dim_vo: 192, is_general: false, threads: 256, shared_bytes: 166272, blocks_per_sm: 1, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_f16_f16_d192_m128_general", q: Element::F16, kv: Element::F16, head_dim_qk: 192, head_dim_vo: 192, is_general: true, threads: 256, shared_bytes: 166272, blocks_per_sm: 1, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_f16_f16_d256_m128", q: Element::F16, kv: Element::F16, head_dim_qk: 256, head_dim_vo: 256, is_general: false, threads: 256, shared_bytes: 215424, blocks_per_sm: 1, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_f16_f16_d256_m128_general", q: Element::F16, kv: Element::F16, head_dim_qk: 256, head_dim_vo: 256, is_general: true, threads: 256, shared_bytes: 215424, blocks_per_sm: 1, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_f16_f16_d192x128_m128", q: Element::F16, kv: Element::F16, head_dim_qk: 192, head_dim_vo: 128, is_general: false, threads: 128, shared_bytes: 91520, blocks_per_sm: 2, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_f16_f16_d192x128_m128_general", q: Element::F16, kv: Element::F16, head_dim_qk: 192, head_dim_vo: 128, is_general: true, threads: 128, shared_bytes: 91520, blocks_per_sm: 2, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_f16_fp8_d64_m128", q: Element::F16, kv: Element::Fp8, head_dim_qk: 64, head_dim_vo: 64, is_general: false, threads: 128, shared_bytes: 39296, blocks_per_sm: 2, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_f16_fp8_d64_m128_general", q: Element::F16, kv: Element::Fp8, head_dim_qk: 64, head_dim_vo: 64, is_general: true, threads: 128, shared_bytes: 39296, blocks_per_sm: 2, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_f16_fp8_d96_m128", q: Element::F16, kv: Element::Fp8, head_dim_qk: 96, head_dim_vo: 96, is_general: false, threads: 128, shared_bytes: 42368, blocks_per_sm: 2, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_f16_fp8_d96_m128_general", q: Element::F16, kv: Element::Fp8, head_dim_qk: 96, head_dim_vo: 96, is_general: true, threads: 128, shared_bytes: 42368, blocks_per_sm: 2, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_f16_fp8_d128_m128", q: Element::F16, kv: Element::Fp8, head_dim_qk: 128, head_dim_vo: 128, is_general: false, threads: 128, shared_bytes: 50560, blocks_per_sm: 2, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_f16_fp8_d128_m128_general", q: Element::F16, kv: Element::Fp8, head_dim_qk: 128, head_dim_vo: 128, is_general: true, threads: 128, shared_bytes: 50560, blocks_per_sm: 2, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_f16_fp8_d192_m128", q: Element::F16, kv: Element::Fp8, head_dim_qk: 192, head_dim_vo: 192, is_general: false, threads: 256, shared_bytes: 121216, blocks_per_sm: 1, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_f16_fp8_d192_m128_general", q: Element::F16, kv: Element::Fp8, head_dim_qk: 192, head_dim_vo: 192, is_general: true, threads: 256, shared_bytes: 121216, blocks_per_sm: 1, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_f16_fp8_d256_m128", q: Element::F16, kv: Element::Fp8, head_dim_qk: 256, head_dim_vo: 256, is_general: false, threads: 256, shared_bytes: 149888, blocks_per_sm: 1, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_f16_fp8_d256_m128_general", q: Element::F16, kv: Element::Fp8, head_dim_qk: 256, head_dim_vo: 256, is_general: true, threads: 256, shared_bytes: 149888, blocks_per_sm: 1, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_f16_fp8_d192x128_m128", q: Element::F16, kv: Element::Fp8, head_dim_qk: 192, head_dim_vo: 128, is_general: false, threads: 128, shared_bytes: 72064, blocks_per_sm: 2, rows: 128 },
    Entry { module: &EXTEND, checked: &EXTEND_CHECKED, name: "extend_f16_fp8_d192x128_m128_general", q: Element::F16, kv: Element::Fp8, head_dim_qk: 192, head_dim_vo: 128, is_general: true, threads: 128, shared_bytes: 72064, blocks_per_sm: 2, rows: 128 },
    Entry { module: &EXTEND_SM90, checked: &EXTEND_SM90_CHECKED, name: "extend_sm90_bf16_d64", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 64, head_dim_vo: 64, is_general: false, threads: 512, shared_bytes: 164864, blocks_per_sm: 1, rows: 192 },
    Entry { module: &EXTEND_SM90, checked: &EXTEND_SM90_CHECKED, name: "extend_sm90_bf16_d64_general", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 64, head_dim_vo: 64, is_general: true, threads: 512, shared_bytes: 132096, blocks_per_sm: 1, rows: 192 },
    Entry { module: &EXTEND_SM90, checked: &EXTEND_SM90_CHECKED, name: "extend_sm90_bf16_d128", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 128, head_dim_vo: 128, is_general: false, threads: 512, shared_bytes: 222208, blocks_per_sm: 1, rows: 192 },
    Entry { module: &EXTEND_SM90, checked: &EXTEND_SM90_CHECKED, name: "extend_sm90_bf16_d128_general", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 128, head_dim_vo: 128, is_general: true, threads: 512, shared_bytes: 197632, blocks_per_sm: 1, rows: 192 },
    Entry { module: &EXTEND_SM90, checked: &EXTEND_SM90_CHECKED, name: "extend_sm90_bf16_d256", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 256, head_dim_vo: 256, is_general: false, threads: 384, shared_bytes: 230400, blocks_per_sm: 1, rows: 128 },
    Entry { module: &EXTEND_SM90, checked: &EXTEND_SM90_CHECKED, name: "extend_sm90_bf16_d256_general", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 256, head_dim_vo: 256, is_general: true, threads: 384, shared_bytes: 230400, blocks_per_sm: 1, rows: 128 },
    Entry { module: &EXTEND_SM90, checked: &EXTEND_SM90_CHECKED, name: "extend_sm90_bf16_d192x128", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 192, head_dim_vo: 128, is_general: false, threads: 384, shared_bytes: 214016, blocks_per_sm: 1, rows: 128 },
    Entry { module: &EXTEND_SM90, checked: &EXTEND_SM90_CHECKED, name: "extend_sm90_bf16_d192x128_general", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 192, head_dim_vo: 128, is_general: true, threads: 384, shared_bytes: 214016, blocks_per_sm: 1, rows: 128 },
    Entry { module: &EXTEND_SM90, checked: &EXTEND_SM90_CHECKED, name: "extend_sm90_bf16_fp8_d64", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 64, head_dim_vo: 64, is_general: false, threads: 512, shared_bytes: 165888, blocks_per_sm: 1, rows: 192 },
    Entry { module: &EXTEND_SM90, checked: &EXTEND_SM90_CHECKED, name: "extend_sm90_bf16_fp8_d64_general", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 64, head_dim_vo: 64, is_general: true, threads: 512, shared_bytes: 133120, blocks_per_sm: 1, rows: 192 },
    Entry { module: &EXTEND_SM90, checked: &EXTEND_SM90_CHECKED, name: "extend_sm90_bf16_fp8_d128", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 128, head_dim_vo: 128, is_general: false, threads: 512, shared_bytes: 222208, blocks_per_sm: 1, rows: 192 },
    Entry { module: &EXTEND_SM90, checked: &EXTEND_SM90_CHECKED, name: "extend_sm90_bf16_fp8_d128_general", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 128, head_dim_vo: 128, is_general: true, threads: 512, shared_bytes: 197632, blocks_per_sm: 1, rows: 192 },
    Entry { module: &EXTEND_SM90, checked: &EXTEND_SM90_CHECKED, name: "extend_sm90_bf16_fp8_d256", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 256, head_dim_vo: 256, is_general: false, threads: 384, shared_bytes: 230400, blocks_per_sm: 1, rows: 128 },
    Entry { module: &EXTEND_SM90, checked: &EXTEND_SM90_CHECKED, name: "extend_sm90_bf16_fp8_d256_general", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 256, head_dim_vo: 256, is_general: true, threads: 384, shared_bytes: 230400, blocks_per_sm: 1, rows: 128 },
    Entry { module: &EXTEND_SM90, checked: &EXTEND_SM90_CHECKED, name: "extend_sm90_bf16_fp8_d192x128", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 192, head_dim_vo: 128, is_general: false, threads: 384, shared_bytes: 214016, blocks_per_sm: 1, rows: 128 },
    Entry { module: &EXTEND_SM90, checked: &EXTEND_SM90_CHECKED, name: "extend_sm90_bf16_fp8_d192x128_general", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 192, head_dim_vo: 128, is_general: true, threads: 384, shared_bytes: 214016, blocks_per_sm: 1, rows: 128 },
    Entry { module: &EXTEND_SM90, checked: &EXTEND_SM90_CHECKED, name: "extend_sm90_f16_d64", q: Element::F16, kv: Element::F16, head_dim_qk: 64, head_dim_vo: 64, is_general: false, threads: 512, shared_bytes: 164864, blocks_per_sm: 1, rows: 192 },
    Entry { module: &EXTEND_SM90, checked: &EXTEND_SM90_CHECKED, name: "extend_sm90_f16_d64_general", q: Element::F16, kv: Element::F16, head_dim_qk: 64, head_dim_vo: 64, is_general: true, threads: 512, shared_bytes: 132096, blocks_per_sm: 1, rows: 192 },
    Entry { module: &EXTEND_SM90, checked: &EXTEND_SM90_CHECKED, name: "extend_sm90_f16_d128", q: Element::F16, kv: Element::F16, head_dim_qk: 128, head_dim_vo: 128, is_general: false, threads: 512, shared_bytes: 222208, blocks_per_sm: 1, rows: 192 },
    Entry { module: &EXTEND_SM90, checked: &EXTEND_SM90_CHECKED, name: "extend_sm90_f16_d128_general", q: Element::F16, kv: Element::F16, head_dim_qk: 128, head_dim_vo: 128, is_general: true, threads: 512, shared_bytes: 197632, blocks_per_sm: 1, rows: 192 },
    Entry { module: &EXTEND_SM90, checked: &EXTEND_SM90_CHECKED, name: "extend_sm90_f16_d256", q: Element::F16, kv: Element::F16, head_dim_qk: 256, head_dim_vo: 256, is_general: false, threads: 384, shared_bytes: 230400, blocks_per_sm: 1, rows: 128 },
    Entry { module: &EXTEND_SM90, checked: &EXTEND_SM90_CHECKED, name: "extend_sm90_f16_d256_general", q: Element::F16, kv: Element::F16, head_dim_qk: 256, head_dim_vo: 256, is_general: true, threads: 384, shared_bytes: 230400, blocks_per_sm: 1, rows: 128 },
    Entry { module: &EXTEND_SM90, checked: &EXTEND_SM90_CHECKED, name: "extend_sm90_f16_d192x128", q: Element::F16, kv: Element::F16, head_dim_qk: 192, head_dim_vo: 128, is_general: false, threads: 384, shared_bytes: 214016, blocks_per_sm: 1, rows: 128 },
    Entry { module: &EXTEND_SM90, checked: &EXTEND_SM90_CHECKED, name: "extend_sm90_f16_d192x128_general", q: Element::F16, kv: Element::F16, head_dim_qk: 192, head_dim_vo: 128, is_general: true, threads: 384, shared_bytes: 214016, blocks_per_sm: 1, rows: 128 },
    Entry { module: &EXTEND_SM90, checked: &EXTEND_SM90_CHECKED, name: "extend_sm90_f16_fp8_d64", q: Element::F16, kv: Element::Fp8, head_dim_qk: 64, head_dim_vo: 64, is_general: false, threads: 512, shared_bytes: 165888, blocks_per_sm: 1, rows: 192 },
    Entry { module: &EXTEND_SM90, checked: &EXTEND_SM90_CHECKED, name: "extend_sm90_f16_fp8_d64_general", q: Element::F16, kv: Element::Fp8, head_dim_qk: 64, head_dim_vo: 64, is_general: true, threads: 512, shared_bytes: 133120, blocks_per_sm: 1, rows: 192 },
    Entry { module: &EXTEND_SM90, checked: &EXTEND_SM90_CHECKED, name: "extend_sm90_f16_fp8_d128", q: Element::F16, kv: Element::Fp8, head_dim_qk: 128, head_dim_vo: 128, is_general: false, threads: 512, shared_bytes: 222208, blocks_per_sm: 1, rows: 192 },
    Entry { module: &EXTEND_SM90, checked: &EXTEND_SM90_CHECKED, name: "extend_sm90_f16_fp8_d128_general", q: Element::F16, kv: Element::Fp8, head_dim_qk: 128, head_dim_vo: 128, is_general: true, threads: 512, shared_bytes: 197632, blocks_per_sm: 1, rows: 192 },
    Entry { module: &EXTEND_SM90, checked: &EXTEND_SM90_CHECKED, name: "extend_sm90_f16_fp8_d256", q: Element::F16, kv: Element::Fp8, head_dim_qk: 256, head_dim_vo: 256, is_general: false, threads: 384, shared_bytes: 230400, blocks_per_sm: 1, rows: 128 },
    Entry { module: &EXTEND_SM90, checked: &EXTEND_SM90_CHECKED, name: "extend_sm90_f16_fp8_d256_general", q: Element::F16, kv: Element::Fp8, head_dim_qk: 256, head_dim_vo: 256, is_general: true, threads: 384, shared_bytes: 230400, blocks_per_sm: 1, rows: 128 },
    Entry { module: &EXTEND_SM90, checked: &EXTEND_SM90_CHECKED, name: "extend_sm90_f16_fp8_d192x128", q: Element::F16, kv: Element::Fp8, head_dim_qk: 192, head_dim_vo: 128, is_general: false, threads: 384, shared_bytes: 214016, blocks_per_sm: 1, rows: 128 },
    Entry { module: &EXTEND_SM90, checked: &EXTEND_SM90_CHECKED, name: "extend_sm90_f16_fp8_d192x128_general", q: Element::F16, kv: Element::Fp8, head_dim_qk: 192, head_dim_vo: 128, is_general: true, threads: 384, shared_bytes: 214016, blocks_per_sm: 1, rows: 128 },
    Entry { module: &MERGE_PARTIALS, checked: &MERGE_PARTIALS_CHECKED, name: "merge_partials_bf16", q: Element::Bf16, kv: Element::F32, head_dim_qk: 0, head_dim_vo: 0, is_general: true, threads: 256, shared_bytes: 0, blocks_per_sm: 3, rows: 0 },
    Entry { module: &MERGE_PARTIALS, checked: &MERGE_PARTIALS_CHECKED, name: "merge_partials_f16", q: Element::F16, kv: Element::F32, head_dim_qk: 0, head_dim_vo: 0, is_general: true, threads: 256, shared_bytes: 0, blocks_per_sm: 3, rows: 0 },
    Entry { module: &MERGE_PARTIALS, checked: &MERGE_PARTIALS_CHECKED, name: "merge_partials_f32", q: Element::F32, kv: Element::F32, head_dim_qk: 0, head_dim_vo: 0, is_general: true, threads: 256, shared_bytes: 0, blocks_per_sm: 3, rows: 0 },
    Entry { module: &MERGE_STATES, checked: &MERGE_STATES_CHECKED, name: "merge_states_bf16", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 0, head_dim_vo: 0, is_general: true, threads: 256, shared_bytes: 0, blocks_per_sm: 8, rows: 0 },
    Entry { module: &MERGE_STATES, checked: &MERGE_STATES_CHECKED, name: "merge_states_f16", q: Element::F16, kv: Element::F16, head_dim_qk: 0, head_dim_vo: 0, is_general: true, threads: 256, shared_bytes: 0, blocks_per_sm: 8, rows: 0 },
    Entry { module: &MERGE_STATES, checked: &MERGE_STATES_CHECKED, name: "merge_states_f32", q: Element::F32, kv: Element::F32, head_dim_qk: 0, head_dim_vo: 0, is_general: true, threads: 256, shared_bytes: 0, blocks_per_sm: 8, rows: 0 },
    Entry { module: &PLAIN, checked: &PLAIN_CHECKED, name: "plain_f32_f32", q: Element::F32, kv: Element::F32, head_dim_qk: 0, head_dim_vo: 0, is_general: true, threads: 128, shared_bytes: 0, blocks_per_sm: 8, rows: 0 },
    Entry { module: &PLAIN, checked: &PLAIN_CHECKED, name: "plain_bf16_bf16", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 0, head_dim_vo: 0, is_general: true, threads: 128, shared_bytes: 0, blocks_per_sm: 8, rows: 0 },
    Entry { module: &PLAIN, checked: &PLAIN_CHECKED, name: "plain_bf16_fp8", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 0, head_dim_vo: 0, is_general: true, threads: 128, shared_bytes: 0, blocks_per_sm: 8, rows: 0 },
    Entry { module: &PLAIN, checked: &PLAIN_CHECKED, name: "plain_f16_f16", q: Element::F16, kv: Element::F16, head_dim_qk: 0, head_dim_vo: 0, is_general: true, threads: 128, shared_bytes: 0, blocks_per_sm: 8, rows: 0 },
    Entry { module: &PLAIN, checked: &PLAIN_CHECKED, name: "plain_f16_fp8", q: Element::F16, kv: Element::Fp8, head_dim_qk: 0, head_dim_vo: 0, is_general: true, threads: 128, shared_bytes: 0, blocks_per_sm: 8, rows: 0 },
    Entry { module: &STORE_KV, checked: &STORE_KV_CHECKED, name: "store_kv_bf16_bf16", q: Element::Bf16, kv: Element::Bf16, head_dim_qk: 0, head_dim_vo: 0, is_general: true, threads: 256, shared_bytes: 0, blocks_per_sm: 8, rows: 0 },
    Entry { module: &STORE_KV, checked: &STORE_KV_CHECKED, name: "store_kv_bf16_fp8", q: Element::Bf16, kv: Element::Fp8, head_dim_qk: 0, head_dim_vo: 0, is_general: true, threads: 256, shared_bytes: 0, blocks_per_sm: 8, rows: 0 },
    Entry { module: &STORE_KV, checked: &STORE_KV_CHECKED, name: "store_kv_f16_f16", q: Element::F16, kv: Element::F16, head_dim_qk: 0, head_dim_vo: 0, is_general: true, threads: 256, shared_bytes: 0, blocks_per_sm: 8, rows: 0 },
    Entry { module: &STORE_KV, checked: &STORE_KV_CHECKED, name: "store_kv_f16_fp8", q: Element::F16, kv: Element::Fp8, head_dim_qk: 0, head_dim_vo: 0, is_general: true, threads: 256, shared_bytes: 0, blocks_per_sm: 8, rows: 0 },
    Entry { module: &STORE_KV, checked: &STORE_KV_CHECKED, name: "store_kv_f32_f32", q: Element::F32, kv: Element::F32, head_dim_qk: 0, head_dim_vo: 0, is_general: true, threads: 256, shared_bytes: 0, blocks_per_sm: 8, rows: 0 },
    Entry { module: &STORE_KV, checked: &STORE_KV_CHECKED, name: "store_kv_f32_fp8", q: Element::F32, kv: Element::Fp8, head_dim_qk: 0, head_dim_vo: 0, is_general: true, threads: 256, shared_bytes: 0, blocks_per_sm: 8, rows: 0 },
];

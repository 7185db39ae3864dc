//! Twins of the structs in `kernels/params.h`: what kernels take by value, and the tables that they read.
//!
//! Field for field in the header's order; a test parses the header and compares. Meanings are documented there.

use bytemuck::{Pod, Zeroable};

use crate::device::{KernelParams, TensorMap};

/// A field of a twin, for the test against the header.
#[cfg(test)]
type Field = (&'static str, &'static str, usize);

/// A C type of the header and its twin.
macro_rules! c_type {
    (ptr) => {
        u64
    };
    (i64) => {
        i64
    };
    (i32) => {
        i32
    };
    (u32) => {
        u32
    };
    (f32) => {
        f32
    };
    (i32x3) => {
        [i32; 3]
    };
    (i32x4) => {
        [i32; 4]
    };
    (i32x14) => {
        [i32; 14]
    };
    (i32x16) => {
        [i32; 16]
    };
    (attn) => {
        AttnParams
    };
    (map) => {
        TensorMap
    };
}

macro_rules! twins {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $ty:ident),+ $(,)? })+) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
        pub(crate) struct $name {
            $(pub(crate) $field: c_type!($ty),)+
        }

        #[cfg(test)]
        impl $name {
            const FIELDS: &'static [Field] =
                &[$((stringify!($field), stringify!($ty), std::mem::offset_of!($name, $field)),)+];
        }
    )+};
}

twins! {
    /// Head of a step's tables.
    AttnStep { num_tiles: i32, num_ranges: i32, num_merge_units: i32, zero_begin: i32 }

    /// A run of query tokens and the KV that any of them sees.
    AttnTile {
        mask_begin: i64, request: i32, q_begin: i32, q_len: i32, q_pos: i32, kv_begin: i32, kv_end: i32, kv_len: i32,
        pages_begin: i32, chunk_len: i32, num_chunks: i32, first_partial: i32, reserved: i32x3,
    }

    /// Consecutive units.
    AttnRange { tile: i32, kv_head: i32, chunk: i32, num_units: i32 }

    /// A block's first unit.
    AttnStart {
        tile: i32, chunk: i32, begin: i32, end: i32, request: i32, q_begin: i32, q_len: i32, q_pos: i32,
        pages_begin: i32, num_chunks: i32, first_partial: i32, num_pages: i32, pages: i32x16, reserved: i32x4,
    }

    /// Partial states to merge.
    AttnMergeUnit { row: i32, tile: i32, head_begin: i32, num_heads: i32 }

    /// Attention of one layer.
    AttnParams {
        q: ptr, out: ptr, lse: ptr, k: ptr, v: ptr, kv_indices: ptr, step: ptr, tiles: ptr, ranges: ptr,
        merge_units: ptr, partial_out: ptr, partial_lse: ptr, sinks: ptr, alibi_slopes: ptr, custom_mask: ptr,
        starts: ptr, counters: ptr, claim: ptr, check: ptr,
        q_stride_row: i64, q_stride_head: i64, out_stride_row: i64, out_stride_head: i64, k_stride_page: i64,
        k_stride_token: i64, k_stride_head: i64, v_stride_page: i64, v_stride_token: i64, v_stride_head: i64,
        num_rows: i32, num_qo_heads: i32, num_kv_heads: i32, group_size: i32, page_size: i32, page_magic: u32,
        page_shift: u32, causal: i32, window_left: i32, sm_scale: f32, softcap: f32, k_scale: f32, v_scale: f32,
        head_dim_qk: i32, head_dim_vo: i32, num_pages: i32, num_kv_indices: i32, num_partial_rows: i32,
    }

    /// Attention of one layer, with the maps of Hopper's own kernels.
    AttnMappedParams {
        attn: attn, has_maps: i32, has_row_maps: i32, k_page_step: i32, k_head_step: i32, v_page_step: i32,
        v_head_step: i32, reserved: i32x14, k_map: map, v_map: map, q_map: map, out_map: map,
    }

    /// Writing new KV to its slots.
    StoreKvParams {
        k: ptr, v: ptr, k_cache: ptr, v_cache: ptr, slots: ptr, q: ptr, q_out: ptr, positions: ptr, cos_sin: ptr,
        check: ptr,
        k_stride_row: i64, k_stride_head: i64, v_stride_row: i64, v_stride_head: i64, q_stride_row: i64,
        q_stride_head: i64, q_out_stride_row: i64, q_out_stride_head: i64, k_cache_stride_page: i64,
        k_cache_stride_token: i64, k_cache_stride_head: i64, v_cache_stride_page: i64, v_cache_stride_token: i64,
        v_cache_stride_head: i64,
        num_rows: i32, num_qo_heads: i32, num_kv_heads: i32, head_dim_qk: i32, head_dim_vo: i32, page_size: i32,
        page_magic: u32, page_shift: u32, k_scale: f32, v_scale: f32, rotary_dim: i32, interleaved: i32,
        num_pages: i32, max_position: i32,
    }

    /// Merging partial states of disjoint KV.
    MergeStatesParams {
        out_states: ptr, lse_states: ptr, out_second: ptr, lse_second: ptr, out: ptr, lse: ptr,
        stride_state: i64,
        num_states: i32, num_rows: i32, num_heads: i32, head_dim: i32,
    }
}

// SAFETY: the layout is that of the header's struct, which a test compares; `Pod` says that every byte is initialised.
unsafe impl KernelParams for AttnParams {}
// SAFETY: as above.
unsafe impl KernelParams for AttnMappedParams {}
// SAFETY: as above.
unsafe impl KernelParams for StoreKvParams {}
// SAFETY: as above.
unsafe impl KernelParams for MergeStatesParams {}

/// Multiplier and shift that divide positions below 2³¹ by a page size: `(t · magic) >> shift`.
#[must_use]
pub(crate) fn page_division(page_size: u32) -> (u32, u32) {
    let bits = page_size.next_power_of_two().trailing_zeros();
    let shift = 31 + bits;
    let magic = (1u128 << shift).div_ceil(u128::from(page_size));
    (u32::try_from(magic).expect("at most 2^32 - 1 for page sizes of 2^31 - 1 at most"), shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fields of a struct in the header: name, type, in order.
    fn header_fields(header: &str, name: &str) -> Vec<(String, String)> {
        let body = header.split(&format!("struct {name} {{")).nth(1).expect("the header has the struct");
        let body = body.split("};").next().expect("a struct ends");
        let lines = body.lines().map(|line| line.split("//").next().unwrap_or_default().trim());
        let fields = lines.filter_map(|line| line.strip_suffix(';'));
        let of_line = |text: &str| {
            let (ty, names) = text.split_once(' ').expect("a type and names");
            names.split(',').map(|name| (name.trim().to_owned(), ty.to_owned())).collect::<Vec<_>>()
        };
        fields.flat_map(of_line).collect()
    }

    fn c_name(field: &Field) -> (String, String) {
        let (name, ty, _) = field;
        let ty = match *ty {
            "ptr" => "DevicePtr",
            "i64" => "int64_t",
            "i32" => "int32_t",
            "u32" => "uint32_t",
            "f32" => "float",
            "attn" => "AttnParams",
            "map" => "TensorMap",
            array => {
                let count = array.strip_prefix("i32x").expect("an array of i32");
                return (format!("{name}[{count}]"), "int32_t".to_owned());
            }
        };
        (name.to_string(), ty.to_owned())
    }

    fn bytes_of(ty: &str) -> usize {
        match ty {
            "ptr" | "i64" => 8,
            "attn" => size_of::<AttnParams>(),
            "map" => size_of::<TensorMap>(),
            other => other.strip_prefix("i32x").map_or(4, |count| 4 * count.parse::<usize>().unwrap()),
        }
    }

    #[test]
    fn the_twins_have_the_fields_of_the_header() {
        let header = include_str!("../../../kernels/params.h");
        let all: [(&str, &[Field], usize); 9] = [
            ("AttnStep", AttnStep::FIELDS, size_of::<AttnStep>()),
            ("AttnTile", AttnTile::FIELDS, size_of::<AttnTile>()),
            ("AttnRange", AttnRange::FIELDS, size_of::<AttnRange>()),
            ("AttnStart", AttnStart::FIELDS, size_of::<AttnStart>()),
            ("AttnMergeUnit", AttnMergeUnit::FIELDS, size_of::<AttnMergeUnit>()),
            ("AttnParams", AttnParams::FIELDS, size_of::<AttnParams>()),
            ("AttnMappedParams", AttnMappedParams::FIELDS, size_of::<AttnMappedParams>()),
            ("StoreKvParams", StoreKvParams::FIELDS, size_of::<StoreKvParams>()),
            ("MergeStatesParams", MergeStatesParams::FIELDS, size_of::<MergeStatesParams>()),
        ];
        for (name, fields, size) in all {
            let ours: Vec<_> = fields.iter().map(c_name).collect();
            assert_eq!(ours, header_fields(header, name), "{name}");
            let mut offset = 0;
            for (field, ty, at) in fields {
                assert_eq!(*at, offset, "{name}.{field}: there is no padding");
                offset += bytes_of(ty);
            }
            assert_eq!(size, offset, "{name}");
        }
    }

    #[test]
    fn pages_divide_exactly() {
        for page_size in [1, 2, 3, 7, 16, 48, 64, 100, 4096, 65_537, i32::MAX.unsigned_abs()] {
            let (magic, shift) = page_division(page_size);
            let edges = (0..8).map(|i| (i32::MAX.unsigned_abs() / 8) * i);
            let near = [0, 1, page_size - 1, page_size, page_size.saturating_mul(3) - 1, i32::MAX.unsigned_abs()];
            for t in edges.chain(near).filter(|t| *t <= i32::MAX.unsigned_abs()) {
                let got = (u64::from(t) * u64::from(magic)) >> shift;
                assert_eq!(got, u64::from(t / page_size), "{t} / {page_size}");
            }
        }
    }
}

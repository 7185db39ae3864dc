//! Owns the tensor maps of Hopper's own kernels: what they describe, and those that were made so far.
//!
//! A map follows from addresses, strides and shapes alone, so it is made once a layout, not once a step. What no map can
//! describe the kernels copy by threads: maps are for speed.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use crate::device::{Device, TensorMap, TensorMapSpec};
use crate::params::{AttnMappedParams, AttnParams};

/// Elements of a panel.
const PANEL: u64 = 64;
/// Tokens of a group, and those of a box.
const GROUP_TOKENS: u64 = 8;
const BOX_TOKENS: i32 = 16;
/// Rows (tokens × heads of a group) of a box of q or out.
const BOX_ROWS: i32 = 64;
/// Bytes of an element of q and out, of caches in their dtype, and of caches in e4m3.
const ELEMENT: u64 = 2;
const WIDE: u32 = 2;
const FP8: u32 = 1;
/// Strides of maps are shorter than this, in bytes.
const MAX_STRIDE: u64 = 1 << 40;
/// More than layers have caches and callers have buffers; beyond, all are made anew.
const MAX_MADE: usize = 512;

/// A tensor and its boxes, dimensions from the innermost one. Unused ones are 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Boxes {
    address: u64,
    /// [`FP8`]: boxes are not swizzled, since a warp widens them before products read them.
    element_bytes: u32,
    rank: usize,
    extents: [u64; 5],
    /// Bytes, from dimension 1 on.
    strides: [u64; 4],
    box_extents: [u32; 5],
}

impl Boxes {
    fn make(&self, device: &Device) -> Option<TensorMap> {
        if self.strides[..self.rank - 1].iter().any(|stride| *stride >= MAX_STRIDE || *stride == 0) {
            return None;
        }
        let spec = TensorMapSpec {
            address: self.address,
            element_bytes: self.element_bytes,
            extents: &self.extents[..self.rank],
            strides: &self.strides[..self.rank - 1],
            box_extents: &self.box_extents[..self.rank],
            is_swizzled: self.element_bytes != FP8,
        };
        TensorMap::encode(device, &spec).ok()
    }
}

/// Boxes of K or V, and how far a page and a KV head are apart in the last dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CacheBoxes {
    boxes: Boxes,
    page_step: i32,
    head_step: i32,
}

/// One of the two caches.
#[derive(Clone, Copy)]
struct Cache {
    address: u64,
    stride_page: i64,
    stride_token: i64,
    stride_head: i64,
    head_dim: i32,
    element_bytes: u32,
}

impl CacheBoxes {
    /// `None` where pages and heads are too many steps apart.
    fn new(p: &AttnParams, cache: &Cache) -> Option<Self> {
        let unsigned = |n: i64| u64::try_from(n).ok();
        // What there is one of has no distance to the next.
        let page = if p.num_pages > 1 { unsigned(cache.stride_page)? } else { 0 };
        let head = if p.num_kv_heads > 1 { unsigned(cache.stride_head)? } else { 0 };
        let step = match gcd(page, head) {
            0 => PANEL,
            step => step,
        };
        let count = |n: i32| u64::try_from(n - 1).ok();
        let last = count(p.num_pages)?.checked_mul(page / step)? + count(p.num_kv_heads)?.checked_mul(head / step)?;
        let panels = u32::try_from(cache.head_dim).ok()? / u32::try_from(PANEL).ok()?;
        let element = u64::from(cache.element_bytes);
        let token = unsigned(cache.stride_token)? * element;
        let groups = u64::try_from(p.page_size).ok()? / GROUP_TOKENS;
        i32::try_from(last).ok()?;
        let boxes = Boxes {
            address: cache.address,
            element_bytes: cache.element_bytes,
            rank: 5,
            extents: [PANEL, GROUP_TOKENS, u64::from(panels), groups, last + 1],
            strides: [token, PANEL * element, token * GROUP_TOKENS, step.checked_mul(element)?],
            box_extents: [64, 8, panels, 2, 1],
        };
        let small = |n: u64| i32::try_from(n).ok();
        Some(Self { boxes, page_step: small(page / step)?, head_step: small(head / step)? })
    }
}

/// Boxes of K and V: pages of whole boxes. Behind a window, tiles begin anywhere, so few of them would be whole boxes; those of
/// e4m3 begin where a box does.
fn cache_boxes(p: &AttnParams, element_bytes: u32) -> Option<[CacheBoxes; 2]> {
    if p.page_size % BOX_TOKENS != 0 || (p.window_left >= 0 && element_bytes != FP8) {
        return None;
    }
    let k = Cache {
        address: p.k,
        stride_page: p.k_stride_page,
        stride_token: p.k_stride_token,
        stride_head: p.k_stride_head,
        head_dim: p.head_dim_qk,
        element_bytes,
    };
    let v = Cache {
        address: p.v,
        stride_page: p.v_stride_page,
        stride_token: p.v_stride_token,
        stride_head: p.v_stride_head,
        head_dim: p.head_dim_vo,
        element_bytes,
    };
    Some([CacheBoxes::new(p, &k)?, CacheBoxes::new(p, &v)?])
}

/// Boxes of q and out, where those of 64 rows are of whole tokens.
fn row_boxes(p: &AttnParams) -> Option<[Boxes; 2]> {
    if BOX_ROWS % p.group_size != 0 {
        return None;
    }
    let unsigned = |n: i32| u32::try_from(n).ok();
    let boxes = |address: u64, row: i64, head: i64, head_dim: i32| {
        // What there is one of has no distance to the next: any will do.
        let bytes = |stride: i64, count: i32| match count {
            1 => Some(PANEL * ELEMENT),
            _ => u64::try_from(stride).ok()?.checked_mul(ELEMENT),
        };
        let panels = unsigned(head_dim)? / u32::try_from(PANEL).ok()?;
        Some(Boxes {
            address,
            element_bytes: WIDE,
            rank: 4,
            extents: [PANEL, unsigned(p.num_qo_heads)?.into(), unsigned(p.num_rows)?.into(), panels.into(), 0],
            strides: [bytes(head, p.num_qo_heads)?, bytes(row, p.num_rows)?, PANEL * ELEMENT, 0],
            box_extents: [64, unsigned(p.group_size)?, unsigned(BOX_ROWS / p.group_size)?, panels, 0],
        })
    };
    let q = boxes(p.q, p.q_stride_row, p.q_stride_head, p.head_dim_qk)?;
    Some([q, boxes(p.out, p.out_stride_row, p.out_stride_head, p.head_dim_vo)?])
}

/// Maps that were made so far, and what could not be made.
#[derive(Debug, Default)]
pub(crate) struct MadeMaps {
    made: Mutex<HashMap<Boxes, Option<TensorMap>>>,
}

impl MadeMaps {
    /// A launch's parameters with the maps that there are for it, of caches in e4m3 or else in the dtype of q.
    pub(crate) fn add(&self, device: &Device, p: &AttnParams, is_fp8: bool) -> AttnMappedParams {
        self.add_with(p, is_fp8, |boxes| boxes.make(device))
    }

    fn add_with(&self, p: &AttnParams, is_fp8: bool, make: impl Fn(&Boxes) -> Option<TensorMap>) -> AttnMappedParams {
        let mut params = AttnMappedParams { attn: *p, ..AttnMappedParams::default() };
        self.add_cache_maps(&mut params, if is_fp8 { FP8 } else { WIDE }, &make);
        // Without maps of the caches all threads copy rows too, unless KV is to be widened.
        if params.has_maps != 0 || is_fp8 {
            self.add_row_maps(&mut params, &make);
        }
        params
    }

    fn add_cache_maps(
        &self,
        params: &mut AttnMappedParams,
        element_bytes: u32,
        make: impl Fn(&Boxes) -> Option<TensorMap>,
    ) {
        let Some([k, v]) = cache_boxes(&params.attn, element_bytes) else { return };
        let (Some(k_map), Some(v_map)) = (self.get(&k.boxes, &make), self.get(&v.boxes, &make)) else { return };
        (params.has_maps, params.k_map, params.v_map) = (1, k_map, v_map);
        (params.k_page_step, params.k_head_step) = (k.page_step, k.head_step);
        (params.v_page_step, params.v_head_step) = (v.page_step, v.head_step);
    }

    fn add_row_maps(&self, params: &mut AttnMappedParams, make: impl Fn(&Boxes) -> Option<TensorMap>) {
        let Some([q, out]) = row_boxes(&params.attn) else { return };
        if let (Some(q_map), Some(out_map)) = (self.get(&q, &make), self.get(&out, &make)) {
            (params.has_row_maps, params.q_map, params.out_map) = (1, q_map, out_map);
        }
    }

    fn get(&self, boxes: &Boxes, make: impl Fn(&Boxes) -> Option<TensorMap>) -> Option<TensorMap> {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(map) = made.get(boxes) {
            return *map;
        }
        if made.capacity() < MAX_MADE {
            made.reserve(MAX_MADE); // once: what comes later allocates nothing
        }
        if made.len() >= MAX_MADE {
            made.clear();
        }
        let map = make(boxes);
        made.insert(*boxes, map);
        map
    }
}

const fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// 8 KV heads of 128 in pages of 16 tokens, heads innermost; a group of 4.
    fn params() -> AttnParams {
        AttnParams {
            q: 1 << 20,
            out: 1 << 21,
            k: 1 << 30,
            v: 1 << 31,
            q_stride_row: 4096,
            q_stride_head: 128,
            out_stride_row: 4096,
            out_stride_head: 128,
            k_stride_page: 16 * 1024,
            k_stride_token: 1024,
            k_stride_head: 128,
            v_stride_page: 16 * 1024,
            v_stride_token: 1024,
            v_stride_head: 128,
            num_rows: 100,
            num_qo_heads: 32,
            num_kv_heads: 8,
            group_size: 4,
            page_size: 16,
            window_left: -1,
            head_dim_qk: 128,
            head_dim_vo: 128,
            num_pages: 1000,
            ..AttnParams::default()
        }
    }

    /// Byte that the map's element of (page, head, token, dim) is at.
    fn at(cache: &CacheBoxes, page: u64, head: u64, token: u64, dim: u64) -> u64 {
        let step = |n: i32| u64::try_from(n).expect("steps are positive");
        let last = page * step(cache.page_step) + head * step(cache.head_step);
        assert!(last < cache.boxes.extents[4], "inside the tensor");
        let coordinates = [token % GROUP_TOKENS, dim / PANEL, token / GROUP_TOKENS, last];
        let strides = cache.boxes.strides.iter();
        let element = u64::from(cache.boxes.element_bytes);
        cache.boxes.address + dim % PANEL * element + strides.zip(coordinates).map(|(s, c)| s * c).sum::<u64>()
    }

    #[test]
    fn boxes_of_a_cache_lie_where_its_strides_say() {
        let layouts = [
            (16 * 1024, 1024, 128),           // heads innermost
            (16 * 1024, 128, 16 * 128),       // tokens innermost
            (2 * 16 * 1024, 1024, 128),       // K and V in turns
            (17 * 1096 + 8, 1096, 136),       // gaps
            (16 * 128, 128, 16 * 128 * 1000), // a plane for each head
        ];
        for (page, token, head) in layouts {
            let p = AttnParams { k_stride_page: page, k_stride_token: token, k_stride_head: head, ..params() };
            for bytes in [WIDE, FP8] {
                let [k, _] = cache_boxes(&p, bytes).expect("a map describes it");
                for [i, h, t, d] in [[0, 0, 0, 0], [999, 7, 15, 127], [1, 0, 8, 64], [0, 3, 7, 65]] {
                    let unsigned = |n: i64| u64::try_from(n).expect("positive");
                    let elements = i * unsigned(page) + t * unsigned(token) + h * unsigned(head) + d;
                    let wanted = p.k + u64::from(bytes) * elements;
                    assert_eq!(at(&k, i, h, t, d), wanted, "{page} {token} {head}: {i} {h} {t} {d}");
                }
            }
        }
    }

    #[test]
    fn what_no_map_describes_has_none() {
        assert!(cache_boxes(&AttnParams { page_size: 8, ..params() }, WIDE).is_none());
        assert!(cache_boxes(&AttnParams { page_size: 24, ..params() }, WIDE).is_none());
        assert!(cache_boxes(&AttnParams { window_left: 100, ..params() }, WIDE).is_none());
        assert!(cache_boxes(&AttnParams { window_left: 100, ..params() }, FP8).is_some());
        // Steps of 8 elements: more than a coordinate counts.
        let many = AttnParams { v_stride_page: 16 * 1024 + 8, num_pages: 2_000_000, ..params() };
        assert!(cache_boxes(&many, WIDE).is_none());
        assert!(cache_boxes(&AttnParams { num_pages: 2_000_000, ..params() }, WIDE).is_some());
        assert!(row_boxes(&AttnParams { group_size: 7, ..params() }).is_none());
        let [q, _] = row_boxes(&params()).expect("a map describes it");
        assert_eq!((q.box_extents, q.extents), ([64, 4, 16, 2, 0], [64, 32, 100, 2, 0]));
        assert_eq!(q.strides, [256, 8192, 128, 0]);
        let one_head = AttnParams { num_qo_heads: 1, num_kv_heads: 1, group_size: 1, q_stride_head: 3, ..params() };
        assert_eq!(row_boxes(&one_head).expect("heads of one have no stride")[0].strides[0], 128);
    }

    #[test]
    fn maps_are_made_once_a_layout() {
        let (maps, count) = (MadeMaps::default(), Cell::new(0));
        let make = |_: &Boxes| {
            count.set(count.get() + 1);
            Some(TensorMap::default())
        };
        for _ in 0..3 {
            let params = maps.add_with(&params(), false, make);
            assert_eq!((params.has_maps, params.has_row_maps), (1, 1));
            assert_eq!((params.k_page_step, params.k_head_step), (128, 1));
        }
        assert_eq!(count.get(), 4);
        maps.add_with(&AttnParams { q: 1 << 22, ..params() }, false, make);
        assert_eq!(count.get(), 5);
    }

    #[test]
    fn without_a_map_of_a_cache_threads_copy() {
        let maps = MadeMaps::default();
        let make = |boxes: &Boxes| (boxes.address != 1 << 31).then(TensorMap::default);
        let of_wide = maps.add_with(&params(), false, make);
        assert_eq!((of_wide.has_maps, of_wide.has_row_maps), (0, 0));
        let of_fp8 = maps.add_with(&params(), true, make);
        assert_eq!((of_fp8.has_maps, of_fp8.has_row_maps), (0, 1));
    }

    #[test]
    fn the_number_of_maps_is_limited() {
        let maps = MadeMaps::default();
        for i in 0..2 * MAX_MADE as u64 {
            maps.add_with(&AttnParams { q: i << 10, ..params() }, false, |_| Some(TensorMap::default()));
        }
        assert!(maps.made.lock().expect("no test panics with it").len() <= MAX_MADE);
    }
}

//! Pools of more than 2³² elements: a request whose pages are beyond that has the bits that it has in a small pool, and
//! what it appends goes there and nowhere else.

use attn_conformance::Case;
use attn_conformance::case::{Layout, RequestShape};
use attn_conformance::harness::{Build, Poison, Problem};
use attn_cuda::{CudaDevice, Families};
use attn_metadata::HeadShape;
use kvpool::{Dtype, KvDtype, KvLayout};

use crate::scene::{Place, Scene};
use crate::support;

/// Tokens of a page × KV heads × width: 2³² elements are 262,144 pages.
const PAGE_ELEMENTS: u32 = 16 * 8 * 128;
/// The page whose offset wraps to 0 where it is computed in 32 bits.
const WRAPPING_PAGE: u32 = 1 << 18;
/// Pages beyond that one: where the problem's pages would be found after wrapping.
const BEYOND: u32 = 777;

fn case(kv_dtype: KvDtype, layout: Layout) -> Case {
    let request = |q_len, kv_len| RequestShape { q_len, kv_len };
    Case {
        requests: vec![request(1, 5), request(1, 1500), request(3, 700), request(40, 60), request(70, 300)],
        heads: HeadShape::new(16, 8, 128),
        q_dtype: Dtype::Bf16,
        kv_dtype,
        layout,
        ..Case::default()
    }
}

/// Runs a case in a small and in a big pool; false where the GPU has too little memory.
fn check(kv_dtype: KvDtype, layout: KvLayout, families: Families) -> bool {
    let host = if layout == KvLayout::Nhd { Layout::Nhd } else { Layout::Hnd };
    let case = case(kv_dtype, host);
    let problem = || Problem::build(&case, Build { poison: Poison::Foreign, ..Build::of(&case) });
    let device = CudaDevice::open(0).unwrap();
    let first_page = WRAPPING_PAGE + BEYOND;
    let needed = 2 * u64::from(first_page + 1000) * u64::from(PAGE_ELEMENTS) * kv_dtype.element_bytes() as u64;
    let free = device.device.free_bytes().unwrap();
    if free < needed + (1 << 30) {
        eprintln!("skipped: a pool of {} GiB, {} GiB are free", needed >> 30, free >> 30);
        return false;
    }
    let mut small = Scene::new(device.clone(), problem(), Place { families, ..Place::low(layout) }).unwrap();
    let mut big = Scene::new(device, problem(), Place { layout, first_page, families }).unwrap();
    let step = small.prepare();
    let expected = small.run(&step);
    let step = big.prepare();
    let what = format!("{kv_dtype}, {layout:?}, {families:?}");
    assert!(big.run(&step) == expected, "{what}: outputs differ");
    for page in 0..small.num_pages() {
        assert!(big.page(first_page + page) == small.page(page), "{what}: page {page} differs after the step");
        let wrapped = big.page(BEYOND + page);
        assert!(wrapped.iter().flatten().all(|&byte| byte == 0), "{what}: the page that {page} wraps to was written");
    }
    true
}

#[test]
fn offsets_beyond_32_bits_of_elements_are_right_in_every_kernel() {
    if !support::has_gpu() {
        return;
    }
    let mut num_run = 0;
    for families in [Families::All, Families::Portable, Families::Plain] {
        for (kv_dtype, layout) in [
            (KvDtype::Bf16, KvLayout::Nhd),
            (KvDtype::Bf16, KvLayout::Hnd),
            (KvDtype::Fp8E4m3, KvLayout::Nhd),
            (KvDtype::Fp8E4m3, KvLayout::Hnd),
        ] {
            num_run += usize::from(check(kv_dtype, layout, families));
        }
    }
    support::keep("big-pool", &serde_json::json!({"pools above 2^32 elements": num_run, "of": 8}));
}

#[test]
fn the_pages_are_where_an_offset_of_32_bits_wraps() {
    let wrapped = u64::from(WRAPPING_PAGE) * u64::from(PAGE_ELEMENTS);
    assert_eq!((wrapped, wrapped & u64::from(u32::MAX)), (1 << 32, 0));
    let first = u64::from(WRAPPING_PAGE + BEYOND) * u64::from(PAGE_ELEMENTS);
    assert_eq!(first & u64::from(u32::MAX), u64::from(BEYOND) * u64::from(PAGE_ELEMENTS));
}

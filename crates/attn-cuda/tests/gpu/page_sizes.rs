//! Pages that are no multiple of 16 tokens, or small: kernels copy their KV in other ways than that of pages of 16. The same bits,
//! however often and however a step runs.

use attn_conformance::Case;
use attn_conformance::case::{RequestShape, Sinks};
use attn_conformance::harness::Problem;
use attn_cuda::CudaDevice;
use attn_metadata::HeadShape;
use kvpool::{Dtype, KvDtype, KvLayout};

use crate::scene::{Place, Scene, Written};
use crate::support;

/// Runs and replays of a step, which find what the ones before left.
const NUM_RUNS: usize = 3;
/// Tokens.
const PAGE_SIZES: [u32; 4] = [1, 3, 8, 40];

/// Requests with many tiles of queries and with few, after prefixes, and such that decode.
fn cases() -> Vec<Case> {
    let request = |q_len, kv_len| RequestShape { q_len, kv_len };
    let requests = vec![
        request(900, 900),
        request(1, 700),
        request(333, 2100),
        request(100, 100),
        request(640, 641),
        request(2, 2),
        request(777, 1500),
    ];
    let of = |heads, q_dtype, kv_dtype| Case {
        requests: requests.clone(),
        heads,
        q_dtype,
        kv_dtype,
        append: false,
        ..Case::default()
    };
    let (bf16, f16) = ((Dtype::Bf16, KvDtype::Bf16), (Dtype::F16, KvDtype::F16));
    vec![
        of(HeadShape::new(8, 2, 128), bf16.0, bf16.1),
        of(HeadShape::new(6, 2, 128), f16.0, f16.1),
        of(HeadShape::new(8, 4, 64), bf16.0, bf16.1),
        of(HeadShape::new(4, 2, 256), f16.0, f16.1),
        of(HeadShape { head_dim_vo: 128, ..HeadShape::new(4, 4, 192) }, bf16.0, bf16.1),
        Case { softcap: Some(20.0), sinks: Sinks::Mixed, ..of(HeadShape::new(8, 2, 128), bf16.0, bf16.1) },
        Case { causal: false, append: true, ..of(HeadShape::new(8, 1, 128), bf16.0, bf16.1) },
        Case { window: Some(500), ..of(HeadShape::new(8, 2, 128), bf16.0, bf16.1) },
        of(HeadShape::new(8, 2, 128), bf16.0, KvDtype::Fp8E4m3),
    ]
}

fn written(case: &Case, device: &CudaDevice) -> Written {
    let mut scene = Scene::new(device.clone(), Problem::new(case), Place::low(KvLayout::Nhd)).unwrap();
    scene.run_repeatedly(NUM_RUNS)
}

#[test]
fn pages_of_any_size_give_the_same_bits() {
    if !support::has_gpu() {
        return;
    }
    let device = CudaDevice::open(0).unwrap();
    for case in cases() {
        let wanted = written(&case, &device);
        for page_size in PAGE_SIZES {
            let small = Case { page_size, ..case.clone() };
            assert!(written(&small, &device) == wanted, "{small}: pages of {page_size} tokens give other bits");
        }
    }
}

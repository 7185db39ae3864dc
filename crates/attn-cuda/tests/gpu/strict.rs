//! The strict backend: a row has the same bits however the tokens before it came into the cache: whole, in chunks,
//! token by token, after a prefix that was there.

use attn_conformance::Case;
use attn_conformance::case::RequestShape;
use attn_conformance::harness::Problem;
use attn_cuda::{CudaBackend, CudaDevice};
use attn_metadata::HeadShape;
use kvpool::{Dtype, KvDtype, KvLayout};

use crate::scene::{Place, Scene};
use crate::support;

/// Rows that are compared: the last ones.
const NUM_COMPARED: usize = 50;
/// Query tokens of a step.
const CHUNKS: [usize; 4] = [1, 7, 64, 512];
/// Tokens that were in the cache before.
const PREFIXES: [usize; 5] = [1, 500, 1024, 2500, 2949];

fn prompt(num_tokens: u32, heads: HeadShape, dtypes: (Dtype, KvDtype), softcap: Option<f32>) -> Case {
    Case {
        requests: vec![RequestShape { q_len: num_tokens, kv_len: num_tokens }],
        heads,
        q_dtype: dtypes.0,
        kv_dtype: dtypes.1,
        softcap,
        append: false,
        ..Case::default()
    }
}

/// Prompts on every kernel of the backend; the last one is longer than a chunk of KV.
fn cases() -> Vec<Case> {
    let (bf16, f16, fp8) = ((Dtype::Bf16, KvDtype::Bf16), (Dtype::F16, KvDtype::F16), (Dtype::Bf16, KvDtype::Fp8E4m3));
    vec![
        prompt(3000, HeadShape::new(8, 2, 128), bf16, None),
        prompt(3000, HeadShape::new(6, 2, 64), f16, None),
        prompt(3000, HeadShape::new(4, 1, 256), bf16, None),
        prompt(3000, HeadShape::new(4, 4, 64), bf16, Some(20.0)),
        prompt(3000, HeadShape::new(8, 2, 128), fp8, None),
        prompt(8230, HeadShape::new(4, 1, 128), bf16, None),
    ]
}

fn check(case: &Case, device: &CudaDevice) {
    let make = |config: &_| CudaBackend::strict(config);
    let mut scene = Scene::with_backend(device.clone(), Problem::new(case), Place::low(KvLayout::Nhd), make).unwrap();
    let num_tokens = case.requests[0].q_len as usize;
    let compared = num_tokens - NUM_COMPARED;
    let whole = scene.run_rows(0..num_tokens).rows(compared..num_tokens, case);
    for prefix in PREFIXES {
        let got = scene.run_rows(prefix..num_tokens).rows(compared - prefix..num_tokens - prefix, case);
        assert!(got == whole, "{case}: after a prefix of {prefix} tokens");
    }
    for chunk in CHUNKS {
        for begin in (compared / chunk * chunk..num_tokens).step_by(chunk) {
            let (first, end) = (begin.max(compared), (begin + chunk).min(num_tokens));
            let got = scene.run_rows(begin..end).rows(first - begin..end - begin, case);
            let want = whole.rows(first - compared..end - compared, case);
            assert!(got == want, "{case}: in chunks of {chunk} tokens, rows from {first} on");
        }
    }
}

#[test]
fn a_row_has_the_same_bits_however_its_prompt_was_cut() {
    if support::has_gpu() {
        let device = CudaDevice::open(0).unwrap();
        cases().iter().for_each(|case| check(case, &device));
    }
}

//! Values in the keys: right, and what a cache gives that holds the same values twice.

use attn_metadata::{HeadShape, Layer, LayerParams};
use kvpool::{HostKv, HostTensor, KvFormat, KvLayout, Slot};

use super::problem::{Case, Problem, case};
use super::relations::prefix;
use super::{bits, check, fp8};
use crate::cpu::Isa;

fn heads(num_qo_heads: u32, num_kv_heads: u32, head_dim_qk: u32, head_dim_vo: u32) -> HeadShape {
    HeadShape { num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo }
}

fn latent(requests: &[(usize, usize)]) -> Case {
    Case { heads: heads(16, 1, 40, 24), values_in_keys: true, ..case(requests) }
}

#[test]
fn lengths_around_tiles_and_chunks() {
    for kv in [1, 15, 127, 128, 129, 1023, 1025] {
        check(&latent(&[(1, kv), (3, kv), (kv.min(40), kv)]));
    }
    check(&Case { padding_rows: 3, ..latent(&[(0, 0), (2, 0), (5, 3), (1, 1), (0, 9), (70, 300)]) });
}

#[test]
fn masks_score_rules_groups_and_widths() {
    let requests = [(1, 300), (40, 200), (7, 1100), (9, 4), (2, 0)];
    for causal in [true, false] {
        for window in [None, Some(5), Some(128)] {
            check(&Case { causal, window, ..latent(&requests) });
            check(&Case { causal, window, custom: true, sinks: true, ..latent(&requests) });
        }
        check(&Case { causal, alibi: true, softcap: Some(3.0), sinks: true, ..latent(&requests) });
    }
    for group in [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 128, 600] {
        check(&Case { heads: heads(group, 1, 40, 32), ..latent(&[(1, 70), (2, 260), (5, 20)]) });
    }
    for (num_kv_heads, qk, vo) in [(2, 16, 16), (3, 33, 5), (1, 1, 1), (1, 576, 512), (2, 640, 33)] {
        check(&Case { heads: heads(6, num_kv_heads, qk, vo), page_size: 3, ..latent(&[(1, 140), (20, 33)]) });
    }
}

#[test]
fn formats_and_layouts() {
    let scaled = KvFormat::Fp8E4m3(kvpool::KvScales::new(0.5, 0.5).unwrap());
    for layout in [KvLayout::Nhd, KvLayout::Hnd] {
        for format in [KvFormat::F32, KvFormat::F16, KvFormat::Bf16, scaled] {
            check(&Case { format, layout, page_size: 5, heads: heads(4, 2, 40, 24), ..latent(&[(1, 77), (33, 60)]) });
        }
        for (qk, vo) in [(128, 128), (192, 128), (576, 512)] {
            let format = KvFormat::Fp8Latent;
            check(&Case { format, layout, page_size: 5, heads: heads(4, 2, qk, vo), ..latent(&[(1, 140), (9, 60)]) });
        }
    }
    assert_ne!(fp8().k_scale().to_bits(), fp8().v_scale().to_bits(), "one that cannot share");
}

/// The same keys, and the values once more beside them.
fn separate(problem: &Problem) -> HostKv {
    let shared = &problem.cache;
    let shape = shared.shape();
    let mut cache = HostKv::new(shape, KvLayout::Nhd, shared.format()).unwrap();
    let heads = shape.num_kv_heads as usize;
    for slot in (0..i32::try_from(shape.num_slots()).unwrap()).map(Slot::from_raw) {
        let (mut k, mut v) = (Vec::new(), Vec::new());
        for head in 0..shape.num_kv_heads {
            let mut vector = vec![0.0; shape.head_dim_k as usize];
            shared.read_k(slot, head, &mut vector);
            v.extend_from_slice(&vector[..shape.head_dim_v as usize]);
            k.append(&mut vector);
        }
        let k = HostTensor::packed(&k, [1, heads, shape.head_dim_k as usize]).unwrap();
        let v = HostTensor::packed(&v, [1, heads, shape.head_dim_v as usize]).unwrap();
        cache.append(&[slot], &k, Some(&v)).unwrap();
    }
    cache
}

#[test]
fn values_in_the_keys_give_what_the_same_values_beside_them_give() {
    for (num_qo_heads, num_kv_heads) in [(1, 1), (16, 1), (40, 2), (65, 1), (128, 1)] {
        for (custom, window) in [(false, None), (true, Some(50))] {
            let heads = heads(num_qo_heads, num_kv_heads, 72, 56);
            let problem = Problem::new(&Case { heads, custom, window, ..latent(&[(1, 1200), (6, 150), (33, 70)]) });
            let apart = Problem {
                cache: separate(&problem),
                case: problem.case.clone(),
                layer: Layer::new(LayerParams { values_in_keys: false, ..problem.layer.params().clone() }).unwrap(),
                batch: problem.batch.clone(),
                q: problem.q.clone(),
            };
            for isa in Isa::available() {
                let (got, want) = (problem.run(isa, 2), apart.run(isa, 2));
                // Scores are summed in another order where rows are shared, in the same one elsewhere.
                let is_same = bits(&got) == bits(&want);
                assert_eq!(is_same, num_qo_heads / num_kv_heads > 64, "{isa:?}: {:?}", problem.case);
                let close = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| a == b || (a - b).abs() < 1e-5);
                assert!(close(&got.0, &want.0) && close(&got.1, &want.1), "{isa:?}: {:?}", problem.case);
            }
        }
    }
}

#[test]
fn a_token_has_the_same_bits_prefilled_and_decoded() {
    for (num_qo_heads, window) in [(1, None), (5, Some(300)), (17, None), (65, None)] {
        let case = Case { heads: heads(num_qo_heads, 1, 40, 24), window, ..latent(&[(1100, 1100)]) };
        let whole = Problem::new(&case);
        for isa in Isa::available() {
            let (out, lse) = whole.run(isa, 2);
            for (kv_len, q_len) in [(1, 1), (11, 1), (128, 2), (141, 13), (1025, 1), (1100, 40)] {
                let rows = |width: u32| (kv_len - q_len) * width as usize..kv_len * width as usize;
                let expected = (out[rows(num_qo_heads * 24)].to_vec(), lse[rows(num_qo_heads)].to_vec());
                let part = prefix(&whole, kv_len, q_len);
                assert!(bits(&part.run(isa, 1)) == bits(&expected), "{isa:?}, {q_len} of {kv_len}: {case:?}");
            }
        }
    }
}

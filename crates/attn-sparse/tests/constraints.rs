//! Every rule that a layer can break is named, all of them at once.

#![allow(clippy::unwrap_used)]

use attn_metadata::{HeadShape, Layer, LayerParams, ModelSpec};
use attn_sparse::params::{Constraint, Limits, Violations, heads_on_device};
use attn_sparse::{BlockParams, SparseFamily, SparseParams};
use kvpool::{Dtype, KvDtype, PageSize};

const HEADS: HeadShape = HeadShape::new(64, 4, 128);

fn m3() -> SparseParams {
    let blocks = BlockParams { block_size: 128, topk: 16, init_blocks: 0, local_blocks: 1 };
    SparseParams::new(blocks, 4, 128)
}

fn broken(edit: impl FnOnce(&mut SparseParams, &mut HeadShape), limits: &Limits) -> Vec<Constraint> {
    let (mut params, mut heads) = (m3(), HEADS);
    edit(&mut params, &mut heads);
    params.check(&heads, limits).unwrap_err().0
}

#[test]
fn each_rule_of_the_method_is_named() {
    let check = |edit: fn(&mut SparseParams, &mut HeadShape), expected: Constraint| {
        assert_eq!(broken(edit, &Limits::ORACLE), [expected]);
    };
    check(|p, _| p.blocks.block_size = 0, Constraint::Zero { field: "block_size" });
    check(|p, _| p.blocks.topk = 0, Constraint::Zero { field: "topk" });
    check(|p, _| p.num_index_heads = 0, Constraint::Zero { field: "num_index_heads" });
    check(|p, _| p.index_dim = 0, Constraint::Zero { field: "index_dim" });
    check(|p, _| p.blocks.block_size = 96, Constraint::BlockSize { got: 96 });
    let forced = Constraint::ForcedBlocks { init_blocks: 9, local_blocks: 8, topk: 16 };
    check(|p, _| (p.blocks.init_blocks, p.blocks.local_blocks) = (9, 8), forced);
    let overflow = Constraint::ForcedBlocks { init_blocks: u32::MAX, local_blocks: 1, topk: 16 };
    check(|p, _| p.blocks.init_blocks = u32::MAX, overflow);
    // 2^31 tokens, one more than an `i32` counts; and "everything", which would be 2^32 blocks.
    let budget = |topk, num_index_heads| Constraint::Budget { topk, block_size: 128, num_index_heads, num_kv_heads: 4 };
    check(|p, _| p.blocks.topk = 1 << 24, budget(1 << 24, 4));
    check(|p, _| (p.blocks.topk, p.num_index_heads) = (1 << 23, 8), budget(1 << 23, 8));
    check(|p, _| p.blocks.topk = u32::MAX, budget(u32::MAX, 4));
    check(|p, _| p.num_index_heads = 6, Constraint::IndexHeads { num_index_heads: 6, num_kv_heads: 4 });
    // Fewer index heads than KV heads.
    check(|p, _| p.num_index_heads = 2, Constraint::IndexHeads { num_index_heads: 2, num_kv_heads: 4 });
    check(|_, h| h.num_qo_heads = 62, Constraint::QueryHeads { num_qo_heads: 62, num_kv_heads: 4 });
    check(|p, _| p.index_scale = 0.0, Constraint::IndexScale { got: 0.0 });
    check(|p, _| p.index_scale = f32::INFINITY, Constraint::IndexScale { got: f32::INFINITY });
    assert_eq!(broken(|_, h| h.num_kv_heads = 0, &Limits::ORACLE), [Constraint::Zero { field: "num_kv_heads" }]);
}

#[test]
fn all_rules_are_named_at_once() {
    let all = |p: &mut SparseParams, h: &mut HeadShape| {
        p.blocks = BlockParams { block_size: 48, topk: 1, init_blocks: 1, local_blocks: 1 };
        p.num_index_heads = 3;
        h.num_qo_heads = 6;
    };
    let violations = Violations(broken(all, &Limits::ORACLE));
    assert_eq!(
        violations.to_string(),
        "a block of 48 tokens is not a power of two; 1 initial and 1 local blocks do not fit a budget of 1 blocks; \
         3 index heads are not divisible by 4 KV heads; 6 query heads are not divisible by 4 KV heads"
    );
}

#[test]
fn each_rule_of_an_implementation_is_named() {
    let kernels = Limits::BLOCK_KERNELS.name;
    let blocks = |p: &mut SparseParams, _: &mut HeadShape| p.blocks.block_size = 256;
    let supported: &[u32] = &[16, 32, 64, 128];
    let unsupported = Constraint::UnsupportedBlock { implementation: kernels, got: 256, supported };
    assert_eq!(broken(blocks, &Limits::BLOCK_KERNELS), [unsupported]);
    let wide = |p: &mut SparseParams, h: &mut HeadShape| (p.index_dim, h.head_dim_qk, h.head_dim_vo) = (257, 300, 320);
    let head_dim = |field, got| Constraint::HeadDim { implementation: kernels, field, got, max: 256 };
    let expected = [head_dim("index_dim", 257), head_dim("head_dim_qk", 300), head_dim("head_dim_vo", 320)];
    assert_eq!(broken(wide, &Limits::BLOCK_KERNELS), expected);
    let group = |_: &mut SparseParams, h: &mut HeadShape| h.num_qo_heads = 4 * 129;
    let expected = Constraint::GroupSize { implementation: kernels, got: 129, max: 128 };
    assert_eq!(broken(group, &Limits::BLOCK_KERNELS), [expected]);
    let paged = Limits::PAGED_128.name;
    let topk = |p: &mut SparseParams, _: &mut HeadShape| p.blocks.topk = 12;
    let expected = Constraint::UnsupportedTopk { implementation: paged, got: 12, supported: &[4, 8, 16, 32] };
    assert_eq!(broken(topk, &Limits::PAGED_128), [expected]);
    let table = Constraint::OneKvHead { implementation: Limits::PAGE_TABLE.name, got: 4 };
    assert_eq!(broken(|_, _| {}, &Limits::PAGE_TABLE), [table]);
    let one = Limits { one_index_head: true, ..Limits::CPU };
    let expected = Constraint::IndexGroup { implementation: one.name, num_index_heads: 8, num_kv_heads: 4 };
    assert_eq!(broken(|p, _| p.num_index_heads = 8, &one), [expected]);
    for limits in [Limits::ORACLE, Limits::CPU, Limits::BLOCK_KERNELS, Limits::PAGED_128] {
        assert_eq!(m3().check(&HEADS, &limits), Ok(()));
    }
}

#[test]
fn each_rule_of_storage_is_named() {
    let check = |limits: &Limits, q, kv, page_size| {
        let page_size = PageSize::new(page_size).unwrap();
        limits.check_storage(&m3(), q, kv, page_size).map_err(|violations| violations.0)
    };
    assert_eq!(check(&Limits::CPU, Dtype::F32, KvDtype::Fp8E4m3, 16), Ok(()));
    let page = Constraint::PageSize { block_size: 128, got: 24 };
    assert_eq!(check(&Limits::CPU, Dtype::F32, KvDtype::F32, 24), Err(vec![page]));
    let page = Constraint::PageSize { block_size: 128, got: 256 };
    assert_eq!(check(&Limits::CPU, Dtype::F32, KvDtype::F32, 256), Err(vec![page]));
    let implementation = Limits::PAGED_128.name;
    let small = Constraint::PageIsBlock { implementation, block_size: 128, got: 64 };
    assert_eq!(check(&Limits::PAGED_128, Dtype::Bf16, KvDtype::Bf16, 64), Err(vec![small]));
    let query = Constraint::QueryDtype { implementation, got: Dtype::F32 };
    assert_eq!(check(&Limits::PAGED_128, Dtype::F32, KvDtype::F32, 128), Err(vec![query]));
    let stored = |q_dtype, got| Constraint::StoredDtype { implementation, q_dtype, got };
    let fp8 = stored(Dtype::Bf16, KvDtype::Fp8E4m3);
    assert_eq!(check(&Limits::PAGED_128, Dtype::Bf16, KvDtype::Fp8E4m3, 128), Err(vec![fp8]));
    let other = stored(Dtype::Bf16, KvDtype::F16);
    assert_eq!(check(&Limits::PAGED_128, Dtype::Bf16, KvDtype::F16, 128), Err(vec![other]));
    assert_eq!(check(&Limits::BLOCK_KERNELS, Dtype::Bf16, KvDtype::Fp8E4m3, 128), Ok(()));
}

#[test]
fn heads_are_cut_over_devices_or_replicated() {
    let expected = [(1, (4, 4)), (2, (2, 2)), (4, (1, 1)), (8, (1, 1))];
    for (devices, heads) in expected {
        assert_eq!(heads_on_device(4, 4, devices), Ok(heads));
    }
    let shards = |what, count, devices| Err(Constraint::Shards { what, count, devices });
    assert_eq!(heads_on_device(4, 4, 3), shards("KV heads", 4, 3));
    assert_eq!(heads_on_device(6, 4, 6), shards("index heads", 4, 6));
    assert_eq!(heads_on_device(4, 4, 0), Err(Constraint::Zero { field: "devices" }));
}

#[test]
fn a_layer_and_a_model_refuse_what_the_family_rules_out() {
    let family = SparseFamily::new(m3(), &HEADS).unwrap();
    assert!(SparseFamily::new(m3(), &HeadShape::new(64, 3, 128)).is_err());
    let other = LayerParams {
        family: Some(attn_metadata::FamilyRef::new(family)),
        ..LayerParams::causal(HeadShape::new(64, 8, 128))
    };
    let error = Layer::new(other).unwrap_err().to_string();
    assert_eq!(error, "sparse attention: 4 index heads are not divisible by 8 KV heads");
    let layers = vec![family.layer(HEADS).unwrap()];
    let page_size = PageSize::new(48).unwrap();
    let error = ModelSpec::new(layers, Dtype::F32, KvDtype::F32, page_size).unwrap_err().to_string();
    assert_eq!(error, "layer 0 (sparse attention): pages of 48 tokens do not divide blocks of 128 tokens");
}

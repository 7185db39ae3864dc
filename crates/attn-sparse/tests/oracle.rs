//! The fast backends against the oracle over random problems, and the oracle against dense attention.

#![allow(clippy::unwrap_used)]

mod support;

use attn_conformance::Rng;
use attn_metadata::{BackendEntry, HeadShape, Host, LayerParams};
use attn_sparse::oracle::RowResult;
use attn_sparse::{BlockParams, ScoreType, Selection, SparseBackend, SparseParams};
use kvpool::{HostTensor, KvDtype};
use support::{Problem, Results, Shape};

/// Problems in all: 10,000.
const NUM_CASES: u64 = 10_000;

/// A random shape: every relation of heads, blocks, pages and forced blocks; widths whose products are exact in `f32`.
fn random_shape(rng: &mut Rng, one_kv_head: bool) -> Shape {
    let num_kv_heads = if one_kv_head { 1 } else { rng.pick(&[1, 2, 3]) };
    let heads = HeadShape {
        num_qo_heads: num_kv_heads * rng.pick(&[1, 2, 3, 5]),
        num_kv_heads,
        head_dim_qk: rng.pick(&[4, 16, 7]),
        head_dim_vo: rng.pick(&[4, 16, 9]),
    };
    let block_size = rng.pick(&[1, 2, 4, 8, 16, 128]);
    let topk = rng.pick(&[1, 2, 3, 5]);
    let init_blocks = u32::try_from(rng.below(topk as usize + 1)).unwrap();
    let local_blocks = u32::try_from(rng.below((topk - init_blocks) as usize + 1)).unwrap();
    let page_size = rng.pick(&[1, 2, 4, 8, 16]).min(block_size);
    let max_len = block_size as usize * 9;
    let num_requests = rng.below(4);
    let requests = (0..num_requests).map(|_| (rng.below(max_len), rng.below(4))).collect();
    Shape {
        heads,
        params: SparseParams {
            blocks: BlockParams { block_size, topk, init_blocks, local_blocks },
            score: rng.pick(&[ScoreType::Max, ScoreType::Lse]),
            num_index_heads: num_kv_heads * rng.pick(&[1, 2]),
            index_dim: rng.pick(&[4, 8, 13]),
            index_scale: rng.pick(&[0.25, 0.5]),
            has_index_value: rng.below(3) == 0,
        },
        sm_scale: rng.pick(&[0.25, 0.125]),
        page_size,
        requests,
        padding_rows: rng.below(3),
        kv_dtype: rng.pick(&[KvDtype::F32, KvDtype::Bf16, KvDtype::F16]),
    }
}

/// Whether each choice of a row is clear: of scores that are not equal, those at the cut are apart. Scores by maximum
/// are exact in `f32`, and so are their ties.
fn is_clear(problem: &Problem, row: &RowResult) -> bool {
    let params = problem.shape.params;
    params.score == ScoreType::Max
        || row.block_scores.iter().all(|scores| {
            let mut sorted = scores.clone();
            sorted.sort_by(f64::total_cmp);
            sorted.windows(2).all(|pair| (pair[1] - pair[0]) > 1e-4)
        })
}

fn ids(selection: &Selection, row: usize) -> Vec<Vec<usize>> {
    let set = |set| selection.ids(row, set).iter().map(|&id| usize::try_from(id).unwrap()).collect();
    (0..selection.fanout().num_sets()).map(set).collect()
}

/// Compares a call with the oracle; rows whose choice is not clear are left out. Returns the rows compared.
fn compare(problem: &Problem, selection: Option<&Selection>, got: &Results, what: &str) -> usize {
    let rows = problem.oracle_rows();
    let mut compared = 0;
    for (index, row) in rows.iter().enumerate() {
        if !is_clear(problem, row) {
            continue;
        }
        compared += 1;
        if let Some(selection) = selection {
            assert_eq!(ids(selection, index), row.by_kv_head, "{what}: row {index}");
        }
        let check = |name: &str, got: &[f32], expected: &[f64]| {
            let width = expected.len();
            for (i, (&got, &expected)) in got[index * width..].iter().zip(expected).enumerate() {
                let is_close = (f64::from(got) - expected).abs() <= 2e-5 * expected.abs().max(1.0);
                assert!(
                    is_close || f64::from(got) == expected,
                    "{what}: {name} of row {index}, {i}: {got}, {expected}"
                );
            }
        };
        check("out", &got.out, &row.out);
        check("lse", &got.lse, &row.lse);
        if let Some(index_out) = &row.index_out {
            check("index out", &got.index_out, index_out);
        }
    }
    let width = got.out.len() / (problem.batch.num_rows() as usize).max(1);
    assert!(got.out[rows.len() * width..].iter().all(|&x| x == 0.0), "{what}: padding rows are zeros");
    compared
}

#[test]
fn ten_thousand_random_problems() {
    let mut compared = 0;
    for seed in 0..NUM_CASES {
        let problem = Problem::new(random_shape(&mut Rng::new(&[seed]), false), seed);
        let mut backend = SparseBackend::new(&problem.config(vec![problem.layer()])).unwrap();
        let (step, got) = problem.run(&mut backend);
        let selection = backend.selection(&step, 0).unwrap();
        compared += compare(&problem, selection, &got, &format!("seed {seed}, {:?}", problem.shape));
    }
    assert!(compared > 15_000, "{compared} rows");
}

fn check_some(entry: &BackendEntry<Host>, one_kv_head: bool) {
    let mut compared = 0;
    for seed in 0..500 {
        let problem = Problem::new(random_shape(&mut Rng::new(&[seed, 1]), one_kv_head), seed);
        let (_, got) = problem.run(&mut *problem.backend(entry));
        compared += compare(&problem, None, &got, &format!("{}, seed {seed}", entry.name));
    }
    assert!(compared > 500, "{compared} rows");
}

#[test]
fn random_problems_through_the_page_table() {
    check_some(&attn_sparse::page_table_entry(), true);
}

#[test]
fn random_problems_on_the_oracle_behind_the_waist() {
    check_some(&attn_sparse::oracle_entry(), false);
}

/// The plain oracle's results over the same cache, with the new KV appended.
fn dense(problem: &Problem) -> attn_reference::oracle::OracleOutput {
    let heads = problem.shape.heads;
    let rows = problem.batch.num_rows() as usize;
    let [hq, hkv, qk, vo] =
        [heads.num_qo_heads, heads.num_kv_heads, heads.head_dim_qk, heads.head_dim_vo].map(|x| x as usize);
    let mut cache = problem.cache.clone();
    let k = HostTensor::packed(&problem.k[..], [rows, hkv, qk]).unwrap();
    let v = HostTensor::packed(&problem.v[..], [rows, hkv, vo]).unwrap();
    cache.append(problem.batch.slot_mapping().unwrap(), &k, Some(&v)).unwrap();
    let params = LayerParams { sm_scale: problem.shape.sm_scale, ..LayerParams::causal(heads) };
    let layer = attn_metadata::Layer::new(params).unwrap();
    let q = HostTensor::packed(&problem.q[..], [rows, hq, qk]).unwrap();
    attn_reference::oracle::attend(&problem.batch, &layer, &q, &cache)
}

#[test]
fn with_every_block_selected_the_oracle_has_the_bits_of_the_dense_one() {
    for seed in 0..200 {
        let mut shape = random_shape(&mut Rng::new(&[seed, 2]), false);
        shape.params.blocks.topk = 9 + 5;
        let problem = Problem::new(shape, seed);
        let (sparse, dense) = (problem.oracle_rows(), dense(&problem));
        for (index, row) in sparse.iter().enumerate() {
            let width = row.out.len();
            assert_eq!(row.out, dense.out[index * width..(index + 1) * width], "seed {seed}, row {index}");
            let width = row.lse.len();
            assert_eq!(row.lse, dense.lse[index * width..(index + 1) * width], "seed {seed}, row {index}");
        }
    }
}

#[test]
fn with_every_block_selected_the_fast_backend_has_the_bits_of_the_dense_one() {
    for seed in 0..100 {
        let mut shape = random_shape(&mut Rng::new(&[seed, 3]), false);
        shape.params.blocks.topk = 9 + 5;
        shape.params.has_index_value = false;
        let problem = Problem::new(shape, seed);
        let (_, sparse) = problem.run(&mut *problem.backend(&attn_sparse::entry()));
        let params = LayerParams { sm_scale: problem.shape.sm_scale, ..LayerParams::causal(problem.shape.heads) };
        let layer = attn_metadata::Layer::new(params).unwrap();
        let mut dense = problem.backend_of(&attn_reference::cpu::entry(), vec![layer]);
        let step = dense.prepare_metadata(&problem.batch).unwrap();
        let dense = problem.forward(&mut *dense, &step, 0, false).unwrap();
        assert_eq!((sparse.out, sparse.lse), (dense.out, dense.lse), "seed {seed}, {:?}", problem.shape);
    }
}

#[test]
fn more_heads_than_a_tile_has_rows() {
    let blocks = BlockParams { block_size: 4, topk: 2, init_blocks: 0, local_blocks: 1 };
    let params = SparseParams { index_scale: 0.25, has_index_value: true, ..SparseParams::new(blocks, 40, 8) };
    let shape = Shape {
        heads: HeadShape::new(70, 1, 16),
        params,
        sm_scale: 0.25,
        page_size: 2,
        requests: vec![(300, 3), (0, 5)],
        padding_rows: 1,
        kv_dtype: KvDtype::F32,
    };
    let problem = Problem::new(shape, 9);
    let mut backend = SparseBackend::new(&problem.config(vec![problem.layer()])).unwrap();
    let (step, got) = problem.run(&mut backend);
    assert_eq!(compare(&problem, backend.selection(&step, 0).unwrap(), &got, "wide groups"), 8);
}

#[test]
fn a_context_of_600k_tokens() {
    let heads = HeadShape::new(4, 2, 16);
    let blocks = BlockParams { block_size: 128, topk: 16, init_blocks: 1, local_blocks: 2 };
    let params = SparseParams { index_scale: 0.25, ..SparseParams::new(blocks, 2, 16) };
    let shape = Shape {
        heads,
        params,
        sm_scale: 0.25,
        page_size: 64,
        requests: vec![(599_999, 1), (600_037, 2)],
        padding_rows: 0,
        kv_dtype: KvDtype::Bf16,
    };
    let problem = Problem::new(shape, 5);
    let mut backend = SparseBackend::new(&problem.config(vec![problem.layer()])).unwrap();
    let (step, got) = problem.run(&mut backend);
    let selection = backend.selection(&step, 0).unwrap().unwrap();
    assert_eq!(compare(&problem, Some(selection), &got, "600k tokens"), 3);
    let last = ids(selection, 2);
    assert!(last.iter().all(|set| set.len() == 16 && set[0] == 0 && set.ends_with(&[4686, 4687])), "{last:?}");
    assert!(last.iter().flatten().any(|&id| id > 4096 && id < 4686), "beyond 4,096 blocks: {last:?}");
}

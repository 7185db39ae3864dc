//! Runs a case on the oracle: caches as maps from slots, new KV stored first, one row at a time.

use attn_metadata::HeadShape;

use super::file::{Case, Cube};
use super::outcome::Outcome;
use crate::oracle::{Oracle, Row, RowResult, Scales, Sequence};
use crate::params::SparseParams;
use crate::selection::TAIL;

pub(crate) fn run(case: &Case, params: &SparseParams, heads: HeadShape) -> Outcome {
    let inputs = &case.inputs;
    let before = &inputs.caches_before;
    let store = |cache: &Cube<f64>, new: &Cube<f64>| -> Vec<Vec<f64>> {
        let mut slots: Vec<Vec<f64>> = cache.iter().map(|slot| slot.concat()).collect();
        for (row, &loc) in new.iter().zip(&inputs.out_cache_loc) {
            slots[loc] = row.concat();
        }
        slots
    };
    let keys = store(&before.k_cache, &inputs.k);
    let values = store(&before.v_cache, &inputs.v);
    let index_keys = store(&before.idx_k_cache, &inputs.idx_k);
    let index_values = before.idx_v_cache.as_ref().zip(inputs.idx_v.as_ref()).map(|(cache, new)| store(cache, new));
    let scales = Scales { main: case.params.sm_scale, index: case.params.idx_sm_scale };
    let oracle = Oracle { heads, params: *params, scales };
    let mut results = Vec::new();
    for (request, &len) in inputs.seq_lens.iter().enumerate() {
        let slots = &inputs.req_to_token[inputs.req_pool_indices[request]][..len];
        let gather = |cache: &[Vec<f64>]| -> Vec<f64> { slots.iter().flat_map(|&slot| cache[slot].clone()).collect() };
        let (keys, values, index_keys) = (gather(&keys), gather(&values), gather(&index_keys));
        let index_values = index_values.as_ref().map(|cache| gather(cache));
        let sequence =
            Sequence { keys: &keys, values: &values, index_keys: &index_keys, index_values: index_values.as_deref() };
        let start = inputs.cu_seqlens_q[request];
        for row in start..inputs.cu_seqlens_q[request + 1] {
            let (q, index_q) = (inputs.q[row].concat(), inputs.idx_q[row].concat());
            let visible = inputs.prefix_lens[request] + (row - start) + 1;
            results.push(oracle.row(&sequence, &Row { visible, q: &q, index_q: &index_q }));
        }
    }
    outcome(case, &results)
}

fn outcome(case: &Case, results: &[RowResult]) -> Outcome {
    let p = &case.params;
    let (topk, width) = (p.topk_blocks as usize, (p.num_idx_heads / p.num_kv_heads * p.topk_blocks) as usize);
    let padded = |set: &Vec<usize>, width: usize| -> Vec<i32> {
        let ids = set.iter().map(|&id| i32::try_from(id).expect("a block of a test"));
        ids.chain(std::iter::repeat(TAIL)).take(width.max(set.len())).collect()
    };
    let ids = |sets: &dyn Fn(&RowResult) -> Vec<Vec<usize>>, width: usize| -> Cube<i32> {
        results.iter().map(|row| sets(row).iter().map(|set| padded(set, width)).collect()).collect()
    };
    // Rows behind the last token are zeros.
    let split = |rows: &dyn Fn(&RowResult) -> Vec<f64>, heads: u32, dim: u32| -> Cube<f64> {
        let zeros = vec![vec![0.0; dim as usize]; heads as usize];
        let mut all: Cube<f64> =
            results.iter().map(|row| rows(row).chunks(dim as usize).map(<[f64]>::to_vec).collect()).collect();
        all.resize(case.inputs.q.len(), zeros);
        all
    };
    let index_out =
        case.inputs.idx_v.is_some().then(|| {
            split(&|row| row.index_out.clone().expect("there are index values"), p.num_idx_heads, p.idx_head_dim)
        });
    Outcome {
        block_scores: Some(results.iter().map(|row| row.block_scores.clone()).collect()),
        by_index_head: Some(ids(&|row| row.by_index_head.clone(), topk)),
        by_kv_head: Some(ids(&|row| row.by_kv_head.clone(), width)),
        index_out,
        out: split(&|row| row.out.clone(), p.num_q_heads, p.head_dim),
    }
}

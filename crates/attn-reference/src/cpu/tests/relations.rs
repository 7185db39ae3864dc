//! Relations that hold bit for bit: alone or in a batch, prefilled or decoded, whatever a row does not see.

use attn_metadata::{Batch, HeadShape, RawBatch};
use kvpool::PageId;

use super::bits;
use super::problem::{Case, Problem, case, set};
use crate::cpu::Isa;

/// The rows of one request, alone.
fn alone(problem: &Problem, isa: Isa, request: usize) -> (Vec<f32>, Vec<f32>) {
    let r = problem.batch.requests()[request];
    let pages = problem.batch.pages(&r).to_vec();
    let narrow = |x: usize| i32::try_from(x).unwrap();
    let raw = RawBatch {
        num_rows: r.q_len as usize,
        qo_indptr: &[0, i32::try_from(r.q_len).unwrap()],
        kv_indptr: &[0, narrow(pages.len())],
        kv_indices: &pages,
        kv_last_page_len: &[i32::try_from((r.kv_len - 1) % problem.case.page_size + 1).unwrap()],
        slot_mapping: None,
        custom_mask: None,
    };
    let width = (problem.case.heads.num_qo_heads * problem.case.heads.head_dim_qk) as usize;
    let q = problem.q[r.q_start as usize * width..][..r.q_len as usize * width].to_vec();
    let batch = Batch::from_raw(problem.batch.pool(), &raw).unwrap();
    Problem { case: problem.case.clone(), layer: problem.layer.clone(), cache: problem.cache.clone(), batch, q }
        .run(isa, 1)
}

#[test]
fn a_request_alone_has_the_bits_that_it_has_in_a_batch() {
    let problem = Problem::new(&Case { window: Some(700), sinks: true, ..case(&[(1, 1500), (37, 1300), (150, 150)]) });
    let heads = problem.case.heads;
    for isa in Isa::available() {
        let (out, lse) = problem.run(isa, 3);
        for (request, r) in problem.batch.requests().iter().enumerate() {
            let range = |width: u32| (r.q_start * width) as usize..((r.q_start + r.q_len) * width) as usize;
            let mine =
                (out[range(heads.num_qo_heads * heads.head_dim_vo)].to_vec(), lse[range(heads.num_qo_heads)].to_vec());
            assert!(bits(&mine) == bits(&alone(&problem, isa, request)), "{isa:?}, request {request}");
        }
    }
}

#[test]
fn a_token_decoded_has_the_bits_that_it_had_when_prefilled() {
    let heads = HeadShape { num_qo_heads: 6, num_kv_heads: 2, head_dim_qk: 24, head_dim_vo: 16 };
    for (window, alibi) in [(None, false), (Some(300), true)] {
        let whole = Problem::new(&Case { heads, window, alibi, softcap: Some(9.0), ..case(&[(1400, 1400)]) });
        let width = (heads.num_qo_heads * heads.head_dim_vo) as usize;
        for isa in Isa::available() {
            let (out, lse) = whole.run(isa, 2);
            for (kv_len, q_len) in
                [(1, 1), (128, 1), (129, 2), (1024, 1), (1025, 7), (1400, 1), (1400, 17), (1300, 300)]
            {
                let part = prefix(&whole, kv_len, q_len);
                let rows = kv_len - q_len..kv_len;
                let expected = (
                    out[rows.start * width..rows.end * width].to_vec(),
                    lse[rows.start * heads.num_qo_heads as usize..rows.end * heads.num_qo_heads as usize].to_vec(),
                );
                assert!(bits(&part.run(isa, 2)) == bits(&expected), "{isa:?}, {q_len} of {kv_len} tokens");
            }
        }
    }
}

/// The last `q_len` of the first `kv_len` tokens of a problem of one request.
pub(super) fn prefix(whole: &Problem, kv_len: usize, q_len: usize) -> Problem {
    let page_size = whole.batch.page_size();
    let narrow = |x: usize| i32::try_from(x).unwrap();
    let pages = &whole.batch.kv_indices()[..page_size.pages_for(kv_len)];
    let raw = RawBatch {
        num_rows: q_len,
        qo_indptr: &[0, narrow(q_len)],
        kv_indptr: &[0, narrow(pages.len())],
        kv_indices: pages,
        kv_last_page_len: &[narrow(page_size.last_page_len(kv_len) as usize)],
        slot_mapping: None,
        custom_mask: None,
    };
    let width = (whole.case.heads.num_qo_heads * whole.case.heads.head_dim_qk) as usize;
    let batch = Batch::from_raw(whole.batch.pool(), &raw).unwrap();
    let q = whole.q[(kv_len - q_len) * width..kv_len * width].to_vec();
    Problem { case: whole.case.clone(), layer: whole.layer.clone(), cache: whole.cache.clone(), batch, q }
}

#[test]
fn a_key_that_a_row_does_not_see_cannot_change_it() {
    for custom in [false, true] {
        let case = Case { window: Some(40), custom, ..case(&[(50, 260)]) };
        let mut problem = Problem::new(&case);
        let before: Vec<_> = Isa::available().map(|isa| problem.run(isa, 2)).collect();
        let r = problem.batch.requests()[0];
        // Poison one key; rows that do not see it must keep their bits.
        let key = 230;
        let page: PageId = problem.batch.page_of(&r, key);
        for layout in [problem.cache.k().layout, problem.cache.v().layout] {
            for head in 0..2 {
                let start = layout.element(page, key % case.page_size, head);
                (start..start + layout.head_dim).for_each(|at| set(&mut problem.cache, at, f32::NAN));
            }
        }
        for (isa, (old, _)) in Isa::available().zip(before) {
            let (new, _) = problem.run(isa, 2);
            for row in 0..r.q_len {
                let distance = i64::from(key) - r.position(row);
                let sees = (-40..=0).contains(&distance)
                    && problem.batch.custom_mask().is_none_or(|m| m.is_visible(&r, row, key));
                let range = row as usize * 128..(row as usize + 1) * 128;
                let kept = new[range.clone()].iter().zip(&old[range.clone()]).all(|(a, b)| a.to_bits() == b.to_bits());
                assert_eq!(kept, !sees, "{isa:?}, row {row}, custom {custom}");
                assert_eq!(new[range].iter().any(|x| x.is_nan()), sees, "{isa:?}, row {row}, custom {custom}");
            }
        }
    }
}

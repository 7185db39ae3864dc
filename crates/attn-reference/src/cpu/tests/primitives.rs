//! Each primitive against plain `f64` arithmetic, and the bits of every register block against those of one row.

use crate::cpu::ahead::Ahead;
use crate::cpu::dots::{DotScores, STAGE_LEN};
use crate::cpu::isa::Isa;
use crate::cpu::merge::{MergeStates, Moments, finish};
use crate::cpu::pack::{KV_TILE, PagedRows, Run};
use crate::cpu::pv::{Accumulate, Rescale, Strides, Values};
use crate::cpu::qk::{ScoreRow, Scores};
use crate::cpu::scratch::RowStates;
use crate::cpu::softmax::{OnlineSoftmax, Softcap};
use crate::cpu::unit::blocks;

use super::problem::Rng;
use kvpool::{HostKv, KvFormat, KvLayout, KvSpec, PageSize};

fn floats(n: usize) -> Vec<f32> {
    let mut rng = Rng(0x2545_F491_4F6C_DD1D);
    (0..n).map(|_| rng.float()).collect()
}

fn close(got: f32, want: f64, what: &str) {
    assert!((f64::from(got) - want).abs() <= 1e-5 * (1.0 + want.abs()), "{what}: {got} for {want}");
}

/// Query blocks of rows, as the packing lays them out.
fn query_blocks(isa: Isa, q: &[f32], dim: usize, padded: usize) -> Vec<f32> {
    let mut packed = Vec::new();
    for block in blocks(isa, q.len() / dim) {
        for d in 0..padded {
            packed.extend(block.clone().map(|row| if d < dim { q[row * dim + d] } else { f32::NAN }));
        }
    }
    packed
}

#[test]
fn scores_are_dot_products_whatever_the_block() {
    let dim = 21;
    for isa in Isa::available() {
        let (panel, padded) = (isa.panel(), 32);
        let k = floats(2 * panel * dim);
        let mut keys = vec![f32::NAN; 2 * panel * padded];
        for key in 0..2 * panel {
            (0..dim).for_each(|d| keys[(key / panel * padded + d) * panel + key % panel] = k[key * dim + d]);
        }
        let run = |q: &[f32]| {
            let mut scores: Vec<ScoreRow> = vec![[7.0; KV_TILE]; q.len() / dim];
            let queries = query_blocks(isa, q, dim, padded);
            let (keys, scores_out) = (keys.as_slice(), scores.as_mut_slice());
            isa.run(Scores { isa, queries: &queries, keys, dim, dim_padded: padded, panels: 1..3, scores: scores_out });
            scores
        };
        for rows in [1, 2, 3, 5, 12, 23] {
            let q = floats(rows * dim);
            let scores = run(&q);
            for (row, q) in q.chunks_exact(dim).enumerate() {
                for (key, k) in k.chunks_exact(dim).enumerate() {
                    let want: f64 = q.iter().zip(k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                    close(scores[row][panel + key], want, "score");
                }
                assert_eq!(scores[row][..panel], vec![7.0; panel], "{isa:?}: other columns stay");
                assert_eq!(scores[row], run(q)[0], "{isa:?}: row {row} of {rows} differs from itself alone");
            }
        }
    }
}

/// Dot products of rows with some keys of a tile of rows.
fn dot_scores(isa: Isa, q: &[f32], k: &[f32], dim: usize, keys: std::ops::Range<usize>) -> Vec<ScoreRow> {
    let (lanes, panel) = (isa.panel() / 2, isa.panel());
    let (dim_padded, stride) = (dim.next_multiple_of(lanes), (dim.div_ceil(panel) | 1) * panel);
    let padded = |vectors: &[f32], stride: usize| -> Vec<f32> {
        let pad = |v: &[f32]| v.iter().copied().chain(std::iter::repeat_n(0.0, stride - dim)).collect::<Vec<_>>();
        vectors.chunks_exact(dim).flat_map(pad).collect()
    };
    let (queries, tile) = (padded(q, dim_padded), padded(k, stride));
    let mut scores = vec![[7.0; KV_TILE]; q.len() / dim];
    let (mut stage, cache) = (vec![f32::NAN; STAGE_LEN], latent_cache());
    let rows = PagedRows { plane: cache.k(), pages: &[0], page_size: 4, head: 0 };
    let ahead = Ahead::new(Run { rows, start: 0, len: 4 }, 100);
    let (scores_out, stage) = (scores.as_mut_slice(), stage.as_mut_slice());
    isa.run(DotScores {
        queries: &queries,
        dim_padded,
        tile: &tile,
        stride,
        keys,
        ahead: &ahead,
        stage,
        scores: scores_out,
    });
    scores
}

fn latent_cache() -> HostKv {
    let spec = KvSpec { num_kv_heads: 1, head_dim_k: 24, values: kvpool::Values::InKeys(16) };
    HostKv::for_spec(spec, 1, PageSize::new(4).unwrap(), KvLayout::Nhd, KvFormat::F32).unwrap()
}

#[test]
fn scores_of_rows_are_dot_products_whatever_the_block() {
    let dim = 43;
    let k = floats(14 * dim);
    for isa in Isa::available() {
        for num_rows in [1, 2, 3, 4, 7, 9] {
            let q = floats(num_rows * dim);
            for keys in [0..12, 1..9, 2..13, 0..7, 5..10, 3..7, 4..7, 2..4, 13..14] {
                let scores = dot_scores(isa, &q, &k, dim, keys.clone());
                for (row, q) in q.chunks_exact(dim).enumerate() {
                    for (key, k) in k.chunks_exact(dim).enumerate().take(keys.end).skip(keys.start) {
                        let want: f64 = q.iter().zip(k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                        close(scores[row][key], want, "score");
                        let alone = dot_scores(isa, q, k, dim, 0..1)[0][0];
                        assert_eq!(scores[row][key].to_bits(), alone.to_bits(), "{isa:?}: row {row}, key {key}");
                    }
                    assert!(scores[row][keys.end..].iter().all(|x| *x == 7.0), "{isa:?}: other columns stay");
                }
            }
        }
    }
}

#[test]
fn outputs_sum_just_the_given_columns_whatever_the_block() {
    for isa in Isa::available() {
        let (width, room, first) = (2 * isa.panel(), 40, 30);
        let mut values = floats(room * width);
        // Keys 0 and 25.. of the tile are poison: their columns are not given.
        for panel in 0..2 {
            let keys = &mut values[panel * room * isa.panel()..][..room * isa.panel()];
            keys[..isa.panel()].fill(f32::NAN);
            keys[25 * isa.panel()..].fill(f32::NAN);
        }
        let at =
            |key: usize, d: usize| f64::from(values[(d / isa.panel() * room + key) * isa.panel() + d % isa.panel()]);
        let run = |probs: &[ScoreRow], out: &mut [f32], columns| {
            isa.run(Accumulate {
                isa,
                probs,
                values: Values { tile: &values, strides: Strides::of_panels(room), first },
                columns,
                out,
                ahead: None,
            });
        };
        let weights = floats(23 * KV_TILE);
        let probs: Vec<ScoreRow> = weights.as_chunks().0.to_vec();
        let mut out = vec![0.5; probs.len() * width];
        run(&probs, &mut out, first + 1..first + 25);
        for (row, p) in probs.iter().enumerate() {
            for d in 0..width {
                let want = 0.5 + (1..25).map(|key| f64::from(p[first + key]) * at(key, d)).sum::<f64>();
                close(out[row * width + d], want, "output");
            }
            // One row, in two calls: the same chain.
            let mut alone = vec![0.5; width];
            run(&probs[row..=row], &mut alone, first + 1..first + 8);
            run(&probs[row..=row], &mut alone, first + 8..first + 25);
            assert_eq!(alone, out[row * width..(row + 1) * width], "{isa:?}: row {row}");
        }
    }
}

#[test]
fn softmax_in_steps_is_softmax() {
    for isa in Isa::available() {
        let x = floats(2 * KV_TILE);
        let (mut max, mut sum) = ([f32::NEG_INFINITY; 2], [0.0; 2]);
        for tile in x.as_chunks::<KV_TILE>().0 {
            let mut scores = [tile.map(|x| 20.0 * x), [f32::NEG_INFINITY; KV_TILE]];
            let (old, mut factors) = (max, [0.0; 2]);
            let scores_in = scores;
            let (scores_mut, columns) = (scores.as_mut_slice(), 0..KV_TILE);
            isa.run(OnlineSoftmax { scores: scores_mut, columns, max: &mut max, sum: &mut sum, factors: &mut factors });
            close(factors[0], f64::from(old[0] - max[0]).exp(), "factor");
            for (p, s) in scores[0].iter().zip(scores_in[0]) {
                close(*p, f64::from(s - max[0]).exp(), "weight");
            }
            assert_eq!((scores[1], factors[1]), ([0.0; KV_TILE], 1.0), "{isa:?}: a row that sees nothing");
        }
        let top = x.iter().fold(f32::MIN, |a, &b| a.max(b)) * 20.0;
        close(max[0], f64::from(top), "maximum");
        close(sum[0], x.iter().map(|x| f64::from(20.0 * x - top).exp()).sum(), "sum");
        assert_eq!((max[1], sum[1]), (f32::NEG_INFINITY, 0.0), "{isa:?}: a row that sees nothing");
    }
}

#[test]
fn softcap_is_a_scaled_tanh_on_its_columns() {
    for isa in Isa::available() {
        let mut scores = vec![[0.0; KV_TILE]; 1];
        scores[0].copy_from_slice(&floats(KV_TILE));
        let before = scores[0];
        isa.run(Softcap { scores: &mut scores, columns: 0..64, cap: 0.75 });
        for column in 0..KV_TILE {
            let s = f64::from(before[column]);
            close(scores[0][column], if column < 64 { 0.75 * (s / 0.75).tanh() } else { s }, "capped score");
        }
    }
}

fn states(rows: &[(f32, f32, [f32; 32])]) -> RowStates {
    let mut states = RowStates::default();
    states.grow(rows.len(), 32);
    for (i, (max, sum, out)) in rows.iter().enumerate() {
        (states.max[i], states.sum[i]) = (*max, *sum);
        states.out.all_mut()[i * 32..(i + 1) * 32].copy_from_slice(out);
    }
    states
}

#[test]
fn merging_adds_and_an_empty_side_changes_no_bit() {
    let empty = (f32::NEG_INFINITY, 0.0, [0.0; 32]);
    let (a, b) = ((3.0, 2.0, [0.1; 32]), (4.5, 1.5, [-0.3; 32]));
    for isa in Isa::available() {
        let (mut into, later) = (states(&[a, a, empty, empty]), states(&[empty, b, empty, b, empty]));
        isa.run(MergeStates::new(&mut into, &later, 1, 4, 32));
        let weight = f64::from(3.0f32 - 4.5).exp();
        close(into.sum[0], 2.0 * weight + 1.5, "sum");
        close(into.out.get(32)[31], f64::from(0.1f32) * weight - 0.3, "output");
        let row = |i: usize, s: &RowStates| (s.max[i], s.sum[i], s.out.get((i + 1) * 32)[i * 32..].to_vec());
        assert_eq!(row(1, &into), row(0, &states(&[a])), "{isa:?}: b is empty");
        assert_eq!(row(2, &into), row(0, &states(&[b])), "{isa:?}: a is empty");
        assert_eq!(row(3, &into), row(0, &states(&[empty])), "{isa:?}: both are empty");
    }
}

#[test]
fn a_finished_row_counts_its_sink_once() {
    let seen = Moments { max: 2.0, sum: 3.0 };
    let nothing = Moments { max: f32::NEG_INFINITY, sum: 0.0 };
    let (factor, lse) = finish(seen, None, 0.5);
    close(factor, 0.5 / 3.0, "factor");
    close(lse, 2.0 + 3f64.ln(), "lse");
    for sink in [-1.0f32, 2.0, 9.0] {
        let total = 3.0 * 2f64.exp() + f64::from(sink).exp();
        let (factor, lse) = finish(seen, Some(sink), 1.0);
        close(factor, 2f64.exp() / total, "factor with a sink");
        close(lse, total.ln(), "lse with a sink");
    }
    assert_eq!(finish(seen, Some(f32::NEG_INFINITY), 0.5), finish(seen, None, 0.5));
    assert_eq!(finish(nothing, None, 2.0), (0.0, f32::NEG_INFINITY));
    assert_eq!(finish(nothing, Some(1.5), 2.0), (0.0, 1.5));
}

#[test]
fn rescaling_by_one_touches_nothing() {
    for isa in Isa::available() {
        let mut out = floats(3 * 32);
        let before = out.clone();
        isa.run(Rescale { factors: &[1.0, 0.5, 0.0], out: &mut out });
        assert_eq!(out[..32], before[..32], "{isa:?}");
        assert!(out[32..64].iter().zip(&before[32..64]).all(|(a, b)| *a == 0.5 * b), "{isa:?}");
        assert!(out[64..].iter().all(|x| *x == 0.0), "{isa:?}");
    }
}

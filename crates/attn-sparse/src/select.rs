//! Owns the choice of blocks: forced blocks inside the budget, the best of the rest, ties, the union of a group.
//!
//! Pure functions of one row's scores. The result is always ascending, whatever the scores.

use crate::params::BlockParams;
use crate::selection::TAIL;

/// What the score of an initial block is overwritten with.
const INIT_SCORE: f32 = 1e30;
/// What the score of a local block is overwritten with: where both apply, local wins.
const LOCAL_SCORE: f32 = 1e29;

/// Chooses the blocks of rows, one index head at a time. Keeps its working memory.
#[derive(Clone, Debug)]
pub struct BlockSelector {
    params: BlockParams,
    /// The best so far: score and id, best first; of equal scores the lower id first.
    best: Vec<(f32, i32)>,
    ids: Vec<i32>,
}

impl BlockSelector {
    /// A selector with these settings.
    #[must_use]
    pub const fn new(params: BlockParams) -> Self {
        Self { params, best: Vec::new(), ids: Vec::new() }
    }

    /// Its settings.
    #[must_use]
    pub const fn params(&self) -> BlockParams {
        self.params
    }

    /// The ids that a row of these block scores takes, ascending, at most `topk`.
    ///
    /// Forced blocks use up the budget. A NaN is below every number; of equal scores the lower id wins.
    pub fn select(&mut self, scores: &[f32]) -> &[i32] {
        self.select_from(scores.len(), |block| scores[block])
    }

    /// All blocks of a row that has no more than `topk` of them, without scores; `None` where scores are needed.
    pub fn select_all(&mut self, num_blocks: usize) -> Option<&[i32]> {
        (num_blocks <= self.params.topk as usize).then(|| {
            self.ids.clear();
            self.ids.extend((0i32..).take(num_blocks));
            self.ids.as_slice()
        })
    }

    fn select_from(&mut self, num_blocks: usize, score: impl Fn(usize) -> f32) -> &[i32] {
        let budget = (self.params.topk as usize).min(num_blocks);
        let init = self.params.init_blocks as usize;
        let local = num_blocks.saturating_sub(self.params.local_blocks as usize);
        self.best.clear();
        for (block, id) in (0..num_blocks).zip(0i32..) {
            let score = match block {
                _ if block >= local => LOCAL_SCORE,
                _ if block < init => INIT_SCORE,
                _ => Some(score(block)).filter(|score| !score.is_nan()).unwrap_or(f32::NEG_INFINITY),
            };
            let is_full = self.best.len() == budget;
            // Ids ascend: one that equals the last comes after it.
            if is_full && self.best.last().is_none_or(|(last, _)| score <= *last) {
                continue;
            }
            if is_full {
                self.best.pop();
            }
            let place = self.best.partition_point(|(better, _)| *better >= score);
            self.best.insert(place, (score, id));
        }
        self.ids.clear();
        self.ids.extend(self.best.iter().map(|(_, id)| *id));
        self.ids.sort_unstable();
        &self.ids
    }
}

/// Adds `more` to the ascending ids `union`, each id once. Tails are left out.
pub fn unite(union: &mut Vec<i32>, more: &[i32]) {
    for &id in more.iter().filter(|id| **id != TAIL) {
        if let Err(place) = union.binary_search(&id) {
            union.insert(place, id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn select(scores: &[f32], topk: u32, init_blocks: u32, local_blocks: u32) -> Vec<i32> {
        BlockSelector::new(BlockParams { block_size: 4, topk, init_blocks, local_blocks }).select(scores).to_vec()
    }

    #[test]
    fn forced_blocks_use_up_the_budget() {
        assert_eq!(select(&[1.0, 5.0, 4.0, 3.0, 0.0], 3, 1, 1), [0, 1, 4]);
        assert_eq!(select(&[1.0, 5.0, 4.0, 3.0, 0.0], 2, 1, 1), [0, 4]);
    }

    #[test]
    fn the_lower_id_wins_a_tie() {
        assert_eq!(select(&[2.0; 9], 4, 0, 0), [0, 1, 2, 3]);
        assert_eq!(select(&[f32::NAN, f32::NEG_INFINITY, f32::NAN], 2, 0, 0), [0, 1]);
    }

    #[test]
    fn rows_of_few_blocks_take_all_and_need_no_scores() {
        let mut selector = BlockSelector::new(BlockParams { block_size: 4, topk: 3, init_blocks: 0, local_blocks: 1 });
        for n in 0..4 {
            let scores = vec![0.5; n];
            let by_score = selector.select(&scores).to_vec();
            assert_eq!(selector.select_all(n), Some(by_score.as_slice()));
        }
        assert_eq!(selector.select_all(4), None);
    }
}

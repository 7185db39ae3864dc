//! Owns the way of results into the caller's tensors from many workers at once, without unsafe code: the rows are cut
//! into shards, each behind a lock that is held for one token's heads at a time.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use attn_metadata::Lse;
use kvpool::{HostSliceMut, HostTensorMut};

use super::isa::Isa;
use super::queries::PrefetchVectors;

/// Shards of a tensor at most; they need no allocation.
const MAX_SHARDS: usize = 256;

struct Shard<'a> {
    out: HostTensorMut<'a>,
    lse: Option<&'a mut [Lse]>,
}

/// The output of a layer, writable from all workers.
#[allow(missing_debug_implementations, reason = "a view of locks")]
pub struct Output<'a> {
    shards: [Option<Mutex<Shard<'a>>>; MAX_SHARDS],
    rows_per_shard: usize,
}

impl<'a> Output<'a> {
    /// Where results go; `lse` is `[rows, heads]`.
    pub fn new(out: &'a mut HostTensorMut<'_>, lse: Option<&'a mut [Lse]>) -> Output<'a> {
        let [rows, heads, dim] = out.shape();
        let (row_stride, head_stride) = (out.row_stride(), out.head_stride());
        // Rows can be cut apart where each one ends before the next begins.
        let is_row_major = heads == 0 || dim == 0 || row_stride >= (heads - 1) * head_stride + dim;
        let num_shards = if is_row_major { MAX_SHARDS.min(rows.max(1)) } else { 1 };
        let rows_per_shard = rows.div_ceil(num_shards).max(1);
        let (mut data, mut lse, mut left) = (Some(out.data_mut()), lse, rows);
        let shards = std::array::from_fn(|_| {
            let rows = rows_per_shard.min(left);
            if rows == 0 {
                return None;
            }
            left -= rows;
            let rest = data.take()?;
            let cut = if left == 0 { rest.len() } else { rows * row_stride };
            let (mine, rest) = split(rest, cut);
            data = Some(rest);
            let out = HostTensorMut::strided(mine, [rows, heads, dim], row_stride, head_stride)
                .expect("rows of a valid view are a valid view");
            let lse = lse.take().map(|all| {
                let (mine, rest) = all.split_at_mut(rows * heads);
                lse = Some(rest);
                mine
            });
            Some(Mutex::new(Shard { out, lse }))
        });
        Output { shards, rows_per_shard }
    }

    /// Writes consecutive heads of a row: a vector and an LSE for each.
    ///
    /// # Panics
    /// Where there is no such row or head.
    pub fn write<'v>(&self, row: usize, first_head: usize, vectors: impl Iterator<Item = &'v [f32]>, lses: &[f32]) {
        let shard = self.shards[row / self.rows_per_shard].as_ref().expect("rows of a batch are in range");
        // A worker that panicked leaves whole rows unwritten, never a broken shard.
        let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
        let (row, heads) = (row % self.rows_per_shard, shard.out.heads());
        for (i, vector) in vectors.enumerate() {
            shard.out.write(row, first_head + i, vector);
        }
        if let Some(all) = shard.lse.as_mut() {
            for (to, &lse) in all[row * heads + first_head..].iter_mut().zip(lses) {
                *to = Lse::from_ln(lse);
            }
        }
    }

    /// Asks for the memory of consecutive heads of a row, soon to be written.
    pub(crate) fn prefetch(&self, isa: Isa, row: usize, heads: Range<usize>) {
        let shard = self.shards[row / self.rows_per_shard].as_ref().expect("rows of a batch are in range");
        let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
        isa.run(PrefetchVectors { tensor: shard.out.as_ref(), token: row % self.rows_per_shard, heads });
    }

    /// Writes zeros and an empty LSE to a row.
    ///
    /// # Panics
    /// Where there is no such row.
    pub fn clear_row(&self, row: usize) {
        let shard = self.shards[row / self.rows_per_shard].as_ref().expect("rows of a batch are in range");
        let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
        let (row, heads) = (row % self.rows_per_shard, shard.out.heads());
        shard.out.fill_row(row, 0.0);
        if let Some(lse) = shard.lse.as_mut() {
            lse[row * heads..(row + 1) * heads].fill(Lse::EMPTY);
        }
    }
}

fn split(data: HostSliceMut<'_>, at: usize) -> (HostSliceMut<'_>, HostSliceMut<'_>) {
    match data {
        HostSliceMut::F32(data) => {
            let (a, b) = data.split_at_mut(at);
            (HostSliceMut::F32(a), HostSliceMut::F32(b))
        }
        HostSliceMut::F16(data) => {
            let (a, b) = data.split_at_mut(at);
            (HostSliceMut::F16(a), HostSliceMut::F16(b))
        }
        HostSliceMut::Bf16(data) => {
            let (a, b) = data.split_at_mut(at);
            (HostSliceMut::Bf16(a), HostSliceMut::Bf16(b))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_reach_their_place_in_row_major_and_head_major_tensors() {
        for (row_stride, head_stride) in [(10, 4), (3, 130)] {
            let mut data = vec![f32::NAN; 400];
            let mut lse = vec![Lse::from_ln(7.0); 80];
            let mut view = HostTensorMut::strided(&mut data, [40, 2, 3], row_stride, head_stride).expect("fits");
            let output = Output::new(&mut view, Some(&mut lse));
            for row in 0..39 {
                for head in 0..2 {
                    #[allow(clippy::cast_precision_loss)]
                    let x = (row * 2 + head) as f32;
                    output.write(row, head, [[x, x + 0.25, x + 0.5].as_slice()].into_iter(), &[-x]);
                }
            }
            output.clear_row(39);
            for row in 0..40 {
                for head in 0..2 {
                    let x = if row == 39 { 0.0 } else { (row * 2 + head) as f32 };
                    assert_eq!(view.as_ref().get(row, head, 0), x);
                    let expected = if row == 39 { Lse::EMPTY } else { Lse::from_ln(-x) };
                    assert_eq!(lse[row * 2 + head], expected);
                }
            }
            assert_eq!(data.iter().filter(|x| !x.is_nan()).count(), 240);
        }
    }

    #[test]
    fn a_tensor_without_rows_has_no_shard() {
        let mut data: Vec<f32> = Vec::new();
        let mut view = HostTensorMut::packed(&mut data, [0, 2, 3]).expect("fits");
        assert!(Output::new(&mut view, None).shards.iter().all(Option::is_none));
    }
}

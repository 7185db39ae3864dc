//! Ordering chunks by cost ([`Sharing::LongestFirst`](super::Sharing::LongestFirst)), in one pass over them.

use super::{Tile, Unit, WorkRange};

/// A range for each chunk of a tile, by falling cost: bucket by bucket, those of a bucket in order. After them those of
/// requests that see up to `short_kv_len` tokens, from the last one on, so that the tiles of a request follow one another
/// and the one that sees most comes first. `buckets` is scratch.
pub(super) fn order_chunks(
    tiles: &[Tile],
    short_kv_len: u32,
    num_kv_heads: u32,
    ranges: &mut Vec<WorkRange>,
    buckets: &mut Vec<u32>,
) {
    buckets.clear();
    buckets.resize(BUCKETS + 1, 0);
    let mut num_ranges = 0;
    for (tile, is_short) in with_length(tiles, short_kv_len) {
        num_ranges += tile.num_chunks as usize;
        if !is_short {
            for_each_bucket(tile, |_, bucket| buckets[bucket + 1] += 1);
        }
    }
    for next in 1..=BUCKETS {
        buckets[next] += buckets[next - 1];
    }
    let range = |tile, chunk| WorkRange { first: Unit { tile, kv_head: 0, chunk }, num_units: num_kv_heads.into() };
    ranges.resize(num_ranges, range(0, 0));
    let mut short = num_ranges;
    for (index, (tile, is_short)) in (0u32..).zip(with_length(tiles, short_kv_len)) {
        if is_short {
            for chunk in 0..tile.num_chunks {
                short -= 1;
                ranges[short] = range(index, chunk);
            }
        } else {
            for_each_bucket(tile, |chunk, bucket| {
                ranges[buckets[bucket] as usize] = range(index, chunk);
                buckets[bucket] += 1;
            });
        }
    }
}

/// Tiles, and whether the request of each sees up to `short_kv_len` tokens.
fn with_length(tiles: &[Tile], short_kv_len: u32) -> impl Iterator<Item = (&Tile, bool)> {
    tiles.chunk_by(|a, b| a.request == b.request).flat_map(move |of_request| {
        let sees = of_request[of_request.len() - 1].kv_end.saturating_sub(of_request[0].kv_begin);
        of_request.iter().map(move |tile| (tile, sees <= short_kv_len))
    })
}

/// The bucket of each chunk of a tile, the costliest first. All chunks but the first and the last cost the same.
fn for_each_bucket(tile: &Tile, mut give: impl FnMut(u32, usize)) {
    let bucket = |chunk| {
        let kv = tile.chunk(chunk);
        BUCKETS - 1 - size_class(u64::from(kv.end - kv.start) * u64::from(tile.q_len))
    };
    let last = tile.num_chunks - 1;
    give(0, bucket(0));
    if last > 1 {
        let of_middle = bucket(1);
        (1..last).for_each(|chunk| give(chunk, of_middle));
    }
    if last > 0 {
        give(last, bucket(last));
    }
}

/// Classes of [`size_class`].
const BUCKETS: usize = 64 * 8;

/// A class that grows with `x`: its highest set bit and the three bits after that, so classes are an eighth wide.
fn size_class(x: u64) -> usize {
    let exponent = x.max(1).ilog2();
    let fraction = if exponent >= 3 { x >> (exponent - 3) } else { x << (3 - exponent) } & 7;
    exponent as usize * 8 + usize::try_from(fraction).expect("three bits")
}

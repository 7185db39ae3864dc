//! Ordering chunks by cost ([`Sharing::LongestFirst`](super::Sharing::LongestFirst)), in one pass over them.

use super::{Tile, Unit, WorkRange};

/// A range for each chunk of a tile, by falling cost: bucket by bucket, those of a bucket in order. `buckets` is scratch.
pub(super) fn order_chunks(tiles: &[Tile], num_kv_heads: u32, ranges: &mut Vec<WorkRange>, buckets: &mut Vec<u32>) {
    buckets.clear();
    buckets.resize(BUCKETS + 1, 0);
    let mut num_ranges = 0;
    for tile in tiles {
        num_ranges += tile.num_chunks as usize;
        for_each_bucket(tile, |_, bucket| buckets[bucket + 1] += 1);
    }
    for next in 1..=BUCKETS {
        buckets[next] += buckets[next - 1];
    }
    let nothing = WorkRange { first: Unit { tile: 0, kv_head: 0, chunk: 0 }, num_units: num_kv_heads.into() };
    ranges.resize(num_ranges, nothing);
    for (index, tile) in (0u32..).zip(tiles) {
        for_each_bucket(tile, |chunk, bucket| {
            ranges[buckets[bucket] as usize].first = Unit { tile: index, kv_head: 0, chunk };
            buckets[bucket] += 1;
        });
    }
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

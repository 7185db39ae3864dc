//! Which bytes of a step's sections its batch uses: they are sent, and nothing else is.
//!
//! Sections of a captured step have room for every batch of its bucket, at addresses that stay. A kernel reads what the
//! heads of a step count, and besides that the range of each of its blocks and their first units, which count as used here.

use std::ops::Range;

use crate::params::{AttnMergeUnit, AttnRange, AttnStart, AttnStep, AttnTile};
use crate::tables::{Contents, GroupOffsets, GroupPlan, Offsets, PartSizes};

/// The bytes that [`write`](crate::tables::write) writes or a kernel reads, ascending.
pub(crate) fn used<'a>(
    offsets: &'a Offsets,
    plans: &'a [GroupPlan],
    contents: Contents<'a>,
) -> impl Iterator<Item = Range<usize>> + 'a {
    let groups = offsets.groups.iter().zip(plans).flat_map(|(at, plan)| of_group(at, plan));
    let num_slots = if contents.has_slots { contents.num_rows as usize } else { 0 };
    let mask_bytes = contents.batch.custom_mask().map_or(0, |mask| mask.bytes().len());
    groups.chain([span::<i32>(offsets.slots, num_slots), span::<u8>(offsets.mask, mask_bytes)])
}

fn of_group(at: &GroupOffsets, plan: &GroupPlan) -> [Range<usize>; 9] {
    let sizes = plan.sizes();
    let (decode, extend) = (sizes.decode.unwrap_or_default(), sizes.extend);
    // A part that a bucket does not record has no room for the ranges of its blocks.
    let ranges = |begin, part: &PartSizes, next: usize| {
        let span = span::<AttnRange>(begin, part.num_ranges);
        span.start..span.end.min(next)
    };
    [
        span::<AttnTile>(at.decode.tiles, decode.num_tiles),
        span::<AttnTile>(at.extend.tiles, extend.num_tiles),
        span::<AttnStep>(at.decode.step, usize::from(sizes.decode.is_some())),
        ranges(at.decode.ranges, &decode, at.decode.starts),
        span::<AttnStart>(at.decode.starts, decode.num_starts),
        span::<AttnStep>(at.extend.step, 1),
        ranges(at.extend.ranges, &extend, at.extend.starts),
        span::<AttnStep>(at.merge_step, 1),
        span::<AttnMergeUnit>(at.merge_units, sizes.num_merge_units),
    ]
}

const fn span<T>(begin: usize, count: usize) -> Range<usize> {
    begin..begin + count * size_of::<T>()
}

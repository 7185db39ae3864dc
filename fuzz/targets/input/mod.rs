//! Numbers out of bytes: often in range, so that deep checks are reached, and often at the edges.

use arbitrary::{Arbitrary, Unstructured};
use attn_metadata::plan::{Chunking, CutBy, PlanConfig, Sharing};
use attn_metadata::{HeadShape, PlanGroup, PoolShape, RawBatch};
use kvpool::{PageSize, Slot};

#[derive(Debug, Clone, Copy)]
struct Entry(i32);

impl<'a> Arbitrary<'a> for Entry {
    fn arbitrary(u: &mut Unstructured<'a>) -> arbitrary::Result<Self> {
        let byte = u8::arbitrary(u)?;
        Ok(Self(match byte {
            0..=239 => i32::from(byte / 3),
            240..=247 => 239 - i32::from(byte),
            248 => i32::MAX,
            249 => i32::MIN,
            250 => i32::MAX - 1,
            _ => i32::arbitrary(u)?,
        }))
    }
}

fn numbers(entries: &[Entry]) -> Vec<i32> {
    entries.iter().map(|entry| entry.0).collect()
}

/// Offsets as they are, or as lengths.
#[derive(Arbitrary, Debug)]
enum Offsets {
    Lengths(Vec<Entry>),
    Raw(Vec<Entry>),
}

impl Offsets {
    fn get(&self) -> Vec<i32> {
        match self {
            Self::Raw(entries) => numbers(entries),
            Self::Lengths(lengths) => {
                let sum = |sum: &mut i32, entry: &Entry| {
                    *sum = sum.wrapping_add(entry.0);
                    Some(*sum)
                };
                std::iter::once(0).chain(lengths.iter().scan(0, sum)).collect()
            }
        }
    }
}

#[derive(Arbitrary, Debug)]
pub(crate) struct Input {
    num_pages: Entry,
    page_size: Entry,
    num_rows: Entry,
    qo: Offsets,
    kv: Offsets,
    kv_indices: Vec<Entry>,
    kv_last_page_len: Vec<Entry>,
    slots: Option<Vec<Entry>>,
    mask: Option<Vec<u8>>,
    /// Which tables are cut or filled to the length that the others ask for, and brought into range.
    fitted: Fitted,
    plan: PlanInput,
}

#[derive(Arbitrary, Debug)]
struct Fitted {
    requests: bool,
    lengths: bool,
    pages: bool,
    last: bool,
    slots: bool,
    mask: bool,
}

#[derive(Arbitrary, Debug)]
struct PlanInput {
    tile_len: u8,
    chunk_len: Entry,
    max_q_len: u8,
    num_workers: u8,
    unit_overhead: u16,
    heads: [u8; 2],
    causal: bool,
    window_left: Option<Entry>,
}

/// The tables of a batch.
#[derive(Debug)]
pub(crate) struct Tables {
    num_rows: usize,
    qo_indptr: Vec<i32>,
    kv_indptr: Vec<i32>,
    kv_indices: Vec<i32>,
    last: Vec<i32>,
    slots: Option<Vec<Slot>>,
    mask: Option<Vec<u8>>,
}

impl Tables {
    pub(crate) fn raw(&self) -> RawBatch<'_> {
        RawBatch {
            num_rows: self.num_rows,
            qo_indptr: &self.qo_indptr,
            kv_indptr: &self.kv_indptr,
            kv_indices: &self.kv_indices,
            kv_last_page_len: &self.last,
            slot_mapping: self.slots.as_deref(),
            custom_mask: self.mask.as_deref(),
        }
    }
}

impl Input {
    pub(crate) fn pool(&self) -> Option<PoolShape> {
        let page_size = PageSize::new(self.page_size.0.cast_unsigned()).ok()?;
        Some(PoolShape { num_pages: self.num_pages.0.cast_unsigned(), page_size })
    }

    pub(crate) fn tables(&self, pool: PoolShape) -> Tables {
        const MAX_FITTED: usize = 256;
        let Fitted { requests, lengths, pages, last: fits_last, slots: fits_slots, mask: fits_mask } = self.fitted;
        let (qo_indptr, mut kv_indptr) = (self.qo.get(), self.kv.get());
        let mut kv_indices = numbers(&self.kv_indices);
        let mut last = numbers(&self.kv_last_page_len);
        let mut slots: Option<Vec<i32>> = self.slots.as_deref().map(numbers);
        let mut mask = self.mask.clone();
        let end = |table: &[i32]| table.last().map_or(0, |&end| usize::try_from(end).unwrap_or(0).min(MAX_FITTED));
        if requests {
            kv_indptr.resize(qo_indptr.len(), kv_indptr.last().copied().unwrap_or(0));
            last.resize(qo_indptr.len().saturating_sub(1), 1);
        }
        let num_rows = if lengths { end(&qo_indptr) } else { 0 }.wrapping_add_signed(self.num_rows.0 as isize);
        if lengths {
            kv_indices.resize(end(&kv_indptr), 0);
            slots = slots.filter(|_| num_rows <= MAX_FITTED);
            slots.iter_mut().for_each(|slots| slots.resize(num_rows, -1));
        }
        let fit = |entry: &mut i32, limit: u32| *entry = entry.rem_euclid(limit.clamp(1, 1 << 30).cast_signed());
        if pages {
            kv_indices.iter_mut().for_each(|page| fit(page, pool.num_pages));
        }
        if fits_last {
            for (last, pages) in last.iter_mut().zip(kv_indptr.windows(2)) {
                fit(last, pool.page_size.get());
                *last = if pages[0] == pages[1] { 0 } else { *last + 1 };
            }
        }
        if fits_slots {
            slots.iter_mut().flatten().zip(0..).for_each(|(slot, at)| *slot = if *slot < 0 { -1 } else { at });
        }
        let num_bits = |(q, kv): (&[i32], &[i32]), last: i32| {
            let pages = i64::from(kv[1]) - i64::from(kv[0]);
            let kv_len = (pages - 1).max(0) * i64::from(pool.page_size.get()) + i64::from(last);
            (i64::from(q[1]) - i64::from(q[0])).saturating_mul(kv_len)
        };
        let pairs = qo_indptr.windows(2).zip(kv_indptr.windows(2)).zip(&last);
        let bits = pairs.fold(0, |bits: i64, (tables, last)| bits.saturating_add(num_bits(tables, *last)));
        if let (true, Some(mask), Ok(bytes)) = (fits_mask, &mut mask, usize::try_from(bits.saturating_add(7) / 8)) {
            mask.resize(bytes.min(1 << 12), 0);
        }
        let slots = slots.map(|slots| slots.into_iter().map(Slot::from_raw).collect());
        Tables { num_rows, qo_indptr, kv_indptr, kv_indices, last, slots, mask }
    }

    pub(crate) fn plan_config(&self) -> PlanConfig {
        let plan = &self.plan;
        PlanConfig {
            tile_len: u32::from(plan.tile_len).max(1),
            chunking: Chunking {
                by: if plan.causal { CutBy::Request } else { CutBy::Batch },
                chunk_len: plan.chunk_len.0.cast_unsigned().max(1),
                shortest: plan.chunk_len.0.cast_unsigned().max(2) / 2,
                max_q_len: u32::from(plan.max_q_len),
            },
            num_workers: u32::from(plan.num_workers % 16) + 1,
            sharing: match plan.num_workers / 16 % 3 {
                0 => Sharing::Even,
                1 => Sharing::InOrder,
                _ => Sharing::LongestFirst {
                    rest_len: 1 + u32::from(plan.num_workers % 5),
                    short_kv_len: u32::from(plan.num_workers % 7) * 16,
                },
            },
            unit_overhead: u32::from(plan.unit_overhead),
        }
    }

    pub(crate) fn plan_group(&self) -> PlanGroup {
        let [kv_heads, group_size] = self.plan.heads.map(|number| u32::from(number % 4) + 1);
        let window_left = self.plan.window_left.map(|left| left.0.cast_unsigned());
        PlanGroup::plain(HeadShape::new(kv_heads * group_size, kv_heads, 8), self.plan.causal, window_left)
    }
}

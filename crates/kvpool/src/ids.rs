//! Owns the names of places in a pool: [`PageId`], [`Slot`], [`PageSize`].
//! Invariants: a page id and the index of a slot fit an `i32` (device tables are `i32`), and the
//! padding slot is never an index.
//! Does not know how large a pool is; whoever does compares ids against it.

use std::fmt;
use std::num::NonZeroU32;

use bytemuck::{Pod, Zeroable};

use crate::error::ShapeError;

/// The largest id, position or length that an `i32` table can hold.
const I32_MAX: u32 = i32::MAX.unsigned_abs();

/// The id of a page of a pool, `0..=i32::MAX`.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageId(u32);

impl PageId {
    /// Page `id`, or `None` beyond `i32::MAX`.
    #[must_use]
    pub const fn new(id: u32) -> Option<PageId> {
        if id <= I32_MAX { Some(PageId(id)) } else { None }
    }

    /// Page `id` of an `i32` table, or `None` where it is negative.
    #[must_use]
    pub const fn from_i32(id: i32) -> Option<PageId> {
        if id >= 0 { Some(PageId(id.unsigned_abs())) } else { None }
    }

    /// The id as an index.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// The id as a number, at most `i32::MAX`.
    #[must_use]
    pub const fn raw(self) -> u32 {
        self.0
    }

    /// The id as device tables hold it, never negative.
    #[must_use]
    pub const fn as_i32(self) -> i32 {
        self.0.cast_signed()
    }
}

impl fmt::Display for PageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Where one token's K and V go: `page * page_size + offset`, or [`Slot::PADDING`].
///
/// A slot may hold any `i32`, because slot mappings come from outside as raw arrays. Only the
/// padding value may be negative; every other negative slot is refused where slots are used.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Pod, Zeroable)]
pub struct Slot(i32);

impl Slot {
    /// The slot of a padding row: nothing is written. It is −1, and never an index.
    pub const PADDING: Slot = Slot(-1);

    /// A slot as a table holds it; nothing is checked.
    #[must_use]
    pub const fn from_raw(raw: i32) -> Slot {
        Slot(raw)
    }

    /// The slot of token `offset` of `page`; `None` where `offset >= page_size` or the slot is beyond `i32::MAX`.
    #[must_use]
    pub fn new(page: PageId, offset: u32, page_size: PageSize) -> Option<Slot> {
        if offset >= page_size.get() {
            return None;
        }
        let slot = u64::from(page.raw()) * u64::from(page_size.get()) + u64::from(offset);
        i32::try_from(slot).ok().map(Slot)
    }

    /// The slot as a table holds it.
    #[must_use]
    pub const fn raw(self) -> i32 {
        self.0
    }

    /// Whether this is the slot of a padding row.
    #[must_use]
    pub const fn is_padding(self) -> bool {
        self.0 == Slot::PADDING.0
    }

    /// The slot as an index into the pool's slots; `None` where it is negative, padding included.
    #[must_use]
    pub const fn index(self) -> Option<usize> {
        if self.0 >= 0 { Some(self.0.unsigned_abs() as usize) } else { None }
    }

    /// The page of the slot; `None` where the slot is negative.
    #[must_use]
    pub fn page(self, page_size: PageSize) -> Option<PageId> {
        u32::try_from(self.0).ok().map(|slot| PageId(slot / page_size.get()))
    }

    /// The token's offset in its page, `0..page_size`; `None` where the slot is negative.
    #[must_use]
    pub fn offset(self, page_size: PageSize) -> Option<u32> {
        u32::try_from(self.0).ok().map(|slot| slot % page_size.get())
    }
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_padding() { f.write_str("padding") } else { write!(f, "{}", self.0) }
    }
}

/// Tokens per page, `1..=i32::MAX`.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageSize(NonZeroU32);

impl PageSize {
    /// Pages of `tokens` tokens.
    ///
    /// # Errors
    /// [`ShapeError::Zero`] for 0, [`ShapeError::TooLarge`] beyond `i32::MAX`.
    pub fn new(tokens: u32) -> Result<PageSize, ShapeError> {
        if tokens > I32_MAX {
            return Err(ShapeError::TooLarge { what: "page_size", value: tokens.into(), max: I32_MAX.into() });
        }
        NonZeroU32::new(tokens).map(PageSize).ok_or(ShapeError::Zero { what: "page_size" })
    }

    /// Tokens per page, at least 1.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0.get()
    }

    /// Pages that hold `tokens` tokens, the last one perhaps partly; 0 for 0 tokens.
    #[must_use]
    pub fn pages_for(self, tokens: usize) -> usize {
        tokens.div_ceil(self.0.get() as usize)
    }

    /// Tokens in the last of those pages, `1..=page_size`; 0 only for 0 tokens.
    #[must_use]
    pub fn last_page_len(self, tokens: usize) -> u32 {
        if tokens == 0 {
            return 0;
        }
        let rest = (tokens - 1) % (self.0.get() as usize);
        u32::try_from(rest).expect("a rest is smaller than its u32 divisor") + 1
    }
}

impl fmt::Display for PageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_end_at_i32_max() {
        assert_eq!(PageId::new(I32_MAX).map(PageId::as_i32), Some(i32::MAX));
        assert_eq!(PageId::new(I32_MAX + 1), None);
        assert_eq!(PageId::from_i32(-1), None);
        assert_eq!(PageId::from_i32(i32::MAX).map(PageId::raw), Some(I32_MAX));
    }

    #[test]
    fn a_slot_and_its_page_and_offset_are_a_bijection() {
        for page_size in [1, 2, 3, 16, 61, 256] {
            let page_size = PageSize::new(page_size).unwrap();
            let mut expected = 0;
            for page in 0..5 {
                for offset in 0..page_size.get() {
                    let slot = Slot::new(PageId(page), offset, page_size).unwrap();
                    assert_eq!(slot.raw(), expected);
                    assert_eq!((slot.page(page_size), slot.offset(page_size)), (Some(PageId(page)), Some(offset)));
                    expected += 1;
                }
                assert_eq!(Slot::new(PageId(page), page_size.get(), page_size), None);
            }
        }
    }

    #[test]
    fn slots_near_i32_max_do_not_wrap() {
        let page_size = PageSize::new(16).unwrap();
        let last = Slot::new(PageId(I32_MAX / 16), 15, page_size).unwrap();
        assert_eq!(last.raw(), i32::MAX);
        assert_eq!(Slot::new(PageId(I32_MAX / 16 + 1), 0, page_size), None);
        assert_eq!(Slot::new(PageId(I32_MAX), 15, page_size), None);
    }

    #[test]
    fn the_padding_slot_is_never_an_index() {
        let page_size = PageSize::new(16).unwrap();
        assert_eq!(Slot::PADDING.raw(), -1);
        assert!(Slot::PADDING.is_padding() && !Slot::from_raw(-2).is_padding());
        for raw in [-1, -2, i32::MIN] {
            let slot = Slot::from_raw(raw);
            assert_eq!((slot.index(), slot.page(page_size), slot.offset(page_size)), (None, None, None));
        }
    }

    #[test]
    fn page_counts_and_last_page_lengths_agree() {
        for size in [1u32, 2, 3, 16, 61, 256] {
            let page_size = PageSize::new(size).unwrap();
            assert_eq!((page_size.pages_for(0), page_size.last_page_len(0)), (0, 0));
            for tokens in 1..600usize {
                let (pages, last) = (page_size.pages_for(tokens), page_size.last_page_len(tokens));
                assert!((1..=size).contains(&last));
                assert_eq!((pages - 1) * size as usize + last as usize, tokens);
            }
        }
        assert_eq!(PageSize::new(0), Err(ShapeError::Zero { what: "page_size" }));
        assert!(matches!(PageSize::new(1 << 31), Err(ShapeError::TooLarge { .. })));
    }
}

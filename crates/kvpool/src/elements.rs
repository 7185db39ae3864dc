//! Owns [`Elements`], the memory of a cache: a plain vector where it is small, else pages of its own, which may be huge.
//!
//! Decoding reads rows of scattered pages. With pages of 4 KiB the processor looks up an address for each row or two;
//! with huge ones, where the system has them, a long cache takes a few entries. Such memory also begins at a cache line.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use bytemuck::Pod;
use memmap2::MmapMut;

/// From this many bytes on, memory gets pages of its own: two huge pages.
const MAPPED_BYTES: usize = 4 << 20;

/// Elements of one type, as a slice.
pub struct Elements<T>(Memory<T>);

enum Memory<T> {
    Vector(Vec<T>),
    /// As many bytes as the elements have, aligned to pages.
    Mapped(MmapMut, PhantomData<T>),
}

impl<T: Pod> Elements<T> {
    /// `len` zeros; `None` where there is no such memory. The system may give it when it is first touched.
    #[must_use]
    pub fn try_zeroed(len: usize) -> Option<Self> {
        let bytes = len.checked_mul(size_of::<T>())?;
        if bytes < MAPPED_BYTES {
            return bytemuck::allocation::try_zeroed_vec(len).ok().map(|data| Self(Memory::Vector(data)));
        }
        let map = MmapMut::map_anon(bytes).ok()?;
        // A wish: small pages do as well.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        Some(Self(Memory::Mapped(map, PhantomData)))
    }
}

impl<T: Pod> Deref for Elements<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.0 {
            Memory::Vector(data) => data,
            Memory::Mapped(map, _) => bytemuck::cast_slice(map),
        }
    }
}

impl<T: Pod> DerefMut for Elements<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match &mut self.0 {
            Memory::Vector(data) => data,
            Memory::Mapped(map, _) => bytemuck::cast_slice_mut(map),
        }
    }
}

impl<T: Pod> Clone for Elements<T> {
    fn clone(&self) -> Self {
        let copied = || Self(Memory::Vector(self.to_vec()));
        match &self.0 {
            Memory::Vector(_) => copied(),
            Memory::Mapped(..) => Self::try_zeroed(self.len()).map_or_else(copied, |mut copy| {
                copy.copy_from_slice(self);
                copy
            }),
        }
    }
}

impl<T: Pod + PartialEq> PartialEq for Elements<T> {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl<T: Pod + fmt::Debug> fmt::Debug for Elements<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_and_mapped_memory_are_zero_hold_what_is_written_and_copy() {
        for len in [0, 1, MAPPED_BYTES / 4 - 1, MAPPED_BYTES / 4, MAPPED_BYTES / 4 + 3] {
            let mut data = Elements::<f32>::try_zeroed(len).expect("a few megabytes");
            assert!(data.len() == len && data.iter().all(|x| *x == 0.0));
            if let Some(last) = data.last_mut() {
                *last = 2.5;
            }
            let copy = data.clone();
            assert!(copy == data);
            if let Some(last) = data.last_mut() {
                *last = 3.5;
                assert!(copy != data && copy.last() == Some(&2.5));
            }
        }
    }

    #[test]
    fn mapped_memory_begins_at_a_cache_line() {
        let data = Elements::<u8>::try_zeroed(MAPPED_BYTES).expect("a few megabytes");
        assert_eq!(data.as_ptr().align_offset(64), 0);
    }

    #[test]
    fn memory_that_nobody_has_is_refused() {
        assert!(Elements::<f32>::try_zeroed(usize::MAX).is_none());
        assert!(Elements::<f32>::try_zeroed(usize::MAX / 8).is_none());
    }
}

//! Owns [`IndexList`]: for each token the slots that it attends to, checked.
//! Invariant: each entry of a token's run is a slot of the pool, none twice.

use crate::IndexError;

/// The slots that each of some tokens attends to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IndexList {
    /// Valid slots, token by token, in the order of the list.
    slots: Vec<i32>,
    /// Where each token's slots begin, `[tokens + 1]`.
    starts: Vec<usize>,
    /// For each slot of the pool, the last token that named it; kept for reuse.
    seen: Vec<u32>,
    num_slots: u64,
}

impl IndexList {
    /// No tokens.
    #[must_use]
    pub const fn new() -> IndexList {
        IndexList { slots: Vec::new(), starts: Vec::new(), seen: Vec::new(), num_slots: 0 }
    }

    /// Takes in a list `[tokens, topk]` of slots, in place of what was there. Reuses memory.
    ///
    /// −1 is nobody, anywhere in a token's list. Of a token's list only the first `lengths[token]` entries count, where
    /// lengths are given; the rest may hold anything. A token may have no slot at all: it sees nothing.
    ///
    /// # Errors
    /// [`IndexError`] for the first entry that breaks a rule; the list is then empty.
    pub fn set(
        &mut self,
        indices: &[i32],
        topk: usize,
        lengths: Option<&[i32]>,
        num_slots: u64,
    ) -> Result<(), IndexError> {
        self.slots.clear();
        self.starts.clear();
        self.num_slots = 0;
        let checked = self.fill(indices, topk, lengths, num_slots);
        match checked {
            Ok(()) => self.num_slots = num_slots,
            Err(_) => {
                self.slots.clear();
                self.starts.clear();
            }
        }
        checked
    }

    fn fill(
        &mut self,
        indices: &[i32],
        topk: usize,
        lengths: Option<&[i32]>,
        num_slots: u64,
    ) -> Result<(), IndexError> {
        let num_tokens = match (lengths, indices.len().checked_div(topk)) {
            (Some(lengths), _) => lengths.len(),
            (None, tokens) => tokens.unwrap_or(0),
        };
        let expected = num_tokens.saturating_mul(topk);
        if indices.len() != expected {
            return Err(IndexError::Len { what: "the index list", got: indices.len(), expected });
        }
        self.seen.clear();
        self.seen.resize(usize::try_from(num_slots).unwrap_or(usize::MAX).min(i32::MAX as usize), 0);
        self.starts.push(0);
        for token in 0..num_tokens {
            let list = &indices[token * topk..][..topk];
            let len = match lengths {
                None => topk,
                Some(lengths) => {
                    let got = lengths[token];
                    let len = usize::try_from(got).ok().filter(|len| *len <= topk);
                    len.ok_or(IndexError::Length { token, got, topk })?
                }
            };
            self.take(token, &list[..len], num_slots)?;
            self.starts.push(self.slots.len());
        }
        Ok(())
    }

    fn take(&mut self, token: usize, list: &[i32], num_slots: u64) -> Result<(), IndexError> {
        let mark = u32::try_from(token).unwrap_or(u32::MAX).saturating_add(1);
        for (entry, &slot) in list.iter().enumerate().filter(|(_, slot)| **slot != -1) {
            let place = usize::try_from(slot).ok().and_then(|slot| self.seen.get_mut(slot));
            let Some(place) = place else {
                return Err(IndexError::OutOfRange { token, entry, got: slot, num_slots });
            };
            if *place == mark {
                return Err(IndexError::Duplicate { token, entry, slot });
            }
            *place = mark;
            self.slots.push(slot);
        }
        Ok(())
    }

    /// Slots that the entries are below; 0 for an empty list.
    #[must_use]
    pub const fn num_slots(&self) -> u64 {
        self.num_slots
    }

    /// Tokens.
    #[must_use]
    pub const fn num_tokens(&self) -> usize {
        self.starts.len().saturating_sub(1)
    }

    /// The slots of a token, in the order of its list, without the invalid ones.
    ///
    /// # Panics
    /// Where there is no such token.
    #[must_use]
    pub fn slots(&self, token: usize) -> &[i32] {
        &self.slots[self.starts[token]..self.starts[token + 1]]
    }
}

impl Default for IndexList {
    fn default() -> IndexList {
        IndexList::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(indices: &[i32], topk: usize, lengths: Option<&[i32]>) -> Result<IndexList, IndexError> {
        let mut list = IndexList::new();
        list.set(&[0, 1, 2, 3], 2, None, 8)?;
        list.set(indices, topk, lengths, 8).map(|()| list)
    }

    #[test]
    fn invalid_entries_may_be_anywhere_and_lists_may_be_short_or_empty() {
        let list = set(&[-1, 7, -1, 0, -1, -1, -1, -1, 3, 7, 0, 1], 4, None).unwrap();
        assert_eq!(list.num_tokens(), 3);
        assert_eq!([list.slots(0), list.slots(1), list.slots(2)], [&[7, 0][..], &[], &[3, 7, 0, 1]]);
        let list = set(&[5, 99, 99, -7, -1, 2], 3, Some(&[1, 0])).unwrap();
        assert_eq!([list.slots(0), list.slots(1)], [&[5][..], &[]]);
        assert_eq!(set(&[], 0, None).unwrap().num_tokens(), 0);
        assert_eq!(set(&[], 0, Some(&[0, 0])).unwrap().num_tokens(), 2);
    }

    #[test]
    fn every_broken_rule_has_its_error() {
        let error = set(&[0, 1, 2], 2, None).unwrap_err();
        assert_eq!(error, IndexError::Len { what: "the index list", got: 3, expected: 2 });
        let error = set(&[0, 1], 2, Some(&[1, 1])).unwrap_err();
        assert_eq!(error, IndexError::Len { what: "the index list", got: 2, expected: 4 });
        for got in [-1, 3] {
            assert_eq!(set(&[0, 1], 2, Some(&[got])), Err(IndexError::Length { token: 0, got, topk: 2 }));
        }
        for got in [8, -2, i32::MAX, i32::MIN] {
            let expected = IndexError::OutOfRange { token: 1, entry: 1, got, num_slots: 8 };
            assert_eq!(set(&[0, 1, 2, got], 2, None), Err(expected));
        }
        let error = set(&[4, 4, 5, -1, 4, 5], 2, None).unwrap_err();
        assert_eq!(error, IndexError::Duplicate { token: 0, entry: 1, slot: 4 });
        assert_eq!(error.to_string(), "entry 1 of token 0 is slot 4, which its list has before");
        assert!(set(&[4, 5, 5, 4], 2, None).is_ok(), "two tokens may see the same slots");
    }

    #[test]
    fn a_refused_list_is_empty() {
        let mut list = IndexList::new();
        list.set(&[1, 2], 2, None, 8).unwrap();
        list.set(&[1, 2, 3, 3], 2, None, 8).unwrap_err();
        assert_eq!(list.num_tokens(), 0);
    }
}

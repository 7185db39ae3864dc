//! Owns [`SeqId`], the name of a sequence in one table, and the values behind the names ([`Registry`]).
//! Invariant: a name is never used twice, so a stale name is an error and not another sequence.
//! Does not know what a sequence holds.

use std::fmt;

/// A sequence of one [`crate::PageTable`]. Stale once the sequence is released, and never reused.
///
/// It means nothing in another table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SeqId {
    index: u32,
    generation: u32,
}

impl fmt::Display for SeqId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.index, self.generation)
    }
}

#[derive(Debug)]
struct Entry<T> {
    generation: u32,
    value: Option<T>,
}

/// Values by [`SeqId`].
#[derive(Debug)]
pub(crate) struct Registry<T> {
    entries: Vec<Entry<T>>,
    unused: Vec<u32>,
}

impl<T> Registry<T> {
    pub(crate) const fn new() -> Registry<T> {
        Registry { entries: Vec::new(), unused: Vec::new() }
    }

    pub(crate) fn insert(&mut self, value: T) -> SeqId {
        if let Some(index) = self.unused.pop() {
            let entry = &mut self.entries[index as usize];
            entry.value = Some(value);
            return SeqId { index, generation: entry.generation };
        }
        let index = u32::try_from(self.entries.len()).expect("fewer than 2^32 sequences fit the memory");
        self.entries.push(Entry { generation: 0, value: Some(value) });
        SeqId { index, generation: 0 }
    }

    pub(crate) fn remove(&mut self, seq: SeqId) -> Option<T> {
        let entry = self.entries.get_mut(seq.index as usize).filter(|entry| entry.generation == seq.generation)?;
        let value = entry.value.take()?;
        // An entry whose generations are used up is not used again.
        if let Some(next) = entry.generation.checked_add(1) {
            entry.generation = next;
            self.unused.push(seq.index);
        }
        Some(value)
    }

    pub(crate) fn get(&self, seq: SeqId) -> Option<&T> {
        self.entries.get(seq.index as usize).filter(|entry| entry.generation == seq.generation)?.value.as_ref()
    }

    pub(crate) fn get_mut(&mut self, seq: SeqId) -> Option<&mut T> {
        self.entries.get_mut(seq.index as usize).filter(|entry| entry.generation == seq.generation)?.value.as_mut()
    }

    /// Live values by name, in the order of their index.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (SeqId, &T)> {
        (0..).zip(&self.entries).filter_map(|(index, entry)| {
            let seq = SeqId { index, generation: entry.generation };
            entry.value.as_ref().map(|value| (seq, value))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_released_name_is_stale_for_ever() {
        let mut registry = Registry::new();
        let first = registry.insert('a');
        assert_eq!(registry.remove(first), Some('a'));
        let second = registry.insert('b');
        assert_eq!(registry.get(first), None);
        assert_eq!(registry.remove(first), None);
        assert_eq!(registry.get_mut(first), None);
        assert_eq!((registry.get(second), first == second), (Some(&'b'), false));
    }

    #[test]
    fn an_entry_whose_generations_are_used_up_is_retired() {
        let mut registry = Registry::new();
        let first = registry.insert('a');
        registry.entries[0].generation = u32::MAX;
        let last = SeqId { generation: u32::MAX, ..first };
        assert_eq!(registry.remove(last), Some('a'));
        assert_eq!(registry.remove(last), None);
        assert_eq!(registry.get(last), None);
        assert_eq!(registry.insert('b').index, 1);
    }
}

//! A table that a batch and its copies read together, and that the batch refills without allocating.
//!
//! Page tables are the bulk of a batch, and each step's is read by the batch, by sub-batches and by the plans made of
//! them. They share it; when the batch is filled anew while somebody still reads the old table, it takes another one
//! that nobody reads any more. There are as many tables as there are readers at once, so a warm batch makes no new one.

use std::sync::Arc;

/// A shared table.
#[derive(Debug)]
pub(super) struct SharedTable<T> {
    current: Arc<Vec<T>>,
    /// Tables of earlier fillings.
    earlier: Vec<Arc<Vec<T>>>,
}

impl<T> Default for SharedTable<T> {
    fn default() -> Self {
        Self { current: Arc::default(), earlier: Vec::new() }
    }
}

/// A copy reads the same table; it has no earlier ones.
impl<T> Clone for SharedTable<T> {
    fn clone(&self) -> Self {
        Self { current: Arc::clone(&self.current), earlier: Vec::new() }
    }
}

impl<T: Copy> SharedTable<T> {
    pub(super) fn get(&self) -> &[T] {
        &self.current
    }

    /// Reads what `other` reads from now on.
    pub(super) fn share(&mut self, other: &Self) {
        self.current = Arc::clone(&other.current);
    }

    /// An empty table that nobody else reads, to be filled.
    pub(super) fn refill(&mut self) -> &mut Vec<T> {
        if Arc::get_mut(&mut self.current).is_none() {
            match self.earlier.iter_mut().find_map(|table| Arc::get_mut(table).is_some().then_some(table)) {
                Some(free) => std::mem::swap(free, &mut self.current),
                None => self.earlier.push(std::mem::take(&mut self.current)),
            }
        }
        let table = Arc::get_mut(&mut self.current).expect("nobody else reads it");
        table.clear();
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_keep_what_they_read_and_tables_come_back() {
        let mut table = SharedTable::default();
        table.refill().extend([1, 2, 3]);
        let mut reader = SharedTable::default();
        reader.share(&table);
        table.refill().extend([4]);
        assert_eq!((reader.get(), table.get()), (&[1, 2, 3][..], &[4][..]));
        reader.share(&table);
        table.refill().extend([5, 6]);
        assert_eq!((reader.get(), table.get()), (&[4][..], &[5, 6][..]));
        for i in 0..10 {
            reader.share(&table);
            table.refill().push(i);
        }
        assert_eq!(table.earlier.len(), 1, "one reader needs one table more");
    }
}

//! A table that a batch and its copies read together, and that the batch refills without allocating.
//!
//! Page tables are the bulk of a batch, and each step's is read by the batch, by sub-batches and by the plans made of
//! them. They share it; when the batch is filled anew while somebody still reads the old table, it takes another one
//! that nobody reads any more. There are as many tables as there are readers at once, so a warm batch makes no new one.
//!
//! So a table's memory stays where it is over many steps, and a backend may do something about it once, such as letting
//! its device read it: what it attaches lives as long as the memory ([`KvIndices`]).

use std::any::Any;
use std::sync::{Arc, OnceLock};

/// What goes with a table's memory.
type Companion = Box<dyn Any + Send + Sync>;

/// A table and what goes with its memory.
#[derive(Debug)]
struct Table<T> {
    /// Before the memory that it is about: so it is dropped first.
    companion: OnceLock<Companion>,
    values: Vec<T>,
    /// Fillings since the memory was allocated.
    num_fillings: u32,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { companion: OnceLock::new(), values: Vec::new(), num_fillings: 0 }
    }
}

/// A shared table.
#[derive(Debug)]
pub(super) struct SharedTable<T> {
    current: Arc<Table<T>>,
    /// Whether the current one is another's, who takes it back when nobody reads it any more.
    is_borrowed: bool,
    /// Tables of earlier fillings.
    earlier: Vec<Arc<Table<T>>>,
}

impl<T> Default for SharedTable<T> {
    fn default() -> Self {
        Self { current: Arc::default(), is_borrowed: false, earlier: Vec::new() }
    }
}

/// A copy reads the same table; it has no earlier ones.
impl<T> Clone for SharedTable<T> {
    fn clone(&self) -> Self {
        Self { current: Arc::clone(&self.current), is_borrowed: true, earlier: Vec::new() }
    }
}

impl<T: Copy> SharedTable<T> {
    pub(super) fn get(&self) -> &[T] {
        &self.current.values
    }

    /// Reads what `other` reads from now on.
    pub(super) fn share(&mut self, other: &Self) {
        let own = std::mem::replace(&mut self.current, Arc::clone(&other.current));
        if !std::mem::replace(&mut self.is_borrowed, true) {
            self.earlier.push(own);
        }
    }

    /// Fills a table that nobody else reads.
    pub(super) fn fill(&mut self, from: &[T]) {
        if self.is_borrowed || Arc::get_mut(&mut self.current).is_none() {
            let is_free = |table: &mut Arc<Table<T>>| Arc::get_mut(table).is_some();
            let free = self.earlier.iter_mut().position(is_free).map(|at| self.earlier.swap_remove(at));
            let before = std::mem::replace(&mut self.current, free.unwrap_or_default());
            if !std::mem::replace(&mut self.is_borrowed, false) {
                self.earlier.push(before);
            }
        }
        let table = Arc::get_mut(&mut self.current).expect("nobody else reads it");
        if from.len() > table.values.capacity() {
            // It gets other memory, with room: tables of decoding requests grow every step.
            let values = Vec::with_capacity(from.len().next_power_of_two());
            *table = Table { values, ..Table::default() };
        }
        table.values.clear();
        table.values.extend_from_slice(from);
        table.num_fillings = table.num_fillings.saturating_add(1);
    }
}

/// The page ids of a batch, shared with it: as long as this is held, they stay what they are where they are.
///
/// For backends whose device can read the host's memory: they see whether the memory is used again and again, and
/// attach what makes it readable. It is dropped right before the memory is freed.
#[derive(Clone, Debug)]
pub struct KvIndices(Arc<Table<i32>>);

impl KvIndices {
    pub(super) fn of(table: &SharedTable<i32>) -> Self {
        Self(Arc::clone(&table.current))
    }

    /// The page ids.
    #[must_use]
    pub fn get(&self) -> &[i32] {
        &self.0.values
    }

    /// Page ids that the memory has room for: while it stays where it is, no filling has more.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.0.values.capacity()
    }

    /// Whether the memory was filled before, so that it will probably be filled again.
    #[must_use]
    pub fn is_reused(&self) -> bool {
        self.0.num_fillings > 1
    }

    /// What was attached.
    #[must_use]
    pub fn companion(&self) -> Option<&(dyn Any + Send + Sync)> {
        self.0.companion.get().map(|companion| &**companion)
    }

    /// Attaches something to the memory.
    ///
    /// # Errors
    /// Gives it back where there is something already.
    pub fn attach(&self, companion: Box<dyn Any + Send + Sync>) -> Result<(), Box<dyn Any + Send + Sync>> {
        self.0.companion.set(companion)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_keep_what_they_read_and_tables_come_back() {
        let mut table = SharedTable::default();
        table.fill(&[1, 2, 3]);
        let mut reader = SharedTable::default();
        reader.share(&table);
        table.fill(&[4]);
        assert_eq!((reader.get(), table.get()), (&[1, 2, 3][..], &[4][..]));
        reader.share(&table);
        table.fill(&[5, 6]);
        assert_eq!((reader.get(), table.get()), (&[4][..], &[5, 6][..]));
        for i in 0..10 {
            reader.share(&table);
            table.fill(&[i]);
        }
        assert_eq!(table.earlier.len(), 1, "one reader needs one table more");
    }

    #[test]
    fn tables_that_are_handed_back_and_forth_do_not_pile_up() {
        let (mut a, mut b) = (SharedTable::default(), SharedTable::default());
        for i in 0..100 {
            b.share(&a);
            b.fill(&[i]);
            a.fill(&[-i]);
            assert_eq!((a.get(), b.get()), (&[-i][..], &[i][..]));
        }
        assert!(a.earlier.len() <= 1 && b.earlier.len() <= 1, "{} and {}", a.earlier.len(), b.earlier.len());
    }

    /// Seen to be dropped by the count of its owners.
    struct Mark(#[expect(dead_code, reason = "it is held, not read")] Arc<()>);

    #[test]
    fn what_is_attached_lives_as_long_as_the_memory() {
        let mut table = SharedTable::default();
        table.fill(&[1, 2, 3, 4]);
        let first = KvIndices::of(&table);
        assert!(!first.is_reused() && first.companion().is_none());
        let count = Arc::new(());
        first.attach(Box::new(Mark(Arc::clone(&count)))).unwrap();
        assert!(first.attach(Box::new(7)).unwrap_err().is::<i32>(), "one thing alone");
        assert!(first.companion().unwrap().is::<Mark>());
        // While somebody holds it, another table is filled.
        table.fill(&[5]);
        assert_eq!((first.get(), table.get()), (&[1, 2, 3, 4][..], &[5][..]));
        let second = KvIndices::of(&table);
        drop(first);
        table.fill(&[6, 7]);
        let again = KvIndices::of(&table);
        assert!(again.is_reused() && again.companion().is_some(), "the first memory is back");
        assert_eq!(again.get(), [6, 7]);
        let capacity = again.capacity();
        drop((again, second));
        assert_eq!(Arc::strong_count(&count), 2);
        table.fill(&vec![8; capacity + 1]);
        assert_eq!(Arc::strong_count(&count), 1, "other memory has nothing attached");
        assert!(!KvIndices::of(&table).is_reused());
    }
}

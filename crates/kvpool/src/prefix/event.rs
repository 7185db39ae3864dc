//! Owns the stream of events of a prefix cache: [`PrefixEvent`], [`EventBatch`].
//! Invariants: replaying all events gives exactly the cached page hashes, and memory is bounded: where nobody drains,
//! the oldest events are lost and counted. Does not send anything anywhere.

use std::collections::VecDeque;

use crate::prefix::key::{ExtraKey, PageHash};

/// A change of what is cached, for routers. The hashes are hints: a router that is wrong costs time, not correctness.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum PrefixEvent {
    /// These pages can be matched now.
    Stored {
        /// What else the pages depend on.
        extra: ExtraKey,
        /// The page before the first one; `None` at the beginning.
        parent: Option<PageHash>,
        /// The pages, in order.
        pages: Vec<PageHash>,
    },
    /// These pages cannot be matched any more.
    Removed {
        /// The pages, in order.
        pages: Vec<PageHash>,
    },
    /// Nothing can be matched any more.
    Cleared,
}

/// Events since the last drain.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EventBatch {
    /// The events, oldest first.
    pub events: Vec<PrefixEvent>,
    /// Older events that were lost because nobody drained them. Start again from [`crate::PrefixCache::snapshot`].
    pub num_lost: u64,
}

#[derive(Debug)]
pub(crate) struct EventLog {
    events: VecDeque<PrefixEvent>,
    max_events: usize,
    num_lost: u64,
}

impl EventLog {
    pub(crate) const fn new(max_events: usize) -> EventLog {
        EventLog { events: VecDeque::new(), max_events, num_lost: 0 }
    }

    /// Notes the event, which is made only where somebody listens.
    pub(crate) fn push(&mut self, event: impl FnOnce() -> PrefixEvent) {
        if self.max_events == 0 {
            return;
        }
        if self.events.len() == self.max_events {
            self.events.pop_front();
            self.num_lost += 1;
        }
        self.events.push_back(event());
    }

    pub(crate) fn drain(&mut self) -> EventBatch {
        EventBatch { events: self.events.drain(..).collect(), num_lost: std::mem::take(&mut self.num_lost) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_events_are_lost_and_counted() {
        let mut log = EventLog::new(2);
        for hash in 0..5 {
            log.push(|| PrefixEvent::Removed { pages: vec![PageHash(hash)] });
        }
        let batch = log.drain();
        assert_eq!((batch.events.len(), batch.num_lost), (2, 3));
        assert_eq!(batch.events[1], PrefixEvent::Removed { pages: vec![PageHash(4)] });
        assert_eq!(log.drain(), EventBatch::default());
        EventLog::new(0).push(|| unreachable!("nobody listens"));
    }
}

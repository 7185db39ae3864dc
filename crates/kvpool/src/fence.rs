//! Owns the contract of a [`Fence`]: a page that was released after a fence is reusable only when the fence has passed.
//! Invariant: a passed fence stays passed. Does not know what is waited for; a device's crate wraps its events.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A point in a queue of work: everything enqueued before it is done once it has passed.
///
/// The pool asks from [`crate::PagePool::lease`] and the like, while it holds its lock: answer at once, do not wait, do
/// not call the pool, and do not own a lease of it (the fence is dropped under the lock too).
pub trait Fence: Send {
    /// Whether the work before the fence is done. Once `true`, always `true`.
    fn has_passed(&self) -> bool;
}

/// A fence that passes when it is told to. For tests, and for engines whose work ends on the host.
///
/// Clones are the same fence.
#[derive(Debug, Clone, Default)]
pub struct ManualFence {
    has_passed: Arc<AtomicBool>,
}

impl ManualFence {
    /// A fence that has not passed.
    #[must_use]
    pub fn new() -> ManualFence {
        ManualFence::default()
    }

    /// Lets the fence pass.
    pub fn pass(&self) {
        self.has_passed.store(true, Ordering::Release);
    }
}

impl Fence for ManualFence {
    fn has_passed(&self) -> bool {
        self.has_passed.load(Ordering::Acquire)
    }
}

impl fmt::Debug for dyn Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fence").field("has_passed", &self.has_passed()).finish()
    }
}

//! Owns [`FailurePlan`], the seam by which a test makes the Nth taking of pages fail.
//! Invariant: a plan fires once. Does not decide what failing means; the pool answers as if it were exhausted.

/// Makes one future taking of pages fail, as exhaustion would, with the pool's true counts in the error.
///
/// Every call that has to take at least one page counts as one, however many it takes:
/// [`crate::PagePool::lease`], [`crate::PagePool::lease_batch`], [`crate::Lease::extend`],
/// [`crate::Lease::make_private`], [`crate::PrefixCache::lease`]. Run a scenario with the plans 0, 1, 2, … until one has not fired, and every place
/// that takes pages has failed once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FailurePlan {
    /// Calls to let through; `None` once it has fired.
    remaining: Option<u64>,
}

impl FailurePlan {
    /// Lets `n` calls through and fails the next one.
    #[must_use]
    pub const fn nth(n: u64) -> FailurePlan {
        FailurePlan { remaining: Some(n) }
    }

    /// Whether it has made a call fail.
    #[must_use]
    pub const fn has_fired(&self) -> bool {
        self.remaining.is_none()
    }

    /// Counts a call; `true` where it must fail.
    pub(crate) fn strikes(&mut self) -> bool {
        match self.remaining {
            Some(0) => {
                self.remaining = None;
                true
            }
            Some(n) => {
                self.remaining = Some(n - 1);
                false
            }
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_fires_once_at_its_call() {
        let mut plan = FailurePlan::nth(2);
        assert_eq!([(); 5].map(|()| plan.strikes()), [false, false, true, false, false]);
        assert!(plan.has_fired());
    }
}

//! Stale-plan detection: every plan carries who made it and when, and every forward call compares.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::batch::Batch;
use crate::capture::Bucket;
use crate::error::RunError;

/// A prepared step: a ticket for the plan that a backend holds.
///
/// It is valid for the backend that made it and until that backend prepares another step (a captured one: until its
/// limits are set anew). Using it afterwards is [`RunError::StalePlan`].
#[derive(Debug, PartialEq, Eq)]
pub struct Prepared {
    backend: u64,
    generation: u64,
    num_rows: u32,
    num_pool_pages: u32,
    appends: bool,
    bucket: Option<Bucket>,
}

impl Prepared {
    /// Rows of q and out that a call with this step takes: the batch's, or the bucket's where captured.
    #[must_use]
    pub const fn num_rows(&self) -> u32 {
        self.num_rows
    }

    /// Pages that a cache must have at least.
    #[must_use]
    pub const fn num_pool_pages(&self) -> u32 {
        self.num_pool_pages
    }

    /// Whether calls with this step append KV.
    #[must_use]
    pub const fn appends(&self) -> bool {
        self.appends
    }

    /// The bucket of a captured step.
    #[must_use]
    pub const fn bucket(&self) -> Option<Bucket> {
        self.bucket
    }
}

/// Makes a backend's [`Prepared`]s and checks them. One for each backend; ids are unique in the process.
#[derive(Debug)]
pub struct StampIssuer {
    backend: u64,
    issued: u64,
    current: u64,
}

impl Default for StampIssuer {
    fn default() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self { backend: NEXT.fetch_add(1, Ordering::Relaxed), issued: 0, current: 0 }
    }
}

impl StampIssuer {
    /// A stamp for the plan just made of `batch`; earlier eager stamps become stale.
    pub fn issue(&mut self, batch: &Batch) -> Prepared {
        self.issued += 1;
        self.current = self.issued;
        Prepared {
            backend: self.backend,
            generation: self.issued,
            num_rows: batch.num_rows(),
            num_pool_pages: batch.pool().num_pages,
            appends: batch.slot_mapping().is_some(),
            bucket: None,
        }
    }

    /// A stamp for a captured step. Eager stamps stay valid.
    pub fn issue_captured(&mut self, bucket: Bucket, num_pool_pages: u32, appends: bool) -> Prepared {
        self.issued += 1;
        Prepared {
            backend: self.backend,
            generation: self.issued,
            num_rows: bucket.num_rows,
            num_pool_pages,
            appends,
            bucket: Some(bucket),
        }
    }

    /// Number of a step among those of this backend: keeps captured plans apart.
    #[must_use]
    pub const fn generation(step: &Prepared) -> u64 {
        step.generation
    }

    /// Checks that an eager step is the current one, or that a captured step is of this backend and known
    /// (`captured` holds the generations of the live captures).
    ///
    /// # Errors
    /// [`RunError::StalePlan`].
    pub fn check(&self, step: &Prepared, captured: impl FnOnce(u64) -> bool) -> Result<(), RunError> {
        let live = match step.bucket {
            None => step.generation == self.current,
            Some(_) => step.backend == self.backend && captured(step.generation),
        };
        if step.backend == self.backend && live {
            return Ok(());
        }
        Err(RunError::StalePlan {
            backend: self.backend,
            generation: self.current,
            got_backend: step.backend,
            got_generation: step.generation,
        })
    }
}

//! A backend's live plans and the tickets for them: every ticket carries who made it and when, and every use compares.
//!
//! Invariant: a ticket gives the plan that it was issued for, or an error; never another plan.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::batch::Batch;
use crate::capture::{Bucket, CaptureLimits};
use crate::error::{CaptureError, PrepareError, RunError};

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

/// The live plans of a backend, each with its ticket: that of the last prepared batch and those of captured graphs.
///
/// `P` is whatever a backend makes of a batch. The verbs of [`AttentionBackend`](crate::AttentionBackend) that deal in
/// tickets are thin calls of this type's.
#[derive(Debug)]
pub struct Steps<P> {
    backend: u64,
    issued: u64,
    /// Number of the uncaptured plan; 0 where there is none.
    current: u64,
    eager: P,
    limits: Option<CaptureLimits>,
    captured: Vec<(u64, P)>,
}

impl<P> Steps<P> {
    /// No live plan yet; `eager` is what the first [`prepare`](Self::prepare) fills.
    #[must_use]
    pub fn new(eager: P) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let backend = NEXT.fetch_add(1, Ordering::Relaxed);
        Self { backend, issued: 0, current: 0, eager, limits: None, captured: Vec::new() }
    }

    /// Replaces the uncaptured plan; earlier uncaptured tickets become stale.
    ///
    /// # Errors
    /// What `fill` returns. It must not have touched the plan then, which stays the current one.
    pub fn prepare(
        &mut self,
        batch: &Batch,
        fill: impl FnOnce(&mut P) -> Result<(), PrepareError>,
    ) -> Result<Prepared, PrepareError> {
        fill(&mut self.eager)?;
        self.issued += 1;
        self.current = self.issued;
        Ok(Prepared {
            backend: self.backend,
            generation: self.issued,
            num_rows: batch.num_rows(),
            num_pool_pages: batch.pool().num_pages,
            appends: batch.slot_mapping().is_some(),
            bucket: None,
        })
    }

    /// Makes uncaptured tickets stale, for a backend whose plan was lost half-way through a new one.
    pub fn invalidate(&mut self) {
        self.current = 0;
    }

    /// Makes a captured ticket stale, for a backend that gave a part of its plan another batch and not the rest.
    pub fn invalidate_captured(&mut self, step: &Prepared) {
        self.captured.retain(|(number, _)| step.backend != self.backend || *number != step.generation);
    }

    /// Makes all captured tickets stale, for a backend that set up a part of itself anew and not the rest.
    pub fn invalidate_all_captured(&mut self) {
        self.captured.clear();
    }

    /// The plan of a ticket.
    ///
    /// # Errors
    /// [`RunError::StalePlan`].
    pub fn get(&self, step: &Prepared) -> Result<&P, RunError> {
        let ours = step.backend == self.backend;
        let found = match step.bucket {
            None => (step.generation == self.current).then_some(&self.eager),
            Some(_) => self.captured.iter().find(|(number, _)| *number == step.generation).map(|(_, plan)| plan),
        };
        found.filter(|_| ours).ok_or(RunError::StalePlan {
            backend: self.backend,
            generation: self.current,
            got_backend: step.backend,
            got_generation: step.generation,
        })
    }

    /// Sets what will be captured; earlier captured tickets become stale.
    ///
    /// # Errors
    /// [`CaptureError::InvalidBucket`]; nothing is changed then.
    pub fn init_capture(&mut self, limits: &CaptureLimits) -> Result<(), CaptureError> {
        limits.validate()?;
        self.captured.clear();
        self.limits = Some(limits.clone());
        Ok(())
    }

    /// A ticket for a new captured plan, which `make` makes for the limits.
    ///
    /// # Errors
    /// [`CaptureError::NotInitialised`], [`CaptureError::UnknownBucket`], or what `make` returns.
    pub fn capture(
        &mut self,
        bucket: Bucket,
        make: impl FnOnce(&CaptureLimits) -> Result<P, CaptureError>,
    ) -> Result<Prepared, CaptureError> {
        let limits = self.limits.as_ref().ok_or(CaptureError::NotInitialised)?;
        if !limits.buckets.contains(&bucket) {
            return Err(CaptureError::UnknownBucket { bucket });
        }
        let plan = make(limits)?;
        self.issued += 1;
        self.captured.push((self.issued, plan));
        Ok(Prepared {
            backend: self.backend,
            generation: self.issued,
            num_rows: bucket.num_rows,
            num_pool_pages: limits.num_pool_pages,
            appends: limits.appends,
            bucket: Some(bucket),
        })
    }

    /// Gives a captured plan another batch, after checking that the batch fits the bucket.
    ///
    /// # Errors
    /// [`CaptureError::NotCaptured`], [`CaptureError::Stale`], [`CaptureError::OverBucket`],
    /// [`CaptureError::AppendMismatch`], or what `fill` returns; it must not have touched the plan then.
    pub fn replay(
        &mut self,
        step: &Prepared,
        batch: &Batch,
        fill: impl FnOnce(&mut P, Bucket) -> Result<(), CaptureError>,
    ) -> Result<(), CaptureError> {
        let bucket = step.bucket.ok_or(CaptureError::NotCaptured)?;
        self.get(step).map_err(CaptureError::Stale)?;
        let limits = self.limits.as_ref().ok_or(CaptureError::NotInitialised)?;
        limits.check(bucket, batch)?;
        let found = self.captured.iter_mut().find(|(number, _)| *number == step.generation);
        let (_, plan) = found.expect("a checked ticket has its plan");
        fill(plan, bucket)
    }
}

//! Sizes of captured graphs.

use crate::batch::Batch;
use crate::error::CaptureError;

/// A captured graph's size: what it was recorded for; smaller batches are padded up to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Bucket {
    /// Requests, ≥ 1; padding requests have no query and no KV.
    pub num_requests: u32,
    /// Rows of q and out, ≥ 1; padding rows are written as zeros.
    pub num_rows: u32,
}

impl Bucket {
    /// A bucket for pure decode: one row a request.
    #[must_use]
    pub const fn decode(num_requests: u32) -> Self {
        Self { num_requests, num_rows: num_requests }
    }
}

/// What graphs will be captured: decides the sizes of all buffers that graphs share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaptureLimits {
    /// The buckets, in any order.
    pub buckets: Vec<Bucket>,
    /// Longest `kv_len` of a request, in tokens.
    pub max_kv_len: u32,
    /// Pages of the pool that replays read and write.
    pub num_pool_pages: u32,
    /// Whether the captured calls append KV.
    pub appends: bool,
}

impl CaptureLimits {
    /// Checks the buckets.
    ///
    /// # Errors
    /// [`CaptureError::InvalidBucket`] for the first bucket without a request or a row.
    pub fn validate(&self) -> Result<(), CaptureError> {
        match self.buckets.iter().find(|b| b.num_requests == 0 || b.num_rows == 0) {
            Some(&bucket) => Err(CaptureError::InvalidBucket { bucket }),
            None => Ok(()),
        }
    }

    /// Checks that a batch fits a captured bucket.
    ///
    /// # Errors
    /// [`CaptureError::OverBucket`] for the first size that does not fit, [`CaptureError::AppendMismatch`].
    pub fn check(&self, bucket: Bucket, batch: &Batch) -> Result<(), CaptureError> {
        let sizes = [
            ("requests", batch.requests().len() as u64, bucket.num_requests),
            ("rows", u64::from(batch.num_rows()), bucket.num_rows),
            ("KV tokens in one request", u64::from(batch.max_kv_len()), self.max_kv_len),
            ("pool pages", u64::from(batch.pool().num_pages), self.num_pool_pages),
        ];
        if let Some((what, got, limit)) = sizes.into_iter().find(|(_, got, limit)| *got > u64::from(*limit)) {
            return Err(CaptureError::OverBucket { what, got, limit: u64::from(limit) });
        }
        if batch.slot_mapping().is_some() != self.appends {
            return Err(CaptureError::AppendMismatch { captured_appends: self.appends });
        }
        Ok(())
    }

    /// The smallest bucket that holds a batch of this size, if any.
    #[must_use]
    pub fn bucket_for(&self, num_requests: u32, num_rows: u32) -> Option<Bucket> {
        let fits = |b: &&Bucket| b.num_requests >= num_requests && b.num_rows >= num_rows;
        self.buckets.iter().filter(fits).min_by_key(|b| (b.num_rows, b.num_requests)).copied()
    }
}

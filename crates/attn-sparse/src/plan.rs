//! Owns what a captured decode step needs: [`DecodePlans`], one plan for each batch size.
//!
//! Two parts are kept apart. *Outside* a captured graph, once a step, on the host: lengths become the tables of a plan
//! ([`DecodePlans::prepare`]). *Inside* it nothing is planned: kernels read the tables at the addresses that they had
//! when they were captured.
//! Invariants: a plan's buffers are made once, for the longest context, and never move; what is behind the entries in
//! use is stale and must not be read; lengths come from the batch alone, never from a device.

use std::collections::BTreeMap;

use attn_metadata::Batch;
use kvpool::PageSize;
use thiserror::Error;

use crate::params::BlockParams;

/// The sizes that decide the buffers of every plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanLimits {
    /// Which blocks a row takes.
    pub blocks: BlockParams,
    /// Index heads on one KV head: a KV head may take so many times `topk` blocks.
    pub index_group: u32,
    /// Longest context, in tokens.
    pub max_kv_len: u32,
    /// Tokens in a page.
    pub page_size: PageSize,
}

/// A batch that cannot be planned. The plan of its size is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A request with more or fewer than one query token.
    #[error("request {request} has {got} query tokens, a decode plan takes 1")]
    NotDecode {
        /// The request.
        request: usize,
        /// Its query tokens.
        got: u32,
    },
    /// A request longer than the plan's buffers.
    #[error("request {request} has {got} KV tokens, plans were made for at most {max}")]
    TooLong {
        /// The request.
        request: usize,
        /// Its tokens.
        got: u32,
        /// The longest.
        max: u32,
    },
    /// The batch has other pages than the plans.
    #[error("the batch has pages of {got} tokens, plans were made for pages of {expected}")]
    PageSize {
        /// Tokens in a page of the plans.
        expected: PageSize,
        /// Tokens in a page of the batch.
        got: PageSize,
    },
    /// More tokens than the tables can count.
    #[error("the batch has {got} KV tokens, the tables count up to 2147483647")]
    TooManyTokens {
        /// Tokens of all requests.
        got: u64,
    },
    /// A plan was asked for that nobody prepared.
    #[error("no decode plan for {got} requests was prepared")]
    NotPrepared {
        /// Requests of the batch.
        got: usize,
    },
}

/// The tables of one batch size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecodePlan {
    /// Tokens that a row attends to at most: `width · block size`, what the schedule of a kernel is made for.
    pub reference_kv_len: u32,
    /// Tokens of each request, `[n]`.
    pub segment_lens: Vec<i32>,
    /// Their running sum from 0, `[n + 1]`.
    pub segment_offsets: Vec<i32>,
    /// Offsets of the requests' pages, `[n + 1]`.
    pub page_indptr: Vec<i32>,
    /// Position of each query: its request's length less 1, and not below 0; `[n]`.
    pub qo_offset: Vec<i32>,
    /// Page ids, packed; entries from `page_indptr[n]` on are stale.
    pub indices: Vec<i32>,
}

/// Plans by batch size, each made at first use and kept.
#[derive(Clone, Debug)]
pub struct DecodePlans {
    limits: PlanLimits,
    plans: BTreeMap<usize, DecodePlan>,
}

impl DecodePlans {
    /// No plan yet.
    #[must_use]
    pub const fn new(limits: PlanLimits) -> Self {
        Self { limits, plans: BTreeMap::new() }
    }

    /// Writes the tables of a batch into the plan of its size; an idle batch, of no request, has none.
    ///
    /// # Errors
    /// [`PlanError`]; nothing is changed then.
    pub fn prepare(&mut self, batch: &Batch) -> Result<Option<&DecodePlan>, PlanError> {
        let n = batch.requests().len();
        if n == 0 {
            return Ok(None);
        }
        let (expected, got) = (self.limits.page_size, batch.page_size());
        if expected != got {
            return Err(PlanError::PageSize { expected, got });
        }
        let got: u64 = batch.requests().iter().map(|r| u64::from(r.kv_len)).sum();
        if i32::try_from(got).is_err() {
            return Err(PlanError::TooManyTokens { got });
        }
        for (request, r) in batch.requests().iter().enumerate() {
            if r.q_len != 1 {
                return Err(PlanError::NotDecode { request, got: r.q_len });
            }
            if r.kv_len > self.limits.max_kv_len {
                return Err(PlanError::TooLong { request, got: r.kv_len, max: self.limits.max_kv_len });
            }
        }
        let limits = self.limits;
        let plan = self.plans.entry(n).or_insert_with(|| DecodePlan::new(&limits, n));
        plan.update(batch);
        Ok(Some(plan))
    }

    /// The plan of a batch size.
    ///
    /// # Errors
    /// [`PlanError::NotPrepared`].
    pub fn get(&self, num_requests: usize) -> Result<&DecodePlan, PlanError> {
        self.plans.get(&num_requests).ok_or(PlanError::NotPrepared { got: num_requests })
    }
}

impl DecodePlan {
    fn new(limits: &PlanLimits, n: usize) -> Self {
        let room = n * limits.page_size.pages_for(limits.max_kv_len as usize);
        Self {
            reference_kv_len: limits.index_group * limits.blocks.topk * limits.blocks.block_size,
            segment_lens: vec![0; n],
            segment_offsets: vec![0; n + 1],
            page_indptr: vec![0; n + 1],
            qo_offset: vec![0; n],
            indices: vec![0; room],
        }
    }

    /// Overwrites the tables in place.
    fn update(&mut self, batch: &Batch) {
        for (i, request) in batch.requests().iter().enumerate() {
            let len = request.kv_len.cast_signed();
            self.segment_lens[i] = len;
            self.segment_offsets[i + 1] = self.segment_offsets[i] + len;
            self.qo_offset[i] = (len - 1).max(0);
            let pages = batch.pages(request);
            let start = self.page_indptr[i].unsigned_abs() as usize;
            self.indices[start..start + pages.len()].copy_from_slice(pages);
            self.page_indptr[i + 1] = i32::try_from(start + pages.len()).expect("pages of a batch fit an i32");
        }
    }

    /// The page ids in use.
    #[must_use]
    pub fn indices(&self) -> &[i32] {
        let end = self.page_indptr.last().map_or(0, |end| end.unsigned_abs() as usize);
        &self.indices[..end]
    }
}

//! Random programs of leases, shares, copies and fences against a model that recomputes everything from lists, with an
//! audit after every operation.

#![allow(clippy::unwrap_used)] // in helpers; clippy knows only #[test] functions

use kvpool::{CopyOnWrite, FailurePlan, Lease, ManualFence, PagePool, PageSize, PoolCounts, PoolError};
use proptest::prelude::*;

const NUM_PAGES: u32 = 12;

/// Indices are taken modulo the number of live things, so that every program is meaningful after shrinking.
#[derive(Debug, Clone)]
enum Op {
    Lease(usize),
    LeaseBatch(Vec<usize>),
    Share(usize, usize, usize),
    Extend(usize, usize),
    Truncate(usize, usize),
    SplitOff(usize, usize),
    Append(usize, usize, usize),
    MakePrivate(usize, usize),
    FinishCopy(usize, bool),
    Drop(usize),
    ReleaseAfter(usize),
    PassFence(usize),
    Reap,
    FailNext,
}

fn op() -> impl Strategy<Value = Op> {
    let index = 0usize..64;
    let count = 0usize..6;
    prop_oneof![
        count.clone().prop_map(Op::Lease),
        prop::collection::vec(count.clone(), 0..4).prop_map(Op::LeaseBatch),
        (index.clone(), index.clone(), index.clone()).prop_map(|(i, a, b)| Op::Share(i, a, b)),
        (index.clone(), count).prop_map(|(i, n)| Op::Extend(i, n)),
        (index.clone(), index.clone()).prop_map(|(i, n)| Op::Truncate(i, n)),
        (index.clone(), index.clone()).prop_map(|(i, n)| Op::SplitOff(i, n)),
        (index.clone(), index.clone(), index.clone()).prop_map(|(i, j, at)| Op::Append(i, j, at)),
        (index.clone(), index.clone()).prop_map(|(i, n)| Op::MakePrivate(i, n)),
        (index.clone(), any::<bool>()).prop_map(|(i, fenced)| Op::FinishCopy(i, fenced)),
        index.clone().prop_map(Op::Drop),
        index.clone().prop_map(Op::ReleaseAfter),
        index.prop_map(Op::PassFence),
        Just(Op::Reap),
        Just(Op::FailNext),
    ]
}

#[derive(Default)]
struct Model {
    leases: Vec<Vec<u32>>,
    copies: Vec<u32>,
    /// Pages and whether the fence has passed; removed when reaped.
    fences: Vec<(bool, Vec<u32>)>,
    fails_next: bool,
}

impl Model {
    fn lease_entries(&self, page: u32) -> usize {
        let in_leases = self.leases.iter().flatten().filter(|held| **held == page).count();
        in_leases + self.copies.iter().filter(|held| **held == page).count()
    }

    fn fence_entries(&self, page: u32) -> usize {
        self.fences.iter().flat_map(|(_, pages)| pages).filter(|held| **held == page).count()
    }

    fn counts(&self) -> PoolCounts {
        let mut counts = PoolCounts { total: NUM_PAGES as usize, ..PoolCounts::default() };
        for page in 0..NUM_PAGES {
            match (self.lease_entries(page), self.fence_entries(page)) {
                (0, 0) => counts.free += 1,
                (0, _) => counts.fenced += 1,
                (leases, _) => {
                    counts.leased += 1;
                    counts.shared += usize::from(leases > 1);
                }
            }
        }
        counts
    }

    fn reap(&mut self) {
        self.fences.retain(|(has_passed, _)| !has_passed);
    }

    fn take(&mut self, num_pages: usize) -> Result<Vec<u32>, PoolError> {
        if num_pages == 0 {
            return Ok(Vec::new());
        }
        self.reap();
        let PoolCounts { free, fenced, .. } = self.counts();
        if std::mem::take(&mut self.fails_next) || num_pages > free {
            return Err(PoolError::Exhausted { needed: num_pages, free, fenced });
        }
        let is_free = |page: &u32| self.lease_entries(*page) + self.fence_entries(*page) == 0;
        Ok((0..NUM_PAGES).filter(is_free).take(num_pages).collect())
    }
}

struct Run {
    pool: PagePool,
    leases: Vec<Lease>,
    copies: Vec<CopyOnWrite>,
    fences: Vec<ManualFence>,
    model: Model,
}

fn ids(lease: &Lease) -> Vec<u32> {
    lease.pages().iter().map(|page| page.raw()).collect()
}

impl Run {
    fn new() -> Run {
        let pool = PagePool::new(NUM_PAGES, PageSize::new(4).unwrap()).unwrap();
        Run { pool, leases: Vec::new(), copies: Vec::new(), fences: Vec::new(), model: Model::default() }
    }

    fn step(&mut self, op: &Op) {
        match op {
            Op::Lease(n) => {
                let expected = self.model.take(*n);
                self.admit(self.pool.lease(*n).map(|lease| vec![lease]), expected.map(|pages| vec![pages]));
            }
            Op::LeaseBatch(counts) => {
                let expected = self
                    .model
                    .take(counts.iter().sum())
                    .map(|mut pages| counts.iter().map(|count| pages.drain(..count).collect()).collect());
                self.admit(self.pool.lease_batch(counts), expected);
            }
            Op::PassFence(i) => self.pass_fence(*i),
            Op::Reap => {
                self.pool.reap();
                self.model.reap();
                self.fences.retain(|fence| !kvpool::Fence::has_passed(fence));
            }
            Op::FailNext => {
                self.pool.set_failure_plan(Some(FailurePlan::nth(0)));
                self.model.fails_next = true;
            }
            Op::FinishCopy(i, is_fenced) if !self.copies.is_empty() => {
                let i = i % self.copies.len();
                let (copy, page) = (self.copies.remove(i), self.model.copies.remove(i));
                if *is_fenced {
                    copy.release_after(self.fence(vec![page]));
                }
            }
            Op::FinishCopy(..) => {}
            _ if self.leases.is_empty() => {}
            _ => self.step_on_lease(op),
        }
    }

    fn step_on_lease(&mut self, op: &Op) {
        let live = self.leases.len();
        match op {
            Op::Share(i, a, b) => self.share(i % live, *a, *b),
            Op::Extend(i, n) => {
                let expected = self.model.take(*n);
                assert_eq!(self.leases[i % live].extend(*n), expected.clone().map(drop));
                self.model.leases[i % live].extend(expected.unwrap_or_default());
            }
            Op::Truncate(i, n) => {
                let (i, n) = (i % live, n % (self.leases[i % live].len() + 1));
                self.leases[i].truncate(n).unwrap();
                self.model.leases[i].truncate(n);
            }
            Op::SplitOff(i, n) => {
                let (i, n) = (i % live, n % (self.leases[i % live].len() + 1));
                let tail = self.leases[i].split_off(n).unwrap();
                self.leases.push(tail);
                let tail = self.model.leases[i].split_off(n);
                self.model.leases.push(tail);
            }
            Op::Append(i, j, at) => self.append(i % live, j % live, *at),
            Op::MakePrivate(i, n) => self.make_private(i % live, *n),
            Op::Drop(i) => {
                drop(self.leases.remove(i % live));
                self.model.leases.remove(i % live);
            }
            Op::ReleaseAfter(i) => {
                let (lease, pages) = (self.leases.remove(i % live), self.model.leases.remove(i % live));
                let is_empty = pages.is_empty();
                let fence = self.fence(pages);
                lease.release_after(fence);
                if is_empty {
                    self.fences.pop();
                    self.model.fences.pop();
                }
            }
            _ => unreachable!("the other operations need no lease"),
        }
    }

    fn admit(&mut self, got: Result<Vec<Lease>, PoolError>, expected: Result<Vec<Vec<u32>>, PoolError>) {
        assert_eq!(got.as_ref().map(|leases| leases.iter().map(ids).collect::<Vec<_>>()), expected.as_ref().cloned());
        self.leases.extend(got.unwrap_or_default());
        self.model.leases.extend(expected.unwrap_or_default());
    }

    fn share(&mut self, i: usize, a: usize, b: usize) {
        let len = self.leases[i].len();
        let (start, end) = (a % (len + 2), b % (len + 2));
        match self.leases[i].share(start..end) {
            Ok(shared) => {
                self.leases.push(shared);
                let pages = self.model.leases[i][start..end].to_vec();
                self.model.leases.push(pages);
            }
            Err(PoolError::ReversedRange { .. }) => assert!(start > end),
            Err(error) => assert_eq!((error, end > len), (PoolError::BeyondLease { index: end, len }, true)),
        }
    }

    fn append(&mut self, i: usize, j: usize, at: usize) {
        if i == j {
            return;
        }
        let mut other = self.leases.remove(j);
        let mut other_pages = self.model.leases.remove(j);
        let (i, at) = (i - usize::from(i > j), at % (other.len() + 1));
        self.leases[i].append_from(&mut other, at).unwrap();
        self.model.leases[i].extend(other_pages.split_off(at));
        self.leases.push(other);
        self.model.leases.push(other_pages);
    }

    fn make_private(&mut self, i: usize, n: usize) {
        let len = self.leases[i].len();
        if len == 0 {
            assert_eq!(self.leases[i].make_private(0).unwrap_err(), PoolError::BeyondLease { index: 0, len: 0 });
            return;
        }
        let index = n % len;
        let page = self.model.leases[i][index];
        if self.model.fence_entries(page) > 0 {
            self.model.reap();
        }
        let is_private = self.model.lease_entries(page) + self.model.fence_entries(page) == 1;
        let expected = if is_private { Ok(None) } else { self.model.take(1).map(|pages| Some((page, pages[0]))) };
        let got = self.leases[i].make_private(index);
        let pair = |copy: &CopyOnWrite| (copy.from.raw(), copy.to.raw());
        assert_eq!(got.as_ref().map(|copy| copy.as_ref().map(pair)), expected.as_ref().copied());
        if let (Ok(Some(copy)), Ok(Some((from, to)))) = (got, expected) {
            self.copies.push(copy);
            self.model.copies.push(from);
            self.model.leases[i][index] = to;
        }
    }

    fn fence(&mut self, pages: Vec<u32>) -> ManualFence {
        let fence = ManualFence::new();
        self.fences.push(fence.clone());
        self.model.fences.push((false, pages));
        fence
    }

    fn pass_fence(&mut self, i: usize) {
        let pending: Vec<_> = self.fences.iter().filter(|fence| !kvpool::Fence::has_passed(*fence)).collect();
        if pending.is_empty() {
            return;
        }
        let i = i % pending.len();
        pending[i].pass();
        let mut waiting = self.model.fences.iter_mut().filter(|(has_passed, _)| !has_passed);
        waiting.nth(i).unwrap().0 = true;
    }

    fn check(&self) {
        let audit = self.pool.audit().unwrap();
        assert_eq!(audit.counts, self.model.counts());
        assert_eq!(audit.counts, self.pool.counts());
        assert_eq!(audit.num_leases, self.leases.len() + self.copies.len());
        assert_eq!(self.leases.iter().map(ids).collect::<Vec<_>>(), self.model.leases);
    }

    fn drain(mut self) {
        self.leases.clear();
        self.copies.clear();
        self.fences.iter().for_each(ManualFence::pass);
        self.pool.reap();
        let audit = self.pool.audit().unwrap();
        assert_eq!(audit.counts.free, audit.counts.total);
        assert_eq!((audit.num_leases, audit.num_pending), (0, 0));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 2000 }))]

    #[test]
    fn random_programs_agree_with_the_model(program in prop::collection::vec(op(), 1..60)) {
        let mut run = Run::new();
        for op in &program {
            run.step(op);
            run.check();
        }
        run.drain();
    }
}

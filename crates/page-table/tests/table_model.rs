//! Random programs against `Vec<Vec<Token>>`: every token is a tag that is written into a real KV cache, and after every
//! operation each live sequence must read back what it wrote, through copies on write, forks and fences.

#![allow(clippy::unwrap_used)] // in helpers; clippy knows only #[test] functions

use std::collections::HashMap;

use kvpool::{
    FailurePlan, Fence, HostKv, HostTensor, KvFormat, KvLayout, KvPageShape, ManualFence, PageId, PagePool, PageSize,
    PoolError, Slot,
};
use page_table::{AppendOutcome, PageTable, SeqId, StepTables, TableError};
use proptest::prelude::*;

const NUM_PAGES: u32 = 12;

/// Indices are taken modulo the number of live things, so that every program is meaningful after shrinking.
#[derive(Debug, Clone)]
enum Op {
    Create,
    Append(Vec<(usize, usize)>, bool),
    Truncate(usize, usize, bool),
    Fork(usize),
    Adopt(usize, usize),
    Release(usize, bool),
    PassFence(usize),
    FailNext,
}

fn op() -> impl Strategy<Value = Op> {
    let index = 0usize..64;
    let request = (index.clone(), 0usize..9);
    prop_oneof![
        2 => Just(Op::Create),
        6 => (prop::collection::vec(request, 1..5), any::<bool>()).prop_map(|(rows, fenced)| Op::Append(rows, fenced)),
        2 => (index.clone(), index.clone(), any::<bool>()).prop_map(|(i, len, fenced)| Op::Truncate(i, len, fenced)),
        3 => index.clone().prop_map(Op::Fork),
        2 => (index.clone(), index.clone()).prop_map(|(i, len)| Op::Adopt(i, len)),
        2 => (index.clone(), any::<bool>()).prop_map(|(i, fenced)| Op::Release(i, fenced)),
        2 => index.prop_map(Op::PassFence),
        1 => Just(Op::FailNext),
    ]
}

/// Tokens that must stay readable until the fence has passed.
struct InFlight {
    fence: ManualFence,
    tokens: Vec<(Slot, u32)>,
}

struct Run {
    table: PageTable,
    kv: HostKv,
    /// The model.
    sequences: Vec<(SeqId, Vec<u32>)>,
    in_flight: Vec<InFlight>,
    next_tag: u32,
    stale: Vec<SeqId>,
    tables: StepTables,
}

fn f32_of(tag: u32) -> f32 {
    f32::from(u16::try_from(tag).unwrap())
}

impl Run {
    fn new(page_size: u32) -> Run {
        let page_size = PageSize::new(page_size).unwrap();
        let pool = PagePool::new(NUM_PAGES, page_size).unwrap();
        let page = KvPageShape { page_size, num_kv_heads: 1, head_dim_k: 1, head_dim_v: 1 };
        let kv = HostKv::new(page.with_pages(NUM_PAGES).unwrap(), KvLayout::Nhd, KvFormat::F32).unwrap();
        let (sequences, in_flight, stale) = (Vec::new(), Vec::new(), Vec::new());
        Run { table: PageTable::new(pool), kv, sequences, in_flight, next_tag: 1, stale, tables: StepTables::new() }
    }

    fn step(&mut self, op: &Op) {
        let live = self.sequences.len();
        match op {
            Op::Create => {
                let seq = self.table.create().unwrap();
                self.sequences.push((seq, Vec::new()));
            }
            Op::PassFence(i) if !self.in_flight.is_empty() => {
                let done = self.in_flight.swap_remove(i % self.in_flight.len());
                done.fence.pass();
            }
            Op::FailNext => self.table.pool().set_failure_plan(Some(FailurePlan::nth(0))),
            _ if live == 0 => {}
            Op::Append(rows, is_fenced) => self.append(rows, *is_fenced),
            Op::Truncate(i, len, is_fenced) => self.truncate(i % live, *len, *is_fenced),
            Op::Fork(i) => {
                let (seq, tags) = self.sequences[i % live].clone();
                let fork = self.table.fork(seq).unwrap();
                self.sequences.push((fork, tags));
            }
            Op::Adopt(i, len) => self.adopt(i % live, *len),
            Op::Release(i, is_fenced) => self.release(i % live, *is_fenced),
            Op::PassFence(_) => {}
        }
    }

    fn append(&mut self, rows: &[(usize, usize)], is_fenced: bool) {
        let mut requests: Vec<(usize, SeqId, usize)> = Vec::new();
        for (i, num_tokens) in rows {
            let i = i % self.sequences.len();
            if requests.iter().all(|(other, ..)| *other != i) {
                requests.push((i, self.sequences[i].0, *num_tokens));
            }
        }
        let batch: Vec<_> = requests.iter().map(|(_, seq, num_tokens)| (*seq, *num_tokens)).collect();
        let (new_pages, num_copies) = self.expected_pages(&requests);
        let before = self.table.audit().unwrap();
        match self.table.append_batch(&batch) {
            Ok(outcome) => {
                assert_eq!(outcome.copies.len(), num_copies);
                self.write(&requests, outcome, is_fenced);
            }
            Err(TableError::Pool(PoolError::Exhausted { needed, free, .. })) => {
                assert_eq!(needed, new_pages + num_copies);
                let plan = self.table.pool().failure_plan();
                assert!(needed > free || plan.is_some_and(|plan| plan.has_fired()));
                let after = self.table.audit().unwrap();
                assert_eq!((after.num_tokens, after.num_entries), (before.num_tokens, before.num_entries));
            }
            Err(other) => panic!("{other}"),
        }
        if self.table.pool().failure_plan().is_some_and(|plan| plan.has_fired()) {
            self.table.pool().set_failure_plan(None);
        }
    }

    /// New pages, and copies found by going through the rows one by one with counts of holders.
    fn expected_pages(&self, requests: &[(usize, SeqId, usize)]) -> (usize, usize) {
        let page_size = self.table.pool().page_size();
        let mut holders: HashMap<PageId, u32> = HashMap::new();
        let (mut new_pages, mut num_copies) = (0, 0);
        for (i, seq, num_tokens) in requests {
            let len = self.sequences[*i].1.len();
            new_pages += page_size.pages_for(len + num_tokens) - page_size.pages_for(len);
            if *num_tokens == 0 || len.is_multiple_of(page_size.get() as usize) {
                continue;
            }
            let lease = self.table.lease(*seq).unwrap();
            let last = lease.len() - 1;
            let left = holders.entry(lease.pages()[last]).or_insert_with(|| lease.num_holders(last).unwrap());
            if *left > 1 {
                *left -= 1;
                num_copies += 1;
            }
        }
        (new_pages, num_copies)
    }

    fn write(&mut self, requests: &[(usize, SeqId, usize)], outcome: AppendOutcome, is_fenced: bool) {
        for copy in outcome.copies {
            self.kv.copy_page(copy.from, copy.to).unwrap();
            if is_fenced {
                let fence = ManualFence::new();
                copy.release_after(fence.clone());
                self.in_flight.push(InFlight { fence, tokens: Vec::new() });
            }
        }
        for (i, seq, num_tokens) in requests {
            for _ in 0..*num_tokens {
                let tag = self.next_tag;
                self.next_tag += 1;
                let slot = self.table.slot(*seq, self.sequences[*i].1.len()).unwrap();
                self.sequences[*i].1.push(tag);
                let (k, v) = ([f32_of(tag)], [-f32_of(tag)]);
                let k = HostTensor::packed(&k[..], [1, 1, 1]).unwrap();
                self.kv.append(&[slot], &k, Some(&HostTensor::packed(&v[..], [1, 1, 1]).unwrap())).unwrap();
            }
        }
    }

    /// The tokens of a sequence from `start` on, to be kept until a fence passes.
    fn watch(&mut self, i: usize, start: usize) -> ManualFence {
        let (seq, tags) = &self.sequences[i];
        let tokens = (start..tags.len()).map(|at| (self.table.slot(*seq, at).unwrap(), tags[at])).collect();
        let fence = ManualFence::new();
        self.in_flight.push(InFlight { fence: fence.clone(), tokens });
        fence
    }

    fn truncate(&mut self, i: usize, len: usize, is_fenced: bool) {
        let (seq, old_len) = (self.sequences[i].0, self.sequences[i].1.len());
        let len = len % (old_len + 1);
        if is_fenced {
            let page_size = self.table.pool().page_size();
            let first_freed = page_size.pages_for(len) * page_size.get() as usize;
            let fence = self.watch(i, first_freed.min(old_len));
            self.table.truncate_after(seq, len, fence).unwrap();
        } else {
            self.table.truncate(seq, len).unwrap();
        }
        self.sequences[i].1.truncate(len);
        let beyond = self.table.truncate(seq, len + 1).unwrap_err();
        assert_eq!(beyond, TableError::BeyondSequence { seq, what: "length", value: len + 1, len });
    }

    fn adopt(&mut self, i: usize, len: usize) {
        let (seq, tags) = self.sequences[i].clone();
        let len = len % (tags.len() + 1);
        let num_pages = self.table.pool().page_size().pages_for(len);
        let prefix = self.table.lease(seq).unwrap().share(0..num_pages).unwrap();
        let adopted = self.table.adopt(prefix, len).unwrap();
        self.sequences.push((adopted, tags[..len].to_vec()));
    }

    fn release(&mut self, i: usize, is_fenced: bool) {
        let seq = self.sequences[i].0;
        if is_fenced {
            let fence = self.watch(i, 0);
            self.table.release_after(seq, fence).unwrap();
        } else {
            self.table.release(seq).unwrap();
        }
        self.sequences.remove(i);
        self.stale.push(seq);
    }

    fn check(&mut self) {
        let audit = self.table.audit().unwrap();
        assert_eq!(audit.num_sequences, self.sequences.len());
        assert_eq!(audit.num_tokens, self.sequences.iter().map(|(_, tags)| tags.len()).sum::<usize>());
        for (seq, tags) in &self.sequences {
            assert_eq!(self.table.len(*seq), Ok(tags.len()));
            for (position, tag) in tags.iter().enumerate() {
                self.check_token(self.table.slot(*seq, position).unwrap(), *tag);
            }
            assert!(self.table.slot(*seq, tags.len()).is_err());
        }
        for InFlight { tokens, fence } in &self.in_flight {
            assert!(!fence.has_passed());
            tokens.iter().for_each(|(slot, tag)| self.check_token(*slot, *tag));
        }
        for seq in &self.stale {
            assert_eq!(self.table.len(*seq), Err(TableError::UnknownSequence { seq: *seq }));
        }
        self.check_step();
    }

    fn check_token(&self, slot: Slot, tag: u32) {
        let (mut k, mut v) = ([0.0], [0.0]);
        self.kv.read_k(slot, 0, &mut k);
        self.kv.read_v(slot, 0, &mut v);
        assert_eq!((k[0], v[0]), (f32_of(tag), -f32_of(tag)), "slot {slot}");
    }

    /// Reads all tokens of all sequences through the step's tables alone.
    fn check_step(&mut self) {
        let requests: Vec<_> = self.sequences.iter().map(|(seq, tags)| (*seq, tags.len() / 2)).collect();
        self.table.step_tables(&requests, &mut self.tables).unwrap();
        let page_size = self.table.pool().page_size();
        let at = |indptr: &[i32], row: usize| usize::try_from(indptr[row]).unwrap();
        for (row, (_, tags)) in self.sequences.iter().enumerate() {
            let StepTables { qo_indptr, kv_indptr, kv_indices, kv_last_page_len, slot_mapping } = &self.tables;
            let pages = &kv_indices[at(kv_indptr, row)..at(kv_indptr, row + 1)];
            let full = pages.len().saturating_sub(1) * page_size.get() as usize;
            assert_eq!(full + at(kv_last_page_len, row), tags.len());
            let slots: Vec<Slot> = (0..tags.len())
                .map(|position| {
                    let page = PageId::from_i32(pages[position / page_size.get() as usize]).unwrap();
                    let offset = u32::try_from(position).unwrap() % page_size.get();
                    Slot::new(page, offset, page_size).unwrap()
                })
                .collect();
            slots.iter().zip(tags).for_each(|(slot, tag)| self.check_token(*slot, *tag));
            let new = &slot_mapping[at(qo_indptr, row)..at(qo_indptr, row + 1)];
            assert_eq!(new, &slots[tags.len() - tags.len() / 2..]);
        }
    }

    fn drain(mut self) {
        while !self.sequences.is_empty() {
            self.release(0, false);
        }
        self.in_flight.iter().for_each(|watched| watched.fence.pass());
        self.table.pool().reap();
        let audit = self.table.audit().unwrap();
        assert_eq!((audit.num_entries, audit.pool.num_leases, audit.pool.num_pending), (0, 0, 0));
        assert_eq!(audit.pool.counts.free, NUM_PAGES as usize);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 1500 }))]

    #[test]
    fn every_sequence_reads_back_what_it_wrote(
        page_size in prop::sample::select(vec![1u32, 2, 3, 4, 16]),
        program in prop::collection::vec(op(), 1..50),
    ) {
        let mut run = Run::new(page_size);
        for op in &program {
            run.step(op);
            run.check();
        }
        run.drain();
    }
}

//! Owns the record that a checked kernel leaves behind before it stops, and its reading.
//!
//! A kernel that stops takes the device's memory with it, so the record lies in pinned host memory that the device
//! writes through. The first thread that finds a broken rule takes the record; the others only stop.

use std::fmt;

use bytemuck::{Pod, Zeroable};

/// The record as kernels write it: `CheckRecord` of `kernels/params.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct TrapRecord {
    /// Number of the kernel that found it; 0: nothing was found.
    pub kernel: i32,
    /// Number of the rule.
    pub rule: i32,
    /// The thread block that found it.
    pub block: i32,
    /// The request, or the row where the kernel knows rows alone; -1: unknown.
    pub request: i32,
    /// The value that broke the rule.
    pub value: i64,
}

/// `CheckRule` of `kernels/params.h`, from 1: what the rule is about, and what was wrong.
const RULES: &[&str] = &[
    "a page id is outside the pool",
    "an entry of the page table is outside the table",
    "a tile's rows, KV, chunks or size break the contract",
    "a range goes beyond the tiles or the heads",
    "a partial state is outside the workspace",
    "a slot is outside the pool",
    "a position is outside the table of rotations",
    "a merge unit is out of bounds",
    "the head dimensions are not those of the kernel",
];

/// `CheckKernel` of `kernels/params.h`, from 1.
const KERNELS: &[&str] = &["plain", "decode", "extend", "merge_partials", "store_kv", "merge_states"];

/// What a checked kernel found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrapReport {
    record: TrapRecord,
}

impl TrapReport {
    /// The report of a record, where one was left.
    #[must_use]
    pub const fn of(record: TrapRecord) -> Option<Self> {
        if record.kernel == 0 { None } else { Some(Self { record }) }
    }

    /// The record.
    #[must_use]
    pub const fn record(&self) -> TrapRecord {
        self.record
    }

    /// The kernel's name.
    #[must_use]
    pub fn kernel(&self) -> &'static str {
        numbered(KERNELS, self.record.kernel).copied().unwrap_or("an unknown kernel")
    }

    /// The rule, in words.
    #[must_use]
    pub fn rule(&self) -> &'static str {
        numbered(RULES, self.record.rule).copied().unwrap_or("an unknown rule was broken")
    }
}

impl fmt::Display for TrapReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TrapRecord { block, request, value, .. } = self.record;
        write!(f, "kernel {} stopped: {}: {value} (", self.kernel(), self.rule())?;
        if request >= 0 {
            write!(f, "request or row {request}, ")?;
        }
        write!(f, "block {block})")
    }
}

fn numbered<T>(list: &[T], number: i32) -> Option<&T> {
    list.get(usize::try_from(number).ok()?.checked_sub(1)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_names_kernel_rule_request_and_value() {
        let record = TrapRecord { kernel: 2, rule: 1, block: 5, request: 7, value: 99 };
        let report = TrapReport::of(record).unwrap();
        let expected = "kernel decode stopped: a page id is outside the pool: 99 (request or row 7, block 5)";
        assert_eq!(report.to_string(), expected);
        assert_eq!(TrapReport::of(TrapRecord::default()), None);
    }

    #[test]
    fn unknown_numbers_do_not_panic() {
        let record = TrapRecord { kernel: -1, rule: i32::MAX, request: -1, ..TrapRecord::default() };
        assert!(TrapReport::of(record).unwrap().to_string().contains("an unknown kernel"));
    }
}

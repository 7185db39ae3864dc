//! Checked kernels on tables that break a rule: they stop with a record of kernel, rule and value, and the host says it.
//!
//! A validated batch has no broken table, so a table is overwritten on the device between planning and running. A kernel
//! that stops takes its process's use of the GPU with it: each fault happens in a process of its own.

use std::process::Command;

use attn_conformance::Case;
use attn_conformance::case::RequestShape;
use attn_conformance::harness::Problem;
use attn_cuda::device::{Device, DeviceBuffer, DeviceError, Staging};
use attn_cuda::{CudaDevice, Families};
use attn_metadata::HeadShape;
use kvpool::{Dtype, KvDtype, KvLayout};

use crate::scene::{Place, Scene, all_bytes};
use crate::support;

/// Tells a child which fault is its.
const FAULT: &str = "ATTN_FAULT";
/// What a child prints before the report.
const MARK: &str = "the device says: ";

/// Which entry of the tables is overwritten.
#[derive(Clone, Copy)]
enum Entry {
    /// The id of the request's second page.
    Page,
    /// The slot of the first row.
    Slot,
    /// Where the first tile's request begins in the page table.
    PagesBegin,
    /// Query tokens of the first tile.
    QueryTokens,
}

struct Fault {
    name: &'static str,
    families: Families,
    q_len: u32,
    entry: Entry,
    value: i32,
    /// How the report begins.
    report: &'static str,
}

const FAULTS: &[Fault] = &[
    Fault {
        name: "plain-page",
        families: Families::Plain,
        q_len: 1,
        entry: Entry::Page,
        value: 1_000_000,
        report: "kernel plain stopped: a page id is outside the pool: 1000000 ",
    },
    Fault {
        name: "plain-negative-page",
        families: Families::Plain,
        q_len: 1,
        entry: Entry::Page,
        value: -2,
        report: "kernel plain stopped: a page id is outside the pool: -2 ",
    },
    Fault {
        name: "plain-table",
        families: Families::Plain,
        q_len: 1,
        entry: Entry::PagesBegin,
        value: 5_000_000,
        report: "kernel plain stopped: an entry of the page table is outside the table: 50000",
    },
    Fault {
        name: "plain-tile",
        families: Families::Plain,
        q_len: 1,
        entry: Entry::QueryTokens,
        value: 9999,
        report: "kernel plain stopped: a tile's rows, KV, chunks or size break the contract: 0 ",
    },
    Fault {
        name: "store-slot",
        families: Families::Plain,
        q_len: 1,
        entry: Entry::Slot,
        value: 1 << 28,
        report: "kernel store_kv stopped: a slot is outside the pool: 268435456 ",
    },
    Fault {
        name: "decode-page",
        families: Families::All,
        q_len: 1,
        entry: Entry::Page,
        value: 1_000_000,
        report: "kernel decode stopped: a page id is outside the pool: 1000000 ",
    },
    Fault {
        name: "extend-page",
        families: Families::All,
        q_len: 40,
        entry: Entry::Page,
        value: 1_000_000,
        report: "kernel extend stopped: a page id is outside the pool: 1000000 ",
    },
];

/// KV tokens of the one request: less than a chunk, so that nothing is split.
const KV_LEN: u32 = 237;

fn case(fault: &Fault) -> Case {
    Case {
        requests: vec![RequestShape { q_len: fault.q_len, kv_len: KV_LEN }],
        heads: HeadShape::new(4, 2, 128),
        q_dtype: Dtype::Bf16,
        kv_dtype: KvDtype::Bf16,
        ..Case::default()
    }
}

/// The entry's place among the table's words: where the words around it are what the batch says.
fn place_of(words: &[i32], scene: &Scene, fault: &Fault) -> usize {
    let position = |words: &[i32], wanted: &[i32]| words.windows(wanted.len()).position(|window| window == wanted);
    let found = match fault.entry {
        Entry::Page => position(words, scene.batch.kv_indices()).map(|at| at + 1),
        Entry::Slot => {
            let slots: Vec<i32> = scene.batch.slot_mapping().unwrap().iter().map(|slot| slot.raw()).collect();
            // One slot may look like another number: slots come after all else and before the page table.
            let end = position(words, scene.batch.kv_indices()).expect("the tables hold the page table");
            words[..end].windows(slots.len()).rposition(|window| window == slots)
        }
        Entry::PagesBegin | Entry::QueryTokens => {
            // request, q_begin, q_len, q_pos, kv_begin, kv_end, kv_len, pages_begin of `AttnTile`.
            let [q_len, kv_len] = [fault.q_len, KV_LEN].map(u32::cast_signed);
            let tile = [0, 0, q_len, kv_len - q_len, 0, kv_len, kv_len, 0];
            position(words, &tile).map(|at| at + if matches!(fault.entry, Entry::PagesBegin) { 7 } else { 2 })
        }
    };
    found.expect("the tables hold what the batch says")
}

/// Overwrites the entry in the step's tables on the device.
fn plant(device: &Device, tables: &DeviceBuffer, scene: &Scene, fault: &Fault) {
    let mut words: Vec<i32> =
        all_bytes(tables).chunks_exact(4).map(|word| i32::from_le_bytes(word.try_into().unwrap())).collect();
    let at = place_of(&words, scene, fault);
    words[at] = fault.value;
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let whole = std::iter::once(0..bytes.len());
    Staging::new(device).send(bytes.len(), whole, None, tables, |to| to.copy_from_slice(&bytes)).unwrap();
    device.synchronize().unwrap();
}

/// What a child does: the fault, and what the host is told.
fn suffer(fault: &Fault) {
    let device = CudaDevice::open(0).unwrap().checked();
    let place = Place { families: fault.families, ..Place::low(KvLayout::Nhd) };
    let mut scene = Scene::new(device.clone(), Problem::new(&case(fault)), place).unwrap();
    let step = scene.prepare();
    device.device.synchronize().unwrap();
    // The tables are the buffer of the step that holds the page table.
    let keeps = scene.backend.keeps(&step).unwrap();
    let buffers = keeps.into_iter().filter_map(|keep| keep.downcast::<DeviceBuffer>().ok());
    let wanted: Vec<u8> = scene.batch.kv_indices().iter().flat_map(|page| page.to_le_bytes()).collect();
    let holds = |buffer: &DeviceBuffer| all_bytes(buffer).windows(wanted.len()).any(|window| window == wanted);
    let tables = buffers.into_iter().find(|buffer| holds(buffer)).expect("the step's tables are kept");
    plant(&device.device, &tables, &scene, fault);
    // Fails or not: a kernel given after the one that stopped is refused, if that is known by then.
    let _ = scene.forward(&step);
    match device.device.synchronize() {
        Err(DeviceError::Trapped { report }) => println!("{MARK}{report}"),
        other => panic!("{}: the kernel went on: {other:?}", fault.name),
    }
    // The context is lost for good, and says so again.
    assert!(device.device.synchronize().is_err());
}

#[test]
fn a_child_suffers_the_fault_that_it_was_told() {
    if let Some(name) = std::env::var_os(FAULT) {
        let fault = FAULTS.iter().find(|fault| *fault.name == name).expect("a fault of the list");
        suffer(fault);
    }
}

#[test]
fn each_broken_rule_stops_its_kernel_with_a_record() {
    if !support::has_gpu() {
        return;
    }
    let child = "traps::a_child_suffers_the_fault_that_it_was_told";
    let mut wrong = Vec::new();
    for fault in FAULTS {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let output = command.args(["--exact", child, "--nocapture"]).env(FAULT, fault.name).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let report = text.lines().find_map(|line| line.split_once(MARK)).map(|(_, report)| report.to_owned());
        let is_right = output.status.success() && report.as_ref().is_some_and(|text| text.starts_with(fault.report));
        if !is_right {
            let errors = String::from_utf8_lossy(&output.stderr).into_owned();
            wrong.push(format!("{}: {report:?}, expected {:?}, {}\n{errors}", fault.name, fault.report, output.status));
        }
    }
    assert!(wrong.is_empty(), "{} of {} faults:\n{}", wrong.len(), FAULTS.len(), wrong.join("\n"));
}

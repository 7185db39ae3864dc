//! Bytes as a replay file. What can be read is the same again when it is recorded and read once more, and where it is
//! small the `cpu` backend runs it, to the same bits on one thread and on two.
//!
//! Most mutations keep the file whole: they change a tensor's name, dtype, shape or data, or a parameter.

#![no_main]

mod container;

use attn_metadata::HostDevice;
use engine::backends::create_backend;
use engine::replay::{Call, Outcome, Problem, ReplayFile, record, result_bytes};
use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};

use container::Container;

/// Query rows × query heads × keys × width of the largest problem that is run.
const MAX_WORK: u64 = 1 << 18;

fuzz_target!(|bytes: &[u8]| {
    let file = match ReplayFile::parse(bytes) {
        Ok(file) => file,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    check_again(&file.problem);
    if work(&file.problem) > MAX_WORK {
        return;
    }
    let mut problems = [file.problem.clone(), file.problem];
    let [one, two] = &mut problems;
    let Some(outcome) = run(one, 1) else { return };
    let again = run(two, 2).expect("the number of threads decides nothing");
    let bytes = |problem: &Problem, outcome: &Outcome| {
        let lse: Vec<u32> = outcome.lse.iter().map(|lse| lse.ln().to_bits()).collect();
        let cache = problem.cache.buffer().as_slice().as_bytes().to_vec();
        (outcome.out.elements().as_bytes().to_vec(), lse, cache)
    };
    assert!(bytes(one, &outcome) == bytes(two, &again), "one thread and two give the same bits");
    result_bytes(&outcome, Some(&one.cache), file.fp8_as_u8).expect("a result can be packed");
});

/// A problem that was read can be recorded, and what is then read is the same problem.
fn check_again(problem: &Problem) {
    let bytes = record(&Call::from(problem)).expect("a whole batch can be recorded");
    let again = ReplayFile::parse(&bytes).expect("what was recorded can be read").problem;
    assert_eq!(format!("{:?}", again.layer), format!("{:?}", problem.layer));
    assert_eq!(again.batch.requests(), problem.batch.requests());
    assert_eq!(again.batch.num_rows(), problem.batch.num_rows());
    assert_eq!(again.batch.kv_indices(), problem.batch.kv_indices());
    assert_eq!(again.batch.slot_mapping(), problem.batch.slot_mapping());
    let mask = |problem: &Problem| problem.batch.custom_mask().map(|mask| mask.bytes().to_vec());
    assert_eq!(mask(&again), mask(problem));
    let parts = |problem: &Problem| {
        let kv = problem.new_kv.as_ref().map(|new| {
            [Some(&new.k), new.v.as_ref()].map(|t| t.map(|t| t.elements().as_bytes().to_vec()))
        });
        let cache = problem.cache.buffer().as_slice().as_bytes().to_vec();
        (problem.q.elements().as_bytes().to_vec(), problem.q.shape(), kv, cache, problem.cache.format())
    };
    assert!(parts(&again) == parts(problem), "the tensors are the same");
}

fn work(problem: &Problem) -> u64 {
    let heads = problem.layer.heads();
    let width = u64::from(heads.head_dim_qk) + u64::from(heads.head_dim_vo);
    let pairs = problem.batch.requests().iter().map(|r| (u64::from(r.q_len) + 1) * (u64::from(r.kv_len) + 1));
    let vector = u64::from(heads.num_qo_heads).saturating_mul(width);
    let rows = vector.saturating_mul(u64::from(problem.batch.num_rows()));
    pairs.fold(rows, |work, pairs| work.saturating_add(pairs.saturating_mul(vector)))
}

/// `None` where no backend takes the problem.
fn run(problem: &mut Problem, num_threads: usize) -> Option<Outcome> {
    let device = HostDevice::with_threads(num_threads);
    let (mut backend, _) = create_backend("cpu", &problem.config(device)).ok()?;
    let step = backend.prepare_metadata(&problem.batch).ok()?;
    backend.explain(&step).expect("a prepared step can be explained");
    let mut outcome = problem.outcome();
    problem.forward(backend.as_mut(), &step, &mut outcome).expect("a prepared step can be run");
    Some(outcome)
}

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    let whole = Container::parse(&data[..size]).filter(|_| !seed.is_multiple_of(8));
    let changed = whole.map(|mut container| {
        container.mutate(seed, fuzzer_mutate);
        container.pack()
    });
    match changed.filter(|bytes| bytes.len() <= max_size) {
        Some(bytes) => {
            data[..bytes.len()].copy_from_slice(&bytes);
            bytes.len()
        }
        None => fuzzer_mutate(data, size, max_size),
    }
});

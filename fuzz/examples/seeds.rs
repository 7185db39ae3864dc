//! Writes the seed corpora into a folder, `corpus` of this package unless another one is given.

// Files of tiny models, from the model runner's own tests.
#[path = "../../crates/engine/src/model/testing.rs"]
#[allow(dead_code, clippy::unwrap_used)]
mod testing;

use std::fs;
use std::path::PathBuf;

use engine::bench::{parse_workloads, problem_of};
use engine::model::gguf; // where the tests' file looks for it
use engine::replay::{Call, record};

const WORKLOADS: &str = r#"[
{"name": "append-f32", "kind": "mixed", "q_lens": [3, 1], "kv_lens": [5, 9], "heads": [4, 2], "dim": 8, "page": 4,
 "window": 6, "kv_dtype": "f32", "q_dtype": "f32", "append": true},
{"name": "decode-fp8", "kind": "decode", "q_lens": [1, 1], "kv_lens": [20, 1], "heads": [2, 1], "dim": 16, "page": 8,
 "window": 0, "kv_dtype": "fp8"},
{"name": "prefill-f16", "kind": "prefill", "q_lens": [7], "kv_lens": [7], "heads": [2, 2], "dim": 8, "page": 1,
 "window": 0, "kv_dtype": "f16", "q_dtype": "f16", "append": true},
{"name": "split-bf16", "kind": "decode", "q_lens": [2], "kv_lens": [1100], "heads": [2, 1], "dim": 2, "page": 16,
 "window": 0, "kv_dtype": "bf16"}
]"#;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::env::args().nth(1).unwrap_or_else(|| concat!(env!("CARGO_MANIFEST_DIR"), "/corpus").to_owned());
    let write = |target: &str, name: &str, bytes: &[u8]| {
        let folder = PathBuf::from(&folder).join(target);
        fs::create_dir_all(&folder)?;
        fs::write(folder.join(name), bytes)
    };
    for workload in parse_workloads(WORKLOADS)? {
        let problem = problem_of(&workload, 1, u64::MAX)?;
        write("replay_file", &workload.name, &record(&Call::from(&problem))?)?;
    }
    write("gguf_reader", "llama", &testing::TinyGguf::model().bytes())?;
    write("gguf_reader", "gemma", &testing::TinyGguf::gemma().bytes())?;
    // The other targets read numbers out of any bytes; these say nothing and are long enough to say it.
    for (name, len) in [("a", 60), ("b", 200), ("c", 900)] {
        let bytes = noise(len);
        write("batch_builder", name, &bytes)?;
        write("radix_program", name, &bytes)?;
        write("gguf_reader", name, &bytes)?;
    }
    Ok(())
}

/// The same bytes on every machine; zero first, so that nobody takes them for a text.
fn noise(len: usize) -> Vec<u8> {
    let mut state = len as u32;
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    std::iter::once(0).chain((1..len).map(next)).collect()
}

//! `attn bench` with workloads of a moment, and recorded workloads.

use std::fs;
use std::path::Path;

use attn_metadata::{HostDevice, Request};
use engine::backends::create_backend;
use engine::bench::{Results, parse_workloads, problem_of};
use engine::replay::{Call, ReplayFile, record};
use kvpool::HostKv;

use crate::support::{attn, attn_ok, fresh_dir, refused};

const SMALL: &str = r#"[
{"name": "small-f32", "kind": "mixed", "q_lens": [5, 1], "kv_lens": [9, 33], "heads": [4, 2], "dim": 32, "page": 4,
 "window": 6, "kv_dtype": "f32", "q_dtype": "f32", "append": true},
{"name": "small-fp8", "kind": "decode", "q_lens": [1], "kv_lens": [40], "heads": [4, 2], "dim": 32, "page": 16,
 "window": 0, "kv_dtype": "fp8"},
{"name": "latent", "kind": "mla", "q_lens": [1], "kv_lens": [40], "heads": [4, 1], "dim": [576, 512], "page": 16,
 "window": 0, "kv_dtype": "bf16"},
{"name": "much-too-large", "kind": "decode", "q_lens": [1], "kv_lens": [2000000000], "heads": [64, 64], "dim": 256,
 "page": 16, "window": 0, "kv_dtype": "bf16"}
]"#;

fn write(dir: &Path, name: &str, text: &str) -> String {
    let path = dir.join(name);
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

fn results(path: &Path) -> Results {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn workloads_are_measured_checked_or_skipped_with_a_reason() {
    let dir = fresh_dir("bench");
    let (workloads, json) = (write(&dir, "workloads.json", SMALL), dir.join("results.json"));
    let args = ["bench", "--workloads", &workloads, "--no-ceilings", "--rounds", "1", "--json", json.to_str().unwrap()];
    let text = attn_ok(&args);
    assert!(text.contains("small-f32"), "{text}");
    let results = results(&json);
    let row = |name: &str| results.results.iter().find(|row| row.workload == name).unwrap();
    assert!(row("small-f32").rel_err.unwrap() < 1e-5 && row("small-f32").ms.unwrap() > 0.0);
    assert!(row("small-fp8").rel_err.unwrap() < 1e-2 && row("small-fp8").plan_us.is_some());
    assert!(row("latent").rel_err.unwrap() < 2e-2 && row("latent").ms.unwrap() > 0.0);
    assert!(row("much-too-large").skipped.as_ref().unwrap().contains("MiB"));
    let (svg, results) = (dir.join("chart.svg"), json.to_str().unwrap());
    attn_ok(&["bench", "--plot", results, "--out", svg.to_str().unwrap()]);
    assert!(fs::read_to_string(svg).unwrap().starts_with("<svg"));
}

#[cfg(unix)]
#[test]
fn a_peer_runs_in_turns_and_ratios_are_theirs_over_ours() {
    let dir = fresh_dir("peer");
    let row =
        |name: &str| format!(r#"{{"workload": "{name}", "peer": "copy", "ms": 1e6, "rel_err": 1e-7, "more": 1}}"#);
    let rows = format!(r#"{{"results": [{}, {}]}}"#, row("decode-8x4096"), row("unknown"));
    let (theirs, json) = (write(&dir, "theirs.json", &rows), dir.join("results.json"));
    let peer = format!("cp {theirs}");
    let ours = ["--cpu", "--filter", "decode-8", "--no-ceilings", "--rounds", "2", "--json", json.to_str().unwrap()];
    attn_ok(&[&["bench", "--peer-cmd", &peer][..], &ours[..]].concat());
    let results = results(&json);
    assert_eq!(results.ratios.len(), 1);
    let ratio = &results.ratios[0];
    assert_eq!((ratio.workload.as_str(), ratio.peer.as_str(), ratio.rounds.len()), ("decode-8x4096", "copy", 2));
    assert!((ratio.ratio - 1e6 / results.results[0].ms.unwrap()).abs() < 1e-6 * ratio.ratio);
    assert_eq!(results.planner.len(), 2);
    for bad in ["false", "no-such-program", "true", " "] {
        refused(&attn(&[&["bench", "--peer-cmd", bad][..], &ours[..]].concat()), 2, 1);
    }
}

#[test]
fn results_of_peers_are_put_beside_ours() {
    let dir = fresh_dir("peers");
    let moves = r#"[{"name": "store", "kind": "store", "q_lens": [4], "kv_lens": [4], "heads": [4, 2], "dim": 32, "page": 16,
        "kv_dtype": "bf16", "append": true}]"#;
    let (first, second) = (write(&dir, "first.json", SMALL), write(&dir, "second.json", moves));
    let rows = r#"{"ceilings": {"read_gbs": 7, "matmul_tflops": [1, 2]}, "results": [
        {"workload": "small-fp8", "peer": "slow", "ms": 2e6, "rel_err": 1e-3},
        {"workload": "small-fp8", "peer": "fast", "ms": 1e6, "rel_err": 1e-3},
        {"workload": "small-fp8", "peer": "wrong", "ms": 1e-6, "rel_err": 1.0},
        {"workload": "small-f32", "peer": "fast", "skipped": "NotImplementedError"}]}"#;
    let (peers, json) = (write(&dir, "theirs.json", rows), dir.join("results.json"));
    let common = ["bench", "--workloads", &first, "--workloads", &second, "--no-ceilings", "--rounds", "1"];
    let ours = ["--json", json.to_str().unwrap(), "--peer-json", &peers];
    let text = attn_ok(&[&common[..], &ours[..]].concat());
    assert!(text.contains("1 compared with the best peer"), "{text}");
    let results = results(&json);
    let row = |system: &str| results.results.iter().find(|row| row.workload == "small-fp8" && row.system == system);
    let best = row("fast").unwrap().ratio.unwrap();
    assert_eq!((results.ratios.len(), results.ratios[0].peer.as_str(), results.ratios[0].ratio), (1, "fast", best));
    assert!((results.geometric_mean.unwrap() / best - 1.0).abs() < 1e-12 && row("wrong").is_none());
    assert!((row("slow").unwrap().ratio.unwrap() / best - 2.0).abs() < 1e-12);
    let store = results.results.iter().find(|row| row.workload == "store").unwrap();
    assert!(store.skipped.as_ref().unwrap().contains("kind store"), "{store:?}");
    for bad in ["no-such-file.json", &first] {
        refused(&attn(&[&common[..], &["--peer-json", bad]].concat()), 2, 1);
        refused(&attn(&[&common[..], &["--ceilings", bad]].concat()), 2, 1);
    }
}

#[test]
fn results_that_cannot_be_drawn_are_refused() {
    let dir = fresh_dir("plot");
    let svg = dir.join("chart.svg");
    for text in ["", "[]", "{}", r#"{"results": []}"#, r#"{"results": [{"workload": "a", "peer": "b"}]}"#] {
        let file = write(&dir, "results.json", text);
        refused(&attn(&["bench", "--plot", &file, "--out", svg.to_str().unwrap()]), 2, 1);
    }
    for text in ["", "{}", "[]", r#"[{"name": "a"}]"#] {
        let file = write(&dir, "workloads.json", text);
        refused(&attn(&["bench", "--workloads", &file, "--no-ceilings"]), 2, 1);
    }
}

/// After new figures: `attn bench --plot docs/bench/NAME.json --out docs/bench/NAME.svg`.
#[test]
fn the_charts_of_the_readme_are_made_of_the_result_files_beside_them() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let readme = fs::read_to_string(root.join("README.md")).unwrap();
    let charts: Vec<&str> =
        readme.split("](").filter_map(|rest| rest.split(')').next()?.strip_suffix(".svg")).collect();
    assert_eq!(charts, ["docs/bench/gpu-h200", "docs/bench/cpu"]);
    let dir = fresh_dir("charts");
    let made = dir.join("chart.svg");
    for chart in charts {
        let [json, svg] = ["json", "svg"].map(|extension| root.join(format!("{chart}.{extension}")));
        attn_ok(&["bench", "--plot", json.to_str().unwrap(), "--out", made.to_str().unwrap()]);
        let is_same = fs::read(&made).unwrap() == fs::read(&svg).unwrap();
        assert!(is_same, "{chart}.svg is not what is drawn of {chart}.json");
    }
}

#[test]
fn a_recorded_workload_is_the_same_problem_again() {
    for workload in parse_workloads(SMALL).unwrap().iter().filter(|w| w.name.starts_with("small")) {
        let mut problem = problem_of(workload, 5, u64::MAX).unwrap();
        let mut again = ReplayFile::parse(&record(&Call::from(&problem)).unwrap()).unwrap().problem;
        assert_eq!(again.layer, problem.layer);
        assert_eq!((&again.q, &again.new_kv), (&problem.q, &problem.new_kv));
        let bytes = |cache: &HostKv| cache.buffer().as_slice().as_bytes().to_vec();
        assert_eq!(bytes(&again.cache), bytes(&problem.cache));
        let requests = |requests: &[Request]| requests.to_vec();
        assert_eq!(requests(again.batch.requests()), requests(problem.batch.requests()));
        assert_eq!(again.batch.slot_mapping(), problem.batch.slot_mapping());
        let mut outcomes = [&mut problem, &mut again].map(|problem| {
            let (mut backend, _) = create_backend("cpu", &problem.config(HostDevice::default())).unwrap();
            let mut outcome = problem.outcome();
            let step = backend.prepare_metadata(&problem.batch).unwrap();
            problem.forward(backend.as_mut(), &step, &mut outcome).unwrap();
            outcome
        });
        let [first, second] = &mut outcomes;
        assert_eq!(first, second);
    }
}

#[test]
fn recorded_workloads_are_files_that_can_be_replayed() {
    let dir = fresh_dir("record");
    let workloads = write(&dir, "workloads.json", SMALL);
    let (recorded, out) = (dir.join("recorded"), dir.join("out"));
    let args = ["bench", "--workloads", &workloads, "--filter", "small", "--record", recorded.to_str().unwrap()];
    attn_ok(&args);
    let file = recorded.join("small-fp8.safetensors");
    attn_ok(&["replay", file.to_str().unwrap(), "--out-dir", out.to_str().unwrap()]);
    assert!(out.join("small-fp8.safetensors").exists());
    attn_ok(&["bench", "--workloads", &workloads, "--filter", "latent", "--record", recorded.to_str().unwrap()]);
    let file = recorded.join("latent.safetensors");
    attn_ok(&["replay", file.to_str().unwrap(), "--out-dir", out.to_str().unwrap(), "--attention-backend", "mla"]);
    let moves = concat!(env!("CARGO_MANIFEST_DIR"), "/../../bench/gpu-moves.json");
    let nothing = attn(&["bench", "--workloads", moves, "--record", recorded.to_str().unwrap()]);
    assert!(refused(&nothing, 2, 1)[0].contains("none of these workloads attends"));
}

//! What each command prints and how it refuses.

use std::io::Read;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::{attn, attn_ok, fresh_dir, refused};

const EXPLAIN: [&str; 7] = ["explain", "--q-lens", "1,1,512", "--kv-lens", "4096,77,512", "--page-size", "16"];

/// The workloads of GPUs.
const WORKLOADS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../bench/workloads.json");

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&attn_ok(args)).unwrap()
}

#[test]
fn the_demo_prints_the_mixed_batch_and_every_backend_is_exact() {
    let text = attn_ok(&["demo"]);
    let lines: Vec<&str> = text.lines().collect();
    let expected = [
        "mixed batch: A prefills 6 tokens, B finds 4 in the prefix cache and computes 3, C holds 8 and decodes 1",
        "16 query heads, 8 KV heads, dim 128, page size 1, f32",
        "cu_seqlens_q [0, 6, 9, 10]",
        "cache_seqlens [6, 7, 9]",
        "page table",
        "  A [0, 1, 2, 3, 4, 5]",
        "  B [6, 7, 8, 9, 20, 21, 22]",
        "  C [50, 51, 52, 53, 54, 55, 56, 57, 58]",
        "out_loc [0, 1, 2, 3, 4, 5, 20, 21, 22, 58]",
        "last indices [5, 8, 9]",
        "max error against dense causal attention in float64 (at most 1e-6)",
    ];
    assert_eq!(lines[..expected.len()], expected);
    for (line, name) in lines[expected.len()..].iter().zip(["cpu", "oracle"]) {
        let words: Vec<&str> = line.split_whitespace().collect();
        assert!(words[0] == name && words[2] == "ok" && words[1].parse::<f64>().unwrap() <= 1e-6, "{line}");
    }
    let demo = json(&["demo", "--json"]);
    assert_eq!(demo["out_loc"], serde_json::json!([0, 1, 2, 3, 4, 5, 20, 21, 22, 58]));
    let backends = demo["backends"].as_array().unwrap();
    let status = |name: &str| backends.iter().find(|backend| backend["name"] == name).unwrap()["status"].clone();
    assert_eq!([status("cpu"), status("oracle"), status("sparse")], ["passed", "passed", "not_run"]);
    assert!(backends.iter().all(|backend| backend["status"] != "failed"), "{demo}");
}

#[test]
fn backends_and_doctor_list_every_backend() {
    let rows = json(&["backends", "--json"]);
    let names: Vec<&str> = rows.as_array().unwrap().iter().map(|row| row["name"].as_str().unwrap()).collect();
    assert_eq!(names[..2], ["cpu", "oracle"]);
    let text = attn_ok(&["backends"]);
    for word in ["cpu", "oracle", "head dims", "window", "fp8_e4m3", "graphs"] {
        assert!(text.contains(word), "{word} is not in {text}");
    }
    let doctor = json(&["doctor", "--json"]);
    assert_eq!(doctor["backends"].as_array().unwrap().len(), names.len());
    assert!(doctor["threads"].as_u64().unwrap() >= 1);
    // With a driver it lists GPUs, without one it says what to do.
    let text = attn_ok(&["doctor"]);
    let expected = if cfg!(feature = "cuda") {
        ["GPU(s)", "no NVIDIA driver", "the NVIDIA driver "]
    } else {
        ["this build has no CUDA backend (feature cuda)"; 3]
    };
    assert!(expected.iter().any(|words| text.contains(words)), "{text}");
    assert_eq!(text.contains("backend cuda"), cfg!(feature = "cuda"), "{text}");
}

#[test]
fn a_plan_is_explained_with_the_selection() {
    let text = attn_ok(&EXPLAIN);
    assert!(text.starts_with("backend cpu\n  not oracle: chosen only by name\n"), "{text}");
    assert!(text.contains("request 2: q 512, kv 512"), "{text}");
    let explained = json(&[&EXPLAIN[..], &["--attention-backend", "oracle,cpu", "--window", "64", "--json"]].concat());
    assert_eq!(explained["selection"]["extend"][0], "oracle");
    assert_eq!(explained["selection"]["decode"][0], "cpu");
    assert!(explained["plan"]["groups"][0]["mask"].as_str().unwrap().contains("window_left 63"));
    let explained = json(&[&EXPLAIN[..], &["--attention-backend", "torch_native", "--json"]].concat());
    assert!(explained["selection"]["notes"][0].as_str().unwrap().starts_with("torch_native stands for cpu here"));
}

#[test]
fn every_group_of_a_plan_has_a_predicted_time() {
    let text = attn_ok(&EXPLAIN);
    assert!(text.contains("us a layer\n") && text.contains("\nroofline of the host, measured now: "), "{text}");
    let measured = json(&[&EXPLAIN[..], &["--json"]].concat());
    let rate = |name: &str| measured["roofline"][name].as_f64().unwrap();
    assert!(rate("read_bytes_per_s") > 1e8 && rate("flops_per_s") > 1e8 && rate("overhead_s") > 0.0, "{measured}");
    // 2.5 GB/s and 40 GFLOP/s: the long requests decode at the first rate, the prompt is computed at the second.
    for backend in ["cpu", "oracle,cpu"] {
        let given = ["--read-gbs", "2.5", "--gflops", "40", "--attention-backend", backend];
        let text = attn_ok(&[&EXPLAIN[..], &given].concat());
        assert!(text.ends_with("roofline of the host, given: 2.5 GB/s read, 40 GFLOP/s, 0.0 us a call\n"), "{text}");
        let explained = json(&[&EXPLAIN[..], &given, &["--json"]].concat());
        let groups = explained["plan"]["groups"].as_array().unwrap();
        assert_eq!(groups.len(), backend.split(',').count());
        assert_eq!(text.matches(", predicted ").count(), groups.len(), "{text}");
        for group in groups {
            let [bytes, flops] = ["bytes", "flops"].map(|name| group[name].as_f64().unwrap());
            assert_eq!(group["predicted_s"].as_f64().unwrap(), (bytes / 2.5e9).max(flops / 40e9));
            let shown = format!(", predicted {:.1} us a layer", group["predicted_s"].as_f64().unwrap() * 1e6);
            assert!(text.contains(&shown), "{shown} is not in {text}");
        }
    }
}

#[test]
fn a_workload_of_a_file_is_explained_by_name() {
    let file = WORKLOADS;
    let text = attn_ok(&["explain", "--workload", file, "--name", "decode-skew"]);
    assert!(text.contains("16 requests"), "{text}");
    let lines = refused(&attn(&["explain", "--workload", file, "--name", "nothing"]), 2, 1);
    assert!(lines[0].contains("decode-skew"), "{}", lines[0]);
    for backend in ["cpu", "mla"] {
        let args = ["explain", "--workload", file, "--name", "mla-128h-1x32768", "--attention-backend", backend];
        assert!(attn_ok(&args).contains("request 0: q 1, kv 32768"), "{backend}");
    }
    refused(&attn(&["explain", "--workload", "no-such-file.json", "--name", "a"]), 2, 1);
}

#[test]
fn usage_errors_are_one_line_and_exit_2() {
    let cases: &[&[&str]] = &[
        &["bogus"],
        &["demo", "--bogus"],
        &["replay"],
        &["replay", "a.safetensors"],
        &["replay", "a.safetensors", "--out-dir", env!("CARGO_TARGET_TMPDIR"), "--threads", "0"],
        &["bench"],
        &["bench", "--cpu", "--plot", "a.json", "--out", "b.svg"],
        &["bench", "--cpu", "--filter", "no such workload"],
        &["bench", "--workloads", "no-such-file.json"],
        &["bench", "--workloads", concat!(env!("CARGO_MANIFEST_DIR"), "/../../bench/gpu-moves.json"), "--schedules"],
        &["explain"],
        &["explain", "--q-lens", "1,1", "--kv-lens", "4"],
        &["explain", "--q-lens", "", "--kv-lens", "4"],
        &["explain", "--q-lens", "-1", "--kv-lens", "4"],
        &["explain", "--q-lens", "4294967295", "--kv-lens", "4294967295"],
        &["explain", "--q-lens", "1", "--kv-lens", "4294967295", "--page-size", "1"],
        &["explain", "--q-lens", "1", "--kv-lens", "4", "--page-size", "0"],
        &["explain", "--q-lens", "1", "--kv-lens", "4", "--heads", "32"],
        &["explain", "--q-lens", "1", "--kv-lens", "4", "--heads", "32,5"],
        &["explain", "--q-lens", "1", "--kv-lens", "4", "--heads", "0,0"],
        &["explain", "--q-lens", "1", "--kv-lens", "4", "--dim", "0"],
        &["explain", "--q-lens", "1", "--kv-lens", "4", "--dtype", "f64"],
        &["explain", "--q-lens", "1", "--kv-lens", "4", "--read-gbs", "10"],
        &["explain", "--q-lens", "1", "--kv-lens", "4", "--read-gbs", "0", "--gflops", "10"],
        &["explain", "--q-lens", "1", "--kv-lens", "4", "--read-gbs", "10", "--gflops", "NaN"],
        &["explain", "--q-lens", "1", "--kv-lens", "4", "--attention-backend", "nobody"],
        &["explain", "--q-lens", "1", "--kv-lens", "4", "--attention-backend", "cpu,,cpu"],
        &["explain", "--workload", WORKLOADS, "--name", "decode-skew", "--heads", "32,8"],
        &["explain", "--workload", WORKLOADS, "--name", "decode-skew", "--window", "9"],
        &["bench", "--steps", "--no-ceilings"],
        &["bench", "--steps", "--rounds", "2"],
    ];
    for args in cases {
        let lines = refused(&attn(args), 2, 1);
        assert!(!lines[0].contains("error: error"), "{}", lines[0]);
        assert!(!lines[0].contains("; see `attn --help`") || args[0] == "bogus", "{}", lines[0]);
    }
    let lines = refused(&attn(&["explain", "--q-lens", "1", "--kv-lens", "4", "--attention-backend", "nobody"]), 2, 1);
    assert!(lines[0].contains("there are: auto, cpu, oracle"), "{}", lines[0]);
    assert!(refused(&attn(&["replay"]), 2, 1)[0].ends_with("; see `attn replay --help`"));
    if cfg!(feature = "cuda") {
        for option in [&["--rounds", "2"][..], &["--threads", "2"], &["--no-ceilings"]] {
            let on_gpu = ["bench", "--workloads", WORKLOADS, "--attention-backend", "cuda"];
            let lines = refused(&attn(&[&on_gpu[..], option].concat()), 2, 1);
            assert!(lines[0].contains(&format!("{} is for backends that run on the host", option[0])), "{}", lines[0]);
        }
    }
}

#[test]
fn help_and_version_go_to_stdout() {
    assert!(attn_ok(&["--help"]).contains("replay"));
    assert!(attn_ok(&["replay", "--help"]).contains("--cache-out"));
    assert_eq!(attn_ok(&["--version"]).trim(), concat!("attn ", env!("CARGO_PKG_VERSION")));
}

#[test]
fn a_closed_pipe_is_not_a_panic() {
    for command in [&["demo"][..], &["backends"], &["doctor"], &["--help"]] {
        assert_eq!(stderr_with_a_closed_pipe(command), "", "{command:?}");
    }
    if cfg!(feature = "model") {
        let generate = ["generate", "--random-model", "mla", "--prompt", "a", "--max-new-tokens", "2", "--stats"];
        assert!(!stderr_with_a_closed_pipe(&generate).contains("panicked"));
    }
}

/// What `attn` says on stderr, well as it must end, when nobody reads what it prints.
fn stderr_with_a_closed_pipe(args: &[&str]) -> String {
    let mut child = Command::new(env!("CARGO_BIN_EXE_attn"))
        .args(args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    assert!(child.wait().unwrap().success(), "{args:?}: {stderr}");
    stderr
}

#[cfg(not(feature = "model"))]
#[test]
fn a_build_without_the_model_runner_says_so() {
    let lines = refused(&attn(&["generate", "--model", "x.gguf", "--prompt", "y"]), 2, 1);
    assert_eq!(lines[0], "error: this build has no model runner: rebuild with `--features model`");
}

#[test]
fn files_of_a_command_that_cannot_be_written_are_named() {
    let dir = fresh_dir("unwritable");
    let blocked = dir.join("file");
    std::fs::write(&blocked, "x").unwrap();
    let inside = blocked.join("dir");
    let lines = refused(&attn(&["replay", "a.safetensors", "--out-dir", inside.to_str().unwrap()]), 2, 1);
    assert!(lines[0].contains("--out-dir"), "{}", lines[0]);
}

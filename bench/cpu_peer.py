#!/usr/bin/env python3
"""Times ONNX Runtime's GroupQueryAttention on the CPU, the peer of `attn bench --cpu`.

usage: cpu_peer.py [--threads N] [--json OUT]      needs the Python packages onnxruntime, onnx and numpy

The workloads are those of cpu-workloads.json beside this file: float32, causal, the new tokens appended to the cache.
The cache is one buffer for past and present, as a serving engine keeps it, so nothing is copied. Times are medians in
ms after a warm-up; each result is checked against float64 attention on one row of one head."""
import argparse
import json
import pathlib
import time

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

SECONDS = 1.0
MIN_REPS, MAX_REPS = 5, 15


def make_session(num_heads, num_kv_heads, dim, threads):
    f32, i32 = TensorProto.FLOAT, TensorProto.INT32
    inputs = [
        ("q", f32, ["b", "s", num_heads * dim]),
        ("k", f32, ["b", "s", num_kv_heads * dim]),
        ("v", f32, ["b", "s", num_kv_heads * dim]),
        ("past_k", f32, ["b", num_kv_heads, "p", dim]),
        ("past_v", f32, ["b", num_kv_heads, "p", dim]),
        ("last", i32, ["b"]),
        ("total", i32, [1]),
    ]
    outputs = [
        ("out", f32, ["b", "s", num_heads * dim]),
        ("present_k", f32, ["b", num_kv_heads, "t", dim]),
        ("present_v", f32, ["b", num_kv_heads, "t", dim]),
    ]
    node = helper.make_node(
        "GroupQueryAttention",
        [name for name, _, _ in inputs],
        [name for name, _, _ in outputs],
        domain="com.microsoft",
        num_heads=num_heads,
        kv_num_heads=num_kv_heads,
    )
    infos = [[helper.make_tensor_value_info(*info) for info in infos] for infos in (inputs, outputs)]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "attention", *infos), opset_imports=opsets, ir_version=9)
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def measure(workload, threads):
    (num_heads, num_kv_heads), dim = workload["heads"], workload["dim"]
    batch, q_len, kv_len = len(workload["q_lens"]), workload["q_lens"][0], workload["kv_lens"][0]
    past = kv_len - q_len
    rng = np.random.default_rng(0)
    session = make_session(num_heads, num_kv_heads, dim, threads)

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    new = {name: normal(batch, q_len, heads * dim) for name, heads in (("q", num_heads), ("k", num_kv_heads), ("v", num_kv_heads))}
    caches = {}
    binding = session.io_binding()
    for name, value in new.items():
        binding.bind_cpu_input(name, value)
    for part in ("k", "v"):
        cache = np.zeros((batch, num_kv_heads, kv_len, dim), np.float32)
        cache[:, :, :past] = normal(batch, num_kv_heads, past, dim)
        caches[part] = cache.copy()
        shared = onnxruntime.OrtValue.ortvalue_from_numpy(cache)
        binding.bind_ortvalue_input(f"past_{part}", shared)
        binding.bind_ortvalue_output(f"present_{part}", shared)
    binding.bind_cpu_input("last", np.full(batch, kv_len - 1, np.int32))
    binding.bind_cpu_input("total", np.array([kv_len], np.int32))
    out = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros((batch, q_len, num_heads * dim), np.float32))
    binding.bind_ortvalue_output("out", out)
    session.run_with_iobinding(binding)

    got = out.numpy()[0, -1, :dim].astype(np.float64)
    appended = {part: new[part][0].reshape(q_len, num_kv_heads, dim)[:, 0] for part in ("k", "v")}
    keys, values = (np.concatenate([caches[part][0, 0, :past], appended[part]]).astype(np.float64) for part in ("k", "v"))
    scores = keys @ new["q"][0, -1, :dim].astype(np.float64) / np.sqrt(dim)
    weights = np.exp(scores - scores.max())
    truth = weights @ values / weights.sum()

    times, begun = [], time.perf_counter()
    while len(times) < MIN_REPS or (len(times) < MAX_REPS and time.perf_counter() - begun < SECONDS):
        started = time.perf_counter()
        session.run_with_iobinding(binding)
        times.append((time.perf_counter() - started) * 1e3)
    rel_err = float(np.linalg.norm(got - truth) / np.linalg.norm(truth))
    return {
        "workload": workload["name"],
        "peer": "onnxruntime-gqa",
        "version": onnxruntime.__version__,
        "threads": threads,
        "ms": float(np.median(times)),
        "rel_err": rel_err,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", metavar="OUT", help="write the results here too")
    options = parser.parse_args()
    workloads = json.loads((pathlib.Path(__file__).parent / "cpu-workloads.json").read_text())
    results = []
    for workload in workloads:
        results.append(measure(workload, options.threads))
        print(results[-1], flush=True)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps({"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

#!/usr/bin/env bash
# Runs the suite, a sanitizer sample and the measurements of this bundle. Needs an NVIDIA driver and bash, no toolkit.
set -u

usage() {
  cat <<'TEXT'
usage: ./run.sh suite|sanitizer|replay|bench|model|all [options]

  suite      every test binary of attn-cuda, all at once
  sanitizer  a sample over every kernel under compute-sanitizer: memcheck, racecheck, synccheck, initcheck
  replay     attn replay on the GPU: 200 random problems against the oracle, every spoilt file refused
  bench      attn bench on the workloads of bench/, charts included
  model      a real model's greedy tokens and logits with attention on the GPU (bundles made with --with-model)
  all        suite, sanitizer, replay, bench, and model where there is one

  --out DIR        where logs and JSON go (default: results)
  --limit SECONDS  most that one step may take (default: 540)
  --filter TEXT    suite and sanitizer: only tests with this in their name; bench: only such workloads
  --peer-json FILE bench: results of peers, compared with ours
  --ceilings FILE  bench: a result file whose ceilings are taken, where ours lack one

DIR/summary.json lists every step with its exit code and seconds; the exit code is 1 where one failed.
TEXT
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
task=${1:-}
case $task in
  suite | sanitizer | replay | bench | model | all) shift ;;
  -h | --help) usage && exit 0 ;;
  *) usage >&2 && exit 2 ;;
esac
out=results limit=540 filter= peers= ceilings=
while [ $# -gt 0 ]; do
  if [ $# -lt 2 ]; then echo "run.sh: $1 needs a value" >&2 && exit 2; fi
  case $1 in
    --out) out=$2 ;;
    --limit) limit=$2 ;;
    --filter) filter=$2 ;;
    --peer-json) peers=$2 ;;
    --ceilings) ceilings=$2 ;;
    *) echo "run.sh: unknown option $1" >&2 && exit 2 ;;
  esac
  shift 2
done
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
rows=$out/steps.jsonl
: >"$rows"

# step NAME COMMAND...: runs it with a limit, its output in NAME.log; one row of the summary.
step() {
  local name=$1 begin=$SECONDS code
  shift
  timeout "$limit" "$@" >"$out/$name.log" 2>&1
  code=$?
  local seconds=$((SECONDS - begin)) word=ok
  case $code in
    0) ;;
    124) word="FAILED (more than $limit s)" ;;
    *) word="FAILED ($code)" ;;
  esac
  printf '{"step": "%s", "exit_code": %d, "seconds": %d}\n' "$name" "$code" "$seconds" >>"$rows"
  echo "$name: $word, $seconds s"
  if [ $code -ne 0 ]; then tail -n 15 "$out/$name.log" | sed 's/^/    /'; fi
  return $code
}

# skip NAME WHY: a row for what could not be run here.
skip() {
  printf '{"step": "%s", "skipped": "%s"}\n' "$1" "$2" >>"$rows"
  echo "$1: skipped, $2"
}

# fail NAME WHY: a row for what should have been run and could not be.
fail() {
  printf '{"step": "%s", "exit_code": 1, "seconds": 0, "why": "%s"}\n' "$1" "$2" >>"$rows"
  echo "$1: FAILED, $2"
}

# ran_a_test LOG...: whether a test ran, by the last lines of test binaries.
ran_a_test() {
  grep -h '^test result:' "$@" 2>/dev/null | grep -qv ' 0 passed; 0 failed;'
}

run_suite() {
  export ATTN_REQUIRE_GPU=1 ATTN_REPORT_DIR=$out
  local binary logs=()
  for binary in "$here"/tests/*; do
    logs+=("$out/suite-$(basename "$binary").log")
    step "suite-$(basename "$binary")" "$binary" --nocapture ${filter:+"$filter"} &
  done
  wait
  ran_a_test "${logs[@]}" || fail suite "no test ran${filter:+: --filter matches none}"
}

find_sanitizer() {
  command -v compute-sanitizer && return
  local path
  for path in /usr/local/cuda*/bin/compute-sanitizer /usr/local/cuda*/compute-sanitizer/compute-sanitizer; do
    if [ -x "$path" ]; then echo "$path" && return; fi
  done
  return 1
}

run_sanitizer() {
  local sanitizer tool barriers
  local tests=${filter:-every_kernel::}
  if ! sanitizer=$(find_sanitizer); then
    skip sanitizer "no compute-sanitizer on PATH or under /usr/local/cuda*"
    return
  fi
  export ATTN_REQUIRE_GPU=1
  for tool in memcheck racecheck synccheck initcheck; do
    # Tools that track barriers in shared memory are told how many there may be over all blocks.
    case $tool in
      racecheck | synccheck) barriers="--num-cuda-barriers 65536" ;;
      *) barriers= ;;
    esac
    # shellcheck disable=SC2086
    step "sanitizer-$tool" "$sanitizer" --tool "$tool" --error-exitcode 99 $barriers \
      "$here/tests/gpu" "$tests" --nocapture --test-threads 1
    ran_a_test "$out/sanitizer-$tool.log" || fail "sanitizer-$tool-tests" "no test ran: none is named like the filter"
  done
}

run_replay() {
  export ATTN_TEST_PROGRAM=$here/bin/attn ATTN_TEST_BACKEND=cuda ATTN_TEST_DIR=$out/replay-files
  step replay "$here/replay/attn" replay_random:: refusals:: --nocapture
  # Thousands of small files that nobody reads again.
  if grep -q "test result: ok" "$out/replay.log"; then rm -rf "$ATTN_TEST_DIR"; fi
}

run_bench() {
  step bench "$here/bin/attn" bench --attention-backend cuda --workloads "$here/bench/workloads.json" \
    --workloads "$here/bench/gpu-moves.json" --json "$out/bench.json" ${filter:+--filter "$filter"} \
    ${peers:+--peer-json "$peers"} ${ceilings:+--ceilings "$ceilings"}
  if [ -s "$out/bench.json" ]; then
    step plot "$here/bin/attn" bench --plot "$out/bench.json" --out "$out/bench.svg"
  fi
}

# The model travels in parts: they are joined once, and the hash is checked.
join_model() {
  local name
  name=$(cat "$here/model/name") || return 1
  if [ ! -s "$here/model/$name" ]; then cat "$here/model/$name".part* >"$here/model/$name" || return 1; fi
  (cd "$here/model" && sha256sum --quiet --check sha256) || return 1
  echo "$here/model/$name"
}

run_model() {
  local model backend
  if [ ! -e "$here/model/name" ]; then
    skip model "the bundle was made without --with-model"
    return
  fi
  if ! model=$(join_model); then
    fail model "its parts are missing or damaged"
    return
  fi
  step model-logits "$here/bin/attn" generate --model "$model" --cases "$here/model/cases.json" \
    --attention-backend cuda --min-margin 0.1 --logits-like cpu --max-logit-error 0.02
  for backend in cuda cuda,cpu cpu,cuda; do
    step "model-${backend/,/-}" "$here/bin/attn" generate --model "$model" --cases "$here/model/cases.json" \
      --attention-backend "$backend" --min-margin 0.1
  done
}

step doctor "$here/bin/attn" doctor
case $task in
  suite) run_suite ;;
  sanitizer) run_sanitizer ;;
  replay) run_replay ;;
  bench) run_bench ;;
  model) run_model ;;
  all)
    run_suite
    run_sanitizer
    run_replay
    run_bench
    if [ -e "$here/model/name" ]; then run_model; fi
    ;;
esac

gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1)
{
  printf '{"task": "%s", "gpu_and_driver": "%s", "bundle": ' "$task" "$gpu"
  cat "$here/bundle.json"
  printf ', "steps": [\n%s\n]}\n' "$(sed '$!s/$/,/' "$rows")"
} >"$out/summary.json"
rm -f "$rows"
if grep -q '"exit_code": [^0]' "$out/summary.json"; then exit 1; fi

#!/usr/bin/env bash
# Everything that needs a GPU. Usage: tools/gpu.sh OUT_FOLDER [PART]
#   tests   the GPU tests, and the reasons of those that were skipped
#   bench   the rows of docs/numbers/h200.md, most important first (about 3 minutes on an H200)
#   start   start-up with every graph captured, the second time, when kernels are cached (about 1 minute)
#   blocks  block drafters, and a tree of 16 drafts (about 90 s)
#   quant   weights of 8 and 4 bits: rows, a sweep over the tiles of their kernels, their tests (at most 5 minutes)
#   quant_rows  the first of these, to be repeated with the tiles that the sweep found (about 1 minute)
#   sampling  every second request with every parameter, against greedy in the same run (about 1 minute)
#   two     what two GPUs are asked first, 9 minutes at most: the 70B shape of tp, the shared experts of dp, tp_tests
#   tp      two GPUs that share a model: a 70B and the 8B shape, with what the GPUs exchange (8 minutes at most)
#   tp_tests  the GPU tests of tensor parallelism, the telling ones first (4 minutes at most; what hangs for one says so)
#   dp      two engines on two GPUs that share their experts: speed, 2,000 mixed steps, their tests (8 minutes at most)
#   adaptive  no drafts, 1, 3 and 5 of them, and adaptive, at 1 to 256 requests at a time (about 4 minutes)
#   adaptive_high  of it what is close: no drafts, 1 of them and adaptive, at 128 and 256 requests (about 105 s)
#   compare  SmolLM2 with each drafter that is shipped, in turns: tokens per step and per second (about 4 minutes)
#   soak    mixed traffic, memory and stalls watched: all that fits into 560 s (MAX_SECONDS), the start included, or
#           MINUTES; two runs give more than ten minutes where no call may take longer than 600 s
#   cache   keys and values of 8 bits against 16, at 512 and 8,192 tokens of context (about 3 minutes)
#   windows  layers that let go of what is behind their window, kernels beside pages of others: tests (about 2 minutes)
#   moe     mixtures of experts: a sweep over tiles, Qwen3-30B-A3B's shape plain and with drafts, tests (about 4 minutes)
#   kernels  128 rows, the small kernels (about 1 minute)
#   stream  a pass as one kernel: its tests, then the sweep that says where it is faster (about 1 minute)
#   linears  linears of 65 to 256 tokens: tests, a sweep that ends with entries for MEASURED, EAGLE-3 at 32 rows (4 minutes)
#   batches  8 and 32 rows: linears of 16 to 64 tokens and attention, tests and sweeps that end with entries for MEASURED,
#           then EAGLE-3 and a draft model with what the sweeps found, and EAGLE-3 without (5 minutes)
#   all     bench, start, blocks, quant, sampling, tests
# What has a time limit is interrupted at it, and keeps what it has written: numbers after each batch size and load.
# Copy the JSON files to docs/numbers, then `draftloop bench report docs/numbers` writes the page.
set -uo pipefail
out="${1:?folder for the results}"
part="${2:-all}"
python="${PYTHON:-python3}"
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"
failed=0
mkdir -p "$out"

limited() { # seconds, command: interrupted after them, ended 15 s later
  timeout --signal INT --kill-after 15 "$@"
}

gpu_tests() { # name of the output, seconds at most, then arguments of pytest
  local name="$1" seconds="$2"
  shift 2
  limited "$seconds" "$python" -m pytest -m gpu -v --tb=short -rs --durations=10 -p no:cacheprovider "$@" 2>&1 |
    tee "$out/$name.txt" || failed=1
}

latency() { # name, then the arguments of `draftloop bench latency`; `bench_with`: a module that runs it in its own way
  local name="$1" begin="$SECONDS"
  shift
  echo "== $name"
  COLUMNS=140 limited "${limit:-600}" "$python" -m ${bench_with:-draftloop bench} latency "$@" \
    --load-format dummy --prompt-tokens "${prompt_tokens:-512}" \
    --out "$out/$name.json" 2>"$out/$name.log" || { failed=1; tail -n 20 "$out/$name.log"; }
  echo "== $name took $((SECONDS - begin)) s"
}

drafter() { # method, model, drafts, acceptance length
  printf '{"method":"%s","model":"%s","num_speculative_tokens":%s,"rejection_sample_method":"synthetic",' "$1" "$2" "$3"
  printf '"synthetic_acceptance_length":%s}' "$4"
}

rows() { # the largest batch, the sizes that are measured, which are all that is captured, and the longest context
  echo --max-num-seqs "$1" --max-model-len "${3:-2048}" --batch-sizes "$2" --cudagraph-capture-sizes "$2"
}

eagle3="$(drafter eagle3 eagle3-llama-3.1-8b 5 3.5)"

bench() {
  latency eagle3-8b llama-3.1-8b $(rows 32 1,8,32) -sc "$eagle3"
  latency none-8b llama-3.1-8b $(rows 32 1,8,32)
  latency draft-model-8b-1b llama-3.1-8b $(rows 32 1,8,32) -sc "$(drafter draft_model llama-3.2-1b 4 3.0)"
  latency eagle3-smollm2 smollm2-135m-shape $(rows 1 1) -sc "$(drafter eagle3 eagle3-smollm2-135m 5 3.5)"
  latency eagle3-8b-b128 llama-3.1-8b $(rows 128 128) -sc "$eagle3" --repeats 2
}

start() {
  for time in first second; do # the second overwrites the first
    echo "== $time start"
    latency eagle3-8b-start llama-3.1-8b --max-num-seqs 32 --max-model-len 2048 --batch-sizes 1 --repeats 1 -sc "$eagle3"
  done
}

tree="[[0],[1],[2],[3],[0,0],[0,1],[0,2],[1,0],[1,1],[2,0],[0,0,0],[0,0,1],[0,1,0],[1,0,0],[0,0,0,0],[0,0,0,1]]"
eagle3_tree="$(drafter eagle3 eagle3-llama-3.1-8b 16 3.5)"
eagle3_tree="${eagle3_tree%\}},\"speculative_token_tree\":$tree}"

blocks() {
  latency eagle3-tree-8b llama-3.1-8b $(rows 32 1,8,32) -sc "$eagle3_tree"
  latency dflash-8b llama-3.1-8b $(rows 32 1,8,32 4096) -sc "$(drafter dflash dflash-llama-3.1-8b 15 3.5)"
  latency dspark-8b llama-3.1-8b $(rows 32 1,8,32) -sc "$(drafter dspark dspark-llama-3.1-8b 7 3.5)"
}

quant() { # what the sweep finds fastest for few tokens, in the engine at once
  local int4="$out/sweep/int4.json" fp8="$out/sweep/fp8.json"
  sweep quantised int4 --formats int4 --regimes few --seconds 60
  sweep quantised fp8 --formats fp8 --regimes few --seconds 40
  quant_rows
  gpu_tests gpu-tests-quant 90 -n "${WORKERS:-12}" \
    tests/parity/test_quantized_linears.py tests/parity/test_kernels.py tests/parity/test_sweeps.py
}

quant_rows() {
  bench_with="${int4:+draftloop.bench.sweep_quantised --best $int4 --}" \
    latency none-8b-int4 llama-3.1-8b $(rows 32 1,8,32) --quantization int4
  bench_with="${fp8:+draftloop.bench.sweep_quantised --best $fp8 --}" \
    latency none-8b-fp8 llama-3.1-8b $(rows 32 1,8,32) --quantization fp8
  bench_with="${fp8:+draftloop.bench.sweep_quantised --best $fp8 --}" \
    latency eagle3-8b-fp8 llama-3.1-8b $(rows 32 1,8,32) -sc "$eagle3" --quantization fp8
}

sweep() { # module, name of the file, then its other arguments; at the end the entries for `MEASURED`
  local module="draftloop.bench.sweep_$1" file="$out/sweep/$2.json"
  shift 2
  mkdir -p "$out/sweep"
  timeout 120 "$python" -m "$module" --out "$file" "$@" || failed=1
  "$python" -m "$module" --entries "$file" || failed=1
}

stream() { # a pass that differs from the one before fails: MEASURED stays empty then
  gpu_tests gpu-tests-stream 100 tests/parity/test_streamed_pass.py
  timeout 60 "$python" -m draftloop.bench.sweep_streamed --out "$out/streamed.json" --seconds 40 || failed=1
}

sampling() { # drafts are drawn, and accepted by chance: what an iteration takes does not depend on how many
  local drawn='{"method":"eagle3","model":"eagle3-llama-3.1-8b","num_speculative_tokens":5}'
  latency sampling-half-8b llama-3.1-8b $(rows 32 1,8,32) -sc "$drawn" --sampling-mix all-parameters-half
  latency sampling-all-8b llama-3.1-8b $(rows 32 1,32) -sc "$drawn" --sampling-mix sampled --repeats 2
}

tp_70b() { # needs two GPUs, as all up to `two`; none is part of all
  limit=200 latency eagle3-70b-tp2 llama-3.1-70b $(rows 32 1,32) -sc "$(drafter eagle3 eagle3-llama-3.1-70b 5 3.5)" \
    -tp 2 --repeats 2
}

tp() {
  tp_70b
  local limit=80
  latency eagle3-8b-tp2 llama-3.1-8b $(rows 32 1,32) -sc "$eagle3" -tp 2
  latency none-8b-tp2 llama-3.1-8b $(rows 32 1,32) -tp 2
  latency eagle3-8b-tp2-draft1 llama-3.1-8b $(rows 32 1,32) -sc "${eagle3%\}},\"draft_tensor_parallel_size\":1}" -tp 2
}

tp_tests() {
  gpu_tests gpu-tests-tp "${1:-240}" tests/distributed/test_tensor_parallel.py tests/distributed/test_group.py
}

engines() { # name, seconds, then the arguments of `draftloop bench engines`
  local name="$1" seconds="$2" begin="$SECONDS"
  shift 2
  echo "== $name"
  limited "$seconds" "$python" -m draftloop bench engines "$@" --load-format dummy --max-model-len 2048 -dp 2 \
    --out "$out/$name.json" 2>"$out/$name.log" || { failed=1; tail -n 20 "$out/$name.log"; }
  echo "== $name took $((SECONDS - begin)) s"
}

dp_engines() { # engines that share experts, and one alone; or with `plain` two that share nothing
  local moe=(qwen3-30b-a3b -sc "$(drafter eagle3 eagle3-qwen3-30b-a3b 5 3.5)" --max-num-seqs 32
    --cudagraph-capture-sizes 1,8,32 --prompt-tokens 512 --output-tokens 128 --steady-steps 300)
  if [ "${1:-}" = plain ]; then
    engines dp2-qwen3-30b-a3b 120 "${moe[@]}" --mixed-steps 0 --no-compare-with-one
  else
    engines ep2-qwen3-30b-a3b 220 "${moe[@]}" --enable-expert-parallel --mixed-steps 2000
  fi
}

dp() {
  dp_engines
  gpu_tests gpu-tests-dp 120 tests/distributed/test_lockstep.py
  dp_engines plain
}

two() {
  tp_70b
  dp_engines
  tp_tests 120
}

throughput() { # name, then the arguments of `draftloop bench throughput`
  local name="$1"
  shift
  echo "== $name"
  COLUMNS=140 "$python" -m draftloop bench throughput llama-3.1-8b "$@" --load-format dummy --concurrency "${loads:-1,8,32,128,256}" \
    --prompt-tokens 128 --output-tokens 128 --repeats 1 --max-num-seqs 256 --max-model-len 2048 \
    --cudagraph-capture-sizes 1,8,32,128,256 --out "$out/$name.json" 2>"$out/$name.log" ||
    { failed=1; tail -n 20 "$out/$name.log"; }
}

adaptive() { # of five drafts three tokens a step: each draft stands with the same chance, whatever their number
  local rates=(0.709 0.5027 0.3564 0.2527 0.1792) count given
  throughput load-none
  for count in ${counts:-1 3 5}; do
    given="$(IFS=,; echo "${rates[*]:0:count}")"
    throughput "load-k$count" -sc "$(load "$count" "$given")}"
  done
  throughput load-adaptive -sc "$(load 5 "$(IFS=,; echo "${rates[*]}")"),\"adaptive\":true}"
}

adaptive_high() {
  local loads=128,256 counts=1
  adaptive
}

load() { # drafts, shares of steps that accept each
  printf '{"method":"eagle3","model":"eagle3-llama-3.1-8b","num_speculative_tokens":%s,' "$1"
  printf '"rejection_sample_method":"synthetic","synthetic_acceptance_rates":[%s]' "$2"
}

compare() { # real weights: from the hub or their package
  COLUMNS=140 "$python" -m draftloop compare --num-prompts 80 --max-tokens 256 --max-num-seqs 1 --repeats 1 \
    --drafters none,ngram:4,smollm2-135m-eagle3:3,smollm2-135m-eagle3:5,smollm2-135m-draft:4,smollm2-135m-dflash:7 \
    --out "$out/compare-smollm2.json" || failed=1
}

soak() { # what it has is written every minute, so that a call that is cut off leaves numbers too
  "$python" -m draftloop bench soak llama-3.1-8b --load-format dummy --max-num-seqs 32 --max-model-len 2048 \
    -sc "$eagle3" --minutes "${MINUTES:-60}" --max-seconds "${MAX_SECONDS:-560}" \
    --out "$out/soak-8b-$(date +%H%M).json" || failed=1
}

cache() { # plain decoding and drafts; 32 rows of 8,192 tokens read 34 GB of keys and values, or 17
  local prompt_tokens dtype
  for dtype in auto fp8; do
    latency "none-8b-cache-$dtype" llama-3.1-8b $(rows 32 1,8,32) --kv-cache-dtype "$dtype"
    latency "eagle3-8b-cache-$dtype" llama-3.1-8b $(rows 32 1,8,32) -sc "$eagle3" --kv-cache-dtype "$dtype"
    prompt_tokens=8192
    latency "none-8b-8k-cache-$dtype" llama-3.1-8b $(rows 32 1,32 12288) --kv-cache-dtype "$dtype" --repeats 2
    unset prompt_tokens
  done
}

windows() {
  gpu_tests gpu-tests-windows 240 -n "${WORKERS:-12}" tests/e2e/test_windows.py tests/e2e/test_architectures.py \
    tests/parity/test_attention.py tests/parity/test_tree_kernels.py tests/parity/test_row_state.py \
    tests/unit/test_virtual_memory.py
}

moe() { # mixtures of experts: tiles, one model plain and with drafts, tests
  local drafts
  drafts="$(drafter eagle3 eagle3-qwen3-30b-a3b 5 3.5)"
  sweep experts experts --seconds 60
  latency none-qwen3-30b-a3b qwen3-30b-a3b $(rows 32 1,8,32)
  latency eagle3-qwen3-30b-a3b qwen3-30b-a3b $(rows 32 1,8,32) -sc "$drafts"
  gpu_tests gpu-tests-moe 90 tests/parity/test_moe_kernels.py
}

kernels() { # 128 rows, where small kernels count too; what stands between the linears
  latency eagle3-8b-b128 llama-3.1-8b $(rows 128 128) -sc "$eagle3" --repeats 2
  "$python" -m draftloop.bench.kernels --small | tee "$out/small-kernels.txt" || failed=1
}

linears() {
  gpu_tests gpu-tests-linears 60 tests/parity/test_linear_multicast.py tests/parity/test_linear_wide.py
  sweep wide wide --tokens 192 160 128 96 256 --layers gate_up down qkv o --candidates 6
  latency eagle3-8b-b32 llama-3.1-8b $(rows 32 32) -sc "$eagle3"
  latency draft-model-8b-1b-b32 llama-3.1-8b $(rows 32 32) -sc "$(drafter draft_model llama-3.2-1b 4 3.0)"
}

batches() { # verification at 8 rows, a draft model's steps at 32, a draft head's, then what else has so many tokens
  local one_b=1b.gate_up,1b.down,1b.qkv,1b.o eight_b=gate_up,down,qkv,o limit=75 bench_with
  gpu_tests gpu-tests-batches 60 -n "${WORKERS:-12}" -k small_layers tests/parity/test_linear_multicast.py
  sweep wide few-linears --seconds 95 --candidates 8 --cells \
    48:$eight_b 32:$one_b 32:head.qkv,$eight_b 64:$one_b 48:head.qkv 16:$one_b 32:head.lm_head 48:head.fc
  sweep attention attention --seconds 35
  bench_with="draftloop.bench.best_tiles $(found --linears few-linears) --"
  latency eagle3-8b-best llama-3.1-8b $(rows 32 8,32) -sc "$eagle3" --repeats 2
  bench_with="" latency eagle3-8b-today llama-3.1-8b $(rows 32 8,32) -sc "$eagle3" --repeats 2
  latency draft-model-8b-1b-best llama-3.1-8b $(rows 32 8,32) -sc "$(drafter draft_model llama-3.2-1b 4 3.0)" --repeats 2
}

found() { # option, name of a sweep's file: the option with the file, where the sweep came so far
  [ -f "$out/sweep/$2.json" ] && echo "$1" "$out/sweep/$2.json"
}

tests() {
  local whole=(tests/train tests/unit/test_bench_latency.py tests/e2e/test_memory_budget.py) # these take all of the GPU's memory
  local options=(-m gpu -v --tb=short -rs -p no:cacheprovider -p no:benchmark)
  "$python" -m pytest "${options[@]}" -n "${WORKERS:-12}" --ignore tests/server --ignore tests/architecture \
    "${whole[@]/#/--ignore=}" tests 2>&1 | tee "$out/gpu-tests.txt" || failed=1
  "$python" -m pytest "${options[@]}" "${whole[@]}" 2>&1 | tee "$out/gpu-tests-whole.txt" || failed=1
}

case "$part" in
  tests | bench | start | blocks | quant | quant_rows | sampling | two | tp | tp_tests | dp | adaptive | adaptive_high | compare | soak | cache | windows | moe | kernels | stream | linears | batches) "$part" ;;
  all)
    bench
    start
    blocks
    quant
    sampling
    tests
    ;;
  *)
    echo "unknown part '$part'; known: tests, bench, start, blocks, quant, quant_rows, sampling, two, tp, tp_tests, dp, adaptive, adaptive_high, compare, soak, cache, windows, moe, kernels, stream, linears, batches, all" >&2
    exit 2
    ;;
esac
exit "$failed"

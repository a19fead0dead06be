#!/usr/bin/env bash
# compute-sanitizer (memcheck, racecheck) over the parity tests of every kernel, small shapes.
#   tools/sanitize.sh OUT_FOLDER [SECONDS_FOR_EACH] [FILE...]
# SANITIZER: another compute-sanitizer. Of 2025.3 (CUDA 13.0) racecheck fails itself when it is told a kernel's name; of
# 2026.4 (13.5, package nvidia-cuda-sanitizer-api) it does not.
# All files run side by side; one line each at the end, the logs are in the folder.
set -uo pipefail
out="${1:?folder for the logs}"
limit="${2:-300}"
shift $(($# < 2 ? $# : 2))
python="${PYTHON:-python3}"
sanitizer="${SANITIZER:-compute-sanitizer}"
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$out"
files=("$@")
if [ ${#files[@]} = 0 ]; then
  for file in tests/parity/test_*.py; do
    case "$file" in # whole models and engines, another library's kernels, and kernels in C
      */test_models* | */test_flashinfer.py | */test_native*) ;;
      *) files+=("$file") ;;
    esac
  done
fi
small="not real_shapes and not vocabular and not whole and not 8b and not model_shapes and not as_large and not text"
# layers as large as Mixtral's take the sanitizer longer than there is
small+=" and not layers_on_a_gpu"
# one pass of blocks that wait for each other takes it seconds
small+=" and not each_time and not take_turns and not what_serves"
small+=" and not flashinfer and not sdpa and not _torch and not in_a_graph and not replays and not many_tokens"

check() { # tool, file
  local name options=() caching=1 # else a read past the end of a tensor may still hit the allocator's block
  name="$1-$(basename "$2" .py)"
  [ "$1" != memcheck ] || options=(--report-api-errors no) # bindings ask for functions that a driver may lack
  case "$2" in # torch's own kernels around these take the time that there is; a capture cannot ask for memory
    */test_streamed_pass.py) caching=0 options+=(--kernel-name kns=streamed_pass) ;;
    */test_linear_multicast.py) options+=(--kernel-name kns=multicast_linear) ;;
    */test_cluster_attention.py) options+=(--kernel-name kns=cluster_attention) ;;
  esac
  PYTORCH_NO_CUDA_MEMORY_CACHING="$caching" \
    timeout "$limit" "$sanitizer" --tool "$1" "${options[@]}" --error-exitcode 9 --print-limit 5 \
    "$python" -m pytest "$2" -m gpu -k "$small" -p no:cacheprovider -p no:xdist >"$out/$name.log" 2>&1
  echo "$? $name: $(grep -E ' (passed|failed)' "$out/$name.log" | tail -n 1); $(grep 'ERROR SUMMARY\|RACECHECK SUMMARY' "$out/$name.log" | tail -n 1)" \
    >"$out/$name.txt"
}

for file in "${files[@]}"; do
  for tool in memcheck racecheck; do
    check "$tool" "$file" &
  done
done
wait
cat "$out"/*.txt | tee "$out/summary.log"
! grep -qv '^0 ' "$out/summary.log"

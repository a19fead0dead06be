#!/usr/bin/env bash
# Everything that needs a GPU, most important first: the GPU tests, then the latency rows.
# Usage: tools/gpu.sh OUT_FOLDER [tests|bench|all]
set -uo pipefail
out="$1"
what="${2:-all}"
python="${PYTHON:-python3}"
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"
failed=0

bench() { # name, then the arguments of `draftloop bench latency`
  local name="$1"
  shift
  echo "== $name"
  "$python" -m draftloop bench latency "$@" --load-format dummy --prompt-tokens 512 --repeats 3 --out "$out/$name.json" \
    2>"$out/$name.log" || { failed=1; tail -n 20 "$out/$name.log"; }
}

if [ "$what" != tests ]; then
  synthetic='"rejection_sample_method":"synthetic","synthetic_acceptance_length":3.0'
  bench none-8b llama-3.1-8b --max-num-seqs 32 --max-model-len 2048 --batch-sizes 1,8,32
  bench draft-model-8b-1b llama-3.1-8b --max-num-seqs 32 --max-model-len 2048 --batch-sizes 1,8,32 \
    -sc "{\"method\":\"draft_model\",\"model\":\"llama-3.2-1b\",\"num_speculative_tokens\":4,$synthetic}"
  synthetic='"rejection_sample_method":"synthetic","synthetic_acceptance_length":3.5'
  bench eagle3-8b llama-3.1-8b --max-num-seqs 32 --max-model-len 2048 --batch-sizes 1,8,32 \
    -sc "{\"method\":\"eagle3\",\"model\":\"eagle3-llama-3.1-8b\",\"num_speculative_tokens\":5,$synthetic}"
  bench dflash-8b llama-3.1-8b --max-num-seqs 32 --max-model-len 2048 --batch-sizes 1,8,32 \
    -sc "{\"method\":\"dflash\",\"model\":\"dflash-llama-3.1-8b\",\"num_speculative_tokens\":15,$synthetic}"
  bench dspark-8b llama-3.1-8b --max-num-seqs 32 --max-model-len 2048 --batch-sizes 1,8,32 \
    -sc "{\"method\":\"dspark\",\"model\":\"dspark-llama-3.1-8b\",\"num_speculative_tokens\":7,$synthetic}"
fi
if [ "$what" != bench ]; then
  "$python" -m pytest -m gpu -n 8 -p no:cacheprovider -p no:benchmark tests 2>&1 | tee "$out/gpu-tests.txt" || failed=1
fi
exit "$failed"

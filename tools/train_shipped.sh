#!/usr/bin/env bash
# Makes the drafters that are shipped for SmolLM2-135M, from nothing, on the GPUs there are.
#   tools/train_shipped.sh OUT_FOLDER record|eagle3|draft|dspark|all
# Each part goes on where it was left, so a part that was cut off is simply run again. How the shipped
# ones were made, and what they reached: docs/numbers/shipped-drafters.md.
set -euo pipefail
out=${1:?folder for recording and drafters}
part=${2:-all}
python=${PYTHON:-python}

train() { # name, method, further options
  local name=$1 method=$2
  shift 2
  "$python" -m draftloop train --target smollm2-135m --method "$method" --out "$out/$name" \
    --recording "$out/recording" --record-tokens 0 --evaluate-every 400 --checkpoint-every 1000 --seed 0 "$@"
}

record() { # four processes on every GPU: what the host does for a row takes longer than the row
  local gpus seed
  gpus=$(nvidia-smi --list-gpus | wc -l)
  for ((seed = 0; seed < 4 * gpus; seed++)); do
    CUDA_VISIBLE_DEVICES=$((seed % gpus)) "$python" -m draftloop train --target smollm2-135m --out "$out/$seed" \
      --recording "$out/recording" --record-only --record-minutes "${RECORD_MINUTES:-1.6}" --seed "$seed" \
      --max-num-seqs 256 --gpu-memory-utilization 0.2 &
  done
  wait
}

eagle3() { train eagle3 eagle3 --draft-vocab-size 8192 --no-store-lm-head --acceptance-loss 1 "$@"; }
draft() {
  train draft draft_model --hidden-size 128 --intermediate-size 512 --num-layers 4 --learning-rate 2e-3 \
    --store-bits 8 "$@"
}
dspark() {
  train dspark dspark --num-layers 2 --markov-rank 24 --draft-vocab-size 8192 --no-store-lm-head \
    --learning-rate 1.5e-3 --teacher-temperature 0.3 --store-bits 8 "$@"
}

case $part in
  record | eagle3 | draft | dspark) "$part" "${@:3}" ;;
  all)
    for part in record eagle3 draft dspark; do "$0" "$out" "$part"; done
    ;;
  *)
    echo "unknown part '$part'; known: record, eagle3, draft, dspark, all" >&2
    exit 2
    ;;
esac

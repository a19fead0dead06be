#!/usr/bin/env bash
# Makes the drafters that are shipped for SmolLM2-135M, from nothing, on the GPUs there are.
#   tools/train_shipped.sh OUT_FOLDER record|eagle3|draft|dflash|all
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

record() { # one process on every GPU; two H200 make 11.7 M tokens in this time
  local gpus seed
  gpus=$(nvidia-smi --list-gpus | wc -l)
  for ((seed = 0; seed < gpus; seed++)); do
    CUDA_VISIBLE_DEVICES=$seed "$python" -m draftloop train --target smollm2-135m --out "$out/$seed" \
      --recording "$out/recording" --record-only --record-minutes "$((5 / gpus)).3" --seed "$seed" &
  done
  wait
}

eagle3() { train eagle3 eagle3 --draft-vocab-size 8192 --no-store-lm-head --acceptance-loss 1 --steps 2393; }
draft() {
  train draft draft_model --hidden-size 128 --intermediate-size 512 --num-layers 4 --learning-rate 2e-3 \
    --store-bits 8 --steps 2799
}
dflash() {
  train dflash dflash --num-layers 2 --draft-vocab-size 16384 --no-store-lm-head --train-mask-embedding \
    --learning-rate 1.5e-3 --store-bits 8 --steps 3430
}

case $part in
  record | eagle3 | draft | dflash) "$part" ;;
  all)
    for part in record eagle3 draft dflash; do "$0" "$out" "$part"; done
    ;;
  *)
    echo "unknown part '$part'; known: record, eagle3, draft, dflash, all" >&2
    exit 2
    ;;
esac

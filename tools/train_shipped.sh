#!/bin/sh
# Makes the drafters that are shipped for SmolLM2-135M, from nothing, on one GPU.
#   tools/train_shipped.sh OUT_FOLDER record|eagle3|all
# Each part goes on where it was left, so a part that was cut off is simply run again.
set -eu
out=${1:?folder for recording and drafters}
part=${2:-all}
python=${PYTHON:-python}
target=smollm2-135m
recording="$out/recording"

train() {  # method, further options
    method=$1
    shift
    "$python" -m draftloop train --target "$target" --method "$method" --out "$out/$method" \
        --recording "$recording" --record-tokens 0 --row-tokens 1024 --batch-tokens 32768 --seed 0 "$@"
}

record() {
    "$python" -m draftloop train --target "$target" --out "$out" --recording "$recording" --record-only \
        --record-tokens 24000000 --record-minutes 8 --answer-tokens 384 --greedy-share 0.5 --row-tokens 1024 --seed 0
}

case $part in
    record) record ;;
    eagle3) train eagle3 --steps 2400 --learning-rate 1e-3 --ttt-steps 7 ;;
    all)
        "$0" "$out" record
        "$0" "$out" eagle3
        ;;
    *)
        echo "unknown part '$part'; known: record, eagle3, all" >&2
        exit 2
        ;;
esac

#!/bin/sh
# Makes the drafters that are shipped for SmolLM2-135M, from nothing, on one GPU.
#   tools/train_shipped.sh OUT_FOLDER record|eagle3|draft|dflash|all
# Each part goes on where it was left, so a part that was cut off is simply run again. How the shipped
# ones were made, and what they reached: docs/numbers/shipped-drafters.md.
set -eu
out=${1:?folder for recording and drafters}
part=${2:-all}
python=${PYTHON:-python}
target=smollm2-135m
recording="$out/recording"

train() {  # name, method, further options
    name=$1 method=$2
    shift 2
    "$python" -m draftloop train --target "$target" --method "$method" --out "$out/$name" \
        --recording "$recording" --record-tokens 0 --evaluate-every 400 --checkpoint-every 1000 --seed 0 "$@"
}

record() {
    "$python" -m draftloop train --target "$target" --out "$out" --recording "$recording" --record-only \
        --record-tokens 11700000 --seed 0
}

case $part in
    record) record ;;
    eagle3) train eagle3 eagle3 --steps 2092 --draft-vocab-size 8192 --no-store-lm-head ;;
    draft) train draft draft_model --steps 3071 --num-layers 4 --learning-rate 2e-3 --store-bits 8 ;;
    dflash)  # not shipped yet: too large beside the others
        train dflash dflash --steps 3430 --num-layers 2 --draft-vocab-size 16384 --no-store-lm-head \
            --learning-rate 1.5e-3 --store-bits 8
        ;;
    all)
        "$0" "$out" record
        "$0" "$out" eagle3
        "$0" "$out" draft
        ;;
    *)
        echo "unknown part '$part'; known: record, eagle3, draft, dflash, all" >&2
        exit 2
        ;;
esac

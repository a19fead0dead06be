#!/usr/bin/env bash
# Makes the drafters that are shipped for SmolLM2-135M, from nothing, on the GPUs there are, and measures them.
#   tools/train_shipped.sh OUT_FOLDER [record|eagle3|again|dflash|dspark|draft|accept|lease|all] [ARGUMENT..]
#
#   record   two recordings, a and b, of prompts that differ: seeds 0, 2, .. and 1, 3, .. (5 minutes, or as the next
#            argument says)
#   eagle3   an EAGLE-3 head from recording a
#   again    the same command on recording b: what it reaches should be within 5 % of eagle3
#   dflash, dspark, draft   the other drafters, from both recordings
#   accept   acceptance at temperature 0 and 1 of the drafters that are named, or of all that are there
#   lease    two recordings, two heads and a block drafter, BLOCK (dflash), in MINUTES (15) of wall time, measured as
#            they come; of two GPUs one has the block drafter, which gains most from time
#   all      all of this, as long as it takes
#
# Each part goes on where it was left, so a part that was cut off is simply run again. Results are in OUT_FOLDER/results
# as soon as they are there. How the shipped ones were made, and what they reached: docs/numbers/shipped-drafters.md.
#
# For a trial without a GPU: RECORD, TRAIN and ACCEPT hold further options of the commands, PATIENCE multiplies what a
# step may take before it is stopped, and prompts.jsonl holds a few prompts (docs/training.md):
#   MINUTES=1 PATIENCE=9 PROCESSES=1 RECORD_TOKENS=600 \
#   RECORD="--data prompts.jsonl --row-tokens 128 --answer-tokens 16 --max-num-seqs 8" \
#   TRAIN="--row-tokens 128 --batch-tokens 256 --held-out-tokens 128" \
#   ACCEPT="--prompts mt_bench --num-prompts 1 --max-tokens 6" tools/train_shipped.sh /tmp/trial lease
set -uo pipefail
out=${1:?folder for recordings, drafters and results}
part=${2:-all}
shift $(($# < 2 ? $# : 2))
python=${PYTHON:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}"
minutes=${MINUTES:-15}
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
failed=0
mkdir -p "$out/results" "$out/logs"
out=$(cd "$out" && pwd)

share() { awk "BEGIN { print $minutes * $1 }"; } # so much of the minutes

timed() { # seconds at most, name, command: its output in a log, the end of that where it fails
  local limit=$1 name=$2 begin=$SECONDS
  shift 2
  if timeout -k 20 "$((limit * ${PATIENCE:-1}))" "$@" >"$out/logs/$name.log" 2>&1; then
    echo "== $name took $((SECONDS - begin)) s"
  else
    echo "== $name failed ($?) after $((SECONDS - begin)) s"
    tail -n 15 "$out/logs/$name.log"
    return 1
  fi
}

on() { # GPU, command
  local gpu=$1
  shift
  CUDA_VISIBLE_DEVICES="$gpu" "$@"
}

recording() { # name, minutes, GPU, seeds: a process for each, since the host has more to do for 512 rows than the GPU
  local name=$1 length=$2 gpu=$3 seed fail=0 pids=()
  shift 3
  for seed in "$@"; do
    on "$gpu" timed "$(awk "BEGIN { print int($length * 60 + 240) }")" "record-$name-$seed" \
      "$python" -m draftloop train --target smollm2-135m --out "$out/$name-$seed" --recording "$out/recording-$name" \
      --record-only --record-minutes "$length" --record-tokens "${RECORD_TOKENS:-40000000}" --seed "$seed" ${RECORD:-} &
    pids+=($!)
  done
  for seed in "${pids[@]}"; do wait "$seed" || fail=1; done
  return "$fail"
}

record() {
  local length=${1:-5} each=${PROCESSES:-$((gpus > 1 ? 3 : 2))} seeds_a=() seeds_b=() seed
  for ((seed = 0; seed < 2 * each; seed += 2)); do seeds_a+=("$seed") seeds_b+=($((seed + 1))); done
  # each takes 15 GB of its GPU, as many as 512 rows need
  recording a "$length" 0 "${seeds_a[@]}" &
  local first=$! fail=0
  recording b "$length" $((gpus > 1 ? 1 : 0)) "${seeds_b[@]}" || fail=1
  wait "$first" || fail=1
  rm -rf "$out/recording-both" && mkdir "$out/recording-both"
  ln -s "$out"/recording-[ab]/*.safetensors "$out/recording-both/" && cp "$out/recording-a/recording.json" "$out/recording-both/"
  du -sch "$out"/recording-[ab] | tail -n 1
  return "$fail"
}

train() { # name, method, recording, steps, minutes instead of these or nothing, then options
  local name=$1 method=$2 recording=$3 length=(--steps "$4") limit=3600 minutes=$5
  shift 5
  if [ -n "$minutes" ]; then
    length=(--minutes "$minutes")
    limit=$(awk "BEGIN { print int($minutes * 60 + 150) }")
  fi
  timed "$limit" "$name" "$python" -m draftloop train --target smollm2-135m --method "$method" --out "$out/$name" \
    --recording "$out/recording-$recording" --record-tokens 0 --evaluate-every 800 --checkpoint-every 800 --seed 0 \
    "$@" "${length[@]}" ${TRAIN:-} || return 1
  grep held-out "$out/logs/$name.log" | tail -n 1
  tar -czf "$out/results/$name.tgz" -C "$out/$name" drafter log.jsonl training.png
}

head=(--draft-vocab-size 8192 --no-store-lm-head --acceptance-loss 1)
block=(--num-layers 2 --num-kv-heads 9 --no-store-lm-head --train-mask-embedding --learning-rate 1.5e-3 --store-bits 8)
small=(--hidden-size 128 --intermediate-size 512 --num-layers 4 --learning-rate 2e-3 --store-bits 8)
head_minutes="" block_minutes=""

eagle3() { train eagle3 eagle3 a 2400 "$head_minutes" "${head[@]}"; }
again() { train eagle3-again eagle3 b 2400 "$head_minutes" "${head[@]}"; }
dflash() {
  train dflash dflash both 5000 "$block_minutes" "${block[@]}" --draft-vocab-size 16384 --teacher-temperature 0.5
}
dspark() { # narrower MLPs make room for the Markov head
  train dspark dspark both 5000 "$block_minutes" "${block[@]}" --draft-vocab-size 8192 --teacher-temperature 0.3 \
    --intermediate-size 1280 --markov-rank 24
}
draft() { train draft draft_model both 2800 "" "${small[@]}"; }

measure() { # name of the result, drafter and number of drafts, options
  local name=$1 drafter=$2
  shift 2
  timed 300 "accept-$name" env COLUMNS=100 "$python" -m draftloop bench acceptance --target smollm2-135m \
    --drafter "$out/${drafter/://drafter:}" --max-num-seqs 80 --out "$out/results/acceptance-$name.json" "$@" ${ACCEPT:-} ||
    return 1
  sed -n '/Tokens per step/,$p' "$out/logs/accept-$name.log" | grep -E "mt_bench|humaneval|gsm8k|Tokens"
}

accept() { # drafters; the number of drafts is what each is shipped with
  local name drafts fail=0
  for name in "$@"; do
    case $name in draft) drafts=4 ;; d*) drafts=7 ;; *) drafts=5 ;; esac
    [ -f "$out/$name/drafter/config.json" ] || continue
    measure "$name" "$name:$drafts" || fail=1
    # what judging drafts one by one gives, where they are judged together
    measure "$name-standard" "$name:$drafts" --temperature 1 -sc '{"rejection_sample_method": "standard"}' || fail=1
  done
  return "$fail"
}

lane() { # GPU, then jobs one after the other; each drafter is measured beside what comes next
  local gpu=$1 job fail=0
  shift
  for job in "$@"; do
    on "$gpu" "${job%%:*}" || fail=1
    on "$gpu" accept "${job##*:}" &
  done
  wait
  return "$fail"
}

lease() {
  local shares=(0.17 0.30 0.62) # of the minutes: recording, a head, a block drafter; the rest is for starts
  if [ "$gpus" -lt 2 ]; then shares=(0.15 0.20 0.20); fi
  record "$(share "${shares[0]}")" || failed=1
  ls "$out"/recording-both/*.safetensors >/dev/null || return
  head_minutes=$(share "${shares[1]}") block_minutes=$(share "${shares[2]}")
  local job="${BLOCK:-dflash}:${BLOCK:-dflash}" heads=(eagle3:eagle3 again:eagle3-again)
  if [ "$gpus" -gt 1 ]; then
    lane 0 "$job" &
    local first=$!
    (lane 1 "${heads[@]}") || failed=1 # by itself, since it waits for all that it has begun
    wait "$first" || failed=1
  else
    lane 0 "${heads[@]}" "$job" || failed=1
  fi
}

known=(eagle3 eagle3-again dflash dspark draft)
case $part in
  eagle3 | again | dflash | dspark | draft) "$part" || failed=1 ;;
  record) record "$@" || failed=1 ;;
  accept)
    [ $# -gt 0 ] || set -- "${known[@]}"
    accept "$@" || failed=1
    ;;
  lease)
    lease
    ls -l "$out/results"
    ;;
  all)
    for part in record eagle3 again dflash dspark draft; do "$part" || failed=1; done
    accept "${known[@]}" || failed=1
    ;;
  *)
    echo "unknown part '$part'; known: record, eagle3, again, dflash, dspark, draft, accept, lease, all" >&2
    exit 2
    ;;
esac
exit "$failed"

"""A drafter for a model of your own: recorded, trained and written in one call, and then used.

The same as `draftloop train --target MODEL --method eagle3 --out runs/mine`. With the defaults here it is done in
minutes on a CPU, and drafts little; docs/training.md says what a good one takes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from draftloop import LLM, SamplingParams
from draftloop.train.options import Eagle3Options, TrainOptions
from draftloop.train.run import run_train


def main(target: str, out: Path, *, record_tokens: int = 20_000, steps: int = 60, max_tokens: int = 64) -> Path:
    options = TrainOptions(
        target=target, method="eagle3", out=str(out), record_tokens=record_tokens, steps=steps,
        row_tokens=128, batch_tokens=512, held_out_tokens=record_tokens // 10,
    )  # fmt: skip
    drafter = run_train(options, Eagle3Options(ttt_steps=3))
    spec = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 3}
    llm = LLM(target, max_model_len=128, max_num_seqs=1, speculative_config=spec)
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False))
    print(f"{llm.get_metrics()['mean_acceptance_length']:.2f} tokens a step, with {drafter}")
    llm.close()
    return drafter


if __name__ == "__main__":
    main(*sys.argv[1:2] or ["smollm2-135m"], Path(sys.argv[2] if len(sys.argv) > 2 else "runs/mine"))

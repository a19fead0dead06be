"""Which drafter is worth it for a model: tokens per step and per second of each, measured in turns.

The same as `draftloop compare --drafters none,smollm2-135m-eagle3:3`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from draftloop import EngineConfig, SamplingParams
from draftloop.bench.compare import run_compare


def main(out: Path, num_prompts: int = 8, max_tokens: int = 96) -> None:
    run_compare(
        EngineConfig(model="smollm2-135m", max_model_len=1024, max_num_seqs=1),
        drafters=("none", "smollm2-135m-eagle3:3"),
        prompts="mt_bench",
        num_prompts=num_prompts,
        sampling=SamplingParams(temperature=0, max_tokens=max_tokens),
        repeats=1,
        out=out,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "bench/compare.json"))

"""What layers say of each token, on disk: what a drafter is trained on, or whatever else reads states."""

from __future__ import annotations

import sys
from pathlib import Path

from draftloop import LLM, SamplingParams
from draftloop.drafters.extract_hidden_states import read_hidden_states


def main(folder: Path) -> None:
    spec = {"method": "extract_hidden_states", "layer_ids": (2, 15, -1), "output_dir": folder}
    llm = LLM("smollm2-135m", max_model_len=512, max_num_seqs=2, speculative_config=spec)
    llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8))
    llm.close()  # writes the last shard
    for states in read_hidden_states(folder):
        print(f"{len(states.token_ids)} tokens, states {tuple(states.hidden.shape)} of layers 2 and 15 and the last")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/hidden_states"))

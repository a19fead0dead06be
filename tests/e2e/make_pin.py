"""Writes golden/smollm2_eagle3_acceptance.json: how much of the shipped EAGLE-3 head's drafts SmolLM2 accepts.

Run `python tests/e2e/make_pin.py` after a change of the head's weights, and only then: another number from the same
weights is a fault of the engine.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from draftloop import LLM
from draftloop.bench.acceptance import measure_acceptance, shares_accepted
from draftloop.bench.prompts import load_prompts
from draftloop.models.resolve import SHIPPED

PIN = Path(__file__).parent / "golden" / "smollm2_eagle3_acceptance.json"
TARGET, HEAD, NUM_DRAFTS = "smollm2-135m", "smollm2-135m-eagle3", 5
NUM_PROMPTS = {"mt_bench": 4, "humaneval": 4, "gsm8k": 4}
NUM_TOKENS = 32


def measure() -> dict[str, Any]:
    """The head's numbers on the shortest prompts of each set, in fp32 on the CPU."""
    llm = LLM(
        TARGET,
        dtype="float32",
        device="cpu",
        max_num_seqs=20,
        max_model_len=512,
        speculative_config={"method": "eagle3", "model": HEAD, "num_speculative_tokens": NUM_DRAFTS},
    )
    sets = {
        name: sorted(load_prompts(name), key=lambda prompt: len(prompt.turns[0]))[:count]
        for name, count in NUM_PROMPTS.items()
    }
    answers = measure_acceptance(llm, sets, max_tokens=NUM_TOKENS, temperature=0, show_progress=False)
    llm.close()
    histograms = [answer.histogram for answer in answers]
    shares = shares_accepted(histograms)
    return {
        "weights": hashlib.sha256((SHIPPED / HEAD / "model.safetensors").read_bytes()).hexdigest(),
        "num_steps": sum(map(sum, histograms)),
        "acceptance_length": round(1 + sum(shares), 4),
        "per_position": [round(share, 4) for share in shares],
    }


if __name__ == "__main__":
    PIN.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")

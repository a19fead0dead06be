"""Writes golden/smollm2_greedy.json: what transformers answers greedily, with the gap of its top two logits.

Run `python tests/e2e/make_golden.py` after a change of prompts, weights or chat template.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from draftloop.bench.prompts import load_prompts
from draftloop.models.loader import load_tokenizer, resolve_model

GOLDEN = Path(__file__).parent / "golden" / "smollm2_greedy.json"
NUM_PROMPTS = {"mt_bench": 14, "humaneval": 13, "gsm8k": 13}
NUM_TOKENS = 24


def main() -> None:
    source = resolve_model("smollm2-135m")
    tokenizer = load_tokenizer(source)
    model = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32).eval()
    rows = []
    for name, count in NUM_PROMPTS.items():
        rendered = []
        for prompt in load_prompts(name):
            message = {"role": "user", "content": prompt.turns[0]}
            text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
            rendered.append((prompt.question_id, tokenizer.encode(text, add_special_tokens=False)))
        # the shortest ones, since every engine variant answers all of them
        for question_id, prompt_ids in sorted(rendered, key=lambda pair: len(pair[1]))[:count]:
            with torch.inference_mode():
                ids = torch.tensor([prompt_ids])
                answer = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=NUM_TOKENS,
                    do_sample=False,
                    output_logits=True,
                    return_dict_in_generate=True,
                )
            top = [logits[0].topk(2).values for logits in answer.logits]
            rows.append(
                {
                    "prompts": name,
                    "question_id": question_id,
                    "prompt_ids": prompt_ids,
                    "token_ids": answer.sequences[0, len(prompt_ids) :].tolist(),
                    "gaps": [round(float(pair[0] - pair[1]), 5) for pair in top],
                }
            )
    lines = ",\n".join(json.dumps(row) for row in rows)
    GOLDEN.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()

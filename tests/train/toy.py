"""A target that has learnt a small language, so that there is something for a drafter to predict.

The language: phrases of six words in any order. The first word of a phrase is anybody's guess, the others
follow from it.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftloop.engine.llm import LLM
from draftloop.train.options import TrainOptions
from helpers import _folder, greedy, make_engine

VOCAB, PHRASES, WORDS = 72, 24, 6


def phrases() -> list[list[int]]:
    """Each begins with a word of its own; the others are shared, so that the phrase must be known."""
    rng = random.Random(0)
    return [[first, *(rng.randrange(PHRASES, VOCAB) for _ in range(WORDS - 1))] for first in range(PHRASES)]


def text(rng: random.Random, length: int) -> list[int]:
    known, words = phrases(), list[int]()
    while len(words) < length:
        words += rng.choice(known)
    return words[:length]


@functools.cache
def toy_target() -> str:
    """Folder of a two-layer Llama that speaks the language; a few seconds of training."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model, rng = LlamaForCausalLM(config), random.Random(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.0)
    for step in range(120):
        for group in optimizer.param_groups:
            group["lr"] = 6e-3 * min(1, (step + 1) / 10) * (1 - step / 125)
        ids = torch.tensor([text(rng, 40) for _ in range(16)])
        logits = model(ids).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    folder = _folder() / "toy-target"
    model.save_pretrained(folder)
    return str(folder)


def toy_options(out: Any, **changes: Any) -> TrainOptions:
    """A training of a few seconds."""
    defaults = {
        "target": toy_target(),
        "out": str(out),
        "record_tokens": 9_000,
        "answer_tokens": 60,
        "row_tokens": 64,
        "batch_tokens": 1024,
        "held_out_tokens": 1024,
        "steps": 60,
        "learning_rate": 4e-3,
        "evaluate_every": 30,
        "checkpoint_every": 20,
        "device": "cpu",
    }
    return TrainOptions(**{**defaults, **changes})  # type: ignore[arg-type]


PROMPTS = [[word, (word * 5) % VOCAB] for word in range(8)]


def served(model: Any, *, drafts: int = 3, max_tokens: int = 40, **spec: Any) -> tuple[list[Any], LLM]:
    """Greedy answers with a drafter, and the engine that gave them."""
    config = {"method": "eagle3", "model": str(model), "num_speculative_tokens": drafts, **spec}
    llm = make_engine(toy_target(), speculative_config=config)
    return llm.generate(PROMPTS, greedy(max_tokens)), llm


def served_length(model: Any, **spec: Any) -> float:
    """Mean tokens of a step."""
    outputs, llm = served(model, **spec)
    llm.close()
    steps = sum(output.spec.num_spec_steps for output in outputs)
    return 1 + sum(output.spec.num_accepted_draft_tokens for output in outputs) / steps

"""Tokens per second of one request, against `transformers.generate` on the same weights in one process.

The engines take turns, so that a machine that slows down slows all of them; ratios count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from draftloop.bench.ask import render
from draftloop.bench.prompts import load_prompts
from draftloop.bench.stamp import write_numbers
from draftloop.config.engine import EngineConfig
from draftloop.engine.llm import LLM
from draftloop.errors import ConfigError
from draftloop.models.loader import resolve_model
from draftloop.request import SamplingParams

REPETITIVE = "Copy this list exactly, line by line:\n" + "\n".join(
    f"{i}. The quick brown fox number {i} jumps over the lazy dog." for i in range(1, 13)
)


def run_against_transformers(config: EngineConfig, *, output_tokens: int, repeats: int, out: Path) -> Path:
    """Measure plain and drafted decoding on an ordinary and on a repetitive prompt; write and print the numbers.

    Raises ConfigError for a model without files or tokenizer, a configuration without speculation, and answers that are
    too long.
    """
    if config.speculation is None:
        raise ConfigError("the comparison runs with and without speculation; give a --speculative-config")
    source = resolve_model(config.model, revision=config.revision, download_dir=config.download_dir)
    from transformers import AutoModelForCausalLM

    llm = LLM.from_config(config)
    device, dtype = llm.engine.resolved.device, llm.engine.resolved.dtype
    reference = AutoModelForCausalLM.from_pretrained(str(source.folder), dtype=getattr(torch, dtype)).eval().to(device)
    reference.generation_config.eos_token_id = None  # both go on after it
    params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
    prompts = {"mt_bench": load_prompts("mt_bench")[0].turns[0], "repetitive": REPETITIVE}
    rows: list[dict[str, Any]] = []
    for name, text in prompts.items():
        ids = render(llm, [text], max_tokens=output_tokens)[0]
        tensor = torch.tensor([ids], device=device)

        def with_transformers(tensor: torch.Tensor = tensor) -> list[int]:
            with torch.inference_mode():
                answer = reference.generate(
                    tensor,
                    attention_mask=torch.ones_like(tensor),
                    do_sample=False,
                    max_new_tokens=output_tokens,
                )
            return answer[0, tensor.shape[1] :].tolist()

        def ours(*, speculation: bool, ids: list[int] = ids) -> list[int]:
            llm.reset_prefix_cache()  # the other engine reads the prompt every time
            return llm.generate([ids], params, speculation=speculation)[0].outputs[0].token_ids

        runs: dict[str, Callable[[], list[int]]] = {
            "transformers": with_transformers,
            "none": lambda: ours(speculation=False),
            config.speculation.method or "draft_model": lambda: ours(speculation=True),
        }
        rows += _compare(name, runs, config, dtype, len(ids), output_tokens, repeats)
    path = write_numbers(out, rows)
    table = Table("prompt", "engine", "tokens/s", "against transformers", "same tokens")
    for row in rows:
        ratio = f"{row['ratio']:.2f}x"
        table.add_row(row["prompts"], row["method"], f"{row['value']:.1f}", ratio, str(row["same_tokens"]))
    Console().print(table)
    Console().print(f"written to {path}")
    return path


def _compare(
    name: str,
    runs: dict[str, Callable[[], list[int]]],
    config: EngineConfig,
    dtype: str,
    num_prompt: int,
    output_tokens: int,
    repeats: int,
) -> list[dict[str, Any]]:
    answers = {engine: run() for engine, run in runs.items()}  # warms up
    seconds: dict[str, list[float]] = {engine: [] for engine in runs}
    for _ in range(repeats):
        for engine, run in runs.items():
            begin = time.perf_counter()
            run()
            seconds[engine].append(time.perf_counter() - begin)
    reference = statistics.median(seconds["transformers"])
    return [
        {
            "metric": "tokens_per_s",
            "model": config.model,
            "dtype": dtype,
            "method": engine,
            "batch": 1,
            "prompts": name,
            "prompt": num_prompt,
            "output": output_tokens,
            "value": round(output_tokens / statistics.median(times), 2),
            "min": round(output_tokens / max(times), 2),
            "max": round(output_tokens / min(times), 2),
            "ratio": round(reference / statistics.median(times), 3),
            "same_tokens": answers[engine] == answers["transformers"],
        }
        for engine, times in seconds.items()
    ]

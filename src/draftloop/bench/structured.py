"""Whether answers that a JSON schema constrains are valid, whatever is drafted; judged by the package jsonschema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from draftloop.bench.ask import render
from draftloop.bench.schemas import SchemaPrompt, schema_prompts
from draftloop.bench.stamp import engine_facts, write_numbers
from draftloop.config.engine import EngineConfig
from draftloop.engine.llm import LLM
from draftloop.errors import ConfigError
from draftloop.request import RequestOutput, SamplingParams, StructuredOutputsParams

Verdict = Literal["valid", "invalid", "cut"]
"""cut: max_tokens ended it, so that it says nothing about validity."""

ALL = "all"


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What one answer came to."""

    kind: str
    temperature: float
    verdict: Verdict
    text: str
    why: str
    """Where it is invalid."""
    num_tokens: int
    num_steps: int
    """Verify steps; each gives the accepted drafts and one token more."""


def _jsonschema() -> Any:
    try:
        import jsonschema
    except ImportError as error:
        raise ConfigError(
            "judging answers needs jsonschema, which is not installed: pip install 'draftloop[bench]'"
        ) from error
    return jsonschema


def judge(text: str, schema: dict[str, Any]) -> str:
    """Why a text is not JSON of this schema; empty where it is. Raises ConfigError without the package jsonschema."""
    jsonschema = _jsonschema()
    try:
        found = json.loads(text)
    except ValueError as error:
        return f"not JSON: {error}"
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    error = jsonschema.exceptions.best_match(checker.iter_errors(found))
    return "" if error is None else error.message


def measure_structured(llm: LLM, asked: Sequence[SchemaPrompt], *, max_tokens: int, temperature: float) -> list[Judged]:
    """Answer every prompt under its schema's grammar and judge the answers. Seeds are the prompts' numbers."""
    judge("{}", {})  # before any work
    ids = render(llm, [one.prompt for one in asked], max_tokens=max_tokens)
    params = [
        SamplingParams(
            temperature=temperature,
            max_tokens=max_tokens,
            seed=seed,
            # compact: a weak model could go on with white space for ever
            structured_outputs=StructuredOutputsParams(json=one.schema, disable_any_whitespace=True),
        )
        for seed, one in enumerate(asked)
    ]
    outputs = llm.generate(ids, params, use_tqdm=None)
    return [_judged(one, output, temperature) for one, output in zip(asked, outputs, strict=True)]


def _judged(asked: SchemaPrompt, output: RequestOutput, temperature: float) -> Judged:
    answer, spec = output.outputs[0], output.spec
    is_cut = answer.finish_reason == "length"
    why = "" if is_cut else output.error or judge(answer.text, asked.schema)
    steps = spec.num_spec_steps + spec.num_steps_without_drafts if spec else len(answer.token_ids) - 1
    return Judged(
        kind=asked.kind,
        temperature=temperature,
        verdict="cut" if is_cut else "invalid" if why else "valid",
        text=answer.text,
        why=why,
        num_tokens=len(answer.token_ids),
        num_steps=steps,
    )


def structured_rows(judged: Sequence[Judged]) -> Iterator[dict[str, Any]]:
    """One row per temperature and kind of schema, and all kinds; `value` is the share that is valid."""
    for temperature in dict.fromkeys(one.temperature for one in judged):
        mine = [one for one in judged if one.temperature == temperature]
        for kind in (ALL, *dict.fromkeys(one.kind for one in mine)):
            group = [one for one in mine if kind in (ALL, one.kind)]
            counts = {verdict: sum(one.verdict == verdict for one in group) for verdict in ("valid", "invalid", "cut")}
            num_tokens, num_steps = sum(one.num_tokens for one in group), sum(one.num_steps for one in group)
            yield {
                "temperature": temperature,
                "schemas": kind,
                "num_prompts": len(group),
                **counts,
                "num_tokens": num_tokens,
                # a prompt gives each answer's first token
                "acceptance_length": round((num_tokens - len(group)) / num_steps, 4) if num_steps else None,
                "value": round(counts["valid"] / len(group), 4),
            }


def run_structured(
    config: EngineConfig, *, num_prompts: int, max_tokens: int, temperatures: Sequence[float], out: Path
) -> Path:
    """Measure, print a table and what is invalid, write the numbers, return the file."""
    asked = schema_prompts(num_prompts)
    _jsonschema()  # before minutes are spent
    llm = LLM.from_config(config)
    try:
        judged = [
            one
            for temperature in temperatures
            for one in measure_structured(llm, asked, max_tokens=max_tokens, temperature=temperature)
        ]
        common = {"metric": "structured_valid", **engine_facts(llm), "batch": config.max_num_seqs}
    finally:
        llm.close()
    rows = [{**common, "max_tokens": max_tokens, **row} for row in structured_rows(judged)]
    path = write_numbers(out, rows)
    _print(rows)
    for one in judged:
        if one.verdict == "invalid":
            Console().print(f"invalid ({one.kind}, temperature {one.temperature:g}): {one.why}\n  {one.text}")
    Console().print(f"written to {path}")
    return path


def _print(rows: Sequence[dict[str, Any]]) -> None:
    table = Table("T", "schemas", "prompts", "valid", "invalid", "cut", "tokens per step")
    table.title, table.title_justify = "JSON that a schema constrains", "left"
    for row in rows:
        if row["schemas"] == ALL and table.row_count:
            table.add_section()
        length = row["acceptance_length"]
        counts = (str(row[name]) for name in ("num_prompts", "valid", "invalid", "cut"))
        first = f"{row['temperature']:g}" if row["schemas"] == ALL else ""
        table.add_row(first, row["schemas"], *counts, f"{length:.2f}" if length else "-")
    Console().print(table)

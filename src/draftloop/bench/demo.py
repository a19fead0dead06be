"""What `draftloop run` shows: an answer, its speed with and without speculation, and what the graphs did."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from draftloop.errors import RequestError
from draftloop.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from draftloop.engine.llm import LLM


@dataclass(kw_only=True)
class Pass:
    """The prompts answered once, one after another."""

    outputs: list[RequestOutput] = field(default_factory=list)
    seconds: float = 0.0
    """From each request's start to its end, prompt included."""

    @property
    def token_ids(self) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in self.outputs]

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.token_ids)) / self.seconds if self.seconds else 0.0

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per drafted step over all answers, the bonus token included; None if nothing was drafted."""
        stats = [output.spec for output in self.outputs if output.spec is not None]
        steps = sum(s.num_spec_steps for s in stats)
        return 1 + sum(s.num_accepted_draft_tokens for s in stats) / steps if steps else None


class Demo:
    """Answers prompts with speculation, then again without, and tells the difference."""

    def __init__(self, llm: LLM, sampling: SamplingParams, *, speculative: bool, lora: str | None = None) -> None:
        """`lora` names the adapter that answers."""
        self.llm = llm
        self.sampling = sampling
        self.speculative, self.lora = speculative, lora
        self.main = Pass()
        self.plain: Pass | None = None

    def run(
        self, prompts: Sequence[str], *, raw: bool, compare: bool, write: Callable[[str], None] | None = None
    ) -> None:
        """Answer all prompts; `write` gets the text as it comes. Raises RequestError if one cannot be answered."""
        inputs = [self._input(prompt, raw) for prompt in prompts]
        if write is not None:
            print(*(f"> {prompt}" for prompt in prompts), sep="\n", file=sys.stderr)
        if compare:
            self._warm_up()
        self.main = self._answer(inputs, self.speculative, write)
        if self.speculative and compare:
            if write is not None:
                print("(once more without speculation, to compare)", file=sys.stderr)
            self.llm.reset_prefix_cache()  # both passes read the prompts
            self.plain = self._answer(inputs, False, None)

    def _warm_up(self) -> None:
        """First uses record graphs and fault in weights; neither pass of a comparison should pay for that."""
        params = dataclasses.replace(self.sampling, max_tokens=8)
        for speculation in dict.fromkeys((self.speculative, False)):
            text = "one two three one two three one two"
            self.llm.generate(text, params, speculation=speculation, lora_request=self.lora)
        self.llm.reset_graph_counts()

    def print_summary(self) -> None:
        """To stderr: stdout holds nothing but answers."""
        from rich.console import Console
        from rich.table import Table

        console = Console(stderr=True, highlight=False)
        speed = Table("", "tokens/s", "tokens per step", title="Speed", title_justify="left")
        length = self.main.acceptance_length
        label = "with speculation" if self.speculative else "without speculation"
        speed.add_row(label, f"{self.main.tokens_per_s:.1f}", f"{length:.2f}" if length else "1.00")
        if self.plain is not None:
            speed.add_row("without speculation", f"{self.plain.tokens_per_s:.1f}", "1.00")
        console.print(speed)
        if self.plain is not None:
            ratio = self.main.tokens_per_s / max(self.plain.tokens_per_s, 1e-9)
            same = {True: "; the answers are the same", False: "; the answers differ", None: ""}[self._same_tokens()]
            console.print(f"{ratio:.2f}x with speculation{same}")
        graphs = Table(
            "phase",
            "graph replays",
            "eager runs",
            "why not captured",
            title="Graphs of the phases that ran",
            title_justify="left",
        )
        for phase, counts in self._phases().items():
            if counts["replays"] or counts["eager_runs"]:
                reasons = "; ".join(counts["reasons"])
                graphs.add_row(phase, str(counts["replays"]), str(counts["eager_runs"]), reasons)
        console.print(graphs)

    def print_json(self) -> None:
        print(json.dumps(self.to_dict()))

    def to_dict(self) -> dict[str, Any]:
        """The same and more, for programs."""
        return {
            "answers": [output.outputs[0].text for output in self.main.outputs],
            "finish_reasons": [output.outputs[0].finish_reason for output in self.main.outputs],
            "num_tokens": [len(ids) for ids in self.main.token_ids],
            "speculation": self.speculative,
            "tokens_per_s": self.main.tokens_per_s,
            "tokens_per_s_without_speculation": self.plain.tokens_per_s if self.plain else None,
            "acceptance_length": self.main.acceptance_length,
            "same_tokens": self._same_tokens(),
            "graphs": self.llm.get_graph_report().to_dict(),
        }

    def _input(self, prompt: str, raw: bool) -> str | list[dict[str, str]]:
        # Base models have no chat template; they continue the text.
        if raw or not getattr(self.llm.get_tokenizer(), "chat_template", None):
            return prompt
        return [{"role": "user", "content": prompt}]

    def _answer(self, inputs: Sequence, speculation: bool, write: Callable[[str], None] | None) -> Pass:
        done = Pass()
        for item in inputs:
            start = time.perf_counter()
            outputs = self.llm.stream(item, self.sampling, speculation=speculation, lora_request=self.lora)
            last = follow(outputs, write)
            done.seconds += time.perf_counter() - start
            done.outputs.append(last)
        return done

    def _same_tokens(self) -> bool | None:
        """None where it says nothing: no second pass, or sampling without a seed."""
        if self.plain is None or not self.sampling.greedy:
            return None
        return self.plain.token_ids == self.main.token_ids

    def _phases(self) -> dict[str, dict[str, Any]]:
        phases: dict[str, dict[str, Any]] = {}
        for row in self.llm.get_graph_report().rows:
            counts = phases.setdefault(row.phase, {"replays": 0, "eager_runs": 0, "reasons": {}})
            counts["replays"] += row.replays
            counts["eager_runs"] += row.eager_runs
            if not row.captured and row.reason:
                counts["reasons"][row.reason] = None
        return phases


def follow(outputs: Iterable[RequestOutput], write: Callable[[str], None] | None) -> RequestOutput:
    """Write what each cumulative output adds, then a newline; return the last. Raises RequestError if it failed."""
    write = write or _write_nothing
    done, last = 0, None
    for output in outputs:
        last = output
        text = output.outputs[0].text
        write(text[done:])
        done = len(text)
    write("\n")
    if last is None or last.error:
        raise RequestError((last and last.error) or "the request ended without an output")
    return last


def write_now(text: str) -> None:
    """To stdout, without waiting for the end of the line."""
    sys.stdout.write(text)
    sys.stdout.flush()


def _write_nothing(text: str) -> None:
    pass

"""The `draftloop` command. Its options are the fields of the config dataclasses, docstrings included.

Heavy modules are imported in the commands' bodies: `--help` and refused settings must not wait for torch.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, CycloptsError, Parameter, UnusedCliTokensError

import draftloop
from draftloop.bench import prompts as prompt_sets
from draftloop.bench.demo import Demo, follow, write_now
from draftloop.cli.about import add_about
from draftloop.cli.bench import bench
from draftloop.cli.options import (
    FLAG,
    LORA,
    NAMES,
    PROMPT,
    RESULTS,
    at_least_one,
    command,
    config_from,
    default_speculation,
    engine_options,
    sampling_options,
    speculation_from,
    speculation_options,
    target_options,
)
from draftloop.cli.serve import add_serve
from draftloop.cli.train import add_train
from draftloop.config import EngineConfig, Environment
from draftloop.errors import ConfigError, DraftloopError, RequestError, check_known
from draftloop.observability import log
from draftloop.request import SamplingParams

if TYPE_CHECKING:
    from draftloop.engine.llm import LLM

# Code repeats itself, so that drafting from the text so far pays.
DEMO_PROMPT = "Write a Python class Point with x and y, and methods add, subtract, scale and distance."

app = App(name="draftloop", version=draftloop.__version__, help=draftloop.__doc__)
app.command(bench)
add_serve(app)
add_train(app)
add_about(app)

logger = log.get_logger(__name__)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command line. What a user got wrong is one line on stderr and exit code 2."""
    try:
        environment = Environment.read()
        log.setup(environment.log_level, environment.log_format)
        app(argv, exit_on_error=False, print_error=False, result_action="return_value")
    except UnusedCliTokensError as error:
        words, command = " ".join(error.unused_tokens or ()), " ".join(["draftloop", *(error.command_chain or ())])
        remedy = f"quote texts with spaces: --prompt 'two words'; `{command} --help` lists what it takes"
        print(f"draftloop: nothing takes {words!r}; {remedy}", file=sys.stderr)
        sys.exit(2)
    except (DraftloopError, CycloptsError) as error:
        logger.debug("where it happened", exc_info=True)
        print(f"draftloop: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # who reads the output, such as `head`, has enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still to be flushed at exit
        sys.exit(141)


def _split(values: dict[str, Any]) -> tuple[EngineConfig, SamplingParams]:
    """Check all options of `run` or `chat`, before anything heavy is imported."""
    sampling = {p.name: values.pop(p.name) for p in sampling_options()}
    return config_from(values, default_speculation(values)), SamplingParams(**sampling)


def _check_adapter(config: EngineConfig, lora: str | None) -> None:
    """Before anything is loaded. Raises ConfigError."""
    if lora is not None and lora not in config.adapters:
        known = ", ".join(config.adapters) or "none; give --enable-lora and --lora-modules NAME=FOLDER"
        raise ConfigError(f"--lora is {lora!r}; known adapters: {known}")


def _open(config: EngineConfig) -> LLM:
    from draftloop.engine.llm import LLM

    return LLM.from_config(config)


# One request at a time, so one row: fewer graphs to capture, and a quicker start.
_CONVERSATION = [*engine_options(max_num_seqs=1), *speculation_options(), *sampling_options()]


@command(app, "run", _CONVERSATION)
def run(
    values: dict[str, Any],
    *,
    prompt: Annotated[tuple[str, ...], PROMPT] = (),
    raw: FLAG = False,
    lora: LORA = None,
    compare: bool = True,
    json: FLAG = False,
) -> None:
    """Stream a model's answer, then show what speculation and graphs did for it.

    Without speculation options, the drafter that is shipped for the model drafts, or else ngram; --spec-tokens 0
    turns speculation off.

    Parameters
    ----------
    prompt:
        What to ask; may be given more than once. Left out, a demo question.
    raw:
        Continue the prompt as it is, without the model's chat template.
    compare:
        Run again without speculation, for the comparison.
    json:
        Print one JSON object instead, with the whole graph report.
    """
    config, sampling = _split(values)
    _check_adapter(config, lora)
    llm = _open(config)
    try:
        demo = Demo(llm, sampling, speculative=config.speculation is not None, lora=lora)
        demo.run(prompt or (DEMO_PROMPT,), raw=raw, compare=compare, write=None if json else write_now)
        demo.print_json() if json else demo.print_summary()
    finally:
        llm.close()


@command(app, "chat", _CONVERSATION)
def chat(values: dict[str, Any], *, system: str | None = None, lora: LORA = None) -> None:
    """Talk to a model. /reset starts over; /exit, or end of input, leaves.

    Parameters
    ----------
    system:
        Instructions that every conversation starts with.
    """
    config, sampling = _split(values)
    _check_adapter(config, lora)
    llm = _open(config)
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    try:
        llm.check_chat()  # said once, not behind each line
        for text in _lines():
            if text == "/exit":
                break
            if text == "/reset":
                messages = list(start)
                continue
            messages.append({"role": "user", "content": text})
            try:
                output = follow(llm.stream(messages, sampling, lora_request=lora), write_now)
            except RequestError as error:  # such as a conversation that grew too long
                messages.pop()
                print(f"{error} (/reset starts over)", file=sys.stderr)
                continue
            messages.append({"role": "assistant", "content": output.outputs[0].text})
    finally:
        llm.close()


@command(app, "check-drafter", [*engine_options(model=inspect.Parameter.empty), *speculation_options()])
def check_drafter(
    values: dict[str, Any],
    drafter: Annotated[str, Parameter(help="The drafter's model: hub id or folder.")],
    *,
    num_prompts: int = 20,
    output_tokens: int = 64,
) -> None:
    """Measure how much of what a drafter drafts is accepted, and with which aux_layer_offset it fits.

    The method is read off the checkpoint unless --spec-method names it. The exit code is 1 if the drafter does
    not work as it is.

    Parameters
    ----------
    num_prompts:
        Prompts to answer.
    output_tokens:
        Tokens of each answer.
    """
    at_least_one(num_prompts=num_prompts, output_tokens=output_tokens)
    given = speculation_from(values) or {}
    spec: dict[str, Any] = {**given, "model": drafter}
    if "speculative_token_tree" not in given:
        spec.setdefault("num_speculative_tokens", 3)
    EngineConfig.from_mapping(**values)  # what is wrong with the options is said before torch is imported
    from draftloop.bench.check_drafter import method_of, run_check_drafter

    load_format = spec.get("load_format") or values.get("load_format") or "auto"
    spec.setdefault("method", method_of(drafter, spec.get("revision"), load_format=load_format))
    config = EngineConfig.from_mapping(speculative_config=spec, **values)
    if not run_check_drafter(config, num_prompts=num_prompts, output_tokens=output_tokens):
        sys.exit(1)


@command(app, "compare", target_options(max_num_seqs=1))
def compare(
    values: dict[str, Any],
    *,
    drafters: Annotated[tuple[str, ...], NAMES],
    target: str = "smollm2-135m",
    prompts: str = "mt_bench",
    num_prompts: int = 10,
    max_tokens: int = 128,
    temperature: float = 0.0,
    repeats: int = 3,
    out: Path = RESULTS,
) -> None:
    """Several drafters on one model: tokens per step and per second of each, measured in turns.

    Parameters
    ----------
    drafters:
        What to compare: none (plain decoding), or NAME:K with K drafts per step, where NAME is the folder, hub id or
        name of a drafter, or a method that needs none. Such as none,ngram:4,smollm2-135m-eagle3:5.
    target:
        The model that is drafted for: hub id, local folder or alias.
    prompts:
        Set of prompts: mt_bench, humaneval or gsm8k.
    num_prompts:
        Prompts to answer; --max-num-seqs of them run at the same time.
    max_tokens:
        Tokens of each answer, at most.
    temperature:
        Temperature of the answers.
    repeats:
        Rounds; the median counts.
    out:
        Folder or file for the results.
    """
    at_least_one(num_prompts=num_prompts, repeats=repeats)
    sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    check_known("prompt set", [prompts], prompt_sets.NAMES)
    config = EngineConfig.from_mapping(model=target, **values)
    from draftloop.bench.compare import run_compare

    run_compare(
        config,
        drafters=drafters,
        prompts=prompts,
        num_prompts=num_prompts,
        sampling=sampling,
        repeats=repeats,
        out=out,
    )


def _lines() -> Iterator[str]:
    """Non-empty lines that the user types, up to the end of input."""
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if text:
            yield text

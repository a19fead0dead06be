"""The `draftloop` command. Its options are the fields of the config dataclasses, docstrings included.

Heavy modules are imported in the commands' bodies: `--help` and refused settings must not wait for torch.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, CycloptsError, Group, Parameter, Token

import draftloop
from draftloop.bench.demo import Demo, follow, write_now
from draftloop.config import EngineConfig, Environment, SpeculativeConfig
from draftloop.config.fields import field_docs, field_types
from draftloop.errors import ConfigError, DraftloopError, RequestError
from draftloop.observability import log
from draftloop.request import SamplingParams

if TYPE_CHECKING:
    from draftloop.engine.llm import LLM

# Code repeats itself, so that drafting from the text so far pays.
DEMO_PROMPT = "Write a Python class Point with x and y, and methods add, subtract, scale and distance."
# Needs no second model, and gains wherever the answer repeats the prompt or itself.
DEFAULT_SPECULATION = {"method": "ngram", "num_speculative_tokens": 4}

_ENGINE = Group.create_ordered("Engine")
_SPECULATION = Group.create_ordered("Speculation")
_SAMPLING = Group.create_ordered("Sampling")

app = App(name="draftloop", version=draftloop.__version__, help=draftloop.__doc__)
bench = App(name="bench", help="Measure; each result is written with the command, machine and versions it came from.")
app.command(bench)

logger = log.get_logger(__name__)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command line. What a user got wrong is one line on stderr and exit code 2."""
    try:
        log.setup(Environment.read().log_level)
        app(argv, exit_on_error=False, print_error=False, result_action="return_value")
    except (DraftloopError, CycloptsError) as error:
        logger.debug("where it happened", exc_info=True)
        print(f"draftloop: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _numbers(type_: Any, tokens: Sequence[Token]) -> tuple[int, ...]:
    """`1,8,32` and `1 8 32` alike."""
    texts = [text for token in tokens for text in token.value.split(",") if text]
    try:
        return tuple(map(int, texts))
    except ValueError:
        raise ValueError(f"{','.join(texts)!r} are not whole numbers, such as 1,8,32") from None


FLAG = Annotated[bool, Parameter(negative="", show_default=False)]
PROMPT = Parameter(name=["--prompt", "-p"], negative="", show_default=False, allow_leading_hyphen=True)
NUMBERS = Parameter(converter=_numbers, consume_multiple=True, n_tokens=1, negative="")


def _option(name: str, annotation: Any, default: Any, group: Group, help: str) -> inspect.Parameter:
    """One command-line option, with the spelling that cyclopts derives: max_num_seqs -> --max-num-seqs."""
    extra = Parameter(group=group, help=help)
    if default is False:  # a flag that is off needs no --no-enforce-eager
        extra = Parameter(group=group, help=help, negative="", show_default=False)
    numbers = (NUMBERS,) if tuple[int, ...] in (annotation, *typing.get_args(annotation)) else ()
    full = Annotated[(annotation, *numbers, extra)]  # pyrefly: ignore[invalid-annotation]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=full)


def _engine_options(**defaults: Any) -> list[inspect.Parameter]:
    docs, types_ = field_docs(EngineConfig), field_types(EngineConfig)
    options = []
    for field in dataclasses.fields(EngineConfig):
        name = field.name
        if name == "speculative_config":  # JSON, in the group of its short forms
            continue
        option = _option(name, types_[name], defaults.get(name, field.default), _ENGINE, docs[name])
        # Also the command's one positional argument.
        options.append(option.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) if name == "model" else option)
    return options


# Short form of each speculative_config key that most people need.
_SHORT_FORMS = {
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_speculative_tokens",
    "aux_layer_offset": "aux_layer_offset",
}


def _speculation_options() -> list[inspect.Parameter]:
    docs, types_ = field_docs(SpeculativeConfig), field_types(SpeculativeConfig)
    text = Parameter(name=["--speculative-config", "-sc"], group=_SPECULATION, accepts_keys=False)
    help = field_docs(EngineConfig)["speculative_config"]
    annotation = Annotated[str | None, text, Parameter(help=help)]
    kind = inspect.Parameter.KEYWORD_ONLY
    options = [inspect.Parameter("speculative_config", kind, default=None, annotation=annotation)]
    for short, key in _SHORT_FORMS.items():
        options.append(_option(short, types_[key], None, _SPECULATION, f"Short for its {key}. {docs[key]}"))
    return options


def _sampling_options() -> list[inspect.Parameter]:
    docs, types_ = field_docs(SamplingParams), field_types(SamplingParams)
    defaults = {"temperature": 0.0, "max_tokens": 256, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    return [_option(name, types_[name], value, _SAMPLING, docs[name]) for name, value in defaults.items()]


def _command(parent: App, name: str, options: Iterable[inspect.Parameter]) -> Callable:
    """Register a command that takes `options` as one dict, and its own keyword-only parameters as they are."""

    def register(body: Callable) -> Callable:
        hints = typing.get_type_hints(body, include_extras=True)
        own = [p.replace(annotation=hints[p.name]) for p in list(inspect.signature(body).parameters.values())[1:]]

        signature = inspect.Signature(sorted([*options, *own], key=lambda p: p.kind))

        def command(*args: Any, **given: Any) -> None:
            bound = signature.bind(*args, **given)
            bound.apply_defaults()
            values = dict(bound.arguments)
            mine = {p.name: values.pop(p.name) for p in own}
            body(values, **mine)

        command.__doc__ = body.__doc__
        command.__signature__ = signature  # pyrefly: ignore[missing-attribute]
        parent.command(command, name=name)
        return body

    return register


def speculation_from(values: dict[str, Any], default: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """Take the speculation options out of `values` and join them. Raises ConfigError where two name one key."""
    text = values.pop("speculative_config", None)
    short = {key: value for name, key in _SHORT_FORMS.items() if (value := values.pop(name, None)) is not None}
    given: dict[str, Any] = {}
    if text is not None:
        try:
            given = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--speculative-config is not JSON ({error}): {text}") from None
        if not isinstance(given, dict):
            raise ConfigError(f"--speculative-config is {text}; it must be a JSON object")
    for name, key in _SHORT_FORMS.items():
        if key in short and key in given:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} and --speculative-config both name {key!r}; leave one out")
    joined = given | short
    if default and not {"method", "model"} & joined.keys():
        joined = default | joined
    return joined or None


def _config_from(values: dict[str, Any], default: dict[str, Any] | None = None) -> EngineConfig:
    values = dict(values)
    return EngineConfig.from_mapping(speculative_config=speculation_from(values, default), **values)


def _split(values: dict[str, Any]) -> tuple[EngineConfig, SamplingParams]:
    """Check all options of `run` or `chat`, before anything heavy is imported."""
    sampling = {p.name: values.pop(p.name) for p in _sampling_options()}
    return _config_from(values, DEFAULT_SPECULATION), SamplingParams(**sampling)


def _open(config: EngineConfig) -> LLM:
    from draftloop.engine.llm import LLM

    return LLM.from_config(config)


# One request at a time, so one row: fewer graphs to capture, and a quicker start.
_CONVERSATION = [*_engine_options(max_num_seqs=1), *_speculation_options(), *_sampling_options()]


@_command(app, "run", _CONVERSATION)
def run(
    values: dict[str, Any],
    *,
    prompt: Annotated[tuple[str, ...], PROMPT] = (),
    raw: FLAG = False,
    compare: bool = True,
    json: FLAG = False,
) -> None:
    """Stream a model's answer, then show what speculation and graphs did for it.

    Without speculation options, ngram drafts; --spec-tokens 0 turns speculation off.

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
    llm = _open(config)
    try:
        demo = Demo(llm, sampling, speculative=config.speculation is not None)
        demo.run(prompt or (DEMO_PROMPT,), raw=raw, compare=compare, write=None if json else write_now)
        demo.print_json() if json else demo.print_summary()
    finally:
        llm.close()


@_command(app, "chat", _CONVERSATION)
def chat(values: dict[str, Any], *, system: str | None = None) -> None:
    """Talk to a model. /reset starts over; /exit, or end of input, leaves.

    Parameters
    ----------
    system:
        Instructions that every conversation starts with.
    """
    config, sampling = _split(values)
    llm = _open(config)
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    try:
        for text in _lines():
            if text == "/exit":
                break
            if text == "/reset":
                messages = list(start)
                continue
            messages.append({"role": "user", "content": text})
            try:
                output = follow(llm.stream(messages, sampling), write_now)
            except RequestError as error:  # such as a conversation that grew too long
                messages.pop()
                print(f"{error} (/reset starts over)", file=sys.stderr)
                continue
            messages.append({"role": "assistant", "content": output.outputs[0].text})
    finally:
        llm.close()


@_command(app, "check-drafter", [*_engine_options(model=inspect.Parameter.empty), *_speculation_options()])
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
    for name, value in (("num-prompts", num_prompts), ("output-tokens", output_tokens)):
        if value < 1:
            raise ConfigError(f"--{name} is {value}; it must be at least 1")
    spec: dict[str, Any] = {"num_speculative_tokens": 3, **(speculation_from(values) or {}), "model": drafter}
    EngineConfig.from_mapping(**values)  # what is wrong with the options is said before torch is imported
    from draftloop.bench.check_drafter import method_of, run_check_drafter

    spec.setdefault("method", method_of(drafter, spec.get("revision")))
    config = EngineConfig.from_mapping(speculative_config=spec, **values)
    if not run_check_drafter(config, num_prompts=num_prompts, output_tokens=output_tokens):
        sys.exit(1)


@_command(bench, "latency", [*_engine_options(), *_speculation_options()])
def latency(
    values: dict[str, Any],
    *,
    batch_sizes: Annotated[tuple[int, ...], NUMBERS] = (1, 8, 32),
    prompt_tokens: int = 512,
    output_tokens: int = 128,
    repeats: int = 3,
    out: Path = Path("docs/numbers"),
    trace: FLAG = False,
) -> None:
    """Time per token and per iteration of decoding, at fixed batch sizes.

    Parameters
    ----------
    batch_sizes:
        Requests that run at the same time, such as 1,8,32; --max-num-seqs is raised to the largest.
    prompt_tokens:
        Tokens of each prompt.
    output_tokens:
        Tokens of each answer.
    repeats:
        Measurements of each size; the median counts.
    out:
        Folder for the results.
    trace:
        Write a profiler trace beside the results too.
    """
    for name, value in (("batch-sizes", min(batch_sizes, default=0)), ("prompt-tokens", prompt_tokens)):
        if value < 1:
            raise ConfigError(f"--{name} is {value}; it must be at least 1")
    for name, value, least in (("output-tokens", output_tokens, 2), ("repeats", repeats, 1)):
        if value < least:
            raise ConfigError(f"--{name} is {value}; it must be at least {least}")
    config = _config_from({**values, "max_num_seqs": max(values["max_num_seqs"], *batch_sizes)})
    from draftloop.bench.latency import run_latency

    run_latency(
        config,
        batch_sizes=batch_sizes,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        repeats=repeats,
        out=out,
        trace=trace,
    )


@_command(bench, "transformers", [*_engine_options(max_num_seqs=1), *_speculation_options()])
def against_transformers(
    values: dict[str, Any],
    *,
    output_tokens: int = 128,
    repeats: int = 3,
    out: Path = Path("docs/numbers"),
) -> None:
    """Tokens per second of one request, against transformers.generate in the same process.

    Parameters
    ----------
    output_tokens:
        Tokens of each answer.
    repeats:
        Measurements of each; the median counts.
    out:
        Folder or file for the results.
    """
    config = _config_from(values, DEFAULT_SPECULATION)
    from draftloop.bench.against_transformers import run_against_transformers

    run_against_transformers(config, output_tokens=output_tokens, repeats=repeats, out=out)


def _lines() -> Iterator[str]:
    """Non-empty lines that the user types, up to the end of input."""
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if text:
            yield text

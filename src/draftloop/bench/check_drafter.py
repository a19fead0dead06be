"""Does a drafter fit its target? Measured: how much of what it drafts is accepted.

Engines disagree on whether the layer ids in a head's config name inputs or outputs of layers. The text is the
same either way, since every draft is verified; only acceptance shows it, so both are tried.
"""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from draftloop.bench.prompts import NAMES, load_prompts
from draftloop.config.engine import EngineConfig
from draftloop.drafters.files import find_checkpoint, read_shapes
from draftloop.drafters.kinds import READ, kind_of, plain_name
from draftloop.engine.llm import LLM
from draftloop.errors import ConfigError
from draftloop.models.config_file import read_config
from draftloop.models.resolve import LoadFormat
from draftloop.request import SamplingParams

logger = logging.getLogger(__name__)

LEAST_LENGTH = 1.1
"""Tokens per step below which a head is not worth its time, or not made for this target."""
CLEAR = 1.15
"""One offset fits if its accepted drafts are this many times those of the other."""
RANDOM_PROMPT = 24
"""Tokens of a prompt where there is no tokenizer."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One way to run the drafter."""

    offset: int | None
    """aux_layer_offset in force; None: the drafter has no such choice."""
    aux_layers: tuple[int, ...]
    acceptance_length: float
    """Mean tokens per step, the bonus token included."""
    per_position: tuple[float, ...]
    """Share of steps that accepted the first i drafts, for i = 1 .. K."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    measured: tuple[Measured, ...]
    """The first is what is done when nothing is said."""
    text: str
    """What fits, and what to do."""
    fits: bool
    """True if the drafter works as it is."""


def method_of(drafter: str, revision: str | None = None, *, load_format: LoadFormat = "auto") -> str:
    """The speculative method that a checkpoint looks made for. Raises ConfigError where nothing tells."""
    folder = find_checkpoint(drafter, revision, load_format=load_format)
    config, shapes = read_config(folder, *READ), read_shapes(folder)
    kind = kind_of(config, map(plain_name, shapes))
    if kind is None:
        said = ", ".join(f"{key} {config[key]!r}" for key in ("architectures", "model_type") if config.get(key))
        names = sorted(shapes)
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise ConfigError(
            f"nothing in {drafter!r} tells what kind of drafter it is: config.json says {said or 'nothing of it'}, its "
            f"tensors are {', '.join(names[:5]) or 'none'}{more}; say --spec-method"
        )
    return kind


def check_drafter(config: EngineConfig, *, num_prompts: int, output_tokens: int) -> Verdict:
    """Answer a few prompts with each offset and compare. `config` has the drafter in its speculation."""
    spec = config.speculation
    if spec is None:
        raise ConfigError("num_speculative_tokens is 0, so there is nothing to check; ask for 1 or more")
    if spec.aux_layer_offset is not None:
        raise ConfigError("aux_layer_offset is what is to be found out; leave it out")
    by_rule = _measure(config, num_prompts, output_tokens)
    found = [by_rule]
    if by_rule.offset is not None:
        other = replace(config, speculative_config=replace(spec, aux_layer_offset=1 - by_rule.offset))
        try:
            found.append(_measure(other, num_prompts, output_tokens))
        except ConfigError as error:  # past the last layer: then it is merely not that one
            logger.info("%s", error)
    return judge(found)


def judge(measured: Sequence[Measured]) -> Verdict:
    """Which offset fits. The first is the one that is used when nothing is said."""
    best, *others = sorted(measured, key=lambda m: m.acceptance_length, reverse=True)
    length = f"{best.acceptance_length:.2f} tokens per step"
    if best.acceptance_length < LEAST_LENGTH:
        fits = False
        text = f"it does not fit: {length} at best; it is probably made for another target, or not trained"
    elif best.offset is None:
        fits, text = True, f"it fits: {length}"
    elif others and best.acceptance_length - 1 < CLEAR * (others[0].acceptance_length - 1):
        fits = True
        text = f"it fits, and both offsets do alike: {length} against {others[0].acceptance_length:.2f}"
    elif best is measured[0]:
        fits, text = True, f"it fits as it is (aux_layer_offset {best.offset}): {length}"
    else:
        fits = False
        text = f'it fits with "aux_layer_offset": {best.offset} in the speculative configuration: {length}'
    return Verdict(measured=tuple(measured), text=text, fits=fits)


def _measure(config: EngineConfig, num_prompts: int, output_tokens: int) -> Measured:
    llm = LLM.from_config(config)
    params = SamplingParams(temperature=0, max_tokens=output_tokens)
    if llm.get_tokenizer() is None:
        rng = random.Random(0)
        ids = [
            [rng.randrange(llm.engine.model_config.vocab_size) for _ in range(RANDOM_PROMPT)]
            for _ in range(num_prompts)
        ]
        llm.generate(ids, params)
    else:
        texts = [prompt.turns[0] for row in zip(*map(load_prompts, NAMES), strict=True) for prompt in row][:num_prompts]
        if getattr(llm.get_tokenizer(), "chat_template", None):
            llm.chat([[{"role": "user", "content": text}] for text in texts], params)
        else:
            llm.generate(texts, params)
    metrics = llm.get_metrics()
    steps = max(metrics["spec_decode_num_drafts"], 1)
    assert llm.engine.drafter is not None
    measured = Measured(
        offset=llm.engine.drafter.aux_layer_offset,
        aux_layers=llm.engine.drafter.aux_layers,
        acceptance_length=metrics["mean_acceptance_length"],
        per_position=tuple(count / steps for count in metrics["spec_decode_num_accepted_tokens_per_pos"]),
    )
    _close(llm)
    return measured


def _close(llm: LLM) -> None:
    """Free the memory before the next engine measures what is left."""
    llm.close()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run_check_drafter(config: EngineConfig, *, num_prompts: int, output_tokens: int) -> bool:
    """Print what `check_drafter` finds; True if the drafter works as it is."""
    verdict = check_drafter(config, num_prompts=num_prompts, output_tokens=output_tokens)
    for measured in verdict.measured:
        where = f"aux_layer_offset {measured.offset}" if measured.offset is not None else "as it is"
        layers = f", reads what enters layers {', '.join(map(str, measured.aux_layers))}" if measured.aux_layers else ""
        rule = " (as its config says)" if measured.offset is not None and measured is verdict.measured[0] else ""
        shares = " ".join(f"{share:.2f}" for share in measured.per_position)
        print(
            f"{where}{rule}{layers}: {measured.acceptance_length:.2f} tokens per step; accepted by position: {shares}"
        )
    print(verdict.text)
    return verdict.fits

"""The engine answers prompts, and what it says is written down."""

from __future__ import annotations

import logging
import math
import random
import time
from pathlib import Path
from typing import Any

from draftloop.engine.llm import LLM
from draftloop.errors import CapacityError, ConfigError
from draftloop.observability.progress import progress_bar
from draftloop.request import SamplingParams
from draftloop.train.files import remove_leftovers
from draftloop.train.options import TrainOptions
from draftloop.train.prompts import Invention, invention, random_prompt, read_prompts
from draftloop.train.recording import Document, Recording, repetition_starts

logger = logging.getLogger(__name__)

ROUNDS, CPU_ROUNDS = 8, 2
"""Requests of a shard for every row: with few, rows wait for the longest answers; with many, a kill loses much, and
nothing is said for long."""
INVENTED_TOKENS = 128
"""A prompt that is not finished by then is dropped."""
ANSWER_TEMPERATURES = (0.5, 1.0)
PROMPT_TEMPERATURES = (0.7, 1.0)
"""Invented prompts: warm enough to differ, cool enough to make sense."""
OPENED_SHARE = 0.8
"""Share of the invented prompts that begin with a given opening."""


def record(options: TrainOptions, recording: Recording, *, rounds: int | None = None) -> None:
    """Add to a recording until it holds `record_tokens`; where it does already, nothing is started.

    A recording that was interrupted goes on: shards are numbered, and no number's random draws come twice.
    Raises ConfigError for prompts that cannot be read, and CapacityError where the disk is full; shards
    written before stay usable.
    """
    remove_leftovers(recording.folder, f"tokens-{options.seed}-*")
    have = recording.num_tokens()
    if have >= options.record_tokens:
        logger.info("%s holds %d generated tokens: nothing to record", recording.folder, have)
        return
    llm = LLM(options.target, **_engine_settings(options))
    try:
        on_cpu = llm.engine.resolved.device == "cpu"
        if not on_cpu and options.max_num_seqs is None:
            logger.info("%d answers at a time", llm.engine.resolved.max_num_seqs)
        _Recorder(options, recording, llm, rounds or (CPU_ROUNDS if on_cpu else ROUNDS)).run(have)
    finally:
        llm.close()


def _engine_settings(options: TrainOptions) -> dict[str, Any]:
    import torch

    cuda = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    rows = options.max_num_seqs or (512 if cuda else 16)
    settings: dict[str, Any] = {
        "device": options.device,
        "dtype": options.dtype,
        "seed": options.seed,
        "max_num_seqs": rows,
        "max_model_len": options.row_tokens,
        # few sizes: each takes time to capture, and a padded row costs little
        "cudagraph_capture_sizes": tuple(sorted({max(rows * part // 8, 1) for part in (1, 2, 4, 6, 8)})),
        "use_tqdm_on_load": False,
    }
    if cuda:
        # some answers end in each step: prompts one by one would take longer than the decoding
        settings |= {
            "gpu_memory_utilization": options.gpu_memory_utilization,
            "max_prefill_rows": min(64, rows),
            "min_prefill_rows": max(rows // 16, 1),
            "max_num_batched_tokens": 2048 + rows,
        }
    return settings


class _Recorder:
    def __init__(self, options: TrainOptions, recording: Recording, llm: LLM, rounds: int) -> None:
        self.options, self.recording, self.llm, self.rounds = options, recording, llm, rounds
        tokenizer, config = llm.get_tokenizer(), llm.engine.model_config
        self.longest = options.row_tokens
        self.prompts: list[list[int]] | None = None
        self.invention: Invention | None = None
        self.has_warned = False
        special = getattr(tokenizer, "all_special_ids", None) or []
        self.special = frozenset([*special, *llm.engine.core.eos_ids])
        self.bos = config.bos_token_id
        if options.data is not None:
            found = read_prompts(Path(options.data), tokenizer)
            self.prompts = [ids for ids in found if len(ids) <= self.longest // 2]
            if dropped := len(found) - len(self.prompts):
                logger.warning("%d prompts of more than %d tokens are left out", dropped, self.longest // 2)
            random.Random(options.seed).shuffle(self.prompts)
            if not self.prompts:
                raise ConfigError(f"no prompt in {options.data!r} is short enough; raise --row-tokens")
        elif (found := invention(tokenizer)) is not None and len(found.before) + len(found.after) < self.longest // 2:
            self.invention = found
            logger.info("the target invents prompts by continuing a user's turn")
        else:
            logger.info("the target has no chat template that it could invent prompts with: it continues random words")

    def run(self, have: int) -> None:
        options, started = self.options, time.monotonic()
        # what an answer has turned out to hold decides how many a shard asks for
        mean = float(options.answer_tokens)
        rows = self.llm.engine.resolved.max_num_seqs
        most = least = max(rows // 4, 1)  # a short first shard tells how quick the target is
        with progress_bar(total=options.record_tokens, initial=have, description="Recording", unit="token") as bar:
            while have < options.record_tokens:
                began = time.monotonic()
                number = self.recording.next_shard(options.seed)
                count = min(most, math.ceil((options.record_tokens - have) / mean))
                documents = self.shard(number, count, self.recording.num_asked(options.seed))
                made = sum(len(document.token_ids) - document.num_given for document in documents)
                if not made:
                    raise CapacityError(
                        f"shard {number} came out empty: the target answers nothing, or every prompt was dropped; "
                        "give prompts with --data"
                    )
                self.recording.add(documents, asked=count, seed=options.seed)
                have, mean = have + made, max(made / count, 1.0)
                bar.update(made)
                now = time.monotonic()
                most = self.rounds * rows
                if options.record_minutes is not None:
                    left_s = started + options.record_minutes * 60 - now
                    most = min(most, max(round(left_s * count / (now - began)), least))
                self._warn_if_long(options.record_tokens - have, made / (now - began))
                # another shard would end later than this one ends too early
                if (
                    options.record_minutes is not None
                    and now + (now - began) / 2 > started + options.record_minutes * 60
                ):
                    logger.info("%.1f minutes are over: recorded %d tokens", (now - started) / 60, have)
                    return

    def _warn_if_long(self, num_left: int, tokens_per_s: float) -> None:
        hours = num_left / tokens_per_s / 3600
        if hours > 1 and self.options.record_minutes is None and not self.has_warned:
            logger.warning(
                "%d more tokens take about %.0f hours to record at %.0f tokens/s; --record-minutes ends it earlier, "
                "--record-tokens asks for fewer",
                num_left,
                hours,
                tokens_per_s,
            )
            self.has_warned = True

    def shard(self, number: int, count: int, asked: int) -> list[Document]:
        """Prompts and their answers; the same for the same arguments and seed. `asked`: prompts before this shard."""
        rng = random.Random(f"{self.options.seed}-{number}")
        prompts = self._prompts(rng, count, asked)
        temperatures = [self._temperature(rng) for _ in prompts]
        params = [
            SamplingParams(
                temperature=temperature,
                max_tokens=min(self.options.answer_tokens, self.longest - len(prompt)),
                seed=rng.getrandbits(62),
                detokenize=False,
            )
            for prompt, temperature in zip(prompts, temperatures, strict=True)
        ]
        documents = []
        answered = zip(prompts, temperatures, self.llm.generate(prompts, params), strict=True)
        for prompt, temperature, output in answered:
            answer = output.outputs[0].token_ids
            if (end := repetition_starts(answer)) < len(answer) and rng.random() >= self.options.loop_share:
                answer = answer[:end]
            if answer:
                document = Document(token_ids=prompt + answer, num_given=len(prompt), temperature=temperature)
                documents.append(document)
        return documents

    def _temperature(self, rng: random.Random) -> float:
        drawn = round(rng.uniform(*ANSWER_TEMPERATURES), 2)
        return 0.0 if rng.random() < self.options.greedy_share else drawn

    def _prompts(self, rng: random.Random, count: int, asked: int) -> list[list[int]]:
        if self.prompts is not None:
            # in an order of their own, and every prompt once before any comes again
            return [self.prompts[(asked + index) % len(self.prompts)] for index in range(count)]
        if self.invention is not None:
            return self._invent(rng, count, self.invention)
        special, vocab_size = self.special, self.recording.vocab_size
        return [random_prompt(rng, bos=self.bos, vocab_size=vocab_size, special=special) for _ in range(count)]

    def _invent(self, rng: random.Random, count: int, how: Invention) -> list[list[int]]:
        room = min(INVENTED_TOKENS, self.longest // 2 - len(how.before) - len(how.after))
        known = [opening for opening in how.openings if len(opening) < room] or [[]]
        openings = [rng.choice(known) if rng.random() < OPENED_SHARE else [] for _ in range(count)]
        params = [
            SamplingParams(
                temperature=rng.uniform(*PROMPT_TEMPERATURES),
                max_tokens=room - len(opening),
                stop_token_ids=how.stops,
                seed=rng.getrandbits(62),
                detokenize=False,
            )
            for opening in openings
        ]
        outputs = self.llm.generate([how.before + opening for opening in openings], params)
        answers = [output.outputs[0] for output in outputs]
        said = dict.fromkeys(  # each prompt once
            (*opening, *answer.token_ids[:-1])
            for opening, answer in zip(openings, answers, strict=True)
            if answer.finish_reason == "stop"
        )
        return [[*how.before, *ids, *how.after] for ids in said if ids]

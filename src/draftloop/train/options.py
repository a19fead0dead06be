"""What `draftloop train` can be told. No torch here: `--help` and refused settings must not wait for it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from draftloop.config.fields import check, check_fields
from draftloop.errors import ConfigError, check_known

_PREFIX = "train option "


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What to train, on what, and how long."""

    target: str = "smollm2-135m"
    """The model to draft for: hub id, folder or alias."""
    method: str = "eagle3"
    """Kind of drafter to train."""
    out: str = "drafter"
    """Folder for everything that training makes; the drafter is in drafter/ below it."""

    data: str | None = None
    """JSON lines of prompts to answer, chat or text; left out, the target invents prompts."""
    recording: str | None = None
    """Folder of what the target said, which several trainings may share; left out, recording/ in --out."""
    hidden_states: str | None = None
    """Folder of extract_hidden_states to train on, instead of a recording."""
    record_only: bool = False
    """Record, and train later."""
    record_tokens: int = 20_000_000
    """Record until this many generated tokens are there, earlier runs included."""
    record_minutes: float | None = None
    """Stop recording earlier, after this long."""
    answer_tokens: int = 384
    """Longest answer, in tokens."""
    greedy_share: float = 0.5
    """Share of the answers at temperature 0; the others are drawn at 0.5 to 1."""
    loop_share: float = 0.05
    """Share of the answers that go in circles which is kept whole; others are cut where an 8-gram comes again for
    the third time."""
    max_num_seqs: int | None = None
    """Answers at a time while recording; left out, 512 on a GPU and 16 on a CPU."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory that recording takes. With less, several processes, each with a --seed of its own,
    can record into one folder."""

    steps: int | None = None
    """Train for this many steps."""
    minutes: float | None = None
    """Train for this long; the learning rate follows the clock."""
    epochs: float = 3.0
    """Train this many times over the recording, where neither steps nor minutes are given."""
    row_tokens: int = 1024
    """Tokens of a row into which documents are packed, and so the longest document."""
    batch_tokens: int | None = None
    """Tokens of a step, all processes together; left out, 32768 on a GPU and 4096 on a CPU."""
    accumulate: int = 1
    """Parts that a step is computed in, to save memory."""
    learning_rate: float = 1e-3
    """Highest learning rate."""
    final_rate: float = 0.05
    """Share of the learning rate that is left at the end of the cosine."""
    warmup: float = 0.03
    """Share of the training in which the learning rate rises."""
    weight_decay: float = 0.0
    """AdamW's weight decay."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    held_out_tokens: int | None = None
    """Tokens of documents that are not trained on, for measuring acceptance; greedy ones if there are any. Left out,
    131072, or a tenth of all where that is less."""
    evaluate_every: int = 200
    """Steps between measurements."""
    checkpoint_every: int = 200
    """Steps between checkpoints: what a kill loses at most."""
    resume: bool = True
    """Go on from the last checkpoint in --out, if there is one."""
    store_bits: int | None = None
    """8: write the drafter's matrices in 8 bits, with a scale per row; left out, in the target's type."""
    init_from: str | None = None
    """Start with the weights of this drafter."""
    seed: int = 0
    """Fixes prompts, answers, order of the data and first weights."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the target and of activations; auto: float32 on a CPU, bfloat16 on a GPU. Weights in training are
    float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes the GPU if there is one."""
    compile: bool | None = None
    """torch.compile what gains from it; left out, on a GPU."""

    def __post_init__(self) -> None:
        for name in ("target", "out", "data", "recording", "hidden_states", "init_from"):
            if isinstance(value := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(value))
        check_fields(self, _PREFIX)
        check_known("training method", [self.method], METHOD_OPTIONS)

        def need(name: str, ok: Callable[[Any], bool], limit: str) -> None:
            value = getattr(self, name)
            check(value is None or ok(value), self, name, limit, _PREFIX)

        for name in ("answer_tokens", "max_num_seqs", "steps", "accumulate", "evaluate_every", "checkpoint_every"):
            need(name, lambda value: value >= 1, "an integer >= 1")
        for name in ("record_minutes", "minutes", "epochs", "learning_rate", "clip"):
            need(name, lambda value: value > 0, "above 0")
        for name in ("greedy_share", "loop_share", "final_rate"):
            need(name, lambda value: 0 <= value <= 1, "in [0, 1]")
        need("gpu_memory_utilization", lambda value: 0 < value <= 1, "in (0, 1]")
        need("warmup", lambda value: 0 <= value < 1, "in [0, 1)")
        need("weight_decay", lambda value: value >= 0, "0 or above")
        need("record_tokens", lambda value: value >= 0, "0 or above")
        need("store_bits", lambda value: value == 8, "8, or left out")
        need("seed", lambda value: 0 <= value < 2**32, "in [0, 2**32)")
        need("row_tokens", lambda value: value >= 16, "an integer >= 16")
        need("held_out_tokens", lambda value: value >= self.row_tokens, f"at least --row-tokens, {self.row_tokens}")
        rows = self.row_tokens * self.accumulate
        need("batch_tokens", lambda value: value >= rows and value % rows == 0, f"a multiple of {rows} (rows x parts)")
        if self.steps is not None and self.minutes is not None:
            raise ConfigError(f"both --steps {self.steps} and --minutes {self.minutes} are given; leave one out")
        if self.hidden_states is not None and (self.record_only or self.recording or self.data):
            raise ConfigError("--hidden-states is trained on as it is; leave --data, --recording and --record-only out")

    @property
    def recording_folder(self) -> Path:
        return Path(self.recording) if self.recording else Path(self.out) / "recording"


@dataclass(frozen=True, kw_only=True)
class Eagle3Options:
    """Of method eagle3."""

    ttt_steps: int = 7
    """Drafts that training goes on with the head's own states for (training-time test)."""
    ttt_decay: float = 0.8
    """What each further draft weighs less."""
    draft_vocab_size: int | None = None
    """Draft from this many most frequent ids of the recording; left out, from all."""
    train_lm_head: bool = False
    """Train an output head of the head's own, which starts as the target's."""
    store_lm_head: bool = True
    """Write the output head of a reduced vocabulary, which other engines need; without it, draftloop takes the
    target's rows."""
    aux_layer_ids: tuple[int, ...] | None = None
    """Target layers whose inputs the head reads; left out, 2, half of the layers, and all but 3."""
    norm_before_fc: bool = True
    """Norm the target's states before they are joined; layers differ much in size."""
    norm_before_residual: bool = True
    """Start the residual stream after the norm of the hidden state, so that it does not grow from draft to draft."""
    attention: Literal["auto", "flex", "dense"] = "auto"
    """How training attends: flex_attention, or with all scores in memory; auto is flex on a GPU."""
    acceptance_loss: float = 0.0
    """Weight of -log of the chance that a sampled draft is accepted, beside the cross-entropy."""

    def __post_init__(self) -> None:
        check_fields(self, _PREFIX)
        check(self.acceptance_loss >= 0, self, "acceptance_loss", "0 or above", _PREFIX)
        check(1 <= self.ttt_steps <= 32, self, "ttt_steps", "in [1, 32]", _PREFIX)
        check(0 < self.ttt_decay <= 1, self, "ttt_decay", "in (0, 1]", _PREFIX)
        size, ids = self.draft_vocab_size, self.aux_layer_ids
        check(size is None or size >= 1, self, "draft_vocab_size", "an integer >= 1", _PREFIX)
        check(ids is None or len(ids) > 0, self, "aux_layer_ids", "a list of at least one layer", _PREFIX)


@dataclass(frozen=True, kw_only=True)
class DraftModelOptions:
    """Of method draft_model."""

    hidden_size: int | None = None
    """Width of the draft model; left out, about a third of the target's."""
    intermediate_size: int | None = None
    """Width of its MLPs; left out, twice its hidden size."""
    num_layers: int = 6
    """Decoder layers."""
    num_heads: int | None = None
    """Query heads; left out, as many as fill the hidden size."""
    num_kv_heads: int | None = None
    """Key and value heads; left out, one."""
    head_dim: int = 64
    """Numbers per head; on a GPU 64, 80, 96, 128 or 256."""
    num_drafts: int = 4
    """Drafts of a round, for the acceptance that is shown while training."""
    teacher_temperature: float = 1.0
    """The target's logits are divided by it; below 1, the likeliest tokens count for more."""
    attention: Literal["auto", "flex", "dense"] = "auto"
    """How training attends: flex_attention, or with all scores in memory; auto is flex on a GPU."""

    def __post_init__(self) -> None:
        check_fields(self, _PREFIX)
        for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            value = getattr(self, name)
            check(value is None or value >= 1, self, name, "an integer >= 1", _PREFIX)
        check(self.head_dim >= 2 and self.head_dim % 2 == 0, self, "head_dim", "an even number >= 2", _PREFIX)
        check(1 <= self.num_drafts <= 32, self, "num_drafts", "in [1, 32]", _PREFIX)
        check(0 < self.teacher_temperature <= 10, self, "teacher_temperature", "in (0, 10]", _PREFIX)


@dataclass(frozen=True, kw_only=True)
class DFlashOptions:
    """Of method dflash."""

    num_layers: int = 1
    """Decoder layers."""
    intermediate_size: int | None = None
    """Width of its MLPs; left out, the target's."""
    num_kv_heads: int | None = None
    """Key and value heads; left out, as many as the target has. All that a block learns of the text passes through
    their values."""
    block_size: int = 8
    """Tokens of a block: one that is known, and masks that become drafts."""
    anchors: int = 256
    """Blocks per row in a step, at random places."""
    gamma: float | None = None
    """Draft j weighs exp(-(j - 1) / gamma); left out, 7/16 of the block."""
    teacher_temperature: float = 1.0
    """The target's logits are divided by it; below 1, the likeliest tokens count for more."""
    mask_token_id: int | None = None
    """Id whose embedding stands for a mask; left out, the first that the target never says."""
    train_mask_embedding: bool = False
    """Train the mask's embedding, which goes to a file of its own (mask_embedding.pt)."""
    draft_vocab_size: int | None = None
    """Draft from this many most frequent ids of the recording; left out, from all."""
    store_lm_head: bool = True
    """Write the output head of a reduced vocabulary, which other engines need; without it, draftloop takes the
    target's rows."""
    aux_layer_ids: tuple[int, ...] | None = None
    """Target layers whose inputs the drafter reads; left out, 2, half of the layers, and all but 3."""
    attention: Literal["auto", "flex", "dense"] = "auto"
    """How training attends: flex_attention, or with all scores in memory; auto is flex on a GPU."""

    def __post_init__(self) -> None:
        check_fields(self, _PREFIX)
        for name in ("num_layers", "intermediate_size", "num_kv_heads"):
            value = getattr(self, name)
            check(value is None or value >= 1, self, name, "an integer >= 1", _PREFIX)
        check(2 <= self.block_size <= 33, self, "block_size", "in [2, 33]", _PREFIX)
        check(self.anchors >= 1, self, "anchors", "an integer >= 1", _PREFIX)
        check(self.gamma is None or self.gamma > 0, self, "gamma", "above 0", _PREFIX)
        check(0 < self.teacher_temperature <= 10, self, "teacher_temperature", "in (0, 10]", _PREFIX)
        mask, size, ids = self.mask_token_id, self.draft_vocab_size, self.aux_layer_ids
        check(mask is None or mask >= 0, self, "mask_token_id", "an integer >= 0", _PREFIX)
        check(size is None or size >= 1, self, "draft_vocab_size", "an integer >= 1", _PREFIX)
        check(ids is None or len(ids) > 0, self, "aux_layer_ids", "a list of at least one layer", _PREFIX)


@dataclass(frozen=True, kw_only=True)
class DSparkOptions(DFlashOptions):
    """Of method dspark."""

    block_size: int = 7
    """Tokens of a block: one that is known, and masks; each becomes a draft."""
    markov_head: Literal["vanilla", "gated", "rnn"] = "vanilla"
    """How a draft is corrected by the token before it: alone, gated by the hidden state, or with a memory."""
    markov_rank: int = 64
    """Numbers that say which token came before."""
    confidence_head: bool = True
    """Train a head that says how likely each draft is to be accepted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.markov_rank >= 1, self, "markov_rank", "an integer >= 1", _PREFIX)


METHOD_OPTIONS: dict[str, type] = {
    "eagle3": Eagle3Options,
    "draft_model": DraftModelOptions,
    "dflash": DFlashOptions,
    "dspark": DSparkOptions,
}
"""Name of a training method -> the dataclass of its options. Options of one name mean the same in each."""


def method_options(name: str, given: dict[str, Any]) -> Any:
    """The options of a method from those that were given.

    Raises ConfigError for a value that does not fit, and for an option that the method does not have.
    """
    cls = METHOD_OPTIONS[name]
    known = {field.name for field in dataclasses.fields(cls)}
    for option in given:
        if option not in known:
            owners = ", ".join(sorted(m for m, c in METHOD_OPTIONS.items() if hasattr(c, option)))
            flag = option.replace("_", "-")
            raise ConfigError(
                f"training method {name!r} does not use --{flag}, which belongs to {owners}; leave it out"
            )
    return cls(**given)

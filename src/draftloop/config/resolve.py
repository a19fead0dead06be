"""Settles every "auto" and every clash of settings, once, before anything is built.

`resolve` is pure: what it needs to know about the machine, the model, the attention backend and the
drafter comes in as `Facts`, and each choice it makes comes out with its reason, printed at start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from draftloop.config.engine import EngineConfig
from draftloop.errors import ConfigError

GraphModeName = Literal["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]

_EVERY_ROW_COUNT_UP_TO = 32
_ROW_STEP = 8
_SMALLEST_TOKEN_BUCKET = 16
_PADDING_COSTS_FROM = 256
"""Tokens of a prompt batch; for fewer the weights take longer to read than to use."""
_LOOP = 64


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the engine found out before it settles its configuration."""

    cuda_available: bool
    model_max_len: int
    """Longest sequence that the model was made for."""
    model_dtype: str
    """Type of the checkpoint's weights: float32, bfloat16 or float16."""
    num_speculative_tokens: int = 0
    """K, 0 without speculation."""
    host_drafter: bool = False
    """The drafter needs the accepted tokens on the host before it can draft."""
    drafter_reuses_prefixes: bool = True
    """The drafter drafts as well behind tokens whose state was found as behind tokens that ran."""
    waiting_attention: bool = False
    """The attention backend waits for the device in every pass."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One setting that was not simply what the user gave."""

    name: str
    value: object
    reason: str


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """The settings in force; nothing here is "auto" any more."""

    device: Literal["cpu", "cuda"]
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_prefill_rows: int
    max_num_batched_tokens: int
    block_size: int
    graph_mode: GraphModeName
    row_buckets: tuple[int, ...]
    """Row counts to capture and to pad to, rising; settled in mode NONE too."""
    token_buckets: tuple[int, ...]
    """Token counts of prefill batches to capture and to pad to, rising."""
    iteration_graph: bool
    """Verify, accept and draft are one graph."""
    device_loop: int
    """Decoding steps that the device may repeat by itself; 0: none."""
    prefix_caching: bool
    """Requests take over what earlier ones computed of the same tokens."""
    pipeline_depth: int
    """Steps in flight: 2 plans the next while one runs, 1 waits for each."""
    require_graphs: bool
    choices: tuple[Choice, ...]
    """What was chosen and why, to print at start."""


def resolve(config: EngineConfig, *, facts: Facts) -> Resolved:
    """Settle the configuration for what there is. Raises ConfigError where settings contradict or do not fit."""
    return _Resolver(config, facts).resolve()


class _Resolver:
    """Collects the reasons while the settings are settled one by one."""

    def __init__(self, config: EngineConfig, facts: Facts) -> None:
        self.config = config
        self.facts = facts
        self.choices: list[Choice] = []

    def resolve(self) -> Resolved:
        device = self.device()
        max_model_len = self.max_model_len()
        max_prefill_rows = min(self.config.max_prefill_rows, self.config.max_num_seqs)
        budget = self.max_num_batched_tokens(device, max_model_len * max_prefill_rows)
        graph_mode = self.graph_mode(device)
        iteration_graph = self.iteration_graph(device, graph_mode)
        return Resolved(
            device=device,
            dtype=self.dtype(device),
            max_model_len=max_model_len,
            max_num_seqs=self.config.max_num_seqs,
            max_prefill_rows=max_prefill_rows,
            max_num_batched_tokens=budget,
            block_size=self.block_size(),
            graph_mode=graph_mode,
            row_buckets=self.row_buckets(device),
            token_buckets=token_ladder(budget),
            iteration_graph=iteration_graph,
            device_loop=self.device_loop(device, graph_mode, iteration_graph),
            prefix_caching=self.prefix_caching(),
            pipeline_depth=self.pipeline_depth(device),
            require_graphs=self.config.require_graphs,
            choices=tuple(self.choices),
        )

    def choose(self, name: str, value, reason: str):
        self.choices.append(Choice(name=name, value=value, reason=reason))
        return value

    def device(self) -> Literal["cpu", "cuda"]:
        if self.config.device == "cuda" and not self.facts.cuda_available:
            raise ConfigError("device is 'cuda', but there is no usable GPU; leave it at 'auto' or say 'cpu'")
        if self.config.device != "auto":
            return self.config.device
        if self.facts.cuda_available:
            return self.choose("device", "cuda", "there is a GPU")
        return self.choose("device", "cpu", "there is no usable GPU")

    def dtype(self, device: str) -> str:
        if self.config.dtype != "auto":
            return self.config.dtype
        if device == "cpu":
            return self.choose("dtype", "float32", "the exact and usually fastest type on a CPU")
        return self.choose("dtype", self.facts.model_dtype, "the checkpoint's own type")

    def max_model_len(self) -> int:
        own, asked = self.facts.model_max_len, self.config.max_model_len
        k = self.facts.num_speculative_tokens
        if k >= (shorter := min(own, asked or own)):
            raise ConfigError(
                f"num_speculative_tokens is {k}, but the longest sequence is {shorter} tokens; draft fewer than that"
            )
        if asked is None:
            return self.choose("max_model_len", own, "the model's own length")
        if asked > own:
            raise ConfigError(f"max_model_len is {asked}, above the model's own {own}; lower it or leave it out")
        return asked

    def max_num_batched_tokens(self, device: str, most: int) -> int:
        if self.config.max_num_batched_tokens is not None:
            return self.config.max_num_batched_tokens
        usual = 2048 if device == "cuda" else 256
        if most < usual:
            return self.choose("max_num_batched_tokens", most, "max_prefill_rows times max_model_len need no more")
        reason = "large enough to fill a GPU" if device == "cuda" else "more per step is no faster on a CPU"
        return self.choose("max_num_batched_tokens", usual, reason)

    def block_size(self) -> int:
        if self.config.block_size is not None:
            return self.config.block_size
        return self.choose("block_size", 16, "little waste per request")

    def graph_mode(self, device: str) -> GraphModeName:
        """The user's mode, never widened. What a phase cannot do is settled, and said, phase by phase."""
        asked, required = self.config.cudagraph_mode, self.config.require_graphs
        if self.config.enforce_eager:
            if asked not in ("auto", "NONE"):
                raise ConfigError(f"enforce_eager captures nothing, but cudagraph_mode is {asked!r}; leave one out")
            if required:
                raise ConfigError("enforce_eager captures nothing, but require_graphs is set; leave one out")
            return self.choose("cudagraph_mode", "NONE", "enforce_eager")
        if asked == "NONE" and required:
            raise ConfigError("cudagraph_mode is 'NONE', but require_graphs is set; leave one out")
        if asked != "auto":
            return asked
        if device == "cuda":
            reason = "decode as one graph, prompts as pieces between attention calls"
            return self.choose("cudagraph_mode", "FULL_AND_PIECEWISE", reason)
        return self.choose("cudagraph_mode", "FULL_DECODE_ONLY", "prompts gain nothing from a tape on a CPU")

    def row_buckets(self, device: str) -> tuple[int, ...]:
        most, asked = self.config.max_num_seqs, self.config.cudagraph_capture_sizes
        if asked is not None:
            sizes = tuple(sorted(set(asked)))
            if sizes[-1] < most and self.config.require_graphs:
                raise ConfigError(
                    f"cudagraph_capture_sizes ends at {sizes[-1]}, below max_num_seqs {most}, so larger batches"
                    " would run eager, but require_graphs is set; add the size or lower max_num_seqs"
                )
            return sizes
        if device == "cuda":
            reason = f"every row count up to {_EVERY_ROW_COUNT_UP_TO}, then every {_ROW_STEP}th, and the largest"
            return self.choose("cudagraph_capture_sizes", dense_ladder(most), reason)
        reason = "powers of two and the largest: each tape costs a forward pass"
        return self.choose("cudagraph_capture_sizes", doubling_ladder(1, most), reason)

    def iteration_graph(self, device: str, mode: GraphModeName) -> bool:
        # a drafter on the host, one that observes included, looks at each step's parts
        asked, full = self.config.iteration_graph, mode in ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
        if asked and not full:
            raise ConfigError(f"iteration_graph is set, but cudagraph_mode {mode!r} has no full graphs; leave one out")
        if asked and self.facts.host_drafter:
            raise ConfigError("iteration_graph is set, but this drafter works on the host between steps; leave it out")
        if asked is not None:
            return asked
        if device == "cuda" and full and not self.facts.host_drafter:
            return self.choose("iteration_graph", True, "one launch for each decoding step")
        if isinstance(self.config.device_loop, int) and full and not self.facts.host_drafter:
            return self.choose("iteration_graph", True, "the device loop repeats it")
        return False

    def device_loop(self, device: str, mode: GraphModeName, iteration_graph: bool) -> int:
        asked = self.config.device_loop
        if asked == "off":
            return 0
        if self.config.steps_together:
            why = "engines that share experts agree on every step"
            if asked != "auto":
                raise ConfigError(f"device_loop is {asked}, but {why} on the host; leave it out")
            return self.choose("device_loop", 0, why)
        if asked == "auto":
            if device == "cuda" and iteration_graph:
                return self.choose("device_loop", _LOOP, "the host commits steps while the GPU goes on by itself")
            return 0
        if not iteration_graph:
            why = f"cudagraph_mode {mode!r} has no full graphs"
            if self.facts.host_drafter:
                why = "this drafter works on the host between steps"
            elif self.config.iteration_graph is False:
                why = "iteration_graph is off"
            raise ConfigError(f"device_loop is {asked}, but {why}, and it repeats iteration graphs; leave one out")
        return int(asked)

    def prefix_caching(self) -> bool:
        asked, able = self.config.enable_prefix_caching, self.facts.drafter_reuses_prefixes
        if asked and not able:
            raise ConfigError(
                "enable_prefix_caching is set, but this drafter needs every token of a prompt to run; leave it out"
            )
        if asked is None and not able:
            return self.choose("enable_prefix_caching", False, "this drafter needs every token of a prompt to run")
        return asked is not False

    def pipeline_depth(self, device: str) -> int:
        asked, host = self.config.async_scheduling, self.facts.host_drafter
        if asked and host:
            raise ConfigError(
                "async_scheduling is set, but this drafter needs each step's tokens on the host; leave it out"
            )
        if asked is not None:
            return 2 if asked else 1
        if host:
            return self.choose("pipeline_depth", 1, "the drafter needs each step's tokens on the host")
        if self.facts.waiting_attention:
            reason = f"attention backend {self.config.attention_backend} waits for the device in every pass"
            return self.choose("pipeline_depth", 1, reason)
        if device == "cuda":
            return self.choose("pipeline_depth", 2, "the next step is planned while the GPU runs one")
        return self.choose("pipeline_depth", 1, "planning ahead gains nothing on a CPU")


def dense_ladder(most: int) -> tuple[int, ...]:
    """1 .. 32, then every 8th, and `most` itself."""
    dense = range(1, min(most, _EVERY_ROW_COUNT_UP_TO) + 1)
    return tuple(sorted({*dense, *range(_EVERY_ROW_COUNT_UP_TO, most + 1, _ROW_STEP), most}))


def sparse_ladder(rows: Sequence[int]) -> tuple[int, ...]:
    """Of these sizes the powers of two, every 32nd, and the largest."""
    return tuple(size for size in rows if size & (size - 1) == 0 or size % 32 == 0 or size == max(rows))


def doubling_ladder(first: int, most: int) -> tuple[int, ...]:
    """`first`, twice that, .. up to `most`, and `most` itself."""
    sizes = [most]
    while first < most:
        sizes.append(first)
        first *= 2
    return tuple(sorted(sizes))


def token_ladder(budget: int) -> tuple[int, ...]:
    """Token buckets of prefill batches: powers of two from 16 up, those between where padding costs, and the budget."""
    sizes = doubling_ladder(_SMALLEST_TOKEN_BUCKET, budget)
    between = [size + size // 2 for size in sizes if size >= _PADDING_COSTS_FROM and 2 * size <= budget]
    return tuple(sorted({*sizes, *between}))

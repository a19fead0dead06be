"""How tokens are drafted and accepted. Key names and meanings are vLLM's."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from draftloop.config.draft_schedule import check_schedule, draft_counts
from draftloop.config.draft_tree import Choice, DraftTree, parse_choices
from draftloop.config.fields import build, check, check_fields
from draftloop.errors import ConfigError

MAX_SPECULATIVE_TOKENS = 32

_PREFIX = "speculative_config key "
_DRAFT_TP = "draft_tensor_parallel_size"


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """What drafts, and how drafts are accepted. None means "not given": the drafter's default holds."""

    method: str | None = None
    """The drafter: ngram, suffix, draft_model, eagle3, eagle, mtp, gemma4_mtp, dflash, dspark, synthetic, or any
    other that is registered."""
    drafters: tuple[SpeculativeConfig, ...] | None = None
    """cascade: configurations of several drafters; each row takes the drafts of the first that has any for it."""
    model: str | None = None
    """The drafter's model: hub id, folder or alias."""
    draft_tensor_parallel_size: int | None = None
    """GPUs that share the drafter: as many as share the target, or 1, where each of those has all of it. Left out: as
    many, where they divide it."""
    num_speculative_tokens: int | None = None
    """Tokens drafted per step, 0 to 32; 0 turns speculation off. With a tree it may be left out."""
    num_speculative_tokens_per_batch_size: tuple[tuple[int, ...], ...] | None = None
    """Drafts per step by the number of rows that decode: [[1, 8, 5], [9, 32, 2], [33, 256, 0]] drafts five tokens up to
    8 rows, two up to 32, none up to 256, and num_speculative_tokens at all other numbers."""
    adaptive: bool | None = None
    """Drafts per step, from num_speculative_tokens down to none, as make the most tokens per second: by the times
    of the captured graphs, which are measured at start, and by what is accepted."""
    adaptive_num_tokens: tuple[int, ...] | None = None
    """adaptive: the numbers of drafts to choose from, each with graphs of its own; left out, 0, 1, 2, 3, 5, 8, .. up
    to num_speculative_tokens, which is always among them."""
    speculative_token_tree: tuple[Choice, ...] | None = None
    """eagle, eagle3: drafts form this tree instead of a chain, up to 63 of them. Each is named by the ranks on its way
    from the root: "[(0,), (1,), (0, 0)]" drafts the two likeliest tokens, and the likeliest one behind the first."""
    prompt_lookup_min: int | None = None
    """ngram: shortest run of tokens that counts as a match."""
    prompt_lookup_max: int | None = None
    """ngram: longest run of tokens that is looked up."""
    suffix_decoding_max_tree_depth: int | None = None
    """suffix: longest run of tokens that is kept; left out, 24."""
    suffix_decoding_max_cached_requests: int | None = None
    """suffix: answers of ended requests that are kept, 0 for none; left out, 10000. One token takes about 0.4 KB."""
    suffix_decoding_max_spec_factor: float | None = None
    """suffix: tokens that are drafted for each token that matches; left out, 1."""
    suffix_decoding_min_token_prob: float | None = None
    """suffix: a draft ends where it is less likely than this; left out, 0.1."""
    suffix_decoding_backend: Literal["own", "arctic"] | None = None
    """suffix: own: trees in Python. arctic: those of arctic-inference, in C++ (extra `suffix`)."""
    draft_sample_method: Literal["greedy", "probabilistic"] | None = None
    """greedy: draft the most likely token. probabilistic: sample from the drafter and accept by its probabilities."""
    parallel_drafting: bool | None = None
    """eagle3, draft_model: all drafts in one pass, from masks; the same as the methods peagle and pard."""
    rejection_sample_method: Literal["standard", "block", "typical", "synthetic"] | None = None
    """standard: lossless, draft by draft. block: lossless, all drafts together, so that more of them stand where
    they are sampled. Left out: block where drafts are sampled, else standard. typical: LOSSY above temperature 0,
    drafts stand where the target finds them plausible. synthetic: forced acceptance, for benchmarks without a
    trained drafter."""
    typical_acceptance_threshold: float | None = None
    """typical: a draft that the target finds at least this likely stands; in (0, 1]; left out, 0.09."""
    typical_acceptance_alpha: float | None = None
    """typical: a draft also stands where it is likelier than this times exp(-entropy of the target); above 0; left
    out, 0.3."""
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    """Share of steps in which the first i drafts are all accepted, for i = 1 .. K; never rising."""
    synthetic_acceptance_length: float | None = None
    """Mean tokens per step, the bonus token included; in [1, K+1]."""
    max_model_len: int | None = None
    """Longest sequence that the drafter's model sees; rows that are longer draft nothing."""
    revision: str | None = None
    """Branch, tag or commit of the drafter's model on the hub."""
    attention_backend: str | None = None
    """Attention of the drafter's model; left out, the best one for the device, whatever the target's is."""
    load_format: Literal["auto", "safetensors", "pt", "dummy"] | None = None
    """How the drafter's weights are loaded, as for the target; dummy makes random ones."""
    quantization: Literal["fp8", "int4", "gptq", "awq", "compressed-tensors"] | None = None
    """draft_model: as for the target, whose own quantisation the drafter never inherits."""
    aux_layer_offset: int | None = None
    """eagle3, dflash, dspark: added to the layer ids in the drafter's config, instead of what its layout implies;
    try 0 and 1."""
    confidence_threshold: float | None = None
    """dspark: a row's drafts end before the first that is less likely than this to be reached and accepted, by the
    drafter's own confidences; in [0, 1]; left out, all K are verified."""
    gemma4_position: Literal["hf", "vllm"] | None = None
    """gemma4_mtp: where queries stand. hf: at the bonus token, as in Hugging Face transformers, and if left out; vllm:
    one before it, at the last position that the target has written."""
    layer_ids: tuple[int, ...] | None = None
    """extract_hidden_states: layers whose input is written; the number of layers stands for what leaves the last
    one, -1 for the states after the final norm."""
    output_dir: str | None = None
    """extract_hidden_states: folder that the shards are written to."""
    shard_tokens: int | None = None
    """extract_hidden_states: tokens per shard; left out, 8192."""
    drafter_options: Mapping[str, Any] | None = None
    """For drafters of other packages: whatever they read."""
    script: Callable[[str, list[int], int], list[int]] | None = None
    """Drafts given by a function of (request id, token ids, K); Python only, for tests."""

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any] | SpeculativeConfig | None) -> SpeculativeConfig | None:
        """Make it from a dict as vLLM's `speculative_config`; None stays None.

        Raises ConfigError naming the key, its value and what would fit.
        """
        if values is None or isinstance(values, SpeculativeConfig):
            return values
        if not isinstance(values, Mapping):
            raise ConfigError(f"speculative_config is {values!r}; it must be a mapping")
        return build(cls, "speculative_config key", values)

    def __post_init__(self) -> None:
        per_batch = "num_speculative_tokens_per_batch_size"
        for name in ("synthetic_acceptance_rates", "layer_ids", "drafters", "adaptive_num_tokens", per_batch):
            value = getattr(self, name)
            if isinstance(value, Sequence) and not isinstance(value, str):
                object.__setattr__(self, name, tuple(map(_part, value)))
        if isinstance(self.output_dir, os.PathLike):
            object.__setattr__(self, "output_dir", os.fspath(self.output_dir))
        if self.speculative_token_tree is not None:
            object.__setattr__(self, "speculative_token_tree", parse_choices(self.speculative_token_tree))
        check_fields(self, _PREFIX)
        if self.tree is not None:
            self._check_tree(self.tree)
        num = self.num_speculative_tokens
        fits = self.tree is not None or num is None or 0 <= num <= MAX_SPECULATIVE_TOKENS
        self._need(fits, "num_speculative_tokens", "in [0, 32]")
        if self.method is None and self.model is None and num != 0:
            raise ConfigError("speculative_config names neither a method nor a model; give one, or leave it out")
        for name in ("prompt_lookup_min", "prompt_lookup_max", "max_model_len", "shard_tokens", _DRAFT_TP):
            value = getattr(self, name)
            self._need(value is None or value >= 1, name, "an integer >= 1")
        if any(part.tree is not None for part in self.drafters or ()):
            raise ConfigError(
                f"{_PREFIX}drafters names one with a speculative_token_tree; several drafters make chains"
            )
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if low is not None and high is not None:
            self._need(low <= high, "prompt_lookup_min", f"at most prompt_lookup_max, {high}")
        level = self.confidence_threshold
        self._need(level is None or 0 <= level <= 1, "confidence_threshold", "in [0, 1]")
        check_schedule(self)
        self._check_suffix()
        self._check_typical()
        self._check_synthetic()

    @property
    def enabled(self) -> bool:
        """False where K = 0 was asked for."""
        return self.num_speculative_tokens != 0

    @property
    def tree(self) -> DraftTree | None:
        """None: drafts form a chain."""
        return None if self.speculative_token_tree is None else DraftTree.of_choices(self.speculative_token_tree)

    def draft_counts(self, most: int) -> tuple[int, ...]:
        """The numbers of drafts that a step may verify, falling from `most`; it alone where that is fixed."""
        return draft_counts(self, most)

    def _check_tree(self, tree: DraftTree) -> None:
        num, most = self.num_speculative_tokens, tree.num_drafts
        self._need(num in (None, most), "num_speculative_tokens", f"left out, or {most} as the tree has drafts")
        object.__setattr__(self, "num_speculative_tokens", most)
        if tree.is_chain:
            return
        # a tree's drafts are the likeliest ones: nothing is drawn whose probability the acceptance could use
        with_tree = "'greedy' or left out with a speculative_token_tree"
        self._need(self.draft_sample_method in (None, "greedy"), "draft_sample_method", with_tree)
        with_tree = "'standard', 'synthetic' or left out with a speculative_token_tree"
        self._need(
            self.rejection_sample_method in (None, "standard", "synthetic"), "rejection_sample_method", with_tree
        )

    def _check_suffix(self) -> None:
        for key, least, limit in (
            ("max_tree_depth", 2, "an integer >= 2, one to match and one to draft"),
            ("max_cached_requests", 0, "an integer >= 0"),
            ("max_spec_factor", 0, "a number >= 0"),
            ("min_token_prob", 0, "a number in [0, 1]"),
        ):
            name = f"suffix_decoding_{key}"
            value = getattr(self, name)
            self._need(value is None or (value >= least and (key != "min_token_prob" or value <= 1)), name, limit)

    def _check_typical(self) -> None:
        for name, most in (("typical_acceptance_threshold", 1), ("typical_acceptance_alpha", float("inf"))):
            value = getattr(self, name)
            if value is not None and self.rejection_sample_method != "typical":
                raise ConfigError(f"{_PREFIX}{name} is {value!r}, but rejection_sample_method is not 'typical'")
            self._need(value is None or 0 < value <= most, name, "in (0, 1]" if most == 1 else "a number above 0")

    def _check_synthetic(self) -> None:
        num, rates = self.num_speculative_tokens, self.synthetic_acceptance_rates
        if self.tree is not None:
            num = self.tree.depth  # most that can be accepted
        length = self.synthetic_acceptance_length
        if rates is not None and length is not None:
            both = "both synthetic_acceptance_rates and synthetic_acceptance_length"
            raise ConfigError(f"speculative_config gives {both}; leave one out")
        if rates is not None:
            name = "synthetic_acceptance_rates"
            self._need(all(0 <= rate <= 1 for rate in rates), name, "a list of numbers in [0, 1]")
            self._need(list(rates) == sorted(rates, reverse=True), name, "a list that never rises")
            each = "speculative token" if self.tree is None else "height of the tree"
            self._need(num is None or len(rates) == num, name, f"one number per {each}, {num}")
        if length is not None:
            top = (MAX_SPECULATIVE_TOKENS if num is None else num) + 1
            most = "num_speculative_tokens" if self.tree is None else "depth of the tree"
            limit = f"in [1, {most} + 1], here [1, {top}]"
            self._need(1 <= length <= top, "synthetic_acceptance_length", limit)

    def _need(self, ok: bool, name: str, limit: str) -> None:
        check(ok, self, name, limit, _PREFIX)


def _part(value: Any) -> Any:
    """One entry of a list, in the type that its field has."""
    if isinstance(value, Mapping):
        return SpeculativeConfig.from_mapping(value)
    return tuple(value) if isinstance(value, list) else value

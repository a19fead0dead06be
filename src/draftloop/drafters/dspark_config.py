"""What DSpark adds to a DFlash drafter: a Markov head and a confidence head. Nothing here reads weights.

Source: "DSpark", arXiv 2607.05147, as its checkpoints (DeepSpec, SpecForge, speculators) have it.

Shape letters in comments: C width of the drafter, N rank of the Markov head, V vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from draftloop.drafters.files import Shape
from draftloop.errors import ConfigError, nearest

MarkovKind = Literal["vanilla", "gated", "rnn"]


@dataclass(frozen=True, kw_only=True)
class DSparkConfig:
    """The heads behind the block."""

    markov_kind: MarkovKind | None
    """None: no Markov head; slots do not know of each other's tokens."""
    markov_rank: int = 0
    vocab_size: int
    """V: ids that the Markov head can be given, the target's."""
    confidence: bool = False
    """A head that says how likely each draft is to be accepted."""
    confidence_reads_markov: bool = False
    """It reads the embedding of the token before, beside the hidden state."""
    confidence_bias: bool = True

    def shapes(self, width: int, draft_vocab_size: int) -> dict[str, Shape]:
        """Tensors by plain name, for a drafter `width` wide."""
        rank = self.markov_rank
        found: dict[str, Shape] = {}
        if self.markov_kind:
            found["markov_head.markov_w1.weight"] = (self.vocab_size, rank)
            found["markov_head.markov_w2.weight"] = (draft_vocab_size, rank)
        if self.markov_kind == "gated":
            found["markov_head.gate_proj.weight"] = (rank, width + rank)
            found["markov_head.gate_proj.bias"] = (rank,)
        if self.markov_kind == "rnn":
            found["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + width)
            found["markov_head.joint_proj.bias"] = (3 * rank,)
        if self.confidence:
            found["confidence_head.proj.weight"] = (1, width + rank * self.confidence_reads_markov)
            if self.confidence_bias:
                found["confidence_head.proj.bias"] = (1,)
        return found


def read_heads(config: Mapping[str, Any], shapes: Mapping[str, Shape], *, vocab_size: int, name: str) -> DSparkConfig:
    """From the keys of a checkpoint, wherever its layout keeps them. Raises ConfigError for an unknown Markov head."""
    nested: Mapping[str, Any] = config.get("dflash_config") or {}

    def option(key: str, default: Any) -> Any:
        return nested.get(key, config.get(key, default))

    w1 = shapes.get("markov_head.markov_w1.weight")
    rank = int(option("markov_rank", w1[1] if w1 else 0) or 0)
    kind = str(option("markov_head_type", "vanilla")).lower() if rank else None
    if kind is not None and kind not in get_args(MarkovKind):
        raise ConfigError(
            f"markov_head_type of {name!r} is {kind!r}{nearest(kind, get_args(MarkovKind))} "
            f"Supported: {', '.join(get_args(MarkovKind))}"
        )
    proj = shapes.get("confidence_head.proj.weight")
    reads_markov = proj is not None and "norm.weight" in shapes and proj[-1] != shapes["norm.weight"][0]
    return DSparkConfig(
        markov_kind=kind,  # type: ignore[arg-type]
        markov_rank=rank,
        vocab_size=w1[0] if w1 else vocab_size,
        confidence=bool(option("enable_confidence_head", proj is not None)),
        confidence_reads_markov=bool(option("confidence_head_with_markov", reads_markov)) and rank > 0,
        confidence_bias=proj is None or "confidence_head.proj.bias" in shapes,
    )

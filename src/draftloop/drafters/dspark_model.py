"""What DSpark runs behind a block: each draft's logits are corrected by the token before it, left to right.

Shape suffixes: R rows, C width of the drafter, N rank of the Markov head, V vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from draftloop.drafters.dspark_config import DSparkConfig, MarkovKind
from draftloop.kernels.linear import linear
from draftloop.kernels.widened import embedding
from draftloop.models.layers import parameter


def markov_step(
    kind: MarkovKind,
    previous: Tensor,
    hidden: Tensor,
    memory: Tensor,
    project: Callable[[Tensor], Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """What `markov_w2` makes the correction from, [..., N], and the memory of the next step.

    `previous` [..., N]: the token before, embedded by `markov_w1`; `hidden` [..., C]: what the output head
    reads; `memory` [..., N]: zeros in the first step. `project` is the projection that `gated` (of hidden state
    and previous token) and `rnn` (of memory, previous token and hidden state) have.
    """
    if project is None:
        return previous, memory
    if kind == "gated":
        return torch.sigmoid(project(torch.cat((hidden, previous), -1))) * previous, memory
    gate, candidate, output = project(torch.cat((memory, previous, hidden), -1)).chunk(3, -1)
    gate = torch.sigmoid(gate)
    return torch.tanh(output), gate * memory + (1 - gate) * torch.tanh(candidate)


class DSparkHeads(torch.nn.Module):
    """Markov head and confidence head, each if the checkpoint has it."""

    def __init__(
        self, config: DSparkConfig, *, width: int, draft_vocab_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        shapes = config.shapes(width, draft_vocab_size)

        def make(name: str) -> torch.nn.Parameter | None:
            return parameter(*shapes[name], device=device, dtype=dtype) if name in shapes else None

        projection = {"gated": "gate_proj", "rnn": "joint_proj"}.get(config.markov_kind or "")
        self.project_weight = make(f"markov_head.{projection}.weight")
        self.project_bias = make(f"markov_head.{projection}.bias")
        self.markov_w1, self.markov_w2 = make("markov_head.markov_w1.weight"), make("markov_head.markov_w2.weight")
        self.confidence_weight = make("confidence_head.proj.weight")
        self.confidence_bias = make("confidence_head.proj.bias")
        self._weights = {
            f"markov_head.{projection}.weight": self.project_weight,
            f"markov_head.{projection}.bias": self.project_bias,
            "markov_head.markov_w1.weight": self.markov_w1,
            "markov_head.markov_w2.weight": self.markov_w2,
            "confidence_head.proj.weight": self.confidence_weight,
            "confidence_head.proj.bias": self.confidence_bias,
        }

    def embed(self, token_ids_R: Tensor) -> Tensor:
        """[R, N]: tokens before a draft, as the heads read them. NO_DRAFT and ids past the table: any will do."""
        assert self.markov_w1 is not None
        return embedding(token_ids_R.clamp(0, self.markov_w1.shape[0] - 1), self.markov_w1, self.dtype)

    def correct(self, previous_RN: Tensor, hidden_RC: Tensor, memory_RN: Tensor) -> tuple[Tensor, Tensor]:
        """[R, W] to be added to a draft's logits, and the memory of the next step."""
        kind, weight, bias = self.config.markov_kind, self.project_weight, self.project_bias
        assert kind is not None
        assert self.markov_w2 is not None
        project = None if weight is None else lambda x: linear(x, weight, bias)
        latent_RN, memory_RN = markov_step(kind, previous_RN, hidden_RC, memory_RN, project)
        return linear(latent_RN, self.markov_w2), memory_RN

    def confidence(self, hidden_RC: Tensor, previous_RN: Tensor | None) -> Tensor:
        """fp32 [R]: how likely a draft is to be accepted where all before it are."""
        features = hidden_RC
        if self.config.confidence_reads_markov:
            assert previous_RN is not None
            features = torch.cat((hidden_RC, previous_RN), -1)
        assert self.confidence_weight is not None
        score_R1 = linear(features, self.confidence_weight, self.confidence_bias)
        return torch.sigmoid(score_R1.float()).squeeze(-1)

    def num_streamed(self) -> int:
        """Weights that each step of a round reads; of `markov_w1` that is only a few rows."""
        return sum(weight.numel() for name, weight in self.destinations().items() if "markov_w1" not in name)

    def destinations(self) -> dict[str, Tensor]:
        """Plain tensor name -> the weight that it fills."""
        return {name: weight.data for name, weight in self._weights.items() if weight is not None}

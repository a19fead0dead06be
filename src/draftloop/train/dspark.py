"""DSpark drafters: DFlash, and heads that let each draft of a block know the one before it.

Source: "DSpark", arXiv 2607.05147. The anchor's own slot predicts the first draft. The Markov head is trained on
the true text, which is what comes before a draft that can still be accepted. The confidence head learns
whether a draft would be accepted, and changes nothing else.

Shape suffixes: B rows, A anchors, K drafts of a block, C width, N rank of the Markov head, V vocabulary,
W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from draftloop.drafters.dspark_config import DSparkConfig, MarkovKind
from draftloop.drafters.dspark_model import markov_step
from draftloop.train.anchors import Anchors
from draftloop.train.dflash import BlockMethod, DFlashModule
from draftloop.train.draft_model import narrowed
from draftloop.train.layers import INITIAL_STD, linear
from draftloop.train.options import DSparkOptions


def biased(inputs: int, outputs: int) -> nn.Linear:
    """With bias, small random weights."""
    made = nn.Linear(inputs, outputs)
    nn.init.normal_(made.weight, std=INITIAL_STD)
    nn.init.zeros_(made.bias)
    return made


class MarkovHead(nn.Module):
    """Corrects a draft's logits by the token before it. At first it corrects nothing."""

    def __init__(self, kind: MarkovKind, *, rank: int, width: int, vocab_size: int, draft_vocab_size: int) -> None:
        super().__init__()
        self.kind = kind
        self.markov_w1, self.markov_w2 = nn.Embedding(vocab_size, rank), linear(rank, draft_vocab_size)
        nn.init.zeros_(self.markov_w2.weight)
        self.gate_proj = biased(width + rank, rank) if kind == "gated" else None
        self.joint_proj = biased(2 * rank + width, 3 * rank) if kind == "rnn" else None

    def forward(self, previous_BAKN: Tensor, hidden_BAKC: Tensor) -> Tensor:
        """[B, A, K, N], to be multiplied by `markov_w2`."""
        memory = torch.zeros_like(previous_BAKN[..., 0, :])
        project: Callable[[Tensor], Tensor] | None = self.gate_proj or self.joint_proj
        if self.kind != "rnn":
            return markov_step(self.kind, previous_BAKN, hidden_BAKC, memory, project)[0]
        found = []
        for previous, hidden in zip(previous_BAKN.unbind(-2), hidden_BAKC.unbind(-2), strict=True):
            latent, memory = markov_step(self.kind, previous, hidden, memory, project)
            found.append(latent)
        return torch.stack(found, -2)


class ConfidenceHead(nn.Module):
    """Scores of what a draft is made from."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = biased(inputs, 1)

    def forward(self, features: Tensor) -> Tensor:
        """[..., inputs] -> [...], before the sigmoid."""
        return self.proj(features).squeeze(-1)


class DSparkModule(DFlashModule):
    """DFlash with a Markov head and, if asked for, a confidence head."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        drafter, heads = self.drafter, self.drafter.heads
        assert heads is not None
        assert heads.markov_kind is not None
        self.markov_head = MarkovHead(
            heads.markov_kind,
            rank=heads.markov_rank,
            width=drafter.model.hidden_size,
            vocab_size=heads.vocab_size,
            draft_vocab_size=drafter.draft_vocab_size,
        )
        inputs = drafter.model.hidden_size + heads.markov_rank
        self.confidence_head = ConfidenceHead(inputs) if heads.confidence else None

    def _previous(self, anchors: Anchors, said_BAK: Tensor) -> Tensor:
        """[B, A, K, N]: the token before each draft, embedded."""
        anchor_BA1 = anchors.at(anchors.batch.token_ids_BL, torch.zeros_like(said_BAK[0, 0, :1]))
        return self.markov_head.markov_w1(torch.cat((anchor_BA1, said_BAK[..., :-1]), -1))

    def features(
        self, hidden_BAKC: Tensor, head_WC: Tensor, anchors: Anchors, said_BAK: Tensor
    ) -> tuple[Tensor, Tensor]:
        latent_BAKN = self.markov_head(self._previous(anchors, said_BAK), hidden_BAKC)
        # one product gives the sum of both
        table = torch.cat((head_WC, self.markov_head.markov_w2.weight.to(head_WC.dtype)), 1)
        return torch.cat((hidden_BAKC, latent_BAKN.to(hidden_BAKC.dtype)), -1), table

    def other_loss(
        self, hidden_BAKC: Tensor, anchors: Anchors, said_BAK: Tensor, right_BAK: Tensor, weight_BAK: Tensor
    ) -> Tensor:
        if self.confidence_head is None:
            return super().other_loss(hidden_BAKC, anchors, said_BAK, right_BAK, weight_BAK)
        previous_BAKN = self._previous(anchors, said_BAK).to(hidden_BAKC.dtype)
        features = torch.cat((hidden_BAKC, previous_BAKN), -1).detach()
        scores_BAK = self.confidence_head(features).float()
        return F.binary_cross_entropy_with_logits(scores_BAK, right_BAK.float(), weight_BAK, reduction="sum")


class DSparkMethod(BlockMethod[DSparkOptions]):
    """Drafts of a block are chosen left to right."""

    name = "dspark"
    method = "dspark"
    architecture = "DSparkSpeculator"
    samples_from_anchor = True
    module_class = DSparkModule

    def heads(self) -> DSparkConfig:
        options = self.options
        return DSparkConfig(
            markov_kind=options.markov_head,
            markov_rank=options.markov_rank,
            vocab_size=self.subject.vocab_size,
            confidence=options.confidence_head,
            confidence_reads_markov=options.confidence_head,
        )

    def build(self, token_counts_V: Tensor) -> DFlashModule:
        module = super().build(token_counts_V)
        assert isinstance(module, DSparkModule)
        # tokens that the target's head takes for alike are alike before a draft, too
        rank = self.options.markov_rank
        with torch.no_grad():
            table_VN = narrowed(self.subject.lm_head, token_counts_V, rank) * rank**0.5
            module.markov_head.markov_w1.weight.copy_(table_VN)
        return module

    def config(self) -> dict[str, Any]:
        heads = self.heads()
        return {
            **super().config(),
            "markov_rank": heads.markov_rank,
            "markov_head_type": heads.markov_kind,
            "enable_confidence_head": heads.confidence,
            "confidence_head_with_markov": heads.confidence_reads_markov,
        }

"""What ranks make of their parts of a vocabulary is what one makes of all of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftloop.kernels.argmax import unpack_maxima
from draftloop.kernels.write_children import top_torch
from draftloop.models.output_head import Vocabulary


class Rank:
    """Stands for one of several ranks; what it gathers is its own."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return x


def divided(size: int, num_ranks: int) -> list[Vocabulary]:
    return [Vocabulary(size, Rank(rank, num_ranks)) for rank in range(num_ranks)]  # type: ignore[arg-type]


@given(st.integers(1, 40), st.integers(2, 5), st.integers(1, 50), st.integers(0, 1000))
def test_the_likeliest_token_of_all_parts_is_the_lowest_id_of_the_largest_logit(size, num_ranks, known, seed):
    """Few distinct values tie everywhere; what pads a part is larger than any."""
    logits_TV = torch.randint(-2, 2, (6, size), generator=torch.Generator().manual_seed(seed)).float()
    logits_TV[0, seed % size] = float("nan")
    logits_TV[1] = float("-inf")
    logits_TV[2, seed % size] = float("inf")
    parts = divided(size, num_ranks)
    width = parts[0].width
    padded = torch.nn.functional.pad(logits_TV, (0, num_ranks * width - size), value=9.0).split(width, 1)
    best = torch.cat([one.maxima(part, known=known) for one, part in zip(parts, padded, strict=True)], 1)
    top = logits_TV[:, :known].max(-1)
    index, is_finite = unpack_maxima(best)
    assert torch.equal(index, top.indices)
    assert torch.equal(is_finite, top.values.isfinite())
    most = min(3, known, size)
    several = torch.cat([one.maxima(part, known=known, most=3) for one, part in zip(parts, padded, strict=True)], 1)
    assert torch.equal(several.topk(most).values, top_torch(logits_TV[:, :known], most))


@pytest.mark.parametrize(("size", "num_ranks"), [(8, 2), (7, 3), (3, 5)])
def test_every_row_of_a_head_is_on_one_rank(size, num_ranks):
    head_VC = torch.arange(size * 2.0).view(size, 2) + 1
    rows = [one.own_rows(head_VC) for one in divided(size, num_ranks)]
    assert len({part.shape for part in rows}) == 1
    assert torch.equal(torch.cat(rows)[:size], head_VC)
    assert not torch.cat(rows)[size:].any()

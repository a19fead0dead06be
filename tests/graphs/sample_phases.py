"""Phases that tests run: a uniform block and a ragged one, each with a call as attention would make it.

Shape suffixes: R rows, T tokens, Q tokens per row, D width, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from draftloop.graphs.phase import ALL_MODES, GraphMode, Launch, Output, Pad, Phase, Slot, Unit

VOCAB, WIDTH = 31, 8


@functools.cache
def weights(device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    embed, head = torch.randn(VOCAB, WIDTH, generator=generator), torch.randn(WIDTH, VOCAB, generator=generator)
    return embed.to(device), head.to(device)


def block_phase(name: str = "block", tokens_per_row: int = 3, *, device: str = "cpu", **options: Any) -> Phase:
    """Every row brings as many tokens; logits of all, scaled per row, and the best id of each row's last."""
    embed_VD, head_DV = weights(device)

    def block(launch: Launch, ids: Tensor, scale: Tensor) -> dict[str, Tensor]:
        x_RQD = embed_VD[ids].view(launch.rows, tokens_per_row, WIDTH)
        summed_RQD = torch.empty_like(x_RQD)
        launch.attend(lambda: summed_RQD.copy_(x_RQD.cumsum(1)))
        logits_RQV = torch.tanh(summed_RQD) @ head_DV * scale[:, None, None]
        return {"logits": logits_RQV.flatten(0, 1), "best": logits_RQV[:, -1].argmax(-1).int()}

    return Phase(
        name=name,
        fn=block,
        slots={
            "ids": Slot(unit=Unit.TOKEN, dtype=torch.int64),
            "scale": Slot(unit=Unit.ROW, dtype=torch.float32, pad=Pad.KEEP),
        },
        outputs={
            "logits": Output(unit=Unit.TOKEN, dtype=torch.float32, shape=(VOCAB,)),
            "best": Output(unit=Unit.ROW, dtype=torch.int32),
        },
        tokens_per_row=tokens_per_row,
        **options,
    )


def ragged_phase(name: str = "ragged", *, device: str = "cpu", **options: Any) -> Phase:
    """Rows of unlike lengths; the sum of each row's tokens (attention reads no other row's)."""
    embed_VD, _ = weights(device)

    def ragged(launch: Launch, ids: Tensor, query_starts: Tensor) -> dict[str, Tensor]:
        x_TD = embed_VD[ids]
        total_TD = torch.empty_like(x_TD)
        launch.attend(lambda: torch.cumsum(x_TD, 0, out=total_TD))
        padded_TD = torch.nn.functional.pad(total_TD, (0, 0, 1, 0))
        return {"sums": padded_TD[query_starts[1:]] - padded_TD[query_starts[:-1]]}

    return Phase(
        name=name,
        fn=ragged,
        slots={
            "ids": Slot(unit=Unit.TOKEN, dtype=torch.int64),
            "query_starts": Slot(unit=Unit.ROW_BOUND, dtype=torch.int32, pad=Pad.LAST),
        },
        outputs={"sums": Output(unit=Unit.ROW, dtype=torch.float32, shape=(WIDTH,))},
        tokens_per_row=None,
        **options,
    )


def simple_phase(
    name: str = "double", *, fn=None, pad: Pad = Pad.ZERO, tokens_per_row: int | None = 1, **options: Any
) -> Phase:
    """`y = 2 x` per row, or `fn`."""
    return Phase(
        name=name,
        fn=fn or (lambda launch, x: {"y": x * 2}),
        slots={"x": Slot(unit=Unit.ROW, dtype=torch.float32, pad=pad)},
        outputs={"y": Output(unit=Unit.ROW, dtype=torch.float32)},
        tokens_per_row=tokens_per_row,
        **options,
    )


def modes(*names: str) -> frozenset[GraphMode]:
    return frozenset(GraphMode(name) for name in names) if names else ALL_MODES

"""What an iteration's exchange between ranks takes: every collective that its graph holds, timed by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from draftloop.distributed.group import Exchange
from draftloop.engine.llm import LLM
from draftloop.engine.worker import Worker
from draftloop.graphs.program import Attend

CALLS = 64
"""In one graph, each waiting for the one before, as in a model."""


def exchange_rows(llm: LLM, rows: int, chain: str | None) -> list[dict[str, Any]]:
    """A row `exchange_us` for each kind and size, and `exchange_ms`, what all of an iteration take; none alone."""
    exchanged = llm.engine.table.exchanged(chain, rows) if chain else {}
    if not exchanged:
        return []
    worker, dtype = llm.engine.core.worker, llm.engine.resolved.dtype
    worker.order_after_loop()
    us = {one: worker.everywhere(time_exchange, one, dtype) for one in sorted(exchanged)}
    each = [
        {
            "metric": "exchange_us",
            "batch": rows,
            "exchange": kind,
            "bytes": size,
            "runs": count,
            "value": us[kind, size],
        }
        for (kind, size), count in sorted(exchanged.items())
    ]
    return [*each, {"metric": "exchange_ms", "batch": rows, "value": round(_total_ms(exchanged, us), 4)}]


def _total_ms(exchanged: Mapping[Exchange, int], us: Mapping[Exchange, float]) -> float:
    return sum(count * us[one] for one, count in exchanged.items()) / 1e3


def time_exchange(worker: Worker, exchange: Exchange, dtype: str) -> float:
    """Microseconds of one collective, where many follow one another in a captured graph."""
    kind, size = exchange
    group, kept = worker.table.group, getattr(torch, dtype)
    x = torch.zeros(1, size // kept.itemsize, dtype=kept, device=worker.device)

    def body(attend: Attend) -> None:
        y = x
        for _ in range(CALLS):
            y = group.all_reduce(y) if kind == "sum" else group.all_gather(y, -1)[:, : x.shape[1]]

    program = worker.table.recorder.record(body, piecewise=False)
    times = [worker.table.recorder.time_ms(program) for _ in range(3)]
    return round(min(times) / CALLS * 1e3, 2)

"""A line about speed and speculation every few seconds, while there is something to say."""

from __future__ import annotations

import asyncio
import time

from draftloop.observability import log
from draftloop.server.client import EngineClient
from draftloop.server.messages import Counters

EVERY_S = 10.0

logger = log.get_logger(__name__)


async def log_stats(client: EngineClient) -> None:
    """Until cancelled."""
    before, then = client.counters, time.monotonic()
    while True:
        await asyncio.sleep(EVERY_S)
        now, counters = time.monotonic(), client.counters
        if counters.generated_tokens != before.generated_tokens or counters.num_running or counters.num_waiting:
            num_pages = client.num_pages
            for line in stats_lines(before, counters, seconds=now - then, num_pages=num_pages):
                logger.info("%s", line)
        before, then = counters, now


def stats_lines(before: Counters, after: Counters, *, seconds: float, num_pages: int) -> list[str]:
    """What happened between two counts; a second line where something was drafted."""
    prompt = (after.prompt_tokens - before.prompt_tokens) / seconds
    tokens = (after.generated_tokens - before.generated_tokens) / seconds
    usage = after.num_pages_in_use / num_pages
    lines = [
        f"Prompt throughput: {prompt:.1f} tokens/s, generation throughput: {tokens:.1f} tokens/s, running: "
        f"{after.num_running}, waiting: {after.num_waiting}, KV cache usage: {usage:.1%}"
    ]
    steps = after.num_spec_steps - before.num_spec_steps
    if steps:
        drafted = after.num_draft_tokens - before.num_draft_tokens
        accepted = after.num_accepted_tokens - before.num_accepted_tokens
        old = before.accepted_per_position or [0] * len(after.accepted_per_position)
        rates = [(new - known) / steps for new, known in zip(after.accepted_per_position, old, strict=True)]
        lines.append(
            f"Speculation: mean acceptance length {1 + accepted / steps:.2f}, accepted {accepted} of {drafted} drafts "
            f"({accepted / drafted:.1%}), per position {', '.join(f'{rate:.3f}' for rate in rates)}"
        )
    return lines

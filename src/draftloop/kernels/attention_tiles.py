"""How the attention kernel is launched: tiles and splits, chosen from captured shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

from draftloop.kernels.triton_import import next_power_of_2

MAX_SPLITS = 16
MAX_FIXED_SPLITS = 8
"""Where prompts are split as decoding rows are; each takes memory for partial results of all of their tokens."""
LEAST_FIXED_SPLIT = 512
"""Keys."""
LONG_ROWS, LONG_ROWS_SPLITS = 4096, 8
"""From so many keys on that a row may have, up to so many splits of it read more keys at a time."""
CTAS_PER_SM = 2
"""How many programs an SM holds at once with the tiles below; also what hides the latency of loads."""


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Launch parameters, a function of captured shapes only."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    num_blocks: int
    num_splits: int
    split_blocks: int = 0
    """Blocks of keys in each split; 0: a row's keys are shared out evenly."""


def choose_tiles(
    *,
    num_tokens: int,
    num_rows: int,
    query_len: int,
    group: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    max_keys: int,
    num_sms: int,
    kv_itemsize: int = 0,
    invariant: bool = False,
) -> Tiles:
    """Static tile sizes and split count. `query_len` 0 means ragged; `max_keys` bounds any row's length.

    `itemsize`: bytes of an element of the queries, and unless `kv_itemsize` says otherwise of the keys.

    `invariant`: nothing that sums depend on follows from the batch.
    """
    many_keys = kv_itemsize == 1 and query_len > 0 and not invariant  # of one byte: more of them at a time
    packed = (query_len or max(1, num_tokens // num_rows)) * group
    if itemsize == 4:
        # no tensor core multiplies fp32 exactly, and the registers hold no larger tiles
        limit, block_n, num_stages = 16, 16, 2
    elif head_dim > 256:
        limit, block_n, num_stages = 32, 32, 2
    elif head_dim > 128:
        limit, block_n, num_stages = 64, 32, 2
    else:
        limit, block_n, num_stages = 64 if query_len else 128, 128 if many_keys else 64, 3
    if invariant:
        limit = packed = min(limit, 64)
    block_m = max(16, next_power_of_2(group), min(limit, next_power_of_2(packed)))
    num_warps = 8 if block_m * next_power_of_2(head_dim) >= 128 * 128 else 4

    block_q = block_m // group
    # ragged: every row, and the tokens past the last one, may end in a block that is not full
    num_blocks = num_rows * -(-query_len // block_q) if query_len else num_tokens // block_q + num_rows + 1
    if invariant:
        least = -(-max_keys // (MAX_FIXED_SPLITS * block_n))
        split_blocks = max(LEAST_FIXED_SPLIT // block_n, least)
        return Tiles(
            block_m=block_m,
            block_n=block_n,
            num_warps=num_warps,
            num_stages=num_stages,
            num_blocks=num_blocks,
            num_splits=max(1, -(-max_keys // (split_blocks * block_n))),
            split_blocks=split_blocks,
        )
    room = num_sms * CTAS_PER_SM // max(1, num_blocks * num_kv_heads)
    most = MAX_SPLITS if many_keys else LONG_ROWS_SPLITS if max_keys >= LONG_ROWS else 1
    if query_len and room > most:
        block_n = min(block_n, 32)  # few programs: the sooner each has its first keys, the better
    num_splits = max(1, min(room, MAX_SPLITS, -(-max_keys // block_n)))
    return Tiles(
        block_m=block_m,
        block_n=block_n,
        num_warps=num_warps,
        num_stages=num_stages,
        num_blocks=num_blocks,
        num_splits=num_splits,
    )

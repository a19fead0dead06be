"""Layers of plain weights, and the tiles that `sweep_wide` tries for them: those that should be fastest.

Shape suffixes: T tokens, N output columns, K input columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from draftloop.bench.kernels import BYTES_PER_SECOND, DTYPE, OPERATIONS_PER_SECOND
from draftloop.kernels.linear import MAX_TOKENS, Tiles
from draftloop.kernels.linear import SHARED_BYTES as TILES_SHARED_BYTES
from draftloop.kernels.linear_multicast import MulticastTiles
from draftloop.kernels.linear_wide import AnyTiles, Kind, WideTiles, token_parts
from draftloop.kernels.triton_import import next_power_of_2

NUM_SMS = 132
SHARED_BYTES = 227 << 10
L2_BYTES_PER_SECOND = 6.5e12
SM_BYTES_PER_SECOND = 90e9
"""From L2. Both are guesses, which only rank candidates."""
SHAPES, ALIKE = 5, 2
"""Of few tokens: tiles of so many shapes are tried, and so many that split K alike."""
BESIDE_KB, HALF_KB = 192, 113
"""Of shared memory for a block that leaves room for small programs beside it, and for two on a multiprocessor."""

Found: TypeAlias = AnyTiles | Tiles


class Layer(NamedTuple):
    name: str
    columns: int
    size: int
    kinds: tuple[Kind, ...]

    @property
    def role(self) -> str:
        """Its name without its model's."""
        return self.name.rpartition(".")[2]


SPLIT, WHOLE, GATED = (Kind.SUMS, Kind.PLAIN), (Kind.PLAIN,), (Kind.GATED, Kind.PLAIN)
LAYERS = [
    Layer("gate_up", 28672, 4096, GATED),
    Layer("down", 4096, 14336, SPLIT),
    Layer("qkv", 6144, 4096, SPLIT),
    Layer("o", 4096, 4096, SPLIT),
    Layer("lm_head", 128256, 4096, WHOLE),
    # a draft model of 1B parameters
    Layer("1b.gate_up", 16384, 2048, GATED),
    Layer("1b.down", 2048, 8192, SPLIT),
    Layer("1b.qkv", 3072, 2048, SPLIT),
    Layer("1b.o", 2048, 2048, SPLIT),
    # a draft head over the hidden states of three layers; its other layers are as those of the 8B shape
    Layer("head.fc", 4096, 12288, WHOLE),
    Layer("head.qkv", 6144, 8192, SPLIT),
    Layer("head.lm_head", 32000, 4096, WHOLE),
]


def candidates(layer: Layer, tokens: int, kind: Kind, limit: int) -> list[Found]:
    """Of each kernel that takes so many tokens, the tiles that should be fastest, `limit` or some more."""
    if tokens > MAX_TOKENS:
        return [*wide_candidates(layer, tokens, kind, limit), *multicast_candidates(layer, tokens, kind, limit)]
    return [*few_candidates(layer, tokens, kind, limit), *few_multicast_candidates(layer, tokens, kind)]


def estimate_us(layer: Layer, tokens: int, kind: Kind, tiles: WideTiles, per_sm: int) -> float:
    """Roughly how long a layer takes with so many programs on an SM at once."""
    blocks, first, second = token_parts(tokens, tiles.max_tokens)
    part = first + second
    programs = blocks * -(-layer.columns // tiles.block_n) * tiles.splits
    waves, active = -(-programs // (NUM_SMS * per_sm)), min(programs, NUM_SMS * per_sm)
    depth = layer.size / tiles.splits
    operations, num_bytes = (2 * tiles.block_n * part * depth, (tiles.block_n + part) * depth * DTYPE.itemsize)
    rate = min(L2_BYTES_PER_SECOND / active, SM_BYTES_PER_SECOND / per_sm)
    seconds = waves * max(operations * NUM_SMS * per_sm / OPERATIONS_PER_SECOND, num_bytes / rate)
    if kind is Kind.SUMS:
        seconds += 2 * 4 * tiles.splits * tokens * layer.columns / L2_BYTES_PER_SECOND
    return max(seconds, layer.columns * layer.size * DTYPE.itemsize / BYTES_PER_SECOND) * 1e6


def num_stages(block_n: int, block_k: int, part: int, warps: int, per_sm: int) -> int:
    """The deepest pipeline that so many programs on an SM have room for; 0: they do not fit."""
    registers = (block_n * part // (32 * warps) + 48) * 32 * warps
    if registers * per_sm > 65536 or registers > 255 * 32 * warps:
        return 0
    return min(6, (SHARED_BYTES // per_sm - 1024) // ((block_n + part) * block_k * DTYPE.itemsize))


def wide_candidates(layer: Layer, tokens: int, kind: Kind, limit: int) -> list[WideTiles]:
    found: dict[tuple, tuple[float, WideTiles]] = {}
    shapes = ((64, 4, 1), (64, 4, 2), (128, 8, 1), (128, 4, 1), (128, 4, 2), (256, 8, 1))
    grid = itertools.product(shapes, (64, 128), (64, 96, 128, 160, 192, 256), range(1, 9))
    for (block_n, warps, per_sm), block_k, max_tokens, splits in grid:
        if (splits > 1 and kind is not Kind.SUMS) or (kind is Kind.GATED and block_n < 128):
            continue
        parts = token_parts(tokens, max_tokens)
        stages = num_stages(block_n, block_k, parts.first + parts.second, warps, per_sm)
        if stages >= (2 if block_k == 64 and per_sm == 2 else 3):
            tiles = WideTiles(block_n, block_k, splits, max_tokens, warps, stages)
            key = (*tiles._replace(max_tokens=0), parts)  # several limits come to the same launch
            # long blocks have half the loop's overhead, and a tail twice as long
            slower = 1.03 if block_k == 128 or (block_n, warps, per_sm) == (128, 4, 1) else 1.0
            found.setdefault(key, (slower * estimate_us(layer, tokens, kind, tiles, per_sm), tiles))
    return [tiles for _, tiles in sorted(found.values())[:limit]]


def multicast_candidates(layer: Layer, tokens: int, kind: Kind, limit: int) -> list[MulticastTiles]:
    found: dict[tuple, tuple[float, int, MulticastTiles]] = {}
    shapes = itertools.product((96, 128, 192, 224, 256), range(1, 9), (False, True), (3, 4, 5, 6), (128, 192, 256))
    for rows, splits, weights_first, token_slots, max_tokens in shapes:
        tiles = MulticastTiles(rows, splits, 2, weights_first, token_slots, max_tokens)
        if (weights_first and rows != 128) or not tiles.fits(tokens, layer.columns, layer.size, kind):
            continue
        blocks, padded = tiles.blocks(tokens), tiles.padded(tokens)
        key = (*tiles._replace(max_tokens=0), blocks)  # several limits come to the same launch
        depth = min(token_slots, tiles.weight_slots(tokens))
        found.setdefault(key, (multicast_us(layer, tokens, tiles, blocks, padded), -depth, tiles))
    return [tiles for *_, tiles in sorted(found.values())[:limit]]


def multicast_us(layer: Layer, tokens: int, tiles: MulticastTiles, blocks: int, padded: int) -> float:
    """Roughly how long a layer takes: its operations in waves, or its bytes through L2; and its sums."""
    programs = layer.columns // tiles.rows * tiles.splits * blocks
    depth = layer.size / tiles.splits
    rows, columns = (tiles.rows, padded / tiles.cluster) if blocks == 1 else (tiles.rows / tiles.cluster, padded)
    operations = -(-programs // NUM_SMS) * NUM_SMS * 2 * tiles.rows * padded * depth
    moved = programs * (rows + columns) * depth * DTYPE.itemsize
    seconds = max(operations / OPERATIONS_PER_SECOND, moved / L2_BYTES_PER_SECOND)
    if tiles.splits > 1:
        seconds += 2 * 4 * tiles.splits * tokens * layer.columns / L2_BYTES_PER_SECOND
    return seconds * 1e6


def few_candidates(layer: Layer, tokens: int, kind: Kind, limit: int) -> list[Tiles]:
    """Of `linear`; layers that a norm follows may be split, and are."""
    if kind is Kind.GATED or (kind is Kind.PLAIN and layer.role in ("o", "down")):
        return []
    found, part = [], max(16, next_power_of_2(tokens))
    splits = (2, 4, 8) if kind is Kind.SUMS else (1,)
    for options in itertools.product((16, 32, 64, 128), (128, 256), splits, (4, 8), (3, 4, 5)):
        tiles = Tiles(*options)
        programs = -(-layer.columns // tiles.block_n) * tiles.splits
        shared = (tiles.block_n + part) * tiles.block_k * DTYPE.itemsize * tiles.num_stages
        if layer.size % (tiles.block_k * tiles.splits) == 0 and shared <= TILES_SHARED_BYTES and programs >= 96:
            # what has been fastest: 4 warps, 32 to 128 KB under way, programs for each multiprocessor once or twice
            many = programs > (300 if kind is Kind.SUMS else 600)
            unlikely = (tiles.num_warps != 4) + (not 32 << 10 <= shared <= 128 << 10) + many
            found.append((unlikely, (4, 5, 3).index(tiles.num_stages), -tiles.block_n, tiles))
    return [tiles for *_, tiles in sorted(found)[:limit]]


def few_multicast_candidates(layer: Layer, tokens: int, kind: Kind) -> list[MulticastTiles]:
    """Tiles in one wave, or two on each multiprocessor, that should be fastest, each in a few ways."""
    if kind is Kind.PLAIN and Kind.GATED in layer.kinds:
        return []
    found = []
    shapes = itertools.product((48, 64, 96, 112, 128, 192, 224, 256), (1, 2, 3, 4, 5, 6, 8), (False, True))
    for rows, splits, weights_first in shapes:
        tiles = MulticastTiles(rows, splits, 1, weights_first, 6)
        programs = layer.columns // rows * splits
        if programs > NUM_SMS:
            tiles = tiles._replace(shared_kb=HALF_KB, token_slots=3)
        if 84 <= programs <= 2 * NUM_SMS and tiles.fits(tokens, layer.columns, layer.size, kind):
            found.append((few_multicast_us(layer, tokens, tiles, programs), tiles))
    chosen: list[MulticastTiles] = []
    for _, tiles in sorted(found):
        alike = sum(other.splits == tiles.splits for other in chosen)
        if len(chosen) < SHAPES and (alike < ALIKE or layer.kinds != SPLIT):
            chosen.append(tiles)
    variants = itertools.chain.from_iterable(map(_variants, chosen))
    return [tiles for tiles in variants if tiles.fits(tokens, layer.columns, layer.size, kind)]


def few_multicast_us(layer: Layer, tokens: int, tiles: MulticastTiles, programs: int) -> float:
    """Roughly how long a layer takes: its bytes from memory, as evenly as multiprocessors have them, or through L2."""
    weights = layer.columns * layer.size * DTYPE.itemsize
    per_sm = -(-programs // NUM_SMS) / (programs / NUM_SMS)
    moved = weights * (1 + tiles.padded(tokens) / 2 / tiles.rows)  # in pairs
    sums = 2 * 4 * tiles.splits * tokens * layer.columns if tiles.splits > 1 else 0
    # three quarters of the multiprocessors still ask for all that memory has
    memory, l2 = weights * max(1.0, 0.75 * per_sm) / BYTES_PER_SECOND, moved * per_sm / L2_BYTES_PER_SECOND
    return (max(memory, l2) + 0.1 * min(memory, l2) + sums / L2_BYTES_PER_SECOND) * 1e6


def _variants(tiles: MulticastTiles) -> Iterator[MulticastTiles]:
    """Most important first."""
    yield tiles
    yield tiles._replace(cluster=2)
    if tiles.shared_kb > BESIDE_KB:
        yield tiles._replace(shared_kb=BESIDE_KB)
        yield tiles._replace(cluster=2, shared_kb=BESIDE_KB)
    yield tiles._replace(token_slots=3 if tiles.token_slots > 3 else 4)

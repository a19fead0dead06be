"""Which tiles are fastest for mixtures of experts: what `kernels.moe_experts.MEASURED` is made of.

    python -m draftloop.bench.sweep_experts --out experts.json        # on the GPU; keeps what it has if cut off
    python -m draftloop.bench.sweep_experts --entries experts.json    # anywhere: the table's entries

Tokens are routed anew for every call, so that experts are read from memory and not from L2. Results are compared with
the reference's first: what is wrong is listed and cannot win.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftloop.bench.kernels import BYTES_PER_SECOND, DTYPE, OPERATIONS_PER_SECOND, time_us
from draftloop.bench.quantised_candidates import IN_FLIGHT, NUM_SMS, SHARED_BYTES
from draftloop.bench.sweep_report import SweepReport, attempting, gpu, usable
from draftloop.kernels.linear import Tiles
from draftloop.kernels.moe_experts import choose, down_triton, experts_torch, gate_up_triton
from draftloop.kernels.moe_route import Router, Routes, route_triton

REROUTED = 12
"""Calls in a row, each with other tokens."""


class Mixture(NamedTuple):
    name: str
    num_experts: int
    size: int
    inner: int
    num_per_token: int
    few: tuple[int, ...]
    """Numbers of tokens for which experts get few each; tiles serve all of them."""
    many: int


MIXTURES = [
    Mixture("qwen3-30b-a3b", 128, 2048, 768, 8, (1, 6, 48), 512),
    Mixture("mixtral-8x7b", 8, 4096, 14336, 2, (1, 6), 192),
]


class Layer(NamedTuple):
    """One of the two kernels."""

    mixture: Mixture
    gated: bool
    tall: bool
    """For many tokens per expert."""

    @property
    def columns(self) -> int:
        return self.mixture.inner if self.gated else self.mixture.size

    @property
    def size(self) -> int:
        return self.mixture.size if self.gated else self.mixture.inner

    @property
    def halves(self) -> int:
        return 2 if self.gated else 1

    @property
    def tokens(self) -> tuple[int, ...]:
        return (self.mixture.many,) if self.tall else self.mixture.few

    def now(self) -> tuple[int, Tiles]:
        """The tiles that serve."""
        return choose(self.columns, self.size, gated=self.gated, tall=self.tall)


LAYERS = [Layer(mixture, gated, tall) for tall in (False, True) for mixture in MIXTURES for gated in (True, False)]


def candidates(layer: Layer) -> list[tuple[int, Tiles]]:
    """Those that serve now, then others, four stages deep and as deep as keeps memory busy with one token's experts.

    Compiled for sm_90 none of them spills, all read ahead, and those for many tokens use wgmma.
    """
    if layer.tall:
        shapes = [(64, 64, 64, 4), (64, 128, 64, 8), (128, 64, 64, 8), (128, 128, 64, 8)]
        shapes += [] if layer.gated else [(64, 256, 64, 8), (128, 256, 64, 8)]
    elif layer.gated:
        shapes = [(16, n, k, w) for n, k, w in ((16, 128, 2), (16, 256, 2), (32, 128, 4), (32, 256, 4), (64, 128, 4))]
    else:
        shapes = [(16, n, k, w) for n, k, w in ((32, 128, 4), (32, 256, 4), (64, 128, 4), (64, 256, 4), (128, 128, 4))]
    found = [layer.now()]
    for block_m, block_n, block_k, warps in shapes:
        tile_bytes = layer.halves * block_n * block_k * DTYPE.itemsize
        room = SHARED_BYTES // (tile_bytes + block_m * block_k * DTYPE.itemsize)
        per_sm = max(1, -(-layer.columns // block_n) * layer.mixture.num_per_token / NUM_SMS)
        deep = 2 + math.ceil(2 * IN_FLIGHT / per_sm / tile_bytes)
        for stages in sorted({min(stages, room, layer.size // block_k + 1) for stages in (4, deep)}):
            if layer.size % block_k == 0 and stages >= 3:
                found.append((block_m, Tiles(block_n, block_k, 1, warps, stages)))
    return list(dict.fromkeys(found))


class Weights(NamedTuple):
    gate_up_E2IC: Tensor
    down_ECI: Tensor


def weights_of(mixture: Mixture, device: torch.device) -> Weights:
    experts, size, inner = mixture.num_experts, mixture.size, mixture.inner
    gate_up_E2IC = torch.randn(experts, 2 * inner, size, dtype=DTYPE, device=device) * size**-0.5
    return Weights(gate_up_E2IC, torch.randn(experts, size, inner, dtype=DTYPE, device=device) * inner**-0.5)


def routed(mixture: Mixture, tokens: int, device: torch.device) -> Routes:
    router = Router(mixture.num_per_token, True, 0, mixture.num_experts)
    return route_triton(torch.randn(tokens, mixture.num_experts, dtype=DTYPE, device=device), router)


def launch(layer: Layer, tiles: tuple[int, Tiles], x: Tensor, weights: Weights, routes: Routes) -> Tensor:
    if layer.gated:
        return gate_up_triton(x, weights.gate_up_E2IC, routes, *tiles)
    return down_triton(x, weights.down_ECI, routes, *tiles)


def error(layer: Layer, tiles: tuple[int, Tiles], tokens: int, weights: Weights) -> float:
    """Of both kernels, the other one with the tiles that serve."""
    device, routes = weights.down_ECI.device, routed(layer.mixture, tokens, weights.down_ECI.device)
    other = layer._replace(gated=not layer.gated).now()
    gate_up, down = (tiles, other) if layer.gated else (other, tiles)
    x = torch.randn(tokens, layer.mixture.size, dtype=DTYPE, device=device)
    out = down_triton(gate_up_triton(x, weights.gate_up_E2IC, routes, *gate_up), weights.down_ECI, routes, *down)
    expected = experts_torch(x, *weights, routes)
    return float((out - expected).norm() / expected.norm())


def compile_one(layer: Layer, tiles: tuple[int, Tiles], weights: Weights, routes: Routes) -> None:
    """By a launch, from any thread."""
    rows = 1 if layer.gated else layer.mixture.num_per_token
    x = torch.zeros(rows, layer.size, dtype=DTYPE, device=weights.down_ECI.device)
    launch(layer, tiles, x, weights, routes)


@torch.inference_mode()
def measure(layer: Layer, compiled: dict[tuple[int, Tiles], Future[None]], weights: Weights) -> dict[str, Any]:
    """The times of each candidate, fastest first."""
    mixture, device, results = layer.mixture, weights.down_ECI.device, []
    calls = {}
    for tokens in layer.tokens:
        rows = tokens if layer.gated else tokens * mixture.num_per_token
        x = torch.randn(rows, layer.size, dtype=DTYPE, device=device)
        calls[tokens] = x, [routed(mixture, tokens, device) for _ in range(REROUTED)]
    for tiles, future in compiled.items():
        result: dict[str, Any] = {"block_m": tiles[0], "tiles": list(tiles[1])}
        with attempting(result):
            future.result()
            result["error"] = error(layer, tiles, layer.tokens[-1], weights)
            result["us"] = {
                tokens: time_us(
                    [
                        lambda x=x, routes=routes, tiles=tiles: launch(layer, tiles, x, weights, routes)
                        for routes in every
                    ],
                    min_calls=REROUTED,
                    repeats=7,
                )[0]
                for tokens, (x, every) in calls.items()
            }
        results.append(result)
    floors = {tokens: floor_us(layer, tokens, every) for tokens, (_, every) in calls.items()}
    results.sort(key=lambda result: sum(us / floors[tokens] for tokens, us in result.get("us", {0: math.inf}).items()))
    names = {"model": mixture.name, "layer": "gate_up" if layer.gated else "down"}
    sizes = {"columns": layer.columns, "size": layer.size, "gated": layer.gated, "tall": layer.tall}
    return {**names, **sizes, "floor_us": floors, "results": results}


def floor_us(layer: Layer, tokens: int, every: list[Routes]) -> float:
    numbers = layer.halves * layer.columns * layer.size
    hit = sum(int((routes.groups_G3[:, 2] > 0).sum()) for routes in every) / len(every)
    operations = 2 * tokens * layer.mixture.num_per_token * numbers
    return max(hit * numbers * DTYPE.itemsize / BYTES_PER_SECOND, operations / OPERATIONS_PER_SECOND) * 1e6


def table(row: dict[str, Any]) -> Iterator[str]:
    floors = ", ".join(f"T={tokens} {floor:.1f}" for tokens, floor in row["floor_us"].items())
    yield f"{row['model']} {row['layer']}: floors {floors} us"
    for result in usable(row["results"])[:4]:
        times = ", ".join(f"T={tokens} {us:.1f}" for tokens, us in result["us"].items())
        yield f"    {times} us  {result['block_m']} {Tiles(*result['tiles'])}  error {result['error']:.1e}"
    for result in row["results"]:
        if result not in usable(row["results"]):
            yield f"    {result.get('failed', 'WRONG')}: {result['block_m']} {result['tiles']}"


def entry(row: dict[str, Any]) -> Iterator[str]:
    """Of `MEASURED`: what takes the smallest multiple of the floors."""
    for result in usable(row["results"])[:1]:
        key = (row["columns"], row["size"], row["gated"], row["tall"])
        times = ", ".join(f"{us:.1f} at {tokens}" for tokens, us in result["us"].items())
        yield f"    {key}: ({result['block_m']}, {Tiles(*result['tiles'])}),  # us: {times}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON of results; written anew after every layer")
    parser.add_argument("--entries", type=Path, help="print the entries that such a file makes, and measure nothing")
    parser.add_argument("--seconds", type=float, default=60, help="start no new measurement after this long")
    args = parser.parse_args()
    if args.entries:
        for row in json.loads(args.entries.read_text())["rows"]:
            print(*entry(row), sep="\n")
        return
    report, device = SweepReport(args.out, args.seconds), gpu()
    weights = {mixture: weights_of(mixture, device) for mixture in MIXTURES}
    some_routes = {mixture: routed(mixture, 1, device) for mixture in MIXTURES}
    for tall in (False, True):
        layers = [layer for layer in LAYERS if layer.tall is tall]
        with ThreadPoolExecutor(16) as pool:  # all is compiled before anything is measured
            compiled = {
                layer: {
                    tiles: pool.submit(compile_one, layer, tiles, weights[layer.mixture], some_routes[layer.mixture])
                    for tiles in candidates(layer)
                }
                for layer in layers
            }
        for layer in layers:
            if report.is_late():
                return
            row = measure(layer, compiled[layer], weights[layer.mixture])
            report.add(row, table(row))


if __name__ == "__main__":
    main()

"""What `sweep_quantised` measured: tables, and what they make of the kernels' `MEASURED`.

Rows and results are those of the sweep's JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from draftloop.kernels.linear_planes import PlaneTiles
from draftloop.kernels.linear_wide import Kind, WideTiles
from draftloop.kernels.quantised import Measured, TilesByTokens

LAST = {"few": 8, "some": 64, "many": 256}
"""The number of tokens up to which an entry counts."""


def usable(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [result for result in results if "us" in result and is_right(result)]


def is_right(result: dict[str, Any]) -> bool:
    return result["error"] < result["limit"]


def table(row: dict[str, Any]) -> Iterator[str]:
    yield f"{row['format']:10} {row['layer']:8} T={row['tokens']}  floor {row['floor_us']:6.1f} us"
    for result in usable(row["results"]):
        if "other_us" in result:
            others = ", ".join(f"T={tokens} {us:.1f}" for tokens, us in result["other_us"].items())
            tiles = tuple(result["tiles"])
            yield f"    {result['us']:6.1f} us  {result['name']:12} {tiles}  {others}  error {result['error']:.1e}"
    for result in row["results"]:
        if "error" in result and not is_right(result):
            yield f"    WRONG by {result['error']:.2g}: {result['name']} {result['tiles']}"
    if failed := [result for result in row["results"] if "failed" in result]:
        names = ", ".join(sorted({result["name"] for result in failed}))
        yield f"    {len(failed)} failed ({names}), the first with {failed[0]['failed'][:160]}"


def entries(rows: list[dict[str, Any]], measured: Mapping[str, Measured]) -> Iterator[str]:
    """Of each format and layer the fastest tiles by number of tokens; what was not swept, as it is."""
    for form in dict.fromkeys(row["format"] for row in rows):
        for gpu, layers in with_best(measured.get(form, {"any GPU": {}}), form, rows).items():
            yield f"{form}, {gpu}:"
            for layer, by_tokens in layers.items():
                yield f"    {layer}: {{"
                yield from (f"        {last}: PlaneTiles{tuple(tiles)}," for last, tiles in by_tokens.items())
                yield "    },"
        for row in rows:
            if row["format"] == form and (wide := fastest(row, "w8a8")):
                tiles = WideTiles(*wide["tiles"])
                yield f"w8a8: ({row['columns']}, {row['size']}, {row['kind']}): {tiles},  # {wide['us']:.1f} us"


def fastest(row: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The fastest result of a kernel that is called so, if any."""
    return next((result for result in usable(row["results"]) if result["name"].startswith(name)), None)


def key(row: dict[str, Any], result: dict[str, Any]) -> tuple[int, int, bool]:
    """Of a layer in `MEASURED`: N, K, may split."""
    return row["columns"], row["size"], row["kind"] == Kind.SUMS or PlaneTiles(*result["tiles"]).splits > 1


def with_best(measured: Measured, form: str, rows: list[dict[str, Any]]) -> Measured:
    """`MEASURED` of a format, with what these rows found."""
    return {gpu: _with_best(layers, form, rows) for gpu, layers in measured.items()}


def _with_best(
    layers: Mapping[tuple[int, int, bool], TilesByTokens], form: str, rows: list[dict[str, Any]]
) -> dict[tuple[int, int, bool], TilesByTokens]:
    new = dict(layers)
    for row in rows:
        if row["format"] == form and (best := fastest(row, "planes")):
            layer = key(row, best)
            others = new.get(layer) or new.get((*layer[:2], False), {})  # the first that splits leaves the rest whole
            new[layer] = dict(sorted({**others, LAST[row["regime"]]: PlaneTiles(*best["tiles"])}.items()))
    return new

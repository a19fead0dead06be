"""What `sweep_quantised` measured: tables, and what they make of the kernels' `MEASURED`.

Rows and results are those of the sweep's JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from draftloop.kernels.linear_planes import PlaneTiles
from draftloop.kernels.linear_wide import Kind, WideTiles

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


def entries(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Of each format and layer the fastest tiles by number of tokens, all of which must split K alike."""
    for form, layer in dict.fromkeys((row["format"], row["layer"]) for row in rows):
        cells = [row for row in rows if (row["format"], row["layer"]) == (form, layer)]
        by_planes = [row for row in cells if form.startswith("int4") or row["regime"] != "many"]
        alike = [fastest(by_planes, splits) for splits in (1, 2, 4)]
        if whole := [found for found in alike if len(found) == len(by_planes) > 0]:
            columns, size, kind = (cells[0][name] for name in ("columns", "size", "kind"))
            yield f"{form}: ({columns}, {size}, {kind == Kind.SUMS}): {{"
            for regime, result in min(whole, key=lambda found: sum(result["us"] for result in found.values())).items():
                yield f"    {LAST[regime]}: {PlaneTiles(*result['tiles'])},  # {result['us']:.1f} us"
            yield "},"
        for row in cells:
            if wide := [result for result in usable(row["results"]) if result["name"].startswith("w8a8")]:
                tiles = WideTiles(*wide[0]["tiles"])
                yield f"w8a8: ({row['columns']}, {row['size']}, {row['kind']}): {tiles},  # {wide[0]['us']:.1f} us"


def fastest(rows: list[dict[str, Any]], splits: int) -> dict[str, dict[str, Any]]:
    """Regime -> the fastest by planes that splits K so."""
    found = {}
    for row in rows:
        by_planes = (result for result in usable(row["results"]) if result["name"].startswith("planes"))
        if alike := [result for result in by_planes if PlaneTiles(*result["tiles"]).splits == splits]:
            found[row["regime"]] = alike[0]
    return found

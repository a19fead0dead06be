"""What `sweep_wide` measured: tables, and what they make of the kernels' `MEASURED`.

Rows and results are those of the sweep's JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from draftloop.bench import sweep_report
from draftloop.bench.sweep_report import GAIN, complaints
from draftloop.bench.wide_candidates import NUM_SMS
from draftloop.kernels import linear, linear_wide
from draftloop.kernels.linear import FEW_TOKENS, MAX_TOKENS, Tiles
from draftloop.kernels.linear_multicast import MulticastTiles
from draftloop.kernels.linear_wide import AnyTiles, Kind, Range, WideTiles

KERNELS = tuple(tiles.__name__ for tiles in (WideTiles, MulticastTiles, Tiles))
STREAMED_TOKENS = 8
"""Up to so many a pass is mostly one kernel: what was measured for more does not count there."""

WideKey: TypeAlias = tuple[int, int, Kind]
FewKey: TypeAlias = tuple[int, int, bool]


def usable(row: dict[str, Any], *kernels: str, kind: str | None = None) -> list[dict[str, Any]]:
    """Results that are right, fastest first, of these kernels (none: all)."""
    return [
        result
        for result in sweep_report.usable(row["results"])
        if result["kernel"] in (kernels or KERNELS) and kind in (None, result["kind"])
    ]


def table(row: dict[str, Any]) -> Iterator[str]:
    floor, today = row["floor_us"], row["today_us"]
    yield f"{row['layer']:10} T={row['tokens']:<4} floor {floor:7.1f}  today {today:7.1f} us"
    best = [usable(row, kernel)[:1] for kernel in KERNELS]
    shown = [*usable(row)[:3], *(result for found in best for result in found)]
    for r in {id(result): result for result in shown}.values():
        yield f"    {r['us']:7.1f} us {r['us'] / today:5.2f}  {r['kind']:6} {r['kernel']}{tuple(r['tiles'])}"
    yield from complaints(row["results"], lambda r: f"{r['kind']} {r['kernel']}{r['tiles']}")


def wide_entries(rows: list[dict[str, Any]]) -> dict[WideKey, dict[Range, tuple[AnyTiles, str]]]:
    """Of `linear_wide.MEASURED`, with what to say of each. They hold from two thirds of the tokens measured, or from
    the next smaller measurement."""
    found: dict[WideKey, dict[Range, tuple[AnyTiles, str]]] = {}
    before: dict[WideKey, int] = {}
    for row in sorted(rows, key=lambda row: row["tokens"]):
        for kind in sorted({Kind(result["kind"]) for result in row["results"]}):
            key, tokens = (row["columns"], row["size"], kind), row["tokens"]
            first = max(before.get(key, STREAMED_TOKENS) + 1, tokens * 2 // 3)
            before[key] = tokens
            best = usable(row, "WideTiles", "MulticastTiles", kind=kind)[:1]
            if best and best[0]["us"] < GAIN * row["today_us"] and not _is_beaten(best[0], row):
                kernel = WideTiles if best[0]["kernel"] == "WideTiles" else MulticastTiles
                tiles = kernel(*best[0]["tiles"])
                said = f"{best[0]['us']:.1f} us, without {row['today_us']:.1f}"
                found.setdefault(key, {})[Range(first, tokens)] = tiles, said
    return found


def _is_beaten(result: dict[str, Any], row: dict[str, Any]) -> bool:
    """Of few tokens by another kernel, or by K whole or split: where both have entries, one is not used."""
    return row["tokens"] <= MAX_TOKENS and usable(row)[0] is not result


def few_entries(rows: list[dict[str, Any]]) -> dict[FewKey, tuple[Tiles, Tiles]]:
    """Of `linear.MEASURED`: what is fastest of that kernel at the most tokens up to FEW_TOKENS, and above.

    A projection to q, k and v is split only where there is an entry: one half alone would split the other unmeasured.
    """
    found: dict[FewKey, list[Tiles]] = {}
    halves: dict[FewKey, set[bool]] = {}
    for row in sorted(rows, key=lambda row: row["tokens"]):
        best = usable(row, "Tiles")[:1]
        if best and best[0]["us"] < GAIN * row["today_us"]:
            key = (row["columns"], row["size"], best[0]["kind"] == Kind.SUMS)
            few, more = (linear.choose(*key[:2], NUM_SMS, may_split=key[2], few=few) for few in (True, False))
            pair = found.setdefault(key, [few, more])
            pair[row["tokens"] > FEW_TOKENS] = Tiles(*best[0]["tiles"])
            halves.setdefault(key, set()).add(row["tokens"] > FEW_TOKENS)
            if not row["layer"].endswith("qkv") or key in linear.MEASURED:
                halves[key] = {False, True}
    return {key: (few, more) for key, (few, more) in found.items() if len(halves[key]) == 2}


def in_short(value: tuple) -> str:
    """A named tuple as tables have it."""
    return f"{type(value).__name__}{tuple(value)}"


def entries(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Lines of the tables."""
    yield "# kernels/linear_wide.py"
    for (columns, size, kind), ranges in sorted(wide_entries(rows).items()):
        yield f"({columns}, {size}, Kind.{kind.name}): {{"
        yield from (f"    {in_short(reach)}: {in_short(tiles)},  # {said}" for reach, (tiles, said) in ranges.items())
        yield "},"
    yield "# kernels/linear.py"
    for key, pair in sorted(few_entries(rows).items()):
        yield f"{key}: ({', '.join(map(in_short, pair))}),"


def set_best(rows: list[dict[str, Any]], gpu: str) -> None:
    """Have the engine serve with what these rows found, in this process."""
    measured = linear_wide.MEASURED.setdefault(gpu, {})
    for key, ranges in wide_entries(rows).items():
        # the first that holds counts
        measured[key] = {reach: tiles for reach, (tiles, _) in ranges.items()} | measured.get(key, {})
    linear.MEASURED.update(few_entries(rows))
    linear.choose.cache_clear()  # it was asked for what an entry leaves as it is
